"""Membership through the audit: who is a candidate, what a member's value is, and what is said where nobody can tell."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Knowledge, Wave
from fedgauge.attacks.grading.audit import Auditor, AuditResult
from fedgauge.attacks.measure import Case
from fedgauge.attacks.membership.attack import membership
from fedgauge.attacks.membership.candidates import MembershipTest, above, exceeded_by
from fedgauge.attacks.membership.gradients import CandidateGradients
from fedgauge.attacks.plan import MEMBERSHIP_LIMIT, AttackPlan, PlannedAttack
from fedgauge.attacks.source import FederationSource
from fedgauge.client.federation import Federation
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch

Make = Callable[..., Any]
SGD = {"use": "local_sgd", "rate": 0.1}


def planned(use: str = "membership", **table: Any) -> PlannedAttack:
    return PlannedAttack.from_table({"use": use, **table}, "here")


def values(results: list[AuditResult], attack: str, metric: str) -> list[float]:
    return [
        row.value
        for one in results
        for row in one.rows
        if (row.attack, row.metric) == (attack, metric) and row.value is not None
    ]


def mean(found: list[float]) -> float:
    return sum(found) / len(found)


def test_a_members_value_is_its_share_of_the_area_under_the_curve() -> None:
    """Against Mann and Whitney's statistic as scipy has it, with ties."""
    rng = generator("ties")
    members, strangers = (torch.randint(0, 30, (n,), generator=rng).double() for n in (40, 300))
    statistic = scipy.stats.mannwhitneyu(members.numpy(), strangers.numpy()).statistic
    assert float(above(members, strangers).mean()) == pytest.approx(statistic / (40 * 300))


def test_at_most_one_stranger_in_a_hundred_is_taken_for_a_member() -> None:
    """A p-value of a score like all others is at most alpha with probability alpha, whatever the scores' distribution."""
    rng = generator("p-values")
    scores = torch.randn(4000, 200, generator=rng).double().exp()
    found = torch.stack([exceeded_by(row[:1], row[1:])[0] for row in scores])
    for alpha in (0.01, 0.05, 0.5):
        share = float((found <= alpha).double().mean())
        assert abs(share - alpha) < 4 * (alpha * (1 - alpha) / 4000) ** 0.5
    assert float(exceeded_by(torch.tensor([9.0]), torch.arange(9.0))) == 0.1


@pytest.fixture
def fed(make_federation: Make) -> Federation:
    made: Federation = make_federation(clients=3, model={"use": "mlp", "hidden": [8]})
    return made


def test_members_are_detected_in_their_own_update_only(make_federation: Make, observe: Make) -> None:
    fed = make_federation(data={"auxiliary": 400})  # a convolutional network
    wave = observe(fed, (0, 1))
    found = Auditor(FederationSource(fed)).audit(planned(strangers=200, held=5), wave, {0: 1, 1: 0})
    assert mean(values(found, "membership", "membership")) > 0.9
    assert abs(mean(values(found, "wrong_client(membership)", "membership")) - 0.5) < 0.35
    size = fed.shards.batch_size
    assert len(values(found, "membership", "membership")) == 2 * size
    assert {one.reconstruction.status for one in found} == {"converged"}


@pytest.mark.parametrize("task", ["classification", "next_token"])
def test_members_among_sentences_are_detected(make_federation: Make, observe: Make, task: str) -> None:
    fed = make_federation(
        data={"use": "phrases", "length": 10, "auxiliary": 60, "task": task},
        model={"use": "tiny_bert"} if task == "classification" else {"use": "tiny_gpt2", "width": 16, "heads": 2},
        **({"loss": {"use": "next_token"}} if task == "next_token" else {}),
    )
    found = Auditor(FederationSource(fed)).audit(planned(strangers=60, held=2), observe(fed, (0, 1)), {0: 1, 1: 0})
    assert mean(values(found, "membership", "membership")) > 0.9, found[0].reconstruction.reason


def test_members_are_detected_behind_mixup_and_dropout(make_federation: Make, observe: Make) -> None:
    mlp = {"use": "mlp", "hidden": [32]}
    blended = make_federation(
        data={"auxiliary": 400, "batch_size": 4}, chain=[{"use": "mixup", "alpha": 0.4}, SGD], model=mlp
    )
    bare = make_federation(data={"auxiliary": 400, "batch_size": 4})
    torch.manual_seed(0)  # of the weights, and of which units are dropped
    dropping = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10)).train()
    for fed in (blended, bare.having(model=dropping)):
        found = Auditor(FederationSource(fed)).audit(
            planned(strangers=200, held=0, score="matched_filter"), observe(fed, (0, 1))
        )
        assert mean(values(found, "membership", "membership")) > 0.7, found[0].reconstruction.reason


@pytest.mark.parametrize("before", [[], [{"use": "clip", "max_norm": 0.5, "each": True}]])
def test_members_are_detected_behind_a_frozen_layer(before: list[Any], make_federation: Make, observe: Make) -> None:
    """Of nearly all entries: what a candidate's gradient has there is in no update, and counts for a clip's norm."""
    frozen = [*before, SGD, {"use": "freeze", "layers": ["1"]}]
    fed = make_federation(model={"use": "mlp", "hidden": [32]}, data={"batch_size": 8, "auxiliary": 400}, chain=frozen)
    found = Auditor(FederationSource(fed)).audit(planned(strangers=400, held=1), observe(fed, (0, 1)), {0: 1, 1: 0})
    assert mean(values(found, "membership", "membership")) > 0.9


def test_a_client_whose_label_no_non_member_has_takes_no_score_from_others(fed: Federation, observe: Make) -> None:
    data, labels = fed.shards.dataset, [fed.batch_at(client, 1).y for client in (0, 1)]
    kept = ~torch.isin(data.y_test, labels[0])
    assert bool(torch.isin(labels[1], data.y_test[kept]).any())
    fewer = replace(data, x_test=data.x_test[kept], y_test=data.y_test[kept])
    source = FederationSource(fed.having(shards=replace(fed.shards, dataset=fewer)))
    rows = Auditor(source).audit(planned(strangers=200, held=1), observe(fed, (0, 1)), {0: 1, 1: 0})
    assert [one.reconstruction.status for one in rows] == ["not_applicable", "converged"]
    assert all(row.value is not None for row in rows[1].rows)


def case(fed: Federation, wave: Wave, others: Mapping[int, int] = {}) -> Case:
    """A wave of a test of membership."""
    known = Auditor(FederationSource(fed)).knowledge(planned())
    return Case(fed, "membership", known, wave, wave, others, {}, 0)


def test_the_attack_does_not_know_the_members(fed: Federation, observe: Make) -> None:
    """The members are spread over the candidates, and a change of the order changes no score."""
    wave = observe(fed, (0, 1))
    attack, auditor = membership(strangers=100, held=10), Auditor(FederationSource(fed))
    test = MembershipTest(case(fed, wave), 100, 10, wave.clients)
    known = auditor.knowledge(planned())
    whole = attack.scores(wave, known, test.candidates)
    order = torch.randperm(len(test.candidates.y), generator=generator("order"))
    turned = attack.scores(wave, known, Batch(test.candidates.x[order], test.candidates.y[order]))
    assert torch.allclose(turned, whole[:, order], rtol=1e-3, atol=1e-3)


def test_dataset_membership_uses_the_highest_score_over_rounds(fed: Federation, observe: Make) -> None:
    attack, auditor = planned("membership_over_rounds", strangers=200, held=10), Auditor(FederationSource(fed))
    first = auditor.audit(attack, observe(fed, (0, 1)))
    memories = {one.client: one.memory for one in first if one.memory is not None}
    assert set(memories) == {0, 1}
    second = auditor.audit(attack, observe(fed, (0, 1), round=2), memories=memories)
    alone = auditor.audit(attack, observe(fed, (0, 1), round=2))
    for before, after, fresh in zip(first, second, alone, strict=True):
        kept = [
            dict(zip(m["rows"].tolist(), m["best"].tolist(), strict=True))
            for one in (before, after, fresh)
            if (m := one.memory)
        ]
        earlier, both, now = kept
        assert set(both) == set(earlier) | set(now), "whoever was scored is remembered by its row"
        for row, best in both.items():
            assert best == max(earlier.get(row, -math.inf), now.get(row, -math.inf))
    assert values(second, "membership_over_rounds", "dataset_membership")


def test_the_limit_is_the_distance_of_two_gradients(make_federation: Make, observe: Make) -> None:
    """Of a member and a stranger one is in the batch: two normal densities, told apart by their distance over the noise."""
    sigma = 0.05  # before local_sgd, whose rate then changes gradient and noise alike
    fed = make_federation(chain=[{"use": "gaussian", "sigma": sigma}, SGD], model={"use": "mlp", "hidden": [8]})
    wave = observe(fed, (0,))
    found = Auditor(FederationSource(fed)).audit(PlannedAttack(MEMBERSHIP_LIMIT, {"use": MEMBERSHIP_LIMIT}), wave)
    strangers = MembershipTest(case(fed, wave), 1000, 40, (0,)).strangers

    def flat(x: Tensor, y: Tensor) -> Tensor:
        own = fed.gradient(wave.params, Batch(x[None], y[None]), None)
        return torch.cat([t.flatten() for t in own.values()]).double()

    batch, expected = fed.batch_at(0, 1), []
    for x, y in zip(batch.x, batch.y, strict=True):
        others = [flat(*one) for one in zip(strangers.x, strangers.y, strict=True) if bool(torch.isin(one[1], batch.y))]
        distances = torch.stack([(flat(x, y) - other).norm() for other in others]) / len(batch.y) / sigma
        expected.append(float(torch.special.ndtr(distances / 2).mean()))
    assert values(found, MEMBERSHIP_LIMIT, "membership") == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "chain",
    [
        [{"use": "laplace", "scale": 0.1}, SGD],
        [{"use": "gaussian", "sigma": 0.1}, {**SGD, "steps": 5}],
        [{"use": "clip", "max_norm": 1.0}, {"use": "gaussian", "sigma": 0.1}, SGD],
        [{"use": "mixup", "alpha": 0.4}, {"use": "gaussian", "sigma": 0.1}, SGD],
    ],
    ids=["Laplace", "steps", "clip", "mixup"],
)
def test_other_chains_have_no_exact_curve(make_federation: Make, observe: Make, chain: list[dict[str, Any]]) -> None:
    fed = make_federation(chain=chain, model={"use": "mlp", "hidden": [8]}, data={"batch_size": 2})
    found = Auditor(FederationSource(fed)).audit(
        PlannedAttack(MEMBERSHIP_LIMIT, {"use": MEMBERSHIP_LIMIT}), observe(fed, (0,))
    )
    assert found[0].reconstruction.status == "not_applicable" and "exact curve" in found[0].reconstruction.reason


def test_updates_that_are_not_finite_are_not_applicable(fed: Federation, observe: Make) -> None:
    wave = observe(fed, (0, 1))
    for factor in (math.inf, 1e38):
        spoilt = replace(wave, update={k: t * factor for k, t in wave.update.items()})
        found = Auditor(FederationSource(fed)).audit(planned(score="loss_change", strangers=100), spoilt)
        assert {one.reconstruction.status for one in found} == {"not_applicable"}
        assert "not finite" in found[0].reconstruction.reason


def test_over_rounds_sums_of_a_group_are_remembered(make_federation: Make, observe: Make) -> None:
    changes = {"clients": 4, "model": {"use": "mlp", "hidden": [8]}}
    fixed = make_federation(secure_sum={"group": 4}, **changes)
    memories: dict[int, Any] = {}
    for round in (1, 2):
        found = Auditor(FederationSource(fixed)).audit(
            planned("membership_over_rounds", strangers=200, held=5),
            observe(fixed, (0,), round),
            memories=memories,
        )
        assert found[0].reconstruction.status == "converged", found[0].reconstruction.reason
        memories = {one.client: one.memory for one in found}


def test_its_baseline_and_limit_come_with_it_alone() -> None:
    def names(use: str) -> set[str]:
        return {p.name for p in AttackPlan.from_tables([{"use": use}], {}, 1, 1, noisy=True).attacks}

    mine = {"label_frequency", "loss", MEMBERSHIP_LIMIT}
    assert names("membership") >= mine and not names("idlg") & mine


def test_only_candidates_that_count_are_scored(fed: Federation, observe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate whose label is in no batch changes no row."""
    asked, scores = list[int](), membership.scores

    def counted(attack: membership, wave: Wave, known: Knowledge, candidates: Batch) -> Tensor:
        asked.append(len(candidates.y))
        return scores(attack, wave, known, candidates)

    monkeypatch.setattr(membership, "scores", counted)
    auditor, wave = Auditor(FederationSource(fed)), observe(fed, (0, 1))
    few = auditor.audit(planned(), wave, {0: 1, 1: 0})
    monkeypatch.setattr(
        MembershipTest, "graded", property(lambda test: torch.ones_like(test._labels, dtype=torch.bool))
    )
    every = auditor.audit(planned(), wave, {0: 1, 1: 0})
    rows = [[replace(row, seconds=0.0) for one in results for row in one.rows] for results in (few, every)]
    assert rows[0] == rows[1] and asked[0] < asked[1]


def test_missing_truth_or_public_examples_are_named(
    make_federation: Make, observe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = make_federation()
    wave: Wave = observe(fed, (0,))
    blind = Auditor(FederationSource(fed, blind=True)).audit(planned(), wave)
    assert "--truth" in blind[0].reconstruction.reason
    monkeypatch.delattr(CandidateGradients, "rows")  # missing examples are named before gradients are computed
    few = make_federation(data={**fed.protocol.data, "auxiliary": 40})
    found = Auditor(FederationSource(few)).audit(planned(), observe(few, (0,)))
    assert found[0].reconstruction.status == "not_applicable"
    assert "auxiliary" in found[0].reconstruction.reason
