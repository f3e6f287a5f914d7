"""Infers the clients' defense from the traces that it leaves in their updates.

A sign leaves one magnitude, a clip the same norm at several clients, pruning the same share in every tensor, a mask zeros
independent of size. Zeros also occur without a defense: a unit that is off for every example has no gradient. So sparsity
is judged only where no network makes zeros. The classifier's signals p - y are never zero, hence a column of its weight is
zero as a whole or not at all; a bias is zero only with its whole row, a normalisation's weight only with its bias. One
defense is inferred; several together are reported as the first that fits.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from fedgauge.attacks.base import Wave
from fedgauge.attacks.defense_inference.clip import find_clip
from fedgauge.attacks.defense_inference.evidence import Inferred, UpdateEvidence
from fedgauge.attacks.defense_inference.noise import find_noise
from fedgauge.attacks.defense_inference.sign import find_sign
from fedgauge.attacks.defense_inference.sparsity import find_sparsity
from fedgauge.client.training import local_sgd
from fedgauge.client.update import Update


def infer(
    updates: Wave | Sequence[Update], model: nn.Module, local: local_sgd, batch_size: int, members: int = 1
) -> Inferred:
    """The defense that explains the updates of one round or of several.

    Args:
        model: tells which tensors can have zeros without a defense.
        local: the local training, as agreed in the federation.
        batch_size: examples that a client trains on in a round.
        members: clients averaged in each update, under a secure sum.
    """
    if isinstance(updates, Wave):
        updates = [updates.alone(k) for k in range(len(updates))]
    nonzero = [u for u in updates if any(bool(t.any()) for t in u.values())]
    read = UpdateEvidence(nonzero, model, local, batch_size, members)
    if not read.updates:
        inferred = read.verdict("none", {}, None, "the updates are zero", 0.0)
    else:
        inferred = find_sign(read) or find_sparsity(read) or find_clip(read) or find_noise(read)
    return replace(inferred, updates=len(updates))
