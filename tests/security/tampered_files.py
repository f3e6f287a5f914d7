"""How somebody changes a run or an owner's file who knows what is in it: each kind changes a copy, and says how."""

import contextlib
import copy
import hashlib
import json
import math
import random
import sqlite3
import tomllib
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import tomli_w
import torch

from fedgauge.server.store.tape import digest_of, read_tensors, write_tensors
from fedgauge.simulations.reports.audit_record import BEGINNING, NAME

NUMBERS: tuple[Any, ...] = (
    -1,
    0,
    1,
    3,
    7,
    2**21 - 1,
    2**21,
    10**9,
    2**31,
    2**53,
    2**63 - 1,
    -(2**63),
    0.5,
    -1.5,
    1e308,
    math.inf,
    -math.inf,
)
TEXTS = (
    "",
    "x",
    "0",
    "-1",
    "1e9",
    "10" * 40,
    "\0",
    "é\u202e",
    "../../x",
    "a" * 10**5,
    "null",
    "[]",
    "{}",
    "[" * 5000,
    "<b>&",
    "failed",
    "psnr",
)
PLANNED = (
    '{"name": 1, "table": {}, "budget": {}}',
    '{"name": "a", "table": {"use": 7}, "budget": {"iterations": 1}}',
    '{"name": "a", "table": {"use": "no_such"}, "budget": {"iterations": -1}}',
    '{"budget": []}',
    '{"name": "a"}',
    '{"name": "a", "table": {"use": "dlg"}, "budget": {"iterations": 1e400}, "trace": "x"}',
)
META = (
    "rounds",
    "state",
    "mode",
    "replay",
    "replay_detail",
    "nodes",
    "truth",
    "retried",
    "assumed",
    "training",
    "empty",
    "truth_doubts",
    "grading",
    "server_attack",
    "flower_run_from_round_1",
    "flower_run_from_round_x",
    "rounds_asked_again",
    "uploads",
)
SCHEMA = (
    "DROP TABLE {table}",
    "DROP TABLE scores; CREATE VIEW scores AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i job_id,"
    " 'a' attack, 0 client, 0 example, 'psnr' metric, 1 round, 1.0 value, 'ok' status, 0.0 seconds FROM n",
    "ALTER TABLE meta RENAME TO m; CREATE VIEW meta AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n)"
    " SELECT 'k' key, 'v' value FROM n",
    "CREATE TRIGGER t AFTER INSERT ON meta BEGIN DELETE FROM scores; END",
    "CREATE TABLE more (x)",
    "ALTER TABLE {table} ADD COLUMN more",
    "DROP INDEX jobs_by_state",
    "PRAGMA user_version = 3",
    "PRAGMA user_version = -1",
    "PRAGMA application_id = 7",
    "CREATE VIRTUAL TABLE v USING fts5(x)",
)


def _value(rng: random.Random) -> Any:
    return rng.choice((None, *NUMBERS, *TEXTS, *PLANNED, b"\xff\x00", b"x" * 5000, rng.randrange(10), rng.random()))


def _table(rng: random.Random, db: sqlite3.Connection) -> str:
    return rng.choice([row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")])


def ledger_values(rng: random.Random, run: Path) -> str:
    """Another value in a column, in one row or in all."""
    with _ledger(run) as db:
        table = _table(rng, db)
        column = rng.choice([row[1] for row in db.execute(f"PRAGMA table_info({table})")])
        one = rng.random() < 0.5
        key = "key" if table == "meta" else "round"
        names = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        where = f"WHERE {key} = (SELECT {key} FROM {table} ORDER BY random() LIMIT 1)" if one and key in names else ""
        value = rng.choice((_value(rng), "9" * 5_000_000)) if rng.random() < 0.02 else _value(rng)
        db.execute(f"UPDATE OR IGNORE {table} SET {column} = ? {where}", (value,))
        return f"{table}.{column} = {value!r:.40} {where[:5]}"


def ledger_facts(rng: random.Random, run: Path) -> str:
    """Facts about the run of other shapes."""
    with _ledger(run) as db:
        key, value = (
            rng.choice(META),
            str(rng.choice((*NUMBERS, *TEXTS, "deployment", "mismatch", "trained", '{"0": "x"}', '{"x": 1}'))),
        )
        db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))
        return f"{key} = {value!r:.40}"


def ledger_rows(rng: random.Random, run: Path) -> str:
    """Rows that are missing, or too many."""
    with _ledger(run) as db:
        table = _table(rng, db)
        if rng.random() < 0.5:
            db.execute(f"DELETE FROM {table} WHERE random() % ? = 0", (rng.choice((1, 2, 3)),))
            return f"fewer {table}"
        names = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        column, by = rng.choice(names), rng.choice((1, 5, 10**6, -7))
        fields = ", ".join(f"{n} + {by}" if n == column else "NULL" if n == "id" else n for n in names)
        db.execute(f"INSERT OR IGNORE INTO {table} SELECT {fields} FROM {table}")
        return f"more {table} by {column} + {by}"


def ledger_schema(rng: random.Random, run: Path) -> str:
    """Other tables, and programs in their place."""
    with _ledger(run) as db:
        script = rng.choice(SCHEMA).format(table=_table(rng, db))
        db.executescript(script)
        return script


def ledger_pages(rng: random.Random, run: Path) -> str:
    """Pages that point to each other or to themselves: a few of them look like endless rows."""
    path = run / "ledger.sqlite"
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[16:18], "big")
    pages = len(data) // size
    for _ in range(rng.randrange(1, 4)):
        page = rng.randrange(pages)
        start = page * size + (100 if page == 0 else 0)
        if rng.random() < 0.6:  # an inner page whose children are all itself, or another
            data[start] = rng.choice((5, 2))
            child, cells = rng.randrange(1, pages + 1), rng.randrange(1, 40)
            data[start + 1 : start + 12] = (
                b"\0\0"
                + cells.to_bytes(2, "big")
                + (size - 9 * cells).to_bytes(2, "big")
                + b"\0"
                + child.to_bytes(4, "big")
            )
            for i in range(cells):
                at = size - 9 * (i + 1)
                data[start + 12 + 2 * i : start + 14 + 2 * i] = at.to_bytes(2, "big")
                data[page * size + at : page * size + at + 5] = child.to_bytes(4, "big") + bytes([min(127, i)])
        else:
            at = rng.randrange(page * size, page * size + size - 4)
            data[at : at + 4] = rng.choice((b"\xff" * 4, b"\0" * 4, rng.randbytes(4)))
    path.write_bytes(data)
    if rng.random() < 0.3:
        (run / "ledger.sqlite-wal").write_bytes(
            rng.choice((b"\x37\x7f\x06\x82", b"")) + rng.randbytes(rng.randrange(4096))
        )
        (run / "ledger.sqlite-shm").write_bytes(rng.randbytes(rng.choice((10, 32768))))
    return "pages"


@contextlib.contextmanager
def _ledger(run: Path) -> Iterator[sqlite3.Connection]:
    db = sqlite3.connect(run / "ledger.sqlite", isolation_level=None)
    try:
        yield db
    except (
        sqlite3.IntegrityError,
        sqlite3.OperationalError,
    ):  # a constraint that even a tamperer cannot break this way
        pass
    finally:
        db.close()


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from _places(item, (*path, key))


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def _spoil(rng: random.Random, tables: Any, times: int, more: tuple[Any, ...] = ()) -> str:
    said = []
    for _ in range(times):
        *parents, last = rng.choice(list(_places(tables)) or [("x",)])
        here = tables
        for key in parents:
            here = here[key]
        value = rng.choice(
            (
                *NUMBERS,
                *TEXTS[:-4],
                True,
                [],
                {},
                [{}],
                {"use": "x"},
                [[]],
                *more,
                copy.copy(here)
                if here is not tables
                else 0,  # a shallow one: it may hold a value of a thousand levels,
            )
        )
        if isinstance(here, dict) and rng.random() < 0.15:
            here.pop(last, None)
            said.append(f"no {last}")
        else:
            here[last] = value
            said.append(f"{[*parents, last]} = {value!r:.40}")
    return "; ".join(said)


def _as_toml(rng: random.Random, tables: Any) -> bytes:
    try:
        text = tomli_w.dumps(tables).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError):
        text = b"x = 1"
    if rng.random() < 0.05:
        text += rng.choice(
            (b"z = " + b"[" * 10**5, b"z = " + b"9" * 10**4, b"\xff", b"[" + b"a." * 10**5 + b"a]\n", b"z = 1\n" * 2)
        )
    return text


def scenario(rng: random.Random, run: Path) -> str:
    """A scenario with other values, kinds and sizes."""
    path = run / "scenario.toml"
    tables = tomllib.loads(path.read_text())
    said = _spoil(rng, tables, rng.randrange(1, 3), (date(2020, 1, 1), _deep(40)))
    path.write_bytes(_as_toml(rng, tables))
    return said


def checkpoint(rng: random.Random, run: Path) -> str:
    """A checkpoint with other facts, or of other tensors."""
    path = run / "checkpoint.json"
    facts = json.loads(path.read_text())
    said = ""
    if rng.random() < 0.3:
        tensors = run / facts["tensors"]
        found = read_tensors(tensors)
        name = rng.choice(list(found))
        found[name] = rng.choice(
            (torch.zeros(0), torch.ones(3, 3), torch.tensor(math.nan), found[name].double(), torch.ones(2).bool())
        )
        write_tensors(tensors, found)
        facts["digest"] = digest_of(tensors.read_bytes())
        said = f"{name}: {tuple(found[name].shape)}"
    else:
        said = _spoil(
            rng,
            facts,
            rng.randrange(1, 3),
            ({"dict": [[1]]}, {"tensor": "x"}, {"list": [{"array": "y"}]}, "../../x", _deep(900)),
        )
    path.write_text(json.dumps(facts))
    return said


def other_json(rng: random.Random, run: Path) -> str:
    """environment.json of another shape."""
    text = rng.choice(
        (
            *TEXTS,
            '{"packages": 7}',
            '{"packages": {"torch": [1]}}',
            "[" * 10**5,
            "1" * 5000,
        )
    )
    (run / "environment.json").write_text(text, errors="replace")
    return f"environment {text!r:.30}"


def reconstruction(rng: random.Random, run: Path) -> str:
    """What an attack left, with other shapes and values."""
    path = rng.choice(sorted((run / "reconstructions").iterdir()))
    found = dict(read_tensors(path))
    x = found.get("x", torch.zeros(2, 1, 28, 28))
    name, value = rng.choice(
        (
            ("x", torch.zeros(0)),
            ("x", x[:0]),
            ("x", x[:1]),
            ("x", torch.cat([x, x])),
            ("x", torch.full_like(x, math.nan)),
            ("x", x * 1e38),
            ("x", torch.zeros(2, 5, 3, 3)),
            ("x", x.double()),
            ("x", x.bool()),
            ("x", torch.zeros(2, 1, 1, 1)),
            ("y", torch.tensor([10**12, -5])),
            ("y", torch.zeros(2, 9)),
            ("y", torch.tensor([0.5, math.nan])),
            ("y", torch.zeros(5, dtype=torch.int64)),
            ("example", torch.tensor([10**12, 0])),
            ("example", torch.tensor([-1, -1])),
            ("example", torch.tensor([0.5, 1])),
            ("example", torch.zeros(0, dtype=torch.int64)),
            ("example", torch.tensor(1)),
            ("trace_x", torch.zeros(3, 2, 1, 28, 28)),
            ("trace_x", torch.zeros(3)),
            ("trace_iteration", torch.tensor([math.inf])),
        )
    )
    found[name] = value
    if rng.random() < 0.1:
        found.pop("x", None)
    write_tensors(path, {k: t.contiguous() for k, t in found.items()})
    return f"{path.name}: {name} {tuple(value.shape)}"


def audit_record(rng: random.Random, run: Path) -> str:
    """An audit record whose chain holds, of entries that no run has."""
    entries, before = list[dict[str, Any]](), BEGINNING
    for _ in range(rng.randrange(4)):
        about = rng.choice((*TEXTS, "format", "verdict", 7, None, ["x"], {"a": 1}))
        says = rng.choice((*NUMBERS, *TEXTS, {}, [{}], {"fedgauge": ["x"]}, _deep(900)))
        text = json.dumps([before, about, says], sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()
        entries.append({"about": about, "says": says, "before": before, "digest": digest})
        before = digest
    (run / NAME).write_text(json.dumps({"entries": entries}))
    return f"{[(entry['about'], entry['says']) for entry in entries]!r:.80}"


def owners_file(rng: random.Random, run: Path) -> str:
    """The owner's file, and what the client noted."""
    path = run / "owner" / "client.toml"
    if rng.random() < 0.7:
        tables = tomllib.loads(path.read_text())
        said = _spoil(rng, tables, rng.randrange(1, 3), (date(2020, 1, 1), _deep(40)))
        path.write_bytes(_as_toml(rng, tables))
        return said
    log = path.parent / "state" / "log.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    said = _spoil(rng, events, 1, (_deep(900), {"a": ["x"]}, {"a": [1e400]}))
    log.write_text("\n".join(map(json.dumps, events)))
    return said


KINDS: dict[str, tuple[Callable[[random.Random, Path], str], int]] = {
    "ledger values": (ledger_values, 30),
    "ledger facts": (ledger_facts, 10),
    "ledger rows": (ledger_rows, 10),
    "ledger schema": (ledger_schema, 8),
    "ledger pages": (ledger_pages, 12),
    "scenario": (scenario, 12),
    "checkpoint": (checkpoint, 12),
    "environment": (other_json, 2),
    "reconstruction": (reconstruction, 6),
    "record": (audit_record, 6),
    "owner": (owners_file, 8),
}
