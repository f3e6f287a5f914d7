"""What is wrong with a network, tried on a few examples: named with the layer and the remedy."""

import copy
import inspect

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.engine.compatibility import check_forward, check_lookups, check_parameters, differentiation_of
from fedgauge.attacks.modality.registry import examples_of
from fedgauge.client.data.images import batch_of
from fedgauge.client.federation import Federation
from fedgauge.client.models.losses import is_cross_entropy
from fedgauge.client.training import without_running_stats
from fedgauge.simulations.checks.check_result import CheckFailed
from fedgauge.simulations.checks.remedies import COPY, remedy, sentence

TRIED = 4  # examples on which a network is tried
PAIR = 2  # examples of a gradient: BatchNorm in train mode cannot normalise by one
UNIT = 1e-4  # how far a sum of probabilities may be from one


def inputs(fed: Federation, count: int = TRIED) -> Tensor:
    """Some training examples, normalised as the model's input."""
    data = fed.shards.dataset
    return data.normalise(batch_of(data.x, data.y, torch.arange(min(count, len(data.y)))).x)


def outputs(fed: Federation) -> Tensor:
    """What the network makes of them."""
    with torch.no_grad(), without_running_stats(fed.model):  # a check must not change BatchNorm's statistics
        made: Tensor = functional_call(fed.model, fed.initial()[0], (inputs(fed),))
    return made


def try_network(fed: Federation) -> str:
    """Run the network forward; CheckFailed names the layer that cannot take these examples, or what else is wrong."""
    model, data, params = fed.model, fed.shards.dataset, fed.initial()[0]
    if further := _further_arguments(model):
        raise CheckFailed(
            f"its forward needs {' and '.join(map(repr, further))} besides the {examples_of(data)}: give it a default, or wrap the "
            "network in a module whose forward takes one argument"
        )
    if bad := [name for name, p in params.items() if not p.isfinite().all()]:
        raise CheckFailed(f"parameter {bad[0]!r} is not finite at the start: check how the network is initialised")
    x = inputs(fed)
    try:
        check_parameters(model, params)
        logits = check_forward(model, params, x)
    except ValueError as words:
        shape = " x ".join(map(str, data.shape))
        given = f"[data] gives {examples_of(data)} of {shape}"
        fits = f"{given}: build the network for them (its factory is offered `shape` and `classes`)"
        change = f"; {remedy(words.__cause__, fits)}" if words.__cause__ else ""
        raise CheckFailed(f"{words}{change}") from words
    expected = (len(x), *data.y.shape[1:], data.classes)
    if logits.shape != expected:
        raise CheckFailed(
            f"it gives {tuple(logits.shape)} for {len(x)} {examples_of(data)}, expected logits {expected}: let its "
            "factory take `shape` and `classes`, which it is offered"
        )
    return f"{type(model).__name__}, outputs for {data.classes} classes"


def try_input(fed: Federation) -> str:
    """Run it on examples that must stay as they are."""
    given = inputs(fed)
    before = given.clone()
    with torch.no_grad(), without_running_stats(fed.model):
        functional_call(fed.model, fed.initial()[0], (given,))
    if not torch.equal(given, before):
        raise CheckFailed(
            "it changes its input in place, which slows every gradient and ruins a batch that is used twice: let its forward "
            "begin with x = x.clone(), or leave out inplace=True in its first layer"
        )
    return "unchanged"


def try_gradient(fed: Federation) -> str:
    """Compute a client's gradient of a few examples, as every local step does."""
    data = fed.shards.dataset
    batch = batch_of(data.x, data.y, torch.arange(min(PAIR if fed.shards.batch_size > 1 else 1, len(data.y))))
    params = fed.initial()[0]
    update = fed.gradient(params, batch, None)
    try:
        check_lookups(fed.model, params, inputs(fed, len(batch.x)))
    except ValueError as words:
        raise CheckFailed(str(words)) from words
    if bad := [name for name, t in update.items() if not t.isfinite().all()]:
        raise CheckFailed(f"the gradient of {bad[0]!r} is not finite: a square root, norm or division at zero?")
    if not any(t.any() for t in update.values()):
        raise CheckFailed("every gradient is zero: is the loss detached from the parameters, or every unit dead?")
    return "finite"


def try_copy(fed: Federation) -> str:
    """Copy the network, as dlg and idlg (for double precision), bounds, and defenses and attacks of the model do."""
    try:
        copy.deepcopy(fed.model)
    except Exception as error:  # __deepcopy__ and __reduce__ are the user's
        raise CheckFailed(f"copy.deepcopy fails ({sentence(error)}): {remedy(error, COPY)}") from error
    return "it can be copied"


def ends_in_softmax(fed: Federation) -> bool:
    """Whether its outputs are probabilities, of which the cross-entropy takes the softmax a second time."""
    made = outputs(fed)
    sums_to_one = bool(((made.sum(-1) - 1).abs() < UNIT).all())
    return is_cross_entropy(fed.loss) and made.shape[-1] > 1 and bool((made >= 0).all()) and sums_to_one


SOFTMAX = (
    "its outputs are probabilities (none is negative, they sum to one), of which the cross-entropy takes the softmax again: "
    "gradients are weaker and learning is slower; let it return logits, without its last softmax"
)


def try_derivatives(fed: Federation) -> str:
    """Compare the network's second derivative, which every matching attack follows, with the change of the first."""
    data = fed.shards.dataset
    size = min(PAIR, fed.shards.batch_size)
    known = Knowledge(fed.model, fed.chain, data.shape, data.classes, size, data.mean, data.std, loss=fed.loss)
    found = differentiation_of(known, fed.initial()[0], one_pass=False)
    if found.note:
        raise CheckFailed(f"{found.note}; let forward compute with tensors throughout, or take another layer")
    return "as the gradient changes"


def _further_arguments(model: nn.Module) -> list[str]:
    """The arguments of its forward without a default, after the first."""
    empty, several = inspect.Parameter.empty, (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    taken = [p for p in inspect.signature(model.forward).parameters.values() if p.kind not in several]
    return [p.name for p in taken[1:] if p.default is empty]
