"""Reproduction: attack what a paper attacked, and put its figure beside ours, with n, interval and budget."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fedgauge.attacks.base import Budget, Knowledge, Reconstruction, Sentences, Stream, Wave
from fedgauge.attacks.grading.baselines import random_words
from fedgauge.attacks.grading.image_metrics import PSNR_CAP, match, mse, psnr
from fedgauge.attacks.grading.text_metrics import match_sentences, text_metrics
from fedgauge.attacks.matching.feedback_blending import FeedbackBlending
from fedgauge.client.chain import Chain
from fedgauge.client.components import SpecError
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.tokenizer import Tokenizer
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch
from fedgauge.server.views.intervals import Rate, clustered_interval
from fedgauge.simulations.experiments.canary_world import canary_world
from fedgauge.simulations.experiments.gaussian_world import bayes_fig4, gaussian_world
from fedgauge.simulations.experiments.guard_detection import guard_world, patient_world
from fedgauge.simulations.experiments.paper_tables import (
    IMAGE_METRICS,
    TEXT_METRICS,
    AttackSpec,
    PaperTable,
    Setting,
    WorldSpec,
    matches,
)
from fedgauge.simulations.experiments.setups import Setup, build_setup
from fedgauge.simulations.run.environment import environment

PILOT = 3  # iterations from which an attack's duration is estimated
SILENCE = 60.0  # seconds between two words on how far an attack is
DRAWS = 2000  # of the bootstrap of a ratio
SUCCESS = 1e-3  # mean squared error below which an image counts as recovered
RANDOM = 10  # answers of random words to each update, whose mean is the floor
FEW = 1  # updates of sentences from which a duration is estimated: before its first step LAMP judges a thousand guesses

WORLDS = {
    "gaussian_world": gaussian_world,
    "bayes_fig4": bayes_fig4,
    "guard_world": guard_world,
    "patient_world": patient_world,
    "canary_world": canary_world,
}
UNTIMED = ("guard_world", "patient_world", "canary_world")  # what does not grow with n there is most of it

ReportProgress = Callable[[str], None]


# --------------------------------------------------------------------------------------------------------- the attacks


@dataclass(frozen=True, eq=False)
class AttackOutcome:
    """One attack's result on every update, what was spent, and what is scored without reading any.

    Args:
        scores: (n, B) each: psnr and mse of images, TEXT_METRICS of sentences.
        failed: how many found nothing; reasons: why.
        floor: what the mean public image scores, or random words.
        augmented: PSNR (n, B) to what was trained on, where a defense changed the examples.
    """

    scores: Mapping[str, Tensor]
    iterations: Tensor
    failed: int
    seconds: float
    floor: Mapping[str, float]
    augmented: Tensor | None = None
    reasons: tuple[str, ...] = ()
    isolated: tuple[int, ...] | None = None

    @property
    def psnr(self) -> Tensor:
        return self.scores["psnr"]

    @property
    def mse(self) -> Tensor:
        return self.scores["mse"]

    @property
    def examples(self) -> int:
        """Images or sentences that were looked for."""
        return next(iter(self.scores.values())).numel()


def attack(
    trial: AttackSpec, setup: Setup, seed: int, wave: int, done: Callable[[int], None] = lambda count: None
) -> AttackOutcome:
    """Attack every update of a scene, then grade; a failed attack is counted, and graded as a grey image or as no words.

    Args:
        done: is told after each wave how many updates have been attacked.
    """
    started = time.perf_counter()
    found: list[Reconstruction] = []
    for part in _waves(setup, wave):
        found += _reconstruct(trial, trial.budget, setup, seed, part)
        done(part.stop)
    seconds = time.perf_counter() - started
    failed = [r for r in found if r.x is None or not bool(torch.isfinite(r.x).all())]
    return AttackOutcome(
        scores=_scores(setup, found, setup.truth),
        iterations=torch.tensor([r.iterations for r in found], dtype=torch.float64),
        failed=len(failed),
        seconds=seconds,
        floor=_floor(setup) if setup.words is None else _random_words(trial, setup, seed),
        augmented=_scores(setup, found, setup.changed)["psnr"]
        if setup.changed is not None and setup.words is None
        else None,
        reasons=tuple(sorted({r.reason for r in failed} - {""})),
        isolated=setup.isolated,
    )


def _waves(setup: Setup, most: int) -> Iterator[slice]:
    """Parts of the updates, of at most so many; those that a dishonest server sent other weights for are apart."""
    first, seen = 0, setup.observations
    for i in range(1, len(seen) + 1):
        if i == len(seen) or i - first == most or seen[i].params is not seen[first].params:
            yield slice(first, i)
            first = i


def _scores(setup: Setup, found: Sequence[Reconstruction], truth: Sequence[Batch]) -> dict[str, Tensor]:
    """Each measure (n, B)."""
    if setup.words is None:
        graded = [_grade(r, t) for r, t in zip(found, truth, strict=True)]
    else:
        graded = [_read(r, t, setup.words) for r, t in zip(found, truth, strict=True)]
    return {name: torch.stack([g[name] for g in graded]) for name in graded[0]}


def _random_words(trial: AttackSpec, setup: Setup, seed: int) -> dict[str, float]:
    """What random words score that know of the sentences what the attack does."""
    wave, known, _ = _met(trial, setup, seed, slice(None))
    draws = []
    for draw in range(RANDOM):
        streams: list[Stream] = [partial(generator, seed, "floor", draw, k) for k in range(len(wave))]
        draws.append(_scores(setup, random_words().reconstruct(wave, known, Budget(1), streams), setup.truth))
    return {name: float(torch.stack([scores[name] for scores in draws]).mean()) for name in draws[0]}


def _floor(setup: Setup) -> dict[str, float]:
    """What is scored without any update: by the mean of the public images."""
    assert setup.known.auxiliary is not None
    mean = setup.known.auxiliary.x.mean(0)
    graded = [(psnr(t.x, mean.expand_as(t.x)), mse(t.x, mean.expand_as(t.x))) for t in setup.truth]
    return {
        "psnr": float(torch.cat([g[0] for g in graded]).mean()),
        "mse": float(torch.cat([g[1] for g in graded]).mean()),
    }


def _reconstruct(trial: AttackSpec, budget: Budget, setup: Setup, seed: int, part: slice) -> list[Reconstruction]:
    made = trial.build()
    if isinstance(made, FeedbackBlending):
        parts = [slice(i, i + setup.clients) for i in range(0, len(setup.observations[part]), setup.clients)]
        waves, known, streams = zip(*(_met(trial, setup, seed, p) for p in parts), strict=True)
        return [r for results in made.sequence(waves, known, budget, lambda place: streams[place]) for r in results]
    wave, threat, randomness = _met(trial, setup, seed, part)
    return made.reconstruct(wave, threat, budget, randomness)


def _met(trial: AttackSpec, setup: Setup, seed: int, part: slice) -> tuple[Wave, Knowledge, list[Stream]]:
    """What an attack meets in a part of the updates: them, its threat model, its randomness."""
    observations = setup.observations[part]
    # attacks of one cell share their starts: what differs between them is then not the draw
    streams: list[Stream] = [partial(generator, seed, "attack", o.client) for o in observations]
    known = setup.known if trial.defense == "known" else replace(setup.known, chain=Chain((setup.known.chain.local,)))
    if trial.auxiliary is not None and known.auxiliary is not None:
        rng = generator(seed, "auxiliary", repr(sorted(trial.auxiliary.items())))
        known = replace(known, auxiliary=trial.images().of(known.auxiliary, known.classes, rng))
    truth = setup.truth[part]
    if trial.labels == "given":
        known = replace(known, labels=torch.stack([t.y for t in truth]))
    if trial.lengths == "given" and isinstance(known.model, LanguageModel):
        lengths = [_lengths(t, known.model.pad, trial.labels == "given") for t in truth]
        known = replace(known, text=Sentences(torch.stack(lengths)))
    return Wave.stack(observations), known, streams


def _lengths(batch: Batch, pad: int, met: bool) -> Tensor:
    """Tokens of each sentence (B,), as the client meets them; else by label, then by length, which say nothing more."""
    lengths = (batch.x != pad).sum(1)
    if met:
        return lengths
    labels = batch.y if batch.y.dim() == 1 else torch.zeros_like(lengths)
    order = sorted(range(len(lengths)), key=lambda i: (int(labels[i]), int(lengths[i])))
    return lengths[order]


def _read(found: Reconstruction, truth: Batch, words: Tokenizer) -> dict[str, Tensor]:
    """Each measure (B,) of the sentences, paired one to one."""
    x = torch.full_like(truth.x, words.pad) if found.x is None else found.x
    x = x[match_sentences(truth.x, x, words)]
    scores = {metric.name: metric(truth.x, x) for metric in text_metrics(words)}
    return {name: scores["exact" if name == "exact_sentence" else name] for name in TEXT_METRICS}


def _grade(found: Reconstruction, truth: Batch) -> dict[str, Tensor]:
    """PSNR and mean squared error (B,) of each image, paired one to one."""
    x = found.x
    if x is None or not torch.isfinite(x).all():
        x = torch.full_like(truth.x, 0.5)
    x = x[match(truth.x, x)]
    return {"psnr": psnr(truth.x, x).clamp(max=PSNR_CAP), "mse": mse(truth.x, x)}


def check(cell: Setting, setup: Setup) -> None:
    """SpecError where an attack of a cell is to be told, or measured by, what its data do not have."""
    here, other = (IMAGE_METRICS, "sentences") if setup.words is None else (TEXT_METRICS, "images")
    for trial in cell.trials:
        where = f"cell {cell.name}, attack {trial.name}"
        if wrong := [m for m in trial.metrics if m not in here]:
            raise SpecError(
                f"{where}: {wrong[0]} is a metric of {other}; those of {cell.images.use} are {', '.join(here)}"
            )
        if trial.lengths == "given" and setup.words is None:
            raise SpecError(f'{where}: lengths = "given" is of sentences, and {cell.images.use} holds images')
        if trial.labels == "given" and setup.truth[0].y.dim() > 1:
            raise SpecError(f'{where}: labels = "given" would hand over the sentences: say labels = "restored"')


def estimate(trial: AttackSpec, setup: Setup, seed: int, wave: int) -> float:
    """Seconds that an attack will take, from a few iterations on its first wave, without what is prepared once for all."""
    if trial.budget.iterations <= 2 * PILOT:
        return 0.0
    # LAMP moves words once a period, which costs as much as the iterations between; what is trained, is for whole waves
    period = getattr(trial.build(), "period", None)
    wave = wave if period is None else min(wave, FEW)
    pilot = min(period or PILOT, trial.budget.iterations // 2)
    seconds = []
    # the first prepares what the others find: a language model, simulated updates; no budget twice, as training is kept
    for iterations in (1, 2, 2 + pilot):
        started = time.perf_counter()
        _reconstruct(trial, replace(trial.budget, iterations=iterations), setup, seed, next(_waves(setup, wave)))
        seconds.append(time.perf_counter() - started)
    waves = len(list(_waves(setup, wave)))
    each = max(seconds[2] - seconds[1], 0.0) / pilot
    return waves * (seconds[1] + each * (trial.budget.iterations - 2))


# --------------------------------------------------------------------------------------------------------- the figures


@dataclass(frozen=True)
class ComparedFigure:
    """One figure beside the paper's.

    Args:
        reference, spread: the paper's figure and standard deviation, None where it gives none.
        here, low, high: ours and its 95 % interval, None from one update alone.
        n: images.
        floor: what the mean public image scores, without an attack.
        budget: ours, and the paper's where it differs.
        note: on this row: failed attacks, training.
    """

    cell: str
    attack: str
    metric: str
    reference: float | None
    here: float | None
    low: float | None
    high: float | None
    n: int
    spread: float | None = None
    floor: float | None = None
    budget: str = ""
    note: str = ""
    seconds: float = 0.0

    def to_json(self) -> str:
        """The part that stands on its own."""
        keys = ("cell", "attack", "metric", "reference", "here", "low", "high", "n")
        return json.dumps({k: getattr(self, k) for k in keys}, allow_nan=False)


Interval = tuple[float | None, float | None, float | None]  # value, low, high
Measure = Callable[[AttackOutcome, AttackOutcome | None], Interval]


def _mean(values: Tensor) -> Interval:
    """Mean over images, with its interval clustered by update."""
    flat = values.flatten().numpy()
    interval = clustered_interval(flat, np.arange(len(values)).repeat(values[0].numel()))
    return float(flat.mean()), *(interval or (None, None))


def _succeeded(outcome: AttackOutcome) -> Tensor:
    """(n,) whether every image of an update was recovered."""
    return (outcome.mse < SUCCESS).all(1)


def _augmented(outcome: AttackOutcome, _: AttackOutcome | None) -> Interval:
    return (None, None, None) if outcome.augmented is None else _mean(outcome.augmented)


def _success(outcome: AttackOutcome, _: AttackOutcome | None) -> Interval:
    right = _succeeded(outcome)
    rate = Rate(int(right.sum()), len(right))
    return rate.fraction, *rate.interval


def _exact(outcome: AttackOutcome, _: AttackOutcome | None) -> Interval:
    """Updates all of whose images were recovered verbatim: to 60 dB and more."""
    right = (outcome.psnr >= PSNR_CAP).all(1)
    rate = Rate(int(right.sum()), len(right))
    return rate.fraction, *rate.interval


def _isolated(outcome: AttackOutcome, _: AttackOutcome | None) -> Interval:
    """The example that a malice isolates, in its one-to-one pair: the others' places are not looked at."""
    if outcome.isolated is None:
        return None, None, None
    return _mean(outcome.psnr.gather(1, torch.tensor(outcome.isolated)[:, None]))


def _verbatim(outcome: AttackOutcome, _: AttackOutcome | None) -> Interval:
    """Images, one by one, that were recovered verbatim."""
    return _mean((outcome.psnr >= PSNR_CAP).double())


def _iterations(outcome: AttackOutcome, _: AttackOutcome | None) -> Interval:
    """Mean iterations of the attacks that succeeded."""
    right = _succeeded(outcome)
    return _mean(outcome.iterations[right][:, None]) if bool(right.any()) else (None, None, None)


def _success_gain(outcome: AttackOutcome, against: AttackOutcome | None) -> Interval:
    """Successes more than the other attack's, in percent of them."""
    assert against is not None
    ours, theirs = (_succeeded(o).double().numpy() for o in (outcome, against))
    return _paired(lambda w: 100 * ((w @ ours) / (w @ theirs) - 1), len(ours))


def _iterations_saved(outcome: AttackOutcome, against: AttackOutcome | None) -> Interval:
    """Iterations to success less than the other attack's, in percent of them."""
    assert against is not None
    (ours, right), (theirs, others) = (
        (o.iterations.numpy() * _succeeded(o).numpy(), _succeeded(o).double().numpy()) for o in (outcome, against)
    )
    return _paired(lambda w: 100 * (1 - (w @ ours) / (w @ right) / ((w @ theirs) / (w @ others))), len(ours))


def _paired(ratio: Callable[[np.ndarray], np.ndarray], n: int) -> Interval:
    """A ratio of sums over images, with its paired bootstrap interval; None where it divides by nothing."""
    weights = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), DRAWS).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        value, drawn = float(ratio(np.ones(n))), ratio(weights)
    if not np.isfinite(value):
        return None, None, None
    drawn = drawn[np.isfinite(drawn)]
    if n < 2 or not len(drawn):
        return value, None, None
    low, high = np.quantile(drawn, (0.025, 0.975))
    return value, float(low), float(high)


def _scored(name: str) -> Measure:
    return lambda outcome, _: _mean(outcome.scores[name])


MEASURES: Mapping[str, Measure] = {
    "psnr": lambda outcome, _: _mean(outcome.psnr),
    "psnr_augmented": _augmented,
    "best_psnr": lambda outcome, _: _mean(outcome.psnr.amax(1, keepdim=True)),
    "mse": lambda outcome, _: _mean(outcome.mse),
    "success": _success,
    "exact": _exact,
    "verbatim": _verbatim,
    "isolated_psnr": _isolated,
    "iterations": _iterations,
    "success_gain": _success_gain,
    "iterations_saved": _iterations_saved,
    **{name: _scored(name) for name in TEXT_METRICS},
}
UNITS = {
    "psnr": "dB",
    "isolated_psnr": "dB",
    "psnr_augmented": "dB",
    "best_psnr": "dB",
    "success_gain": "%",
    "iterations_saved": "%",
}
UNITS |= dict.fromkeys(TEXT_METRICS, "%")


def figures(
    cell: Setting, trial: AttackSpec, outcome: AttackOutcome, others: Mapping[str, AttackOutcome], note: str
) -> list[ComparedFigure]:
    """The rows of one attack on one cell."""
    failed = ""
    if outcome.failed:
        graded = "no words" if set(outcome.scores) == set(TEXT_METRICS) else "grey"
        failed = f"{outcome.failed} of {len(outcome.iterations)} attacks failed, graded as {graded}"
        failed += "".join(f": {reason}" for reason in outcome.reasons[:1])
    rows = []
    for metric in trial.metrics:
        here, low, high = MEASURES[metric](outcome, others.get(trial.against))
        row = ComparedFigure(cell.name, trial.name, metric, trial.paper.get(metric), here, low, high, outcome.examples)
        rows.append(
            replace(
                row,
                spread=trial.paper.get("spread") if metric == "psnr" else None,
                floor=outcome.floor.get(metric),
                budget=_budget(trial, cell),
                note="; ".join(filter(None, (note, failed))),
                seconds=round(outcome.seconds, 1),
            )
        )
    return rows


def _budget(trial: AttackSpec, cell: Setting) -> str:
    """Ours in words, and what the paper spent where it is more or less."""
    ours = {
        "n": cell.n * (1 if cell.alone else cell.members * cell.images.batch_size),
        **{k: getattr(trial.budget, k) for k in ("iterations", "restarts")},
    }
    parts = []
    for key, value in ours.items():
        theirs = trial.paper.get(key, value)
        words = f"{value}" + (f" of {theirs:g}" if theirs != value else "")
        if key != "restarts" or theirs != 1 or value != 1:
            parts.append(f"{key} {words}")
    return ", ".join(parts)


# ------------------------------------------------------------------------------------------------------------- the run


def reproduce(paper_table: PaperTable, say: ReportProgress) -> Iterator[ComparedFigure]:
    """The figures of a sheet, as they come; every cell is staged before the first attack."""
    if paper_table.world is not None:
        yield from _figures_of_world(paper_table.world, paper_table.seed, say)
        return
    jobs = [(cell, trial) for cell in paper_table.cells for trial in cell.trials]
    scenes, expected = {}, []
    for i, cell in enumerate(paper_table.cells, 1):
        say(f"preparing {cell.name}, {i} of {len(paper_table.cells)} cells")
        scenes[cell.name] = build_setup(cell, paper_table.seed)
        check(cell, scenes[cell.name])
        expected += [estimate(trial, scenes[cell.name], paper_table.seed, cell.wave) for trial in cell.trials]
    outcomes: dict[str, dict[str, AttackOutcome]] = {}
    for i, (cell, trial) in enumerate(jobs):
        job, setup = f"{i + 1} of {len(jobs)}: {cell.name}, {trial.name}", scenes[cell.name]
        say(f"{job}; about {sum(expected[i:]):.0f} s left")
        of_cell = outcomes.setdefault(cell.name, {})
        after = _teller(say, job, len(setup.observations), sum(expected[i + 1 :]))
        of_cell[trial.name] = attack(trial, setup, paper_table.seed, cell.wave, after)
        yield from figures(cell, trial, of_cell[trial.name], of_cell, scenes[cell.name].note)


def _teller(say: ReportProgress, job: str, updates: int, later: float) -> Callable[[int], None]:
    """Says every SILENCE seconds how far an attack is, and what it will take at the pace that it has."""
    started = told = time.perf_counter()

    def done(count: int) -> None:
        nonlocal told
        now = time.perf_counter()
        if count < updates and now - told >= SILENCE:
            told, left = now, (now - started) / count * (updates - count) + later
            say(f"{job}: {count} of {updates} updates; about {left:.0f} s left")

    return done


def _figures_of_world(world: WorldSpec, seed: int, say: ReportProgress) -> list[ComparedFigure]:
    compute = WORLDS[world.name]
    seconds = []
    for few in () if world.name in UNTIMED else (8, 40):
        started = time.perf_counter()
        compute(few, seed, world.iterations)
        seconds.append(time.perf_counter() - started)
    about = f"; about {max(seconds[1] - seconds[0], 0.0) / 32 * world.n:.0f} s left" if seconds else ""
    say(f"{world.n} inputs{about}")
    started = time.perf_counter()
    found = [row for row in compute(world.n, seed, world.iterations) if matches(row.cell, world.only)]
    if not found:
        raise SpecError(f"no cell of {world.name} matches {world.only!r}")
    spent, budget = round(time.perf_counter() - started, 1), f"n {world.n}, iterations at most {world.iterations}"
    return [ComparedFigure(**asdict(row), budget=budget, seconds=spent) for row in found]


def record(paper_table: PaperTable, rows: Sequence[ComparedFigure], seconds: float) -> dict[str, Any]:
    """A reproduction as it is kept: rows, seed, what differs from the paper, machine, versions, date."""
    return {
        "name": paper_table.name,
        "title": paper_table.title,
        "note": paper_table.note,
        "seed": paper_table.seed,
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "seconds": round(seconds, 1),
        "rows": [asdict(row) for row in rows],
        "environment": environment(),
    }


def show(paper_table: PaperTable, rows: Sequence[ComparedFigure], console: Console) -> None:
    """Print a reproduction as a table, and what differs from the paper."""
    reference = "paper" if paper_table.world is None else "bound"
    floor = "random words" if any(row.metric in TEXT_METRICS for row in rows) else "mean image"
    heads = ("cell", "attack", "metric", reference, "here", "95 % interval", "n", floor, "budget", "remarks")
    table = Table(*heads, title=paper_table.title)
    for row in rows:
        table.add_row(*_words(row))
    console.print(table)
    if paper_table.note:
        console.print(paper_table.note.strip(), markup=False, highlight=False)


def _words(row: ComparedFigure) -> list[str]:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    unit = UNITS.get(row.metric, "")
    paper = number(row.reference) + (f" ± {row.spread:g}" if row.spread is not None else "")
    interval = "-" if row.low is None else f"{number(row.low)} to {number(row.high)}"
    metric = f"{row.metric} ({unit})" if unit else row.metric
    floor = "" if row.floor is None else number(row.floor)
    return [row.cell, row.attack, metric, paper, number(row.here), interval, str(row.n), floor, row.budget, row.note]


class ProgressReporter:
    """Says on stderr what is being done: one live line in a terminal, else a line for each step."""

    def __init__(self, name: str, console: Console) -> None:
        self.name = name
        self.console = console
        self._status = console.status(f"{name}: starting")

    def __enter__(self) -> "ProgressReporter":
        if self.console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def __call__(self, words: str) -> None:
        if self.console.is_terminal:
            self._status.update(f"{self.name}: {words}")
        else:
            self.console.print(f"{self.name}: {words}", markup=False, highlight=False, soft_wrap=True)
