"""Make README's pictures from a run: `python -m fedgauge.simulations.reports.screenshots RUN [FOLDER]`.

A PNG of each view of the page, an SVG of the terminal, and a PNG of a figure. `make pictures` does it after `make demo`.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from fedgauge.client.components import SpecError
from fedgauge.client.files import replacing
from fedgauge.server.store.ledger_connection import LedgerError
from fedgauge.server.store.run import Run
from fedgauge.simulations.live.progress import RunProgress
from fedgauge.simulations.live.terminal import LiveDisplay
from fedgauge.simulations.reports.pdf import find_browser

PICTURES = Path(__file__).parents[1] / "pictures"
VIEWS = {"overview": "", "gallery": "/gallery", "clients": "/clients"}
WIDTH, HEIGHT = 1280, 1060  # pixels of the window
COLUMNS, LINES = 150, 32  # of the terminal


@contextmanager
def watching(path: Path) -> Iterator[tuple[str, int]]:
    """Run `fedgauge watch` on a free port; yields its address and process id."""
    command = [sys.executable, "-P", "-m", "fedgauge.simulations.cli.main", "watch", str(path), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip().rstrip("/"), process.pid
    finally:
        process.terminate()
        process.communicate(timeout=20)


def photograph(run: Run, folder: Path) -> Iterator[Path]:
    """Write a PNG of each view of the run's page."""
    from playwright.sync_api import sync_playwright

    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with watching(run.folder) as (address, _), sync_playwright() as play:
        browser = play.chromium.launch(executable_path=find_browser(), args=options)
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        for name, rest in VIEWS.items():
            page.goto(f"{address}/run/{run.name}{rest}", wait_until="load")
            page.locator("main .js-plotly-plot .main-svg, main .cards img").first.wait_for()
            page.wait_for_timeout(1000)  # until images are decoded and lines are drawn
            yield _kept(folder / f"{name}.png", page.screenshot())
        browser.close()


def terminal(run: Run, folder: Path) -> Path:
    """Write an SVG of what the terminal shows at the end of a run."""
    with run.ledger() as ledger:
        run_progress = RunProgress(ledger, run.scenario(), training=True)
        run_progress.refresh(force=True)
        kept = StringIO()
        console = Console(
            record=True, force_terminal=True, color_system="truecolor", file=kept, width=COLUMNS, height=LINES
        )
        console.print(LiveDisplay(run_progress, run, console))
        svg = console.export_svg(title="fedgauge run")
        drawn = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # fonts would be loaded from elsewhere
        return _kept(folder / "terminal.svg", drawn.encode())


def figure(run: Run, folder: Path) -> Path:
    """Write the figure of leakage over rounds, as `fedgauge report --figures` draws it."""
    from fedgauge.simulations.reports.figures.write import write_figures

    with TemporaryDirectory() as scratch:
        written, _ = write_figures([run], Path(scratch))
        chosen = next(p for p in written if p.suffix == ".png" and "psnr" in p.name)
        return _kept(folder / "figure.png", chosen.read_bytes())


def _kept(path: Path, data: bytes) -> Path:
    with replacing(path) as file:
        file.write(data)
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the pictures and print their paths."""
    parser = argparse.ArgumentParser(prog="python -m fedgauge.simulations.reports.screenshots", description=__doc__)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("folder", type=Path, nargs="?", default=PICTURES)
    options = parser.parse_args(arguments)
    try:
        run = Run.open(options.run)
        options.folder.mkdir(parents=True, exist_ok=True)
        for path in (terminal(run, options.folder), figure(run, options.folder), *photograph(run, options.folder)):
            print(path)
    except (SpecError, LedgerError, ImportError) as error:
        print(f"pictures: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
