"""The audit record: a chain of hashed entries on what a run tested, against whom, on which data, and what it did not test.

Each entry holds the SHA-256 of the one before, so that one digest, the last, stands for all. A chain is no signature: whoever may
write the file can write another chain. Keep the last digest elsewhere (the report shows it), and an altered record is noticed.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedgauge.client.components import SpecError
from fedgauge.server.store import run_files
from fedgauge.server.store.ledger_connection import LedgerError
from fedgauge.server.store.run import Run
from fedgauge.server.views.assurance.coverage import MAPS_TO, TEXTS, coverage
from fedgauge.server.views.outcomes import attacked_on
from fedgauge.server.views.overview import environment
from fedgauge.server.views.reading import Reading, read_once
from fedgauge.server.views.roles import role_of
from fedgauge.server.views.scores import Scores
from fedgauge.server.views.verdict import verdict_of
from fedgauge.simulations.run.environment import package

NAME = "audit-record.json"
FORMAT = 1  # of the entries
BEGINNING = "0" * 64  # what the first entry holds as the digest of the one before
WORDED = ("format", "verdict", "tested")  # entries whose words may change with fedgauge's version


@dataclass(frozen=True)
class Entry:
    """One entry: what it is about, what it says, the digest of the one before, and its own."""

    about: str
    says: Any
    before: str
    digest: str


def digest_of(before: str, about: str, says: Any) -> str:
    """The SHA-256 of an entry, in hexadecimal digits."""
    return _sha256(json.dumps([before, about, says], sort_keys=True, separators=(",", ":")).encode())


def chained(facts: Iterable[tuple[str, Any]]) -> list[Entry]:
    """What each entry is about and says, as a chain."""
    entries, before = [], BEGINNING
    for about, says in facts:
        plain = json.loads(json.dumps(says, default=str))
        entries.append(Entry(about, plain, before, digest_of(before, about, plain)))
        before = entries[-1].digest
    return entries


def record_of(reading: Reading) -> list[Entry]:
    """The record of a run as read; equal runs give equal records."""
    return chained(_facts(reading))


def write_record(run: Run, entries: Sequence[Entry]) -> None:
    """Write a run's record into its folder, atomically."""
    text = json.dumps({"entries": [asdict(entry) for entry in entries]}, indent=1)
    run_files.write(run.folder / NAME, text.encode())


def _facts(reading: Reading) -> Iterator[tuple[str, Any]]:
    ledger, plan = reading.ledger, reading.ledger.planned()
    name = run_files.printable(reading.run.name)
    yield "format", {"format": FORMAT, "fedgauge": package("fedgauge"), "run": name}
    text = reading.run.scenario_text()
    yield "scenario", {"sha256": _sha256(text.encode(errors="replace")), "seed": reading.tables["seed"], "text": text}
    yield "data", _data(reading)
    yield "environment", {"versions": environment(reading), "attacks": attacked_on(ledger)}
    observations = [[o[k] for k in ("round", "client", "status", "examples", "digest")] for o in ledger.observations()]
    counts = {status: sum(o[2] == status for o in observations) for status in ("accepted", "rejected", "missing")}
    digest = _sha256(json.dumps(observations, separators=(",", ":")).encode())
    yield "updates", {**counts, "rounds": len({o[0] for o in observations}), "sha256": digest}
    planned_names = [row["name"] for row in reading.attacks]
    for row in reading.attacks:
        says = {"planned": json.loads(plan[row["name"]].to_json()), "knew": row["parts"], "seed": row["seed"]}
        yield f"{role_of(row['name'])} {row['name']}", {**says, **_scored(reading.scores, row["name"])}
    others = [name for name in reading.scores.attacks if name not in planned_names]
    yield "other scores", {name: _scored(reading.scores, name) for name in others}
    replay = {key: reading.meta.get(key, "") for key in ("replay", "replay_detail")}
    judged = verdict_of(reading)
    yield "verdict", {"word": judged.word, "sentences": judged.sentences, **replay}
    classes = [asdict(row) for row in coverage(reading)]
    yield "tested", {"plan": reading.plan_coverage.to_json(), "texts": TEXTS, "note": MAPS_TO, "classes": classes}


def _data(reading: Reading) -> dict[str, Any]:
    says: dict[str, Any] = {"named": reading.tables["data"]}
    if reading.ledger.deployed:
        return {**says, "not here": "the clients keep their data"}
    try:
        shards = reading.scenario.federation.shards
    except SpecError as error:
        return {**says, "not here": str(error)}
    x, y = (t.contiguous().numpy().tobytes() for t in (shards.dataset.x, shards.dataset.y))
    digest = reading.keep("data", lambda: _sha256(x, y))
    return {**says, "examples": len(shards.dataset.y), "of each client": [*map(len, shards.indices)], "sha256": digest}


def _sha256(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _scored(scores: Scores, attack: str) -> dict[str, Any]:
    """How many score rows an attack has, and a digest of them."""
    own = scores.of_attack(attack)
    columns = [own.round, own.client, own.example, own.metric, own.status, own.value + 0.0]
    names = repr((own.metrics, own.statuses)).encode(errors="replace")
    return {"scores": len(own), "sha256": _sha256(names, *(column.tobytes() for column in columns))}


# -------------------------------------------------------------------------------------------------------- verification


def read_record(path: Path) -> list[Entry]:
    """A record's entries; LedgerError if the file is none."""
    try:
        entries = json.loads(run_files.read(path))["entries"]
        return [Entry(str(e["about"]), e["says"], str(e["before"]), str(e["digest"])) for e in entries]
    except FileNotFoundError:
        raise LedgerError(f"{path.parent} has no {NAME}: write it with: fedgauge report {path.parent}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LedgerError(f"{path} is no audit record: {error!r:.200}") from error


def broken_link(entries: Sequence[Entry]) -> str:
    """Which entry does not fit the one before or its own digest; empty if the chain holds."""
    before = BEGINNING
    for number, entry in enumerate(entries, 1):
        if entry.before != before:
            return f"entry {number} ({entry.about}) does not follow the one before: one was altered, left out or put in"
        if entry.digest != digest_of(before, entry.about, entry.says):
            return f"entry {number} ({entry.about}) was altered: its digest does not fit what it says"
        before = entry.digest
    return "" if entries else "it has no entry"


def disagreements(run: Run, last: str = "") -> list[str]:
    """Why a run's record is not that of the run; empty if it is.

    Args:
        last: the digest of the last entry, as it was kept elsewhere; empty: unknown.

    Raises:
        LedgerError: there is no record, or the run cannot be read.
    """
    entries = read_record(run.folder / NAME)
    if broken := broken_link(entries):
        return [broken]
    if last and entries[-1].digest != last:
        return [f"the last digest is {entries[-1].digest}, and not {last}: another record is in its place"]
    with read_once(run) as reading:
        told, found = _said(entries), _said(record_of(reading))
    skipped = WORDED if words_unchecked(entries) else ("format",)  # a run may be renamed
    return [
        f"{about}: the record does not say what the run's folder holds today"
        for about in {**told, **found}
        if about not in skipped and told.get(about) != found.get(about)
    ]


def words_unchecked(entries: Sequence[Entry]) -> str:
    """Why the record's own words cannot be compared with today's; empty if they can."""
    formats = [entry.says for entry in entries if entry.about == "format" and isinstance(entry.says, dict)]
    theirs = [(says.get("format"), says.get("fedgauge")) for says in formats]
    if theirs == [(FORMAT, package("fedgauge"))]:
        return ""
    return f"it is of fedgauge {', '.join(str(version)[:40] for _, version in theirs)}, and words may differ from this version's"


def _said(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """What the entries say, by what they are about: as many texts of JSON as there are such entries."""
    said: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        said[entry.about].append(json.dumps(entry.says, sort_keys=True))
    return said
