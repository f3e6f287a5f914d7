"""The updates of chains whose local steps take whole batches, for many problems in one pass."""

from collections.abc import Callable
from functools import partial
from typing import cast

from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from fedgauge.attacks.engine.gradients.factored import Gradients
from fedgauge.attacks.engine.gradients.per_problem import gradients, local_training_changes
from fedgauge.client.chain import Chain
from fedgauge.client.transforms import UpdateTransform, is_identity, noise_free
from fedgauge.client.update import Batch, Loss, Params, Update

Step = Callable[[nn.Module, Params, Tensor, Tensor, bool], Gradients]


def whole_batch_update(chain: Chain, loss: Loss = F.cross_entropy) -> Step | None:
    """The update of a chain whose local steps each take one gradient of the whole batch; None for any other chain.

    Other links may change the finished update, or the only gradient. The loss is the mean of its examples' losses.
    """
    steps, links = chain.local, [noise_free(link) for link in chain.links]
    if not steps.plain or steps.batch_size is not None:
        return None
    place = chain.links.index(steps)
    before, after = ([link for link in part if not is_identity(link)] for part in (links[:place], links[place + 1 :]))
    if not before and not after:
        return lambda model, params, x, y, factors: local_training_changes(model, params, x, y, steps, factors, loss)
    if not all(isinstance(link, UpdateTransform) for link in before + after) or (before and steps.steps > 1):
        return None
    rest = Chain(tuple([*before, steps, *after] if before else after))

    def through(model: nn.Module, params: Params, x: Tensor, y: Tensor, factors: bool) -> Gradients:
        def one(found: Gradients, x: Tensor, y: Tensor) -> Update:
            return rest(lambda *_: cast(Update, found))(params, Batch(x, y), None)

        alone = partial(gradients, factor=1.0) if before else partial(local_training_changes, local=steps)
        return {**vmap(one)(alone(model, params, x, y, factors=False, loss=loss), x, y)}

    return through
