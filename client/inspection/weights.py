"""Detectors that read only weights: rows, sparsity, and changes since the last round."""

import math
from collections.abc import Iterator, Set

import torch
from torch import Generator, Tensor

from fedgauge.client.inspection.results import LARGEST, THRESHOLDS, DetectorResult
from fedgauge.client.rng import secret_generator
from fedgauge.client.update import Params

MOST_ROWS = 1024  # of a matrix that are compared with each other: of a larger one a random sample
FEWEST = 8  # entries of a row, below which a detector says nothing
LONG = 25  # entries of a row; by chance no single one of so many holds nearly all of its norm
PARALLEL = 0.9999  # cosine from which on two rows count as multiples of each other


def inspect_weights(
    params: Params,
    previous: Params | None,
    apart: int = 1,
    tables: Set[str] = frozenset(),
    rng: Generator | None = None,
) -> Iterator[DetectorResult]:
    """Results of the detectors that need no example; tables: names of embeddings, since their rows are not units."""
    before = {} if previous is None else dict(_matrices(previous, tables))
    for name, matrix in _matrices(params, tables):
        drawn = _drawn(matrix, rng)
        yield from _rows(name, matrix[drawn])
        yield from _balance(name, matrix)
        yield from _sparse(name, matrix)
        if name in before:
            yield from _moved(name, matrix, before[name], drawn)
    if previous is not None:
        yield from _jumps(params, previous, apart)


def _matrices(params: Params, tables: Set[str]) -> Iterator[tuple[str, Tensor]]:
    """Every layer's weight (units, inputs) that has at least two units."""
    for name, t in params.items():
        if t.dim() >= 2 and len(t) >= 2 and name not in tables and t[0].numel() >= FEWEST:
            yield name, t.detach().flatten(1)


def _drawn(matrix: Tensor, rng: Generator | None) -> Tensor:
    """The rows that are compared: all, or MOST_ROWS at random."""
    if len(matrix) <= MOST_ROWS:
        return torch.arange(len(matrix))
    return torch.randperm(len(matrix), generator=secret_generator() if rng is None else rng)[:MOST_ROWS]


def _rows(name: str, matrix: Tensor) -> Iterator[DetectorResult]:
    """Rows that are zero or a multiple of another row, and the rank that the matrix lacks."""
    if not bool(torch.isfinite(matrix).all()):  # it has no eigenvalues
        yield DetectorResult("dependent rows", name, LARGEST, "it has entries that are not finite")
        return
    rows = matrix.double()
    norms = rows.norm(dim=1)
    zero = norms <= 1e-6 * norms.max()
    unit = rows / norms.clamp(min=1e-300)[:, None]
    cosines = (unit @ unit.T).fill_diagonal_(0.0)
    parallel = (cosines.amax(1) >= PARALLEL) & ~zero
    small = unit if len(unit) <= unit.shape[1] else unit.T
    values = torch.linalg.eigvalsh(small @ small.T)
    lacking = float((values <= 1e-8 * values[-1]).double().mean())
    share = max(float((zero | parallel).double().mean()), lacking)
    words = f"{int(zero.sum())} rows of {len(rows)} are zero, {int(parallel.sum())} a multiple of another"
    yield DetectorResult("dependent rows", name, share, f"{words}; its rank lacks {lacking:.0%}")


def _balance(name: str, matrix: Tensor) -> Iterator[DetectorResult]:
    """Too many rows with as many negative as positive entries: minus log10 of a bound on the probability by chance."""
    entries = matrix.shape[1]
    matrix = matrix[(matrix != 0).all(1)]  # other detectors report zeros
    even = int((matrix.sign().sum(1).abs() <= entries % 2).sum())
    middle = math.lgamma(entries + 1) - math.lgamma(entries // 2 + 1) - math.lgamma(entries - entries // 2 + 1)
    expected = math.exp(middle - entries * math.log(2)) * (1 + entries % 2)
    words = f"{even} rows of {len(matrix)} are half negative, {expected:.0%} are expected by chance"
    yield DetectorResult("balanced rows", name, _chernoff(even, len(matrix), expected), words)


def _chernoff(count: int, n: int, expected: float) -> float:
    """Minus log10 of a bound on the probability of so many successes among n."""
    p = count / n if n else 0.0
    if p <= expected:
        return 0.0
    rest = 0.0 if p == 1 else (1 - p) * math.log((1 - p) / (1 - expected))
    return n * (p * math.log(p / expected) + rest) / math.log(10)


def _sparse(name: str, matrix: Tensor) -> Iterator[DetectorResult]:
    """Rows with all their norm in a few entries: (sum w^2)^2 / sum w^4 is n/3 for n normal entries, 1 for a single one."""
    squares = matrix.double().square()
    held_by = squares.sum(1).square() / squares.square().sum(1).clamp(min=1e-300)
    few = (held_by < 0.1 * matrix.shape[1]) & (squares.sum(1) > 0)
    single = int((few & (held_by < 2)).sum()) if matrix.shape[1] >= LONG else 0
    share = float(few.double().mean())
    words = f"in {share:.0%} of its rows a few entries hold nearly all of the norm, in {single} rows a single one"
    yield DetectorResult("sparse rows", name, 1.0 if single else share, words)


def _jumps(params: Params, previous: Params, apart: int) -> Iterator[DetectorResult]:
    """Measure each layer's change relative to its norm; weights and bias together, since a bias may start near zero."""
    layers: dict[str, list[str]] = {}
    for name in params:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    for layer, names in layers.items():
        size = _norm(previous[n] for n in names)
        moved = _norm(params[n] - previous[n] for n in names)
        score = min(moved / size if size else LARGEST * (moved > 0), LARGEST) / apart
        yield DetectorResult("jump", layer, score, f"it moved by {score:.0%} of its size a round")


def _norm(tensors: Iterator[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def _moved(name: str, matrix: Tensor, before: Tensor, drawn: Tensor) -> Iterator[DetectorResult]:
    """Sampled rows that are nearer to what another row was than to what they were themselves."""
    now = _directions(matrix[drawn])
    own, nearest = torch.full((2, len(now)), -1.0, dtype=now.dtype)
    for places in torch.arange(len(before)).split(MOST_ROWS):
        cosines = now @ _directions(before[places]).T
        same = drawn[:, None] == places
        own[same.any(1)] = cosines[same]
        nearest = nearest.maximum(cosines.masked_fill(same, -1.0).amax(1))
    gain = float((nearest - own).max())
    moved = int((nearest - own >= THRESHOLDS["moved rows"]).sum())
    words = f"{moved} rows are nearer to what others were than to themselves"
    yield DetectorResult("moved rows", name, max(gain, 0.0), words)


def _directions(rows: Tensor) -> Tensor:
    sizes = rows.double().norm(dim=1, keepdim=True)
    unit: Tensor = rows.double() / sizes.clamp(min=1e-30)
    return unit
