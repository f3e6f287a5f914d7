"""Which classes of attacks a run tested, and which it did not."""

from collections.abc import Iterator, Sequence

from fedgauge.attacks.modality.membership import HELD, MEMBER, QUESTIONS
from fedgauge.server.views.membership import tests_of, why_not_tested
from fedgauge.server.views.privacy import canaries, spent_in
from fedgauge.server.views.reading import Reading
from fedgauge.server.views.roles import is_attack
from fedgauge.server.views.tables import Column, Table
from fedgauge.server.views.verdict import verdict_of

Row = tuple[str, Sequence[str], str]  # what an attacker wants to know, the attacks that tested it, what came of it


def coverage_table(reading: Reading) -> Table:
    """Every class of attacks, the tested ones first."""
    columns = [
        Column("question", "question"),
        Column("by", "tested by"),
        Column("found", "found, or why it was not tested"),
    ]
    rows = sorted([*_of_clients(reading), *_of_others(reading)], key=lambda row: not row[1])
    return Table("What was tested, what not", columns, [(asked, ", ".join(by), found) for asked, by, found in rows])


def _of_clients(reading: Reading) -> Iterator[Row]:
    judged, planned = verdict_of(reading), reading.ledger.planned()
    ended = {row["attack"] for row in reading.ledger.outcomes() if row["status"] not in ("failed", "not_applicable")}
    names = [name for name in planned if is_attack(name) and name in ended]
    by = tuple(name for name in names if not planned[name].tells_members)
    question = f"What is in the clients' {reading.scores.measure.private}s, and which labels they have"
    yield (question, by, f"{'' if by else 'not tested: '}{judged.sentences[0]}")
    told = {found.metric: found for found in judged.members}
    for metric in (MEMBER, HELD):  # anybody's batch is the first question again, asked of a whole round
        by = tuple(name for name in names if metric in told and name in tests_of(reading.ledger, metric))
        found = told[metric].sentence if metric in told else f"not tested: {why_not_tested(reading.ledger, metric)}"
        yield (QUESTIONS[metric].asked, by, found)


def _of_others(reading: Reading) -> Iterator[Row]:
    named = tuple(str(table.get("use")) for table in reading.tables.get("server_attack", ()))
    alters = "see the malicious server" if named else "not tested: this server sends the weights that it should"
    yield ("What a server learns that alters the weights it sends", named, alters)
    shown = canaries(reading)
    words = shown.words if shown.rows else f"not tested by canaries. {spent_in(reading).words}"
    bound = ("canaries",) if shown.rows else ()
    yield ("Whether the noise protects as much as its epsilon says", bound, words)
    for question in ("Properties of a client's data as a whole", "An unknown attribute of a known record"):
        yield (question, (), "not tested: fedgauge has no such attack")
    yield ("What the trained model gives away", (), "not tested: updates are measured here")
