"""A chain that loops over the examples in per-example links: equal updates without vmap, which refuses some models."""

from torch import Generator

from fedgauge.client.chain import Chain
from fedgauge.client.transforms import per_example
from fedgauge.client.update import Batch, Params, Transform, Update, UpdateFn, average


class _one_after_the_other(per_example):
    def __call__(self, compute: UpdateFn) -> UpdateFn:
        defended = self.inner(compute)

        def mean(params: Params, batch: Batch, rng: Generator | None) -> Update:
            pairs = zip(batch.x, batch.y, strict=True)
            updates = [defended(params, Batch(x[None], y[None]), rng) for x, y in pairs]
            return average(updates, [1] * len(updates))

        return mean


def in_loops(link: Transform) -> Transform:
    """The same transform without vmap in the links that take examples one by one."""
    if isinstance(link, Chain):
        return Chain(tuple(in_loops(part) for part in link.links))
    return _one_after_the_other(in_loops(link.inner)) if isinstance(link, per_example) else link
