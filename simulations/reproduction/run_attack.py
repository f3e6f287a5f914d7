"""One attack of a paper's table: attack every update of a setup, grade the results, and compare them with the paper's."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedgauge.attacks.base import LIMITS, Budget, ClientState, Wave
from fedgauge.attacks.grading.audit import AuditResult
from fedgauge.attacks.modality.arrays import ArrayModality
from fedgauge.attacks.modality.base import Modality
from fedgauge.attacks.modality.image_metrics import AUGMENTED, mse
from fedgauge.attacks.modality.images import ImageModality
from fedgauge.attacks.modality.membership import LABELS_ALONE
from fedgauge.attacks.modality.registry import modality_measured
from fedgauge.attacks.modality.rows import RowModality
from fedgauge.attacks.modality.sentences import SentenceModality
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.score_rows import WHOLE_BATCH, came_back
from fedgauge.server.views.scores import Scores
from fedgauge.simulations.reproduction.measures import (
    DERIVED,
    AttackOutcome,
    ComparedFigure,
    all_measures,
    mean_of,
    measured,
    metric_of,
)
from fedgauge.simulations.reproduction.paper_tables import STRONGEST, AttackSpec, Setting
from fedgauge.simulations.reproduction.setups import Setup

RANDOM_DRAWS = 10  # of random words for each update; the floor is their mean
FIXED = ("mean_image", "membership", "mode_row")  # floors that draw nothing
# how a failed attack is graded, by the kind of data; others: as zeros
BLANK: Mapping[type[Modality], str] = {
    ImageModality: "grey",
    ArrayModality: "the middle of the range",
    RowModality: "means and first categories",
    SentenceModality: "no words",
}


def run_attack(spec: AttackSpec, setup: Setup, wave: int) -> AttackOutcome:
    """Attack and grade every update of a setup; a failed attack is counted, and enters the figures as `_published` says.

    A limit on the error reads no update, so it is computed once.
    """
    started = time.perf_counter()
    results: list[AuditResult] = []
    memories: list[ClientState] = []
    for part in _waves(spec, setup, wave):
        results += _audit(spec, setup, part, memories)
    seconds = time.perf_counter() - started
    failed = [r.reconstruction for r in results if _failed(spec, r)]
    return AttackOutcome(
        scores=_scores([[_published(spec, setup, r) for r in results]]),
        iterations=np.array([r.reconstruction.iterations for r in results], float),
        failed=len(failed),
        seconds=seconds,
        floor=_floor(spec, setup),
        reasons=tuple(sorted({r.reason for r in failed} - {""})),
        isolated=setup.isolated,
    )


def _failed(spec: AttackSpec, result: AuditResult) -> bool:
    """Return whether an attack reconstructed nothing, or a test or limit has no value."""
    if spec.metric:
        return all(row.value is None for row in result.rows)
    return not came_back(result.reconstruction.x)


def _published(spec: AttackSpec, setup: Setup, result: AuditResult) -> AuditResult:
    """A result as a published figure counts it: a failed attack counts as a blank guess, so that all are compared on the same.

    A run, which compares an attack with its baselines on the examples that both have, leaves a failure out of its mean.
    """
    if spec.metric or not _failed(spec, result):
        return result
    auditor, seen = setup.auditor, next(o for o in setup.observations if o.client == result.client)
    truth = auditor.federation.batch_at(seen.client, seen.round).x
    guess = replace(result.reconstruction, x=_blank(auditor.modality, truth), y=None)
    return replace(result, rows=tuple(auditor.grade(spec.name, Wave.stack([seen]), seen.client, guess)[1]))


def _blank(modality: Modality, truth: Tensor) -> Tensor:
    if isinstance(modality, SentenceModality):
        return torch.full_like(truth, modality.dataset.tokenizer.pad)
    return torch.full_like(truth, 0.5 if isinstance(modality, ImageModality) else 0)


def _waves(spec: AttackSpec, setup: Setup, most: int) -> Iterator[slice]:
    """Slices of at most `most` updates; updates of different weights (from a malicious server) never share a slice.

    An attack with a memory gets one update of each client at a time.
    """
    most = setup.clients if spec.is_stateful else most
    first, seen = 0, setup.observations[:1] if spec.metric == mse.name else setup.observations
    for i in range(1, len(seen) + 1):
        if i == len(seen) or i - first == most or seen[i].params is not seen[first].params:
            yield slice(first, i)
            first = i


def _audit(
    spec: PlannedAttack, setup: Setup, part: slice, memories: list[ClientState] | None = None
) -> list[AuditResult]:
    """Attack a slice of the updates and grade the results.

    Args:
        memories: what a stateful attack remembers of the clients, in turns; they are updated.
    """
    wave = Wave.stack(setup.observations[part])
    before = dict(zip(wave.clients, memories or [], strict=False))
    results = setup.auditor.audit(spec, wave, memories=before)
    if memories is not None:
        memories[:] = [result.memory for result in results if result.memory is not None]
    return results


def _scores(draws: Iterable[Iterable[AuditResult]]) -> Scores:
    """The scores of the examples, as a run has them; each draw counts as a round."""
    return Scores.of(
        (draw, row.client, row.attack, row.example, row.metric, row.status, row.value)
        for draw, results in enumerate(draws, 1)
        for result in results
        for row in result.rows
        if row.example != WHOLE_BATCH or row.metric in all_measures()
    )


def _floor(spec: AttackSpec, setup: Setup) -> dict[str, float]:
    """Mean scores of the first baseline, which reads no update and is given as much of the truth as the attack is."""
    if spec.role in LIMITS:
        return {}
    if spec.tests_membership:
        baseline = AttackSpec(LABELS_ALONE, {"use": "membership", "score": LABELS_ALONE}, Budget(1))
    else:
        use = next(iter(setup.auditor.modality.baselines.values()))
        baseline = AttackSpec(use, {"use": use}, Budget(1), labels=spec.labels, lengths=spec.lengths)
    draws = []
    for draw in range(1 if baseline.table["use"] in FIXED else RANDOM_DRAWS):
        guessing = replace(setup, auditor=replace(setup.auditor, purpose=("floor", draw)))
        waves = _waves(spec, guessing, len(setup.observations))
        draws.append([result for part in waves for result in _audit(baseline, guessing, part)])
    scores = _scores(draws)
    means = {name: mean_of(scores, name)[0] for name in scores.metrics if not name.endswith(AUGMENTED)}
    return {name: mean for name, mean in means.items() if mean is not None}


def compared_figures(
    cell: Setting, spec: AttackSpec, outcome: AttackOutcome, others: Mapping[str, AttackOutcome], note: str
) -> list[ComparedFigure]:
    if outcome.failed:
        note += f"{'; ' * bool(note)}{outcome.failed} of {len(outcome.iterations)} attacks failed"
        if not spec.metric:
            kinds = modality_measured(outcome.scores.metrics).__mro__
            note += f", graded as {next((BLANK[kind] for kind in kinds if kind in BLANK), 'zeros')}"
        note += "".join(f": {reason}" for reason in outcome.reasons[:1])
    against = spec.against
    if against == STRONGEST:
        against = max(sorted(cell.needed_by(spec)), key=lambda name: float(others[name].psnr.mean()))
        note += f"{'; ' * bool(note)}the strongest: {against}"
    return [
        ComparedFigure(
            cell.name,
            spec.name,
            metric,
            spec.paper.get(metric),
            *measured(metric, outcome, others.get(against)),
            n=cell.auxiliary if spec.metric == mse.name else outcome.examples,
            spread=spec.paper.get("spread") if metric == "psnr" else None,
            floor=None if metric in DERIVED else outcome.floor.get(metric_of(metric)),
            budget=_budget(spec, cell),
            note=note,
            seconds=round(outcome.seconds, 1),
        )
        for metric in spec.metrics
    ]


def _budget(spec: AttackSpec, cell: Setting) -> str:
    """Our budget as text, with the paper's where it differs."""
    if spec.role in LIMITS:
        return "public examples" if spec.metric == mse.name else ""
    n = cell.n * (1 if cell.alone else cell.members * cell.images.batch_size)
    parts = []
    for key, ours in {"n": n, "iterations": spec.budget.iterations, "restarts": spec.budget.restarts}.items():
        theirs = spec.paper.get(key, ours)
        if key != "restarts" or theirs != 1 or ours != 1:
            parts.append(f"{key} {ours}" + (f" of {theirs:g}" if theirs != ours else ""))
    return ", ".join(parts)
