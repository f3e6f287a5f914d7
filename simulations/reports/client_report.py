"""A client's own report, which needs no server: its rounds, answers, withheld updates, and its worst leak."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedgauge.attacks.modality.images import ImageModality
from fedgauge.attacks.plan import describe
from fedgauge.client.components import SpecError, coerce
from fedgauge.client.deployment.deployed_client import DeployedClient
from fedgauge.client.deployment.owner import OwnerConfig
from fedgauge.client.deployment.state_folder import ClientFolder
from fedgauge.client.deployment.terms import RequestRefused, ServerTerms
from fedgauge.client.files import read_file
from fedgauge.defenses.accounting import (
    DELTA,
    Accountant,
    NoGuarantee,
    PrivacyStatement,
    UnknownGuarantee,
    privacy_statement,
)
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

    @property
    def worst(self) -> tuple[float, str, ClientRound] | None:
        """Value, attack and round of the best graded reconstruction, baselines excluded; None before the first."""
        return self._best(True)

    @property
    def best_baseline(self) -> tuple[float, str, ClientRound] | None:
        """The same of those that the server calls baselines, as it may call any reconstruction."""
        return self._best(False)

    def _best(self, attacks: bool) -> tuple[float, str, ClientRound] | None:
        found = [(v, name, r) for r in self.rounds for name, v in r.exact.items() if is_attack(name) == attacks]
        return GRADED.leakiest(found, lambda each: each[0])


def read(path: Path) -> ClientReport:
    """The report for an owner's file; SpecError if the file or the log cannot be read."""
    owner = OwnerConfig.load(path)
    rounds: dict[tuple[int, int], ClientRound] = {}
    reasons: Counter[str] = Counter()
    made: dict[str, list[int]] = {}  # by the terms that were noted of it, the entries of each update that was made
    for event in _events(ClientFolder(owner.state).log):
        if event["event"] in ("sent", "withheld"):  # silence about an update that was made follows from it
            terms = json.dumps(event["terms"], sort_keys=True) if "terms" in event else ""
            made.setdefault(terms, []).append(event.get("entries", owner.max_parameters))
        if "round" in event:
            at = rounds.setdefault((event["run"], event["round"]), ClientRound(event["run"], event["round"]))
            _note(at, event)
        if event["event"] in ("withheld", "refused", "failed"):
            cause = event.get("cause") or event.get("reason")
            reasons[f"{event['event']}: {cause}"] += 1
    return ClientReport(owner, [rounds[key] for key in sorted(rounds)], reasons, _privacy(owner, made))


def _note(at: ClientRound, event: Mapping[str, Any]) -> None:
    if event["event"] in ("sent", "withheld"):
        at.outcome = event["event"]
    if event["event"] == "graded":
        at.reported |= _best_of_each(event["told"])
        at.exact |= _best_of_each(event["exact"])
        at.refused += len(event["refused"])


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
            event = json.loads(line)
            _check(event)
        except (ValueError, RecursionError) as error:
            raise SpecError(f"{log}, line {number}, is damaged: {error}") from error
        yield event


def _check(event: Any) -> None:
    """Raise ValueError for what is no event of the log."""
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise ValueError("no event")
    if "round" in event:
        coerce(event.get("run"), int, "run")
        coerce(event["round"], int, "round")
        if coerce(event.get("entries", 1), int, "entries") < 1:
            raise ValueError(f"entries is {event['entries']}")
    if "terms" in event:
        _check_terms(coerce(event["terms"], dict, "terms"))
    if event["event"] == "graded":
        coerce(event.get("round"), int, "round")
        if not isinstance(event.get("refused"), list | dict):
            raise ValueError("refused is no list")
        for key in ("told", "exact"):
            for values in coerce(event.get(key), dict, key).values():
                if not isinstance(values, list) or not all(type(v) in (int, float) for v in values):
                    raise ValueError(f"{key} holds other things than numbers")


def _check_terms(terms: Mapping[str, Any]) -> None:
    if terms.keys() != {"chain", "batch_size", "secret", "records"}:
        raise ValueError("terms are others")
    for link in coerce(terms["chain"], list, "chain"):
        coerce(link, dict, "chain")
    coerce(terms["secret"], bool, "secret")
    if min(coerce(terms[key], int, key) for key in ("batch_size", "records")) < 1:
        raise ValueError("terms without examples")


def _privacy(owner: OwnerConfig, made: Mapping[str, Sequence[int]]) -> PrivacyStatement | None:
    """What was spent, by the chain that the client really applied to each update.

    Args:
        made: by its terms (empty: an older fedgauge noted none), the entries of each update that was made: the server may have
            named other networks than the last one.
    """
    protocol = ClientFolder(owner.state).protocol()
    if protocol is None:
        return None
    try:
        # what was spent does not depend on who is a canary, of which the owner may think otherwise by now
        asked = replace(ServerTerms.parse(protocol), canaries=0)
        own = DeployedClient.of(replace(owner, canary=False), asked)
    except RequestRefused as error:
        raise SpecError(f"{owner.state}: the last protocol cannot be used: {error}") from error
    today, by_terms = json.dumps(own.terms, sort_keys=True), defaultdict[str, list[int]](list)
    for terms, sizes in made.items():
        by_terms[terms or today] += sizes
    if by_terms.keys() <= {today}:
        sizes, secret = by_terms[today], bool(own.terms["secret"])
        return privacy_statement(own, {owner.client: len(sizes)}, secret=secret, entries=max(sizes, default=None))
    return _added(owner, asked, by_terms, len(made.get("", ())))


def _added(
    owner: OwnerConfig, asked: ServerTerms, by_terms: Mapping[str, Sequence[int]], unknown: int
) -> PrivacyStatement:
    """What was spent under several versions of the owner's file: the epsilons of each, at its part of delta, add up.

    Args:
        unknown: of how many updates no terms were noted.
    """
    part, every, record, client = DELTA / len(by_terms), sum(map(len, by_terms.values())), 0.0, 0.0
    for text, sizes in by_terms.items():
        terms = json.loads(text)
        draw = replace(owner.draw, batch_size=terms["batch_size"])
        # a guard of today says nothing of it
        then = replace(owner, canary=False, guard=None, chain=tuple(terms["chain"]), draw=draw)
        where = f"of {len(sizes)} of {every} updates, which were made under another version of this file"
        try:
            own = DeployedClient.of(then, asked)
            spent = Accountant.of(own, part, terms["secret"], max(sizes)).spent(len(sizes), terms["records"])
        except NoGuarantee as why:
            state: Literal["none", "unknown"] = "unknown" if isinstance(why, UnknownGuarantee) else "none"
            return PrivacyStatement(None, None, DELTA, f"{where}: {why}", state)
        except (RequestRefused, SpecError) as why:
            words = f"no epsilon is known {where}, as its chain is refused today: {why}"
            return PrivacyStatement(None, None, DELTA, words, "unknown")
        record, client = record + spent.record, client + spent.client
    if math.inf in (record, client):
        words = "no epsilon: the noise of some was next to nothing beside what the clip let an update move"
        return PrivacyStatement(None, None, DELTA, words, "none")
    words = (
        f"epsilon {record:.3g} for one record replaced, {client:.3g} for all of a client's data (delta {DELTA:g}; {every} rounds "
        f"under {len(by_terms)} versions of this file, of which each is accounted by its own chain, and all are added)"
    )
    if unknown:
        words += f"; {unknown} of them, of which an older fedgauge noted no chain, count as made under today's"
    return PrivacyStatement(record, client, DELTA, words, "holds")


def show(report: ClientReport, console: Console) -> None:
    """Print the report, as plain text if there is no terminal."""

    def say(text: str) -> None:
        console.print(_shown(text), markup=False, highlight=False, soft_wrap=True)

    owner, grading = report.owner, report.owner.grading
    say(f"client {owner.client}, as {owner.path} says")
    say(
        f"chain: {' > '.join(map(describe, owner.chain))}; {owner.draw.batch_size} examples a round, sampling {owner.draw.sampling}"
    )
    if grading.mode == "off":
        say("grading: off, no reconstruction is scored")
    else:
        say(f"grading: scores, to {grading.precision:g} {GRADED.unit}, at most {grading.queries} of one batch")
    say(f"guard: {_guard(owner)}")
    if not report.rounds:
        say("no round yet")
    else:
        console.print(_table(report.rounds))
    for text, times in sorted(report.reasons.items(), key=lambda item: -item[1])[:SHOWN_REASONS]:
        say(f"{text} ({times} x)")
    if report.worst is not None:
        value, attack, at = report.worst
        reported = (
            f"reported to the server as {at.reported[attack]:g}"
            if attack in at.reported
            else "not reported to the server"
        )
        say(f"worst leak: {value:.2f} {GRADED.unit} {GRADED.name} ({attack}, round {at.round}; {reported})")
    elif report.rounds:
        say("worst leak: unknown, because nothing was graded; that is no sign of safety")
    floor = report.best_baseline
    if floor is not None and (report.worst is None or GRADED.sign * (floor[0] - report.worst[0]) > 0):
        value, name, at = floor
        say(
            f"what the server calls the baseline {name} has {value:.2f} {GRADED.unit} (round {at.round}): "
            "it may call any reconstruction so"
        )
    if report.privacy is not None:
        say(f"differential privacy, by the chain of each update: {report.privacy.words}.{_not_covered(report.rounds)}")


def _not_covered(rounds: Sequence[ClientRound]) -> str:
    """What the epsilon of the updates does not cover."""
    answers = sum(len(r.reported) for r in rounds)
    return f" Of the updates alone: {answers} scores, which the examples decided, are not in it." if answers else ""


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
    table = Table(
        "run",
        "round",
        "update",
        "answered",
        "refused",
        "best attack",
        f"{GRADED.name} reported ({GRADED.unit})",
        f"exact ({GRADED.unit})",
        box=None,
    )
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
