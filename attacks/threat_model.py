"""The threat model as data: what an attacker knows of a federation before it sees an update."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedgauge.attacks.base import Knowledge, Sentences
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.client.chain import Chain
from fedgauge.client.federation import Federation
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch


def public_knowledge(
    fed: Federation, auxiliary: Batch | None = None, chain: Chain | None = None, members: int | None = None
) -> Knowledge:
    """What the server of a federation knows: the agreed protocol and public examples.

    Args:
        auxiliary: the public examples; default: all of the federation's.
        chain: the clients' chain as the attacker believes it to be; default: the true one.
        members: clients whose updates the server sees as one, under a secure sum; default: a whole group.
    """
    dataset, members = fed.shards.dataset, members or len(fed.protocol.groups(1)[0])
    return Knowledge(
        model=fed.model,
        chain=fed.as_seen(fed.chain if chain is None else chain, members),
        shape=dataset.shape,
        classes=dataset.classes,
        batch_size=members * fed.shards.batch_size,
        mean=dataset.mean,
        std=dataset.std,
        auxiliary=fed.shards.auxiliary_batch() if auxiliary is None else auxiliary,
        loss=fed.loss,
        **modality_of(dataset).known(),
    )


def needs_truth(planned: PlannedAttack) -> bool:
    """Whether the plan gives the attacker something of the private batch: labels or lengths."""
    return "given" in (planned.labels, planned.lengths)


def chosen_auxiliary(planned: PlannedAttack, auxiliary: Batch, classes: int, seed: int) -> Batch:
    """The public examples that a planned attack has of these, with those that it makes up."""
    if planned.auxiliary is None:
        return auxiliary
    rng = generator(seed, "auxiliary", repr(sorted(planned.auxiliary.items())))
    return planned.images().of(auxiliary, classes, rng)


def with_given_truth(
    planned: PlannedAttack, known: Knowledge, batches: Sequence[Batch], in_order: bool = False
) -> Knowledge:
    """The knowledge with the labels and lengths that the plan gives the attacker; never the examples themselves.

    Labels are sorted, and lengths come by label, then by length, so that their order carries no other information.

    Args:
        in_order: labels come in the client's order, as some papers give them, and with them lengths.
    """
    if planned.labels == "given":
        if not batches[0].labelled:
            raise ValueError(
                'labels = "given" would give away the sentences: the labels of next_token are their words; use "restored"'
            )
        known = replace(
            known, labels=torch.stack([batch.y if in_order else batch.y.sort().values for batch in batches])
        )
    if planned.lengths == "given":
        if known.text is None or not isinstance(known.model, LanguageModel):
            raise ValueError('lengths = "given" is for sentences: leave it out')
        kept = in_order and planned.labels == "given"
        lengths = [_lengths(batch, known.model.pad, kept) for batch in batches]
        known = replace(known, text=Sentences(torch.stack(lengths)))
    return known


def _lengths(batch: Batch, pad: int, in_order: bool) -> Tensor:
    lengths = (batch.x != pad).sum(1)
    if in_order:
        return lengths
    if not batch.labelled:
        return lengths.sort().values
    order = sorted(range(len(lengths)), key=lambda i: (int(batch.y[i]), int(lengths[i])))
    return lengths[order]
