"""Knowledge cards: an attack's threat model in one sentence, shown beside its scores."""

from functools import lru_cache

import torch
from torch import Generator, nn

from fedgauge.attacks.measure import Measure
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.attacks.plan import PlannedAttack, describe
from fedgauge.attacks.threat_model import tells_statistics
from fedgauge.client.data.images import batch_of
from fedgauge.client.federation import Federation, whole_parts
from fedgauge.client.local_training import LocalTraining
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.losses import is_cross_entropy
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, UpdateFn

SEPARATOR = "; "  # of the parts of a card
NO_DERIVATIVE = (  # on the card of an attack that cannot move
    "the chain's noise-free form has no derivative, so gradient matching cannot work: give the link a differentiable mean"
)


def knowledge_card(fed: Federation, planned: PlannedAttack, server: str = "honest server") -> str:
    """The threat model in words; of a limit, the assumptions that it bounds.

    Args:
        server: what the server does, in words.
    """
    modality = modality_of(fed.shards.dataset)
    auxiliary = modality.auxiliary(planned.images(), len(fed.shards.auxiliary))
    if planned.is_baseline:
        told = "the true labels (in a deployment, the restored ones), " if planned.labels == "given" else ""
        return f"{told}{auxiliary} and nothing else"
    links = " > ".join(map(describe, fed.protocol.chain))
    batch = f"{fed.shards.batch_size} example{'s' if fed.shards.batch_size > 1 else ''} an update" + _sum_of(fed)
    attack, local = planned.build(), fed.chain.local
    if planned.is_limit and isinstance(attack, Measure):
        return SEPARATOR.join([f"chain {links}", *attack.assumes(fed, batch)])
    norms = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in fed.model.modules())
    parts = [
        server,
        "candidates with their labels, and not which of them are members"
        if planned.tells_members
        else f"labels {attack.label_source if planned.labels == 'restored' else planned.labels}",
        f"chain {planned.defense}: {'the true one is ' if planned.defense == 'inferred' else ''}{links}",
        *(["the order of each epoch assumed"] if isinstance(local, LocalTraining) and local.shuffle else []),
        *(["each client's control variates known from its earlier updates"] if local.remembers else []),
        *([_private_layers(fed)] if any(fed.chain.stays(k) for k, _ in fed.model.named_parameters()) else []),
        *([NO_DERIVATIVE] if cannot_move(fed, planned) else []),
        *([] if is_cross_entropy(fed.loss) else [f"loss {describe(fed.protocol.loss)} known"]),
        batch,
        ", ".join(filter(None, (modality.condition(planned.lengths), auxiliary))),
        *([_batch_norm(fed)] if norms else []),
        *(["each client's earlier rounds"] if attack.is_stateful else []),
        *(["tuned on shadow updates of auxiliary examples"] if planned.tune == "shadow" else []),
        *([] if planned.metric else [str(planned.budget)]),
    ]
    return SEPARATOR.join(parts)


def _private_layers(fed: Federation) -> str:
    names = whole_parts(fed.model, {k for k, _ in fed.model.named_parameters() if fed.chain.stays(k)})
    return f"layers that stay at the client ({', '.join(names)}) unknown, and taken at the values that the server sends"


def _batch_norm(fed: Federation) -> str:
    if not fed.model.training:
        return "BatchNorm in eval mode, statistics known"
    told = (
        fed.sends_buffers
        and fed.protocol.secure_sum is None
        and tells_statistics(fed.model, fed.chain, fed.shards.batch_size)
    )
    return "BatchNorm in train mode, the batch's statistics " + (
        "known from the returned buffers" if told else "unknown"
    )


def cannot_move(fed: Federation, planned: PlannedAttack) -> bool:
    """Whether an attack descends through the clients' chain, and the chain has no derivative."""
    return planned.defense == "known" and planned.build().needs_derivative and _is_flat(fed)


def _sum_of(fed: Federation) -> str:
    """How many clients' updates the server sees as one."""
    together = fed.protocol.secure_sum
    if together is None:
        return ""
    fewest = f"{together.least} to " if together.least < together.group and fed.protocol.stragglers.probability else ""
    return f", sum of {fewest}{together.group} clients"


# ---------------------------------------------------------------------------------------- does the chain have a derivative


@lru_cache(maxsize=1)
def _is_flat(fed: Federation) -> bool:
    """Whether the chain's noise-free form has a zero derivative by the images where bare local training has none."""
    if len(fed.chain.links) == 1:
        return False
    batch = _test_batch(fed, generator(fed.protocol.seed, "derivative"))
    bare = fed.gradient
    try:
        update, slope = _slope(fed, fed.chain.mean(bare), batch)
        return update > 0 and slope == 0 and _slope(fed, fed.chain.local(bare), batch)[1] > 0
    except RuntimeError:  # a network without a second derivative: each attack then fails with torch's own message
        return False


def _test_batch(fed: Federation, rng: Generator) -> Batch:
    """Two examples by which an update can be differentiated: random pixels, or the embeddings of auxiliary sentences."""
    shards = fed.shards
    if isinstance(fed.model, LanguageModel):
        chosen = batch_of(shards.dataset.x, shards.dataset.y, shards.auxiliary[:2])
        return Batch(fed.model.embed(chosen.x).detach(), chosen.y)
    labels = torch.randint(shards.dataset.classes, (2,), generator=rng)
    return Batch(torch.rand(2, *shards.dataset.shape, generator=rng), labels)


def _slope(fed: Federation, client: UpdateFn, batch: Batch) -> tuple[float, float]:
    """The largest entry of an update, and of the derivative of a random projection of it by the images."""
    x = batch.x.clone().requires_grad_()
    update = client(fed.initial()[0], Batch(x, batch.y), None)
    rng = generator(fed.protocol.seed, "projection")
    projected = torch.stack([(t * torch.randn(t.shape, generator=rng)).sum() for t in update.values()]).sum()
    largest = max(float(t.detach().abs().max()) for t in update.values())
    if not projected.requires_grad:
        return largest, 0.0
    (slope,) = torch.autograd.grad(projected, x, allow_unused=True)
    return largest, 0.0 if slope is None else float(slope.abs().max())
