"""Files of figures: both formats, and readable letters."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from PIL import Image

from fedgauge.server.store.run import Run
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.reports.figures import write_figures
from tests.server.views.graded_runs import METRICS, graded, only_psnr

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return graded(tmp_path_factory.mktemp("runs") / "graded")


@pytest.fixture(scope="module")
def written(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("figures")
    paths, missing = write_figures([run], folder)
    assert missing == []
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in paths)
    return folder


def test_each_plot_is_a_file_of_both_kinds_for_its_owner_only(written: Path) -> None:
    names = [*(f"leakage-{m}" for m in METRICS), "success"]
    assert sorted(p.name for p in written.iterdir()) == sorted(f"{n}.{kind}" for n in names for kind in ("png", "svg"))
    assert {p.stat().st_mode & 0o777 for p in written.iterdir()} == {0o600}


def test_a_file_says_what_the_attackers_knew(written: Path) -> None:
    for path in written.iterdir():
        if path.suffix == ".svg":
            output = path.read_text()
        else:
            with Image.open(path) as image:
                output = str(image.info["Description"])
                assert "Software" not in image.info
        assert "first knows it all" in output


def test_without_scores_nothing_is_drawn_and_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    silent = graded(tmp_path / "silent", lambda attack, round, client: {})
    assert main(["report", str(silent.folder), "--figures", str(tmp_path / "figures")]) == 0
    output = capsys.readouterr()
    assert output.out == f"{silent.folder / 'report.html'}\n"
    assert output.err.startswith("fedgauge: silent: ")
    assert not (tmp_path / "figures").exists()


def test_a_metric_that_no_attack_counts_for_has_no_figure_and_the_others_are_written(tmp_path: Path) -> None:
    """A test of single updates says nothing of whom a client's data holds, and may be the only one that was made."""

    def how(attack: str, round: int, client: int) -> dict[str, float | None]:
        return {**only_psnr(attack, round, client), "membership": 0.9, "dataset_membership": 0.6}

    paths, _ = write_figures([graded(tmp_path / "run", how, clients=2, rounds=2)], tmp_path / "figures")
    names = {path.stem for path in paths}
    assert "leakage-psnr" in names and "leakage-dataset_membership" not in names


def test_the_command_prints_each_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = graded(tmp_path / "run", only_psnr, limit=False)
    other = graded(tmp_path / "other", lambda attack, round, client: {"psnr": 12.0}, limit=False)
    folder = tmp_path / "figures"
    assert main(["report", str(run.folder), str(other.folder), "--figures", str(folder)]) == 0
    printed = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert printed[:2] == [run.folder / "report.html", other.folder / "report.html"]
    assert printed[2] == tmp_path / "comparison.html"
    assert sorted(printed[3:]) == sorted(p for p in folder.rglob("*") if p.is_file())
    assert all(path.exists() for path in printed)


def test_names_are_text_and_no_formula(tmp_path: Path) -> None:
    hostile = '$\\frac{1}{2$ <script>alert(1)</script> & "x"'
    run = graded(tmp_path / "a<b>$x", only_psnr, attacks=(hostile.replace("/", "-"), "_hidden"), limit=False)
    paths, _ = write_figures([run], tmp_path / "figures")
    page = ElementTree.parse(tmp_path / "figures" / "leakage-psnr.svg").getroot()
    words = ["".join(e.itertext()) for e in page.iter(f"{SVG}text")]
    assert hostile.replace("/", "-") in words
    assert "_hidden" in words, "Matplotlib leaves names that begin so out of its own legends"
    assert not [e for e in page.iter() if e.tag.endswith("}script")]
    assert len(paths) == 2 * 2
