"""Which classes of attacks a run tested, and which it did not."""

from collections.abc import Iterator
from dataclasses import dataclass

from fedgauge.attacks.modality.membership import HELD, MEMBER, QUESTIONS
from fedgauge.server.views.membership import tests_of, why_not_tested
from fedgauge.server.views.privacy import canaries, spent_in
from fedgauge.server.views.reading import Reading
from fedgauge.server.views.roles import is_attack
from fedgauge.server.views.verdict import verdict_of


@dataclass(frozen=True)
class TestedClass:
    """One class of attacks, and whether the run tested it.

    Args:
        question: what an attacker of this class wants to know.
        by: the attacks that tested it; none if it was not tested.
        found: what came of it, or why it was not tested.
    """

    question: str
    by: tuple[str, ...]
    found: str


def coverage(reading: Reading) -> list[TestedClass]:
    """Every class of attacks, the tested ones first."""
    return sorted([*_of_clients(reading), *_of_others(reading)], key=lambda row: not row.by)


def _of_clients(reading: Reading) -> Iterator[TestedClass]:
    judged, planned = verdict_of(reading), reading.ledger.planned()
    ended = {row["attack"] for row in reading.ledger.outcomes() if row["status"] not in ("failed", "not_applicable")}
    names = [name for name in planned if is_attack(name) and name in ended]
    by = tuple(name for name in names if not planned[name].tells_members)
    question = f"What is in the clients' {reading.scores.measure.private}s, and which labels they have"
    yield TestedClass(question, by, f"{'' if by else 'not tested: '}{judged.sentences[0]}")
    told = {found.metric: found for found in judged.members}
    for metric in (MEMBER, HELD):  # anybody's batch is the first question again, asked of a whole round
        by = tuple(name for name in names if metric in told and name in tests_of(reading.ledger, metric))
        found = told[metric].sentence if metric in told else f"not tested: {why_not_tested(reading.ledger, metric)}"
        yield TestedClass(QUESTIONS[metric].asked, by, found)


def _of_others(reading: Reading) -> Iterator[TestedClass]:
    named = tuple(str(table.get("use")) for table in reading.tables.get("server_attack", ()))
    alters = "see the malicious server" if named else "not tested: this server sends the weights that it should"
    yield TestedClass("What a server learns that alters the weights it sends", named, alters)
    shown = canaries(reading)
    words = shown.words if shown.rows else f"not tested by canaries. {spent_in(reading).words}"
    bound = ("canaries",) if shown.rows else ()
    yield TestedClass("Whether the noise protects as much as its epsilon says", bound, words)
    for question in ("Properties of a client's data as a whole", "An unknown attribute of a known record"):
        yield TestedClass(question, (), "not tested: fedgauge has no such attack")
    yield TestedClass("What the trained model gives away", (), "not tested: updates are measured here")
