"""Inspection: before a client trains on weights, it asks whether an honest federation would have sent them.

It knows the network, the weights of its last round, and examples of its own. Nothing of what it finds has to leave it, but a
client that refuses by what its examples show tells the server one bit of them.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, vmap

from fedgauge.client.data.images import Shards, batch_of
from fedgauge.client.rng import secret_generator
from fedgauge.client.update import Batch, Loss, Params, TransformState, drawing, gradient

PROBE = 32  # own examples on which weights are tried
MOST_ROWS = 1024  # of a matrix that are compared with each other: of more, some are drawn
MOST_APART = 5  # rounds by which a jump is excused: how many it has been is the server's word
MOST_FLOATS = 2**24  # of single examples' gradients at a time: 64 MiB
FEWEST = 8  # examples, and entries of a row, of which something can be said
TOUCHES = 1e-12  # part of the largest energy from which on a gradient is one
GONE = 1e-6  # part of what its energy was that an example's gradient has left when it has vanished
WIDE = 16  # units of a layer: fewer are a classifier's, of which one may well belong to one example
LONG = 25  # entries of a row of which one alone does not by chance hold nearly all
ALONE = 0.99  # part of a unit's energy that makes it one example's
PARALLEL = 0.9999  # cosine of two rows that are one
LARGEST = 1e6  # a score that has no bound, or is no number, stops here
REASON = "withheld by the client's guard"  # the same whatever the cause
ALARM = "alarm, suspicion"


def is_alarm(reason: str) -> bool:
    """Whether a guard's words, as a server records them, tell of an alarm or of an update that was withheld."""
    return ALARM in reason or reason.startswith(REASON)


Mode = Literal["off", "log", "warn", "refuse"]

# By detector the score at which it alarms: above what honest rounds of networks and seeds gave that no figure is reported of.
THRESHOLDS: Mapping[str, float] = {
    "architecture": 1.0,
    "dependent rows": 0.15,
    "balanced rows": 6.0,
    "sparse rows": 0.3,
    "extreme biases": 60.0,
    "dead layer": 5.0,
    "dead units": 0.9,
    "isolated units": 0.6,
    "dominated": 10.0,
    "vanished": 0.4,
    "jump": 1.2,
    "moved rows": 0.5,
    "loss": math.log(20),
}


@dataclass(frozen=True)
class DetectorResult:
    """What one detector made of one layer ("": of the whole network).

    Args:
        score: 0 and more; an alarm from `threshold` on.
        words: for the owner.
    """

    detector: str
    layer: str
    score: float
    words: str

    @property
    def threshold(self) -> float:
        """The detector's."""
        return THRESHOLDS[self.detector]

    @property
    def ratio(self) -> float:
        """Score over threshold."""
        return self.score / self.threshold


@dataclass(frozen=True)
class DetectorResults:
    """Each detector's worst layer, the most suspicious first; without those that had nothing to look at."""

    found: tuple[DetectorResult, ...]

    @classmethod
    def of(cls, findings: Iterator[DetectorResult]) -> "DetectorResults":
        """The worst of each detector."""
        worst: dict[str, DetectorResult] = {}
        for finding in findings:
            if not math.isfinite(finding.score):  # by comparison it would pass under any threshold
                finding = replace(finding, score=LARGEST)
            if finding.detector not in worst or finding.score > worst[finding.detector].score:
                worst[finding.detector] = finding
        return cls(tuple(sorted(worst.values(), key=lambda f: -f.ratio)))

    @property
    def suspicion(self) -> float:
        """The largest score over its threshold."""
        return max((f.ratio for f in self.found), default=0.0)

    @property
    def alarms(self) -> tuple[DetectorResult, ...]:
        """Those at or above their threshold."""
        return tuple(f for f in self.found if f.ratio >= 1)

    @property
    def why(self) -> str:
        """The alarms in words; empty where there is none."""
        return "; ".join(f"{f.layer or 'the network'}: {f.words}" for f in self.alarms)


# ------------------------------------------------------------------------------------------------------- the inspection


@dataclass(frozen=True, eq=False)
class ProbeSet:
    """What a client tries weights on.

    Args:
        model: with the buffers that came with the weights.
        probe: examples of its own, none where they are to be left out of it; the mean loss over them is what it minimises.
    """

    model: nn.Module
    probe: Batch
    loss: Loss
    normalise: Callable[[Tensor], Tensor] | None = None


def inspect(
    probes: ProbeSet,
    params: Params,
    previous: Params | None,
    apart: int = 1,
    agreed: str = "",
    rng: Generator | None = None,
) -> DetectorResults:
    """Everything that can be said of weights before training on them; all that is handed in is left as it was.

    Of fewer than FEWEST examples nothing is said of how they share a gradient: one alone has all of it by definition. Who
    trains on one example a round probes with others of its own.

    Args:
        previous: the weights of an earlier round, None before the first; apart: rounds since then.
        agreed: `fingerprint` of the network that was agreed on; "": any.
        rng: draws the rows of large matrices that are looked at; None: the client's own entropy. A server that could foresee
            them would put its rows elsewhere.
    """

    def findings() -> Iterator[DetectorResult]:
        yield from _architecture(probes.model, agreed)
        yield from inspect_weights(params, previous, apart, _tables(probes.model), rng)
        if not len(probes.probe.x):
            return
        now = _tried(probes, params)
        before = None if previous is None else _tried(probes, previous)
        yield from _biases(params, now)
        yield from _dead(params, now, _tables(probes.model))
        yield from _shared_out(now, before, _tables(probes.model))
        if before is not None:
            yield from _loss(now, before)

    return DetectorResults.of(findings())


def inspect_weights(
    params: Params,
    previous: Params | None,
    apart: int = 1,
    tables: frozenset[str] = frozenset(),
    rng: Generator | None = None,
) -> Iterator[DetectorResult]:
    """What weights show without an example; tables: names of embeddings, whose rows are no units of a layer."""
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


def probe_examples(shards: Shards, client: int, rows: Tensor) -> Batch:
    """Examples of a client's own to try weights on: a round's (their rows), and others of its shard up to PROBE."""
    mine = shards.indices[client]
    others = mine[~torch.isin(mine, rows)][: max(PROBE - len(rows), 0)]
    return batch_of(shards.dataset.x, shards.dataset.y, torch.cat([rows, others])[:PROBE])


def fingerprint(model: nn.Module) -> str:
    """A digest of the tree of modules: their names, kinds, settings and the shapes of their tensors; not of any value."""
    parts = []
    for name, module in model.named_modules():
        kind = type(module)
        parts.append(f"{name}|{kind.__module__}.{kind.__qualname__}|{module.extra_repr()}")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    parts += [f"{name}|{tuple(t.shape)}|{t.dtype}" for name, t in tensors.items()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class InspectionPolicy:
    """What a client does about the weights that it is sent.

    Args:
        inspect: off looks at nothing; log writes down what is found; warn tells of alarms alone, more loudly; refuse also
            holds the update back.
        architecture: `fingerprint` of the network that was agreed on; None: of the first round's.
        examples: whether weights are tried on examples; if not, a refusal tells the server nothing of them.
    """

    inspect: Mode = "off"
    architecture: str | None = None
    examples: bool = True

    def findings(
        self, probes: ProbeSet | None, params: Params, round: int, memory: TransformState, rng: Generator | None = None
    ) -> DetectorResults:
        """What a round's weights look like to a client that keeps `memory` from round to round: read, and written.

        It keeps the first network's fingerprint and the last weights that raised no alarm: no more than a model.

        Args:
            bench: None: of the network and examples nothing is known here.
            rng: as `inspect` has it.
        """
        previous, then = _remembered(memory)
        if previous is not None and _shapes(previous) != _shapes(params):
            previous = None  # of another network, of which the fingerprint speaks
        apart = min(max(round - then, 1), MOST_APART)
        if probes is None:
            found = DetectorResults.of(inspect_weights(params, previous, apart, rng=rng))
        else:
            tried = probes if self.examples else replace(probes, probe=Batch(probes.probe.x[:0], probes.probe.y[:0]))
            found = inspect(tried, params, previous, apart, self.architecture or _text(memory.get(FIRST_NETWORK)), rng)
            met = fingerprint(probes.model).encode()
            memory.setdefault(FIRST_NETWORK, torch.tensor(list(met), dtype=torch.uint8))
        if not found.alarms:
            for name in [k for k in memory if k.startswith(_WEIGHTS)]:
                del memory[name]
            memory.update({_WEIGHTS + k: t.detach().clone() for k, t in params.items()})
            memory[_ROUND] = torch.tensor(round)
        return found


FIRST_NETWORK = "architecture"  # in a memory, the fingerprint of the network that was met first
_ROUND, _WEIGHTS = "round", "params."


def _remembered(memory: TransformState) -> tuple[Params | None, int]:
    kept = {k.removeprefix(_WEIGHTS): t for k, t in memory.items() if k.startswith(_WEIGHTS)}
    return (kept, int(memory[_ROUND])) if kept else (None, 0)


def _shapes(params: Params) -> dict[str, torch.Size]:
    return {name: t.shape for name, t in params.items()}


def _text(kept: Tensor | None) -> str:
    return "" if kept is None else bytes(kept.tolist()).decode()


# ---------------------------------------------------------------------------------------------------------- the weights


def _architecture(model: nn.Module, agreed: str) -> Iterator[DetectorResult]:
    if not agreed:
        return
    met = fingerprint(model)
    yield DetectorResult("architecture", "", float(met != agreed) * 2, f"its fingerprint is {met}, agreed is {agreed}")


def _tables(model: nn.Module) -> frozenset[str]:
    return frozenset(f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))


def _matrices(params: Params, tables: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
    """Every layer's weight (units, inputs) that has at least two units."""
    for name, t in params.items():
        if t.dim() >= 2 and len(t) >= 2 and name not in tables and t[0].numel() >= FEWEST:
            yield name, t.detach().flatten(1)


def _drawn(matrix: Tensor, rng: Generator | None) -> Tensor:
    """The rows that are compared: all, or MOST_ROWS by chance."""
    if len(matrix) <= MOST_ROWS:
        return torch.arange(len(matrix))
    return torch.randperm(len(matrix), generator=secret_generator() if rng is None else rng)[:MOST_ROWS]


def _rows(name: str, matrix: Tensor) -> Iterator[DetectorResult]:
    """Rows that are zero or another's multiple, and a rank that says the same of all of them together."""
    if not bool(torch.isfinite(matrix).all()):  # eigenvalues of which cannot be asked for
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
    words = f"{int(zero.sum())} rows of {len(rows)} are zero, {int(parallel.sum())} another's multiple"
    yield DetectorResult("dependent rows", name, share, f"{words}; its rank lacks {lacking:.0%}")


def _balance(name: str, matrix: Tensor) -> Iterator[DetectorResult]:
    """More rows with as many negative as positive entries than chance allows: minus log10 of its probability, at most."""
    entries = matrix.shape[1]
    matrix = matrix[(matrix != 0).all(1)]  # of empty rows others speak
    even = int((matrix.sign().sum(1).abs() <= entries % 2).sum())
    middle = math.lgamma(entries + 1) - math.lgamma(entries // 2 + 1) - math.lgamma(entries - entries // 2 + 1)
    expected = math.exp(middle - entries * math.log(2)) * (1 + entries % 2)
    yield DetectorResult(
        "balanced rows",
        name,
        _chernoff(even, len(matrix), expected),
        f"{even} rows of {len(matrix)} are half negative, {expected:.0%} would be by chance",
    )


def _chernoff(count: int, n: int, expected: float) -> float:
    """Minus log10 of a bound on the probability of so many successes among n."""
    p = count / n if n else 0.0
    if p <= expected:
        return 0.0
    rest = 0.0 if p == 1 else (1 - p) * math.log((1 - p) / (1 - expected))
    return n * (p * math.log(p / expected) + rest) / math.log(10)


def _sparse(name: str, matrix: Tensor) -> Iterator[DetectorResult]:
    """Rows of which a few entries hold all: (sum w^2)^2 / sum w^4 is n/3 of n normal entries, 1 of a single one."""
    squares = matrix.double().square()
    held_by = squares.sum(1).square() / squares.square().sum(1).clamp(min=1e-300)
    few = (held_by < 0.1 * matrix.shape[1]) & (squares.sum(1) > 0)
    single = int((few & (held_by < 2)).sum()) if matrix.shape[1] >= LONG else 0
    share = float(few.double().mean())
    words = f"of {share:.0%} of its rows a few entries hold nearly all, of {single} rows a single one"
    yield DetectorResult("sparse rows", name, 1.0 if single else share, words)


def _jumps(params: Params, previous: Params, apart: int) -> Iterator[DetectorResult]:
    """How far each layer has moved, in units of its size; weights and bias together, since a bias may start near zero."""
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
    """Rows, of those drawn, that stand where any other stood: nearer to what that one was than to what they were."""
    now = _directions(matrix[drawn])
    own, nearest = torch.full((2, len(now)), -1.0, dtype=now.dtype)
    for places in torch.arange(len(before)).split(MOST_ROWS):
        cosines = now @ _directions(before[places]).T
        same = drawn[:, None] == places
        own[same.any(1)] = cosines[same]
        nearest = nearest.maximum(cosines.masked_fill(same, -1.0).amax(1))
    gain = float((nearest - own).max())
    moved = int((nearest - own >= THRESHOLDS["moved rows"]).sum())
    yield DetectorResult(
        "moved rows", name, max(gain, 0.0), f"{moved} rows are nearer to what others were than to themselves"
    )


def _directions(rows: Tensor) -> Tensor:
    sizes = rows.double().norm(dim=1, keepdim=True)
    unit: Tensor = rows.double() / sizes.clamp(min=1e-30)
    return unit


# ------------------------------------------------------------------------------------------------------ with examples


@dataclass(frozen=True, eq=False)
class _ProbeResult:
    """What weights make of examples.

    Args:
        inputs: by the layer's name, the root mean square of what it is fed.
        losses: (B,).
        energy: by parameter, |gradient|^2 of each example and row, (B, rows).
    """

    inputs: Mapping[str, float]
    losses: Tensor
    energy: Mapping[str, Tensor]


def _tried(probes: ProbeSet, params: Params) -> _ProbeResult:
    with _as_evaluated(probes.model):
        inputs, losses = _forward(probes, params)
        return _ProbeResult(inputs, losses, _energies(probes, params))


@contextmanager
def _as_evaluated(model: nn.Module) -> Iterator[None]:
    """In train mode one example's gradient would depend on the others by BatchNorm."""
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _forward(probes: ProbeSet, params: Params) -> tuple[dict[str, float], Tensor]:
    inputs: dict[str, float] = {}

    def noting(name: str) -> Callable[[nn.Module, tuple[object, ...]], None]:
        def note(module: nn.Module, fed: tuple[object, ...]) -> None:
            if fed and isinstance(fed[0], Tensor) and fed[0].is_floating_point():
                inputs[name] = float(fed[0].double().square().mean().sqrt())

        return note

    model, (x, y) = probes.model, probes.probe
    biased = [(n, m) for n, m in model.named_modules() if _inside(n, "bias") in params]
    hooks = [module.register_forward_pre_hook(noting(name)) for name, module in biased]
    try:
        with torch.no_grad(), drawing(model, None):
            logits = functional_call(model, params, (x if probes.normalise is None else probes.normalise(x),))
    finally:
        for hook in hooks:
            hook.remove()
    return inputs, torch.stack([probes.loss(logits[i : i + 1], y[i : i + 1]) for i in range(len(x))]).double()


def _inside(layer: str, name: str) -> str:
    return f"{layer}.{name}" if layer else name


def _energies(probes: ProbeSet, params: Params) -> dict[str, Tensor]:
    compute = gradient(probes.model, probes.loss, probes.normalise)

    def one(x: Tensor, y: Tensor) -> Params:
        found = compute(params, Batch(x[None], y[None]), None)
        # in double: a gradient of 1e20 squares to none in single, and one that is no number outdoes no threshold
        rows = {k: t.double().flatten(1) if t.dim() > 1 else t.double().reshape(-1, 1) for k, t in found.items()}
        return {k: t.square().sum(1) for k, t in rows.items()}

    # of a network larger than that it is one example's gradient, which the client computes anyway
    chunk = max(1, MOST_FLOATS // sum(t.numel() for t in params.values()))
    found: dict[str, Tensor] = vmap(one, randomness="different", chunk_size=chunk)(*probes.probe)
    return {k: t.detach() for k, t in found.items()}


def _biases(params: Params, now: _ProbeResult) -> Iterator[DetectorResult]:
    """Biases that drown what their layer's weights make of the examples, |b| over |w| and the size of the inputs."""
    for layer, size in now.inputs.items():
        weight, bias = params.get(_inside(layer, "weight")), params[_inside(layer, "bias")]
        if weight is None or weight.dim() < 2 or len(weight) != len(bias):
            continue
        expected = weight.detach().flatten(1).double().norm(dim=1) * size
        ratio = (bias.detach().double().abs() / expected.clamp(min=1e-12)).clamp(max=LARGEST)
        worst = int(ratio.argmax())
        words = f"its bias {worst} is {float(ratio[worst]):.3g} times what its weights can make of an input"
        yield DetectorResult("extreme biases", layer, float(ratio[worst]), words)


def _dead(params: Params, now: _ProbeResult, tables: frozenset[str]) -> Iterator[DetectorResult]:
    """Layers and units that no example's gradient reaches; of a table it reaches the words that occur."""
    layers = {k: e for k, e in now.energy.items() if params[k].dim() > 1 and k not in tables}
    # gradient times weight is of one size in all layers of a ReLU network, whatever the scale of each
    sizes = {k: math.sqrt(float(e.sum())) * float(params[k].double().norm()) for k, e in layers.items()}
    most = max(sizes.values(), default=0.0)
    for name, size in sizes.items():
        score = math.log10(most / size) if size > 0 else math.log10(LARGEST)
        words = f"its gradient is smaller by 10^{score:.1f} than another layer's" if most else "it gets no gradient"
        yield DetectorResult("dead layer", name, min(score, math.log10(LARGEST)), words)
        if size > 0 and layers[name].shape[1] >= FEWEST:
            units = layers[name].sum(0)
            share = float((units <= TOUCHES * units.max()).double().mean())
            yield DetectorResult(
                "dead units", name, share, f"{share:.0%} of its units get no gradient from any example"
            )


def _shared_out(now: _ProbeResult, before: _ProbeResult | None, tables: frozenset[str]) -> Iterator[DetectorResult]:
    """Gradients that one example has for itself, as a layer, as most of its units, or as others have lost theirs."""
    if len(now.losses) < FEWEST:
        return
    for name, layer in [*now.energy.items(), ("", _together(now))]:
        ratio, usual = _dominance(layer), 1.0
        gone = layer.sum(1) <= GONE**2 * layer.sum(1).max()
        if before is not None:
            then = before.energy[name] if name else _together(before)
            usual = max(1.0, _dominance(then))
            gone = layer.sum(1) <= GONE * then.sum(1)
        share = float(gone.double().mean())
        words = f"one example's gradient is {ratio:.3g} times all others' together"
        yield DetectorResult("dominated", name, ratio / usual, f"{words}, {ratio / usual:.3g} times what was usual")
        yield DetectorResult("vanished", name, share, f"{share:.0%} of the examples lost their gradient")
        if layer.shape[1] >= WIDE and name not in tables:
            share, common = _isolated(layer), 0.0 if before is None else _isolated(before.energy[name])
            words = f"{share:.0%} of its units learn from a single example each, {common:.0%} did before"
            yield DetectorResult("isolated units", name, max(share - common, 0.0), words)


def _isolated(layer: Tensor) -> float:
    """The part of a layer's units of whose gradient one example has nearly all."""
    units = layer.sum(0)
    alive = units > TOUCHES * units.max()
    return float((layer.amax(0) >= ALONE * units)[alive].double().mean()) if bool(alive.any()) else 0.0


def _together(trial: _ProbeResult) -> Tensor:
    return torch.stack([e.sum(1) for e in trial.energy.values()]).sum(0)[:, None]


def _dominance(layer: Tensor) -> float:
    """D-SNR (Garov et al., 2024): the largest example's gradient over the others'."""
    each = layer.sum(1)
    rest = float(each.sum() - each.max())
    if rest <= 0:
        return LARGEST if float(each.max()) > 0 else 0.0
    return min(math.sqrt(float(each.max()) / rest), LARGEST)


def _loss(now: _ProbeResult, before: _ProbeResult) -> Iterator[DetectorResult]:
    """A loss that has leapt or collapsed since the last round, as a logarithm."""
    here, then = (max(float(t.losses.mean()), 1e-6) for t in (now, before))
    yield DetectorResult(
        "loss",
        "",
        abs(math.log(here) - math.log(then)),
        f"the loss on its own examples went from {then:.3g} to {here:.3g}",
    )
