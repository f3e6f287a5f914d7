"""What is wrong with a network, tried on a few examples: named with the layer and the remedy."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedgauge.attacks.matching.model_check import check_lookups
from fedgauge.attacks.modality.registry import examples_of
from fedgauge.client.data.images import Dataset, batch_of
from fedgauge.client.federation import Federation
from fedgauge.client.models.losses import is_cross_entropy
from fedgauge.client.training import StochasticLayer, without_running_stats
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
    model, data = fed.model, fed.shards.dataset
    if further := _further_arguments(model):
        raise CheckFailed(
            f"its forward needs {' and '.join(map(repr, further))} besides the {examples_of(data)}: give it a default, or wrap the "
            "network in a module whose forward takes one argument"
        )
    if whole := [name for name, p in model.named_parameters() if not p.is_floating_point()]:
        raise CheckFailed(f"parameter {whole[0]!r} is not a floating-point number")
    if bad := [name for name, p in model.named_parameters() if not p.isfinite().all()]:
        raise CheckFailed(f"parameter {bad[0]!r} is not finite at the start: check how the network is initialised")
    x = inputs(fed)
    with torch.no_grad(), without_running_stats(model), _layers_named(model, data) as odd:
        logits = functional_call(model, fed.initial()[0], (x,))
    expected = (len(x), *data.y.shape[1:], data.classes)
    if not isinstance(logits, Tensor) or logits.shape != expected:
        form = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        alone = "" if isinstance(logits, Tensor) else "wrap it in a module that returns the logits alone, and "
        raise CheckFailed(
            f"it gives {form} for {len(x)} {examples_of(data)}, expected logits {expected}: {alone}let its "
            "factory take `shape` and `classes`, which it is offered"
        )
    if not logits.isfinite().all():
        first = f"; {odd[0]} is the first to give such numbers" if odd else ""
        raise CheckFailed(f"its logits are not finite{first}: check its initial weights, and mean and std of the data")
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
    with _layers_named(fed.model, data):
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


def try_again(fed: Federation) -> str:
    """Run it twice on the same examples."""
    if any(isinstance(m, StochasticLayer) for m in fed.model.modules()):
        return "it draws by design, and attacks know this"
    if not torch.equal(outputs(fed), outputs(fed)):
        raise CheckFailed(
            "two passes over the same images differ: something draws in its forward pass (functional dropout?), which the "
            "replay check cannot repeat and no attack knows; make it depend on self.training, or leave it out"
        )
    return "the same logits"


def _further_arguments(model: nn.Module) -> list[str]:
    """The arguments of its forward without a default, after the first."""
    empty, several = inspect.Parameter.empty, (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    taken = [p for p in inspect.signature(model.forward).parameters.values() if p.kind not in several]
    return [p.name for p in taken[1:] if p.default is empty]


@contextmanager
def _layers_named(model: nn.Module, data: Dataset) -> Iterator[list[str]]:
    """Turn an exception of the model into a CheckFailed that names the innermost layer at work.

    Yields a list, which gets the layers whose output is not finite, in their order.
    """
    running: list[str] = []
    odd: list[str] = []

    def enter(name: str) -> Callable[[nn.Module, tuple[object, ...]], None]:
        def hook(module: nn.Module, given: tuple[object, ...]) -> None:
            form = " x ".join(map(str, given[0].shape)) if given and isinstance(given[0], Tensor) else "its arguments"
            running.append(
                f"layer {name!r} ({type(module).__name__}) cannot take {form}" if name else "its forward fails"
            )

        return hook

    def leave(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, given: object, made: object) -> None:
            running.pop()
            if isinstance(made, Tensor) and not torch.is_grad_enabled() and not made.isfinite().all():
                odd.append(f"layer {name!r} ({type(module).__name__})" if name else "its own forward")

        return hook

    hooks: list[torch.utils.hooks.RemovableHandle] = []
    for name, module in model.named_modules():
        hooks += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave(name))]
    try:
        yield odd
    except Exception as error:  # the model is the user's
        where = running[-1] if running else "the gradient of its loss fails"
        shape = " x ".join(map(str, data.shape))
        given = f"[data] gives {examples_of(data)} of {shape}"
        fits = f"{given}: build the network for them (its factory is offered `shape` and `classes`)"
        raise CheckFailed(f"{where}: {sentence(error)}; {remedy(error, fits)}") from error
    finally:
        for hook in hooks:
            hook.remove()
