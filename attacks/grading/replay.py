"""The replay check: recompute one update from the true batch, to find a mismatch before it is attacked."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.attacks.base import Observation
from fedgauge.client.federation import Federation
from fedgauge.client.models.losses import is_cross_entropy
from fedgauge.client.models.vision import detached_params
from fedgauge.client.training import gradient
from fedgauge.client.update import Loss, Update, norm

TOLERANCE = 1e-4  # relative; float32 rounding on other machines' kernels stays far below


@dataclass(frozen=True)
class ReplayCheck:
    """The comparison of a recomputed update with the one that the server saw.

    Args:
        cosine: between the two; 1 for the same direction.
        relative_error: |recomputed - seen| / |seen|.
        verdict: "exact to rounding", or which ingredient differs.
    """

    round: int
    client: int
    cosine: float
    relative_error: float
    verdict: str

    @property
    def ok(self) -> bool:
        """Whether the recomputed update equals the one seen, up to rounding."""
        return self.relative_error <= TOLERANCE


def replay(federation: Federation, seen: Observation) -> ReplayCheck:
    """Recompute an observation through the whole chain with the client's seed, and say what differs, if anything."""
    if missing := set(seen.update) ^ {name for name, _ in federation.model.named_parameters()}:
        return ReplayCheck(seen.round, seen.client, 0.0, math.inf, f"names differ: {', '.join(sorted(missing))}")
    recomputed = federation.client_update(seen.params, seen.buffers, seen.client, seen.round)
    cosine, error = _compare(recomputed, seen.update)
    if error <= TOLERANCE:
        return ReplayCheck(seen.round, seen.client, cosine, error, "exact to rounding")
    return ReplayCheck(seen.round, seen.client, cosine, error, _diagnose(federation, seen, recomputed))


def _compare(recomputed: Update, seen: Update) -> tuple[float, float]:
    inner = sum(float((recomputed[k].double() * seen[k].double()).sum()) for k in seen)
    difference = float(norm({k: recomputed[k].double() - seen[k].double() for k in seen}))
    if difference == 0:  # two zero updates agree too
        return 1.0, 0.0
    size = float(norm(seen))
    sizes = size * float(norm(recomputed))
    return inner / sizes if sizes else 0.0, difference / size if size else math.inf


def _diagnose(fed: Federation, seen: Observation, recomputed: Update) -> str:
    """Change one ingredient at a time, and return the first that explains the update seen."""
    cosine, _ = _compare(recomputed, seen.update)
    if cosine > 1 - 1e-6:
        ratio = float(norm(seen.update)) / float(norm(recomputed))
        return f"same direction, {ratio:.6g} times the size: the learning rate or the loss's scale (mean, sum) differs"
    for ingredient, recompute in _alternatives(fed, seen, recomputed).items():
        if _compare(recompute(), seen.update)[1] <= TOLERANCE:
            return ingredient
    return "no single known ingredient explains it: compare seed, data order, model, chain and versions on both sides"


def _alternatives(fed: Federation, seen: Observation, recomputed: Update) -> Mapping[str, Callable[[], Update]]:
    def client(
        buffers: Mapping[str, Tensor] = seen.buffers,
        normalised: bool = True,
        flip: bool = False,
        loss: Loss | None = None,
    ) -> Update:
        normalise = fed.shards.dataset.normalise if normalised else None
        compute = fed.chain(gradient(fed.model, fed.loss if loss is None else loss, normalise=normalise))
        training = fed.model.training
        fed.model.train(training != flip)
        try:
            return fed.client_update(seen.params, buffers, seen.client, seen.round, compute)
        finally:
            fed.model.train(training)
            fed.load_buffers(seen.buffers)

    def undefended() -> Update:
        bare = fed.chain.local(fed.gradient)
        return fed.client_update(seen.params, seen.buffers, seen.client, seen.round, bare)

    def reordered() -> Update:
        names = list(detached_params(fed.model))
        return dict(zip(names, reversed([recomputed[k] for k in names]), strict=True))

    alternatives: dict[str, Callable[[], Update]] = {
        "normalisation differs: the client feeds raw pixels": lambda: client(normalised=False),
        "the chain differs: the update carries no defense": undefended,
    }
    if not is_cross_entropy(fed.loss):
        alternatives["the loss differs: the client minimises the plain cross-entropy"] = lambda: client(
            loss=F.cross_entropy
        )
    if any(isinstance(m, nn.modules.dropout._DropoutNd | nn.modules.batchnorm._BatchNorm) for m in fed.model.modules()):
        mode = "eval" if fed.model.training else "train"
        alternatives[f"the model's mode differs: the client runs dropout or BatchNorm in {mode} mode"] = lambda: client(
            flip=True
        )
        alternatives["buffers differ: the client uses fresh BatchNorm statistics"] = lambda: client(
            _fresh(seen.buffers)
        )
    if all(a.shape == b.shape for a, b in zip(recomputed.values(), reversed(list(recomputed.values())), strict=True)):
        alternatives["the order of the parameters differs"] = reordered
    return alternatives


def _fresh(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """BatchNorm's statistics before any training: mean 0, variance 1."""
    return {k: torch.ones_like(b) if k.endswith("running_var") else torch.zeros_like(b) for k, b in buffers.items()}
