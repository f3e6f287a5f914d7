"""Which local training an update can come from, where the clients' code and data are not known: a foreign Flower app.

The server has the weights theta that it sent and the update. What they decide, without any of the client's data:

- The derivative of the cross-entropy by the logits sums to zero over the classes. So does the classifier's update if it is a
  sum of gradients: SGD with any rates, momentum, clipping and number of steps. These cannot be told apart. Weight decay
  leaves a multiple of theta's own sums. Adam rescales every entry, and nothing of this holds. Two classes tell nothing: their
  rows are opposite under any training.
- The rounding of half precision in the passes (autocast) leaves a little of these sums, and so does a little noise.
- Adam's first step is rate * g / (|g| + eps): all entries with a gradient have nearly one size. A sign looks the same.
  After a few more steps they still differ less than a gradient's, of which auxiliary examples give an idea; after many, not.
- Differences that are taken for weights make the update -1 times the weights that were sent.
- What does not move, though it would on auxiliary examples, is not trained.

In 96 random federations of small networks no honest update was called another training, and Adam was told from SGD in all
(tests/attacks/grading/test_evidence_counts.py).
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch.nn.modules.batchnorm import _NormBase

from fedgauge.attacks.base import Observation
from fedgauge.attacks.grading.update_measures import (
    MOST,
    class_sums,
    flattened,
    probe_steps,
    share_of_one_size,
    unevenness_of,
    without_decay,
)
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.client.federation import Federation, whole_parts
from fedgauge.client.local_training import LocalTraining
from fedgauge.client.models.losses import is_cross_entropy
from fedgauge.client.training import evaluated, local_sgd
from fedgauge.client.transforms import is_identity
from fedgauge.client.update import Update, norm

Kind = Literal["sum of gradients", "Adam", "differences", "unexplained", "undecided"]
LEFT = 2e-5  # the part of the classifier's update that may stay unexplained
STILL = 1e-4  # the part of a gradient that a parameter must have to be missed where it does not move
SMALL_EPS = 1e-6  # Adam's eps above which its step is no sign
WARNING = "WARNING: the assumed local training does not explain the update, so attacks may show noise"
UNCHECKED = "the clients' local training is assumed and was not checked"
MOST_NAMED = 3  # layers in a sentence
LITTLE = 0.02  # that half precision in the passes, or a little noise, may leave
NEARLY_NOTHING = 0.3  # times the weights: what is smaller cannot be weights after a round
EXPECTED = {  # what to change in the scenario, by what the update shows
    "differences": 'set [tape] replies = "updates" in the scenario',
    "unexplained": "SGD on this loss does not do this; another loss, many steps of Adam, noise or a defense may: compare the app's "
    "training with [[chain]] and [loss]",
}


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
    """Compare an update with the local training that the federation's chain assumes."""
    if reason := _unreadable(fed, seen):
        return TrainingEvidence("undecided", None, f"{UNCHECKED}: {reason}")
    try:
        return _compared(fed, seen)
    except Exception as error:  # a user's network may raise anything; the attacks will meet it, too, and say more
        reason = f"the network cannot be run ({type(error).__name__}: {error})"
        return TrainingEvidence("undecided", None, f"{UNCHECKED}: {reason}")


def _compared(fed: Federation, seen: Observation) -> TrainingEvidence:
    local, wrong = fed.chain.local, list[str]()
    freezing = [says for link in fed.chain.links if (says := getattr(link, "frozen", None))]  # the defense `freeze`
    held = {k for k in seen.update if any(says(k) for says in freezing)}
    if thawed := {k for k in held if seen.update[k].any()}:
        wrong.append(f"{_named(fed, thawed)} moved, which the chain freezes: leave it out there")
    seen = _without(seen, held - thawed)
    probes = probe_steps(fed, seen)
    if still := _unmoved(seen, probes):
        seen = _without(seen, still)
        probes = probe_steps(fed, seen)
        wrong.append(
            f"{_named(fed, still)} did not move, but would have: if the app does not train that, put [[chain]] "
            f'use = "freeze", layers = {whole_parts(fed.model, still)} before local training'
        )
    wrong += _other_mode(fed, seen)
    kind, evidence = _read(fed, seen, probes)
    if _many_steps_of_adam(local, kind):
        kind, evidence = "undecided", f"{evidence}, and {local.words} may do this or not"
    elif reason := _contradiction(local, kind):
        wrong.append(f"{evidence}; {reason}")
    if wrong:
        return TrainingEvidence(kind, False, f"{WARNING}: {'; '.join(wrong)}")
    if kind == "undecided":
        words = f"the clients' local training is assumed, and the update does not tell it: {evidence}"
        return TrainingEvidence(kind, None, words)
    return TrainingEvidence(kind, True, f"the assumed local training ({local.words}) fits: {evidence}")


def _without(seen: Observation, names: set[str]) -> Observation:
    return replace(seen, update={k: t for k, t in seen.update.items() if k not in names})


def _named(fed: Federation, names: set[str]) -> str:
    parts = whole_parts(fed.model, names)
    return ", ".join(parts[:MOST_NAMED]) + (f" and {len(parts) - MOST_NAMED} more" if len(parts) > MOST_NAMED else "")


def _other_mode(fed: Federation, seen: Observation) -> list[str]:
    """In words, that norms keep running statistics in the app and not in the model, or the other way round."""
    norms = {name: module for name, module in fed.model.named_modules() if isinstance(module, _NormBase)}
    own = {f"{name}.{part}" for name in norms for part in ("running_mean", "running_var")} & seen.returned.keys()
    moved = any(not torch.equal(seen.returned[k], seen.buffers[k]) for k in own)
    if not own or moved == any(norm.training and norm.track_running_stats for norm in norms.values()):
        return []
    found, mode = ("moved", "train") if moved else ("did not move", "eval")
    return [f'the running statistics of the app\'s norms {found}: set [model] mode = "{mode}"']


def _many_steps_of_adam(local: local_sgd, kind: Kind) -> bool:
    """Whether Adam as assumed leaves nothing to tell it by: after many steps, or with a large eps, which makes it like SGD."""
    if not isinstance(local, LocalTraining) or not local.adaptive or kind in ("Adam", "undecided"):
        return False
    return local.eps > SMALL_EPS or (kind == "unexplained" and local.steps > 1)


def _contradiction(local: local_sgd, kind: Kind) -> str:
    """Why the assumed training cannot have made such an update, and what to write instead; empty if it can."""
    adam = isinstance(local, LocalTraining) and local.adaptive
    instead = f'the chain assumes {local.words}: set use = "local_training" with'
    if kind == "Adam" and not adam:
        return f'{instead} optimizer = "adam" (or "adamw"), its rate, and its steps or epochs'
    if kind == "sum of gradients" and adam:
        return f'{instead} optimizer = "sgd"'
    return EXPECTED.get(kind, "")


def _unmoved(seen: Observation, probes: list[Update]) -> set[str]:
    """The parameters that do not move, though they do on auxiliary examples."""

    def missed(name: str) -> bool:
        parts = [(step[name], float(norm(step))) for step in probes if name in step]
        return bool(parts) and all(float(t.norm()) > STILL * length for t, length in parts)

    return {name for name, t in seen.update.items() if not t.any() and missed(name)}


def _unreadable(fed: Federation, seen: Observation) -> str:
    """Why nothing can be read from this update; empty where something can."""
    if missing := {name for name, _ in fed.model.named_parameters()} - set(seen.update):
        return f"the update lacks {sorted(missing)[0]}"
    if fed.protocol.secure_sum is not None:
        return "the server sees only sums of clients"
    beside = [link for link in fed.chain.links if link is not fed.chain.local and not hasattr(link, "frozen")]
    if not all(map(is_identity, beside)):
        return "a defense stands in the chain, too"
    if reason := modality_of(fed.shards.dataset).hides_training:
        return reason
    if not all(bool(t.isfinite().all()) for t in seen.update.values()):
        return "the update is not finite"
    return "" if any(bool(t.any()) for t in seen.update.values()) else "the update is zero"


def _read(fed: Federation, seen: Observation, probes: list[Update]) -> tuple[Kind, str]:
    if _are_differences(seen):
        return "differences", "it is -1 times the weights: the app uploads differences, not weights"
    if not probes:
        return "undecided", "the weights' rounding hides it"
    entries = without_decay(seen)
    share, size = share_of_one_size(entries)
    if share >= MOST:
        return (
            "Adam",
            f"{share:.0%} of its large entries have nearly one size, {size:.3g}, as after Adam's first steps, or a sign",
        )
    if reason := _other_outputs(fed):
        return "undecided", reason
    sums = class_sums(fed, seen, probes)
    if sums is None:
        return "undecided", "the classifier's sums over the classes tell nothing, or rounding hides them"
    if sums.left <= LEFT:
        return "sum of gradients", "it sums to zero over the classes, as a sum of gradients (SGD) does"
    if sums.after <= LEFT and sums.decay > 0:
        return "sum of gradients", f"it is a sum of gradients and {-sums.decay:.2g} times the weights (weight decay)"
    if min(sums.left, sums.after) <= LITTLE:
        return (
            "undecided",
            "it nearly sums to zero over the classes, as with half precision in the passes (autocast) or a little noise",
        )
    uneven, own = min(unevenness_of(flattened(step)) for step in probes), unevenness_of(entries)
    if own < uneven / 2:
        return "Adam", "its entries differ less in size than gradients do here, as after steps of Adam"
    return "unexplained", "it is no sum of gradients, has no weight decay, and does not look like Adam's steps"


def _are_differences(seen: Observation) -> bool:
    """Whether what came back is small beside the weights that were sent, so that it cannot be weights."""
    sent = norm({k: seen.params[k] for k in seen.update})
    return 0 < float(norm({k: seen.params[k] + t for k, t in seen.update.items()})) < NEARLY_NOTHING * float(sent)


def _other_outputs(fed: Federation) -> str:
    """Why the network has no cross-entropy over the classes; empty if it may have one."""
    if not is_cross_entropy(fed.loss):
        return ""
    with evaluated(fed.model), torch.no_grad():
        out = fed.model(fed.shards.dataset.normalise(torch.zeros(2, *fed.shards.dataset.shape)))
    outputs, classes = out[0].numel(), fed.shards.dataset.classes
    if outputs == classes:
        return ""
    return f"the network gives {outputs} outputs for {classes} classes, so its loss is not the assumed cross-entropy: set [loss]"


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
