"""A worker gives what the auditor gives."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedgauge.attacks.base import Wave
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.source import FederationSource
from fedgauge.client.federation import Federation
from fedgauge.server.pool.worker import Task, attack_wave

IG = {"use": "inverting_gradients", "iterations": 4}


def test_a_worker_gives_what_the_auditor_gives(kit: Any, tmp_path: Path) -> None:
    """Tensors and JSON lose nothing on the way."""
    scenario = kit.scenario(attack=[IG])
    run = kit.make_run(tmp_path / "run", scenario)
    wave = Wave.stack([run.tape().read(1, c) for c in (0, 3)])
    planned = scenario.plan.attacks[0]
    task = Task(scenario.protocol.to_json(), planned, 3, wave, {0: 3})
    outcome = attack_wave(task)
    expected = Auditor(FederationSource(Federation(scenario.protocol)), 3).audit(planned, wave, {0: 3})
    for one, other in zip(outcome, expected, strict=True):
        assert torch.equal(one.reconstruction.x, other.reconstruction.x)
        assert [replace(r, seconds=0.0) for r in one.rows] == [replace(r, seconds=0.0) for r in other.rows]
    told = {one.client: {row.attack for row in one.rows} for one in outcome}
    assert told == {0: {IG["use"], f"wrong_client({IG['use']})"}, 3: {IG["use"]}}
