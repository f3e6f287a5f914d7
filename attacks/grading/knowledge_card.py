"""Threat-model cards: an attack's threat model in one sentence, shown with its scores."""

from functools import lru_cache

import torch
from torch import nn

from fedgauge.attacks.base import LIMITS
from fedgauge.attacks.effort import budget_words
from fedgauge.attacks.measure import Measure
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.attacks.plan import PlannedAttack, describe
from fedgauge.attacks.threat_model import reveals_statistics
from fedgauge.client.federation import Federation, whole_parts
from fedgauge.client.local_training import LocalTraining
from fedgauge.client.models.losses import is_cross_entropy
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch

SEPARATOR = "; "  # of the parts of a card
NO_DERIVATIVE = (  # on the card of an attack that cannot move
    "the chain's noise-free form has no derivative, so gradient matching cannot work: give the link a differentiable mean"
)


def knowledge_card(fed: Federation, planned: PlannedAttack, server: str = "honest server") -> str:
    """The threat model in words; of a limit, the assumptions that it bounds."""
    modality = modality_of(fed.shards.dataset)
    auxiliary = modality.auxiliary(planned.images(), len(fed.shards.auxiliary))
    if planned.role == "baseline":
        labels = "the true labels (in a deployment, the restored ones), " if planned.labels == "given" else ""
        return f"{labels}{auxiliary} and nothing else"
    links = " > ".join(map(describe, fed.protocol.chain))
    batch = f"{fed.shards.batch_size} example{'s' if fed.shards.batch_size > 1 else ''} per update"
    if (sums := fed.protocol.secure_sum) is not None:
        batch += f", sum of {sums.group} clients"
    attack, local = planned.build(), fed.chain.local
    if planned.role in LIMITS and isinstance(attack, Measure):
        return SEPARATOR.join([f"chain {links}", *attack.assumes(fed, batch)])
    norms = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in fed.model.modules())
    names = [name for name, _ in fed.model.named_parameters()]
    kept = ", ".join(whole_parts([name for name in names if fed.chain.stays(name)], names))
    parts = [
        server,
        "candidates with their labels, but not which of them are members"
        if planned.tests_membership
        else f"labels {attack.label_source if planned.labels == 'restored' else planned.labels}",
        f"chain {planned.defense}: {links}",
        "the order of each epoch assumed" if isinstance(local, LocalTraining) and local.shuffle else "",
        "each client's control variates known from its earlier updates" if local.remembers else "",
        f"layers that stay at the client ({kept}) unknown, and taken at the values that the server sends"
        if kept
        else "",
        NO_DERIVATIVE if cannot_move(fed, planned) else "",
        "" if is_cross_entropy(fed.loss) else f"loss {describe(fed.protocol.loss)} known",
        batch,
        ", ".join(filter(None, (modality.condition.format(planned.lengths), auxiliary))),
        _batch_norm(fed) if norms else "",
        "each client's earlier rounds" if attack.is_stateful else "",
        "tuned on shadow updates of auxiliary examples" if planned.tune == "shadow" else "",
        "" if planned.metric else budget_words(planned),
    ]
    return SEPARATOR.join(filter(None, parts))


def _batch_norm(fed: Federation) -> str:
    if not fed.model.training:
        return "BatchNorm in eval mode, statistics known"
    returned = fed.sends_buffers and fed.protocol.secure_sum is None
    known = returned and reveals_statistics(fed.model, fed.chain, fed.shards.batch_size)
    statistics = "known from the returned buffers" if known else "unknown"
    return f"BatchNorm in train mode, the batch's statistics {statistics}"


def cannot_move(fed: Federation, planned: PlannedAttack) -> bool:
    """Return whether an attack descends through the clients' chain, and the chain has no derivative."""
    return planned.defense == "known" and planned.build().needs_derivative and _is_flat(fed)


@lru_cache(maxsize=1)
def _is_flat(fed: Federation) -> bool:
    """Return whether the chain's noise-free form has a zero derivative by its input gradients."""
    params, rng = fed.initial()[0], generator(fed.protocol.seed, "derivative")
    given = {k: torch.randn(t.shape, generator=rng).to(t).requires_grad_() for k, t in params.items()}
    batch = Batch(torch.zeros(2, *fed.shards.dataset.shape), torch.zeros(2, dtype=torch.int64))
    update = fed.chain.mean(lambda *_: given)(params, batch, None)
    if not any(bool(t.any()) for t in update.values()):
        return False
    projected = torch.stack([(t * torch.randn(t.shape, generator=rng).to(t)).sum() for t in update.values()]).sum()
    if not projected.requires_grad:
        return True
    slopes = torch.autograd.grad(projected, list(given.values()), allow_unused=True)
    return not any(slope is not None and bool(slope.any()) for slope in slopes)
