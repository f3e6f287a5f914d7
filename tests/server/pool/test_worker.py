"""A worker gives what the auditor gives, and keeps traces beside reconstructions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedgauge.attacks.base import Wave
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.source import FederationSource
from fedgauge.client.federation import Federation
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.pool.worker import Task, attack_wave
from tests.server.pool.score_rows import score_rows

IG = {"use": "inverting_gradients", "iterations": 4}


def test_a_worker_gives_what_the_auditor_gives(kit: Any, tmp_path: Path) -> None:
    """Tensors and JSON lose nothing on the way."""
    scenario = kit.scenario(attack=[IG])
    run = kit.make_run(tmp_path / "run", scenario)
    wave = Wave.stack([run.tape().read(1, c) for c in (0, 3)])
    planned = scenario.plan.attacks[0]
    task = Task(scenario.protocol.to_json(), planned.to_json(), 3, wave, {0: 3})
    outcome = attack_wave(task)
    expected = Auditor(FederationSource(Federation(scenario.protocol)), 3).audit(planned, wave, {0: 3})
    for one, other in zip(outcome.audited, expected, strict=True):
        assert torch.equal(one.reconstruction.x, other.reconstruction.x)
        assert [replace(r, seconds=0.0) for r in one.rows] == [replace(r, seconds=0.0) for r in other.rows]
    told = {one.client: {row.attack for row in one.rows} for one in outcome.audited}
    assert told == {0: {IG["use"], f"wrong_client({IG['use']})"}, 3: {IG["use"]}}


def test_a_trace_is_kept_in_the_reconstructions_file_and_changes_no_score(kit: Any, tmp_path: Path) -> None:
    plain, traced = (
        kit.make_run(tmp_path / name, kit.scenario(attack=[{**IG, **more}]))
        for name, more in (("plain", {}), ("traced", {"trace": 3}))
    )
    for run in (plain, traced):
        serve(run, LocalExecutor())
    assert score_rows(plain) == score_rows(traced)
    assert set(plain.read_reconstruction(1, 2, "inverting_gradients")) == {"x", "y"}
    kept = traced.read_reconstruction(1, 2, "inverting_gradients")
    assert set(kept) == {"x", "y", "trace_iteration", "trace_objective", "trace_x"}
    assert kept["trace_iteration"].tolist() == [0, 2, 4]
    assert (kept["trace_objective"].shape, kept["trace_objective"].dtype) == ((3,), torch.float64)
    assert (kept["trace_x"].shape, kept["trace_x"].dtype) == ((3, 2, 1, 28, 28), torch.uint8)
    torch.testing.assert_close(kept["trace_x"][-1], (kept["x"] * 255).round().to(torch.uint8), rtol=0, atol=1)
    assert set(traced.read_reconstruction(1, 2, "mean_image")) == {"x"}
