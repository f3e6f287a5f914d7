"""The updates of chains whose local steps take whole batches, for many problems in one pass."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from fedgauge.attacks.engine.gradients.factored import Gradients
from fedgauge.attacks.engine.gradients.per_problem import gradients, local_training_changes
from fedgauge.client.chain import Chain
from fedgauge.client.transforms import UpdateTransform, is_identity, per_example
from fedgauge.client.update import Loss, Params, Transform, Update

Step = Callable[[nn.Module, Params, Tensor, Tensor, bool], Gradients]


def whole_batch_update(
    chain: Chain, loss: Loss = F.cross_entropy, rng: torch.Generator | None = None, by_example: bool = False
) -> Step | None:
    """The update of a chain whose local steps each take one gradient of the whole batch; None for any other chain.

    Other links may change the finished update, or the only gradient. The loss is the mean of its examples' losses.

    Args:
        rng: of the links' draws, separate ones for each problem.
        by_example: the first links may take the examples of a batch one by one.
    """
    steps, place = chain.local, chain.links.index(chain.local)
    before, after = (
        [k for k in part if not is_identity(k)] for part in (chain.links[:place], chain.links[place + 1 :])
    )
    each = [k.inner for k in before if by_example and isinstance(k, per_example)]
    whole = before[len(each) :]
    if not steps.plain or steps.batch_size is not None or (before and steps.steps > 1):
        return None
    if not before and not after:
        return lambda model, params, x, y, factors: local_training_changes(model, params, x, y, steps, factors, loss)
    if not all(isinstance(link, UpdateTransform) for link in [*each, *whole, *after]):
        return None

    def through(links: list[Transform], found: Gradients) -> Update:
        for link in cast(list[UpdateTransform], links):
            found = {**vmap(lambda one, link=link: link.apply(one, rng), randomness="different")(found)}
        return cast(Update, found)

    def update(model: nn.Module, params: Params, x: Tensor, y: Tensor, factors: bool) -> Gradients:
        if not before:
            return {**through(after, local_training_changes(model, params, x, y, steps, False, loss))}
        size = x.shape[1]
        if each:
            x, y = x.flatten(0, 1)[:, None], y.flatten(0, 1)[:, None]
        found = through(each, gradients(model, params, x, y, 1.0, False, loss))
        if each:
            found = {k: t.view(-1, size, *t.shape[1:]).mean(1) for k, t in found.items()}
        return {**through(after, {k: -steps.rate * t for k, t in through(whole, {**found}).items()})}

    return update
