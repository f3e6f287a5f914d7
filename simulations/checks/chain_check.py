"""What is wrong with a link of the chain: each is tried alone, as a client runs it and as an attacker differentiates it.

A link here wraps a small client, whose update is a real gradient that grows with the brightness of the batch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from fedgauge.client.components import Table, is_own
from fedgauge.client.federation import TRANSFORM, Federation
from fedgauge.client.rng import generator
from fedgauge.client.transforms import is_per_example, noise_free
from fedgauge.client.update import Batch, Params, Transform, Update
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.checks.check_result import CheckFailed, CheckResult, attempt
from fedgauge.simulations.checks.remedies import GENERATOR, TENSORS_ONLY, remedy, sentence
from fedgauge.simulations.checks.stand_ins import StandIns

STEPS = (
    1e-4,
    1e-6,
    1e-8,
)  # of the finite difference, in double precision: within the longer a link that drops entries may jump
APART = 0.01  # relative difference from which a derivative is not that of the values
CALLS = 64  # after which a link has shown that it counts them
SMOOTH = "give it a `mean`, the smooth form through which an attacker would differentiate"


def check_chain(scenario: Scenario) -> Iterator[CheckResult]:
    """Try every link of a scenario's chain, then the whole chain unless a link is to blame."""
    fine = True
    for _, found in check_links(scenario):
        fine = fine and bool(found.works or not found.needed)
        yield found
    if fine:
        yield attempt("chain", partial(_whole, scenario.federation, _client(scenario.federation)))


def try_links(fed: Federation) -> Iterator[CheckResult]:
    """Run every link but local training once, as a client does."""
    for name, _, trial in _trials(fed):
        yield attempt(name, trial.trains)


def _trials(fed: Federation) -> Iterator[tuple[str, Table, "_LinkTrial"]]:
    """A trial of every link but local training: the link's name for messages, its table and the trial."""
    batch = _client(fed)
    params, _ = fed.initial()
    base = fed.gradient(params, batch, None)
    for i, (table, link) in enumerate(zip(fed.protocol.chain, fed.chain.links, strict=True), 1):
        if link is not fed.chain.local:
            yield f"link #{i} ({str(table['use']).split(':')[-1]})", table, _LinkTrial(link, base, batch)


def check_links(scenario: Scenario) -> Iterator[tuple[bool, CheckResult]]:
    """Try every link but local training; also whether a client can train with it, and its update be computed again."""
    descends = any(planned.build().needs_derivative for planned in scenario.plan.attacks if not planned.is_limit)
    for name, table, trial in _trials(scenario.federation):
        found = attempt(name, trial.trains)
        if found.works:
            found = attempt(name, trial.repeats)
        usable = bool(found.works)
        if found.works:
            found = attempt(name, trial.preserves)
        if found.works:
            found = attempt(name, trial.is_differentiable, needed=descends)
        if found.works and not is_own(table, TRANSFORM):
            found = attempt(name, trial.keeps_its_word)
            usable = usable and bool(found.works)
        if found.works and not is_own(table, TRANSFORM):
            found = attempt(name, trial.follows_its_derivative, needed=False)
        yield usable, found


def _client(fed: Federation) -> Batch:
    """One stand-in client's batch."""
    batch = StandIns(fed, 1).batches[0]
    return Batch(batch.x[: fed.shards.batch_size], batch.y[: fed.shards.batch_size])  # one of a secure sum's


def _whole(fed: Federation, batch: Batch) -> str:
    params, buffers = fed.initial()
    update = fed.chain(fed.gradient)(params, batch, generator("doctor", "chain"))
    fed.load_buffers(buffers)
    _compare(update, params)
    return "a synthetic update goes through it"


def _compare(update: Update, like: Params) -> None:
    if not isinstance(update, Mapping):
        raise CheckFailed(
            f"it returned {type(update).__name__}, expected an update: a tensor for each parameter's name"
        )
    if update.keys() != like.keys():
        other = sorted(update.keys() ^ like.keys())[0]
        raise CheckFailed(f"it changed which parameters the update has ({other!r}): return every name that came in")
    for name, t in update.items():
        if t.shape != like[name].shape or t.dtype != like[name].dtype:
            raise CheckFailed(
                f"it made {name!r} {tuple(t.shape)} of {t.dtype}, expected {tuple(like[name].shape)} of {like[name].dtype}: "
                "keep shapes and number types"
            )
        if not t.isfinite().all():
            raise CheckFailed(f"it made {name!r} not finite: a division by zero, or a root of something negative?")


@dataclass(frozen=True, eq=False)
class _LinkTrial:
    """One link around a small client, whose update is `base`."""

    link: Transform
    base: Update
    batch: Batch

    def trains(self) -> str:
        """As a client runs it: an update of the same form."""
        _compare(self._run(self.link, generator("doctor", "link"), _copied(self.base)), self.base)
        return "runs"

    def repeats(self) -> str:
        """The same update again from the same generator."""
        if _differ(*(self._run(self.link, generator("doctor", "link"), _copied(self.base)) for _ in range(2))):
            raise CheckFailed(
                f"it draws without the generator that it is given, so no replay can check an update: {GENERATOR}"
            )
        return "reproducible"

    def preserves(self) -> str:
        """The update that came in stays as it was."""
        given = _copied(self.base)
        self._run(self.link, generator("doctor", "link"), given)
        if _differ(given, self.base):
            raise CheckFailed(
                "it changes the update that it is given: return new tensors (t * factor, not t.mul_(factor))"
            )
        return "reproducible"

    def is_differentiable(self) -> str:
        """As an attacker takes it: without its noise, vectorised and differentiated."""
        form = noise_free(self.link)
        if _differ(self._run(form, None, self.base), self._run(form, None, self.base)):
            raise CheckFailed(f"without a generator, as attacks take it, it still draws: {GENERATOR}")
        try:
            slopes = vmap(grad(partial(self._along, form, torch.float32)), randomness="different")(
                torch.tensor([0.0, 0.5])
            )
        except Exception as error:  # the link is the user's
            raise CheckFailed(
                f"attacks cannot differentiate through it ({sentence(error)}): {remedy(error, TENSORS_ONLY)}"
            ) from error
        if not slopes.isfinite().all():
            raise CheckFailed("its derivative is not finite: a root or division at zero?")
        if not slopes.any():
            raise CheckFailed(
                f"its derivative is zero (detach(), rounding, signs?), so matching attacks would find noise: {SMOOTH}"
            )
        return "reproducible, differentiable"

    def keeps_its_word(self) -> str:
        """Noise that it draws is declared, and it does not remember earlier calls."""
        first, *others = (self._run(self.link, generator("doctor", seed), self.base) for seed in ("link", "other"))
        if noise_free(self.link) is self.link and _differ(first, others[0]):
            raise CheckFailed(f"it draws noise and declares none, so attacks take it for none: {GENERATOR}")
        for _ in range(CALLS):
            if _differ(first, self._run(self.link, generator("doctor", "link"), self.base)):
                raise CheckFailed(
                    "it makes another update of the same one after some calls, which neither replay nor attacks can know: keep "
                    "nothing between calls, or let it be a StatefulTransform, whose state is the client's"
                )
        with _Draws() as draws:  # type: ignore[no-untyped-call]  # torch annotates no modes
            self._run(noise_free(self.link), None, self.base)
        if draws.found:
            raise CheckFailed(
                "without its noise, it still draws from a generator of its own: with a fixed seed that is no noise, but "
                f"numbers that an attacker knows and takes off; {GENERATOR}"
            )
        return "reproducible, differentiable"

    def follows_its_derivative(self) -> str:
        """Whether the derivative, which attacks follow, is that of the values."""
        along = partial(self._along, noise_free(self.link), torch.float64)
        slope = grad(along)(torch.zeros((), dtype=torch.float64))
        changes = [(along(torch.tensor(h).double()) - along(torch.tensor(-h).double())) / (2 * h) for h in STEPS]
        if all((slope - c).abs() > APART * torch.maximum(slope.abs(), c.abs()) for c in changes):
            raise CheckFailed(
                "its derivative is not that of its values (detach(), float(), rounding?), and attacks follow the derivative: "
                + SMOOTH
            )
        return "reproducible, differentiable"

    def _run(self, link: Transform, rng: Generator | None, given: Update) -> Update:
        def client(params: Params, batch: Batch, rng: Generator | None) -> Update:
            if not is_per_example(link):
                return given
            return {k: t + 0 * batch.x.to(t.dtype).mean() for k, t in given.items()}  # one example's, as vmap sees it

        return link(client)(self.base, self.batch, rng)

    def _along(self, link: Transform, dtype: torch.dtype, step: Tensor) -> Tensor:
        """One number of what the link makes of an update that lies this far from `base`, in a random direction."""
        rng = generator("doctor", "direction")
        base = {k: t.to(dtype) for k, t in self.base.items()}
        direction = {k: torch.randn(t.shape, generator=rng, dtype=dtype) * t.abs().mean() for k, t in base.items()}
        weights = {k: torch.randn(t.shape, generator=rng, dtype=dtype) for k, t in base.items()}

        def client(params: Params, batch: Batch, rng: Generator | None) -> Update:
            # a link that takes examples one by one sees a different update of each
            brightness = batch.x.to(dtype).mean()
            return {k: t + (step + 0.1 * brightness) * direction[k] for k, t in base.items()}

        update = link(client)(base, self.batch, None)
        return torch.stack([(t * weights[k]).sum() for k, t in update.items()]).sum()


class _Draws(TorchDispatchMode):
    """A context that notes whether random numbers are drawn by torch, from whichever generator."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self.found = self.found or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _copied(update: Update) -> Update:
    return {k: t.clone() for k, t in update.items()}


def _differ(a: Update, b: Update) -> bool:
    return any(not torch.equal(t, b[k]) for k, t in a.items())
