"""Stacking (Wolpert, 1992): a logistic regression of five scores, fitted to simulated updates with known members.

Bertoli (2026, arXiv 2604.12737) stacks seven classifiers of one network's predictions, and its loss, under boosted trees; a client
with known members is the training data. Here the server simulates clients that hold its public non-members, through the chain, and
the signals are scores of an update. Nothing is fitted to the candidates.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fedgauge.attacks.engine.simulator import Simulator
from fedgauge.attacks.membership.gradients import CandidateGradients
from fedgauge.attacks.membership.scores import SCORES, Scoring, against_non_members, calibrated, classes_of
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch

STACKED = "stacked"
SIGNALS = ("likelihood_ratio", "matched_filter", "gradient_difference", "loss_change", "loss")
SHADOWS = 64  # simulated updates
FOLDS = 2
LONGEST = 20.0  # a ratio's logarithm, or a score in standard deviations, that counts
PARTS = 4  # a simulated batch is at most this part of the non-members
RIDGE = 1.0  # precision of each weight's prior
STEPS = 25


def stacked(scoring: Scoring, count: int) -> Tensor:
    """Log-odds (K, N) float64 of the first N candidates, of which the last `count` are public non-members.

    Raises:
        ValueError: there are too few non-members for a simulated batch.
    """
    every = scoring.candidates
    known, size = every.known, every.known.batch_size
    public = Batch(*(t[-count:] for t in every.batch))
    if count < PARTS * size:
        raise ValueError(
            f"stacking needs {2 * PARTS * size} public examples for batches of {size}: raise [data] auxiliary"
        )
    non_members = torch.ones(len(every), dtype=torch.bool)
    non_members[:-count] = False
    rng = generator("stacking", scoring.wave.round)
    rows = torch.stack([torch.randperm(count, generator=rng)[:size] for _ in range(SHADOWS)])
    members = torch.zeros(SHADOWS, count, dtype=torch.bool).scatter_(1, rows, True)
    candidates = CandidateGradients(known, every.params, public)
    signals, done = [], 0
    for update in Simulator(known, every.params).updates(public.x[rows], public.y[rows], rng):
        wave = replace(scoring.wave, clients=tuple(range(len(next(iter(update.values()))))), update=update)
        own = members[done : done + len(wave)]
        signals.append(_signals(Scoring(candidates, wave, scoring.rest), ~own, FOLDS))
        done += len(wave)
    weights = logistic_regression(torch.cat(signals).flatten(0, 1), members.flatten())
    found = _signals(scoring, non_members.expand(len(scoring.wave), -1))
    odds: Tensor = found @ weights[:-1] + weights[-1]
    return odds


def _signals(scoring: Scoring, non_members: Tensor, folds: int = 1) -> Tensor:
    """The features (K, N, F): each score relative to the non-members (K, N) of its update and label.

    Args:
        folds: of candidates, none of which is compared with its own fold; 1: they are not among the non-members.
    """
    labels = classes_of(scoring.candidates.batch)
    fold = torch.arange(len(labels)) % folds
    found = torch.empty(*non_members.shape, len(SIGNALS), dtype=torch.float64)
    for i, name in enumerate(SIGNALS):
        scores, compare = SCORES[name](scoring), calibrated if name == SIGNALS[0] else against_non_members
        for k, (own, others) in enumerate(zip(scores[:, None], non_members, strict=True)):
            for part in range(folds):
                mine = fold == part
                rest = others & ~mine if folds > 1 else others
                found[k, mine, i] = compare(own[:, mine], labels[mine], own[:, rest], labels[rest], least=2)[0]
    # the two strongest as they are, and all with shorter tails
    return torch.cat([found[..., :2].clamp(-LONGEST, LONGEST), found.asinh()], -1)


def logistic_regression(x: Tensor, y: Tensor) -> Tensor:
    """Weights (F + 1,) of features x (N, F) and a constant, by Newton's method; y (N,) bool.

    A weight counts in standard deviations of its feature, and has a normal prior of precision RIDGE; the constant has none.
    """
    spread = x.std(0).clamp_min(torch.finfo(x.dtype).tiny)
    rows = torch.cat([x / spread, torch.ones_like(x[:, :1])], 1)
    prior = torch.tensor([RIDGE] * x.shape[1] + [0.0], dtype=x.dtype)
    weights = torch.zeros_like(prior)
    for _ in range(STEPS):
        p = (rows @ weights).sigmoid()
        slope = rows.T @ (y.to(p) - p) - prior * weights
        weights = weights + torch.linalg.solve(rows.T @ (rows * (p * (1 - p))[:, None]) + prior.diag(), slope)
    found: Tensor = weights / torch.cat([spread, torch.ones(1, dtype=x.dtype)])
    return found
