"""A sweep: a grid of defenses x attacks x seeds, each defense and seed a run of its own, trained in memory and attacked.

A sweep file has what all runs share in [scenario], every [[defense]] with its chain, every [[attack]], and the seeds. Runs
lie in one folder, so that `fedgauge watch` and `fedgauge report` set them side by side; an interrupted sweep goes on where it
stopped.
"""

import csv
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Grid

from fedgauge.attacks.grading.image_metrics import AUGMENTED
from fedgauge.client.components import SpecError, Table, coerce
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import write_bytes
from fedgauge.server.views.overview import privacy
from fedgauge.server.views.reading import Reading
from fedgauge.server.views.roles import is_baseline, is_limit
from fedgauge.simulations.run import processes
from fedgauge.simulations.run.launch import blame, child_environment
from fedgauge.simulations.run.simulate import INTERRUPTED, Interrupt, create_run

POLL = 0.2  # seconds between looks at the cells at work
_TOP = ("scenario", "seeds", "defense", "attack")
# keys of a [[defense]]; its others are tables of the scenario, merged into those of [scenario]
_NEEDED = ("name", "chain")
_OWN = (*_NEEDED, "promise")
_MERGED = ("data", "model", "strategy", "secure_sum", "audit", "privacy")


@dataclass(frozen=True)
class SweepCell:
    """One run of the grid: a defense and a seed; promise: what the defense is said to do, for the tables."""

    defense: str
    seed: int
    tables: Table
    promise: str = ""

    @property
    def folder(self) -> str:
        """The name of its run."""
        return f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', self.defense).strip('-.')}-seed{self.seed}"


@dataclass(frozen=True)
class SweepRow:
    """One cell of the matrix: what an attack got out of a defense with one seed, and what the defense cost.

    Args:
        accuracy: on the test images after the last round.
        mean, low, high, best: PSNR (dB) over all attacked examples, its 95 % interval clustered by client.
        augmented: mean PSNR to what was trained on, where the defense changed the examples.
        baseline: the best mean of an answer that reads no update; limit: the van Trees bound in dB, where there is one.
        epsilon: of one record replaced, over the rounds that were run, where a guarantee holds.
        n: examples graded; failed: attacked without a grade.
        reason: why there is no number, or why some are missing.
    """

    defense: str
    attack: str
    seed: int
    accuracy: float | None
    mean: float | None
    low: float | None
    high: float | None
    best: float | None
    augmented: float | None
    baseline: float | None
    limit: float | None
    epsilon: float | None
    n: int
    failed: int
    reason: str
    run: str


@dataclass(frozen=True)
class Sweep:
    """A checked sweep file: the text as it was read, and its cells with every scenario built once."""

    name: str
    text: str
    cells: tuple[SweepCell, ...]

    @classmethod
    def load(cls, path: Path) -> "Sweep":
        """Read and check a file; SpecError names the file, the table, the value and what is allowed."""
        try:
            text = path.read_text()
            return cls(path.stem, text, tuple(_cells(tomllib.loads(text))))
        except FileNotFoundError as error:
            raise SpecError(f"{path}: there is no such file") from error
        except IsADirectoryError as error:
            raise SpecError(f"{path} is a folder: name a sweep's file, like simulations/defenses.toml") from error
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SpecError(f"{path}: not a readable TOML file: {error}") from error
        except SpecError as error:
            raise SpecError(f"{path}: {error}") from error


def _cells(tables: Table) -> list[SweepCell]:
    if unknown := sorted(tables.keys() - set(_TOP)):
        hint = "; this looks like a scenario: fedgauge run" if "chain" in tables else ""
        raise SpecError(f"unknown key {unknown[0]!r} (a sweep has: {', '.join(_TOP)}){hint}")
    shared = coerce(tables.get("scenario", {}), dict, "[scenario]")
    for key in ("chain", "attack", "seed"):
        if key in shared:
            raise SpecError(
                f"[scenario]: {key} is what the sweep varies: it belongs into [[defense]], [[attack]], seeds"
            )
    seeds = coerce(tables.get("seeds", [0]), Sequence[int], "seeds")
    defenses = [coerce(d, dict, f"[[defense]] #{i}") for i, d in enumerate(_list(tables, "defense"), 1)]
    attacks = [coerce(a, dict, f"[[attack]] #{i}") for i, a in enumerate(_list(tables, "attack"), 1)]
    if not defenses or not attacks or not seeds:
        raise SpecError(
            "a sweep needs at least one [[defense]], one [[attack]] and one seed (see simulations/defenses.toml)"
        )
    if len(set(seeds)) < len(seeds):
        raise SpecError(f"seeds: each once, got {list(seeds)}")
    for i, defense in enumerate(defenses, 1):
        if lacking := [key for key in _NEEDED if not defense.get(key)]:
            raise SpecError(f"[[defense]] #{i} needs {lacking[0]!r}")
    names = [coerce(d["name"], str, f"[[defense]] #{i}: name") for i, d in enumerate(defenses, 1)]
    _check_targets(attacks, names)
    cells = [
        SweepCell(
            name,
            seed,
            _scenario(shared, defense, name, attacks, seed, f"[[defense]] #{i} ({name})"),
            coerce(defense.get("promise", ""), str, f"[[defense]] #{i} ({name}): promise"),
        )
        for i, (name, defense) in enumerate(zip(names, defenses, strict=True), 1)
        for seed in seeds
    ]
    folders = [cell.folder for cell in cells]
    if repeated := sorted({f for f in folders if folders.count(f) > 1}):
        raise SpecError(f"two cells would be called {repeated[0]!r}: give each [[defense]] a name of its own")
    return cells


def _list(tables: Table, key: str) -> list[Any]:
    if isinstance(tables.get(key), Mapping):
        raise SpecError(f"[{key}] is a list of tables: write [[{key}]]")
    return list(coerce(tables.get(key, []), list, f"[[{key}]]"))


def _check_targets(attacks: Sequence[Table], names: Sequence[str]) -> None:
    for i, attack in enumerate(attacks, 1):
        against = coerce(attack.get("defenses", names), Sequence[str], f"[[attack]] #{i}: defenses")
        if not against:
            raise SpecError(
                f"[[attack]] #{i}: defenses names none; leave the attack out, or the key: it then meets all"
            )
        for name in against:
            if name not in names:
                raise SpecError(f"[[attack]] #{i}: defenses names {name!r}; there are: {', '.join(names)}")


def _scenario(shared: Table, defense: Table, name: str, attacks: Sequence[Table], seed: int, where: str) -> Table:
    """The scenario of one cell, built once so that a mistake is told before anything runs."""
    if unknown := sorted(defense.keys() - {*_OWN, *_MERGED}):
        raise SpecError(f"{where}: unknown key {unknown[0]!r} (it has: {', '.join((*_OWN, *_MERGED))})")
    merged = {k: dict(v) if isinstance(v, Mapping) else v for k, v in shared.items()}
    for key in (k for k in _MERGED if k in defense):
        merged[key] = {**merged.get(key, {}), **coerce(defense[key], dict, f"{where}: {key}")}
    met = [{k: v for k, v in a.items() if k != "defenses"} for a in attacks if name in a.get("defenses", [name])]
    tables = {**merged, "seed": seed, "chain": coerce(defense.get("chain"), list, f"{where}: chain"), "attack": met}
    try:
        Scenario.from_tables(tables)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from error
    return tables


# ------------------------------------------------------------------------------------------------------------ the runs


class _CellProcess:
    """One cell's process, with everything it started."""

    def __init__(self, cell: SweepCell, run: Run) -> None:
        self.cell, self.run = cell, run
        self.mark = uuid.uuid4().hex
        self.scratch = Path(tempfile.mkdtemp(prefix="fedgauge-"))
        command = [sys.executable, "-m", "fedgauge.simulations.experiments.sweep_worker", str(run.folder.resolve())]
        self.child: subprocess.Popen[bytes] = processes.start(
            command, run.log("cell.log"), child_environment(self.scratch, self.mark)
        )

    def close(self) -> None:
        """End it."""
        try:
            processes.end(self.child, patience=1.0)
        finally:
            processes.sweep(self.mark)
            shutil.rmtree(self.scratch, ignore_errors=True)


def sweep(
    found: Sweep, folder: Path, parallel: int, interrupt: Interrupt, tell: Callable[[str], None]
) -> list[SweepRow]:
    """Run what is left of a sweep, `parallel` cells at a time; rows of all cells that have ended.

    sweep.csv, sweep.json and sweep.md in the folder are written again after every cell.

    Raises:
        SpecError: the folder holds another sweep.
    """
    _claim(found, folder)
    waiting = [cell for cell in found.cells if not _is_done(folder / cell.folder)]
    done = len(found.cells) - len(waiting)
    if done:
        tell(f"{done} of {len(found.cells)} cells were done before")
    elif waiting:
        tell(f"{len(waiting)} cells, {min(parallel, len(waiting))} at a time")
    at_work: list[_CellProcess] = []
    failures: dict[str, str] = {}
    started, ended = time.monotonic(), 0
    try:
        while (waiting and not interrupt.asked) or at_work:
            while waiting and len(at_work) < parallel and not interrupt.asked:
                cell = waiting.pop(0)
                at_work.append(_CellProcess(cell, _prepared(cell, folder)))
            for work in [w for w in at_work if w.child.poll() is not None]:
                at_work.remove(work)
                work.close()
                ended += 1
                if work.child.returncode:
                    what = f"its process ended with status {work.child.returncode}"
                    failures[work.cell.folder] = blame(work.run, what, "cell.log")
                left = (time.monotonic() - started) / ended * len(waiting + at_work)
                tell(f"{done + ended} of {len(found.cells)} cells: {work.cell.folder}{_left(left)}")
                write_rows(folder, rows(found, folder, failures), found)
            if interrupt.asked:
                break
            time.sleep(POLL)
    finally:
        for work in at_work:
            work.close()
    result = rows(found, folder, failures)
    write_rows(folder, result, found)
    return result


def _left(seconds: float) -> str:
    return f", about {seconds / 60:.0f} min left" if seconds >= 30 else ""


def _claim(found: Sweep, folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise SpecError(f"{folder} is a file: --output names the folder of the sweep's runs")
    kept = folder / "sweep.toml"
    if kept.exists() and kept.read_text() != found.text:
        raise SpecError(
            f"{folder} holds a sweep of another file (its sweep.toml differs): name another folder with --output, "
            "or remove it"
        )
    if not kept.exists() and folder.exists() and any(folder.iterdir()):
        raise SpecError(f"{folder} is not empty and no sweep's: name another folder with --output")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_bytes(kept, found.text.encode())


def _prepared(cell: SweepCell, folder: Path) -> Run:
    """The cell's run: as it stands where its training is done, else a fresh one."""
    path = folder / cell.folder
    if path.exists():
        if (path / "ledger.sqlite").exists():
            with Run(path).ledger() as ledger:
                if ledger.meta().get("state") == "trained":
                    return Run(path)
        shutil.rmtree(path)
    return create_run(Scenario.from_tables(cell.tables), path)


def _is_done(path: Path) -> bool:
    """Whether a cell has trained and attacked all that it could."""
    if not (path / "ledger.sqlite").exists():
        return False
    with Run(path).ledger() as ledger:
        meta = ledger.meta()
        return meta.get("state") == "trained" and meta.get("cell") == "ended"


# ------------------------------------------------------------------------------------------------------------ the rows


def rows(found: Sweep, folder: Path, failures: Mapping[str, str] | None = None) -> list[SweepRow]:
    """A row for each cell of the grid that has ended, in the order of the file: a number, or why there is none."""
    result = []
    for cell in found.cells:
        path = folder / cell.folder
        if failures and cell.folder in failures:
            result += [_without(cell, attack, failures[cell.folder]) for attack in _attacks(cell)]
        elif _is_done(path):
            with closing(Reading(Run(path))) as reading, reading.now():
                result += [_row(cell, attack, reading) for attack in _attacks(cell)]
    return result


def _attacks(cell: SweepCell) -> list[str]:
    return [str(a.get("name", str(a["use"]).split(":")[-1])) for a in cell.tables["attack"]]


def _without(cell: SweepCell, attack: str, reason: str) -> SweepRow:
    nothing: dict[str, Any] = {f.name: None for f in fields(SweepRow)}
    return SweepRow(**{**nothing, "defense": cell.defense, "attack": attack, "seed": cell.seed, "n": 0, "failed": 0,
                  "reason": reason, "run": cell.folder})  # fmt: skip


def _row(cell: SweepCell, attack: str, reading: Reading) -> SweepRow:
    pooled, changed = reading.pooled("psnr"), reading.pooled("psnr" + AUGMENTED)
    leak, last = pooled.get(attack), max(reading.rounds, default=None)
    floors = [found.mean for name, found in pooled.items() if is_baseline(name) and found.mean is not None]
    limits = [found.mean for name, found in pooled.items() if is_limit(name) and found.mean is not None]
    told = [*reading.ledger.reasons(), *reading.ledger.reasons("failed")]
    reasons = [f"{r['reason']} ({r['jobs']} x)" for r in told if r["attack"] == attack]
    if reading.meta.get("replay") == "mismatch":
        reasons.append(f"not attacked, as the replay check fails: {reading.meta['replay_detail']}")
    observations = reading.ledger.observations()
    if not any(o["status"] == "accepted" for o in observations):
        reasons += dict.fromkeys(f"no update was accepted: {o['reason']}" for o in observations[:1])
    return SweepRow(
        defense=cell.defense,
        attack=attack,
        seed=cell.seed,
        accuracy=None if last is None else reading.rounds[last]["accuracy"],
        mean=leak.mean if leak else None,
        low=leak.low if leak else None,
        high=leak.high if leak else None,
        best=leak.best if leak else None,
        augmented=changed[attack].mean if attack in changed else None,
        baseline=max(floors, default=None),
        limit=max(limits, default=None),
        epsilon=privacy(reading)["epsilon"],
        n=leak.n if leak else 0,
        failed=sum(leak.failed.values()) if leak else 0,
        reason="; ".join(reasons),
        run=cell.folder,
    )


def write_rows(folder: Path, found: Sequence[SweepRow], of: Sweep) -> None:
    """sweep.csv, sweep.json and sweep.md, each whole or not at all."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(SweepRow)])
    writer.writeheader()
    writer.writerows(asdict(row) for row in found)
    write_bytes(folder / "sweep.csv", text.getvalue().encode())
    write_bytes(folder / "sweep.json", (json.dumps([asdict(r) for r in found], indent=1) + "\n").encode())
    promises = {cell.defense: cell.promise for cell in of.cells}
    write_bytes(folder / "sweep.md", ("\n".join(summary(found, promises)) + "\n").encode())


def summary(found: Sequence[SweepRow], promises: Mapping[str, str]) -> list[str]:
    """A Markdown table with a line for each defense: its strongest attack here, and its cost beside the first defense's accuracy.

    Args:
        promises: of every defense, in the sweep's order.

    The strongest is that of the highest mean PSNR over the seeds, to the images or to what the defense made of them.
    """
    lines = [
        "| defense | what it promises | strongest attack | PSNR, dB (interval) | baseline | limit | epsilon | accuracy | cost |",
        "|---|---|---|---|---:|---:|---:|---:|---:|",
    ]
    names = list(dict.fromkeys(row.defense for row in found))
    first = _accuracy([row for row in found if row.defense == next(iter(promises or names))])
    for name in names:
        own = [row for row in found if row.defense == name]
        accuracy = _accuracy(own)
        cost = None if accuracy is None or first is None else 100 * (first - accuracy)
        cells = [
            name,
            promises.get(name, ""),
            *_strongest(own),
            _decibel(_mean([r.baseline for r in own])),
            _decibel(_mean([r.limit for r in own])),
            _epsilon([r.epsilon for r in own]),
            "–" if accuracy is None else f"{100 * accuracy:.0f} %",
            "–" if cost is None else str(round(cost)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _strongest(own: Sequence[SweepRow]) -> tuple[str, str]:
    """One defense's strongest attack, and its leak in words."""

    def leak(attack: str) -> float | None:
        means = [_mean([getattr(r, of) for r in own if r.attack == attack]) for of in ("mean", "augmented")]
        return max((m for m in means if m is not None), default=None)

    leaks = {attack: value for attack in dict.fromkeys(r.attack for r in own) if (value := leak(attack)) is not None}
    if not leaks:
        return "none gave a number", "–"
    best = max(leaks, key=lambda attack: leaks[attack])
    of = [r for r in own if r.attack == best]
    words = _decibel(_mean([r.mean for r in of]))
    if len(of) == 1 and of[0].low is not None and of[0].high is not None:
        words += f" ({of[0].low:.1f} to {of[0].high:.1f})"
    augmented = _mean([r.augmented for r in of])
    return f"`{best}`", words + ("" if augmented is None else f"; {augmented:.1f} to what was trained on")


def _accuracy(own: Sequence[SweepRow]) -> float | None:
    """Of one defense, a seed once."""
    return _mean([r.accuracy for r in {r.seed: r for r in own}.values()])


def matrix(found: Sequence[SweepRow]) -> Grid:
    """Defenses against attacks: mean PSNR over the seeds, with accuracy beside; a dash where there is no number."""
    attacks = list(dict.fromkeys(row.attack for row in found))
    grid = Grid("defense", "accuracy", *attacks, "baseline", "limit", "epsilon", box=None)
    for defense in dict.fromkeys(row.defense for row in found):
        own = [row for row in found if row.defense == defense]
        cells = [_mean([r.mean for r in own if r.attack == attack]) for attack in attacks]
        accuracy = _accuracy(own)
        grid.add_row(
            defense,
            "–" if accuracy is None else f"{100 * accuracy:.1f} %",
            *map(_decibel, cells),
            _decibel(_mean([r.baseline for r in own])),
            _decibel(_mean([r.limit for r in own])),
            _epsilon([r.epsilon for r in own]),
        )
    return grid


def _mean(values: Sequence[float | None]) -> float | None:
    there = [v for v in values if v is not None]
    return sum(there) / len(there) if there else None


def _epsilon(values: Sequence[float | None]) -> str:
    """The largest: of guarantees for several seeds only that one holds for all."""
    there = [v for v in values if v is not None]
    return f"{max(there):.3g}" if there else "–"


def _decibel(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def run_sweep(path: Path, folder: Path, parallel: int) -> int:
    """The command: run what is left, then show the matrix and what it lacks, and write the comparison; exit status."""
    from fedgauge.simulations.reports.report import write_comparison

    found, console = Sweep.load(path), Console(stderr=True)
    with Interrupt().caught() as interrupt:
        result = sweep(found, folder, parallel, interrupt, lambda words: console.print(words, highlight=False))
    if result:
        print("mean PSNR (dB) over all attacked examples; what lies at the baseline or below found nothing")
        Console(width=None if sys.stdout.isatty() else 180).print(matrix(result))
    lacking = [row for row in result if row.mean is None]
    for row in lacking:
        print(f"{row.defense}, {row.attack}, seed {row.seed}: {row.reason or 'nothing was graded'}")
    ended = [Run(folder / cell.folder) for cell in found.cells if _is_done(folder / cell.folder)]
    if ended:
        print(write_comparison(ended, folder / "comparison.html"))
    print(folder / "sweep.csv")
    if interrupt.asked:
        console.print(f"stopped; go on with the same command ({len(ended)} of {len(found.cells)} cells are done)")
        return INTERRUPTED
    return int(len(ended) < len(found.cells))
