"""Reproduce a paper's table: run its attacks and compare our figures with the paper's, with n, interval and budget."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from fedgauge.attacks.modality.registry import modality_measured
from fedgauge.attacks.plan import ATTACK, ERROR_LIMITS
from fedgauge.client.components import SpecError, is_own, own_line
from fedgauge.client.federation import TRANSFORM
from fedgauge.simulations.checks.remedies import remedy, sentence
from fedgauge.simulations.experiments.measures import DERIVED, AttackOutcome, ComparedFigure, measured, metric_of
from fedgauge.simulations.experiments.paper_tables import AttackSpec, PaperTable, Setting
from fedgauge.simulations.experiments.run_attack import check_attacks, estimate_seconds, run_attack
from fedgauge.simulations.experiments.setups import Setup, build_setup

REPORT_EVERY = 60.0  # seconds between two progress reports of an attack
ReportProgress = Callable[[str], None]


def compared_figures(
    cell: Setting, spec: AttackSpec, outcome: AttackOutcome, others: Mapping[str, AttackOutcome], note: str
) -> list[ComparedFigure]:
    """The rows of one attack in one setting."""
    failed = ""
    if outcome.failed:
        failed = f"{outcome.failed} of {len(outcome.iterations)} attacks failed"
        if not spec.is_limit and not spec.tells_members:
            failed += f", graded as {modality_measured(outcome.scores.metrics).blank_name}"
        failed += "".join(f": {reason}" for reason in outcome.reasons[:1])
    rows = []
    for metric in spec.metrics:
        here, low, high = measured(metric, outcome, others.get(spec.against))
        n = cell.auxiliary if spec.name in ERROR_LIMITS else outcome.examples
        row = ComparedFigure(cell.name, spec.name, metric, spec.paper.get(metric), here, low, high, n)
        rows.append(
            replace(
                row,
                spread=spec.paper.get("spread") if metric == "psnr" else None,
                floor=None if metric in DERIVED else outcome.floor.get(metric_of(metric)),
                budget=_budget(spec, cell),
                note="; ".join(filter(None, (note, failed))),
                seconds=round(outcome.seconds, 1),
            )
        )
    return rows


def _budget(spec: AttackSpec, cell: Setting) -> str:
    """Our budget as text, with the paper's where it differs."""
    if spec.is_limit:
        return "public examples" if spec.name in ERROR_LIMITS else ""
    ours = {
        "n": cell.n * (1 if cell.alone else cell.members * cell.images.batch_size),
        **{k: getattr(spec.budget, k) for k in ("iterations", "restarts")},
    }
    parts = []
    for key, value in ours.items():
        theirs = spec.paper.get(key, value)
        text = f"{value}" + (f" of {theirs:g}" if theirs != value else "")
        if key != "restarts" or theirs != 1 or value != 1:
            parts.append(f"{key} {text}")
    return ", ".join(parts)


def reproduce(
    paper_table: PaperTable, report: ReportProgress, done: Collection[tuple[str, str]] = ()
) -> Iterator[list[ComparedFigure]]:
    """Yield the figures of each attack when it is done; every setting is prepared before the first attack.

    Args:
        done: attacks that need not be run again, as names of cell and attack.
    """
    jobs = [(cell, spec) for cell in paper_table.cells for spec in cell.attacks if (cell.name, spec.name) not in done]
    setups: dict[str, Setup] = {}
    to_do = {cell.name for cell, _ in jobs}
    cells = [cell for cell in paper_table.cells if cell.name in to_do]
    for i, cell in enumerate(cells, 1):
        report(f"preparing {cell.name}, {i} of {len(cells)} cells")
        with _told(f"cell {cell.name}", all(is_own(link, TRANSFORM) for link in cell.chain)):
            setups[cell.name] = build_setup(cell, paper_table.seed)
        check_attacks(cell, setups[cell.name])
    expected = []
    for cell, spec in jobs:
        with _told(f"cell {cell.name}, attack {spec.name}", spec.is_limit or is_own(spec.table, ATTACK)):
            expected.append(estimate_seconds(spec, setups[cell.name], cell.wave))
    outcomes: dict[str, dict[str, AttackOutcome]] = {}
    for i, (cell, spec) in enumerate(jobs):
        job, setup = f"{i + 1} of {len(jobs)}: {cell.name}, {spec.name}", setups[cell.name]
        report(f"{job}; about {sum(expected[i:]):.0f} s left")
        cell_outcomes = outcomes.setdefault(cell.name, {})
        on_progress = _progress_callback(report, job, len(setup.observations), sum(expected[i + 1 :]))
        for needed in cell.attacks:  # what it is compared with was perhaps done in an earlier call
            if needed.name in (spec.name, spec.against) and needed.name not in cell_outcomes:
                own = needed.is_limit or is_own(needed.table, ATTACK)
                with _told(f"cell {cell.name}, attack {needed.name}", own):
                    cell_outcomes[needed.name] = run_attack(needed, setup, cell.wave, on_progress)
        yield compared_figures(cell, spec, cell_outcomes[spec.name], cell_outcomes, setup.note)


@contextmanager
def _told(where: str, own: bool) -> Iterator[None]:
    """Make one sentence of what somebody's own attack or defense raises; fedgauge's own errors stay as they are."""
    try:
        yield
    except SpecError:
        raise
    except Exception as error:  # a user's code may raise anything
        if own and not own_line(error):
            raise
        raise SpecError("; ".join(filter(None, (f"{where}: {sentence(error)}", remedy(error, ""))))) from error


def _progress_callback(report: ReportProgress, job: str, updates: int, later: float) -> Callable[[int], None]:
    """A callback that reports an attack's progress every REPORT_EVERY seconds, with the time left at its current pace."""
    started = reported = time.perf_counter()

    def on_progress(count: int) -> None:
        nonlocal reported
        now = time.perf_counter()
        if count < updates and now - reported >= REPORT_EVERY:
            reported, left = now, (now - started) / count * (updates - count) + later
            report(f"{job}: {count} of {updates} updates; about {left:.0f} s left")

    return on_progress
