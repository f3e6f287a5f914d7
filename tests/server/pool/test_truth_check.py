"""A truth is doubted where another client's or round's examples give the update better."""

from collections.abc import Callable

import torch

from fedgauge.attacks.base import Observation
from fedgauge.client.federation import Federation
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch
from fedgauge.server.pool.truth_check import MOST_UPDATES, chosen, doubt


def test_another_clients_or_rounds_examples_are_named_and_the_right_ones_pass(
    make_federation: Callable[..., Federation],
) -> None:
    fed = make_federation(model={"use": "mlp", "hidden": [8]}, clients=2)
    params, buffers = fed.initial()
    right, other = (
        Batch(torch.rand(2, 1, 28, 28, generator=generator("truth", k)), torch.tensor([1 + k, 3 + k])) for k in range(2)
    )
    seen = Observation(1, 0, params, fed.update_fn()(params, right, generator("client", 0)), buffers)
    assert doubt(fed, seen, {(1, 0): right, (1, 1): other}) == ""
    assert "those of client 1 do (cosine 1.00)" in doubt(fed, seen, {(1, 0): other, (1, 1): right})
    assert "those of its round 2 do (cosine 1.00)" in doubt(fed, seen, {(1, 0): other, (2, 0): right})
    assert doubt(fed, seen, {(1, 0): other, (2, 1): right}) == "", (
        "another client in another round is no likely mistake"
    )
    assert doubt(fed, seen, {(1, 0): None, (1, 1): right}) == ""


def test_some_updates_of_every_round_are_checked() -> None:
    some = Batch(torch.zeros(1, 1), torch.zeros(1))
    found = chosen({(round, client): some for round in range(4) for client in range(9)} | {(9, 9): None})
    assert len(found) == MOST_UPDATES and {round for round, _ in found} == set(range(4))
