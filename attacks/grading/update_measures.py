"""What is measured of an update to tell the local training behind it: sizes of entries, sums over classes."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgauge.attacks.base import Observation
from fedgauge.client.federation import Federation
from fedgauge.client.models.losses import is_cross_entropy
from fedgauge.client.models.vision import last_linear, layer_parameters
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, Update, norm

ONE_SIZE = 0.05  # how far entries of one size may be apart, relative
MOST = 0.5  # the share of the large entries from which they count as of one size; in gradients it is some hundredths
FEW = 0.02  # the share of all entries that must be large; in gradients fewer are
COARSE = 0.05  # the part of the update that rounding may be
PROBES = 8  # auxiliary batches that say how large, and how uneven, a gradient is


@dataclass(frozen=True)
class _Sums:
    """Of the classifier's update over the classes; sizes relative to the update's, beyond what they are in gradients."""

    left: float
    decay: float  # times theta's own sums: the best fit
    after: float  # what is left without these
    control: float  # what is left in gradients

    def beyond(self, size: float) -> float:
        return max(0.0, size - 4 * self.control)


def flattened(update: Update) -> Tensor:
    return torch.cat([t.flatten() for t in update.values()]).double()


def without_decay(seen: Observation) -> Tensor:
    """The update's entries; if weight decay alone moves a fifth of them or more, the others, without it."""
    update, theta = flattened(seen.update), flattened({k: seen.params[k] for k in seen.update})
    known = theta != 0
    decay = -float((update[known] / theta[known]).median()) if known.any() else 0.0
    rest = update + decay * theta
    moved = rest.abs() > 0.01 * abs(decay) * theta.abs() + 4 * rounding_of(seen) * theta.abs()
    if decay <= 0 or float(moved.double().mean()) > 0.8 or not moved.any():
        return update
    return rest[moved]


def share_of_one_size(entries: Tensor) -> tuple[float, float]:
    """The share of the entries above half of the largest that are within ONE_SIZE of it, and the largest; 0 if they are few."""
    sizes = entries.abs()
    largest = sizes.max()
    large = sizes[sizes > largest / 2]
    if len(large) < FEW * int((sizes > 0).sum()):
        return 0.0, float(largest)
    return float((large > (1 - ONE_SIZE) * largest).double().mean()), float(largest)


def unevenness_of(entries: Tensor) -> float:
    """How many times the largest hundredth of the entries exceeds their median."""
    sizes = entries.abs()
    sizes = sizes[sizes > 0].sort().values
    return float(sizes[int(0.99 * (len(sizes) - 1))] / sizes[len(sizes) // 2])


def probe_steps(fed: Federation, seen: Observation) -> list[Update]:
    """Steps of the update's size against gradients on auxiliary examples (or random ones), rounded as the update is.

    Empty if the rounding is too coarse for any comparison.
    """
    shards, rng = fed.shards, generator("training evidence")
    fed.load_buffers(seen.buffers)
    size, found, length = min(fed.chain.slice_of(shards.batch_size), 32), [], float(norm(seen.update))
    rounding, kept = rounding_of(seen), _kept(seen)
    if rounding * float(norm({k: seen.params[k] for k in seen.update})) > COARSE * length:
        return []
    own = shards.auxiliary_batch()
    for _ in range(PROBES):
        if len(own.x):
            rows = torch.randint(len(own.x), (size,), generator=rng)
            batch = Batch(own.x[rows], own.y[rows])
        else:
            x = torch.rand(size, *shards.dataset.shape, generator=rng)
            batch = Batch(x, torch.randint(shards.dataset.classes, (size,), generator=rng))
        g = {k: t for k, t in fed.gradient(seen.params, batch, None).items() if k in seen.update}
        rate = length / max(float(norm(g)), 1e-30)
        found.append({k: (seen.params[k] - rate * t).to(kept).to(t.dtype) - seen.params[k] for k, t in g.items()})
    return found


def class_sums(fed: Federation, seen: Observation, probes: list[Update]) -> _Sums | None:
    """Sums over the classes of the classifier's update. None: a gradient's do not vanish either, or any training's do."""
    if not is_cross_entropy(fed.loss) or fed.shards.dataset.classes == 2:
        return None
    try:
        name = layer_parameters(last_linear(fed.model))[0]  # many trainings leave the decay of biases out
    except ValueError:  # the network does not end in a fully connected layer
        return None
    if name not in seen.update or seen.params[name].dim() < 2:
        return None
    update, theta, *controls = (part[name].double() for part in (seen.update, seen.params, *probes))
    control = max(float(c.sum(0).norm() / c.norm().clamp_min(1e-300)) for c in controls)
    if len(update) != fed.shards.dataset.classes or control > COARSE or not update.any():
        return None
    size, sums, weights = float(update.norm()), update.sum(0), theta.sum(0)
    decay = -float(sums @ weights / weights.square().sum().clamp_min(1e-300))
    left, after = float(sums.norm()) / size, float((sums + decay * weights).norm()) / size
    found = _Sums(left, decay, after, control)
    return replace(found, left=found.beyond(left), after=found.beyond(after))


def _kept(seen: Observation) -> torch.dtype:
    """The dtype in which the client sent its weights, from those that the update makes of the server's."""
    sent = torch.cat([(p + seen.update[k]).flatten() for k, p in seen.params.items() if k in seen.update])
    for dtype in (torch.bfloat16, torch.float16):
        near = (sent - sent.to(dtype).to(sent.dtype)).abs() <= 4 * torch.finfo(sent.dtype).eps * sent.abs()
        if float(near.double().mean()) > MOST:  # by chance one in a thousand would be
            return dtype
    return torch.float32


def rounding_of(seen: Observation) -> float:
    return torch.finfo(_kept(seen)).eps
