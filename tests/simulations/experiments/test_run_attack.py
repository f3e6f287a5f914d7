"""Attacks on a setup: waves, knowledge, floors and time estimates."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedgauge.attacks.grading.image_metrics import PSNR_CAP
from fedgauge.client.models.tokenizer import framed
from fedgauge.client.update import Batch
from fedgauge.simulations.experiments import run_attack as attacking
from fedgauge.simulations.experiments.paper_tables import (
    AttackSpec,
)
from fedgauge.simulations.experiments.reproduce import compared_figures
from fedgauge.simulations.experiments.run_attack import estimate_seconds, run_attack
from fedgauge.simulations.experiments.setups import build_setup
from tests.simulations.experiments.small_tables import ANALYTIC, SGD, only, paper_table, sentences


def test_how_updates_are_packed_into_waves_changes_rounding_only() -> None:
    matching = {"name": "ig", "use": "inverting_gradients", "iterations": 5}
    cell = only(paper_table(cell={"attack": [matching], "model": {"use": "lenet"}}))
    setup = build_setup(cell, 0)
    whole, split = (run_attack(cell.attacks[0], setup, 0, wave) for wave in (4, 3))
    torch.testing.assert_close(whole.psnr, split.psnr, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(whole.psnr, run_attack(cell.attacks[0], setup, 1, 4).psnr, rtol=1e-3), (
        "the seed draws the start"
    )


def test_an_unknown_defense_is_not_in_the_attackers_chain() -> None:
    chain = [{"use": "prune", "keep": 0.5}, SGD]
    matching = {"use": "inverting_gradients", "iterations": 30}
    specs = [{**matching, "name": d, "defense": d} for d in ("known", "unknown")]
    cell = only(paper_table(chain=chain, cell={"attack": specs, "model": {"use": "lenet"}}))
    setup = build_setup(cell, 0)
    known, unknown = (run_attack(t, setup, 0, 4).psnr for t in cell.attacks)
    assert not torch.allclose(known, unknown, atol=1e-3)


def test_an_estimate_grows_with_the_budget() -> None:
    matching = {"name": "ig", "use": "inverting_gradients", "iterations": 100}
    cell = only(paper_table(cell={"attack": [matching], "model": {"use": "lenet"}}))
    setup, (spec,) = build_setup(cell, 0), cell.attacks
    assert estimate_seconds(replace(spec, budget=replace(spec.budget, iterations=2)), setup, 0, 4) == 0
    assert estimate_seconds(spec, setup, 0, 4) > 0


def test_an_estimate_counts_what_every_wave_costs_and_not_what_is_prepared_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock that stands still but for 100 s of preparation, 5 s a wave and 2 s an iteration: 3 waves of 50."""
    clock, prepared = [0.0], set[str]()

    def spend(spec: AttackSpec, budget: Any, *_: Any) -> None:
        clock[0] += 5 + 2 * budget.iterations + (0 if spec.name in prepared else 100)
        prepared.add(spec.name)

    monkeypatch.setattr(attacking, "_reconstruct", spend)
    monkeypatch.setattr(attacking.time, "perf_counter", lambda: clock[0])
    matching = {"name": "ig", "use": "inverting_gradients", "iterations": 50}
    cell = only(paper_table(cell={"attack": [matching], "model": {"use": "lenet"}}, n=3))
    assert estimate_seconds(cell.attacks[0], build_setup(cell, 0), 0, 1) == 3 * (5 + 2 * 50)


def test_an_estimate_of_what_is_trained_counts_its_lessons_and_is_of_whole_waves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each budget's training is kept: 40 s of lessons, then 2 s an iteration, and nothing where it was trained before."""
    clock, trained = [0.0], set[int]()

    def spend(spec: AttackSpec, budget: Any, setup: Any, seed: int, part: slice) -> None:
        assert part == slice(0, 6)
        if budget.iterations not in trained:
            clock[0] += 40 + 2 * budget.iterations
        trained.add(budget.iterations)

    monkeypatch.setattr(attacking, "_reconstruct", spend)
    monkeypatch.setattr(attacking.time, "perf_counter", lambda: clock[0])
    rows = {"name": "rows", "use": "learned_rows", "iterations": 50, "metrics": ["rouge1"]}
    cell = only(sentences(cell={"attack": [rows]}, n=6))
    assert estimate_seconds(cell.attacks[0], build_setup(cell, 0), 0, 6) == 40 + 2 * 50


def test_an_estimate_of_text_looks_at_few_sentences() -> None:
    lamp = {"name": "dlg", "use": "dlg_text", "iterations": 50, "metrics": ["rouge1"], "lengths": "given"}
    cell = only(sentences(cell={"attack": [lamp]}, n=6))
    setup = build_setup(cell, 0)
    seen: list[int] = []
    whole = attacking._reconstruct

    def watched(spec: AttackSpec, budget: Any, setup: Any, seed: int, part: slice) -> Any:
        seen.append(len(setup.observations[part]))
        return whole(spec, budget, setup, seed, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attacking, "_reconstruct", watched)
        assert estimate_seconds(cell.attacks[0], setup, 0, 16) > 0
    assert seen == 3 * [attacking.PILOT_UPDATES]


def test_blending_remembers_each_clients_own_images_in_turns() -> None:
    """Two clients in turns, the same image each time: from the third on a client's search begins where it ended before."""
    use = {"use": "idlg", "labels": "restored", "iterations": 400, "restart_above": 1e-5, "tolerance": 1e-5}
    specs = [{"name": "noise", **use}, {"name": "fb", **use, "blend": {"alpha": 0.5}, "against": "noise"}]
    cell = only(paper_table(n=6, clients=2, cell={"attack": specs, "model": {"use": "lenet"}}))
    setup = build_setup(cell, 0)
    same = replace(
        setup,
        observations=tuple(replace(setup.observations[k % 2], client=k) for k in range(6)),
        truth=tuple(setup.truth[k % 2] for k in range(6)),
    )
    noise, blended = (run_attack(t, same, 0, 100) for t in cell.attacks)
    # two images are needed before anything is blended; till then other packing into waves rounds otherwise
    torch.testing.assert_close(noise.iterations[:4], blended.iterations[:4], rtol=0.25, atol=0)
    assert bool((blended.iterations[4:] < noise.iterations[4:] / 2).all())
    assert [build_setup(replace(cell, n=n), 0).clients for n in (1, 5, 6)] == [1, 1, 2], "clients have equally many"


def test_a_defense_of_the_examples_has_a_second_truth() -> None:
    chain = [{"use": "ats", "policy": "7-4-15"}, SGD]
    cell = only(paper_table(chain=chain, cell={"attack": [{**ANALYTIC, "metrics": ["psnr", "psnr_augmented"]}]}))
    setup = build_setup(cell, 0)
    assert setup.augmented is not None and len(setup.augmented) == len(setup.truth) == 4
    assert all(
        not torch.equal(a.x, b.x) and a.x.shape == b.x.shape for a, b in zip(setup.augmented, setup.truth, strict=True)
    )
    found = run_attack(cell.attacks[0], setup, 0, cell.wave)
    assert found.augmented is not None and float(found.augmented.min()) == PSNR_CAP, (
        "what was trained on is read off exactly"
    )
    assert float(found.psnr.max()) < 40
    rows = {row.metric: row.here for row in compared_figures(cell, cell.attacks[0], found, {}, "")}
    assert rows["psnr_augmented"] == PSNR_CAP and rows["psnr"] is not None and rows["psnr"] < 40


def test_the_floor_of_words_is_what_frequencies_give() -> None:
    """With the lengths given, a place is right as often as auxiliary text has its word."""
    cell = only(sentences(attack={"lengths": "given"}, n=40))
    setup = build_setup(cell, 0)
    assert setup.known.auxiliary is not None and setup.tokenizer is not None
    special = torch.tensor(sorted(setup.tokenizer.special))
    said = setup.known.auxiliary.x[~torch.isin(setup.known.auxiliary.x, special)]
    shares = torch.bincount(said, minlength=setup.tokenizer.size) / len(said)
    expected = [shares[t.x[~torch.isin(t.x, special)]].mean() for t in setup.truth]
    mean = 100 * float(torch.stack(expected).mean())
    floor = attacking._random_word_scores(cell.attacks[0], setup, 0)["token_accuracy"]
    count = 40 * 5 * attacking.RANDOM_DRAWS  # five words a sentence or more
    assert floor == pytest.approx(mean, abs=4 * 100 * math.sqrt(mean / 100 / count))


def test_lengths_are_told_in_the_order_of_the_labels() -> None:
    x = framed([[7] * 5, [7] * 3, [7] * 4], 8, 0)
    batch = Batch(x, torch.tensor([1, 1, 0]))
    assert attacking._lengths(batch, 0, client_order=True).tolist() == [5, 3, 4]
    assert attacking._lengths(batch, 0, client_order=False).tolist() == [4, 3, 5]
    assert attacking._lengths(Batch(x, x), 0, client_order=False).tolist() == [3, 4, 5], "next words have no order"
