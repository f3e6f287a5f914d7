"""AUC, true positives and their intervals: against scikit-learn, on paper, and over draws of known truth."""

import pytest
import torch
from sklearn.metrics import roc_auc_score, roc_curve  # type: ignore[import-untyped]
from torch import Tensor

from fedgauge.attacks.grading.membership import above
from fedgauge.client.rng import generator
from fedgauge.simulations.benchmarks.membership.roc import ScoredCandidates


def scored(members: Tensor, others: Tensor, clients: int = 4) -> ScoredCandidates:
    return ScoredCandidates(
        members.double(), torch.arange(len(members)) % clients, others.double(), torch.arange(len(others)) % clients
    )


def drawn(seed: int, ties: bool = False) -> ScoredCandidates:
    rng = generator("roc", seed)
    members, others = torch.randn(57, generator=rng) + 1, torch.randn(211, generator=rng)
    return scored(members.round(decimals=0 if ties else 9), others.round(decimals=0 if ties else 9))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_auc_and_curve_are_scikit_learns(seed: int, ties: bool) -> None:
    found = drawn(seed, ties)
    truth = [1] * len(found.members) + [0] * len(found.others)
    values = torch.cat([found.members, found.others]).numpy()
    auc = found.auc(generator(0))
    assert auc.value == pytest.approx(roc_auc_score(truth, values), abs=1e-12)
    assert auc.low is not None and auc.high is not None and auc.low < auc.value < auc.high
    false, true, _ = roc_curve(truth, values, drop_intermediate=False)
    ours = found.curve()
    assert ours[0].tolist() == pytest.approx(false.tolist()) and ours[1].tolist() == pytest.approx(true.tolist())


@pytest.mark.parametrize("ties", [False, True])
def test_the_area_of_one_client_is_that_of_a_run(ties: bool) -> None:
    found = drawn(2, ties)
    alone = scored(found.members, found.others, clients=1).auc(generator(0))
    assert alone.value == pytest.approx(float(above(found.members, found.others).mean()), abs=1e-12)


def test_true_positives_on_paper() -> None:
    others = torch.arange(100)  # 99 is the only one that may be exceeded at 1 %
    found = scored(torch.tensor([98.5, 99.0, 99.5, 50.0]), others, clients=1)
    assert found.true_positives(0.01, generator(0)).value == 0.75  # 98 is the threshold: one other lies above it
    assert found.true_positives(0.05, generator(0)).value == 0.75
    assert found.true_positives(0.5, generator(0)).value == 1.0
    assert scored(torch.zeros(4), torch.zeros(100)).true_positives(0.01, generator(0)).value == 0.0, (
        "ties are not above"
    )


@pytest.mark.parametrize("ties", [False, True])
def test_true_positives_never_use_more_false_ones_than_allowed(ties: bool) -> None:
    found = drawn(1, ties)
    false, true = found.curve()
    for rate in (0.01, 0.05, 0.2, 0.7):
        assert found.true_positives(rate, generator(0)).value == pytest.approx(float(true[false <= rate].max()))


def test_one_client_has_no_interval() -> None:
    auc = scored(torch.ones(3), torch.zeros(5), clients=1).auc(generator(0))
    assert (auc.value, auc.low, auc.high) == (1.0, None, None)


def test_the_interval_holds_the_truth_where_clients_differ() -> None:
    """Clients shift their members' scores; an interval over single scores would be far too narrow."""
    held, runs = 0, 60
    for seed in range(runs):
        rng = generator("coverage", seed)
        shift = torch.randn(30, 1, generator=rng)
        members = (shift + torch.randn(30, 8, generator=rng)).flatten()
        others = torch.randn(30 * 40, generator=rng)
        found = ScoredCandidates(
            members.double(),
            torch.arange(30).repeat_interleave(8),
            others.double(),
            torch.arange(30).repeat_interleave(40),
        ).auc(rng)
        assert found.low is not None and found.high is not None
        held += found.low <= 0.5 <= found.high
    assert held >= 0.85 * runs


def test_bad_candidates_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match="there are no members"):
        scored(torch.zeros(0), torch.zeros(5))
    with pytest.raises(ValueError, match="one label: there are no candidates that are no members"):
        scored(torch.zeros(5), torch.zeros(0))
    with pytest.raises(ValueError, match="1 scores of members are not numbers"):
        scored(torch.tensor([1.0, float("nan")]), torch.zeros(5))
    with pytest.raises(ValueError, match="needs at least 1,000 candidates that are no members, got 100"):
        scored(torch.zeros(5), torch.zeros(100)).true_positives(0.001, generator(0))
    assert scored(torch.ones(5), torch.zeros(1000)).true_positives(0.001, generator(0)).value == 1.0
    with pytest.raises(ValueError, match="above 0 and below 1, got 0"):
        scored(torch.zeros(5), torch.zeros(100)).true_positives(0, generator(0))
