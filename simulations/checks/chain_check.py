"""Check each link of the chain separately, as a client runs it and as an attacker differentiates it.

The link wraps a small client. Its update is a real gradient that grows with the brightness of the batch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor
from torch.func import grad, vmap

from fedgauge.attacks.problem import Problem
from fedgauge.attacks.source import PublicSource
from fedgauge.client.components import Table, is_own
from fedgauge.client.federation import TRANSFORM, Federation
from fedgauge.client.rng import generator
from fedgauge.client.transforms import is_per_example, noise_free
from fedgauge.client.update import Batch, Params, Transform, Update
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.checks.check_result import (
    GENERATOR,
    TENSORS_ONLY,
    CheckResult,
    Found,
    attempt,
    remedy,
    sentence,
)

SMOOTH = "give it a `mean`, the smooth form through which an attacker would differentiate"


def try_links(fed: Federation) -> Iterator[CheckResult]:
    """Run every link but local training once, as a client does."""
    for name, _, trial in _trials(fed):
        yield attempt(name, trial.trains, stops=True)


def check_links(scenario: Scenario) -> Iterator[CheckResult]:
    """Try every link but local training, as a client runs it and as an attacker differentiates it."""
    descends = any(planned.build().needs_derivative for planned in scenario.plan.attacks)
    for name, table, trial in _trials(scenario.federation):
        checks = [trial.trains, trial.repeats, trial.preserves, trial.is_differentiable]
        for check in checks if is_own(table, TRANSFORM) else (*checks, trial.declares_noise):
            stops = check not in (trial.preserves, trial.is_differentiable)
            found = attempt(name, check, descends or check != trial.is_differentiable, stops)
            if not found.works:
                break
        yield found


def _trials(fed: Federation) -> Iterator[tuple[str, Table, "_LinkTrial"]]:
    """A trial of every link but local training: the link's name for messages, its table and the trial."""
    public = PublicSource(fed).batches[0]
    whole = Batch(public.x[: fed.shards.batch_size], public.y[: fed.shards.batch_size])  # one of a secure sum's
    params, _ = fed.initial()
    base = fed.gradient(params, whole, None)
    for i, (table, link) in enumerate(zip(fed.protocol.chain, fed.chain.links, strict=True), 1):
        if link is not fed.chain.local:
            size = getattr(link, "batch_size", len(whole.y))  # of a local step
            batch = Batch(whole.x[:size], whole.y[:size])
            yield f"link #{i} ({str(table['use']).split(':')[-1]})", table, _LinkTrial(link, base, batch)


@dataclass(frozen=True, eq=False)
class _LinkTrial:
    """One link around a small client with the update `base`."""

    link: Transform
    base: Update
    batch: Batch

    def trains(self) -> Found:
        """Run it as a client does, and check the form of the update."""
        update: object = self._client(_copied(self.base))  # what a user's link returns may be anything
        if not isinstance(update, Mapping):
            return Problem("no update", "it", f"returned {type(update).__name__}", "return a tensor for each name")
        if other := sorted(update.keys() ^ self.base.keys()):
            return Problem("names", "it", f"changed which parameters the update has ({other[0]})", "return every name")
        for name, t in update.items():
            form, expected = (f"{tuple(v.shape)} of {v.dtype}" for v in (t, self.base[name]))
            if form != expected:
                return Problem("form", "it", f"made {name!r} {form}, expected {expected}", "keep shapes and dtypes")
            if not t.isfinite().all():
                return Problem("not finite", "it", f"made {name!r} not finite", "a division by zero, or a root?")
        return "runs"

    def repeats(self) -> Found:
        if not _differ(*(self._client(_copied(self.base)) for _ in range(2))):
            return "reproducible"
        return Problem("draws", "it", "draws without the generator that it gets, so no replay works", GENERATOR)

    def preserves(self) -> Found:
        self._client(given := _copied(self.base))
        if not _differ(given, self.base):
            return "reproducible"
        return Problem("changes input", "it", "changes the update that it gets", "return new tensors (not t.mul_())")

    def is_differentiable(self) -> Found:
        """Run it as an attacker does: without its noise, vectorised and differentiated."""
        form = noise_free(self.link)
        if _differ(self._run(form, None, self.base), self._run(form, None, self.base)):
            return Problem("noise", "it", "still draws without a generator, as attacks run it", GENERATOR)
        along = partial(self._along, form)
        try:
            slopes = vmap(grad(along), randomness="different")(torch.tensor([0.0, 0.5]))
        except Exception as error:  # the link is the user's
            why = f"attacks cannot differentiate through it ({sentence(error)})"
            return Problem("no derivative", "", why, remedy(error, TENSORS_ONLY))
        if slopes.any() and slopes.isfinite().all():
            return "reproducible, differentiable"
        return Problem("derivative", "", "its derivative is zero or not finite (detach(), rounding, signs?)", SMOOTH)

    def declares_noise(self) -> Found:
        first, other = (self._client(self.base, seed) for seed in ("link", "other"))
        if noise_free(self.link) is self.link and _differ(first, other):
            return Problem("undeclared noise", "it", "draws noise and declares none", GENERATOR)
        return "reproducible, differentiable"

    def _client(self, given: Update, seed: str = "link") -> Update:
        return self._run(self.link, generator("doctor", seed), given)

    def _run(self, link: Transform, rng: Generator | None, given: Update, slope: Update | None = None) -> Update:
        """Run a link around a client with the update `given`, which moves along `slope` with an example's brightness."""

        def client(params: Params, batch: Batch, rng: Generator | None) -> Update:
            if slope is None and not is_per_example(link):
                return given
            brightness = batch.x.to(torch.get_default_dtype()).mean()  # one example's, as vmap sees it
            return {k: t + brightness.to(t.dtype) * (0 if slope is None else slope[k]) for k, t in given.items()}

        return link(client)(self.base, self.batch, rng)

    def _along(self, link: Transform, step: Tensor) -> Tensor:
        """Return one number of the link's output for `base` moved by `step` in a random direction."""
        rng, base = generator("doctor", "direction"), self.base
        direction = {k: torch.randn(t.shape, generator=rng) * t.abs().mean() for k, t in base.items()}
        weights = {k: torch.randn(t.shape, generator=rng) for k, t in base.items()}
        moved = {k: t + step * direction[k] for k, t in base.items()}
        update = self._run(link, None, moved, {k: 0.1 * d for k, d in direction.items()})
        return torch.stack([(t * weights[k]).sum() for k, t in update.items()]).sum()


def _copied(update: Update) -> Update:
    return {k: t.clone() for k, t in update.items()}


def _differ(a: Update, b: Update) -> bool:
    return any(not torch.equal(t, b[k]) for k, t in a.items())
