"""The PDF: a real Chromium prints the page once its figures are drawn, and nothing of the browser is left behind."""

import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedgauge.attacks.plan import AttackPlan, PlannedAttack
from fedgauge.attacks.score_rows import ScoreRecord
from fedgauge.client.components import SpecError
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.reports.pdf import find_browser, write_pdf

try:
    find_browser()
    missing = ""
except SpecError as error:
    missing = str(error)

needs_browser = pytest.mark.skipif(bool(missing), reason=missing)
BLUE, GREEN, RED = b"0 .4471 .698 rg", b"0 1 0 rg", b"1 0 0 rg"  # as a PDF names a colour to fill with


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with one score."""
    tables = {
        "seed": 1,
        "rounds": 1,
        "clients": 1,
        "data": {"use": "mnist5k", "batch_size": 1, "auxiliary": 10},
        "model": {"use": "mlp", "hidden": [8]},
        "chain": [{"use": "local_sgd", "rate": 0.1}],
    }
    run = Run.create(tmp_path / "a run & more", Scenario.from_tables(tables))
    plan = AttackPlan((PlannedAttack("analytic", {"use": "analytic"}),))
    with run.ledger() as ledger:
        ledger.add_attacks(plan, {"analytic": "honest server"})
        ledger.record_intake(1, [Participation(0, "accepted", "", 1, "digest")], plan)
        ledger.record_round(1, 0.5, 2.0, 1.0, 0.0)
        while (lease := ledger.lease()) is not None:
            ledger.finish(lease, {0: [ScoreRecord(1, 0, "analytic", 0, "psnr", 20.0, "converged", 0.1)]})
    return run


def streams(pdf: Path) -> bytes:
    """What the pages draw."""
    data, found = pdf.read_bytes(), []
    for start in re.finditer(rb"stream\r?\n", data):
        try:
            found.append(zlib.decompressobj().decompress(data[start.end() :]))
        except zlib.error:  # a stream that is not compressed
            continue
    return b"".join(found)


def at_work(word: str) -> Iterator[str]:
    """The command lines of living processes in which a word stands (Linux)."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line:
            yield line


@needs_browser
@pytest.mark.slow
def test_the_command_prints_the_report_with_its_figures(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    path = run.folder / "report.pdf"
    path.write_text("an old one")
    assert main(["report", str(run.folder), "--pdf"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(run.folder / "report.html"), str(path)]
    assert path.read_bytes().startswith(b"%PDF-")
    assert path.stat().st_mode & 0o777 == 0o600
    assert BLUE in streams(path), "the attack's colour in the figures, which Plotly has drawn"
    assert not list(run.folder.glob(".part-*")), "the profile is gone"
    assert list(at_work(f"/proc/{os.getpid()}/fd/")) == []


@needs_browser
@pytest.mark.slow
def test_what_a_page_draws_late_or_before_printing_is_on_paper(run: Run) -> None:
    (run.folder / "report.html").write_text("""<!doctype html>
<div id="late"></div><details id="folded"><p style="color: #00ff00">what is folded</p></details>
<details><p style="color: #ff0000">what stays folded</p></details>
<script>
setTimeout(() => { document.getElementById("late").innerHTML = '<p style="color: #0072b2">drawn late</p>'; }, 3000);
addEventListener("beforeprint", () => { document.getElementById("folded").open = true; });
</script>""")
    drawn = streams(write_pdf(run))
    assert BLUE in drawn
    assert GREEN in drawn
    assert RED not in drawn


@needs_browser
@pytest.mark.slow
def test_a_page_that_never_ends_is_given_up_and_leaves_nothing(run: Run) -> None:
    (run.folder / "report.html").write_text("<!doctype html><script>for (;;) {}</script>")
    (run.folder / "report.pdf").write_text("an old one")
    with pytest.raises(TimeoutError, match=r"had not printed .*report\.html after 4 s; it was ended"):
        write_pdf(run, patience=4)
    assert (run.folder / "report.pdf").read_text() == "an old one"
    assert not list(run.folder.glob(".part-*"))
    assert list(at_work(f"/proc/{os.getpid()}/fd/")) == []


def test_without_a_browser_it_says_what_to_install(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert main(["report", str(run.folder), "--pdf"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "Chromium is needed, but none of chromium, chromium-browser, google-chrome is on the path" in told.err


@pytest.mark.parametrize(("user", "sandboxed"), [(0, False), (1000, True)])
def test_a_browser_that_prints_nothing_is_told_with_its_last_words(
    user: int,
    sandboxed: bool,
    run: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program of that name which only repeats its options: no real browser fails when it is asked to."""
    (tmp_path / "bin").mkdir()
    browser = tmp_path / "bin" / "chromium-browser"
    browser.write_text('#!/bin/sh\necho "$@"\nexit 3\n')
    browser.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("os.geteuid", lambda: user)
    assert main(["report", str(run.folder), "--pdf"]) == 2
    told = capsys.readouterr()
    assert f"{browser} printed no PDF (exit status 3): --headless" in told.err
    assert ("--no-sandbox" not in told.err) is sandboxed
    assert "MAP * ~NOTFOUND" in told.err
    assert re.search(r"file:///\S+/report.html", told.err)
    assert not (run.folder / "report.pdf").exists()
    assert not list(run.folder.glob(".part-*"))
