"""Layers that a client starts from its own last reply: exact traces of a gradient, and what has none."""

import pytest
import torch
from torch import Tensor

from fedgauge.attacks.base import Observation
from fedgauge.attacks.grading.own_start import last_reply, own_start
from fedgauge.attacks.grading.training_evidence import training_evidence
from tests.attacks.grading.test_evidence_counts import Truth, observations


@pytest.mark.parametrize(
    ("network", "batch", "optimizer", "head"),
    [
        ("relu", 4, "sgd", {"3.weight", "3.bias"}),
        ("relu", 4, "adam", {"3.weight", "3.bias"}),  # units without a gradient stay where they were
        ("tanh", 4, "sgd", {"5.weight", "5.bias"}),  # by the rank alone
        ("tanh", 16, "sgd", set()),  # 16 examples fill the head's ten rows: both differences look alike
        ("conv", 2, "sgd", {"5.weight", "5.bias"}),
    ],
)
def test_a_head_of_the_clients_own_is_named_where_its_gradient_leaves_a_trace(
    network: str, batch: int, optimizer: str, head: set[str]
) -> None:
    truth = Truth(network, batch, 1, optimizer, True, 0.0, 1.0)
    _, (first, second) = observations(truth, seed=0)
    own, undecided = own_start(second, first)
    assert own == head and undecided.isdisjoint(head)
    assert bool(head) or {"5.weight", "5.bias"} <= undecided


def test_the_rest_is_compared_as_the_client_computed_it() -> None:
    fed, (first, second) = observations(Truth("relu", 4, 1, "sgd", True, 0.0, 1.0), seed=0)
    found = training_evidence(fed, second, first)
    assert (found.kind, found.fits) == ("sum of gradients", False)
    assert found.rates is not None and found.rates.low < 0.05 < found.rates.high


def test_private_layers_that_are_not_trained_are_named_whatever_their_kind() -> None:
    kept = {"norm.weight": torch.rand(32), "norm.bias": torch.rand(32)}
    sent: dict[str, Tensor] = {k: torch.rand(32) for k in kept} | {"conv.weight": torch.rand(8, 4, 3, 3)}
    step = torch.randn(8, 4, 3, 3) * 0.01
    first = Observation(1, 0, {**sent, **kept}, {**{k: torch.zeros(32) for k in kept}, "conv.weight": step}, {})
    moved = {k: kept[k] - sent[k] for k in kept}
    second = Observation(2, 0, sent, {**moved, "conv.weight": torch.randn(8, 4, 3, 3) * 0.01}, {})
    assert own_start(second, first) == (set(kept), {"conv.weight"})
    assert torch.equal(last_reply(first, "norm.bias"), kept["norm.bias"])


def test_weights_rounded_to_half_precision_accuse_nobody() -> None:
    sent, last = (torch.randn(64, 64).bfloat16().float() for _ in range(2))
    reply = (sent + 1e-3 * torch.randn(64, 64)).bfloat16().float()
    first = Observation(1, 0, {"a.weight": sent}, {"a.weight": last - sent}, {})
    assert own_start(Observation(2, 0, {"a.weight": sent}, {"a.weight": reply - sent}, {}), first)[0] == set()
