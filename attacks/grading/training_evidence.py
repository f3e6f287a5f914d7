"""Evidence of an update's local training, without the clients' code and data: a foreign Flower app.

The server has the weights theta that it sent and the update. What they decide, without any of the client's data:

- The derivative of the cross-entropy by the logits sums to zero over the classes. So does the classifier's update if it is a
  sum of gradients: SGD with any rates, momentum, clipping and number of steps. These are indistinguishable. Weight decay
  leaves a multiple of theta's own sums. Adam rescales every entry, and nothing of this holds. Two classes give no evidence: their
  rows are opposite under any training.
- The rounding of half precision in the passes (autocast) leaves a little of these sums, and so does a little noise.
- Adam's first step is rate * g / (|g| + eps): all entries with a gradient have nearly one size. A sign looks the same.
  After a few more steps they still differ less than a gradient's, of which auxiliary examples give an idea; after many, not.

In 96 random federations of small networks no honest update was called another training, and Adam was distinguished from SGD in all
(tests/attacks/grading/test_evidence_counts.py).
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedgauge.attacks.base import Observation
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.client.federation import Federation
from fedgauge.client.local_training import LocalTraining
from fedgauge.client.models.losses import is_cross_entropy
from fedgauge.client.models.vision import last_linear, layer_parameters
from fedgauge.client.rng import generator
from fedgauge.client.transforms import is_identity
from fedgauge.client.update import Batch, Update, norm

Kind = Literal["sum of gradients", "Adam", "unexplained", "undecided"]
LEFT = 2e-5  # the part of the classifier's update that may stay unexplained
LITTLE = 0.02  # that half precision in the passes, or a little noise, may leave
DECAY = 0.5  # times the weights: more is no weight decay
SMALL_EPS = 1e-6  # Adam's eps above which its step is no sign
ONE_SIZE = 0.05  # how far entries of one size may be apart, relative
MOST = 0.5  # the share of the large entries from which they count as of one size; in gradients it is some hundredths
FEW = 0.02  # the share of all entries that must be large; in gradients fewer are
COARSE = 0.05  # the part of the update that rounding may be
PROBES = 8  # auxiliary batches that say how large, and how uneven, a gradient is
WARNING = "WARNING: the assumed local training does not explain the update, so attacks may show noise"
UNCHECKED = "the clients' local training is assumed and was not checked"


@dataclass(frozen=True)
class TrainingEvidence:
    """An update's evidence of its local training.

    Args:
        kind: the training that explains it.
        fits: whether it may come from the local training that the scenario assumes; None: that is not decided.
        words: a sentence for people: the evidence, and what to do if the assumption is wrong.
    """

    kind: Kind
    fits: bool | None
    words: str


def training_evidence(fed: Federation, seen: Observation) -> TrainingEvidence:
    """Compare an update with the local training that the federation's chain assumes."""
    if reason := _unreadable(fed, seen):
        return TrainingEvidence("undecided", None, f"{UNCHECKED}: {reason}")
    try:
        kind, evidence = _read(fed, replace(seen, update={k: t for k, t in seen.update.items() if t.any()}))
    except Exception as error:  # a user's network may raise anything; the attacks will meet it, too, and say more
        reason = f"the network cannot be run ({type(error).__name__}: {error})"
        return TrainingEvidence("undecided", None, f"{UNCHECKED}: {reason}")
    local = fed.chain.local
    adam, instead = isinstance(local, LocalTraining) and local.adaptive, ""
    # after many steps, or with a large eps, which makes it like SGD, Adam leaves nothing to tell it by
    if (
        isinstance(local, LocalTraining)
        and adam
        and (local.eps > SMALL_EPS or local.steps > 1 and kind == "unexplained")
    ):
        kind, evidence = "undecided", f"{evidence}, and {local.words} may do this or not"
    elif kind == "Adam" and not adam:
        instead = 'set use = "local_training" with optimizer = "adam" (or "adamw"), its rate, and its steps or epochs'
    elif kind == "sum of gradients" and adam:
        instead = 'set use = "local_training" with optimizer = "sgd"'
    elif kind == "unexplained":
        instead = "compare the app's training with [[chain]] and [loss], and what it uploads with [tape] replies"
    if instead:
        return TrainingEvidence(kind, False, f"{WARNING}: {evidence}; the chain assumes {local.words}: {instead}")
    if kind == "undecided":
        words = f"the clients' local training is assumed, and the update gives no evidence of it: {evidence}"
        return TrainingEvidence(kind, None, words)
    return TrainingEvidence(kind, True, f"the assumed local training ({local.words}) fits: {evidence}")


def _unreadable(fed: Federation, seen: Observation) -> str:
    """Return why this update gives no evidence; empty if it does."""
    if missing := {name for name, _ in fed.model.named_parameters()} - set(seen.update):
        return f"the update lacks {sorted(missing)[0]}"
    if fed.protocol.secure_sum is not None:
        return "the server sees only sums of clients"
    beside = [link for link in fed.chain.links if link is not fed.chain.local and not hasattr(link, "frozen")]
    if not all(map(is_identity, beside)):
        return "the chain also has a defense"
    if reason := modality_of(fed.shards.dataset).hides_training:
        return reason
    if not all(bool(t.isfinite().all()) for t in seen.update.values()):
        return "the update is not finite"
    return "" if any(bool(t.any()) for t in seen.update.values()) else "the update is zero"


def _read(fed: Federation, seen: Observation) -> tuple[Kind, str]:
    """The training that explains what moved of an update, and by what."""
    probes = _probe_steps(fed, seen)
    if not probes:
        return "undecided", "the weights' rounding hides it"
    entries = _without_decay(seen)
    share, size = _share_of_one_size(entries)
    if share >= MOST:
        alike = f"{share:.0%} of its large entries have nearly one size, {size:.3g}"
        return "Adam", f"{alike}, as after Adam's first steps, or a sign"
    sums = _class_sums(fed, seen, probes)
    if sums is None:
        return "undecided", "the classifier's sums over the classes give no evidence, or rounding hides them"
    left, after, decay = sums
    if left <= LEFT:
        return "sum of gradients", "it sums to zero over the classes, as a sum of gradients (SGD) does"
    if after <= LEFT and 0 < decay < DECAY:
        return "sum of gradients", f"it is a sum of gradients and {-decay:.2g} times the weights (weight decay)"
    if left <= LITTLE:
        why = "as with half precision in the passes (autocast) or a little noise"
        return "undecided", f"it nearly sums to zero over the classes, {why}"
    if _unevenness(entries) < min(_unevenness(_flattened(step)) for step in probes) / 2:
        return "Adam", "its entries differ less in size than gradients do here, as after steps of Adam"
    return "unexplained", "it is no sum of gradients, has no weight decay, and does not look like Adam's steps"


# --------------------------------------------------------------------------------------------------- what is measured


def _flattened(update: Update) -> Tensor:
    return torch.cat([t.flatten() for t in update.values()]).double()


def _without_decay(seen: Observation) -> Tensor:
    """The update's entries; if only weight decay moves a fifth of them or more, the others, without it."""
    update, theta = _flattened(seen.update), _flattened({k: seen.params[k] for k in seen.update})
    known = theta != 0
    decay = -float((update[known] / theta[known]).median()) if known.any() else 0.0
    rest = update + decay * theta
    moved = rest.abs() > 0.01 * abs(decay) * theta.abs() + 4 * torch.finfo(_kept(seen)).eps * theta.abs()
    if decay <= 0 or float(moved.double().mean()) > 0.8 or not moved.any():
        return update
    return rest[moved]


def _share_of_one_size(entries: Tensor) -> tuple[float, float]:
    """The share of the entries above half of the largest that are within ONE_SIZE of it, and the largest; 0 if they are few."""
    sizes = entries.abs()
    largest = sizes.max()
    large = sizes[sizes > largest / 2]
    if len(large) < FEW * int((sizes > 0).sum()):
        return 0.0, float(largest)
    return float((large > (1 - ONE_SIZE) * largest).double().mean()), float(largest)


def _unevenness(entries: Tensor) -> float:
    """Return the ratio of the entries' largest hundredth to their median."""
    sizes = entries.abs()
    sizes = sizes[sizes > 0].sort().values
    return float(sizes[int(0.99 * (len(sizes) - 1))] / sizes[len(sizes) // 2])


def _probe_steps(fed: Federation, seen: Observation) -> list[Update]:
    """Steps of the update's size against gradients on auxiliary examples (or random ones), rounded as the update is.

    Empty if the rounding is too coarse for any comparison.
    """
    shards, rng = fed.shards, generator("training evidence")
    fed.load_buffers(seen.buffers)
    size, found, length = min(fed.chain.slice_of(shards.batch_size), 32), [], float(norm(seen.update))
    kept, sent = _kept(seen), float(norm({k: seen.params[k] for k in seen.update}))
    if torch.finfo(kept).eps * sent > COARSE * length:
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


def _class_sums(fed: Federation, seen: Observation, probes: list[Update]) -> tuple[float, float, float] | None:
    """Sums over the classes of the classifier's update, relative to it and beyond a gradient's; the same without weight decay;
    and this decay, times theta's own sums. None: a gradient's do not vanish either, or any training's do.
    """
    classes = fed.shards.dataset.classes
    if not is_cross_entropy(fed.loss) or classes == 2:
        return None
    try:
        name = layer_parameters(last_linear(fed.model))[0]  # many trainings leave the decay of biases out
    except ValueError:  # the network does not end in a fully connected layer
        return None
    if name not in seen.update or seen.params[name].dim() < 2 or len(seen.update[name]) != classes:
        return None
    update, theta, *controls = (part[name].double() for part in (seen.update, seen.params, *probes))
    control = max(float(c.sum(0).norm() / c.norm().clamp_min(1e-300)) for c in controls)
    if control > COARSE:
        return None
    size, sums, weights = float(update.norm()), update.sum(0), theta.sum(0)
    decay = -float(sums @ weights / weights.square().sum().clamp_min(1e-300))
    left, after = (max(0.0, float(t.norm()) / size - 4 * control) for t in (sums, sums + decay * weights))
    return left, after, decay


def _kept(seen: Observation) -> torch.dtype:
    """The dtype in which the client sent its weights, from those that the update makes of the server's."""
    sent = torch.cat([(p + seen.update[k]).flatten() for k, p in seen.params.items() if k in seen.update])
    for dtype in (torch.bfloat16, torch.float16):
        near = (sent - sent.to(dtype).to(sent.dtype)).abs() <= 4 * torch.finfo(sent.dtype).eps * sent.abs()
        if float(near.double().mean()) > MOST:  # by chance one in a thousand would be
            return dtype
    return torch.float32


# ------------------------------------------------------------------------------------------------------- all rounds

Found = Mapping[tuple[int, int], TrainingEvidence]  # by (round, client)

WORST_FIRST = (False, None, True)


def over_rounds(found: Found) -> TrainingEvidence:
    """Return the worst result, and how many of the compared updates have it.

    Args:
        found: at least one update's.
    """
    key = min(found, key=lambda key: (WORST_FIRST.index(found[key].fits), key))
    worst = found[key]
    if len(found) == 1:
        return worst
    alike = sum(evidence.fits is worst.fits for evidence in found.values())
    return replace(
        worst,
        words=f"{worst.words} (client {key[1]}, round {key[0]}, as the first of {alike} updates of {len(found)} compared)",
    )


def to_json(found: Found) -> str:
    """Return the results as JSON."""
    return json.dumps([[*key, asdict(evidence)] for key, evidence in sorted(found.items())])


def from_json(text: str) -> dict[tuple[int, int], TrainingEvidence]:
    """Read the results again."""
    rows: Iterable[tuple[int, int, dict[str, Any]]] = json.loads(text)
    return {(round, client): TrainingEvidence(**fields) for round, client, fields in rows}
