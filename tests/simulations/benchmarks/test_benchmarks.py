"""The benchmarks: what they compare is equal mathematics, and each measures and keeps what it promises."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from fedgauge.client.models.vision import lenet
from fedgauge.simulations.benchmarks.engine import CIFAR_SHAPE, PUBLISHED, SMOOTH, SpeedCase, engine, problem
from fedgauge.simulations.benchmarks.reporting import RESULTS, Figure, keep
from tests.zoo.measure import SETTINGS, figures_of


def by_name(found: Iterable[Figure]) -> dict[str, Figure]:
    every = list(found)
    figures = {f"{f.name} [{f.unit}]": f for f in every}
    assert len(figures) == len(every), "two figures have one name"
    return figures


# ---------------------------------------------------------------------------------------------------------- engine


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("source", [CIFAR_SHAPE, SMOOTH])
@pytest.mark.parametrize(("iterations", "steps"), [(1, 1), (8, 1), (8, 3)])
def test_the_published_loop_and_the_engine_do_the_same(source: str, iterations: int, steps: int) -> None:
    """The comparison of speeds means nothing otherwise; 8 iterations pass all three cuts of the rate."""
    compared = problem(source, 3, steps=steps)
    ours, published = compared.engine(iterations), compared.published(iterations)
    assert ours.dtype == published.dtype == torch.float64
    assert (ours[0] - published).abs().max() < 1e-5
    assert (ours[1] - published).abs().max() > 0.1, "another start: the images would agree whatever the loops did"


def test_the_engine_benchmark_compares_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> object:
        raise RuntimeError("a C++ compiler is missing")

    monkeypatch.setattr("torch.compile", refused)
    cases = (
        SpeedCase("lenet", lenet, 1, 1e9, iterations=2),
        SpeedCase("lenet", lenet, 2, steps=2, iterations=1),
        SpeedCase("lenet", lenet, 1, compiled=True),
    )
    figures = by_name(engine(cases, repetitions=1))
    first, second = (figures[f"lenet, {CIFAR_SHAPE}, K = {k}: engine / {PUBLISHED} [x]"] for k in (1, 2))
    assert first.met is False, "nothing is 1e9 times as fast"
    for figure in (first, second):
        ours, theirs = (float(part) for part in figure.note.partition(";")[0].replace(" ms", "").split(" against "))
        assert figure.value == pytest.approx(theirs / ours, rel=0.02)
    skipped = figures[f"lenet, {CIFAR_SHAPE}, K = 1, compiled: engine / {PUBLISHED} [x]"]
    assert (skipped.value, skipped.met) == (None, None) and "a C++ compiler" in skipped.note


# ------------------------------------------------------------------------------------------- command line, results


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


def test_results_are_kept_and_shown(tmp_path: Path) -> None:
    speed = Figure("speed", 7.25, "x", at_least=6.0)
    assert str(speed) == "speed  7.25  x  >= 6  yes"
    assert keep(tmp_path / "toy.json", "toy", 0.0, [speed], {"seed": 3, "sizes": [1, 2]}) == 0
    kept = json.loads((tmp_path / "toy.json").read_text())
    figure = {"name": "speed", "value": 7.25, "unit": "x", "target": ">= 6", "met": True, "note": ""}
    assert (kept["benchmark"], kept["figures"]) == ("toy", [figure])
    assert kept["settings"] == {"seed": 3, "sizes": [1, 2]}
    assert kept["environment"]["packages"]["torch"] == torch.__version__
    assert kept["environment"]["cores"] == os.cpu_count()
    assert kept["date"].endswith(" UTC")


def test_a_missed_target_is_the_exit_status(tmp_path: Path) -> None:
    slow, fine = (Figure("speed", value, "x", at_least=6.0) for value in (1.0, 9.0))
    assert keep(tmp_path / "toys.json", "toys", 0.0, [slow, fine], {}) == 1
    assert "NO" in str(slow)


def test_the_results_of_every_benchmark_are_kept() -> None:
    stored = [json.loads(path.read_text()) for path in RESULTS.rglob("*.json")]
    assert {r["benchmark"] for r in stored} == {"engine", "gpu", "zoo"}


def test_the_zoo_keeps_its_rows(tmp_path: Path) -> None:
    row = {"network": "mine", "family": "own", "outcome": "attacked", "cost at 1": 1.0, "cost at 4": 0.5}
    assert keep(tmp_path / "zoo.json", "zoo", 0.0, figures_of([row]), SETTINGS, [row]) == 0
    kept = json.loads((tmp_path / "zoo.json").read_text())
    assert kept["rows"] == [row] and kept["figures"][1]["value"] == 1
