"""Which local training an update can come from, where the clients' code and data are not known: a foreign Flower app.

The server has the weights theta that it sent and the update. What they decide, without any of the client's data:

- The derivative of the cross-entropy by the logits sums to zero over the classes. So does the classifier's update if it is a
  sum of gradients: SGD with any rates, momentum, clipping and number of steps. These cannot be told apart. Weight decay
  leaves a multiple of theta's own sums. Adam rescales every entry, and nothing of this holds.
- An example adds a product of two vectors to a fully connected layer's gradient, so a sum of n such gradients has a rank of at
  most n: a higher rank needs more steps, or more examples.
- Adam's first step is rate * g / (|g| + eps): all entries with a gradient have nearly one size. A sign looks the same.
  After more steps they still differ less than a gradient's, of which auxiliary examples give an idea.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Observation
from fedgauge.client.data.corpora import Text
from fedgauge.client.federation import Federation
from fedgauge.client.local_training import LocalTraining
from fedgauge.client.models.losses import is_cross_entropy
from fedgauge.client.models.vision import last_linear
from fedgauge.client.rng import generator
from fedgauge.client.transforms import is_identity
from fedgauge.client.update import Batch, Params, Update, norm

Kind = Literal["sum of gradients", "weight decay", "Adam", "unexplained", "undecided"]

ROUNDING = 2.0**-23  # of weights that travel in float32
ONE_SIZE = 0.05  # how far entries of one size may be apart, relative
MOST = 0.5  # the share of the large entries from which they count as of one size; in gradients it is some hundredths
FEW = 0.02  # the share of all entries that must be large; in gradients fewer are
LEFT = 2e-5  # the part of the classifier's update that may stay unexplained
COARSE = 0.05  # the part of the update that rounding may be
MOST_ENTRIES = 2**22  # of a layer whose rank is counted: a second of work
PROBES = 8  # auxiliary batches that say how large, and how uneven, a gradient is


@dataclass(frozen=True)
class TrainingEvidence:
    """What an update says of the local training behind it.

    Args:
        kind: the training that explains it.
        fits: whether it may come from the local training that the scenario assumes; None: that is not decided.
        words: a sentence for people: the evidence, and what to do if the assumption is wrong.
    """

    kind: Kind
    fits: bool | None
    words: str


def training_evidence(fed: Federation, seen: Observation) -> TrainingEvidence:
    """What an update says of its local training, compared with the one that the federation's chain assumes."""
    local, assumed = fed.chain.local, "the clients' local training is assumed"
    if reason := _unreadable(fed, seen):
        return TrainingEvidence("undecided", None, f"{assumed} and was not checked: {reason}")
    try:
        probes = _probes(fed, seen)
        kind, evidence = _read(fed, seen, probes)
        if kind == "undecided":
            return TrainingEvidence(kind, None, f"{assumed}, and the update does not tell it: {evidence}")
        wrong, size = _contradiction(fed, seen, kind), _size(fed, seen, probes)
    except Exception as error:  # a user's network may raise anything; the attacks will meet it, too, and say more
        reason = f"the network cannot be run ({type(error).__name__}: {error})"
        return TrainingEvidence("undecided", None, f"{assumed} and was not checked: {reason}")
    if wrong:
        start = "WARNING: the assumed local training does not explain the update, so attacks may show noise"
        return TrainingEvidence(kind, False, f"{start}: {evidence}; {wrong}")
    rest = "" if local.adaptive else "; momentum, rate and number of steps cannot be told from one update"
    return TrainingEvidence(kind, True, f"the assumed local training ({local.words}) fits: {evidence}{rest}{size}")


def _contradiction(fed: Federation, seen: Observation, kind: Kind) -> str:
    """Why the assumed training cannot have made such an update, and what to write instead; empty if it can."""
    local, size = fed.chain.local, fed.shards.batch_size
    instead = f'the chain assumes {local.words}: set use = "local_training" with'
    if kind == "unexplained":
        return "no local training that is known here does this: compare the app's training with [[chain]]"
    if kind == "Adam":
        return "" if local.adaptive else f'{instead} optimizer = "adam" (or "adamw"), its rate, and its steps or epochs'
    if local.adaptive:
        return f'{instead} optimizer = "sgd"'
    if kind == "weight decay":
        return "" if isinstance(local, LocalTraining) and local.weight_decay else f"{instead} its weight_decay"
    rank, most = _rank(fed, seen), local.gradients(size) * fed.chain.slice_of(size)
    if rank <= most:
        return ""
    needed = f"its rank of {rank} needs more gradients of single examples than the {most} that the chain assumes"
    return f"{needed}: set steps or epochs, and [data] batch_size, as in the app"


def _unreadable(fed: Federation, seen: Observation) -> str:
    """Why nothing can be read from this update; empty where something can."""
    if missing := {name for name, _ in fed.model.named_parameters()} - set(seen.update):
        return f"the update lacks {sorted(missing)[0]}"
    if fed.protocol.secure_sum is not None:
        return "the server sees only sums of clients"
    if any(link is not fed.chain.local and not is_identity(link) for link in fed.chain.links):
        return "a defense stands in the chain, too"
    if isinstance(fed.shards.dataset, Text):
        return "only trainings on images are compared"
    if not all(bool(t.isfinite().all()) for t in seen.update.values()):
        return "the update is not finite"
    return "" if any(bool(t.any()) for t in seen.update.values()) else "the update is zero"


def _read(fed: Federation, seen: Observation, probes: list[Update]) -> tuple[Kind, str]:
    if not probes:
        return "undecided", "the weights' rounding hides it"
    entries = _without_decay(seen)
    share, size = _one_size(entries)
    if share >= MOST:
        words = (
            f"{share:.0%} of its large entries have nearly one size, {size:.3g}, as after Adam's first steps, or a sign"
        )
        return "Adam", words
    uneven, own = min(_unevenness(_flat(probe)) for probe in probes), _unevenness(entries)
    flat = (
        f"the update's entries differ less in size ({own:.2g} times between the median and the largest hundredth) than "
        f"gradients do here ({uneven:.2g} times or more), as after steps of Adam"
    )
    sums = _sums(fed, seen, probes)
    if sums is not None:
        left, found, after = sums
        if left <= LEFT:
            return (
                "sum of gradients",
                "the classifier's update sums to zero over the classes, as a sum of gradients (SGD) does",
            )
        if after <= LEFT and found > 0:
            words = f"it is a sum of gradients and {-found:.2g} times the weights: weight decay times rate and steps"
            return "weight decay", words
    if own < uneven / 2:
        return "Adam", flat
    if sums is None:
        return (
            "undecided",
            "the classifier's sums over the classes, which would tell, are no gradient's, or lost in rounding",
        )
    return (
        "unexplained",
        "it is no sum of gradients, has no weight decay, and its entries differ in size as Adam's do not",
    )


def _flat(update: Update) -> Tensor:
    return torch.cat([t.flatten() for t in update.values()]).double()


def _without_decay(seen: Observation) -> Tensor:
    """The update's entries; if weight decay alone moves a fifth of them or more, the others, without it."""
    update, theta = _flat(seen.update), _flat({k: seen.params[k] for k in seen.update})
    known = theta != 0
    decay = -float((update[known] / theta[known]).median()) if known.any() else 0.0
    rest = update + decay * theta
    moved = rest.abs() > 0.01 * abs(decay) * theta.abs() + 4 * _rounding(seen) * theta.abs()
    if decay <= 0 or float(moved.double().mean()) > 0.8 or not moved.any():
        return update
    return rest[moved]


def _one_size(entries: Tensor) -> tuple[float, float]:
    """The share of the entries above half of the largest that are within ONE_SIZE of it, and the largest; 0 if they are few."""
    sizes = entries.abs()
    largest = sizes.max()
    large = sizes[sizes > largest / 2]
    if len(large) < FEW * int((sizes > 0).sum()):
        return 0.0, float(largest)
    return float((large > (1 - ONE_SIZE) * largest).double().mean()), float(largest)


def _unevenness(entries: Tensor) -> float:
    """How many times the largest hundredth of the entries exceeds their median."""
    sizes = entries.abs()
    sizes = sizes[sizes > 0].sort().values
    return float(sizes[int(0.99 * (len(sizes) - 1))] / sizes[len(sizes) // 2])


def _probes(fed: Federation, seen: Observation) -> list[Update]:
    """SGD steps of the update's size on auxiliary examples (or random ones) at the server's weights, rounded as the update is.

    Empty if the rounding is too coarse for any comparison.
    """
    shards, rng = fed.shards, generator("training evidence")
    fed.load_buffers(seen.buffers)
    size, found, length = min(fed.chain.slice_of(shards.batch_size), 32), [], float(norm(seen.update))
    rounding, kept = _rounding(seen), _kept(seen)
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
        g = fed.gradient(seen.params, batch, None)
        rate = length / max(float(norm(g)), 1e-30)
        found.append({k: (seen.params[k] - rate * t).to(kept).to(t.dtype) - seen.params[k] for k, t in g.items()})
    return found


def _sums(fed: Federation, seen: Observation, probes: list[Update]) -> tuple[float, float, float] | None:
    """Sums over the classes of the classifier's update: their size, the weight decay in them, and what it leaves.

    Sizes are relative to the update's, beyond what they are in gradients. None: a gradient's do not vanish either.
    """
    if not is_cross_entropy(fed.loss):
        return None
    try:
        layer = last_linear(fed.model)
    except ValueError:
        return None
    names = [name for name in (f"{layer}.weight", f"{layer}.bias") if name in seen.update]
    update, theta, *controls = (_joined(part, names) for part in (seen.update, seen.params, *probes))
    control = max(float(c.sum(0).norm() / c.norm().clamp_min(1e-300)) for c in controls)
    if len(update) != fed.shards.dataset.classes or control > COARSE or not update.any():
        return None
    size, sums, weights = float(update.norm()), update.sum(0), theta.sum(0)
    decay = -float(sums @ weights / weights.square().sum().clamp_min(1e-300))
    left, after = float(sums.norm()) / size, float((sums + decay * weights).norm()) / size
    return max(0.0, left - 4 * control), decay, max(0.0, after - 4 * control)


def _kept(seen: Observation) -> torch.dtype:
    """The dtype in which the client sent its weights, from those that the update makes of the server's."""
    sent = torch.cat([(p + seen.update[k]).flatten() for k, p in seen.params.items() if k in seen.update])
    for dtype in (torch.bfloat16, torch.float16):
        near = (sent - sent.to(dtype).to(sent.dtype)).abs() <= 4 * torch.finfo(sent.dtype).eps * sent.abs()
        if float(near.double().mean()) > MOST:  # by chance one in a thousand would be
            return dtype
    return torch.float32


def _rounding(seen: Observation) -> float:
    return torch.finfo(_kept(seen)).eps


def _joined(part: Params, names: list[str]) -> Tensor:
    """The classifier's weight and bias as one matrix (classes, features + 1)."""
    return torch.cat(
        [part[name].double().flatten(1) if part[name].dim() > 1 else part[name].double()[:, None] for name in names], 1
    )


def _rank(fed: Federation, seen: Observation) -> int:
    """The highest rank of a fully connected layer's update above rounding; of layers that see each example once."""
    once: dict[str, bool] = {}

    def note(name: str) -> object:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
            once[name] = name not in once and inputs[0].dim() == 2

        return hook

    linears = {name: m for name, m in fed.model.named_modules() if isinstance(m, nn.Linear)}
    hooks = [m.register_forward_hook(note(name)) for name, m in linears.items()]  # type: ignore[arg-type]
    try:
        _probe_forward(fed)
    finally:
        for hook in hooks:
            hook.remove()
    highest = 0
    for name in (f"{name}.weight" for name, single in once.items() if single):
        if name not in seen.update or seen.update[name].numel() > MOST_ENTRIES:
            continue  # made from other parameters (weight norm), or shared under another name
        update, theta = (part[name].double() for part in (seen.update, seen.params))
        noise = _rounding(seen) * float(theta.square().mean().sqrt()) * sum(math.sqrt(side) for side in update.shape)
        values = torch.linalg.svdvals(update)
        highest = max(highest, int((values > max(4 * noise, 1e-5 * float(values[0]))).sum()))
    return highest


def _probe_forward(fed: Federation) -> None:
    modes = [(module, module.training) for module in fed.model.modules()]
    fed.model.eval()
    try:
        with torch.no_grad():
            fed.model(fed.shards.dataset.normalise(torch.rand(2, *fed.shards.dataset.shape)))
    finally:
        for module, training in modes:
            module.training = training


def _size(fed: Federation, seen: Observation, probes: list[Update]) -> str:
    """How large the update is beside the assumed training's on auxiliary examples, if that is far from it."""
    local = fed.chain.local
    expected = [local.scale * float(norm(g)) for g in probes]
    ratio = float(norm(seen.update)) / max(sorted(expected)[len(expected) // 2], 1e-300)
    if local.adaptive or 0.1 <= ratio <= 10:
        return ""
    much = f"{ratio:.2g} times as large as the assumed training makes those of auxiliary examples"
    return f"; but it is {much}: check the rate and the steps"
