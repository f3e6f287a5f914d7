"""Inference: what a defense leaves in the updates betrays which one it was.

A sign leaves one magnitude, a clip the same norm at several clients, pruning the same count in every tensor, a mask zeros
without regard to size. Zeros also come by nature: a unit that is off for every example has no gradient. So sparsity is read
where nature leaves none: the classifier's signals p - y are zero nowhere, hence a column of its weight is zero as a whole or
not at all; a bias is zero only with its whole row; a normalisation's weight only with its bias. One defense is looked for;
what several leave together is read as the first that is found.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from fedgauge.attacks.base import Wave
from fedgauge.attacks.inference.clip import find_clip
from fedgauge.attacks.inference.evidence import Inferred, UpdateEvidence
from fedgauge.attacks.inference.noise import find_noise
from fedgauge.attacks.inference.sign import find_sign
from fedgauge.attacks.inference.sparsity import find_sparsity
from fedgauge.client.training import local_sgd
from fedgauge.client.update import Update


def infer(
    updates: Wave | Sequence[Update], model: nn.Module, local: local_sgd, batch_size: int, members: int = 1
) -> Inferred:
    """The defense of a federation of which only updates were seen: of one round, or of several.

    Args:
        model: tells which tensors can have zeros by nature.
        local: the local training, as agreed.
        batch_size: examples of a client's round.
        members: clients whose mean each update is, under a secure sum.
    """
    if isinstance(updates, Wave):
        updates = [updates.alone(k) for k in range(len(updates))]
    told = [u for u in updates if any(bool(t.any()) for t in u.values())]
    read = UpdateEvidence(told, model, local, batch_size, members)
    if not read.updates:
        found = read.verdict("none", {}, None, "the updates are zero", 0.0)
    else:
        found = find_sign(read) or find_sparsity(read) or find_clip(read) or find_noise(read)
    return replace(found, updates=len(updates))
