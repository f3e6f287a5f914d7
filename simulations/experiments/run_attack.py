"""One attack of a paper's table: attack every update of a setup, grade the results, estimate the time."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
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
from fedgauge.simulations.experiments.measures import AttackOutcome
from fedgauge.simulations.experiments.paper_tables import (
    IMAGE_METRICS,
    TEXT_METRICS,
    AttackSpec,
    Setting,
)
from fedgauge.simulations.experiments.setups import Setup

PILOT_ITERATIONS = 3  # from which an attack's duration is estimated
PILOT_UPDATES = 1  # of sentences, for the same: LAMP scores a thousand guesses before its first step
RANDOM_DRAWS = 10  # of random words for each update, whose mean is the floor


def run_attack(
    spec: AttackSpec, setup: Setup, seed: int, wave: int, on_progress: Callable[[int], None] = lambda count: None
) -> AttackOutcome:
    """Attack every update of a setup, then grade; a failed attack is counted, and graded as a grey image or as no words.

    Args:
        on_progress: called after each wave with the number of updates attacked so far.
    """
    started = time.perf_counter()
    reconstructions: list[Reconstruction] = []
    for part in _waves(setup, wave):
        reconstructions += _reconstruct(spec, spec.budget, setup, seed, part)
        on_progress(part.stop)
    seconds = time.perf_counter() - started
    failed = [r for r in reconstructions if r.x is None or not bool(torch.isfinite(r.x).all())]
    return AttackOutcome(
        scores=_scores(setup, reconstructions, setup.truth),
        iterations=torch.tensor([r.iterations for r in reconstructions], dtype=torch.float64),
        failed=len(failed),
        seconds=seconds,
        floor=_mean_image_scores(setup) if setup.tokenizer is None else _random_word_scores(spec, setup, seed),
        augmented=_scores(setup, reconstructions, setup.augmented)["psnr"]
        if setup.augmented is not None and setup.tokenizer is None
        else None,
        reasons=tuple(sorted({r.reason for r in failed} - {""})),
        isolated=setup.isolated,
    )


def _waves(setup: Setup, most: int) -> Iterator[slice]:
    """Slices of at most `most` updates; updates of different weights (from a malicious server) never share a slice."""
    first, seen = 0, setup.observations
    for i in range(1, len(seen) + 1):
        if i == len(seen) or i - first == most or seen[i].params is not seen[first].params:
            yield slice(first, i)
            first = i


def _scores(setup: Setup, reconstructions: Sequence[Reconstruction], truth: Sequence[Batch]) -> dict[str, Tensor]:
    """Each metric as (n, B)."""
    if setup.tokenizer is None:
        graded = [_grade_images(r, t) for r, t in zip(reconstructions, truth, strict=True)]
    else:
        graded = [_grade_sentences(r, t, setup.tokenizer) for r, t in zip(reconstructions, truth, strict=True)]
    return {name: torch.stack([g[name] for g in graded]) for name in graded[0]}


def _random_word_scores(spec: AttackSpec, setup: Setup, seed: int) -> dict[str, float]:
    """Mean scores of random words that know as much of the sentences as the attack does."""
    wave, known, _ = _attacker_view(spec, setup, seed, slice(None))
    draws = []
    for draw in range(RANDOM_DRAWS):
        streams: list[Stream] = [partial(generator, seed, "floor", draw, k) for k in range(len(wave))]
        draws.append(_scores(setup, random_words().reconstruct(wave, known, Budget(1), streams), setup.truth))
    return {name: float(torch.stack([scores[name] for scores in draws]).mean()) for name in draws[0]}


def _mean_image_scores(setup: Setup) -> dict[str, float]:
    """Mean scores of the mean public image, which needs no update."""
    assert setup.known.auxiliary is not None
    mean = setup.known.auxiliary.x.mean(0)
    graded = [(psnr(t.x, mean.expand_as(t.x)), mse(t.x, mean.expand_as(t.x))) for t in setup.truth]
    return {
        "psnr": float(torch.cat([g[0] for g in graded]).mean()),
        "mse": float(torch.cat([g[1] for g in graded]).mean()),
    }


def _reconstruct(spec: AttackSpec, budget: Budget, setup: Setup, seed: int, part: slice) -> list[Reconstruction]:
    attack = spec.build()
    if isinstance(attack, FeedbackBlending):
        parts = [slice(i, i + setup.clients) for i in range(0, len(setup.observations[part]), setup.clients)]
        waves, known, streams = zip(*(_attacker_view(spec, setup, seed, p) for p in parts), strict=True)
        return [r for results in attack.sequence(waves, known, budget, lambda place: streams[place]) for r in results]
    wave, threat, randomness = _attacker_view(spec, setup, seed, part)
    return attack.reconstruct(wave, threat, budget, randomness)


def _attacker_view(spec: AttackSpec, setup: Setup, seed: int, part: slice) -> tuple[Wave, Knowledge, list[Stream]]:
    """What an attack gets for a slice of the updates: the updates, its knowledge, its random streams."""
    observations = setup.observations[part]
    # attacks of one setting share their starts, so that luck of the draw does not separate them
    streams: list[Stream] = [partial(generator, seed, "attack", o.client) for o in observations]
    known = setup.known if spec.defense == "known" else replace(setup.known, chain=Chain((setup.known.chain.local,)))
    if spec.auxiliary is not None and known.auxiliary is not None:
        rng = generator(seed, "auxiliary", repr(sorted(spec.auxiliary.items())))
        known = replace(known, auxiliary=spec.build_auxiliary().of(known.auxiliary, known.classes, rng))
    truth = setup.truth[part]
    if spec.labels == "given":
        known = replace(known, labels=torch.stack([t.y for t in truth]))
    if spec.lengths == "given" and isinstance(known.model, LanguageModel):
        lengths = [_lengths(t, known.model.pad, spec.labels == "given") for t in truth]
        known = replace(known, text=Sentences(torch.stack(lengths)))
    return Wave.stack(observations), known, streams


def _lengths(batch: Batch, pad: int, client_order: bool) -> Tensor:
    """Tokens of each sentence (B,), in the client's order, or sorted by label and length, which reveals no order."""
    lengths = (batch.x != pad).sum(1)
    if client_order:
        return lengths
    labels = batch.y if batch.y.dim() == 1 else torch.zeros_like(lengths)
    order = sorted(range(len(lengths)), key=lambda i: (int(labels[i]), int(lengths[i])))
    return lengths[order]


def _grade_sentences(reconstructions: Reconstruction, truth: Batch, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Each metric (B,) of the sentences, paired one to one."""
    x = torch.full_like(truth.x, tokenizer.pad) if reconstructions.x is None else reconstructions.x
    x = x[match_sentences(truth.x, x, tokenizer)]
    scores = {metric.name: metric(truth.x, x) for metric in text_metrics(tokenizer)}
    return {name: scores["exact" if name == "exact_sentence" else name] for name in TEXT_METRICS}


def _grade_images(reconstructions: Reconstruction, truth: Batch) -> dict[str, Tensor]:
    """PSNR and mean squared error (B,) of each image, paired one to one."""
    x = reconstructions.x
    if x is None or not torch.isfinite(x).all():
        x = torch.full_like(truth.x, 0.5)
    x = x[match(truth.x, x)]
    return {"psnr": psnr(truth.x, x).clamp(max=PSNR_CAP), "mse": mse(truth.x, x)}


def check_attacks(cell: Setting, setup: Setup) -> None:
    """SpecError if an attack asks for knowledge or a metric that the setting's data do not have."""
    known_metrics, other = (IMAGE_METRICS, "sentences") if setup.tokenizer is None else (TEXT_METRICS, "images")
    for spec in cell.attacks:
        where = f"cell {cell.name}, attack {spec.name}"
        if wrong := [m for m in spec.metrics if m not in known_metrics]:
            raise SpecError(
                f"{where}: {wrong[0]} is a metric of {other}; the metrics of {cell.images.use} are {', '.join(known_metrics)}"
            )
        if spec.lengths == "given" and setup.tokenizer is None:
            raise SpecError(f'{where}: lengths = "given" needs sentences, but {cell.images.use} holds images')
        if spec.labels == "given" and setup.truth[0].y.dim() > 1:
            raise SpecError(f'{where}: labels = "given" would hand over the sentences; set labels = "restored"')


def estimate_seconds(spec: AttackSpec, setup: Setup, seed: int, wave: int) -> float:
    """Seconds that an attack will take, from a few iterations on its first wave; excludes one-off preparation."""
    if spec.budget.iterations <= 2 * PILOT_ITERATIONS:
        return 0.0
    # LAMP reorders words once a period, which costs as much as the iterations between; training is for whole waves
    period = getattr(spec.build(), "period", None)
    wave = wave if period is None else min(wave, PILOT_UPDATES)
    pilot = min(period or PILOT_ITERATIONS, spec.budget.iterations // 2)
    seconds = []
    # the first run prepares for the others (a language model, simulated updates); no budget twice, as training is cached
    for iterations in (1, 2, 2 + pilot):
        started = time.perf_counter()
        _reconstruct(spec, replace(spec.budget, iterations=iterations), setup, seed, next(_waves(setup, wave)))
        seconds.append(time.perf_counter() - started)
    waves = len(list(_waves(setup, wave)))
    each = max(seconds[2] - seconds[1], 0.0) / pilot
    return waves * (seconds[1] + each * (spec.budget.iterations - 2))
