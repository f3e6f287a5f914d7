"""Local steps over slices in an order that nobody tells the attacker: copies for each epoch, tied by what no order changes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from fedgauge.attacks.base import Budget, Knowledge, Observation, Reconstruction, Stream, Wave
from fedgauge.attacks.engine.gradient_distances import squared
from fedgauge.attacks.matching import objective
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.attacks.matching.objective import Objective, tied_epochs
from fedgauge.attacks.matching.problems import Problems
from fedgauge.attacks.matching.recipes import federated_averaging
from fedgauge.attacks.modality.image_metrics import match, psnr
from fedgauge.client.chain import Chain, chain
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import LocalTraining, local_sgd, local_training
from fedgauge.client.models.vision import detached_params, mlp
from fedgauge.client.rng import generator
from fedgauge.client.transforms import Link
from fedgauge.client.update import Batch, Params, Update, UpdateFn

SHAPE, CLASSES = (1, 8, 8), 4


def normalise(x: Tensor) -> Tensor:
    return (x - 0.5) / 0.3


@dataclass(frozen=True)
class shuffled(Link):
    """A client that takes the slices of its batch in another order in each epoch, and the examples within them."""

    orders: tuple[tuple[int, ...], ...]

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        def train(params: Params, batch: Batch, rng: torch.Generator | None) -> Update:
            order = [i for epoch in self.orders for i in epoch]
            return compute(params, Batch(batch.x[order], batch.y[order]), rng)

        return train


def blobs(n: int, rng: torch.Generator) -> Tensor:
    """Smooth images (n, 1, 8, 8)."""
    line = torch.linspace(-1, 1, 8)
    centre, width = 2 * torch.rand(n, 2, 1, 1, generator=rng) - 1, 0.3 + 0.4 * torch.rand(n, 1, 1, generator=rng)
    apart = (line - centre[:, 0]).square() + (line[:, None] - centre[:, 1]).square()
    return torch.exp(-apart / width**2)[:, None]


@dataclass(frozen=True, eq=False)
class Scene:
    """What a server sees of clients with an order of their own, an attacker who does not know it, and the truth."""

    wave: Wave
    known: Knowledge
    truth: list[Batch]


def scene(links: Chain, orders: Sequence[tuple[tuple[int, ...], ...]], n: int, hidden: int = 16) -> Scene:
    torch.manual_seed(0)
    model = mlp(SHAPE, CLASSES, (hidden,), "tanh")
    params, rng = detached_params(model), torch.Generator().manual_seed(1)
    like = next(iter(params.values()))
    truth = [Batch(blobs(n, rng).to(like), ((torch.arange(n) + k) % CLASSES).sort().values) for k in range(len(orders))]
    seen = []
    for k, (batch, order) in enumerate(zip(truth, orders, strict=True)):
        client = chain(*links.links, shuffled(order))(gradient(model, normalise=normalise))
        seen.append(Observation(1, k, params, client(params, batch, None)))
    labels = torch.stack([batch.y for batch in truth])
    known = Knowledge(model, links, SHAPE, CLASSES, n, (0.5,), (0.3,), labels=labels)
    return Scene(Wave.stack(seen), known, truth)


def streams(count: int) -> list[Stream]:
    return [partial(generator, "order", k) for k in range(count)]


def quality(found: list[Reconstruction], truth: list[Batch]) -> Tensor:
    """Mean PSNR of each batch, its images paired."""
    assert all(f.x is not None for f in found)
    pairs = [(b.x.float(), f.x.float()) for b, f in zip(truth, found, strict=True) if f.x is not None]
    return torch.stack([psnr(x, guess[match(x, guess)]).clamp(max=60).mean() for x, guess in pairs])


# ------------------------------------------------------------------------------------------------------ what it is made of


@pytest.mark.parametrize(
    ("local", "batch_size", "expected"),
    [
        (local_sgd(0.1, 6, batch_size=1), 3, 2),
        (local_sgd(0.1, 7, batch_size=1), 3, 3),
        (local_sgd(0.1, 2, batch_size=2), 4, 1),
        (local_sgd(0.1, 5), 4, 1),
        (local_sgd(0.1, 5, batch_size=4), 4, 1),
        (local_training(0.1, 7, epochs=3, batch_size=3, accumulate=2, momentum=0.5), 7, 3),
        (local_training(0.1, 7, steps=4, batch_size=3, accumulate=2, momentum=0.5), 7, 2),
        (local_training(0.1, 7, "adam", epochs=2), 7, 1),
    ],
)
def test_epochs_are_counted(local: local_sgd, batch_size: int, expected: int) -> None:
    assert objective.passes(chain(local), batch_size) == expected


def test_the_tie_is_the_mean_over_pairs_of_epochs() -> None:
    x = torch.randn(2, 3 * 4, 1, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for k in range(2):
        g = x[k].view(3, 4, 4).mean(1)
        pairs = [float((a - b).square().mean()) for a in g for b in g]
        assert float(objective.aggregate_gap(x, 3)[k]) == pytest.approx(sum(pairs) / 9, rel=1e-12)


def test_copies_are_paired_by_distance_and_averaged() -> None:
    one = torch.randn(3, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    near = one[[2, 0, 1]] + 0.01
    x = torch.stack([torch.cat([one, near]), torch.cat([near, one])])
    order = objective.pair_epochs(x, None, 2)
    assert order.tolist() == [[[0, 1, 2], [1, 2, 0]], [[0, 1, 2], [2, 0, 1]]]
    torch.testing.assert_close(objective.averaged(x, order)[0], one + 0.005)


def test_copies_of_different_labels_are_not_paired() -> None:
    x = torch.tensor([0.0, 9.0, 9.0, 0.0]).view(1, 4, 1, 1, 1)
    assert objective.pair_epochs(x, None, 2)[0, 1].tolist() == [1, 0]
    assert objective.pair_epochs(x, torch.tensor([[5, 7, 5, 7]]), 2)[0, 1].tolist() == [0, 1]


@pytest.mark.usefixtures("double")
def test_the_copies_in_the_clients_order_are_the_client() -> None:
    """Against local training as a user of torch would write it: the objective of the true copies is zero."""
    orders = ((1, 0, 3, 2), (2, 0, 1, 3))
    links = chain(local_sgd(0.3, 4, batch_size=2))
    posed = scene(links, [orders], 4)
    (batch,), model, known = posed.truth, posed.known.model, posed.known
    theta = posed.wave.params
    for epoch in orders:
        for step in (epoch[:2], epoch[2:]):
            leaves = {k: p.detach().requires_grad_() for k, p in theta.items()}
            logits = functional_call(model, leaves, (normalise(batch.x[list(step)]),))
            slopes = torch.autograd.grad(F.cross_entropy(logits, batch.y[list(step)]), list(leaves.values()))
            theta = {k: p - 0.3 * g for (k, p), g in zip(theta.items(), slopes, strict=True)}
    for k, p in posed.wave.params.items():
        torch.testing.assert_close(posed.wave.update[k][0], theta[k] - p, rtol=0, atol=1e-14)

    flat = [i for epoch in orders for i in epoch]
    objective = Objective(squared(), training=tied_epochs())
    copies = Problems(objective, posed.wave, known, batch.y[flat][None], 1, torch.float64)
    x, only = normalise(batch.x[flat])[None], torch.arange(1)
    value, slopes_there = copies.value_and_slopes({"x": x}, only)
    assert abs(float(value)) < 1e-20
    assert float(slopes_there["x"].abs().max()) < 1e-9
    torch.testing.assert_close(copies.joined({"x": x}, only)[0], x[:, :4], rtol=0, atol=1e-15)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("beside", [{"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1, "max_norm": 0.5}])
def test_copies_of_a_shuffled_training_with_a_ragged_last_batch(beside: dict[str, Any]) -> None:
    """The client draws its orders, which the attacker does not know; had it guessed them, nothing would be left over."""
    link = local_training(0.3, 5, epochs=2, batch_size=2, shuffle=True, **beside)
    assert isinstance(link, LocalTraining)
    posed = scene(chain(replace(link, shuffle=False)), [((0, 1, 2, 3, 4),)], 5)
    (batch,), model, known = posed.truth, posed.known.model, posed.known
    client = link(gradient(model, normalise=normalise))
    update = client(posed.wave.params, batch, generator("client"))
    wave = replace(posed.wave, update={k: t[None] for k, t in update.items()})
    drawn = link.order(5, generator("client"))
    flat = torch.cat([torch.cat(next(drawn)) for _ in range(6)])
    objective = Objective(squared(), training=tied_epochs())
    copies = Problems(objective, wave, replace(known, chain=chain(link)), batch.y[flat][None], 1, torch.float64)
    value, slopes = copies.value_and_slopes({"x": normalise(batch.x[flat])[None]}, torch.arange(1))
    assert abs(float(value)) < 1e-20
    assert float(slopes["x"].abs().max()) < 1e-9
    torch.testing.assert_close(
        copies.joined({"x": normalise(batch.x[flat])[None]}, torch.arange(1))[0][0], normalise(batch.x[flat[:5]])
    )


# ---------------------------------------------------------------------------------------------------------- what it gains


@pytest.mark.full
@pytest.mark.slow
def test_tied_copies_are_nearer_than_an_assumed_order() -> None:
    links = chain(local_sgd(0.1, 4, batch_size=1))  # two epochs of two slices
    posed = scene(links, [((1, 0), (0, 1)), ((0, 1), (1, 0))] * 2, 2)
    found = {}
    for name, tied in (("assumed", 0.0), ("tied", 1.0), ("copies apart", 1e-12)):
        attack = federated_averaging(tied=tied)
        results = attack.reconstruct(posed.wave, posed.known, Budget(200, restarts=4), streams(4))
        assert {f.status for f in results} == {"converged"}
        found[name] = quality(results, posed.truth)
    gain = found["tied"] - found["assumed"]
    assert float(gain.mean()) > 10, "decibels"
    assert int((gain > 5).sum()) >= 3, "one of the four is not found either way"
    assert float(gain.min()) > -1
    assert float((found["tied"] - found["copies apart"]).mean()) > 0, "the tie helps, not only the copies"


# ----------------------------------------------------------------------------------------------------------- the recipe


def test_local_sgds_slices_that_do_not_divide_the_batch_are_not_applicable() -> None:
    links = chain(local_sgd(0.1, 4, batch_size=2))
    posed = scene(links, [((0, 1, 2),)], 3)
    (found,) = federated_averaging().reconstruct(posed.wave, posed.known, Budget(1), streams(1))
    assert found.status == "not_applicable"


def test_labels_found_next_to_copies_are_those_of_paired_copies() -> None:
    links = chain(local_sgd(0.1, 4, batch_size=1))
    posed = scene(links, [((1, 0), (0, 1))], 2)
    known = replace(posed.known, labels=None)
    attack = GradientMatching(Objective(squared(), labels="optimised", training=tied_epochs()))
    (found,) = attack.reconstruct(posed.wave, known, Budget(3), streams(1))
    assert found.x is not None and found.y is not None
    assert (found.x.shape, found.y.shape) == ((2, *SHAPE), (2,))
