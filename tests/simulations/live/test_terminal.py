"""The live display fits the terminal and carries the ledger's numbers."""

import io
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from fedgauge.attacks.plan import AttackPlan, PlannedAttack
from fedgauge.server.store.run import Run
from fedgauge.server.views.leakage import leakage
from fedgauge.simulations.live.progress import RunProgress
from fedgauge.simulations.live.terminal import LiveDisplay
from tests.simulations.live.conftest import Clock, begun
from tests.small_runs import scores_of


def drawn(run_progress: RunProgress, width: int, height: int, note: str = "") -> str:
    """What a terminal is sent."""
    console = terminal(width, height)
    display = LiveDisplay(run_progress, console)
    display.note = note
    console.print(display)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def terminal(width: int, height: int) -> Console:
    given: dict[str, Any] = {
        "force_terminal": True,
        "color_system": "truecolor",
        "legacy_windows": False,
        "_environ": {},
    }
    return Console(file=io.StringIO(), width=width, height=height, **given)


def bare(sent: str) -> list[str]:
    return Text.from_ansi(sent).plain.splitlines()


def test_the_display_carries_the_ledgers_numbers(looking: RunProgress, attacked: Run) -> None:
    with attacked.ledger() as ledger:
        leaks = {k.attack: k for k in leakage(scores_of(ledger), "psnr") if k.round == 2}
        worst = max(r["value"] for r in ledger.scores("psnr") if r["attack"] == "analytic")
    floor = max(k.mean for a, k in leaks.items() if a != "analytic" and k.mean is not None)
    lines = bare(drawn(looking, 200, 24))
    assert lines[0].startswith("rounds ") and " 2/4 " in lines[0]
    assert lines[1].startswith("attacks ") and " 16/16 " in lines[1]
    assert "accuracy 50.0%; 16 of 16 attacks done" in lines[2]
    assert lines[3].startswith("replay check: cosine")
    assert lines[5:] == [
        f"best baseline: {floor:.1f} dB now",
        f"analytic: {leaks['analytic'].mean:.1f} dB now, worst case {worst:.1f} dB",
    ]


def test_text_is_never_markup(tmp_path: Path, clock: Clock) -> None:
    run = begun(tmp_path)
    hostile = AttackPlan((PlannedAttack("[red]x[/red]", {"use": "analytic"}),))
    with run.ledger() as ledger:
        ledger.add_attacks(hostile, {"[red]x[/red]": ""})
        ledger.set_meta(replay="mismatch", replay_detail="[blink]not[/blink]\n\x1b[31mred\x07")
        run_progress = RunProgress(ledger, run.scenario(), clock=clock)
        run_progress.refresh()
        sent = drawn(run_progress, 80, 24, note="[/] wait")
    lines = bare(sent)
    assert any(line.startswith("[red]x[/red]:") for line in lines)
    assert any("[/] wait" in line for line in lines) and "[blink]not[/blink]" in sent
    assert "\x07" not in sent and "\x1b[31mred" not in sent


def test_a_display_follows_the_ledger_and_is_wiped(taped: Run, clock: Clock) -> None:
    console = terminal(100, 30)
    file = console.file
    assert isinstance(file, io.StringIO)
    with taped.ledger() as ledger, taped.ledger() as other:
        view = LiveDisplay(RunProgress(ledger, taped.scenario(), clock=clock), console)
        with view.shown():
            view.update()
            assert "3/4" not in file.getvalue()
            other.record_round(3, 0.7, 1.0, 1.0, 0.0)
            clock.now += 1
            view.note = "waiting"
            view.update()
            assert "3/4" in file.getvalue() and "waiting" in file.getvalue()
        assert file.getvalue().endswith("\x1b[1A\x1b[2K" * 6), "it is wiped"
