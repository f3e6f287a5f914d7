"""Evidence of an update's local training, without the clients' code and data: a foreign Flower app.

The server has the weights theta that it sent, and the update:

- The derivative of the cross-entropy by the logits sums to zero over the classes. A sum of gradients keeps this in the
  classifier's update: SGD with any rates, momentum, clipping and number of steps. Weight decay leaves a multiple of theta's
  own sums. Adam rescales every entry, so its sums are not zero. Two classes give no evidence: their rows are opposite under
  any training.
- Half precision in the passes (autocast), or a little noise, leaves small sums.
- Adam's first step is rate * g / (|g| + eps): all entries with a gradient have nearly one size. A sign looks the same,
  and so do first steps of RMSprop and Adagrad. Later steps differ, and leave an update that is unexplained.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from fedgauge.attacks.base import Observation
from fedgauge.attacks.engine.computation import classifier_parameters
from fedgauge.client.federation import Federation
from fedgauge.client.local_training import LocalTraining
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.rng import generator
from fedgauge.client.transforms import is_identity
from fedgauge.client.update import Batch

Kind = Literal["sum of gradients", "Adam", "unexplained", "undecided"]
LEFT = 2e-5  # of the classifier's update: sums that float32 leaves
LITTLE = 0.02  # sums that half precision in the passes, or a little noise, may leave
DECAY = 0.5  # times the weights: more is no weight decay
SMALL_EPS = 1e-6  # a larger eps makes Adam's step differ from a sign
ONE_SIZE = 0.05  # relative distance of entries that have one size
# share of the large entries with one size, from which the step is Adam's; in gradients it is some hundredths
MOST = 0.5
FEW = 0.02  # least share of large entries; gradients have fewer
ENTRIES = 10  # their least number: of fewer, half may have one size by chance
TRIED = 4  # public examples, whose gradient's sums show whether any gradient's vanish
COARSE = 0.05  # part of the update that rounding may be
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
    kind, evidence = _read(fed, replace(seen, update={k: t for k, t in seen.update.items() if t.any()}))
    statistics = [k for k in seen.returned if k in seen.buffers and k.endswith("running_var")]
    moved = any(not torch.equal(seen.returned[k], seen.buffers[k]) for k in statistics)
    if statistics and moved != fed.model.training:
        found = 'moved: set mode = "train"' if moved else 'stayed: set mode = "eval"'
        return TrainingEvidence(kind, False, f"{WARNING}: BatchNorm's statistics {found} in [model]")
    local, instead = fed.chain.local, ""
    adam = isinstance(local, LocalTraining) and local.adaptive
    if isinstance(local, LocalTraining) and adam and local.eps > SMALL_EPS:
        kind, evidence = "undecided", f"{evidence}, and {local.words} may do this or not"
    elif kind == "unexplained" and adam and local.steps > 1:
        kind, evidence = "Adam", "it is no sum of the loss's gradients, and later steps of Adam leave no other trace"
    elif kind == "Adam" and not adam:
        instead = 'set use = "local_training" with optimizer = "adam" (or "adamw"), its rate, and its steps or epochs; '
        instead += "for one step of another such optimizer take adam with this size as its rate"
    elif kind == "sum of gradients" and adam:
        instead = 'set use = "local_training" with optimizer = "sgd"'
    elif kind == "unexplained":
        instead = "compare the app's training with [[chain]] and [loss], and what it uploads with [tape] replies"
    if instead:
        return TrainingEvidence(kind, False, f"{WARNING}: {evidence}; the chain assumes {local.words}: {instead}")
    if kind == "undecided":
        words = f"the clients' local training is assumed, and the update gives no evidence of it: {evidence}"
        return TrainingEvidence(kind, None, words)
    unchecked = "its rate and number of steps were not checked"
    return TrainingEvidence(kind, True, f"the assumed local training ({local.words}) fits: {evidence}; {unchecked}")


def _unreadable(fed: Federation, seen: Observation) -> str:
    if missing := {name for name, _ in fed.model.named_parameters()} - set(seen.update):
        return f"the update lacks {sorted(missing)[0]}"
    if fed.protocol.secure_sum is not None:
        return "the server sees only sums of clients"
    others = [link for link in fed.chain.links if link is not fed.chain.local and not hasattr(link, "frozen")]
    if not all(map(is_identity, others)):
        return "the chain also has a defense"
    if isinstance(fed.model, LanguageModel):
        return "only trainings on images are compared"
    if not all(bool(t.isfinite().all()) for t in seen.update.values()):
        return "the update is not finite"
    return "" if any(bool(t.any()) for t in seen.update.values()) else "the update is zero"


def _read(fed: Federation, seen: Observation) -> tuple[Kind, str]:
    """Return the training that explains an update, and the evidence for it."""
    both = seen.update, seen.params
    update, theta = (torch.cat([part[k].flatten() for k in seen.update]).double() for part in both)
    eps = torch.finfo(_kept(seen)).eps
    if eps * theta.norm() > COARSE * update.norm():
        return "undecided", "the weights' rounding hides it"
    sizes = update.abs()
    large = sizes[sizes > sizes.max() / 2]
    share = float((large > (1 - ONE_SIZE) * sizes.max()).double().mean())
    if len(large) >= max(ENTRIES, FEW * int((sizes > 0).sum())) and share >= MOST:
        alike = f"{share:.0%} of its large entries have nearly one size, {float(sizes.max()):.3g}"
        return "Adam", f"{alike}, as after the first steps of Adam, RMSprop or Adagrad, a sign, or clipping by value"
    sums = _class_sums(fed, seen, eps)
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
    return "unexplained", "it is no sum of the loss's gradients, has no weight decay, and is unlike Adam's first step"


def _class_sums(fed: Federation, seen: Observation, eps: float) -> tuple[float, float, float] | None:
    """Return the classifier's sums over the classes, relative to its update and beyond rounding; the same without weight
    decay; and this decay, times theta's own sums. None: the sums of any training vanish, or no gradient's do.
    """
    classes, public = fed.shards.dataset.classes, fed.shards.auxiliary_batch()
    if classes == 2:
        return None
    try:  # of the weight alone: many trainings leave the decay of biases out
        name, _ = classifier_parameters(fed.model, fed.shards.dataset.shape)
    except ValueError:  # no fully connected layer computes the logits
        return None
    if name not in seen.update or seen.params[name].dim() < 2 or len(seen.update[name]) != classes:
        return None
    # other losses, and an activation behind the classifier, leave sums that do not vanish
    slope = fed.gradient(seen.params, Batch(public.x[:TRIED], public.y[:TRIED]), generator("evidence"))[name].double()
    if slope.sum(0).norm() > LEFT * slope.norm():
        return None
    update, theta = seen.update[name].double(), seen.params[name].double()
    size, sums, weights = float(update.norm()), update.sum(0), theta.sum(0)
    rounding = eps * float(theta.norm()) / size
    if rounding > COARSE:
        return None
    decay = -float(sums @ weights / weights.square().sum().clamp_min(1e-300))
    left, after = (max(0.0, float(t.norm()) / size - rounding) for t in (sums, sums + decay * weights))
    return left, after, decay


def _kept(seen: Observation) -> torch.dtype:
    """The dtype in which the client sent its weights, from those that the update makes of the server's."""
    sent = torch.cat([(p + seen.update[k]).flatten() for k, p in seen.params.items() if k in seen.update])
    for dtype in (torch.bfloat16, torch.float16):
        near = (sent - sent.to(dtype).to(sent.dtype)).abs() <= 4 * torch.finfo(sent.dtype).eps * sent.abs()
        if float(near.double().mean()) > MOST:  # by chance one in a thousand would be
            return dtype
    return torch.float32
