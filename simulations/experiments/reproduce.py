"""Reproduce a paper's table: run its attacks and compare our figures with the paper's, with n, interval and budget."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol

from fedgauge.attacks.modality.image_metrics import mse
from fedgauge.attacks.modality.registry import modality_measured
from fedgauge.attacks.plan import ATTACK
from fedgauge.client.components import SpecError, is_own, own_line
from fedgauge.client.federation import TRANSFORM
from fedgauge.simulations.checks.check_result import remedy, sentence
from fedgauge.simulations.experiments.measures import DERIVED, AttackOutcome, ComparedFigure, measured, metric_of
from fedgauge.simulations.experiments.paper_tables import AttackSpec, PaperTable, Setting
from fedgauge.simulations.experiments.run_attack import check_attacks, run_attack
from fedgauge.simulations.experiments.setups import Setup, build_setup


class ReportProgress(Protocol):
    """Told what is done now; passing: of interest only while it lasts."""

    def __call__(self, text: str, *, passing: bool = False) -> None: ...


def compared_figures(
    cell: Setting, spec: AttackSpec, outcome: AttackOutcome, others: Mapping[str, AttackOutcome], note: str
) -> list[ComparedFigure]:
    """The rows of one attack in one setting."""
    failed = ""
    if outcome.failed:
        failed = f"{outcome.failed} of {len(outcome.iterations)} attacks failed"
        if not spec.metric:
            failed += f", graded as {modality_measured(outcome.scores.metrics).blank_name}"
        failed += "".join(f": {reason}" for reason in outcome.reasons[:1])
    rows = []
    for metric in spec.metrics:
        here, low, high = measured(metric, outcome, others.get(spec.against))
        n = cell.auxiliary if spec.metric == mse.name else outcome.examples
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
        return "public examples" if spec.metric == mse.name else ""
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
    cells = list({cell.name: cell for cell, _ in jobs}.values())
    setups: dict[str, Setup] = {}
    for i, cell in enumerate(cells, 1):
        report(f"preparing {cell.name}, {i} of {len(cells)} cells")
        with _told(f"cell {cell.name}", all(is_own(link, TRANSFORM) for link in cell.chain)):
            setups[cell.name] = build_setup(cell, paper_table.seed)
        check_attacks(cell, setups[cell.name])
    outcomes: dict[str, dict[str, AttackOutcome]] = {}
    for i, (cell, spec) in enumerate(jobs, 1):
        job, setup = f"{i} of {len(jobs)}: {cell.name}, {spec.name}", setups[cell.name]
        report(job)
        of_cell = outcomes.setdefault(cell.name, {})
        for needed in cell.attacks:  # what it is compared with was perhaps done in an earlier call
            if needed.name in (spec.name, spec.against) and needed.name not in of_cell:
                own = needed.is_limit or is_own(needed.table, ATTACK)
                with _told(f"cell {cell.name}, attack {needed.name}", own):
                    of_cell[needed.name] = run_attack(
                        needed, setup, cell.wave, partial(_in_between, report, job, setup)
                    )
        yield compared_figures(cell, spec, of_cell[spec.name], of_cell, setup.note)


def _in_between(report: ReportProgress, job: str, setup: Setup, count: int) -> None:
    report(f"{job}: {count} of {len(setup.observations)} updates", passing=True)


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
        raise SpecError("; ".join(filter(None, (f"{where}: {sentence(error)}", remedy(error))))) from error
