"""A client's own report, which needs no server: its rounds, answers, withheld updates, and its worst leak."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedgauge.attacks.modality.images import ImageModality
from fedgauge.attacks.plan import describe
from fedgauge.client.components import SpecError
from fedgauge.client.deployment.deployed_client import DeployedClient
from fedgauge.client.deployment.owner import OwnerConfig
from fedgauge.client.deployment.state_folder import ClientFolder
from fedgauge.client.deployment.terms import RequestRefused, ServerTerms
from fedgauge.client.files import read_file
from fedgauge.defenses.accounting import DELTA, PrivacyStatement, privacy_statement
from fedgauge.server.store.run_files import printable
from fedgauge.server.views.roles import is_attack

GRADED = ImageModality.main  # a client grades images alone
SHOWN_REASONS = 10
MOST_BYTES = 1 << 30  # of a log


@dataclass
class ClientRound:
    """One round of one of the server's runs, from the client's log.

    Args:
        outcome: sent, or withheld.
        reported: by attack, the best value that was reported to the server; exact: the same before rounding.
        refused: grading requests that were not answered.
    """

    run: int
    round: int
    outcome: str = ""
    reported: dict[str, float] = field(default_factory=dict)
    exact: dict[str, float] = field(default_factory=dict)
    refused: int = 0


@dataclass(frozen=True)
class ClientReport:
    """Totals of a client's log.

    Args:
        reasons: why updates were withheld, and requests refused or failed, with counts.
        privacy: what the sent updates have spent; None if the client never met a server.
    """

    owner: OwnerConfig
    rounds: Sequence[ClientRound]
    reasons: Mapping[str, int]
    privacy: PrivacyStatement | None

    def best(self, attacks: bool = True) -> tuple[float, str, ClientRound] | None:
        """Value, attack and round of the best graded reconstruction; None before the first.

        Args:
            attacks: or of what the server calls baselines, as it may call any reconstruction.
        """
        found = [(v, name, r) for r in self.rounds for name, v in r.exact.items() if is_attack(name) == attacks]
        return GRADED.leakiest(found, lambda each: each[0])


def read(path: Path) -> ClientReport:
    """The report for an owner's file; SpecError if the file or the log cannot be read."""
    owner = OwnerConfig.load(path)
    rounds: dict[tuple[int, int], ClientRound] = {}
    reasons: Counter[str] = Counter()
    made: list[Mapping[str, Any]] = []  # silence about an update that was made follows from it
    for event in _events(ClientFolder(owner.state).log):
        kind = event["event"]
        if "round" in event:
            at = rounds.setdefault((event["run"], event["round"]), ClientRound(event["run"], event["round"]))
        if kind in ("sent", "withheld"):
            made.append(event)
            at.outcome = kind
        if kind == "graded":
            at.reported |= _best_of_each(event["told"])
            at.exact |= _best_of_each(event["exact"])
            at.refused += len(event["refused"])
        if kind in ("withheld", "refused", "failed"):
            reasons[f"{kind}: {event.get('cause') or event.get('reason')}"] += 1
    return ClientReport(owner, [rounds[key] for key in sorted(rounds)], reasons, _privacy(owner, made))


def _best_of_each(graded: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: best for name, values in graded.items() if (best := GRADED.leakiest(values, float)) is not None}


def _events(log: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = read_file(log, MOST_BYTES).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return
    except OSError as error:
        raise SpecError(f"{log} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise SpecError(f"{log}, line {number}, is damaged: {error}") from error


def _privacy(owner: OwnerConfig, made: Sequence[Mapping[str, Any]]) -> PrivacyStatement | None:
    """The epsilon of all updates that were made; unknown if the owner's chain or data changed between them."""
    protocol = ClientFolder(owner.state).protocol()
    if protocol is None:
        return None
    try:
        # what was spent does not depend on who is a canary, of which the owner may think otherwise by now
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
        console.print(_shown(text), markup=False, highlight=False, soft_wrap=True)

    owner, grading = report.owner, report.owner.grading
    say(f"client {owner.client}, as {owner.path} says")
    chain = " > ".join(map(describe, owner.chain))
    say(f"chain: {chain}; {owner.draw.batch_size} examples a round, sampling {owner.draw.sampling}")
    scores = f"scores, to {grading.precision:g} {GRADED.unit}, at most {grading.queries} of one batch"
    say(f"grading: {'off, no reconstruction is scored' if grading.mode == 'off' else scores}")
    say(f"guard: {_guard(owner)}")
    console.print(_table(report.rounds) if report.rounds else "no round yet")
    for text, times in sorted(report.reasons.items(), key=lambda item: -item[1])[:SHOWN_REASONS]:
        say(f"{text} ({times} x)")
    worst, floor = report.best(), report.best(attacks=False)
    if worst is not None:
        value, attack, at = worst
        told = f"to the server as {at.reported[attack]:g}" if attack in at.reported else "not to the server"
        say(f"worst leak: {value:.2f} {GRADED.unit} {GRADED.name} ({attack}, round {at.round}; reported {told})")
    elif report.rounds:
        say("worst leak: unknown, because nothing was graded; that is no sign of safety")
    if floor is not None and (worst is None or GRADED.sign * (floor[0] - worst[0]) > 0):
        value, name, at = floor
        say(
            f"what the server calls the baseline {name} has {value:.2f} {GRADED.unit} (round {at.round}): "
            "it may call any reconstruction so"
        )
    if report.privacy is not None:
        say(f"differential privacy: {report.privacy.words}.")
        if answers := sum(len(r.reported) for r in report.rounds):
            say(f"That is of the updates alone: {answers} scores, which the examples decided, are not in it.")


def _guard(owner: OwnerConfig) -> str:
    guard = owner.guard
    if guard is None:
        return "none"
    parts = ["entries that are not finite"]
    parts += [] if guard.max_norm is None else [f"a norm above {guard.max_norm:g}"]
    if guard.audit is not None:  # its unit is that of the data, which the server names
        level = "the value from which it has leaked" if guard.threshold is None else f"{guard.threshold:g}"
        parts.append(f"an example reconstructed by {guard.audit} at {level} or better, by the data's main metric")
    return "holds back " + ", or ".join(parts)


def _table(rounds: Sequence[ClientRound]) -> Table:
    unit = f"({GRADED.unit})"
    heads = (
        "run",
        "round",
        "update",
        "answered",
        "refused",
        "best attack",
        f"{GRADED.name} reported {unit}",
        f"exact {unit}",
    )
    table = Table(*heads, box=None)
    numbers: dict[int, int] = defaultdict(lambda: len(numbers) + 1)  # Flower's run numbers are random and long
    for r in rounds:
        best = GRADED.leakiest(filter(is_attack, r.exact), r.exact.__getitem__) or ""
        reported = f"{r.reported[best]:g}" if best in r.reported else ""
        exact = f"{r.exact[best]:.2f}" if best else ""
        cells = [numbers[r.run], r.round, r.outcome, len(r.reported), r.refused]
        table.add_row(*map(str, cells), Text(_shown(best)), reported, exact)
    return table


def _shown(text: str) -> str:
    """What a server named, in one line without control codes."""
    return printable(text).replace("\n", " ")
