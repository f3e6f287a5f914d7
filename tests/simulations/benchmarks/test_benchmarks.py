"""The benchmarks: what they compare is equal mathematics, and each measures and keeps what it promises."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from fedgauge.attacks.base import Budget, Knowledge, Reconstruction, Stream, Wave
from fedgauge.attacks.matching.compiled_step import missing
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.attacks.matching.recipes import idlg
from fedgauge.attacks.modality.image_metrics import PSNR_CAP
from fedgauge.client.data.images import batch_of, mnist5k
from fedgauge.client.local_data import data_folder
from fedgauge.client.models.vision import lenet
from fedgauge.client.rng import generator
from fedgauge.simulations.benchmarks import memory_growth
from fedgauge.simulations.benchmarks import success as success_rates
from fedgauge.simulations.benchmarks.__main__ import RESULTS, main, readme
from fedgauge.simulations.benchmarks.engine import CIFAR_SHAPE, DIGITS, PUBLISHED, SpeedCase, engine, problem
from fedgauge.simulations.benchmarks.intercept import InterceptCase, intercept
from fedgauge.simulations.benchmarks.local_training import proximal
from fedgauge.simulations.benchmarks.memory_growth import (
    MemoryUse,
    audit,
    memory,
    memory_of,
    memory_of_flower,
    own_memory,
    train,
)
from fedgauge.simulations.benchmarks.observed_updates import GradedImages
from fedgauge.simulations.benchmarks.page_crowd import crowd
from fedgauge.simulations.benchmarks.page_speed import page
from fedgauge.simulations.benchmarks.quality import quality
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, interleaved
from fedgauge.simulations.benchmarks.success import success


class Steps:
    """Progress as a benchmark told it."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.told.append((done, total))

    def complete(self) -> bool:
        totals = {total for _, total in self.told}
        return len(totals) == 1 and [done for done, _ in self.told] == list(range(1, totals.pop() + 1))


@pytest.fixture
def steps() -> Steps:
    return Steps()


def by_name(report: BenchmarkReport) -> dict[str, Figure]:
    figures = {f"{f.name} [{f.unit}]": f for f in report.figures}
    assert len(figures) == len(report.figures), "two figures have one name"
    json.dumps(dict(report.settings), allow_nan=False)
    return figures


# ---------------------------------------------------------------------------------------------------------- engine


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("source", [CIFAR_SHAPE, DIGITS])
@pytest.mark.parametrize(("iterations", "steps"), [(1, 1), (8, 1), (8, 3)])
def test_the_published_loop_and_the_engine_do_the_same(source: str, iterations: int, steps: int) -> None:
    """The comparison of speeds means nothing otherwise; 8 iterations pass all three cuts of the rate."""
    compared = problem(source, 3, steps=steps)
    ours = compared.engine(iterations)
    published, lean = (compared.published(iterations, lean) for lean in (False, True))
    assert ours.dtype == published.dtype == torch.float64
    assert (ours[0] - published).abs().max() < 1e-5
    assert (published - lean).abs().max() < 1e-12
    assert (ours[1] - published).abs().max() > 0.1, "another start: the images would agree whatever the loops did"


@pytest.mark.usefixtures("double")
def test_the_published_loop_moves_against_the_gradient() -> None:
    """Ten times the iterations, a better match: both loops standing still would also agree."""
    compared = problem(CIFAR_SHAPE, 1)
    early, late = (compared.published(n) for n in (8, 80))
    truth = torch.rand(1, 3, 32, 32, generator=generator(0, "benchmark images"))
    assert (late - truth).square().mean() < (early - truth).square().mean()


def test_the_engine_benchmark_gives_a_row_for_every_cell(steps: Steps) -> None:
    cells = (SpeedCase("lenet", lenet, 1, 1e9, iterations=2), SpeedCase("lenet", lenet, 2, steps=2, iterations=1))
    report = engine(steps, cells, repetitions=1)
    figures = by_name(report)
    assert [row["k"] for row in report.rows] == [1, 2]
    for row in report.rows:
        assert {"recipe", "network", "k", "compiled", "ratio", "ms", "psnr"} <= row.keys()
        ratio, ms, whole = (float(str(row[key])) for key in ("ratio", "ms", "published_ms"))
        assert ratio == pytest.approx(whole / ms)
        assert figures[f"lenet, {CIFAR_SHAPE}, K = {row['k']}: engine / {PUBLISHED} [x]"].value == ratio
    assert figures[f"lenet, {CIFAR_SHAPE}, K = 1: engine / {PUBLISHED} [x]"].met is False, (
        "nothing is 1e9 times as fast"
    )
    assert steps.complete()


@pytest.mark.full
@pytest.mark.skipif(missing(torch.device("cpu")) != "", reason="torch.compile needs a compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.compile itself uses
@pytest.mark.slow
def test_a_step_compiled_once_serves_every_later_run_of_the_same_wave(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, compilations, compile_it = problem(CIFAR_SHAPE, 1), [], torch.compile

    def counted(*arguments: object, **settings: object) -> object:
        compilations.append(1)
        return compile_it(*arguments, **settings)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "compile", counted)
    compiled = replace(plain, compiled=True)
    first, again = compiled.engine(3), compiled.engine(3)
    assert compilations == [1]
    assert first.equal(again)
    moved = (
        first - plain.engine(3)
    ).abs() > 1e-3  # a slope of nearly nothing may change its sign, and the step is its sign
    assert moved.double().mean() < 1e-3


def test_a_compiled_cell_without_a_compiler_says_why_it_has_no_figure(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedgauge.simulations.benchmarks.engine.missing", lambda device: "a C++ compiler")
    (figure,) = engine(steps, (SpeedCase("lenet", lenet, 1, compiled=True),)).figures
    assert (figure.value, figure.met, figure.note) == (None, None, "skipped: needs a C++ compiler")


def test_works_take_turns_after_one_run_that_is_not_counted(steps: Steps) -> None:
    order: list[str] = []
    seconds = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2, steps)
    assert order == ["a", "b"] * 3
    assert {name: len(spent) for name, spent in seconds.items()} == {"a": 2, "b": 2}
    assert steps.complete()


# --------------------------------------------------------------------------------------------------------- quality


def test_quality_without_local_images_says_what_it_skipped(no_local_data: Path, steps: Steps) -> None:
    assert data_folder() == no_local_data
    report = quality(steps, images=1, iterations=2, labels=8, inputs=2)
    figures = by_name(report)
    skipped = figures["Inverting Gradients, lenet, 2 iterations: mean PSNR [dB]"]
    assert (skipped.value, skipped.met) == (None, None)
    assert skipped.note.startswith("skipped: needs cifar10-train")
    assert {f.value for name, f in figures.items() if name.startswith("iDLG")} == {100.0}
    assert figures["analytic, mlp: worst PSNR [dB]"].value == PSNR_CAP
    assert str(report.settings["dataset"]).startswith("mnist5k")
    assert steps.complete()


def test_quality_on_local_images(local_data: Path, steps: Steps) -> None:
    if not any(local_data.glob("cifar10-test-*.npz")):
        pytest.skip("needs cifar10-test-*.npz in the local data folder")
    figures = by_name(quality(steps, images=2, iterations=2, labels=4, inputs=1))
    mean, worst, best = (
        figures[f"Inverting Gradients, lenet, 2 iterations: {kind} PSNR [dB]"].value
        for kind in ("mean", "worst", "best")
    )
    assert mean is not None
    assert worst is not None
    assert best is not None
    assert 0 < worst < mean < best < 20
    assert mean == pytest.approx((worst + best) / 2)


def test_images_are_graded_as_in_a_run() -> None:
    """An exact hit counts as the cap, the images' order does not count, and what failed is counted without a number."""
    data = mnist5k()
    truth = [batch_of(data.x, data.y, torch.tensor(rows)) for rows in ([0, 1], [2], [3])]
    off = truth[0].x.clone()
    off[0] += 0.1
    found = [
        Reconstruction(off.flip(0), None, 0.0, 1, 0.0, "converged"),
        Reconstruction(None, None, 0.0, 1, 0.0, "diverged", "the objective is not finite"),
        Reconstruction(torch.full_like(truth[2].x, torch.nan), None, 0.0, 1, 0.0, "converged"),
    ]
    graded = GradedImages(found, truth, data)
    assert graded.values("psnr") == pytest.approx([20.0, torch.inf], abs=1e-4)
    assert graded.values("mse") == pytest.approx([0.01, 0.0], abs=1e-6)
    figure = graded.mean_psnr("three clients", " in 3 batches")
    assert figure.value == pytest.approx((20 + PSNR_CAP) / 2, abs=1e-4)
    assert figure.note == "n = 2 in 3 batches, best 60.0, worst 20.0, 2 lost: the objective is not finite"
    nothing = GradedImages(found[1:2], truth[1:2], data).mean_psnr("nothing")
    assert (nothing.value, nothing.note) == (None, "n = 0, 1 lost: the objective is not finite")


# ------------------------------------------------------------------------------------------------------- intercept


def test_intercept_measures_the_recorder_beside_its_round(steps: Steps) -> None:
    narrow = {"use": "mlp", "hidden": [4]}
    small, large = InterceptCase("small", 2, narrow, 1, 1), InterceptCase("large", 3, narrow, 2, 2)
    figures = by_name(intercept(steps, small=small, large=(large,), rounds=2, large_rounds=1))
    assert figures.keys() == {
        "small: recording [ms a round]",
        "small: recording, CPU [ms a round]",
        "large: recording / round [% of CPU seconds]",
        "large: recording / round [% of wall seconds]",
        "large: tap of a user's app / round [% of wall seconds]",
        "large: round without recording [CPU seconds]",
    }
    assert all(f.value is not None and f.value > 0 for f in figures.values())
    assert steps.complete()


# ---------------------------------------------------------------------------------------------------------- memory


def test_train_and_audit_measure_after_each_round(tmp_path: Path) -> None:
    _, run = memory_growth._run(tmp_path, clients=2, rounds=2, iterations=1)
    trained, attacked = train(run), audit(run)
    assert [m.rounds for m in trained] == [m.rounds for m in attacked] == [1, 2]
    assert all(m.peak >= m.resident > 0 for m in [*trained, *attacked])
    with run.ledger() as ledger:
        assert len(ledger.observations()) == 4
        assert ledger.progress().done == ledger.progress().total == 2 * 2 * 4


def test_memory_is_what_the_kernel_says() -> None:
    before = own_memory(1)
    held = torch.ones(64 * 2**20 // 4)
    during = memory_of(os.getpid(), 2)
    assert 60 < during.resident - before.resident < 80
    del held
    after = own_memory(3)
    assert after.resident - before.resident < 20
    assert after.peak >= during.resident - 1  # the kernel brings its counts together only now and then


def test_a_process_that_keeps_its_rounds_is_caught(tmp_path: Path) -> None:
    _, run = memory_growth._run(tmp_path, clients=2, rounds=3, iterations=1)
    train(run)
    updates = sum(p.stat().st_size for p in (run.folder / "tape").glob("round-00001-client-*")) / 2**20
    hoards = [MemoryUse(n, 300 + n * updates, 300 + n * updates) for n in (1, 2, 3)]
    steady = [MemoryUse(n, 300 + n * updates / 10, 300 + n * updates / 10) for n in (1, 2, 3)]
    swells = [MemoryUse(1, 300, 300), MemoryUse(3, 300, 320)]
    for seen, met in ((hoards, [False, True]), (steady, [True, True]), (swells, [True, False])):
        figures = memory_growth._figures("x", seen, run)
        assert [f.met for f in figures if "growth" in f.name] == met


@pytest.mark.full
@pytest.mark.slow
def test_memory_runs_training_and_audit_as_processes(steps: Steps) -> None:
    figures = by_name(memory(steps, clients=2, rounds=2, iterations=1))
    _promises_of_memory(figures, "strategy and recorder")
    assert steps.complete()


@pytest.mark.full
@pytest.mark.slow
def test_memory_of_flower_watches_the_serverapp(steps: Steps) -> None:
    figures = by_name(memory_of_flower(steps, clients=2, rounds=2, iterations=1))
    _promises_of_memory(figures, "ServerApp's process")
    resident = figures["ServerApp's process: resident after round 1 [MiB]"].value
    assert resident is not None
    assert resident > 250, "torch and Ray alone take that: another process was watched"


def _promises_of_memory(figures: dict[str, Figure], trainer: str) -> None:
    assert figures["updates accepted []"].value == 4
    assert (figures["attack jobs done []"].value, figures["attack jobs done []"].met) == (16, True)
    for name in (trainer, "audit"):
        first, last = (figures[f"{name}: peak after round {n} [MiB]"].value for n in (1, 2))
        assert first is not None
        assert last is not None
        assert figures[f"{name}: growth of peak [%]"].value == pytest.approx(100 * (last / first - 1))
        assert figures[f"{name}: growth of resident [MiB]"].target.startswith("<= ")


# ------------------------------------------------------------------------------------------- command line, results


def report(value: float | None, **target: float) -> BenchmarkReport:
    return BenchmarkReport((Figure("speed", value, "x", **target),), {"seed": 3, "sizes": [1, 2]})


@pytest.mark.parametrize(
    ("figure", "target", "met"),
    [
        (Figure("f", 6.0, "x", at_least=6), ">= 6", True),
        (Figure("f", 5.9, "x", at_least=6), ">= 6", False),
        (Figure("f", 50.1, "ms", at_most=50), "<= 50", False),
        (Figure("f", 50.0, "ms", at_most=50), "<= 50", True),
        (Figure("f", None, "dB", at_least=16.5), ">= 16.5", None),
        (Figure("f", 1.0, "dB"), "", None),
    ],
)
def test_a_target_is_met_or_not(figure: Figure, target: str, met: bool | None) -> None:
    assert (figure.target, figure.met) == (target, met)


def test_results_are_kept_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def toy(progress: Steps) -> BenchmarkReport:
        progress(1, 1)
        return report(7.25, at_least=6.0)

    assert main([], {"toy": toy}, tmp_path) == 0
    out, err = capsys.readouterr()
    assert "speed  7.25  x  >= 6  yes" in out
    assert "toy: starting" in err
    kept = json.loads((tmp_path / "toy.json").read_text())
    figure = {"name": "speed", "value": 7.25, "unit": "x", "target": ">= 6", "met": True, "note": ""}
    assert (kept["benchmark"], kept["figures"]) == ("toy", [figure])
    assert kept["settings"] == {"seed": 3, "sizes": [1, 2]}
    assert kept["environment"]["packages"]["torch"] == torch.__version__
    assert kept["environment"]["cores"] == os.cpu_count()
    assert kept["date"].endswith(" UTC")
    assert "| speed | 7.25 | x | >= 6 | yes |  |" in (tmp_path / "README.md").read_text()


def test_json_is_one_object_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toys = {"a": lambda progress: report(1.0), "b": lambda progress: report(None, at_most=2.0)}
    assert main(["b", "a", "--json"], toys, tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["benchmark"] for line in lines] == ["b", "a"]
    assert json.loads(lines[0]) == json.loads((tmp_path / "b.json").read_text())
    assert "| speed | - | x | <= 2 |  |" in (tmp_path / "README.md").read_text()


def test_a_missed_target_is_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toys = {"slow": lambda progress: report(1.0, at_least=6.0), "fine": lambda progress: report(9.0, at_least=6.0)}
    assert main(["slow", "fine"], toys, tmp_path) == 1
    assert "NO" in capsys.readouterr().out


def test_a_value_that_is_no_number_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        main([], {"toy": lambda progress: report(float("nan"))}, tmp_path)
    assert not (tmp_path / "toy.json").exists()


def test_an_unknown_benchmark_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    with pytest.raises(SystemExit) as stopped:
        main(["toy", "tou"], {"toy": lambda progress: ran.append("toy") or report(1.0)}, tmp_path)
    assert (stopped.value.code, ran) == (2, [])
    assert "there is no benchmark 'tou'; there are toy" in capsys.readouterr().err


def test_memory_through_flower_runs_only_when_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toys = {"memory": partial(_say, 1.0), "memory-flower": partial(_say, 2.0)}
    for names, values in (([], [1.0]), (["memory-flower"], [2.0])):
        main([*names, "--json"], toys, tmp_path)
        lines = capsys.readouterr().out.splitlines()
        assert [json.loads(line)["figures"][0]["value"] for line in lines] == values


def _say(value: float, progress: Steps) -> BenchmarkReport:
    return report(value)


def test_the_kept_results_are_what_their_readme_shows() -> None:
    stored = [json.loads(path.read_text()) for path in sorted(RESULTS.rglob("*.json"), key=lambda path: path.name)]
    assert {r["benchmark"] for r in stored} == {
        "engine",
        "quality",
        "labels",
        "label-rule",
        "membership",
        "success",
        "intercept",
        "memory",
        "memory-flower",
        "page",
        "load",
        "learning",
        "gpu",
        "training",
        "proximal",
        "modes",
        "text",
        "zoo",
        "crowd",
        "kills",
    }
    assert (RESULTS / "README.md").read_text() == readme(stored)


# -------------------------------------------------------------------------------------------------------- proximal


def test_variants_of_fedavg_train_otherwise(local_file: Callable[[str], Path], steps: Steps) -> None:
    local_file("cifar10-train*.npz")
    figures = by_name(proximal(steps, batches=2, iterations=2))
    assert figures["FedAvg: mean PSNR [dB]"].value != figures["FedProx, mu 1: mean PSNR [dB]"].value
    later = {name.removesuffix(": mean PSNR [dB]"): f.value for name, f in figures.items() if "round 3" in name}
    assert len(set(later.values())) == len(later), (
        "control variates change the update, and who knows them matches another"
    )
    assert figures["largest difference from FedAvg [dB]"].at_most == 1 and steps.complete()


# --------------------------------------------------------------------------------------------------------- success


def test_success_counts_the_images_that_were_found(no_local_data: Path, steps: Steps) -> None:
    assert data_folder() == no_local_data
    figures = by_name(success(steps, digits=2, evaluations=450))
    assert figures["iDLG, mnist5k: successes [%]"].value == 100.0
    assert figures["cifar100: successes [%]"].note.startswith("skipped: needs cifar100-train")
    nothing = by_name(success(steps, digits=2, evaluations=3))
    assert nothing["DLG, mnist5k: successes [%]"].value == 0.0, "three evaluations find nothing"


class LosesTheFirst(GradientMatching):
    """An attack that diverges on the first client."""

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        first, *others = super().reconstruct(wave, known, budget, streams)
        return [replace(first, x=None, status="diverged"), *others]


def test_an_attack_that_failed_is_no_success() -> None:
    (figure,) = success_rates._measured(mnist5k(), 2, LosesTheFirst(**vars(idlg())), 450)
    assert (figure.value, figure.met) == (50.0, False)
    assert figure.note.startswith("n = 2; ") and figure.note.endswith(" dB; 1 lost: diverged")


# ------------------------------------------------------------------------------------------------------------ page


@pytest.mark.slow
def test_the_page_is_measured_over_a_run_of_the_given_size(steps: Steps) -> None:
    found = page(steps, rounds=3, clients=4, news=1)
    figures = by_name(found)
    assert steps.complete()
    assert found.settings["rows"] == "72, and as many of two baselines"
    assert all(f.value is not None and f.value > 0 for f in found.figures)
    assert figures["report [MB]"].value == pytest.approx(4.9, abs=0.5), "Plotly's own script and little more"
    assert {f.name for f in found.figures if f.target} == {
        "overview, first view",
        "a new round until its overview",
        "server's largest resident memory",
        "report",
    }


@pytest.mark.full
@pytest.mark.slow
def test_a_crowd_is_held_off_while_a_visitor_is_answered(steps: Steps) -> None:
    found = crowd(steps, half_open=30, streams=10, asked=3, rounds=2, clients=3)
    assert steps.complete()
    assert [f.name for f in found.figures] == [
        "slowest request, nobody else",
        "slowest request, from 100 other addresses",
        "slowest request, from the visitor's own address",
        "server's largest resident memory",
    ]
    assert all(f.value is not None and f.value > 0 for f in found.figures)
