"""What a run tested and what it did not, beside the classes of attacks that published texts name."""

from collections.abc import Iterator
from dataclasses import dataclass

from fedgauge.attacks.modality.membership import HELD, MEMBER, QUESTIONS
from fedgauge.server.views.membership import tests_of, why_not_tested
from fedgauge.server.views.privacy import canaries, privacy
from fedgauge.server.views.reading import Reading
from fedgauge.server.views.roles import is_attack
from fedgauge.server.views.verdict import verdict_of

TEXTS = ("NIST AI 100-2 E2025", "EDPB Opinion 28/2024, paragraph 55", "OWASP AI Testing Guide")
MAPS_TO = (
    "The classes map to those that these texts name. Nothing here says that a system complies with any of them. The EDPB's "
    "opinion is about models that have been trained; what is measured here is the updates that are sent while they are trained. "
    "A test that finds nothing is evidence against the attacks of that test alone."
)


@dataclass(frozen=True)
class TestedClass:
    """One class of attacks, and whether the run tested it.

    Args:
        question: what an attacker of this class wants to know.
        by: the attacks that tested it; none if it was not tested.
        found: what came of it, or why it was not tested.
        maps_to: the class's name in each of TEXTS; empty where a text does not name it.
    """

    question: str
    by: tuple[str, ...]
    found: str
    maps_to: tuple[str, str, str]

    @property
    def tested(self) -> bool:
        return bool(self.by)


def coverage(reading: Reading) -> list[TestedClass]:
    """Every class of attacks, the tested ones first."""
    return sorted([*_reconstruction(reading), *_membership(reading), *_others(reading)], key=lambda row: not row.tested)


def _names(reading: Reading, members: bool) -> tuple[str, ...]:
    """The attacks of one kind that ended on some update, however they ended, less those that do not apply to any."""
    ended = {row["attack"] for row in reading.ledger.outcomes() if row["status"] not in ("failed", "not_applicable")}
    planned = reading.ledger.planned()
    return tuple(n for n, p in planned.items() if is_attack(n) and n in ended and p.tells_members == members)


def _reconstruction(reading: Reading) -> Iterator[TestedClass]:
    judged, by = verdict_of(reading), _names(reading, members=False)
    maps_to = ("data reconstruction", "reconstruction attacks; model inversion", "AITG-MOD-05, inversion attacks")
    noun = f"{reading.scores.measure.private}s"
    found = judged.sentences[0] if by else f"not tested: {judged.sentences[0]}"
    yield TestedClass(f"What is in the clients' {noun}, and which labels they have", by, found, maps_to)


def _membership(reading: Reading) -> Iterator[TestedClass]:
    told = {found.metric: found for found in verdict_of(reading).members}
    for metric in (MEMBER, HELD):  # anybody's batch is the first question again, asked of a whole round
        by = tuple(n for n in _names(reading, members=True) if n in tests_of(reading.ledger, metric))
        found = told[metric].sentence if metric in told else f"not tested: {why_not_tested(reading.ledger, metric)}"
        yield TestedClass(QUESTIONS[metric].asked, by if metric in told else (), found, _OF_MEMBERS)


_OF_MEMBERS = ("membership inference", "membership inference", "AITG-MOD-04, membership inference")


def _others(reading: Reading) -> Iterator[TestedClass]:
    named = tuple(str(table.get("use")) for table in reading.tables.get("server_attack", ()))
    shown = canaries(reading)
    alters = "see the section on the malicious server" if named else HONEST
    bound = ("canaries",) if shown.rows else ()
    words = shown.words if bound else f"not tested by canaries. {privacy(reading)['words']}"
    reconstruction = ("data reconstruction", "", "")
    yield TestedClass("What a server learns that alters the weights it sends", named, alters, reconstruction)
    yield TestedClass("Whether the noise protects as much as its epsilon says", bound, words, ("", "", ""))
    for question, why, maps_to in NEVER_TESTED:
        yield TestedClass(question, (), why, maps_to)


HONEST = "not tested: this server sends the weights that it should"
NOT_HERE = "not tested: fedgauge has no such attack"
NEVER_TESTED = (
    ("Properties of a client's data as a whole", NOT_HERE, ("property inference", "", "")),
    ("An unknown attribute of a record of which the rest is known", NOT_HERE, ("", "attribute inference", "")),
    (
        "What the trained model gives away when it is asked",
        "not tested: it is about the trained model, and updates are measured here",
        ("", "exfiltration; regurgitation of training data", "AITG-DAT-01, training data exposure"),
    ),
    (
        "The model itself",
        "not tested: the server has the model, so there is nothing to extract",
        ("model extraction", "", "AITG-APP-09, model extraction"),
    ),
)
