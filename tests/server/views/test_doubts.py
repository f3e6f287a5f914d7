"""Why it proves nothing that no leak was found: the verdict and the gate give one answer."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from fedgauge.attacks.grading.knowledge_card import NO_DERIVATIVE
from fedgauge.attacks.plan import AttackPlan, PlannedAttack
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import UNGRADED
from fedgauge.server.store.run import Run
from fedgauge.server.views.gate import Threshold, gate_of_run
from fedgauge.server.views.snapshot import read_once
from fedgauge.server.views.verdict import Verdict, verdict_of
from tests.server.views.test_leakage_and_verdict import PLAN, Cell, Values, drawn, score
from tests.small_runs import scenario

WITH_MEMBERS = AttackPlan((*PLAN.attacks, PlannedAttack("membership", {"use": "membership"})))
Spoil = Callable[[Ledger], None]


def run_of(folder: Path, spoil: Spoil, gain: float, area: float, lost: bool = False, flat: bool = False) -> Run:
    """A finished run whose attack gains so many dB, and whose test of membership has this area."""
    cells: dict[Cell, Values | None] = drawn(0, gain, chance=0.0)
    cells |= {(1, c, "membership"): {"membership": [area + 0.1 * (-1) ** c]} for c in range(12)}
    cells |= {(2, 0, "random_image"): None} if lost else {}
    run = Run.create(folder, scenario(rounds=2 if lost else 1))
    with run.ledger() as ledger:
        blind = ["matching"] if flat else []
        ledger.add_attacks(WITH_MEMBERS, {p.name: "" for p in WITH_MEMBERS.attacks}, flat=blind)
        score(ledger, cells, examples=4, plan=WITH_MEMBERS)
        ledger.set_meta(state="trained")
        spoil(ledger)
    return run


def said(run: Run) -> tuple[Verdict, Mapping[str, str], Mapping[str, str]]:
    """The verdict; by metric the gate's outcome and its line."""
    with read_once(run) as reading:
        results = gate_of_run(
            reading, [Threshold("psnr", 14.0), Threshold("worst.psnr", 17.0), Threshold("membership", 0.7)]
        )
        outcomes, lines = ({r.threshold.metric: text(r) for r in results} for text in (lambda r: r.outcome, str))
        return verdict_of(reading), outcomes, lines


def meta(**values: str) -> Spoil:
    return lambda ledger: ledger.set_meta(**values)


def queue_one(ledger: Ledger) -> None:
    ledger._db.execute("UPDATE jobs SET state = 'queued' WHERE id = (SELECT max(id) FROM jobs)")


def leave_one_ungraded(ledger: Ledger) -> None:
    of_it = "attack = 'matching' AND client = 0"
    ledger._db.execute(f"DELETE FROM scores WHERE {of_it} AND (metric != 'psnr' OR example)")
    ledger._db.execute(f"UPDATE scores SET value = NULL, status = ?, example = -1 WHERE {of_it}", (UNGRADED,))


def shorten(ledger: Ledger) -> None:
    """Plan what `fedgauge app` does for a slow network."""
    ledger.set_meta(examples="observed")
    ledger._db.execute("UPDATE attacks SET planned = json_set(planned, '$.budget.iterations', 10)")


def diverge(ledger: Ledger) -> None:
    ledger._db.execute("UPDATE scores SET status = 'diverged' WHERE attack = 'matching'")


@pytest.mark.parametrize(
    ("spoil", "how", "why", "members_too"),
    [
        (meta(), {}, "", False),
        (meta(), {"flat": True}, NO_DERIVATIVE, False),
        (leave_one_ungraded, {}, "1 reconstruction not graded", False),
        (diverge, {}, "every search diverged", False),
        (shorten, {}, "no search had more than 10 iterations", False),
        (queue_one, {}, "1 attack not ended", True),
        (meta(), {"lost": True}, "1 of 52 attacks failed: random_image (1 x): WorkerCrashed: gone", True),
        (meta(replay="mismatch"), {}, "the replay check failed", True),
        (meta(training_fits="False"), {}, "the assumed local training", True),
        (meta(truth_doubts="that of client 0"), {}, "against wrong examples: that of client 0", True),
        (meta(state="failed"), {}, "the training failed", True),
        (meta(state=""), {}, "the training was interrupted", True),
    ],
)
def test_verdict_and_gate_doubt_the_same(
    tmp_path: Path, spoil: Spoil, how: Mapping[str, bool], why: str, members_too: bool
) -> None:
    verdict, outcomes, lines = said(run_of(tmp_path / "quiet", spoil, -3.0, 0.5, **how))
    (members,) = verdict.members
    assert outcomes == {
        **dict.fromkeys(("psnr", "worst.psnr"), "not measured" if why else "passed"),
        "membership": "not measured" if members_too else "passed",
    }
    assert verdict.reconstruction == ("undetermined" if why else "not shown to leak") == verdict.word
    assert members.word == ("undetermined" if members_too else "not shown to leak")
    assert why in lines["psnr"] and why in verdict.sentences[0]
    assert not members_too or (why in lines["membership"] and why in members.sentence)

    verdict, outcomes, lines = said(run_of(tmp_path / "leaks", spoil, 3.0, 0.85, **how))
    assert set(outcomes.values()) == {"failed"}, "what was found stays found"
    assert "within the threshold" not in "".join(lines.values())
    assert {verdict.word, verdict.reconstruction, *(told.word for told in verdict.members)} == {"leaks"}
