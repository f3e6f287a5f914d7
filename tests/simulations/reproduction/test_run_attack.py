"""Attacks on a setup: waves, knowledge and floors."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedgauge.attacks.base import Wave
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.modality.image_metrics import PSNR_CAP
from fedgauge.attacks.source import FederationSource
from fedgauge.simulations.reproduction.paper_table_files import restrict, with_submissions
from fedgauge.simulations.reproduction.reproduce import reproduce
from fedgauge.simulations.reproduction.run_attack import compared_figures, run_attack
from fedgauge.simulations.reproduction.setups import build_setup
from tests.simulations.reproduction.small_tables import (
    ANALYTIC,
    SGD,
    only,
    paper_table,
    truth_of,
)


def test_how_updates_are_packed_into_waves_changes_rounding_only() -> None:
    matching = {"name": "ig", "use": "inverting_gradients", "iterations": 5}
    cell = only(paper_table(cell={"attack": [matching], "model": {"use": "lenet"}}))
    setup = build_setup(cell, 0)
    whole, split = (run_attack(cell.attacks[0], setup, wave) for wave in (4, 3))
    torch.testing.assert_close(whole.psnr, split.psnr, rtol=1e-3, atol=1e-3)
    other = replace(setup, auditor=replace(setup.auditor, seed=1))
    assert not np.allclose(whole.psnr, run_attack(cell.attacks[0], other, 4).psnr, rtol=1e-3), (
        "the seed draws the start"
    )


def test_an_unknown_defense_is_not_in_the_attackers_chain() -> None:
    chain = [{"use": "prune", "keep": 0.5}, SGD]
    matching = {"use": "inverting_gradients", "iterations": 30}
    specs = [{**matching, "name": d, "defense": d} for d in ("known", "unknown")]
    cell = only(paper_table(chain=chain, cell={"attack": specs, "model": {"use": "lenet"}}))
    setup = build_setup(cell, 0)
    known, unknown = (run_attack(t, setup, 4).psnr for t in cell.attacks)
    assert not np.allclose(known, unknown, atol=1e-3)


def test_a_failed_attack_has_no_number_in_a_table_as_in_a_run_and_counts_as_blank_in_a_figure() -> None:
    cell = only(paper_table(cell={"model": {"use": "lenet"}}))  # its first layer is a convolution: not applicable
    setup, (spec,) = build_setup(cell, 0), cell.attacks
    for auditor in (setup.auditor, Auditor(FederationSource(setup.auditor.federation))):
        results = auditor.audit(spec, Wave.stack(setup.observations))
        assert {row.value for result in results for row in result.rows} == {None}
    found = run_attack(spec, setup, cell.wave)
    assert found.failed == 4
    grey = (torch.cat([t.x for t in truth_of(setup)]) - 0.5).square().mean()
    assert float(found.values("mse").mean()) == pytest.approx(float(grey))


@pytest.mark.full
def test_blending_remembers_each_clients_own_images_in_turns() -> None:
    """Two clients in turns, the same image each time: from the third on a client's search begins where it ended before."""
    idlg, both = {"use": "idlg", "restart_above": 1e-5, "tolerance": 1e-5}, {"labels": "restored", "iterations": 400}
    blending = {"use": "feedback_blending", "attack": idlg, "alpha": 0.5}
    specs = [{"name": "noise", **idlg, **both}, {"name": "fb", **blending, **both, "against": "noise"}]
    cell = only(paper_table(n=6, clients=2, cell={"attack": specs, "model": {"use": "lenet"}}))
    setup = build_setup(cell, 0)
    fed = setup.auditor.federation
    own = fed.having(replace(fed.shards, indices=tuple(fed.shards.indices[k % 2] for k in range(6))))
    observations = tuple(replace(setup.observations[k % 2], client=k) for k in range(6))
    same = replace(setup, auditor=replace(setup.auditor, source=FederationSource(own)), observations=observations)
    noise, blended = (run_attack(t, same, 100) for t in cell.attacks)
    # two images are needed before anything is blended; till then other packing into waves rounds otherwise
    torch.testing.assert_close(noise.iterations[:4], blended.iterations[:4], rtol=0.25, atol=0)
    assert bool((blended.iterations[4:] < noise.iterations[4:] / 2).all())
    assert [build_setup(replace(cell, n=n), 0).clients for n in (1, 5, 6)] == [1, 1, 2], "clients have equally many"


def test_an_entered_attack_is_compared_with_the_strongest_of_the_others() -> None:
    first = {"name": "mean", "use": "mean_image", "against": "strongest", "metrics": ["psnr", "psnr_gain"]}
    table = paper_table(cell={"attack": [first, {"name": "random", "use": "random_image"}, ANALYTIC]})
    entered = with_submissions(table, ["class_mean_image"])
    rows = {(row.attack, row.metric): row for part in reproduce(entered) for row in part}
    assert rows["analytic", "psnr"].here == PSNR_CAP
    for name in ("mean", "class_mean_image"):
        reached, gain = rows[name, "psnr"], rows[name, "psnr_gain"]
        assert reached.here is not None and gain.here == pytest.approx(reached.here - PSNR_CAP)
        assert gain.low is not None and gain.high is not None and gain.low < gain.here < gain.high
        assert gain.note.endswith("analytic")
    kept = restrict(entered, None, None, None, "class_mean").cells[0].attacks
    assert [spec.name for spec in kept] == ["random", "analytic", "class_mean_image"]


def test_a_defense_of_the_examples_has_a_second_truth() -> None:
    chain = [{"use": "ats", "policy": "7-4-15"}, SGD]
    cell = only(paper_table(chain=chain, cell={"attack": [{**ANALYTIC, "metrics": ["psnr", "psnr_augmented"]}]}))
    setup = build_setup(cell, 0)
    found = run_attack(cell.attacks[0], setup, cell.wave)
    assert found.values("psnr_augmented").min() == PSNR_CAP, "what was trained on is read off exactly"
    assert found.psnr.max() < 40
    rows = {row.metric: row.here for row in compared_figures(cell, cell.attacks[0], found, {}, "")}
    assert rows["psnr_augmented"] == PSNR_CAP and rows["psnr"] is not None and rows["psnr"] < 40
