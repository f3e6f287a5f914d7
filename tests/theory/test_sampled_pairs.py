"""The sampled epsilon against the best server there is: it chooses the other records' gradients anew in each round.

With the others' gradients alike, a round's outputs are a normal distribution or, if the record is drawn, the same one moved by
the record's difference from them. So a pair of data sets is two moves in a plane; all three gradients fit into the clip's circle.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from numpy.typing import NDArray
from scipy import signal

from fedgauge.defenses.amplification import sampled_epsilon

DELTA = 1e-5
Move = tuple[float, float]
ADD, REMOVE = ((2.0, 0.0), (0.0, 0.0)), ((0.0, 0.0), (2.0, 0.0))
# part, noise, rounds; epsilon over what the pair ADD reaches, and over what the best choice in each round does
SETTINGS = [(0.04, 1.5, 2250, 1.28, 1.27), (0.01, 2.0, 1000, 1.20, 1.20), (0.2, 4.0, 100, 1.08, 1.08)]


def round_losses(part: float, noise: float, one: Move, other: Move, step: float) -> tuple[int, NDArray[np.float64]]:
    """The least loss, in steps, and the masses of the losses of a round in which the record moves it by `one`, not `other`."""
    moves = np.array([one, other]) / noise
    sizes = (401, 401) if moves[:, 1].any() else (20_001, 1)  # on a line one value of y is enough
    low, high = moves.min(0).clip(max=0) - 7, moves.max(0).clip(0) + 7
    axes = [np.linspace(a, b, n) if n > 1 else np.zeros(1) for a, b, n in zip(low, high, sizes, strict=True)]
    x = np.stack(np.meshgrid(*axes, indexing="ij"), -1)
    p, q = (np.logaddexp(math.log1p(-part), math.log(part) + x @ move - move @ move / 2) for move in moves)
    mass, loss = np.exp(p - (x**2).sum(-1) / 2).ravel(), ((p - q) / step).ravel()
    below = np.floor(loss).astype(int)
    places, weights = np.concatenate([below, below + 1]) - below.min(), np.concatenate([below + 1 - loss, loss - below])
    return int(below.min()), np.bincount(places, weights * np.tile(mass / mass.sum(), 2)).astype(float)


def reached(part: float, noise: float, rounds: int, pairs: Sequence[tuple[Move, Move]], finer: float = 8) -> float:
    """Epsilon of the server that picks among the pairs in each round by the loss so far: a dynamic program, from the last."""
    step = part * math.sqrt(math.expm1(4 / noise**2)) / finer
    told = sampled_epsilon(part, noise / 2, rounds, DELTA)
    losses = np.arange(round(-3 * told / step), round(2.5 * told / step)) * step
    value, each = -np.expm1(-losses.clip(0)), [round_losses(part, noise, *pair, step) for pair in pairs]
    left, right = max(-low for low, _ in each), max(low + len(masses) for low, masses in each)
    for _ in range(rounds):
        wide = np.pad(value, (left, right), "edge")
        options = [signal.oaconvolve(wide, masses[::-1], "valid")[left + low :][: len(value)] for low, masses in each]
        value = np.max(options, axis=0)
    return -float(np.interp(math.log(DELTA), np.log(value.clip(1e-300)), losses))


@pytest.mark.parametrize(("part", "noise", "rounds", "ratio", "least"), SETTINGS)
def test_the_best_server_reaches_what_the_page_says(
    part: float, noise: float, rounds: int, ratio: float, least: float
) -> None:
    told = sampled_epsilon(part, noise / 2, rounds, DELTA)
    constant, best = (reached(part, noise, rounds, pairs) for pairs in ([ADD], [ADD, REMOVE]))
    composed = privacy_loss_distribution.from_gaussian_mechanism(
        noise / 2, sampling_prob=part, value_discretization_interval=1e-3
    ).self_compose(rounds)
    assert constant == pytest.approx(composed.get_epsilon_for_delta(DELTA), rel=3e-3), "an independent composition"
    assert constant < best < 1.01 * constant, "to choose anew in each round helps little"
    assert told / composed.get_epsilon_for_delta(DELTA) == pytest.approx(ratio, abs=0.006)
    assert told / best == pytest.approx(least, abs=0.006)


@pytest.mark.parametrize(
    ("part", "noise", "rounds"),
    [
        pytest.param(0.04, 1.5, 225, marks=pytest.mark.full),
        pytest.param(0.01, 2.0, 100, marks=pytest.mark.full),
        (0.2, 4.0, 100),
    ],
)
def test_no_other_pair_helps_the_server(part: float, noise: float, rounds: int) -> None:
    """The others' gradient has norm 1; the record's two have norms of 0, .5 and 1 every 45 degrees, in either order.

    A tenth of the page's rounds: each round's choice depends on the loss so far alone, and these reach large losses too.
    """
    turns = [(r * math.cos(a), r * math.sin(a)) for r in (0.5, 1.0) for a in np.radians(range(0, 360, 45))]
    moves = [(x - 1.0, y) for x, y in [*turns, (0.0, 0.0)]]
    pairs = [
        (one, other) for one, other in itertools.permutations(moves, 2) if one[1] >= 0 and math.dist(one, (-1, 0)) > 0.9
    ]
    best, others = (reached(part, noise, rounds, some, 4) for some in ([ADD, REMOVE], [*pairs, ADD, REMOVE]))
    assert others < 1.001 * best
