"""Model inconsistency: a secure sum in which only one client has a gradient (Pasquini et al., CCS 2022).

Every client but the target gets weights with a last hidden layer that is dead on any input. Layers before it have no gradient, and
behind it only the bias has one. The sum is then the target's update, and the cryptography between clients cannot notice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Generator

from fedgauge.attacks.base import Budget, Knowledge, Observation, Reconstruction, Streams, Wave, not_applicable
from fedgauge.attacks.delegating import DelegatingAttack
from fedgauge.attacks.engine.computation import classifier
from fedgauge.attacks.malicious.server_attack import OmittedParameters, ServerAttack, delegated
from fedgauge.client.chain import Chain
from fedgauge.client.gradient import gradient
from fedgauge.client.transforms import GroupMean
from fedgauge.client.update import Batch, Params

FAR = 1e4  # a shift at which sigmoid and ReLU are zero and flat in float32, whatever the image
TRIED = 8  # public images at which it has to be


@dataclass(frozen=True)
class dead_layer(ServerAttack):
    """Makes the last hidden layer output zero for all clients of a secure sum but the target."""

    def craft(self, sent: Params, known: Knowledge, rng: Generator, seen: Sequence[Observation] = ()) -> Params:
        end = classifier(known.model, known.shape)
        layers = [k.removesuffix(".weight") for k in sent if k.endswith(".weight")]
        before = [layer for layer in layers[: layers.index(end)] if f"{layer}.bias" in sent]
        if not before:
            raise ValueError(f"no layer before {end!r} has a bias, by which the attack could switch it off")
        name = before[-1]
        changed = {k: t.clone() for k, t in sent.items()}
        changed[f"{name}.weight"].zero_()
        changed[f"{name}.bias"].fill_(-FAR)
        client = gradient(known.model, known.loss, normalise=known.normalise)
        public = Batch(*(t[:TRIED] for t in known.public))
        alive = [k for k, t in client(changed, public, None).items() if bool(t.count_nonzero())]
        if alive != [f"{end}.bias"]:
            raise ValueError(f"no sigmoid or ReLU behind {name!r} switches it off: {', '.join(alive)} are still active")
        return changed


@dataclass(frozen=True)
class lone_target(DelegatingAttack):
    """Inverts a secure sum as the update of the one client that got honest weights, by another attack.

    Where the chain adds noise, the sum holds the whole group's.
    """

    decodes: ClassVar[tuple[str, ...]] = ("dead_layer",)
    needs_secure_sum: ClassVar[bool] = True

    def reconstruct(self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams) -> list[Reconstruction]:
        summed = known.chain.links[-1]
        if not isinstance(summed, GroupMean):
            return not_applicable(wave, "the server sees each client's own update: there is no sum to take apart")
        # all that a dead client's gradient reaches
        others = OmittedParameters((f"{classifier(known.model, known.shape)}.bias",))
        alone = replace(
            known,
            chain=Chain((*known.chain.links[:-1], others)),
            batch_size=known.batch_size // summed.members,
            labels=None,  # which labels of a sum are the target's is unknown
        )
        update = others.apply({k: t * summed.members for k, t in wave.update.items()}, None)
        if not any(bool(t.count_nonzero()) for t in update.values()):
            return not_applicable(wave, "only the classifier's bias has a gradient: the target is not in this sum")
        note = f"{alone.batch_size} of {known.batch_size} images are the target's, if all others were sent dead weights"
        return delegated(self.inner, replace(wave, update=update), alone, known, budget, streams, [note] * len(wave))
