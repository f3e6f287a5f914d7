"""README's pictures are made by a command, from a run."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedgauge.server.store.run import Run
from fedgauge.simulations.reports.pdf import BROWSERS
from fedgauge.simulations.reports.screenshots import HEIGHT, PICTURES, VIEWS, WIDTH, figure, main, photograph, terminal

ROOT = Path(__file__).resolve().parents[3]


def test_the_documentation_shows_every_picture_that_is_kept() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    shown = {path.name for path in PICTURES.iterdir() if f"{path.relative_to(ROOT)})" in pages}
    assert shown == {*(f"{view}.png" for view in VIEWS), "terminal.svg", "figure.png"}
    assert {path.name for path in PICTURES.iterdir()} == shown
    assert sum(path.stat().st_size for path in PICTURES.iterdir()) < 1_000_000


def test_the_terminals_picture_and_the_figure_need_no_browser(attacked_run: Run, tmp_path: Path) -> None:
    drawn = terminal(attacked_run, tmp_path).read_text()
    assert "inverting_gradients" in drawn and "url(http" not in drawn
    pixels = np.asarray(Image.open(figure(attacked_run, tmp_path)).convert("RGB"))
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 10


@pytest.mark.slow
def test_a_browser_shows_each_view(attacked_run: Run, tmp_path: Path) -> None:
    pytest.importorskip("playwright", reason="needs playwright, of the extra dev")
    if not any(map(shutil.which, BROWSERS)):
        pytest.skip(f"needs Chromium: none of {', '.join(BROWSERS)} is on the path")
    made = list(photograph(attacked_run, tmp_path))
    assert [path.stem for path in made] == list(VIEWS)
    for path in made:
        image = Image.open(path)
        assert image.size == (WIDTH, HEIGHT)
        assert len(np.unique(np.asarray(image.convert("L")))) > 30, "something is drawn"


def test_a_run_that_is_none_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
