"""Trap weights (Boenisch et al., When the Curious Abandon Honesty, EuroS&P 2023): neurons that fire for few images.

In the first fully connected layer a random half of every row is negative, and larger than the other half, so that a ReLU
behind it is off for most images. Where it is on for a single one of the batch, that row's weight gradient over its bias
gradient is the image.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from fedgauge.attacks.base import Attack, Budget, Knowledge, Observation, Reconstruction, Stream, Wave, not_applicable
from fedgauge.attacks.exact.unmixing import FirstLayer
from fedgauge.attacks.malicious.decoding import LayerRows, decoded, fed, nothing_decoded, on_grid, snap_to_grid
from fedgauge.attacks.malicious.server_attack import ServerAttack
from fedgauge.client.update import Params

SCALES = torch.linspace(0.6, 1.0, 41)  # of the positive half, among which the best is looked for
AGREED = 1e-3  # root mean square in pixels, up to which two rows hold the same image
TRIED = 512  # public images on which a scale is tuned
COMPARED = 256  # rows of unproven images that are compared with each other


def _layer(model: nn.Module) -> str:
    """The fully connected layer with bias and ReLU that the image itself goes into; ValueError where there is none."""
    layer = FirstLayer.of(model)
    if not layer.relu:
        raise ValueError(f"no ReLU follows layer {layer.name!r}: every image is in every row")
    return layer.name


@dataclass(frozen=True)
class trap_weights(ServerAttack):
    """Rows whose negative half outweighs the positive one; of pixels, whatever the normalisation.

    Args:
        scale: the positive entries' size over the negative ones', in (0, 1]; None: with which most public images are alone
            in some row, in batches of the federation's size.
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        if self.scale is not None and not 0 < self.scale <= 1:
            raise ValueError(f"scale must lie in (0, 1], got {self.scale}")

    def craft(self, sent: Params, known: Knowledge, rng: Generator, seen: Sequence[Observation] = ()) -> Params:
        names = [f"{_layer(known.model)}.{part}" for part in ("weight", "bias")]
        old = sent[names[0]]
        sizes = torch.randn(old.shape, generator=rng).abs() / old.shape[1] ** 0.5
        up = torch.rand(old.shape, generator=rng).argsort(1) < old.shape[1] // 2
        scale = self.scale if self.scale is not None else _tuned(sizes * up, sizes * ~up, known)
        rows = (sizes * torch.where(up, scale, -1.0)).double()
        spread, offset = fed(known)
        made = {names[0]: rows * spread, names[1]: rows @ offset}
        return {**sent, **{name: t.to(old) for name, t in made.items()}}


def _tuned(up: Tensor, down: Tensor, known: Knowledge) -> float:
    """The best of SCALES for rows scale * up - down (m, n); of equally good ones the smallest."""
    public, size = known.auxiliary, known.batch_size
    if public is None or len(public.x) < size:
        there = 0 if public is None else len(public.x)
        raise ValueError(f"the scale is tuned on batches of {size} public images, and there are {there}: name a scale")
    batches = min(len(public.x), max(size, TRIED)) // size
    x = public.x[: batches * size].flatten(1)
    above, below = x @ up.T, x @ down.T
    found = torch.stack(
        [activated_alone((scale * above > below).view(-1, size, len(up))).float().mean() for scale in SCALES]
    )
    return float(SCALES[int(found.argmax())])


def activated_alone(on: Tensor) -> Tensor:
    """Which images (N, B) turn on some row that no other image of their batch does, from rows on (N, B, m)."""
    return (on & (on.sum(1, keepdim=True) == 1)).any(2)


@dataclass(frozen=True)
class read_rows(Attack):
    """Images that rows of a first fully connected layer hold alone, with trap weights or, seldom, without.

    That a row holds one image alone is told by the 8-bit grid. Agreement of several rows proves nothing by itself: in an
    untrained network two images of one label have nearly the same error signal everywhere, and all rows that hold both
    agree on their mean. What is agreed on fills the places behind what is proven.
    """

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        try:
            layer = _layer(known.model)
        except ValueError as error:
            return not_applicable(wave, str(error))
        return [_read(wave.of([k]), known, layer) for k in range(len(wave))]


def _read(wave: Wave, known: Knowledge, layer: str) -> Reconstruction:
    started = time.perf_counter()
    rows = LayerRows.of(wave.alone(0), layer)
    if reason := rows.reason:
        return nothing_decoded(reason, started)
    x = rows.images(known)
    exact = on_grid(x)
    proven = torch.unique(snap_to_grid(x[exact]), dim=0)
    others, agreed = _agreed(x[~exact])
    places = max(0, known.batch_size - len(proven))
    note = f"on the 8-bit grid; {min(agreed, places)} more are agreed on by several rows"
    return decoded(torch.cat([proven, others[:places]]), len(proven), wave, known, started, note)


def _agreed(x: Tensor) -> tuple[Tensor, int]:
    """Images within the range of pixels, each once, those first that most rows hold; and how many of them several do."""
    flat = x.flatten(1)
    inside = ((flat > -AGREED) & (flat < 1 + AGREED)).all(1)
    x, flat = x[inside][:COMPARED], flat[inside][:COMPARED]
    same = torch.cdist(flat, flat) < AGREED * flat.shape[1] ** 0.5
    kept: list[int] = []
    for k in same.sum(1).argsort(descending=True, stable=True).tolist():
        if not bool(same[k, kept].any()):
            kept.append(k)
    return x[kept], int((same[kept].sum(1) > 1).sum())
