"""Trap weights (Boenisch et al., When the Curious Abandon Honesty, EuroS&P 2023): neurons that are active for few images.

In the first fully connected layer a random half of every row is negative and larger than the other half, so that the ReLU
behind it is off for most images. Where it is on for only one image of the batch, that row's weight gradient over its bias
gradient is the image.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor

from fedgauge.attacks.base import Knowledge, Observation, Reconstruction, Wave
from fedgauge.attacks.engine.computation import dense_input_layer
from fedgauge.attacks.exact.closed_form import ClosedForm, Reader
from fedgauge.attacks.malicious.decoding import LayerRows, decoded, input_to_pixels, on_grid, snap_to_grid
from fedgauge.attacks.malicious.server_attack import ServerAttack
from fedgauge.client.components import Share
from fedgauge.client.update import Params

SCALES = torch.linspace(0.6, 1.0, 41)  # candidates for the scale of the positive half
AGREED = 1e-3  # root mean square in pixels within which two rows hold the same image
TRIED = 512  # public images on which a scale is tuned
COMPARED = 256  # unproven images that are compared with each other


@dataclass(frozen=True)
class trap_weights(ServerAttack):
    """Sets rows with a negative half that outweighs the positive one, in pixels, independent of normalisation.

    Args:
        scale: the positive entries' size over the negative ones', in (0, 1]; None: the one with which most public images of a
            batch have a row of their own.
    """

    scale: Share | None = None

    def craft(self, sent: Params, known: Knowledge, rng: Generator, seen: Sequence[Observation] = ()) -> Params:
        layer = dense_input_layer(known.model, known.shape, relu=True).name
        names = [f"{layer}.{part}" for part in ("weight", "bias")]
        old = sent[names[0]]
        sizes = torch.randn(old.shape, generator=rng).abs() / old.shape[1] ** 0.5
        up = torch.rand(old.shape, generator=rng).argsort(1) < old.shape[1] // 2
        scale = self.scale if self.scale is not None else _tuned(sizes * up, sizes * ~up, known)
        rows = (sizes * torch.where(up, scale, -1.0)).double()
        spread, offset = input_to_pixels(known)
        made = {names[0]: rows * spread, names[1]: rows @ offset}
        return {**sent, **{name: t.to(old) for name, t in made.items()}}


def _tuned(up: Tensor, down: Tensor, known: Knowledge) -> float:
    """The best of SCALES for rows scale * up - down (m, n); on ties the smallest."""
    size = known.batch_size
    public = known.enough(size, "set scale, which is tuned on them")
    batches = min(len(public.x), max(size, TRIED)) // size
    x = public.x[: batches * size].flatten(1)
    above, below = x @ up.T, x @ down.T
    on = ((scale * above > below).view(-1, size, len(up)) for scale in SCALES)
    return float(SCALES[int(torch.stack([activated_alone(each).float().mean() for each in on]).argmax())])


def activated_alone(on: Tensor) -> Tensor:
    """Return the images (N, B) that activate some row that no other image of their batch activates, from activations (N, B, m)."""
    return (on & (on.sum(1, keepdim=True) == 1)).any(2)


@dataclass(frozen=True)
class read_rows(ClosedForm):
    """Reads images that have their own row of the first fully connected layer, as trap weights make likely.

    An image on the 8-bit grid is the only one in its row. Agreement of several rows proves nothing: two images of one label can
    have the same error signal in all rows. Images on which rows agree come after the proven ones.
    """

    def reader(self, wave: Wave, known: Knowledge) -> Reader:
        return partial(_read, dense_input_layer(known.model, known.shape, relu=True).name)


def _read(layer: str, alone: Wave, known: Knowledge) -> Reconstruction:
    x = LayerRows.of(alone.alone(0), layer).images(known)
    exact = on_grid(x)
    proven = torch.unique(snap_to_grid(x[exact]), dim=0)
    return decoded(torch.cat([proven, _distinct(x[~exact])]), len(proven), alone, known)


def _distinct(x: Tensor) -> Tensor:
    """Distinct images within the range of pixels, those in most rows first."""
    flat = x.flatten(1)
    inside = ((flat > -AGREED) & (flat < 1 + AGREED)).all(1)
    x, flat = x[inside][:COMPARED], flat[inside][:COMPARED]
    same = torch.cdist(flat, flat) < AGREED * flat.shape[1] ** 0.5
    kept: list[int] = []
    for k in same.sum(1).argsort(descending=True, stable=True).tolist():
        if not bool(same[k, kept].any()):
            kept.append(k)
    return x[kept]
