"""Results of a sweep: a row for each defense, attack and seed, as CSV, JSON and tables."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from fedgauge.attacks.limits import noise_is_known
from fedgauge.attacks.modality.base import MainMetric
from fedgauge.attacks.modality.image_metrics import AUGMENTED
from fedgauge.attacks.modality.images import ImageModality
from fedgauge.attacks.modality.membership import MEMBER, QUESTIONS
from fedgauge.attacks.modality.registry import MEASURED, further_leaks, modality_measured
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.client.components import SpecError
from fedgauge.server.store import run_files
from fedgauge.server.store.run import Run
from fedgauge.server.views.formatting import number, percent, rounded
from fedgauge.server.views.membership import ONE_PERCENT
from fedgauge.server.views.privacy import spent_in
from fedgauge.server.views.snapshot import RunSnapshot, read_once
from fedgauge.server.views.strength import best_of, error_in_db, final_accuracy, limit_in_db, mean_of
from fedgauge.server.views.tables import Table
from fedgauge.server.views.verdict import doubts
from fedgauge.simulations.checks.check_result import sentence
from fedgauge.simulations.experiments.results import markdown
from fedgauge.simulations.experiments.sweep_file import Sweep, SweepCell

DOUBT = "little leakage proves nothing"


@dataclass(frozen=True)
class SweepRow:
    """Result of one attack under one defense with one seed, with the cost of the defense."""

    defense: str
    attack: str
    seed: int
    accuracy: float | None = None  # on the test images after the last round
    mean: float | None = None  # of `metric` over all attacked examples
    low: float | None = None  # of its 95 % interval, clustered by client
    high: float | None = None
    best: float | None = None
    augmented: float | None = None  # mean against the examples as trained on, where the defense changed them
    baseline: float | None = None  # best mean of a guess that reads no update
    limit: float | None = None  # of the best attacker who knows the labels, if the images of a class were Gaussian
    epsilon: float | None = None  # for replacing one record, over the rounds that were run, if a guarantee holds
    n: int = 0  # graded examples
    failed: int = 0  # attacked examples without a grade
    reason: str = ""  # why there is no number, why some are missing, or why a low one proves nothing
    run: str = ""
    metric: str = ImageModality.main.metric  # or the question of membership; an older sweep's rows do not name it
    detected: float | None = None  # share of members that a membership test detects at 1 % false positives
    of_error: float | None = None  # as the limits, the PSNR of the mean squared error over all attacked examples
    bound: float | None = None  # as limit, of any attacker, whatever the images are
    gap: float | None = None  # limit less of_error, in dB
    exact: bool = False  # the best is an exact hit, which is inf here and in CSV, and null in JSON


def is_done(path: Path) -> bool:
    """Return whether a cell has finished training and all attacks; RefusedFile if it, or its ledger, is a link."""
    if run_files.look(path / "ledger.sqlite") is None:
        return False
    with Run(path).ledger() as ledger:
        meta = ledger.meta()
        return meta.get("state") == "trained" and meta.get("cell") == "ended"


def rows_of(cell: SweepCell, folder: Path) -> list[SweepRow]:
    """The rows of a finished cell: each has a number, or the reason why there is none."""
    with read_once(Run(folder / cell.folder)) as reading:
        return [_row(cell, p, reading) for p in reading.ledger.planned().values() if p.role == "attack"]


def failed_rows(cell: SweepCell, error: Exception) -> list[SweepRow]:
    reason = str(error) if isinstance(error, SpecError) else sentence(error)
    return [SweepRow(cell.defense, name, cell.seed, reason=reason, run=cell.folder, metric="") for name in cell.attacks]


def _row(cell: SweepCell, planned: PlannedAttack, reading: RunSnapshot) -> SweepRow:
    attack = planned.name
    metric = planned.metric or reading.scores.measure.metric
    pooled, errors = reading.pooled(metric), reading.pooled("mse")
    detected = reading.pooled(metric + ONE_PERCENT).get(attack) if planned.tests_membership else None
    changed = reading.pooled(metric + AUGMENTED).get(attack) if metric + AUGMENTED in MEASURED else None
    leak, limit, reached = pooled.get(attack), limit_in_db(errors, "estimate"), error_in_db(errors.get(attack))
    job_reasons = [*reading.ledger.reasons(), *reading.ledger.reasons("failed")]
    reasons = [f"{r['reason']} ({r['jobs']} x)" for r in job_reasons if r["attack"] == attack]
    if reading.meta.get("replay") == "mismatch":
        reasons.append(f"not attacked, because the replay check failed: {reading.meta['replay_detail']}")
    observations = reading.ledger.observations()
    if not any(o["status"] == "accepted" for o in observations):
        reasons += dict.fromkeys(f"no update was accepted: {o['reason']}" for o in observations[:1])
    of_examples, spent = metric in reading.scores.modality.measured, spent_in(reading)
    if leak is not None and (why := doubts(reading, "examples" if of_examples else "members")):
        reasons.append(f"{DOUBT}: {why}")
    if spent.record is None and (scenario := reading.built) and noise_is_known(scenario.federation):
        reasons.append(spent.words)
    return SweepRow(
        defense=cell.defense,
        attack=attack,
        seed=cell.seed,
        accuracy=final_accuracy(reading.rounds),
        **{name: getattr(leak, name, None) for name in ("mean", "low", "high", "best")},
        augmented=mean_of(changed),
        baseline=mean_of(best_of(pooled.values(), "baseline")),
        limit=limit,
        epsilon=rounded(spent.record),
        n=leak.n if leak else 0,
        failed=sum(leak.failed.values()) if leak else 0,
        reason="; ".join(reasons),
        run=cell.folder,
        metric=metric,
        detected=mean_of(detected),
        of_error=reached,
        bound=limit_in_db(errors, "limit"),
        gap=None if limit is None or reached is None else limit - reached,
        exact=leak is not None and leak.best is not None and math.isinf(leak.best),
    )


def write_tables(folder: Path, rows: Sequence[SweepRow], sweep: Sweep) -> None:
    """Write sweep.csv and sweep.md, each atomically."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(SweepRow)])
    writer.writeheader()
    writer.writerows(vars(row) for row in rows)
    run_files.write(folder / "sweep.csv", text.getvalue().encode())
    run_files.write(folder / "sweep.md", summary_as_markdown(rows, sweep.defenses).encode())


def summary(found: Sequence[SweepRow], defenses: Sequence[str]) -> Table:
    """A line for each defense: its strongest attack, and its cost in accuracy against the first defense.

    The strongest attack has the highest mean leakage over the seeds. In brackets: the interval of a single seed, or the range of
    several means. Membership: the strongest test's area under the ROC curve, and the members detected at 1 % false positives.
    Other leaks have a column by their metric, with the strongest result.
    Limit, bound and gap are PSNRs of mean squared errors; the gap is between the limit and the attack with the least error.
    """
    by = modality_measured([row.metric for row in found]).main
    asked = {q: words.where for q, words in QUESTIONS.items() if q == MEMBER or any(r.metric == q for r in found)}
    leaks = [leak for leak in further_leaks() if any(r.metric == leak for r in found)]
    compared = any(r.gap is not None or r.bound is not None for r in found)
    names = list(dict.fromkeys(row.defense for row in found))
    first = _over_seeds([row for row in found if row.defense == [*defenses, *names][0]], "accuracy")
    lines = []
    for name in names:
        every = [row for row in found if row.defense == name]
        own = [row for row in every if row.metric == by.metric]
        accuracy = _over_seeds(every, "accuracy")
        cost = None if accuracy is None or first is None else 100 * (first - accuracy)
        attack, reached = _strongest(own, by)
        line = [("defense", name), ("strongest attack", attack), (f"{by.name}, {by.unit} (interval)", reached)]
        line += [(head, number(_over_seeds(own, head), 1)) for head in ("baseline", "limit")]
        if compared:
            line.append(("bound", number(_over_seeds(own, "bound"), 1)))
            line.append(("gap", number(min(_means(own, "gap").values(), default=None), 1)))
        line += [(head, _detected([r for r in every if r.metric == question])) for question, head in asked.items()]
        line += [(MEASURED[leak].label, _leaked([r for r in every if r.metric == leak], leak)) for leak in leaks]
        # the largest: of several seeds' guarantees, only it holds for all
        epsilon = max((r.epsilon for r in every if r.epsilon is not None), default=None)
        line += [("epsilon", number(epsilon, None)), ("accuracy", percent(accuracy, space=" "))]
        lines.append([*line, ("cost", number(cost, 0))])
    heads = [head for head, _ in lines[0]] if lines else []
    return Table.texts("", heads, [[text for _, text in line] for line in lines])


def summary_as_markdown(found: Sequence[SweepRow], defenses: Sequence[str]) -> str:
    """The summary; columns of single numbers are to the right."""
    numbers = ("baseline", "limit", "bound", "gap", "epsilon", "accuracy", "cost")
    return markdown(summary(found, defenses), numbers)


def _strongest(own: Sequence[SweepRow], by: MainMetric) -> tuple[str, str]:
    means, augmented = _means(own, "mean"), _means(own, "augmented")
    best, other = (by.leakiest(sorted(found), found.__getitem__) for found in (means, augmented))
    if best is None:
        return "none gave a number", "–"
    words, of_best = number(means[best], 1), [r for r in own if r.attack == best]
    if len(of_best) == 1 and of_best[0].low is not None and of_best[0].high is not None:
        words += f" ({number(of_best[0].low, 1)} to {number(of_best[0].high, 1)})"
    elif len(seeds := [r.mean for r in of_best if r.mean is not None]) > 1:
        words += f" (seeds {number(min(seeds), 1)} to {number(max(seeds), 1)})"
    if any(DOUBT in r.reason for r in of_best):
        words += " (proves nothing)"
    if other is not None:
        words += f"; {number(augmented[other], 1)} to what was trained on" + f", by `{other}`" * (other != best)
    return f"`{best}`", words


def _means(own: Sequence[SweepRow], column: str) -> dict[str, float]:
    """The mean of a column over the seeds, by attack; attacks without one are left out."""
    means = {a: _mean([getattr(r, column) for r in own if r.attack == a]) for a in dict.fromkeys(r.attack for r in own)}
    return {attack: mean for attack, mean in means.items() if mean is not None}


def _detected(tests: Sequence[SweepRow]) -> str:
    areas = _means(tests, "mean")
    best = MEASURED[MEMBER].leakiest(sorted(areas), areas.__getitem__)
    if best is None:
        return "no test gave a number" if tests else "not tested"
    detected = _means(tests, "detected").get(best)
    return number(areas[best], 2) + ("" if detected is None else f"; {percent(detected, space=' ')} detected")


def _leaked(own: Sequence[SweepRow], metric: str) -> str:
    means = _means(own, "mean")
    best = MEASURED[metric].leakiest(sorted(means), means.__getitem__)
    return "–" if best is None else f"{number(means[best], MEASURED[metric].digits)} by `{best}`"


def _over_seeds(own: Sequence[SweepRow], column: str) -> float | None:
    """The mean of what a training's rows share: each seed counts once, and each of its trainings equally."""
    seeds = [dict.fromkeys(getattr(r, column) for r in own if r.seed == seed) for seed in {r.seed for r in own}]
    return _mean([_mean(list(trainings)) for trainings in seeds])


def _mean(values: Sequence[float | None]) -> float | None:
    present = [v for v in values if v is not None]
    return sum(present) / len(present) if present else None
