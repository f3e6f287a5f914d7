"""The benchmarks: what they compare is equal mathematics, and each measures and keeps what it promises."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedgauge.attacks.matching.compiled_step import missing
from fedgauge.client.models.vision import lenet
from fedgauge.client.rng import generator
from fedgauge.simulations.benchmarks.__main__ import BENCHMARKS, RESULTS, main, readme
from fedgauge.simulations.benchmarks.engine import CIFAR_SHAPE, DIGITS, PUBLISHED, SpeedCase, engine, problem
from fedgauge.simulations.benchmarks.intercept import InterceptCase, intercept
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, interleaved


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
    assert "speed  7.25  x  >= 6  yes" in capsys.readouterr().out
    kept = json.loads((tmp_path / "toy.json").read_text())
    figure = {"name": "speed", "value": 7.25, "unit": "x", "target": ">= 6", "met": True, "note": ""}
    assert (kept["benchmark"], kept["figures"]) == ("toy", [figure])
    assert kept["settings"] == {"seed": 3, "sizes": [1, 2]}
    assert kept["environment"]["packages"]["torch"] == torch.__version__
    assert kept["environment"]["cores"] == os.cpu_count()
    assert kept["date"].endswith(" UTC")
    assert "| speed | 7.25 | x | >= 6 | yes |  |" in (tmp_path / "README.md").read_text()


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


def test_the_kept_results_are_what_their_readme_shows() -> None:
    stored = [json.loads(path.read_text()) for path in sorted(RESULTS.rglob("*.json"), key=lambda path: path.name)]
    assert {r["benchmark"] for r in stored} == {*BENCHMARKS, "gpu", "zoo"}
    assert (RESULTS / "README.md").read_text() == readme(stored)
