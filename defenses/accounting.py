"""The (epsilon, delta)-differential privacy of a chain's clipping and noise, by Google's dp-accounting.

The server is the adversary. It sees every update and knows who took part in which round, but not which of a client's examples
are in a round's batch: a fixed number, drawn anew each round without replacement. Data sets are neighbours if one record is
replaced by another, or a client's whole data by any other: what is clipped to C moves by 2 C. Of discrete noise, the accounting
includes the cost of rounding to the grid and of float32. docs/defenses.md says what an epsilon does not cover.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from fedgauge.client.chain import Chain, flat, may_read_examples
from fedgauge.client.federation import Federation
from fedgauge.client.transforms import BatchTransform, Link, UpdateDistribution, is_identity, noise_free
from fedgauge.client.update import Transform
from fedgauge.defenses.amplification import sampled_epsilon
from fedgauge.defenses.ats import ats
from fedgauge.defenses.clip import clip
from fedgauge.defenses.discrete_draws import STEPS
from fedgauge.defenses.noise import discrete, gaussian, identity, laplace

DELTA = 1e-5
FLOAT32 = 2.0**-10  # more than float32's sums and norms enlarge what a clipped example can move, as a part of it
# more than |log| of discrete over rounded normal probability up to 12 sigma, (12^2 + 1) / (24 STEPS^2); beyond lie 4e-33
DISCRETE = 2.0**-45
LITTLE = 1e-6  # noise over what can move, below which an epsilon, then above 1e11, counts as none


class NoGuarantee(ValueError):
    """No (epsilon, delta) is known to hold; the message says why."""


@dataclass(frozen=True)
class Mechanism:
    """Clipping, then noise, as one mechanism."""

    noise: Literal["normal", "laplace"]
    record: float  # the noise's sigma (or scale) over the largest change of a release if one example is left out
    client: float  # the same if all of a client's examples are left out
    uses: int  # the most releases of a round that depend on one example
    releases: int  # of a round
    sampled: bool = True  # a round depends only on the examples of its batch
    step: float = 0.0  # grid spacing in units of sigma (or scale); 0: floating-point noise


def mechanism(chain: Chain, batch_size: int, model: nn.Module | None = None) -> Mechanism:
    """The first clipping and noise of a chain.

    A chain with noise sends no buffers (`Federation.sends_buffers`) except those of BatchNorm in train mode.

    If each example is clipped, one example changes the mean of b by at most max_norm / b; if the whole is clipped, the release
    has a norm of at most max_norm. The release is a step's gradient, or after local_sgd the update.

    Raises:
        NoGuarantee: the chain lacks clipping or noise, or another link undoes their guarantee.
    """
    for name, layer in model.named_modules() if model is not None else ():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training:
            raise NoGuarantee(f"no epsilon: layer {name!r} (BatchNorm in train mode) sends statistics without noise")
    local, links = chain.local, _acting(chain)
    if not any(_width(link) > 0 for link, _ in links):
        raise NoGuarantee("the chain declares no noise, so it has no epsilon")
    largest = min(local.batch_size or batch_size, batch_size)
    size = batch_size % largest or largest  # an epoch's last batch may be smaller, and an example counts for more in it
    record = client = math.inf
    trained, reason = False, ""
    for i, (link, each) in enumerate(links):
        before = [earlier for earlier, _ in links[:i]]
        if isinstance(link, clip):
            record = min(record, link.max_norm / (size if each else 1))
            client = min(client, link.max_norm)
        elif link is local and (local.one_gradient or client == math.inf) and not each:
            record, client, trained = record * local.rate, client * local.rate, True
        elif (width := _width(link)) > 0 and client < math.inf and not each:
            releases = 1 if trained else local.gradients(batch_size)
            uses = 1 if trained else math.ceil(releases / math.ceil(batch_size / largest))
            if again := [after for after, _ in links[i + 1 :] if may_read_examples(after)]:
                raise NoGuarantee(f"no epsilon: {_name(again[0])}, after the noise, may read the examples again")
            if any(isinstance(b, BatchTransform) and not isinstance(b, ats) and not one for b, one in links):
                record, uses = client, releases  # blended before the clip, an example is in several clipped gradients
            kind: Literal["normal", "laplace"] = "normal" if _noise(link).sigma else "laplace"
            # a memory lets earlier examples change the release; SCAFFOLD's follows from what was sent
            remembers = any(isinstance(b, Link) and b.remembers and b is not local for b in before)
            step = 1 / STEPS if isinstance(link, discrete) else 0.0
            return Mechanism(kind, _over(width, record), _over(width, client), uses, releases, not remembers, step)
        elif not (isinstance(link, identity | BatchTransform) or width == 0):
            if width > 0 and each:
                reason = f"{_name(link)} acts on each example; add noise to their mean"
            elif client < math.inf:
                reason = f"{_name(link)}, between the clip and the noise, may enlarge the effect of an example"
            else:
                reason = reason or f"noise ({_name(link)}) without a clip before it bounds nothing"
            record = client = math.inf
            trained = trained or link is local
    raise NoGuarantee(f"no epsilon: {reason}")


def _over(width: float, moved: float) -> float:
    return width / moved if moved else math.inf  # a clip and a rate may be so small that their product is zero


def _acting(chain: Chain) -> Sequence[tuple[Transform, bool]]:
    """The links, each with whether it acts per example, as all links before such a one do."""
    found = list(flat(chain.links))
    last = max((i for i, (_, each) in enumerate(found) if each), default=-1)
    return [(link, i <= last) for i, (link, _) in enumerate(found)]


def _width(link: Transform) -> float:
    """The noise of a link that only adds noise; NaN if it adds none, or does not declare any."""
    noise = _noise(link)
    if isinstance(link, gaussian | laplace) or (noise.noisy and is_identity(noise_free(link))):
        return noise.sigma or noise.scale
    return math.nan


def _noise(link: Transform) -> UpdateDistribution:
    declared = link.update_distribution(UpdateDistribution()) if isinstance(link, Link) else None
    return declared or UpdateDistribution()


def _name(link: Transform) -> str:
    return type(link).__name__


@dataclass(frozen=True)
class PrivacySpent:
    """The epsilons, at one delta, for neighbours that differ in one record of a client, or in all its data."""

    record: float
    client: float


@dataclass(frozen=True)
class Accountant:
    """Adds up the privacy budget that clients have spent, whose updates have so many entries."""

    mechanism: Mechanism
    batch_size: int
    delta: float
    entries: int

    @classmethod
    def of(
        cls, federation: Federation, delta: float = DELTA, secret: bool = True, entries: int | None = None
    ) -> "Accountant":
        """For a built federation; NoGuarantee if no epsilon holds.

        Args:
            secret: whether the draw of a round's examples is hidden from the server; if not, there is no amplification.
            entries: the most in an update, if updates of other networks also count; default: those of the federation's.
        """
        model, batch_size = federation.model, federation.shards.batch_size
        entries = sum(p.numel() for p in model.parameters()) if entries is None else entries
        # who does not know the draws is a deployment's server, whose clients run the chain's deployed form
        found = mechanism(federation.chain if secret else federation.chain.deployed, batch_size, model)
        if fitted := federation.shards.dataset.fitted:
            raise NoGuarantee(f"no epsilon: {', '.join(fitted)} of [data] are computed from the examples; give them")
        return cls(replace(found, sampled=found.sampled and secret), batch_size, delta, entries)

    def spent(self, rounds: int, shard: int) -> PrivacySpent:
        """The budget of a client that took part in this many rounds and holds this many records."""
        m = self.mechanism
        part = self.batch_size / shard if m.sampled and shard > self.batch_size else 1.0
        return PrivacySpent(self._epsilon(rounds, m.record, m.uses, part), self.spent_of_client(rounds))

    def spent_of_client(self, rounds: int) -> float:
        """Return only the epsilon of all of a client's data, which is much cheaper than a record's."""
        return self._epsilon(rounds, self.mechanism.client, self.mechanism.releases)

    def _epsilon(self, rounds: int, multiplier: float, uses: int, part: float = 1.0) -> float:
        """Of rounds with so many releases each; all releases of a round use one batch, this part of the records."""
        if rounds == 0:
            return 0.0
        m, apart = self.mechanism, 0.0
        if m.step:  # the grid moves each of two updates by half a step an entry at most
            multiplier = 1 / ((1 + FLOAT32) / multiplier + m.step * math.sqrt(self.entries) / 2)
            apart = DISCRETE * self.entries * rounds * m.releases
        if m.noise == "laplace":
            return self._laplace(multiplier, rounds * uses)
        # densities within a factor of e^apart give epsilon + 2 apart, at a delta smaller by that factor
        delta = self.delta * math.exp(-apart)
        import dp_accounting  # type: ignore[import-untyped]

        # exact: k adaptive releases equal one with noise smaller by sqrt(k) (Balle & Wang, 2018; Dong et al., 2022)
        noise = multiplier / 2 / math.sqrt(rounds * uses)
        epsilon = math.inf if noise < LITTLE else float(dp_accounting.get_epsilon_gaussian(noise, delta))
        if part < 1:
            epsilon = min(epsilon, sampled_epsilon(part, multiplier / 2 / math.sqrt(uses), rounds, delta))
        return epsilon + 2 * apart

    def _laplace(self, multiplier: float, releases: int) -> float:
        """The lesser of pure epsilon and zero-concentrated privacy; no amplification is claimed.

        A difference d moves each entry's density by a factor of exp(|d_i| / b) at most: by their sum, at most sqrt(entries)
        |d| / b, purely; and that is (|d_i| / b)^2 / 2-zCDP of each, which adds up to (|d| / b)^2 / 2 (Bun & Steinke, 2016).
        """
        import dp_accounting
        from dp_accounting import rdp

        if multiplier < LITTLE:
            return math.inf
        ratio = 2 / multiplier  # |d| / b
        accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
        accountant.compose(dp_accounting.ZCDpEvent(ratio**2 / 2), releases)
        return min(releases * ratio * math.sqrt(self.entries), float(accountant.get_epsilon(self.delta)))


def records_of(federation: Federation, client: int) -> int:
    """Count a client's records; for an unknown client a batch, so that nothing is amplified."""
    shards = federation.shards
    return len(shards.indices[client]) if client < len(shards.indices) else shards.batch_size


@dataclass(frozen=True)
class PrivacyStatement:
    """The privacy budget of a run, for display."""

    record: float | None  # epsilon if one record is replaced; None: no epsilon holds
    client: float | None  # epsilon if all of a client's data is replaced; None: no epsilon holds
    delta: float  # the probability with which the epsilon may fail
    words: str  # one sentence with both, or the reason for none


def privacy_statement(
    federation: Federation,
    rounds: Mapping[int, int],
    delta: float = DELTA,
    secret: bool = True,
    entries: int | None = None,
) -> PrivacyStatement:
    """The largest budget that a client of a federation has spent.

    Args:
        rounds: by client, the number of rounds with a reply from it.
        secret, entries: as for Accountant.of.
    """
    try:
        accountant = Accountant.of(federation, delta, secret, entries)
        alike = {(n, records_of(federation, client)) for client, n in rounds.items()}  # a ledger may name many clients
        each = [accountant.spent(n, records) for n, records in alike]
        record, client = (max((getattr(s, of) for s in each), default=0.0) for of in ("record", "client"))
    except NoGuarantee as why:
        return PrivacyStatement(None, None, delta, str(why))
    if math.inf in (record, client):
        return PrivacyStatement(None, None, delta, "no epsilon: the noise is negligible compared with the clip")
    most = max(rounds.values(), default=0)
    divided = federation.protocol.data.get("partition", "iid") != "iid"
    condition = "; where no label changes, as labels divide the data among clients" if divided else ""
    words = (
        f"epsilon {record:.3g} for one record replaced, {client:.3g} for all of a client's data (delta {delta:g}; "
        f"{most} round{'s' if most != 1 else ''}{condition})"
    )
    return PrivacyStatement(record, client, delta, words)
