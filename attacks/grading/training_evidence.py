"""Which local training an update can come from, where the clients' code and data are not known: a foreign Flower app.

The server has the weights theta that it sent and the update. What they decide, without any of the client's data:

- The derivative of the cross-entropy by the logits sums to zero over the classes. So does the classifier's update if it is a
  sum of gradients: SGD with any rates, momentum, clipping and number of steps. These cannot be told apart. Weight decay
  leaves a multiple of theta's own sums. Adam rescales every entry, and nothing of this holds. Two classes tell nothing: their
  rows are opposite under any training.
- An example adds a product of two vectors to a fully connected layer's gradient, so a sum of n such gradients has a rank of at
  most n: a higher rank needs more steps, or more examples.
- Adam's first step is rate * g / (|g| + eps): all entries with a gradient have nearly one size. A sign looks the same.
  After a few more steps they still differ less than a gradient's, of which auxiliary examples give an idea; after many, not.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedgauge.attacks.base import Observation
from fedgauge.client.data.corpora import Text
from fedgauge.client.federation import Federation
from fedgauge.client.local_training import LocalTraining
from fedgauge.client.models.losses import is_cross_entropy
from fedgauge.client.models.vision import last_linear
from fedgauge.client.rng import generator
from fedgauge.client.training import local_sgd, without_running_stats
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
STILL = 1e-4  # the part of a gradient that a parameter must have to be missed where it does not move
SMALL_EPS = 1e-6  # Adam's eps above which its step is no sign
MANY = 128  # entries of a parameter that is compared with gradients
BELOW = 0.05  # how far the bound on a class's share may be below zero
EXAMPLES = 256  # auxiliary examples whose predictions bound those of a client's


@dataclass(frozen=True)
class _Probe:
    gradient: Update
    step: Update  # against it, as long as the update, and rounded as the update is


@dataclass(frozen=True)
class _Sums:
    """Of the classifier's update over the classes; sizes relative to the update's, beyond what they are in gradients."""

    left: float
    decay: float  # times theta's own sums: the best fit
    after: float  # what is left without these
    weights: float  # theta's sums, relative to the update
    control: float  # what is left in gradients

    def beyond(self, size: float) -> float:
        return max(0.0, size - 4 * self.control)


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
        if _many_steps_of_adam(local, kind):
            words = f"{evidence}, and {local.words} may do this or not"
            return TrainingEvidence("undecided", None, f"{assumed}, and the update does not tell it: {words}")
        wrong, size = _contradiction(fed, seen, kind, probes), _size(fed, seen, probes)
    except Exception as error:  # a user's network may raise anything; the attacks will meet it, too, and say more
        reason = f"the network cannot be run ({type(error).__name__}: {error})"
        return TrainingEvidence("undecided", None, f"{assumed} and was not checked: {reason}")
    if wrong:
        start = "WARNING: the assumed local training does not explain the update, so attacks may show noise"
        return TrainingEvidence(kind, False, f"{start}: {evidence}; {wrong}")
    looked = "the sizes of the entries" if kind == "Adam" else "the classifier's update"
    rest = "" if local.adaptive else "; momentum, rate and number of steps cannot be told from one update"
    words = f"the assumed local training ({local.words}) fits {looked}: {evidence}{rest}{size}"
    return TrainingEvidence(kind, True, words)


def _many_steps_of_adam(local: local_sgd, kind: Kind) -> bool:
    """Whether Adam as assumed leaves nothing to tell it by: after many steps, or with a large eps, which makes it like SGD."""
    if not isinstance(local, LocalTraining) or not local.adaptive or kind == "Adam":
        return False
    return local.eps > SMALL_EPS or (kind == "unexplained" and local.steps > 1)


def _contradiction(fed: Federation, seen: Observation, kind: Kind, probes: list[_Probe]) -> str:
    """Why the assumed training cannot have made such an update, and what to write instead; empty if it can."""
    local, size = fed.chain.local, fed.shards.batch_size
    instead = f'the chain assumes {local.words}: set use = "local_training" with'
    if still := _unmoved(seen, probes):
        return (
            f"{still} did not move, as it would: put freeze with its name into the chain if the app does not train it"
        )
    if kind == "unexplained":
        return "SGD does not do this; many steps of Adam, noise or a defense may: compare the app's training with [[chain]]"
    if kind == "Adam":
        if not isinstance(local, LocalTraining) or not local.adaptive:
            return f'{instead} optimizer = "adam" (or "adamw"), its rate, and its steps or epochs'
        return _wrong_rate(local, seen)
    if local.adaptive:
        return f'{instead} optimizer = "sgd"'
    decay, sums = _decay(local), _sums(fed, seen, probes)
    if sums is not None:
        found = sums.decay if kind == "weight decay" else 0.0
        far = abs(found - decay)
        if far > max(found, decay) / 2 and sums.beyond(far * sums.weights) > LEFT:
            return f"{instead} its weight_decay, as the assumed training makes this {-decay:.2g} times the weights"
    if _ascends(fed, seen):
        return "it goes up the loss, where the assumed training goes down: compare the sign of what the app sends"
    if kind == "weight decay":  # which has any rank
        return ""
    rank, most = _rank(fed, seen), local.gradients(size) * fed.chain.slice_of(size)
    if rank <= most:
        return ""
    needed = f"its rank of {rank} needs more gradients of single examples than the {most} that the chain assumes"
    return f"{needed}: set steps or epochs, and [data] batch_size, as in the app"


def _unmoved(seen: Observation, probes: list[_Probe]) -> str:
    """The first parameter that does not move, though it does on auxiliary examples; empty if there is none."""

    def missed(name: str) -> bool:
        parts = [(p.step[name], float(norm(p.step))) for p in probes if name in p.step]
        return bool(parts) and all(float(t.norm()) > STILL * length for t, length in parts)

    return next((name for name, t in seen.update.items() if not t.any() and missed(name)), "")


def _wrong_rate(local: LocalTraining, seen: Observation) -> str:
    """Why an update of Adam is too large or too small for the rate and steps that are assumed; empty if it is not."""
    weights = max(float(seen.params[k].abs().max()) for k in seen.update if seen.params[k].numel())
    largest, rounding = float(_without_decay(seen).abs().max()), _rounding(seen) * weights
    decay = _decay(local) * weights if local.optimizer == "adamw" else 0.0
    if largest > 2 * local.scale + decay + rounding:
        return f"{local.words} at rate {local.rate:g} move no entry by {largest:.2g}: check the rate, steps and epochs"
    if local.eps <= SMALL_EPS and largest < local.rate / 2 - rounding:
        return f"Adam's first step at rate {local.rate:g} is larger than {largest:.2g}: check the rate"
    return ""


def _decay(local: local_sgd) -> float:
    """The part of the weights that the assumed training takes away, whatever the gradients are."""
    if not isinstance(local, LocalTraining) or not local.weight_decay:
        return 0.0
    bare = replace(local, batch_size=None, examples=None, accumulate=1, max_norm=None)
    batch = Batch(torch.zeros(1), torch.zeros(1, dtype=torch.int64))
    one = {"": torch.ones((), dtype=torch.float64)}
    return -float(bare(lambda at, *_: {k: torch.zeros_like(t) for k, t in at.items()})(one, batch, None)[""])


def _ascends(fed: Federation, seen: Observation) -> bool:
    """Whether the classifier's bias tells that the sign is wrong, which it does for one step of SGD and its rate.

    It moves by rate * (the classes' shares - the mean of the predictions). That mean is at most what any example is
    predicted, so the shares have an upper bound, which must not be below zero; with the other sign they are right.
    """
    local, auxiliary = fed.chain.local, fed.shards.auxiliary_batch()
    name = next((name for name in _classifier(fed, seen) if name.endswith("bias")), "")
    other = isinstance(local, LocalTraining) and (local.max_norm is not None or local.weight_decay)
    if local.steps > 1 or other or not name or not len(auxiliary.x) or not is_cross_entropy(fed.loss):
        return False
    highest = _predictions(fed, seen.params, auxiliary.x[:EXAMPLES]).max(0).values
    moved = seen.update[name].double() / local.scale
    return float((highest + moved).min()) < -BELOW and float((highest - moved).min()) >= 0


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


def _read(fed: Federation, seen: Observation, probes: list[_Probe]) -> tuple[Kind, str]:
    if not probes:
        return "undecided", "the weights' rounding hides it"
    entries = _without_decay(seen)
    share, size = _one_size(entries)
    if share >= MOST:
        words = (
            f"{share:.0%} of its large entries have nearly one size, {size:.3g}, as after Adam's first steps, or a sign"
        )
        return "Adam", words
    uneven, own = min(_unevenness(_flat(probe.step)) for probe in probes), _unevenness(entries)
    flat = (
        f"the update's entries differ less in size ({own:.2g} times between the median and the largest hundredth) than "
        f"gradients do here ({uneven:.2g} times or more), as after steps of Adam"
    )
    sums, assumed = _sums(fed, seen, probes), 0.0 if fed.chain.local.adaptive else _decay(fed.chain.local)
    if sums is not None:
        explained = min(sums.left, sums.after) <= LEFT
        decay = 0.0 if sums.left <= LEFT else sums.decay
        if explained and fed.chain.local.steps == 1 and (odd := _like_noise(fed, seen, probes, decay)):
            words = "the classifier's update is a sum of gradients, but"
            return "undecided", f"{words} {odd} has no more in common with gradients than noise has"
        if sums.left <= LEFT:
            return (
                "sum of gradients",
                "it sums to zero over the classes, as a sum of gradients (SGD) does",
            )
        if sums.after <= LEFT and sums.decay > 0:
            words = (
                f"it is a sum of gradients and {-sums.decay:.2g} times the weights: weight decay times rate and steps"
            )
            return "weight decay", words
    else:  # decay that is assumed makes the entries of SGD's steps as even
        own = max(own, _unevenness(_flat(seen.update) + assumed * _flat({k: seen.params[k] for k in seen.update})))
    if own < uneven / 2:
        return "Adam", flat
    if sums is None:
        return (
            "undecided",
            "the classifier's sums over the classes tell nothing: two classes have none that could, "
            "or a gradient's do not vanish, or rounding hides them",
        )
    return (
        "unexplained",
        "it is no sum of gradients, has no weight decay, and its entries differ in size as after Adam's first steps they do not",
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


def _probes(fed: Federation, seen: Observation) -> list[_Probe]:
    """Gradients on auxiliary examples (or random ones) at the server's weights, and steps of the update's size.

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
        step = {k: (seen.params[k] - rate * t).to(kept).to(t.dtype) - seen.params[k] for k, t in g.items()}
        found.append(_Probe(g, step))
    return found


def _sums(fed: Federation, seen: Observation, probes: list[_Probe]) -> _Sums | None:
    """Sums over the classes of the classifier's update. None: a gradient's do not vanish either, or any training's do."""
    if not is_cross_entropy(fed.loss) or fed.shards.dataset.classes == 2:
        return None
    names = _classifier(fed, seen)
    if not names:
        return None
    update, theta, *controls = (_joined(part, names) for part in (seen.update, seen.params, *(p.step for p in probes)))
    control = max(float(c.sum(0).norm() / c.norm().clamp_min(1e-300)) for c in controls)
    if len(update) != fed.shards.dataset.classes or control > COARSE or not update.any():
        return None
    size, sums, weights = float(update.norm()), update.sum(0), theta.sum(0)
    decay = -float(sums @ weights / weights.square().sum().clamp_min(1e-300))
    left, after = float(sums.norm()) / size, float((sums + decay * weights).norm()) / size
    found = _Sums(left, decay, after, float(weights.norm()) / size, control)
    return replace(found, left=found.beyond(left), after=found.beyond(after))


def _classifier(fed: Federation, seen: Observation) -> list[str]:
    """The classifier's parameters in the update; none if the network does not end in a fully connected layer."""
    try:
        layer = last_linear(fed.model)
    except ValueError:
        return []
    return [name for name in (f"{layer}.weight", f"{layer}.bias") if name in seen.update]


def _like_noise(fed: Federation, seen: Observation, probes: list[_Probe], decay: float) -> str:
    """A parameter before the classifier that has hardly more in common with gradients than noise has; or empty.

    Of one step: many go where no gradient at the server's weights points.
    """
    head = _classifier(fed, seen)
    for name in (name for name in probes[0].step if name not in head and seen.update[name].numel() >= MANY):
        own = (seen.update[name] + decay * seen.params[name]).double().flatten()
        others = torch.stack([p.step[name].double().flatten() for p in probes], 1)
        if own.any() and bool(others.any(0).all()):
            common = torch.linalg.qr(others).Q.T @ own
            if float(common.norm() / own.norm()) < 2 * math.sqrt(len(probes) / len(own)):
                return name
    return ""


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


def _predictions(fed: Federation, params: Params, x: Tensor) -> Tensor:
    """The classes' probabilities (B, classes), in the mode that clients train in."""
    with torch.no_grad(), without_running_stats(fed.model):
        logits: Tensor = functional_call(fed.model, params, (fed.shards.dataset.normalise(x),))
    return logits.double().softmax(1)


def _size(fed: Federation, seen: Observation, probes: list[_Probe]) -> str:
    """How large the update is beside the assumed training's on auxiliary examples, if that is far from it."""
    local = fed.chain.local
    if local.adaptive or not len(fed.shards.auxiliary_batch().x):
        return ""
    limit = (isinstance(local, LocalTraining) and local.max_norm) or math.inf
    gradients = sorted(min(float(norm(p.gradient)), limit) for p in probes)
    length, usual = float(norm(seen.update)), gradients[len(gradients) // 2]
    decayed = _decay(local) * float(norm({k: seen.params[k] for k in seen.update}))
    most, least = local.scale * usual + decayed, local.rate * usual  # later gradients may be near zero
    if least / 10 <= length <= 10 * most:
        return ""
    ratio = length / max(most if length > most else least, 1e-300)
    much = f"{ratio:.2g} times as large as the assumed training makes those of auxiliary examples"
    return f"; but it is {much}: check the rate and the steps"
