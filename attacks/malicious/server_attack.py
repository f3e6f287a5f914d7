"""Interfaces of server attacks: what a malicious server sends in place of the agreed weights, and decoders that delegate."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from fedgauge.attacks.base import Attack, Budget, Knowledge, Observation, Reconstruction, Streams, Wave
from fedgauge.attacks.engine.computation import classifier
from fedgauge.client.components import Checked, ComponentKind, SpecError, Table, call
from fedgauge.client.transforms import UpdateTransform
from fedgauge.client.update import Params, Update


class ServerAttack(Checked, ABC):
    """A malicious server's alteration of its messages, as a frozen dataclass; its decoder is an Attack in the same file."""

    @property
    def architecture(self) -> Table | None:
        """The component that alters the whole federation's network before training; None: the agreed network stays."""
        return None

    @property
    def is_stateful(self) -> bool:
        """Return whether it uses a client's earlier updates."""
        return False

    def for_member(self, place: int) -> "ServerAttack":
        """The attack on one client of a secure sum, which is the place-th there; by default all are sent the same weights."""
        return self

    @abstractmethod
    def craft(self, sent: Params, known: Knowledge, rng: Generator, seen: Sequence[Observation] = ()) -> Params:
        """Return the altered weights to send to one client, named and shaped as `sent`, which is not modified.

        Args:
            known: the network (with the malicious architecture), shapes, public images: what any server knows.
            seen: this client's updates under this server attack in earlier rounds, oldest first, if it is stateful: only the
                classifier's part of weights and updates.

        Raises:
            ValueError: the network lacks what the attack needs; the message says what.
        """


SERVER_ATTACK = ComponentKind("a server attack", ("fedgauge.server_attacks",), ServerAttack)


def craft_weights(
    attack: ServerAttack,
    where: str,
    sent: Params,
    known: Knowledge,
    rng: Generator,
    seen: Sequence[Observation] = (),
    place: int = 0,
) -> Params:
    """Craft a malicious server's message to one client, for runs, paper tables, checks and experiments.

    Args:
        where: names the attack in an error.
        seen: the client's earlier updates under this attack; only what the attack may use of them reaches it.
        place: of the client in its secure sum.

    Raises:
        SpecError: the network lacks what the attack needs, or the weights are not finite.
    """
    own = call(attack.for_member, {"place": place}, where)
    earlier = [classifier_only(o, known) for o in seen] if own.is_stateful else []
    arguments = {"sent": sent, "known": known, "rng": rng, "seen": earlier}
    crafted = call(own.craft, arguments, where)
    if not isinstance(crafted, Mapping) or not all(isinstance(t, Tensor) for t in crafted.values()):
        raise SpecError(f"{where}: craft must return the weights by name, and returned a {type(crafted).__name__}")
    made = {k: t.detach().contiguous() for k, t in crafted.items()}
    if not all(bool(t.isfinite().all()) for t in made.values()):  # this client's update would be refused for it
        raise SpecError(f"{where}: the crafted weights are not finite")
    return made


def fill_with_mean(x: Tensor, size: int, known: Knowledge) -> Tensor:
    """Fill x (n, ...) up to a batch (size, ...) with the mean public image."""
    if len(x) >= size:
        return x[:size]
    return torch.cat([x, known.public.x.mean(0).to(x).expand(size - len(x), *known.shape)])


def classifier_only(seen: Observation, known: Knowledge) -> Observation:
    """The classifier's part of an observation: a run's full updates would fill the server's memory."""
    name, parts = classifier(known.model, known.shape), (seen.params, seen.update)
    params, update = ({k: t for k, t in part.items() if k.startswith(f"{name}.")} for part in parts)
    return replace(seen, params=params, update=update, buffers={}, correction={}, returned={})


def check_one_gradient(known: Knowledge) -> None:
    """ValueError where an update is not one gradient of the whole batch."""
    local, parts = known.chain.local, known.chain.slice_of(known.batch_size) < known.batch_size
    if parts or not local.one_gradient:
        taken = local.words if not local.one_gradient else "steps on parts of it"
        raise ValueError(f"it reads one gradient of the batch, and the clients take {taken}")


def with_zero_classifier(made: Params, known: Knowledge, zero: bool = True) -> Params:
    """The weights with a classifier of zeros, if asked: the inputs of a batch can then be separated (decoding.py)."""
    layer = classifier(known.model, known.shape)
    ours = {k: torch.zeros_like(t) for k, t in made.items() if k in (f"{layer}.weight", f"{layer}.bias")}
    return {**made, **ours} if zero else made


@dataclass(frozen=True)
class OmittedParameters(UpdateTransform):
    """A link in the attacker's model of the chain: leaves out parameters with updates that contain other clients' parts."""

    names: tuple[str, ...]

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return {k: torch.zeros_like(t) if k in self.names else t for k, t in update.items()}


def delegated(
    attack: Attack,
    wave: Wave,
    isolated: Knowledge,
    known: Knowledge,
    budget: Budget,
    streams: Streams,
    notes: Sequence[str],
) -> list[Reconstruction]:
    """Another attack's reconstruction of an isolated part of each observation, filled up to a batch.

    Args:
        isolated: threat model of the isolated part; known: of the whole batch.
        notes: for each observation, the beginning of the reason.
    """
    filled = []
    for result, note in zip(attack.reconstruct(wave, isolated, budget, streams), notes, strict=True):
        if result.x is not None:
            reason = "; ".join(filter(None, (note, result.reason)))
            result = replace(result, x=fill_with_mean(result.x, known.batch_size, known), y=None, reason=reason)
        filled.append(result)
    return filled
