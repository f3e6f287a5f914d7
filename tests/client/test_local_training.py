"""Local training as clients do it: torch's own optimizers take the same steps, and the images' derivative is right."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from fedgauge.client.chain import chain
from fedgauge.client.components import SpecError, call, check_arguments
from fedgauge.client.federation import Federation
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import LocalTraining, local_sgd, local_training
from fedgauge.client.protocol import Protocol
from fedgauge.client.rng import generator
from fedgauge.client.transforms import UpdateDistribution
from fedgauge.client.update import Batch, Update
from fedgauge.defenses.accounting import NoGuarantee, mechanism
from fedgauge.defenses.clip import clip
from fedgauge.defenses.noise import gaussian
from fedgauge.server.store.scenario import Scenario
from tests.client.networks import examples, largest_difference, network, params_of

RATE = 0.05
LOOPS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9, "epochs": 3, "batch_size": 3},
    "nesterov": {"momentum": 0.9, "nesterov": True, "epochs": 3, "batch_size": 3},
    "weight decay": {"momentum": 0.5, "weight_decay": 0.1, "steps": 5},
    "adam": {"optimizer": "adam", "epochs": 2, "batch_size": 3},
    "adam, weight decay": {"optimizer": "adam", "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "steps": 4},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1, "steps": 4},
    "step": {"schedule": "step", "step_size": 2, "gamma": 0.3, "steps": 6},
    "cosine": {"optimizer": "adam", "schedule": "cosine", "epochs": 2, "batch_size": 2},
    "linear": {"optimizer": "adamw", "schedule": "linear", "epochs": 2, "batch_size": 2},
    "cosine by epochs": {"schedule": "cosine", "step_size": 4, "epochs": 3, "batch_size": 2},
    "linear by epochs": {"schedule": "linear", "step_size": 3, "epochs": 2, "batch_size": 3},
    "shuffled": {"epochs": 3, "batch_size": 3, "shuffle": True},
    "accumulated": {"epochs": 2, "batch_size": 2, "accumulate": 3},
    "clipped": {"max_norm": 0.1, "momentum": 0.9, "epochs": 2, "batch_size": 3},
    "all": {
        "optimizer": "adamw", "weight_decay": 0.01, "schedule": "cosine", "epochs": 3, "batch_size": 2, "shuffle": True,
        "accumulate": 2, "max_norm": 0.2,
    },
}  # fmt: skip


def torch_loop(batch: Batch, seed: str, rate: float = RATE, steps: int | None = None, **loop: Any) -> Update:
    """Local training as users of torch write it, on 7 examples: the last batch of an epoch is smaller."""
    model = network()
    start = params_of(model)
    options = {k: loop[k] for k in ("momentum", "nesterov", "betas", "eps", "weight_decay") if k in loop}
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[loop.get("optimizer", "sgd")]
    if kind is torch.optim.AdamW:
        options.setdefault("weight_decay", 0.0)
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=rate, **options)
    size, every, rng = loop.get("batch_size", len(batch.x)), loop.get("accumulate", 1), generator(seed)
    loader = -(-len(batch.x) // size)
    total = steps or loop["epochs"] * -(-loader // every)
    by = 1 if loop.get("schedule") == "step" else loop.get("step_size", 1)  # StepLR counts itself
    schedulers = {
        "step": lambda: torch.optim.lr_scheduler.StepLR(optimizer, loop["step_size"], loop["gamma"]),
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total // by),
        "linear": lambda: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total // by),
        "constant": lambda: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
    }
    scheduler, taken = schedulers[loop.get("schedule", "constant")](), 0
    while taken < total:
        order = torch.randperm(len(batch.x), generator=rng) if loop.get("shuffle") else torch.arange(len(batch.x))
        optimizer.zero_grad()
        for i, rows in enumerate(order.split(size)):
            (F.cross_entropy(model(batch.x[rows]), batch.y[rows]) / every).backward()
            if (i + 1) % every == 0 or i + 1 == loader:
                if "max_norm" in loop:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), loop["max_norm"])
                optimizer.step()
                optimizer.zero_grad()
                taken += 1
                if taken % by == 0:
                    scheduler.step()
    return {k: p.detach() - start[k] for k, p in model.named_parameters()}


@pytest.mark.parametrize("name", LOOPS)
def test_the_update_is_that_of_torchs_optimizer(name: str) -> None:
    batch, loop = examples(7), LOOPS[name]
    link = local_training(RATE, examples=7, **loop)
    found = link(gradient(network()))(params_of(network()), batch, generator(name))
    expected = torch_loop(batch, name, **loop)
    assert largest_difference(found, expected) < 1e-10
    plain = local_sgd(RATE, link.steps)(gradient(network()))(params_of(network()), batch, None)
    assert largest_difference(found, plain) > 1e-4, "this loop differs from plain SGD on the whole batch"


@pytest.mark.parametrize("name", LOOPS)
def test_the_derivative_by_the_images_is_that_of_finite_differences(name: str) -> None:
    batch, link = examples(7), local_training(RATE, examples=7, **LOOPS[name])
    client, params = link(gradient(network())), params_of(network())

    def update(x: Tensor) -> Tensor:
        found = client(params, Batch(x, batch.y), generator(name))
        return torch.cat([t.flatten() for t in found.values()])

    assert torch.autograd.gradcheck(update, batch.x.clone().requires_grad_(), eps=1e-7, atol=1e-5, fast_mode=True)


@pytest.mark.parametrize("name", ["shuffled", "adam", "all"])
def test_an_attackers_form_maps_over_problems(name: str) -> None:
    known = chain(local_training(RATE, examples=7, **LOOPS[name])).mean(gradient(network()))
    params, batches = params_of(network()), [examples(7, seed) for seed in (0, 1)]
    together = vmap(lambda x, y: known(params, Batch(x, y), None))(
        torch.stack([b.x for b in batches]), torch.stack([b.y for b in batches])
    )
    for k, batch in enumerate(batches):
        alone = known(params, batch, None)
        assert largest_difference({n: t[k] for n, t in together.items()}, alone) < 1e-12


def test_a_gradient_of_zero_leaves_adam_differentiable() -> None:
    link = local_training(0.1, 1, "adam", steps=2)
    x = torch.tensor([0.0, 2.0], dtype=torch.float64, requires_grad=True)
    moved = link(lambda params, batch, rng: {"w": batch.x[0] * params["w"]})(
        {"w": torch.tensor([1.0, 0.0], dtype=torch.float64)}, Batch(x[None], torch.zeros(1)), None
    )
    (slope,) = torch.autograd.grad(moved["w"].sum(), x)
    assert slope.isfinite().all()
    assert moved["w"].tolist() == [0.0, 0.0]


def test_plain_sgd_equals_local_sgd() -> None:
    assert local_training(0.1, 8, epochs=2, batch_size=4) == local_sgd(0.1, 4, 4)
    assert local_training(0.1, 8, epochs=3, batch_size=32, shuffle=True) == local_sgd(0.1, 3)
    assert local_training(0.1, 8, momentum=0.9, schedule="cosine") == local_sgd(0.1), "a first step"
    assert local_training(0.1, 8, momentum=0.5, nesterov=True).rate == pytest.approx(0.15)
    for other in ({"weight_decay": 0.1}, {"max_norm": 1.0}, {"optimizer": "adam"}, {"batch_size": 3}):
        assert type(local_training(0.1, 8, **other)) is LocalTraining, other


def test_a_shuffled_epoch_has_every_example_once_in_an_order_of_the_clients_own() -> None:
    link = local_training(0.1, 10, epochs=2, batch_size=4, shuffle=True)
    assert isinstance(link, LocalTraining)
    orders = link.order(10, generator("client"))
    epochs = [[next(orders)[0] for _ in range(3)] for _ in range(2)]
    assert [[len(rows) for rows in epoch] for epoch in epochs] == [[4, 4, 2]] * 2
    first, second = (torch.cat(epoch).tolist() for epoch in epochs)
    assert sorted(first) == sorted(second) == list(range(10)) != first != second
    assumed = link.order(20, None)  # an attacker's copies of two epochs, each in the order given
    assert torch.cat([next(assumed)[0] for _ in range(6)]).tolist() == list(range(20))


@pytest.mark.parametrize(
    ("training", "arguments"),
    [
        *((local_sgd, {"rate": rate}) for rate in (0.0, math.nan)),
        (local_sgd, {"steps": 0}),
        (local_sgd, {"batch_size": 0}),
        *((local_sgd, {"proximal_mu": mu}) for mu in (-0.1, math.nan)),
        (local_training, {"steps": 1, "epochs": 1}),
        (local_training, {"epochs": 0}),
        (local_training, {"optimizer": "adam", "momentum": 0.9}),
        (local_training, {"nesterov": True}),
        (local_training, {"betas": (0.9, 1.0)}),
        (local_training, {"weight_decay": -1.0}),
        (local_training, {"max_norm": 0.0}),
        (local_training, {"accumulate": 0}),
    ],
)
def test_a_training_without_sense_is_refused(training: Callable[..., Any], arguments: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=list(arguments)[-1]):
        call(
            training,
            check_arguments(training, {"rate": 0.1, **arguments}, "[[chain]] #1", {"examples": 4}),
            "[[chain]] #1",
        )


def test_no_epsilon_is_claimed_where_none_holds() -> None:
    noisy = (clip(1.0), gaussian(1.0))
    adam = local_training(0.1, 10, "adam")
    assert mechanism(chain(*noisy, adam), 10).releases == 1, "what follows the noise is post-processing"
    accumulated = local_training(0.1, 10, "adam", epochs=2, batch_size=3, accumulate=2)
    assert mechanism(chain(*noisy, accumulated), 10).releases == 8, "every batch's gradient is noised by itself"
    assert mechanism(chain(*noisy, accumulated), 10).uses == 2
    with pytest.raises(NoGuarantee):
        mechanism(chain(clip(1.0), adam, gaussian(1.0)), 10)
    with pytest.raises(NoGuarantee):
        mechanism(chain(local_training(0.1, 10, max_norm=1.0), gaussian(1.0)), 10)
    assert adam.update_distribution(UpdateDistribution(sigma=1.0)) is None


SCENARIO = {
    "rounds": 1,
    "clients": 2,
    "data": {"use": "mnist5k", "batch_size": 120},
    "model": {"use": "mlp", "hidden": [8]},
    "attack": [{"use": "inverting_gradients"}],
}


def test_a_batch_size_need_not_divide_the_examples() -> None:
    for name, beside in (("local_sgd", {"steps": 4}), ("local_training", {"optimizer": "adam", "shuffle": True})):
        table = {"use": name, "rate": 0.01, "batch_size": 32, **beside}
        fed = Federation(Protocol.from_tables({**SCENARIO, "chain": [table]}))
        assert fed.chain.local.steps == 4
        params, buffers = fed.initial()
        update = fed.own_update(params, buffers, 0, 1)
        assert all(t.isfinite().all() and t.any() for t in update.values())


def test_noise_for_a_batch_size_refuses_a_smaller_last_batch() -> None:
    noisy = {"use": "dp_sgd", "max_norm": 1.0, "noise_multiplier": 1.0}
    for size, refused in ((32, True), (30, False)):
        chain = [noisy, {"use": "local_training", "rate": 0.1, "momentum": 0.9, "epochs": 1, "batch_size": size}]
        fed = Federation(Protocol.from_tables({**SCENARIO, "chain": chain}))
        if refused:
            with pytest.raises(SpecError):
                fed.check()
        else:
            assert fed.check().chain.local.steps == 4


def test_fedproxs_weight_becomes_part_of_it() -> None:
    strategy = {"use": "FedProx", "proximal_mu": 0.5}
    table = {"use": "local_training", "rate": 0.1, "optimizer": "adam", "epochs": 2}
    scenario = Scenario.from_tables({**SCENARIO, "strategy": strategy, "chain": [table]})
    assert scenario.federation.chain.local.proximal_mu == 0.5
    again = copy.deepcopy(Protocol.from_json(scenario.protocol.to_json()))
    assert Federation(again).chain == scenario.federation.chain
