"""Detectors that evaluate weights on a client's own examples: biases, dead layers, gradients of single examples, the loss."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedgauge.client.data.images import Shards, batch_of
from fedgauge.client.inspection.results import LARGEST, DetectorResult
from fedgauge.client.inspection.weights import FEWEST, embedding_weights
from fedgauge.client.models.vision import layer_parameters
from fedgauge.client.training import drawing, evaluated, gradient
from fedgauge.client.update import Batch, Loss, Params

PROBE = 32  # own examples on which weights are evaluated
MOST_FLOATS = 2**24  # of per-example gradients at a time: 64 MiB
TOUCHES = 1e-12  # part of the largest energy; below it a gradient counts as zero
GONE = 1e-6  # an example's gradient has vanished if its norm fell to this part
WIDE = 16  # units of a layer: a narrower one may be a classifier's, where a unit may well belong to one example
ALONE = 0.99  # part of a unit's energy from which on it belongs to one example


@dataclass(frozen=True, eq=False)
class ProbeSet:
    """The network and the examples on which a client evaluates weights.

    Args:
        model: with the buffers that came with the weights.
        probe: its own examples; empty if the inspection must not use any.
        loss: their mean loss, which the client minimises.
    """

    model: nn.Module
    probe: Batch
    loss: Loss
    normalise: Callable[[Tensor], Tensor] | None = None


def probe_examples(shards: Shards, client: int, rows: Tensor) -> Batch:
    """A client's own examples to evaluate weights on: the round's (rows), and others of its shard up to PROBE."""
    mine = shards.indices[client]
    others = mine[~torch.isin(mine, rows)][: max(PROBE - len(rows), 0)]
    return batch_of(shards.dataset.x, shards.dataset.y, torch.cat([rows, others])[:PROBE])


def inspect_with_examples(probes: ProbeSet, params: Params, previous: Params | None) -> Iterator[DetectorResult]:
    """Results of the detectors that need examples; previous: the weights of an earlier round, None before the first."""
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
    """Effect of weights on examples.

    Args:
        inputs: by layer, the root mean square of its input.
        losses: (B,).
        energy: by parameter, |gradient|^2 of each example and row, (B, rows).
    """

    inputs: Mapping[str, float]
    losses: Tensor
    energy: Mapping[str, Tensor]


def _try_weights(probes: ProbeSet, params: Params) -> _ProbeResult:
    with evaluated(probes.model):  # in train mode BatchNorm makes one example's gradient depend on the others
        inputs, losses = _forward(probes, params)
        return _ProbeResult(inputs, losses, _energies(probes, params))


def _forward(probes: ProbeSet, params: Params) -> tuple[dict[str, float], Tensor]:
    inputs: dict[str, float] = {}

    def noting(name: str) -> Callable[[nn.Module, tuple[object, ...]], None]:
        def note(module: nn.Module, fed: tuple[object, ...]) -> None:
            if fed and isinstance(fed[0], Tensor) and fed[0].is_floating_point():
                inputs[name] = float(fed[0].double().square().mean().sqrt())

        return note

    model, (x, y) = probes.model, probes.probe
    biased = [(n, m) for n, m in model.named_modules() if layer_parameters(n)[1] in params]
    hooks = [module.register_forward_pre_hook(noting(name)) for name, module in biased]
    try:
        with torch.no_grad(), drawing(model, None):
            logits = functional_call(model, params, (x if probes.normalise is None else probes.normalise(x),))
    finally:
        for hook in hooks:
            hook.remove()
    return inputs, torch.stack([probes.loss(logits[i : i + 1], y[i : i + 1]) for i in range(len(x))]).double()


def _energies(probes: ProbeSet, params: Params) -> dict[str, Tensor]:
    compute = gradient(probes.model, probes.loss, probes.normalise)

    def one(x: Tensor, y: Tensor) -> Params:
        found = compute(params, Batch(x[None], y[None]), None)
        # in double: in single precision a gradient of 1e20 has no finite square, and NaN passes every threshold
        rows = {k: t.double().flatten(1) if t.dim() > 1 else t.double().reshape(-1, 1) for k, t in found.items()}
        return {k: t.square().sum(1) for k, t in rows.items()}

    # for a larger network one example at a time, which the client computes anyway
    chunk = max(1, MOST_FLOATS // sum(t.numel() for t in params.values()))
    found: dict[str, Tensor] = vmap(one, randomness="different", chunk_size=chunk)(*probes.probe)
    return {k: t.detach() for k, t in found.items()}


def _biases(params: Params, now: _ProbeResult) -> Iterator[DetectorResult]:
    """Biases that outweigh what the weights make of an input: |b| over |w| times the size of the input."""
    for layer, size in now.inputs.items():
        weight, bias = map(params.get, layer_parameters(layer))
        if weight is None or bias is None or weight.dim() < 2 or len(weight) != len(bias):
            continue
        expected = weight.detach().flatten(1).double().norm(dim=1) * size
        ratio = (bias.detach().double().abs() / expected.clamp(min=1e-12)).clamp(max=LARGEST)
        worst = int(ratio.argmax())
        words = f"its bias {worst} is {float(ratio[worst]):.3g} times the typical output of its weights"
        yield DetectorResult("extreme biases", layer, float(ratio[worst]), words)


def _dead(params: Params, now: _ProbeResult, tables: frozenset[str]) -> Iterator[DetectorResult]:
    """Layers and units that get no gradient from any example; embeddings are left out, as only words that occur get one."""
    layers = {k: e for k, e in now.energy.items() if params[k].dim() > 1 and k not in tables}
    # gradient times weight has the same size in all layers of a ReLU network, whatever their scales
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
    """Gradients that belong to one example: it dominates a layer, owns most units, or the others' gradients vanished."""
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
        words = f"one example's gradient is {ratio:.3g} times that of all others together"
        yield DetectorResult("dominated", name, ratio / usual, f"{words}, {ratio / usual:.3g} times the usual ratio")
        yield DetectorResult("vanished", name, share, f"{share:.0%} of the examples lost their gradient")
        if layer.shape[1] >= WIDE and name not in tables:
            share, common = _isolated(layer), 0.0 if before is None else _isolated(before.energy[name])
            words = f"{share:.0%} of its units learn from a single example each, {common:.0%} did before"
            yield DetectorResult("isolated units", name, max(share - common, 0.0), words)


def _isolated(layer: Tensor) -> float:
    """Return the part of a layer's units with a gradient almost only from one example."""
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
    """A loss that rose or fell sharply since the last round, as the logarithm of the ratio."""
    here, then = (max(float(t.losses.mean()), 1e-6) for t in (now, before))
    yield DetectorResult(
        "loss",
        "",
        abs(math.log(here) - math.log(then)),
        f"the loss on its own examples went from {then:.3g} to {here:.3g}",
    )
