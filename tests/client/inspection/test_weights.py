"""Detectors that read weights alone: altered rows are found, random ones pass."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedgauge.client.inspection.results import DetectorResults
from fedgauge.client.inspection.weights import MOST_ROWS, inspect_weights
from fedgauge.client.models.vision import detached_params
from fedgauge.client.rng import generator
from fedgauge.client.update import Params
from tests.client.inspection.probing import CLASSES, alarmed, inspect, network, score, with_


@given(scale=st.floats(1e-3, 1e3), share=st.floats(0.2, 1.0))
def test_rows_that_are_multiples_of_one_another_are_found_at_any_scale(scale: float, share: float) -> None:
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 144, generator=rng)
    copies = math.ceil(share * 40)
    weight[:copies] = scale * weight[0] * (1 + torch.rand(copies, 1, generator=rng))
    (found,) = [f for f in inspect_weights({"w": weight}, None) if f.detector == "dependent rows"]
    assert found.ratio >= 1
    assert found.score == pytest.approx(copies / 40)
    assert f"{copies} a multiple" in found.description


def test_combinations_of_few_rows_lack_rank() -> None:
    """No two rows of a rank-4 matrix are parallel; 36 of its 40 singular values are zero."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 4, generator=rng) @ torch.randn(4, 144, generator=rng)
    (found,) = [f for f in inspect_weights({"w": weight}, None) if f.detector == "dependent rows"]
    assert found.score == pytest.approx(0.9)
    assert "0 a multiple" in found.description


def test_zeroed_rows_of_the_classifier_are_counted() -> None:
    params = detached_params(network())
    altered = with_(params, p3_weight=torch.where(torch.arange(CLASSES)[:, None] == 2, params["3.weight"], 0.0))
    found = alarmed(inspect(network(), altered, None))["dependent rows"]
    assert (found.layer, found.score) == ("3.weight", 0.8)
    assert found.description.startswith("4 rows of 5 ")


def trapped(rows: int, inputs: int, part: float = 0.95) -> Tensor:
    """Rows with a random half of the entries negative and the positives a little smaller (Boenisch et al., 2023)."""
    rng = torch.Generator().manual_seed(3)
    signs = torch.stack([torch.randperm(inputs, generator=rng) < inputs // 2 for _ in range(rows)])
    return torch.where(signs, -1.0, part) * torch.randn(rows, inputs, generator=rng).abs()


@pytest.mark.parametrize("inputs", [144, 145])
def test_trap_weights_are_too_balanced_to_be_random(inputs: int) -> None:
    (found,) = [f for f in inspect_weights({"w": trapped(40, inputs)}, None) if f.detector == "balanced rows"]
    # each row by chance with probability C(n, n/2) / 2^n (two of them for odd n): the bound is exact where all are
    by_chance = math.comb(inputs, inputs // 2) / 2**inputs * (1 + inputs % 2)
    assert found.score == pytest.approx(-40 * math.log10(by_chance), rel=1e-6)
    assert found.ratio > 1


def test_random_rows_are_seldom_called_balanced() -> None:
    """A threshold of 6 is a chance of one in a million; of 300 layers none comes near."""
    rng = torch.Generator().manual_seed(0)
    worst = 0.0
    for inputs in (8, 9, 25, 144):
        for _ in range(75):
            layer = {"w": torch.randn(64, inputs, generator=rng)}
            worst = max(worst, *(f.score for f in inspect_weights(layer, None) if f.detector == "balanced rows"))
    assert worst < 5


def test_identity_convolutions_are_sparse() -> None:
    weight = torch.zeros(12, 12, 5, 5)
    weight[:, :, 2, 2] = torch.eye(12)
    weight += 1e-4 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    (found,) = [f for f in inspect_weights({"conv.weight": weight}, None) if f.detector == "sparse rows"]
    assert found.score == 1
    one = torch.randn(12, 12, 5, 5, generator=torch.Generator().manual_seed(0))
    one[0] = weight[0]
    (found,) = [f for f in inspect_weights({"conv.weight": one}, None) if f.detector == "sparse rows"]
    assert found.score == 1, "one row that carries a colour is enough"
    assert "in 1 rows" in found.description
    spread = torch.randn(12, 12, 5, 5, generator=torch.Generator().manual_seed(0))
    assert [f.score for f in inspect_weights({"w": spread}, None) if f.detector == "sparse rows"] == [0]


def test_a_swap_of_two_classes_is_two_rows_that_moved() -> None:
    params = detached_params(network())
    order = [1, 0, 2, 3, 4]
    altered = with_(params, p3_weight=params["3.weight"][order], p3_bias=params["3.bias"][order])
    found = alarmed(inspect(network(), altered, params))
    assert found["moved rows"].layer == "3.weight"
    assert found["moved rows"].description.startswith("2 rows")
    assert "moved rows" not in alarmed(inspect(network(), altered, None)), "a first round has nothing to compare with"


def test_a_jump_is_measured_in_the_layers_own_size_and_by_the_rounds_between() -> None:
    params = detached_params(network())
    altered = with_(params, p1_weight=5 * params["1.weight"], p1_bias=5 * params["1.bias"])
    found = inspect(network(), altered, params)
    assert score(found, "jump") == pytest.approx(4.0)
    assert alarmed(found)["jump"].layer == "1"
    assert score(inspect(network(), altered, params, apart=4), "jump") == pytest.approx(1.0)


@pytest.mark.parametrize("entry", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_an_alarm(entry: float) -> None:
    params = detached_params(network())
    for name in ("1.weight", "3.bias"):
        altered = {k: t.clone() for k, t in params.items()}
        altered[name].view(-1)[0] = entry
        found = inspect(network(), altered, params)
        assert found.suspicion >= 1 and math.isfinite(found.suspicion)
    wrong = inspect_weights({"w": torch.where(torch.eye(20) > 0, entry, 1.0)}, None)
    assert "not finite" in alarmed(DetectorResults.of(wrong))["dependent rows"].description


def copies(rows: Tensor, of: int) -> Params:
    """A layer of more rows than are compared, some of them one and the same."""
    weight = torch.randn(of, 16, generator=torch.Generator().manual_seed(0))
    weight[rows] = weight[0].clone()
    return {"w": weight}


@given(seed=st.integers(0, 10**6))
@settings(max_examples=5, deadline=None)
def test_copies_are_found_in_any_rows_of_a_large_matrix(seed: int) -> None:
    """Half of the rows are copies: all that any fixed stride of two leaves out."""
    of = 2 * MOST_ROWS
    for rows in (torch.arange(1, of, 2), torch.arange(0, of, 2), torch.arange(MOST_ROWS), torch.arange(MOST_ROWS, of)):
        found = DetectorResults.of(inspect_weights(copies(rows, of), None, rng=generator(seed)))
        assert score(found, "dependent rows") == pytest.approx(0.5, abs=0.1)  # six deviations of a hypergeometric


def test_rows_are_drawn_by_the_clients_entropy_unless_a_generator_is_given() -> None:
    weights = copies(torch.arange(0, 2 * MOST_ROWS, 2), 2 * MOST_ROWS)

    def words(seed: int | None) -> str:
        rng = None if seed is None else generator(seed)
        (found,) = [f for f in inspect_weights(weights, None, rng=rng) if f.detector == "dependent rows"]
        return found.description

    assert words(1) == words(1)
    assert len({words(seed) for seed in range(5)}) > 1
    assert len({words(None) for _ in range(8)}) > 1


@pytest.mark.parametrize("n", [MOST_ROWS, 2 * MOST_ROWS + 1])
def test_rows_of_a_large_matrix_that_moved_are_found_wherever_they_went(n: int) -> None:
    """All rows move by one: where a row is drawn, the place it came from need not be."""
    before = torch.randn(n, 64, generator=torch.Generator().manual_seed(0))
    moved = DetectorResults.of(inspect_weights({"w": before.roll(1, 0)}, {"w": before}, rng=generator(0)))
    assert alarmed(moved)["moved rows"].description.startswith(f"{MOST_ROWS} rows ")
    still = DetectorResults.of(inspect_weights({"w": before}, {"w": before}, rng=generator(0)))
    assert score(still, "moved rows") == 0


def test_embeddings_are_no_layers() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(100, 16)
            self.head = nn.Linear(16, 3)
            nn.init.ones_(self.words.weight)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.words(x).mean(1))
            return logits

    model = Words()
    found = inspect(model, detached_params(model), None)
    assert {f.layer for f in found.results if f.detector == "dependent rows"} == {"head.weight"}
    assert found.suspicion < 1, "nor are words dead that do not occur"
