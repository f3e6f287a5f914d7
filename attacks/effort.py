"""Attacks by effort: a scenario that names none gets those that fit the federation, with budgets; others are left out.

The choice reads only the agreed protocol: the kind of data, the network, the chain. It reads nothing of the machine, so that a
scenario means the same audit everywhere.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal, get_args

from torch import nn

from fedgauge.attacks.engine.computation import InputLayer, dense_input_layer
from fedgauge.attacks.exact.patch_embedding import embeds_patches
from fedgauge.attacks.exact.recursive import stages_of
from fedgauge.attacks.limits import noise_is_known
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.attacks.plan import ATTACK, MEMBERSHIP
from fedgauge.attacks.problem import Unattackable
from fedgauge.client.components import Table
from fedgauge.client.federation import Federation
from fedgauge.client.training import StochasticLayer

Effort = Literal["quick", "standard", "thorough"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)
ITERATIONS = {"quick": 100, "standard": 300, "thorough": 1000}
FAST = 0.3  # rate of the tuned search: 200 to 1,000 iterations are few for the published .1
GENERATED = 3 * 64 * 64  # values of an example, up to which a generator is trained in a minute or two
RIDGE_PARAMETERS = 1_000_000  # of a network, up to which a regression on its whole updates stays cheap


def attacks_by_effort(effort: Effort, federation: Federation) -> list[Table]:
    """The [[attack]] tables of an effort; more effort keeps each attack of less, with at least its budget."""
    setting = _Setting(federation)
    groups = (*type(modality_of(federation.shards.dataset)).attacks, MEMBERSHIP)
    own = {entry.name for entry in ATTACK.entries() if entry.group in groups}
    spent = ITERATIONS[effort]
    return [
        {**choice.table, "iterations": spent} if choice.searches else dict(choice.table)
        for choice in _choices()
        if choice.table["use"] in own and EFFORTS.index(choice.least) <= EFFORTS.index(effort) and choice.where(setting)
    ]


@dataclass(frozen=True)
class _Setting:
    """Properties of a federation that decide which attacks can work."""

    federation: Federation

    @property
    def examples(self) -> int:
        """Behind what the server sees of one client, or of one group under a secure sum."""
        return self.federation.shards.batch_size * len(self.federation.protocol.groups(1)[0])

    @cached_property
    def noisy(self) -> bool:
        """Return whether the chain draws noise of a known density."""
        return noise_is_known(self.federation)

    @cached_property
    def dense(self) -> InputLayer | None:
        """The fully connected layer that reads the whole example; one with a bias and a ReLU if there are several."""
        try:
            return dense_input_layer(self.federation.model, self.federation.shards.dataset.shape, biased=False)
        except ValueError:  # none reads it; what else is wrong with the network is the doctor's to report
            return None

    @property
    def reads_batches(self) -> bool:
        """Return whether several examples pass such a layer with a bias and a ReLU."""
        return self.examples > 1 and self.dense is not None and self.dense.relu and bool(self.dense.call.bias)

    @property
    def pixels(self) -> int:
        return prod(self.federation.shards.dataset.shape)

    def embeds_patches(self) -> bool:
        """Return whether the network begins with a vision transformer's patches."""
        return embeds_patches(self.federation.model, self.federation.shards.dataset.shape)

    def solvable(self) -> bool:
        """Return whether the network begins with a convolution and is a chain that `recursive` solves layer by layer."""
        try:
            return self.dense is None and bool(stages_of(self.federation.model, self.federation.shards.dataset.shape))
        except Unattackable:
            return False

    def repeats(self) -> bool:
        """Return whether some client trains on the same examples in every round."""
        return min(map(len, self.federation.shards.indices)) <= self.federation.shards.batch_size

    def small(self) -> bool:
        """Return whether a regression on the network's whole updates stays cheap."""
        return sum(p.numel() for p in self.federation.model.parameters()) <= RIDGE_PARAMETERS

    def has(self, *kinds: type[nn.Module]) -> bool:
        """Return whether the network has a layer of one of these kinds."""
        return any(isinstance(module, kinds) for module in self.federation.model.modules())


@dataclass(frozen=True)
class _Choice:
    """An attack, from which effort on, and where it can work; searches: it takes the effort's iterations."""

    table: Table
    least: Effort = "quick"
    where: Callable[[_Setting], bool] = lambda setting: True
    searches: bool = True


def _choices() -> Iterator[_Choice]:
    """In the order of a report: exact attacks, searches, learned ones, membership."""
    yield _Choice({"use": "analytic"}, "quick", lambda s: s.examples == 1 and s.dense is not None, searches=False)
    yield _Choice({"use": "patch_embedding"}, "quick", lambda s: s.examples == 1 and s.embeds_patches(), searches=False)
    yield _Choice({"use": "recursive"}, "quick", lambda s: s.examples == 1 and s.solvable(), searches=False)
    yield _Choice({"use": "spear"}, "quick", lambda s: s.reads_batches and not s.noisy, searches=False)
    yield _Choice({"use": "spear_plus_plus"}, "standard", lambda s: s.reads_batches, searches=False)
    yield _Choice({"use": "exact"}, "quick", lambda s: s.examples == 1, searches=False)
    yield _Choice({"use": "dager"}, searches=False)
    yield _Choice({"use": "tag"}, "quick", lambda s: bool(getattr(s.federation.chain.local, "adaptive", False)))
    yield _Choice({"use": "tableak", "restarts": 10})
    yield _Choice({"use": "tableak", "name": "tableak_labels_given", "labels": "given", "restarts": 10}, "standard")

    yield _Choice(_search("inverting_gradients", "off"))
    yield _Choice(_search("inverting_gradients", "shadow", rate=FAST), "standard")
    yield _Choice(_search("inverting_gradients", "shadow", given=True, rate=FAST), "standard")
    yield _Choice(_search("bayes", "shadow"), "quick", lambda s: s.noisy)
    yield _Choice(_search("bayes", "shadow", given=True), "standard", lambda s: s.noisy)
    yield _Choice({"use": "leave_layer_out"}, "quick", lambda s: bool(s.federation.chain.hidden))
    yield _Choice(_search("precode_joint", "off"), "quick", lambda s: s.has(StochasticLayer))
    yield _Choice(_search("precode_joint", "shadow"), "standard", lambda s: s.has(StochasticLayer))
    yield _Choice({"use": "grad_inversion"}, "standard", lambda s: s.has(nn.modules.batchnorm._BatchNorm))
    yield _Choice(_search("gifd", "shadow"), "standard", lambda s: s.pixels <= GENERATED)
    for tune in ("off", "shadow"):  # where little hides the update, as given is often ahead
        yield _Choice(_search("gifd", tune, given=True), "thorough", lambda s: s.pixels <= GENERATED)
    yield _Choice({"use": "surrogate"}, "standard", lambda s: s.federation.chain.local.steps > 1)
    yield _Choice({"use": "several_rounds"}, "standard", lambda s: s.repeats())
    yield _Choice({"use": "lamp"}, "standard")

    for given in ({}, {"name": "ridge_inversion_labels_given", "labels": "given"}):
        table = {"use": "ridge_inversion", **given}
        yield _Choice(table, "thorough", lambda s: s.small(), searches=False)
    yield _Choice({"use": "learned_rows"}, "thorough", lambda s: s.examples == 1)
    yield _Choice({"use": "membership"}, searches=False)
    yield _Choice({"use": "membership_over_rounds"}, "standard", searches=False)


def _search(use: str, tune: str, given: bool = False, **settings: float) -> dict[str, Any]:
    """A search, named by what it knows: tuned on shadow updates, the labels given."""
    name = f"{use}{'_tuned' if tune == 'shadow' else ''}{'_labels_given' if given else ''}"
    return {"use": use, "name": name, "tune": tune, **settings, **({"labels": "given"} if given else {})}
