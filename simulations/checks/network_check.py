"""What is wrong with a network, tried on a few examples: named with the layer and the remedy."""

import copy
import inspect
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedgauge.attacks.engine.compatibility import check_forward, check_lookups, check_parameters, differentiation_of
from fedgauge.attacks.modality.registry import examples_of
from fedgauge.attacks.threat_model import public_knowledge
from fedgauge.client.data.images import batch_of
from fedgauge.client.federation import Federation
from fedgauge.client.models.losses import is_cross_entropy
from fedgauge.client.training import without_running_stats
from fedgauge.simulations.checks.check_result import CheckFailed, CheckResult, attempt, require
from fedgauge.simulations.checks.remedies import COPY, remedy, sentence

TRIED = 4  # examples on which a network is tried
PAIR = 2  # examples of a gradient: BatchNorm in train mode cannot normalise by one
UNIT = 1e-4  # how far a sum of probabilities may be from one


SOFTMAX = (
    "its outputs are probabilities (none is negative, they sum to one), of which the cross-entropy takes the softmax again: "
    "gradients are weaker and learning is slower; let it return logits, without its last softmax"
)


def check_network(fed: Federation) -> Iterator[CheckResult]:
    """Try the network on a few examples: first what training needs, then what only attacks or speed suffer from."""
    for name, check in (("model", try_network), ("gradient", try_gradient)):
        yield (result := attempt(name, partial(check, fed), stops=True))
        if not result.works:
            return
    for name, check in (("model, copied", try_copy), ("input", try_input), ("softmax", try_softmax)):
        yield attempt(name, partial(check, fed), needed=False)


def inputs(fed: Federation, count: int = TRIED) -> Tensor:
    """Some training examples, normalised as the model's input."""
    data = fed.shards.dataset
    return data.normalise(batch_of(data.x, data.y, torch.arange(min(count, len(data.y)))).x)


def outputs(fed: Federation, given: Tensor) -> Tensor:
    """What the network makes of normalised examples."""
    with torch.no_grad(), without_running_stats(fed.model):  # a check must not change BatchNorm's statistics
        made: Tensor = functional_call(fed.model, fed.initial()[0], (given,))
    return made


def try_network(fed: Federation) -> str:
    """Run the network forward; CheckFailed names the layer that cannot take these examples, or what else is wrong."""
    model, data, params = fed.model, fed.shards.dataset, fed.initial()[0]
    further, held = _further_arguments(model), examples_of(data)
    words = "give it a default, or wrap the network in a module whose forward takes one argument"
    require(not further, f"its forward needs {' and '.join(map(repr, further))} besides the {held}: {words}")
    bad = [name for name, p in params.items() if not p.isfinite().all()]
    require(not bad, f"parameter {bad[:1]} is not finite at the start: check how the network is initialised")
    x = inputs(fed)
    try:
        check_parameters(model, params)
        logits = check_forward(model, params, x)
    except ValueError as error:
        given = f"[data] gives {held} of {' x '.join(map(str, data.shape))}"
        fits = f"{given}: build the network for them (its factory is offered `shape` and `classes`)"
        raise CheckFailed(f"{error}; {remedy(error.__cause__, fits)}" if error.__cause__ else str(error)) from error
    expected, made = (len(x), *data.y.shape[1:], data.classes), tuple(logits.shape)
    words = "let its factory take `shape` and `classes`, which it is offered"
    require(made == expected, f"it gives {made} for {len(x)} {held}, expected logits {expected}: {words}")
    count = sum(p.numel() for p in params.values())
    return f"{type(model).__name__}, outputs for {data.classes} classes, {count:,} parameters"


def try_input(fed: Federation) -> str:
    """Run it on examples that must stay as they are."""
    given = inputs(fed)
    before = given.clone()
    outputs(fed, given)
    words = "it changes its input in place, which ruins a batch that is used twice: begin with x = x.clone(), or set inplace=False"
    require(torch.equal(given, before), words)
    return "unchanged"


def try_gradient(fed: Federation) -> str:
    """Compute a client's gradient of a few examples, as every local step does."""
    data = fed.shards.dataset
    batch = batch_of(data.x, data.y, torch.arange(min(PAIR if fed.shards.batch_size > 1 else 1, len(data.y))))
    params = fed.initial()[0]
    update = fed.gradient(params, batch, None)
    try:
        check_lookups(fed.model, params, inputs(fed, len(batch.x)))
    except ValueError as error:
        raise CheckFailed(str(error)) from error
    bad = [name for name, t in update.items() if not t.isfinite().all()]
    require(not bad, f"the gradient of {bad[:1]} is not finite: a square root, norm or division at zero?")
    moved = any(t.any() for t in update.values())
    require(moved, "every gradient is zero: is the loss detached from the parameters, or every unit dead?")
    return "finite"


def try_copy(fed: Federation) -> str:
    """Copy the network, as dlg and idlg (for double precision), bounds, and defenses and attacks of the model do."""
    try:
        copy.deepcopy(fed.model)
    except Exception as error:  # __deepcopy__ and __reduce__ are the user's
        raise CheckFailed(f"copy.deepcopy fails ({sentence(error)}): {remedy(error, COPY)}") from error
    return "it can be copied"


def try_softmax(fed: Federation) -> str:
    """Look at its outputs: of probabilities the cross-entropy would take the softmax a second time."""
    made = outputs(fed, inputs(fed))
    sums_to_one = bool(((made.sum(-1) - 1).abs() < UNIT).all())
    probabilities = made.shape[-1] > 1 and bool((made >= 0).all()) and sums_to_one
    require(not (is_cross_entropy(fed.loss) and probabilities), SOFTMAX)
    return "no probabilities"


def try_derivatives(fed: Federation) -> str:
    """Compare the network's second derivative, which every matching attack follows, with the change of the first."""
    known = replace(public_knowledge(fed, members=1), batch_size=min(PAIR, fed.shards.batch_size), auxiliary=None)
    found = differentiation_of(known, fed.initial()[0], one_pass=False)
    require(not found.note, f"{found.note}; let forward compute with tensors throughout, or take another layer")
    return "as the gradient changes"


def _further_arguments(model: nn.Module) -> list[str]:
    """The arguments of its forward without a default, after the first."""
    empty, several = inspect.Parameter.empty, (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    taken = [p for p in inspect.signature(model.forward).parameters.values() if p.kind not in several]
    return [p.name for p in taken[1:] if p.default is empty]
