"""The problems of a wave: each one's objective (likelihood and priors) as a function of its images, and its gradient."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import grad_and_value, vmap
from torch.utils._pytree import tree_leaves, tree_map

from fedgauge.attacks.base import Knowledge, Streams, Wave
from fedgauge.attacks.engine.batch_limiter import raise_if_exhausted
from fedgauge.attacks.engine.compatibility import Route, differentiation_of
from fedgauge.attacks.engine.deadline import Variables
from fedgauge.attacks.engine.gradient_distances import (
    InnerProducts,
    between,
    left_out,
    likelihood,
    visible,
    visible_columns,
)
from fedgauge.attacks.engine.gradients.factored import FactoredGradient, Gradients, factored, flattened
from fedgauge.attacks.engine.gradients.per_problem import whole_batch_update
from fedgauge.attacks.matching.objective import Objective, averaged, pair_epochs
from fedgauge.attacks.matching.priors import PairedEnergy
from fedgauge.client.components import own_line
from fedgauge.client.gradient import StochasticLayer
from fedgauge.client.models.losses import is_mean
from fedgauge.client.update import Update

NEAR = 0.1  # deviation of starts from the images that a prior finds likeliest


class SearchFails(ValueError):
    """A search cannot begin or go on, as where the model raises in the middle of it; the message says why."""


Forms = dict[tuple[str, ...], tuple[Tensor, ...]]


class ObservedUpdates:
    """The observed updates of some problems; each form is gathered when it is first needed.

    Args:
        update: of all K observations.
        owners: (N,) each problem's observation.
        factors: of large layers' updates (K, ...) that are products; filled here and kept for other problems.

    Attributes:
        forms: those gathered so far: all that the same matching of other problems needs.
    """

    def __init__(self, update: Update, owners: Tensor, factors: dict[str, FactoredGradient | None]) -> None:
        self.update, self.owners, self.factors = update, owners, factors
        self.whole = torch.equal(owners, torch.arange(len(next(iter(update.values())))))
        self.forms: Forms = {}

    def with_forms(self, forms: Forms) -> "ObservedUpdates":
        other = copy.copy(self)
        other.forms = forms
        return other

    def form(self, kind: str, *names: str) -> tuple[Tensor, ...]:
        """One of the forms (tensor, flat, square, factors, columns), gathered on first use."""
        key = (kind, *names)
        if key not in self.forms:
            self.forms[key] = getattr(self, f"_{kind}")(*names)
        return self.forms[key]

    def tensor(self, name: str) -> Tensor:
        return self.form("tensor", name)[0]

    def formed(self) -> Update:
        return {name: self.tensor(name) for name in self.update}

    def together(self, expected: Update) -> InnerProducts:
        """Inner products with some tensors of another update, taken as one vector."""
        *matrices, square = self.form("flat", *expected)
        return between(matrices, flattened(expected), square)

    def columns_of(self, name: str, expected: Tensor | FactoredGradient) -> Tensor | FactoredGradient:
        """Another update's matrix (N, out, in) with the columns set to zero that are zero here."""
        columns = self.form("columns", name)[0][:, None]
        if isinstance(expected, FactoredGradient):
            return FactoredGradient(expected.signal, expected.input * columns)
        return expected * columns

    def products(self, name: str, expected: Tensor | FactoredGradient) -> InnerProducts:
        if not isinstance(expected, FactoredGradient):
            return self.together({name: expected})
        (square,) = self.form("square", name)
        if name not in self.factors:
            self.factors[name] = factored(self.update[name], expected.rows)
        other = self.tensor(name) if self.factors[name] is None else FactoredGradient(*self.form("factors", name))
        inner, own = expected.products(other)
        return InnerProducts(inner, square, own)

    def _tensor(self, name: str) -> tuple[Tensor, ...]:
        return (self.update[name] if self.whole else self.update[name][self.owners],)

    def _flat(self, *names: str) -> tuple[Tensor, ...]:
        matrices = flattened({name: self._tensor(name)[0] for name in names})  # the single tensors are not kept as well
        return *matrices, torch.stack([t.square().sum(1) for t in matrices]).sum(0)

    def _square(self, name: str) -> tuple[Tensor, ...]:
        return (torch.stack([torch.dot(t, t) for t in self.update[name].flatten(1)])[self.owners],)

    def _columns(self, name: str) -> tuple[Tensor, ...]:
        matrices = self.update[name]
        return ((matrices != 0).any(1).to(matrices)[self.owners],)

    def _factors(self, name: str) -> tuple[Tensor, ...]:
        factors = self.factors[name]
        assert factors is not None
        return tuple(factors.of(self.owners))


def over_problems(function: Callable[..., Any], *arguments: Tensor | Update, loop: bool = False) -> Any:
    """A function of one problem, mapped over the first axis of every tensor; without vmap for a single problem or in a loop."""
    count = len(tree_leaves(arguments)[0])
    if count > 1 and not loop:
        return vmap(function)(*arguments)
    results = [function(*tree_map(lambda t, i=i: t[i], arguments)) for i in range(count)]
    return tree_map(lambda *same: torch.stack(same), *results)


def _by_autograd(function: Callable[..., Tensor], by: tuple[int, ...]) -> Callable[..., Any]:
    """`grad_and_value` by plain autograd, for functions that torch.func refuses."""

    def differentiated(*arguments: Any) -> tuple[tuple[Tensor, ...], Tensor]:
        leaves = {place: arguments[place].detach().requires_grad_() for place in by}
        with torch.enable_grad():
            value = function(*(leaves.get(place, given) for place, given in enumerate(arguments)))
            return torch.autograd.grad(value, [*leaves.values()], materialize_grads=True), value.detach()

    return differentiated


def scale_of(known: Knowledge) -> tuple[Tensor, Tensor] | None:
    """Mean and deviation of public inputs by channel: the units of a search, for inputs of any scale.

    None for pixels, which their normalisation has scaled.
    """
    if known.auxiliary is None or known.high == 1.0 or known.columns is not None:
        return None
    x = known.normalise(known.auxiliary.x)
    spread, centre = torch.std_mean(x, [0, *range(2, x.dim())], keepdim=True, correction=0)
    return centre[0], torch.where(spread > 0, spread, 1.0)[0]


class KnownGradient(Function):
    """A value (N,) with known gradients by its inputs (N, ...): inputs first, then as many gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, inputs: int, *both: Tensor) -> Tensor:
        ctx.save_for_backward(*both[inputs:])
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        slopes = [s * g.view(-1, *[1] * (s.dim() - 1)) for s in ctx.saved_tensors]
        return None, None, *slopes, *[None] * len(slopes)


class Problems:
    """P = K * R problems of one wave: the objective of each as a function of its variables, and its gradients.

    Args:
        labels: (P, images) if they are known; None: they are among the variables.
        group: weight of a term that pulls an observation's restarts towards their mean.
        streams: of each observation, from which `starts` draws.
    """

    def __init__(
        self,
        objective: Objective,
        wave: Wave,
        known: Knowledge,
        labels: Tensor | None,
        restarts: int,
        dtype: torch.dtype,
        group: float = 0.0,
        streams: Streams = (),
    ):
        self.known, self.labels, self.restarts, self.group, self.streams = known, labels, restarts, group, streams
        self.training, self.epochs = objective.training, objective.training.epochs(known)
        self.dtype = dtype  # of the resulting images
        self.params, self.update = wave.params, wave.update
        self.count = len(wave) * restarts
        noise = known.chain.update_distribution
        own = objective.likelihood or likelihood(noise, known.batch_size)
        if noise is not None and noise.sparse:  # dropped entries are not compared, whichever entries a guess would drop
            own = own if objective.likelihood is None or own.of_zeros else visible(own)
            self.known = replace(known, chain=known.chain.visible)
        self.likelihood = left_out(own, known.chain.hidden)
        known = self.known
        self.parametrisation = objective.parametrisation
        self.free: Callable[[Tensor], Tensor] = lambda x: x  # of examples that are searched for themselves
        self.examples: Callable[[Tensor, Tensor], Tensor] = lambda z, y: z
        if self.parametrisation is not None:
            self.examples = self.parametrisation.bind(known)
        elif (scale := scale_of(known)) is not None:
            centre, spread = (t.to(next(iter(wave.params.values()))) for t in scale)
            self.examples, self.free = lambda z, y: centre + spread * z, lambda x: (x - centre) / spread
        bound = [(p.weight, p.bind(known, wave.params)) for p in objective.priors if p.weight]
        if wrong := [energy for _, energy in bound if not callable(energy)]:
            raise ValueError(f"a prior's bind must return a function of images, and returned {type(wrong[0]).__name__}")
        # by the name of its variable, if it has one
        self.priors = {f"latents {i}": pair for i, pair in enumerate(bound)}
        self.own = self.training.variables(known)
        generally = self.own or not is_mean(known.loss, known.classes, known.label_kind)
        step = None if generally else whole_batch_update(known.chain.mean, known.loss)
        draws = any(isinstance(m, StochasticLayer) for m in known.model.modules())  # one pass lacks its penalty
        self.way = differentiation_of(known, wave.params, step is not None and not draws)
        self.step = step if self.way.route == "one pass" else None
        # for one problem alone, torch.func's derivatives cost two to three times as much as autograd's
        self.plain_alone = self.way.composed or (step is not None and self.way.route == "vmap")
        self.factors: dict[str, FactoredGradient | None] = {}
        self._chosen: tuple[Tensor, ObservedUpdates, Tensor | None] | None = None

    @cached_property
    def plain(self) -> Knowledge:
        return replace(self.known, plain=True)

    @property
    def signed(self) -> set[str]:
        """The variables that a signed optimiser moves by the sign of the gradient."""
        return {"x", "y", *self.own} - self.training.bounds.keys()

    @property
    def units(self) -> Tensor:
        """(U, R) problems that only advance together: all restarts of an observation if a group term couples them."""
        return torch.arange(self.count).view(-1, self.restarts if self.group else 1)

    @cached_property
    def bounds(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Lowest and highest value of each variable; for images, normalised black and white, each (C, 1, 1)."""
        like = next(iter(self.params.values()))
        size = (len(self.known.mean), *[1] * (len(self.known.shape) - 1))
        ends = (self.known.normalise(torch.full(size, v).to(like)) for v in (self.known.low, self.known.high))
        black, white = map(self.free, ends)
        others = {k: (like.new_tensor(low), like.new_tensor(high)) for k, (low, high) in self.training.bounds.items()}
        return {"x": (black, white), **others}

    def starts(self, rows: Tensor, attempt: int = 0) -> Variables:
        """Fresh starts of N problems: Gaussian images (N, images, C, H, W) and logits of labels, other variables likeliest."""
        images, like = self.epochs * self.known.batch_size, next(iter(self.params.values()))
        owners, draws = rows // self.restarts, rows % self.restarts + attempt * self.restarts
        generators = [(self.streams[k], draw) for k, draw in zip(owners.tolist(), draws.tolist(), strict=True)]

        def normal(purpose: str, *size: int) -> Tensor:
            return torch.stack([torch.randn(size, generator=of(purpose, draw)) for of, draw in generators]).to(like)

        variables = {"x": normal("start", images, *self.known.shape)}
        if self.parametrisation is not None:
            variables["x"] = self.parametrisation.starts(variables["x"])
        paired = {name: prior for name, (_, prior) in self.priors.items() if isinstance(prior, PairedEnergy)}
        likeliest = next((prior.likeliest for prior in paired.values() if prior.likeliest), None)
        if self.labels is not None and likeliest is not None:
            near = likeliest(self.labels[rows.to(self.labels.device)])
            variables["x"] = near.to(like) + NEAR * variables["x"]
        if self.labels is None:
            variables["y"] = normal("labels", images, self.known.label_kind.width(self.known.classes))
        latents = {name: torch.zeros(images, prior.numbers) for name, prior in paired.items() if prior.numbers}
        for name, t in {**self.own, **latents}.items():
            variables[name] = t.to(like).repeat(len(rows), *[1] * t.dim())
        return variables

    def joined(self, variables: Variables, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The resulting images (N, B, C, H, W) of some problems, with several epochs' copies averaged, and labels (N, B)."""
        y, size = self._labels(variables, None if self.labels is None else self.labels[rows]), self.known.batch_size
        x = self.examples(variables["x"], y)
        if self.epochs > 1:
            order = pair_epochs(x, None if self.labels is None else y, self.epochs)
            x, y = averaged(x, order), y if self.labels is not None else averaged(y, order)
        return x, y[:, :size] if self.labels is not None else self.known.label_kind.decided(y)

    def _labels(self, variables: Variables, labels: Tensor | None) -> Tensor:
        return self.known.label_kind.relaxed(variables["y"]) if labels is None else labels

    def value_and_slopes(
        self, variables: Variables, rows: Tensor, likelihood_weight: float | Tensor = 1.0
    ) -> tuple[Tensor, Variables]:
        """Objectives (N,), and the gradient of their sum by the variables.

        By the model's way; where a layer refuses it for these problems, by the next slower one.
        """
        chosen = self.chosen(rows)
        while True:
            try:
                return self.differentiated(variables, *chosen, likelihood_weight)
            except Exception as error:  # a user's model may raise anything
                raise_if_exhausted(error)
                if self.way.route == "loop":
                    what = f"{type(error).__name__}: {error}{own_line(error)}"
                    why = f"the model, the chain or a prior fails on images of the descent ({what})"
                    raise SearchFails(f"{why}: let it accept any pixels") from error
                slower: Route = "loop" if self.step is None else "vmap"
                self.way, self.step = replace(self.way, route=slower), None

    def differentiated(
        self, variables: Variables, seen: ObservedUpdates, labels: Tensor | None, likelihood_weight: Tensor | float
    ) -> tuple[Tensor, Variables]:
        """`value_and_slopes` of problems given by their observed updates and labels: tensors in, tensors out."""
        leaves = {name: t.detach().requires_grad_() for name, t in variables.items()}
        with torch.enable_grad(), self.way():
            value = self._objectives(leaves, seen, labels, likelihood_weight)
            total = value.sum()
            if not total.requires_grad:  # the chain's output does not depend on the images
                return value.detach(), {name: torch.zeros_like(t) for name, t in variables.items()}
            slopes = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
        return value.detach(), dict(zip(leaves, slopes, strict=True))

    def chosen(self, rows: Tensor) -> tuple[ObservedUpdates, Tensor | None]:
        """The observed updates of some problems, and their labels if known; gathered once for the same problems."""
        if self._chosen is None or not torch.equal(self._chosen[0], rows):
            labels = None if self.labels is None else self.labels[rows]
            self._chosen = rows, ObservedUpdates(self.update, rows // self.restarts, self.factors), labels
        return self._chosen[1:]

    def _objectives(
        self, variables: Variables, seen: ObservedUpdates, labels: Tensor | None, likelihood_weight: Tensor | float
    ) -> Tensor:
        y, own = self._labels(variables, labels), {name: variables[name] for name in self.own}
        x = self.examples(variables["x"], y)
        if self.step is None:
            distances = self._generally(x, y, seen.formed(), own)
        else:
            distances = self._compare(seen, self.step(self.known.model, self.params, x, y, self.likelihood.by_products))
        objectives = likelihood_weight * distances
        if self.parametrisation is not None and self.parametrisation.weight:
            objectives = objectives + 0.5 * self.parametrisation.weight * variables["x"].flatten(1).square().sum(1)
        loop = self.way.route == "loop"
        for name, (weight, prior) in self.priors.items():
            of = [x]
            if isinstance(prior, PairedEnergy):
                of.append(variables[name] if prior.numbers else y)
            batches = [t.reshape(-1, self.known.batch_size, *t.shape[2:]) for t in of]
            energies = over_problems(prior, *batches, loop=loop)
            energies = energies if self.epochs == 1 else energies.view(-1, self.epochs).mean(1)
            objectives = objectives + weight * energies
        for term in self.training.terms(x, self.epochs, own):
            objectives = objectives + term
        if self.group and self.restarts > 1:
            together = x.view(-1, self.restarts, *x.shape[1:])
            apart = (together - together.mean(1, keepdim=True).detach()).square()
            objectives = objectives + self.group * apart.flatten(2).mean(2).flatten()
        return objectives

    def _generally(self, x: Tensor, y: Tensor, seen: Update, own: Variables) -> Tensor:
        """The distances by vmap over whole problems, or one after the other, for any chain and model."""
        loop = self.way.route == "loop" or (len(x) == 1 and self.plain_alone)
        known = self.plain if loop else self.known

        def one(x: Tensor, y: Tensor, seen: Update, *values: Tensor) -> Tensor:
            expected = self.training.update(known, self.params, x, y, seen, dict(zip(own, values, strict=True)))
            return self.likelihood(seen, expected)

        if loop and len(x) == 1:
            return cast(Tensor, over_problems(one, x, y, seen, *own.values()))
        inputs = {0: x, **({} if self.labels is not None else {1: y}), **dict(enumerate(own.values(), 3))}
        arguments: list[Tensor | Update] = [x.detach(), y.detach(), seen, *(t.detach() for t in own.values())]
        # grad inside vmap: autograd around a vmap of grad is faster, but wrong for some layers (LayerNorm in torch 2.13)
        differentiated = (_by_autograd if loop else grad_and_value)(one, tuple(inputs))
        slopes, value = over_problems(differentiated, *arguments, loop=loop)
        return cast(Tensor, KnownGradient.apply(value, len(inputs), *inputs.values(), *slopes))  # type: ignore[no-untyped-call]

    def _compare(self, seen: ObservedUpdates, expected: Gradients) -> Tensor:
        if isinstance(self.likelihood, visible_columns):
            pruned = self.likelihood.names
            expected = {k: seen.columns_of(k, t) if k in pruned else t for k, t in expected.items()}
        formed = {k: t for k, t in expected.items() if not isinstance(t, FactoredGradient)}
        if len(formed) < len(expected):
            if not self.likelihood.joint:
                return self.likelihood.of({k: seen.products(k, t) for k, t in expected.items()})
            apart = {k: seen.products(k, t) for k, t in expected.items() if k not in formed}
            return self.likelihood.of({**apart, "": seen.together(formed)} if formed else apart)
        if not self.likelihood.joint:
            return cast(Tensor, over_problems(self.likelihood, {k: seen.tensor(k) for k in formed}, formed))
        *matrices, square = seen.form("flat", *formed)
        return self.likelihood.between(matrices, flattened(formed), square)
