"""The report as a PDF, printed by an installed Chromium."""

import os
import shutil
import subprocess
from pathlib import Path

from fedgauge.client.components import SpecError
from fedgauge.server.store import run_files
from fedgauge.server.store.run import Run
from fedgauge.simulations.run import processes

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 120.0  # seconds
DRAWING = 10_000  # ms of the page's virtual time, which passes as fast as its scripts finish
PAPER = (750, 1060)  # pixels: about an A4 page, so that figures are drawn at their printed width


def find_browser() -> str:
    """The path of an installed Chromium; SpecError if there is none."""
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    raise SpecError(
        f"Chromium is needed, but none of {', '.join(BROWSERS)} is on the path; install one, or print"
        " report.html from any browser"
    )


def write_pdf(run: Run, patience: float = PATIENCE) -> Path:
    """Print the run's report.html to report.pdf, atomically and for its owner only; returns its path.

    Raises:
        SpecError: no Chromium is installed.
        TimeoutError: Chromium did not finish.
        OSError: Chromium printed nothing.
    """
    browser, path = find_browser(), run.folder / "report.pdf"
    page = run.folder / "report.html"
    # in the run's folder, for its access rights: a browser profile keeps what it has shown
    with run_files.scratch_folder(run.folder) as scratch:
        made, log, shown = (scratch / name for name in ("report.pdf", "log", page.name))
        shown.write_bytes(run_files.read(page))
        process = processes.start([browser, *_options(scratch / "profile", made), shown.as_uri()], log, os.environ)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"{browser} had not printed {page} after {patience:.0f} s; it was ended") from error
        finally:
            processes.end(process, patience=2.0)
        if process.returncode != 0 or not made.exists() or not made.read_bytes().startswith(b"%PDF"):
            raise OSError(f"{browser} printed no PDF (exit status {process.returncode}){_last_words(log)}")
        run_files.write(path, made.read_bytes())
    return path


def _options(profile: Path, made: Path) -> list[str]:
    options = [
        "--headless", "--disable-gpu", "--no-first-run", "--disable-extensions", "--disable-background-networking",
        "--disable-component-update", "--disable-breakpad", "--disable-crash-reporter",
        "--host-resolver-rules=MAP * ~NOTFOUND",  # neither the page nor the browser may use the network
        f"--user-data-dir={profile}", f"--window-size={PAPER[0]},{PAPER[1]}", f"--virtual-time-budget={DRAWING}",
        "--no-pdf-header-footer", f"--print-to-pdf={made}",
    ]  # fmt: skip
    return [*options, "--no-sandbox"] if os.geteuid() == 0 else options  # as root it does not start with a sandbox


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return f": {lines[-1]}" if lines else ""
