"""A client's own report, which needs no server: rounds, answers, withheld updates, and worst leak."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fedgauge.attacks.modality.images import ImageModality
from fedgauge.client.components import SpecError
from fedgauge.client.deployment.deployed_client import DeployedClient
from fedgauge.client.deployment.owner import OwnerConfig
from fedgauge.client.deployment.state_folder import ClientFolder
from fedgauge.client.deployment.terms import RequestRefused, ServerTerms
from fedgauge.client.files import read_file
from fedgauge.defenses.accounting import DELTA, PrivacyStatement, privacy_statement
from fedgauge.server.store.run_files import printable
from fedgauge.server.views.roles import is_attack
from fedgauge.server.views.tables import Cell, Column, Table
from fedgauge.simulations.reports.terminal import rich_table

GRADED = ImageModality.main  # clients grade only images
SHOWN_REASONS = 10
MOST_BYTES = 1 << 30  # of a log
Graded = tuple[str, float, float | None, int]  # attack, best value, that reported to the server, round


@dataclass(frozen=True)
class ClientReport:
    """Totals of a client's log.

    Args:
        graded: the best reconstruction of each attack in each round.
        answers: number of scores sent to the server.
        reasons: of withheld updates, and refused or failed requests, with counts.
        privacy: loss of the sent updates; None before the first protocol.
    """

    owner: OwnerConfig
    rounds: Table
    graded: Sequence[Graded]
    answers: int
    reasons: Mapping[str, int]
    privacy: PrivacyStatement | None


def read(path: Path) -> ClientReport:
    """Read the report for an owner's file.

    Raises:
        SpecError: the file or the log cannot be read.
    """
    owner = OwnerConfig.load(path)
    events = _events(ClientFolder(owner.state).log)
    made = [event for event in events if event["event"] in ("sent", "withheld")]
    at_fault = (event for event in events if event["event"] in ("withheld", "refused", "failed"))
    reasons = Counter(f"{event['event']}: {event.get('cause') or event.get('reason')}" for event in at_fault)
    rows: list[Sequence[Cell]] = []
    graded: list[Graded] = []
    runs = {run: i for i, run in enumerate(sorted({e["run"] for e in events if "round" in e}), 1)}  # Flower's are long
    places = sorted({(event["run"], event["round"]) for event in events if "round" in event})
    answers = 0
    for run, round in places:
        own = [event for event in events if (event.get("run"), event.get("round")) == (run, round)]
        told, exact = (_best(event[key] for event in own if event["event"] == "graded") for key in ("told", "exact"))
        graded += [(name, value, told.get(name), round) for name, value in exact.items()]
        outcome = next((event["event"] for event in own if event in made), "")
        best = GRADED.leakiest(filter(is_attack, exact), exact.__getitem__)
        refused, answers = sum(len(event.get("refused", ())) for event in own), answers + len(told)
        shown = (best, told.get(best), exact[best]) if best else (None, None, None)
        rows.append([runs[run], round, outcome, len(told), refused, *shown])
    columns = [
        *(Column(key, key, "count") for key in ("run", "round")),
        Column("update", "update"),
        *(Column(key, key, "count") for key in ("answered", "refused")),
        Column("attack", "best attack"),
        Column("reported", f"{GRADED.name} reported ({GRADED.unit})", "number"),
        Column("exact", f"exact ({GRADED.unit})", "number", 2),
    ]
    return ClientReport(owner, Table("Rounds", columns, rows), graded, answers, reasons, _privacy(owner, made))


def _best(graded: Iterator[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return the best value of each attack."""
    found: dict[str, float] = {}
    for each in graded:
        found |= {name: best for name, values in each.items() if (best := GRADED.leakiest(values, float)) is not None}
    return found


def _events(log: Path) -> Sequence[Mapping[str, Any]]:
    try:
        return [json.loads(line) for line in read_file(log, MOST_BYTES).decode(errors="replace").splitlines()]
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        raise SpecError(f"{log} cannot be read: {error}") from error


def _privacy(owner: OwnerConfig, made: Sequence[Mapping[str, Any]]) -> PrivacyStatement | None:
    """Return the privacy loss of all updates; unknown if the owner's chain or data changed between them."""
    protocol = ClientFolder(owner.state).protocol()
    if protocol is None:
        return None
    try:
        # the loss does not depend on canaries
        own = DeployedClient.of(replace(owner, canary=False), replace(ServerTerms.parse(protocol), canaries=0))
    except (RequestRefused, ValueError) as error:
        raise SpecError(f"{owner.state}: the last protocol cannot be used: {error}") from error
    today = json.loads(json.dumps(own.terms))
    if any(event.get("terms", today) != today for event in made):
        words = "no epsilon is known, as some updates were made under another chain, batch size, sampling or share of the data"
        return PrivacyStatement(None, None, DELTA, words)
    # the server may have named larger networks than the last one
    largest = max((event.get("entries", owner.max_parameters) for event in made), default=None)
    return privacy_statement(own, {owner.client: len(made)}, secret=bool(own.terms["secret"]), entries=largest)


def show(report: ClientReport, console: Console) -> None:
    """Print the report, as plain text if there is no terminal."""

    def say(text: str) -> None:
        console.print(printable(text).replace("\n", " "), markup=False, highlight=False, soft_wrap=True)

    say(f"client {report.owner.client}, as {report.owner.path} says")
    console.print(rich_table(report.rounds) if report.rounds.rows else "no round yet")
    for text, times in sorted(report.reasons.items(), key=lambda item: -item[1])[:SHOWN_REASONS]:
        say(f"{text} ({times} x)")
    if worst := GRADED.leakiest((each for each in report.graded if is_attack(each[0])), lambda each: each[1]):
        name, value, answer, round = worst
        reported = "not reported" if answer is None else f"reported to the server as {answer:g}"
        say(f"worst leak: {value:.2f} {GRADED.unit} {GRADED.name} ({name}, round {round}; {reported})")
    elif report.rounds.rows:
        say("worst leak: unknown, because nothing was graded; that is no sign of safety")
    if report.privacy is not None:
        say(f"differential privacy: {report.privacy.words}.")
        if report.answers:
            say(f"This covers only the updates, not the {report.answers} scores, which also depend on the examples.")
