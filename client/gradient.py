"""The bare client: the gradient of a model's loss, with layers that draw or keep statistics."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from fedgauge.client.models.losses import loss_of
from fedgauge.client.transforms import transformed
from fedgauge.client.update import Batch, Loss, Params, Update, UpdateFn


class StochasticLayer(nn.Module):
    """A layer that draws random numbers in its forward pass and may add to the loss: the base of a defense of the model."""

    rng: Generator | None = None  # source of its draws; None: it uses their mean
    noise: Tensor | None = None  # standard normal draws to use instead, e.g. an attacker's variable; None: its own
    penalty: Tensor | None = None  # a scalar that the latest pass adds to the loss; None: nothing
    drawn: int = 0  # numbers that it draws for an example: noise is (B, drawn); 0: unknown

    def __getstate__(self) -> dict[str, object]:
        """Without the state of a pass: its graph cannot be copied."""
        return {k: v for k, v in self.__dict__.items() if k not in ("rng", "noise", "penalty")}


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode; afterwards restore each layer's mode."""
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def drawing(model: nn.Module, rng: Generator | None) -> Iterator[Sequence[StochasticLayer]]:
    """Give the stochastic layers a generator, and dropout a seed from it; afterwards the state of the pass is dropped."""
    layers = [m for m in model.modules() if isinstance(m, StochasticLayer)]
    drops = rng is not None and any(isinstance(m, _DropoutNd) and m.training and m.p for m in model.modules())
    for layer in layers:
        layer.rng = rng
    try:
        with torch.random.fork_rng(devices=[], enabled=drops):
            if drops:
                torch.manual_seed(int(torch.randint(2**62, (), generator=rng)))
            yield layers
    finally:
        for layer in layers:
            layer.rng = layer.penalty = None


def gradient(
    model: nn.Module,
    loss: Loss = F.cross_entropy,
    normalise: Callable[[Tensor], Tensor] | None = None,
    track: bool = False,
    plain: bool = False,
) -> UpdateFn:
    """The bare client: the loss's gradient by every parameter, summed or averaged over the batch as the loss does.

    Penalties of the model's `StochasticLayer` layers are part of the loss. Under a transform such as vmap, it is computed by
    torch.func, elsewhere by plain autograd.

    Args:
        model: the update has the names of its parameters; its buffers are used as they are.
        loss: (logits (B, classes), y) -> scalar.
        normalise: applied to x before the model, so that a batch stays in [0, 1] pixels.
        track: whether BatchNorm in train mode updates its running statistics, as at a client; not at an attacker.
        plain: plain autograd at once. It does not work under vmap.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> batch = Batch(torch.tensor([[2.0]]), torch.tensor([[0.0]]))
        >>> gradient(model, loss=lambda logits, y: (logits - y).sum())({"weight": torch.ones(1, 1)}, batch, None)
        {'weight': tensor([[2.]])}
    """

    def compute(params: Params, batch: Batch, rng: Generator | None) -> Update:
        x = batch.x if normalise is None else normalise(batch.x)

        with without_running_stats(model) as tracking, drawing(model, rng) as layers:
            held = {} if track else _kept(model)

            def objective(at: Params) -> Tensor:
                value = loss_of(loss, functional_call(model, {**at, **held}, (x,)), batch.y, x)
                for layer in layers:
                    value = value if layer.penalty is None else value + layer.penalty
                return value

            under_func = not plain and transformed()
            update = dict(grad(objective)(params)) if under_func else _plain(objective, params, like_func=not plain)
        if track and tracking:
            with torch.no_grad():
                functional_call(model, params, (x,))
        return update

    return compute


def _kept(model: nn.Module) -> Params:
    """Copies of the buffers that layers in train mode may move (spectral norm), as an attacker's passes must not."""
    moving = [m for m in model.modules() if m.training and m._buffers and not isinstance(m, _NormBase)]
    held = {id(b) for m in moving for b in m.buffers(recurse=False)}
    return {name: b.clone() for name, b in model.named_buffers() if id(b) in held} if held else {}


def _plain(objective: Callable[[Params], Tensor], params: Params, like_func: bool) -> Update:
    """The gradient by plain autograd: torch.func would import torch's compiler first, which takes longer than all else.

    Args:
        like_func: to the last bit as torch.func, whose derivatives are always of a form that can be differentiated further.
    """
    if not params:  # nothing is trained
        return {}
    at = {k: p if p.requires_grad else p.detach().requires_grad_() for k, p in params.items()}
    asked = torch.is_grad_enabled()
    with torch.enable_grad():
        value = objective(at)
        if not value.requires_grad:  # the loss depends on nothing that is trained
            return {k: torch.zeros_like(p) for k, p in params.items()}
        # as torch.func: differentiable only by what the caller can differentiate by
        further = asked and bool(_leaves(value) - {p for k, p in at.items() if not params[k].requires_grad})
        try:
            kept = further or like_func
            slopes = torch.autograd.grad(value, [*at.values()], create_graph=kept, materialize_grads=True)
        except RuntimeError as error:  # a backward of the user's own may refuse to be differentiated further
            if further or not like_func or isinstance(error, torch.OutOfMemoryError):
                raise
            return _plain(objective, params, like_func=False)
    return {k: slope if further else slope.detach() for k, slope in zip(at, slopes, strict=True)}


def _leaves(value: Tensor) -> set[Tensor]:
    """The tensors by which a value can be differentiated."""
    found: set[Tensor] = set()
    seen, waiting = set(), [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found |= {node.variable} if hasattr(node, "variable") else set()
        waiting += [before for before, _ in node.next_functions]
    return found


@contextmanager
def without_running_stats(model: nn.Module) -> Iterator[Sequence[nn.Module]]:
    """Norms in train mode normalise by the batch without moving their running statistics, which grad and vmap refuse.

    Yields the layers with held statistics.
    """
    norms = [m for m in model.modules() if isinstance(m, _NormBase)]
    tracking = [m for m in norms if m.training and m.track_running_stats]
    held = [(m._buffers, m.running_mean, m.running_var) for m in tracking if isinstance(m, _InstanceNorm)]
    for layer in tracking:
        layer.track_running_stats = False
    for buffers, _, _ in held:  # an instance norm would move them all the same
        buffers.update(running_mean=None, running_var=None)
    try:
        yield tracking
    finally:
        for layer in tracking:
            layer.track_running_stats = True
        for buffers, mean, variance in held:
            buffers.update(running_mean=mean, running_var=variance)
