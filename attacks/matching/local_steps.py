"""Local steps over slices in an unknown order: each epoch has its own copy of the images, tied by an order-invariant term.

Data leakage in federated averaging (Dimitrov et al., TMLR 2022, section 4.2). With one set of images, the search would have
to know the slice of each image in each epoch. A copy for every epoch removes that need, but adds freedom: each copy can be
wrong in a different way. The tie limits that freedom; at the end the copies are paired and averaged.
"""

import torch
from torch import Tensor

from fedgauge.client.chain import Chain
from fedgauge.client.pairing import assigned


def epochs(chain: Chain, batch_size: int) -> int:
    """Count the passes of the local steps through the batch; 1 if every step takes the whole batch.

    Raises:
        ValueError: local_sgd's slices do not divide the batch, or it is a sum of several clients.
    """
    local = chain.local
    if chain.slice_of(batch_size) * chain.parts >= batch_size or local.batch_size is None:
        return 1
    slices = -(-batch_size // local.batch_size)
    if chain.parts > 1 or (local.plain and batch_size % local.batch_size):
        what = f"a sum of clients, or slices of {local.batch_size} that do not divide {batch_size} examples"
        raise ValueError(f"epochs cannot be tied for {what}: describe the training by local_training")
    return -(-local.gradients(batch_size) // slices)


def aggregate_gap(x: Tensor, count: int) -> Tensor:
    """The distance (N,) between the epochs' mean images, for copies x (N, count * B, ...).

    The mean over all pairs of epochs of |g(copies of one) - g(copies of the other)|^2 / entries (the paper's L_inv with
    the squared distance), g the mean over an epoch's images.
    """
    aggregates = _apart(x, count).mean(2)
    centred = aggregates - aggregates.mean(1, keepdim=True)  # the mean over pairs is twice the variance
    return 2 * centred.square().flatten(1).mean(1)


def pair_epochs(x: Tensor, labels: Tensor | None, count: int) -> Tensor:
    """For each epoch, which of its copies belongs to each of the first epoch's (N, count, B), by least squared distance.

    Args:
        labels: (N, count * B); only copies of the same label are paired.
    """
    copies = _apart(x.detach(), count).flatten(3).double().cpu().nan_to_num()
    costs = (copies[:, :1, :, None] - copies[:, :, None]).square().sum(4)  # (N, count, B of the first, B)
    if labels is not None:
        names = _apart(labels.cpu(), count)
        costs += (names[:, :1, :, None] != names[:, :, None]) * (1 + costs.sum((2, 3), keepdim=True))
    return torch.stack([torch.stack([assigned(cost) for cost in one]) for one in costs]).to(x.device)


def averaged(t: Tensor, order: Tensor) -> Tensor:
    """The mean (N, B, ...) over epochs of copies (N, count * B, ...), in the order (N, count, B) that pairs them."""
    copies = _apart(t, order.shape[1])
    return copies.gather(2, order.view(*order.shape, *[1] * (copies.dim() - 3)).expand_as(copies)).mean(1)


def _apart(t: Tensor, count: int) -> Tensor:
    """(N, count * B, ...) to (N, count, B, ...)."""
    return t.view(len(t), count, -1, *t.shape[2:])
