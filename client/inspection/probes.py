"""Detectors that try weights on a client's own examples: biases, dead layers, gradients that single examples own, the loss."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedgauge.client.data.images import Shards, batch_of
from fedgauge.client.inspection.results import LARGEST, DetectorResult
from fedgauge.client.inspection.weights import FEWEST, embedding_weights
from fedgauge.client.training import drawing, gradient
from fedgauge.client.update import Batch, Loss, Params

PROBE = 32  # own examples on which weights are tried
MOST_FLOATS = 2**24  # of single examples' gradients at a time: 64 MiB
TOUCHES = 1e-12  # part of the largest energy from which on a gradient is one
GONE = 1e-6  # part of what its energy was that an example's gradient has left when it has vanished
WIDE = 16  # units of a layer: fewer are a classifier's, of which one may well belong to one example
ALONE = 0.99  # part of a unit's energy that makes it one example's


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


def probe_examples(shards: Shards, client: int, rows: Tensor) -> Batch:
    """Examples of a client's own to try weights on: a round's (their rows), and others of its shard up to PROBE."""
    mine = shards.indices[client]
    others = mine[~torch.isin(mine, rows)][: max(PROBE - len(rows), 0)]
    return batch_of(shards.dataset.x, shards.dataset.y, torch.cat([rows, others])[:PROBE])


def inspect_with_examples(probes: ProbeSet, params: Params, previous: Params | None) -> Iterator[DetectorResult]:
    """What weights show on a client's own examples; previous: the weights of an earlier round, None before the first."""
    tables = embedding_weights(probes.model)
    now = _try_weights(probes, params)
    before = None if previous is None else _try_weights(probes, previous)
    yield from _biases(params, now)
    yield from _dead(params, now, tables)
    yield from _shared_out(now, before, tables)
    if before is not None:
        yield from _loss(now, before)


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


def _try_weights(probes: ProbeSet, params: Params) -> _ProbeResult:
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
