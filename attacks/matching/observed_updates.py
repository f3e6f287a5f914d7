"""The observed updates that problems are matched to, in the form that the likelihood needs."""

import copy

import torch
from torch import Tensor

from fedgauge.attacks.engine.distances import (
    InnerProducts,
    between,
)
from fedgauge.attacks.engine.gradients.factored import FactoredGradient, factored, flattened
from fedgauge.client.update import Update

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
        """The same, with given tensors instead of gathered ones."""
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
        """One tensor (N, ...)."""
        return self.form("tensor", name)[0]

    def formed(self) -> Update:
        """The updates."""
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
        """Inner products with a tensor of another update."""
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
