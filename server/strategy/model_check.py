"""Whether a network can still be trained with some weights: its loss and gradient on public examples are finite numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call

from fedgauge.attacks.engine.batch_limiter import exhausted
from fedgauge.client.data.images import batch_of
from fedgauge.client.federation import Federation
from fedgauge.client.training import evaluated
from fedgauge.client.update import Params

EXAMPLES = 8  # of the held-out test set


@dataclass(frozen=True, eq=False)
class ModelCheck:
    """Tries weights on a few of the federation's test examples, in evaluation mode; it changes nothing."""

    federation: Federation

    def __call__(self, params: Params, buffers: Mapping[str, Tensor]) -> str:
        """What is wrong with these weights and buffers, as a phrase; empty if nothing is."""
        dataset = self.federation.shards.dataset
        x, y = batch_of(dataset.x_test, dataset.y_test, torch.arange(min(EXAMPLES, len(dataset.y_test))))
        leaves = {k: t.detach().clone().requires_grad_(t.is_floating_point()) for k, t in params.items()}
        try:
            return self._flaw(leaves, buffers, x, y)
        except Exception as error:
            # a user's model or loss may raise anything over numbers that are extreme or not finite
            if exhausted(error):
                raise
            return f"the model fails with them ({type(error).__name__})"

    def _flaw(self, leaves: Params, buffers: Mapping[str, Tensor], x: Tensor, y: Tensor) -> str:
        model, dataset = self.federation.model, self.federation.shards.dataset
        with evaluated(model), torch.random.fork_rng(devices=[]), torch.enable_grad():
            logits = functional_call(model, {**leaves, **buffers}, (dataset.normalise(x),))
            loss = self.federation.loss(logits, y)
            if not torch.isfinite(loss):
                return "the model's loss with them is not finite"
            wanted = [t for t in leaves.values() if t.requires_grad]
            gradient = torch.autograd.grad(loss, wanted, allow_unused=True)
        finite = all(torch.isfinite(g).all() for g in gradient if g is not None)
        return "" if finite else "the model's gradient with them is not finite"
