"""Figure of compared runs."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from fedgauge.simulations.reports.figures import write_figures
from tests.simulations.reports.figures.graded_runs import SVG, graded, only_psnr


def test_runs_are_compared_by_what_they_end_with(tmp_path: Path) -> None:
    run = graded(tmp_path / "graded", only_psnr)
    weaker = lambda attack, round, client: {"psnr": {"first": 12.0, "second": 15.0}.get(attack, 11.0)}  # noqa: E731
    other = graded(tmp_path / "other" / "graded", weaker, accuracy=0.2, limit=False)
    paths, missing = write_figures([run, other, run], tmp_path / "figures")
    assert missing == []
    folder = tmp_path / "figures"
    assert {p.name for p in folder.iterdir()} == {"graded", "graded-2", "utility-psnr.png", "utility-psnr.svg"}
    assert {p.parent for p in paths} == {folder, folder / "graded", folder / "graded-2"}
    page = ElementTree.parse(folder / "utility-psnr.svg").getroot()
    words = ["".join(e.itertext()) for e in page.iter(f"{SVG}text")]
    for needed in ("1  graded", "2  graded-2", "best baseline"):
        assert needed in words
    assert "bayes_limit" not in words, "a limit is no attack"
