"""Which local training an update can come from, where the clients' code and data are not known: a foreign Flower app.

The server has the weights theta that it sent and the update. What they decide, without any of the client's data:

- The derivative of the cross-entropy by the logits sums to zero over the classes. So does the classifier's update if it is a
  sum of gradients: SGD with any rates, momentum, clipping and number of steps. These cannot be told apart. Weight decay
  leaves a multiple of theta's own sums. Adam rescales every entry, and nothing of this holds. Two classes tell nothing: their
  rows are opposite under any training.
- An example adds a product of two vectors to a fully connected layer's gradient, so a sum of n such gradients has a rank of at
  most n: a higher rank needs more steps, or more examples.
- The rounding of half precision in the passes (autocast) leaves a little of these sums, and so does a little noise.
- Adam's first step is rate * g / (|g| + eps): all entries with a gradient have nearly one size. A sign looks the same.
  After a few more steps they still differ less than a gradient's, of which auxiliary examples give an idea; after many, not.
- Normal noise is looked for before Adam is named: beyond the rank that the examples allow, or as one normal distribution of
  all weights' entries (`fedgauge.attacks.defense_inference.noise`).
- Differences that are taken for weights make the update -1 times the weights that were sent.
- With the client's last reply: layers that start from it instead of what was sent (`fedgauge.attacks.grading.own_start`).

In 96 random federations of small networks no honest update was called noise, Adam (of SGD) or a layer of the client's own. Of
26 heads of the client's own 17 were named, of 23 updates with noise as large as the update or larger (some of them after such a
head) 15, of 11 halved rates of batches of fewer examples than classes 7 (tests/attacks/grading/test_evidence_counts.py).
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch
from torch.nn.modules.batchnorm import _NormBase

from fedgauge.attacks.base import Observation
from fedgauge.attacks.defense_inference.noise import MANY, gaussian_sigma, kurtosis
from fedgauge.attacks.grading.own_start import last_reply, own_start
from fedgauge.attacks.grading.rate_and_steps import RateTimesSteps, rate_times_steps
from fedgauge.attacks.grading.update_measures import (
    MOST,
    MOST_ENTRIES,
    class_sums,
    flattened,
    highest_rank,
    probe_steps,
    rms,
    rounding_of,
    share_of_one_size,
    single_layers,
    unevenness_of,
    without_decay,
)
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.client.federation import Federation, whole_parts
from fedgauge.client.local_training import LocalTraining
from fedgauge.client.models.losses import is_cross_entropy
from fedgauge.client.training import evaluated, local_sgd
from fedgauge.client.transforms import is_identity
from fedgauge.client.update import Batch, Update, norm

Kind = Literal["sum of gradients", "weight decay", "Adam", "noise", "differences", "unexplained", "undecided"]
LEFT = 2e-5  # the part of the classifier's update that may stay unexplained
STILL = 1e-4  # the part of a gradient that a parameter must have to be missed where it does not move
SMALL_EPS = 1e-6  # Adam's eps above which its step is no sign
WARNING = "WARNING: the assumed local training does not explain the update, so attacks may show noise"
UNCHECKED = "the clients' local training is assumed and was not checked"
MOST_NAMED = 3  # layers in a sentence
FAR_OFF = 1.5  # beyond its interval, where an assumed sum of rates is doubted
LITTLE = 0.02  # that half precision in the passes, or a little noise, may leave
LIGHT = 2.8  # the kurtosis of entries that a few steps of Adam stay below; those of a gradient with noise are above 3
NEARLY_NOTHING = 0.3  # times the weights: what is smaller cannot be weights after a round
EXPECTED = {  # what to change in the scenario, by what the update shows
    "noise": 'the chain assumes none: add [[chain]] use = "gaussian" with this sigma, which is a mean over the layers',
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
        rates: the sum of the steps' rates; None: not known.
    """

    kind: Kind
    fits: bool | None
    words: str
    rates: RateTimesSteps | None = None


def training_evidence(fed: Federation, seen: Observation, before: Observation | None = None) -> TrainingEvidence:
    """Compare an update with the local training that the federation's chain assumes.

    Args:
        before: the client's last reply before this one; None: it is the first, or not known.
    """
    if reason := _unreadable(fed, seen):
        return TrainingEvidence("undecided", None, f"{UNCHECKED}: {reason}")
    try:
        return _compared(fed, seen, before)
    except Exception as error:  # a user's network may raise anything; the attacks will meet it, too, and say more
        reason = f"the network cannot be run ({type(error).__name__}: {error})"
        return TrainingEvidence("undecided", None, f"{UNCHECKED}: {reason}")


def _compared(fed: Federation, seen: Observation, before: Observation | None) -> TrainingEvidence:
    local, wrong, beside = fed.chain.local, list[str](), list[str]()
    if before is not None:
        kept, unknown = own_start(seen, before)
        if kept:  # the rest is read as the client computed it
            start = {k: last_reply(before, k) for k in kept}
            moved = {k: seen.params[k] + seen.update[k] - start[k] for k in kept}
            seen = replace(seen, params={**seen.params, **start}, update={**seen.update, **moved})
            wrong.append(
                f"{_named(fed, kept)} starts from the client's own last reply and not from the weights that it was sent, which "
                "the attacks take: attack the client's first round only (audit --attack ... --rounds)"
            )
        if unknown:
            beside.append(f"whether {_named(fed, unknown)} started from the client's last reply is not decided")
    elif seen.round > 1:
        beside.append("the tape has no earlier reply of the client, so layers that start from that are not looked for")
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
    elif reason := _contradiction(fed, seen, kind, probes):
        wrong.append(f"{evidence}; {reason}")
    rates = rate_times_steps(fed, seen) if kind == "sum of gradients" else None
    if rates is not None:
        beside.append(f"the sum of the steps' rates is {rates.words} by the classifier's bias")
        if not rates.low / FAR_OFF <= local.scale <= FAR_OFF * rates.high:
            beside.append(f"the chain assumes {local.scale:.2g}: check the rate and the steps")
    if wrong:
        fits, words = False, f"{WARNING}: {'; '.join(wrong)}"
    elif kind == "undecided":
        fits, words = None, f"the clients' local training is assumed, and the update does not tell it: {evidence}"
    else:
        fits, words = True, f"the assumed local training ({local.words}) fits: {evidence}"
    return TrainingEvidence(kind, fits, "; ".join([words, *beside]), rates)


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


def _contradiction(fed: Federation, seen: Observation, kind: Kind, probes: list[Update]) -> str:
    """Why the assumed training cannot have made such an update, and what to write instead; empty if it can."""
    local, size = fed.chain.local, fed.shards.batch_size
    instead = f'the chain assumes {local.words}: set use = "local_training" with'
    if kind == "undecided" or kind in EXPECTED:
        return EXPECTED.get(kind, "")
    if kind == "Adam":
        if not isinstance(local, LocalTraining) or not local.adaptive:
            return f'{instead} optimizer = "adam" (or "adamw"), its rate, and its steps or epochs'
        return _wrong_rate(local, seen)
    if local.adaptive:
        return f'{instead} optimizer = "sgd"'
    decay, sums = _decay(local), class_sums(fed, seen, probes)
    found = sums.decay if sums is not None and kind == "weight decay" else 0.0
    far = abs(found - decay)
    if sums is not None and far > max(found, decay) / 2 and sums.beyond(far * sums.weights) > LEFT:
        return f"{instead} its weight_decay, as the assumed training makes this {-decay:.2g} times the weights"
    if kind == "weight decay":  # which has any rank
        return ""
    rank, most = highest_rank(fed, seen), local.gradients(size) * fed.chain.slice_of(size)
    if rank <= most:
        return ""
    return (
        f"its rank of {rank} needs more gradients of single examples than the {most} that the chain assumes: set steps or "
        "epochs, and [data] batch_size, as in the app"
    )


def _unmoved(seen: Observation, probes: list[Update]) -> set[str]:
    """The parameters that do not move, though they do on auxiliary examples."""

    def missed(name: str) -> bool:
        parts = [(step[name], float(norm(step))) for step in probes if name in step]
        return bool(parts) and all(float(t.norm()) > STILL * length for t, length in parts)

    return {name for name, t in seen.update.items() if not t.any() and missed(name)}


def _wrong_rate(local: LocalTraining, seen: Observation) -> str:
    """Why an update of Adam is too large or too small for the rate and steps that are assumed; empty if it is not."""
    weights = max(float(seen.params[k].abs().max()) for k in seen.update if seen.params[k].numel())
    largest, rounding = float(without_decay(seen).abs().max()), rounding_of(seen) * weights
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
    if (sigma := _noise(fed, seen)) is not None:
        return "noise", f"its entries have normal noise of a standard deviation of {sigma:.2g}"
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
        return (
            "weight decay",
            f"it is a sum of gradients and {-sums.decay:.2g} times the weights: weight decay times rate and steps",
        )
    if min(sums.left, sums.after) <= LITTLE:
        return (
            "undecided",
            "it nearly sums to zero over the classes, as with half precision in the passes (autocast) or a little noise",
        )
    uneven, own = min(unevenness_of(flattened(step)) for step in probes), unevenness_of(entries)
    if own < uneven / 2 and _is_light(seen):
        return "Adam", "its entries differ less in size than gradients do here, as after steps of Adam"
    return "unexplained", "it is no sum of gradients, has no weight decay, and does not look like Adam's steps"


def _are_differences(seen: Observation) -> bool:
    """Whether what came back is small beside the weights that were sent, so that it cannot be weights."""
    sent = norm({k: seen.params[k] for k in seen.update})
    return 0 < float(norm({k: seen.params[k] + t for k, t in seen.update.items()})) < NEARLY_NOTHING * float(sent)


def _noise(fed: Federation, seen: Observation) -> float | None:
    """The standard deviation of normal noise on the update; None: there is none, or it cannot be distinguished."""
    rounding, size = rounding_of(seen), fed.shards.batch_size
    least = {k: 2 * rounding * rms(seen.params[k]) for k in seen.update}
    layers = [k for k in single_layers(fed) if k in seen.update and seen.update[k].numel() <= MOST_ENTRIES]
    return gaussian_sigma(seen.update, layers, fed.chain.local.gradients(size) * fed.chain.slice_of(size), least)


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


def _is_light(seen: Observation) -> bool:
    """Whether most weights' entries have lighter tails than a normal distribution, as after a few steps of Adam."""
    found = sorted(kurtosis(t[t != 0]) for t in seen.update.values() if t.dim() > 1 and t.count_nonzero() >= MANY)
    return not found or found[len(found) // 2] < LIGHT


# ------------------------------------------------------------------------------------------------------- all rounds

Found = Mapping[tuple[int, int], TrainingEvidence]  # by (round, client)

WORST_FIRST = (False, None, True)


def over_rounds(found: Found) -> TrainingEvidence:
    """Return the worst result, and how many of the compared updates have it.

    Args:
        found: at least one update's.
    """
    found = _with_changed_rates(found)
    key = min(found, key=lambda key: (WORST_FIRST.index(found[key].fits), key))
    worst = found[key]
    if len(found) == 1:
        return worst
    alike = sum(evidence.fits is worst.fits for evidence in found.values())
    return replace(
        worst,
        words=f"{worst.words} (client {key[1]}, round {key[0]}, as the first of {alike} updates of {len(found)} compared)",
    )


def _with_changed_rates(found: Found) -> Found:
    """The results, where a client's rate in a later round is not that of its first: then the chain's cannot be both."""
    first: dict[int, tuple[int, RateTimesSteps]] = {}
    changed = dict(found)
    for (round, client), evidence in sorted(found.items()):
        if (now := evidence.rates) is None:
            continue
        since, then = first.setdefault(client, (round, now))
        if now.high < then.low or now.low > then.high:
            words = (
                f"{WARNING}: the sum of the steps' rates was {then.words} in round {since} and is {now.words}, and the chain "
                "assumes one for all rounds: attack the rounds that have it (audit --attack ... --rounds)"
            )
            changed[round, client] = replace(evidence, fits=False, words=words)
    return changed


def to_json(found: Found) -> str:
    """Return the results as JSON."""
    return json.dumps([[*key, asdict(evidence)] for key, evidence in sorted(found.items())])


def from_json(text: str) -> dict[tuple[int, int], TrainingEvidence]:
    """Read the results again."""
    rows: Iterable[tuple[int, int, dict[str, object]]] = json.loads(text)
    return {(round, client): _evidence(**fields) for round, client, fields in rows}  # type: ignore[arg-type]  # from JSON


def _evidence(rates: Mapping[str, float] | None, **fields: object) -> TrainingEvidence:
    return TrainingEvidence(**fields, rates=RateTimesSteps(**rates) if rates else None)  # type: ignore[arg-type]
