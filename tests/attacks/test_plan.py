"""The attack plan: checked like every other table, complete with its baselines."""

from typing import Any

import pytest

from fedgauge.attacks.base import Budget
from fedgauge.attacks.plan import ATTACK, ERROR_LIMITS, MEMBERSHIP_LIMIT, AttackPlan, PlannedAttack, describe
from fedgauge.client.components import SpecError

IG = {"use": "inverting_gradients"}
IDLG = {"use": "idlg"}
FB = {"use": "feedback_blending"}


def plan(*tables: dict[str, Any], **options: Any) -> AttackPlan:
    """Of a federation of ten rounds and four clients."""
    return AttackPlan.from_tables(tables, options, 10, 4)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"use": "ig"}, "nothing is called 'ig'; an attack is one of analytic, bayes"),
        ({"use": "fedgauge.server.pool.executors:Pool"}, "Pool' is not allowed here; an attack is one of"),
        ({}, 'needs use = "name", got None'),
        ({**IG, "tvv": 0.1}, "inverting_gradients() has no argument 'tvv' (it has: tv, rate, "),
        ({**IG, "itertions": 3}, ", name, iterations, restarts, seconds, labels, lengths, defense, trace, auxiliary, tune)"),
        ({**IG, "tv": -1}, "the weight of total_variation must not be negative, got -1.0"),
        ({**IG, "rate": 0}, "rate must be above 0, got 0.0"),
        ({**IG, "iterations": 0}, "iterations must be at least 1, got 0"),
        ({**IG, "iterations": 5.0}, "iterations must be a whole number, got 5.0"),
        ({**IG, "restarts": True}, "restarts must be a whole number, got True"),
        ({**IG, "seconds": -1}, "seconds must be above 0, got -1.0"),
        ({**IG, "seconds": float("inf")}, "seconds must be a number, got inf"),
        ({**IG, "labels": "known"}, "labels must be one of 'restored', 'given', got 'known'"),
        ({**IG, "defense": True}, "defense must be one of 'known', 'unknown', 'inferred', got True"),
        ({**IG, "tune": "truth"}, "tune must be one of 'off', 'shadow', got 'truth'"),
        ({"use": "analytic", "tune": "shadow"}, "analytic has no settings to tune; leave tune out"),
        ({**IG, "trace": 1}, "trace must be at least 2 snapshots, the first and the last, got 1"),
        ({**IG, "trace": -4}, "trace must be at least 2 snapshots, the first and the last, got -4"),
        ({**IG, "trace": 3.0}, "trace must be a whole number, got 3.0"),
        ({**IG, "trace": True}, "trace must be a whole number, got True"),
        ({"use": "analytic", "trace": 3}, "analytic does not iterate"),
        ({**IG, "name": ""}, "name must be at most 64 letters"),
        ({**IG, "name": "a/../b"}, "name must be at most 64 letters"),
        ({**IG, "name": 3}, "name must be a text, got 3"),
        ({**IG, "name": "bayes_limit"}, "no limit's: 'bayes_limit'"),
        ({**IG, "name": "a" * 65}, "name must be at most 64 letters"),
        ({**FB, "attack": "ig"}, "#2: attack: nothing is called 'ig'; an attack is one of"),
        ({**FB, "attack": "analytic"}, "#2: feedback blending needs an attack that can start from given images, and"),
        ({**FB, "attack": FB["use"]}, "FeedbackBlending cannot: name a recipe of gradient matching"),
        ({**FB, "attack": {"double": True}}, '#2: attack: needs use = "name", got None; an attack is one of'),
        ({**FB, "attack": {**IDLG, "fitt": 1}}, "#2: attack: idlg() has no argument 'fitt' (it has: restart_above, "),
        ({**FB, "attack": {**IDLG, "restart_above": "x"}}, "#2: attack: restart_above must be a number, got 'x'"),
        ({**FB, "attack": {**IG, "rate": 0}}, "#2: attack: rate must be above 0, got 0.0"),
        ({**FB, "attack": 3}, "#2: attack must be a text or a table, got 3"),
        ({**FB, "alpha": 1.5}, "#2: alpha must lie in 0..1, got 1.5"),
        ({**FB, "discard_failures": 1}, "#2: discard_failures must be true or false, got 1"),
        ({**FB, "start": "zero"}, "#2: start must be one of 'blend', 'half', 'mean', 'noise', got 'zero'"),
        ({**FB, "judge": True}, "has no argument 'judge' (it has: attack, alpha, discard_failures, fit, start, name,"),
        ({**FB, "trace": 1}, "#2: trace must be at least 2 snapshots, the first and the last, got 1"),
    ],
)  # fmt: skip
def test_a_mistake_in_an_attack_table_is_told(table: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as told:
        plan({"use": "analytic"}, table)
    assert str(told.value).startswith("[[attack]] #2")
    assert message in str(told.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": [0]}, "rounds must lie in 1..10, got 0"),
        ({"rounds": [1, 11]}, "rounds must lie in 1..10, got 11"),
        ({"clients": [4]}, "clients must lie in 0..3, got 4"),
        ({"clients": [-1]}, "clients must lie in 0..3, got -1"),
        ({"clients": 2}, "clients must be a list, each a whole number, got 2"),
        ({"every": 0}, "every must be at least 1, got 0"),
        ({"every": 2, "rounds": [1]}, "every has no effect"),
        ({"wave": 0}, "wave must be at least 1, got 0"),
        ({"seed": -1}, "seed must not be negative, got -1"),
        ({"evry": 1}, "AttackPlan() has no argument 'evry' (it has: rounds, every, clients, wave, seed)"),
        ({"attacks": []}, "AttackPlan() has no argument 'attacks' (it has: rounds"),
    ],
)
def test_a_mistake_in_the_audit_table_is_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as told:
        plan(IG, **options)
    assert str(told.value).startswith("[audit]")
    assert message in str(told.value)


def test_baselines_are_always_there_once() -> None:
    assert [p.name for p in plan(IG).attacks] == [
        "inverting_gradients",
        "mean_image",
        "class_mean_image",
        "random_image",
    ]
    assert [p.name for p in plan().attacks] == ["mean_image", "class_mean_image", "random_image"]
    assert [p.is_baseline for p in plan(IG).attacks] == [False, True, True, True]
    assert plan(IG).attacks[1:] == plan().attacks, "the same ones in every plan: a later audit finds them done"
    assert plan(IG).attacks[1].budget == Budget(1)
    assert [p.labels for p in plan().attacks] == ["restored", "given", "restored"], "what the threat model gives each"


@pytest.mark.parametrize(
    "table", [{"use": "random_image", "name": "luck"}, {"use": "random_image"}, {**IG, "name": "mean_image"}]
)
def test_no_baseline_is_judged_and_no_attack_passes_for_one(table: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="#2: '.*_image' is a baseline"):
        plan(IG, table)


def test_limits_are_added_where_the_chain_has_them() -> None:
    found = AttackPlan.from_tables([IG], {}, 10, 4, limits=[*ERROR_LIMITS, MEMBERSHIP_LIMIT])
    assert [p.name for p in found.attacks] == [
        "inverting_gradients",
        "mean_image",
        "class_mean_image",
        "random_image",
        "bayes_limit",
        "candidate_bound",
    ]
    assert [p.is_limit for p in found.attacks] == [False] * 4 + [True] * 2
    assert PlannedAttack.from_json(found.attacks[4].to_json()) == found.attacks[4]
    with pytest.raises(SpecError, match="bayes_limit"):
        plan({"use": "bayes_limit"})


def test_two_attacks_of_one_name_are_refused() -> None:
    with pytest.raises(SpecError, match="two attacks"):
        plan(IG, {**IG, "tv": 0.5})
    assert len(plan(IG, {**IG, "tv": 0.5, "name": "smoother"}).attacks) == 5


def test_the_plan_says_when_and_whom() -> None:
    every = plan(IG, every=3)
    assert [r for r in range(1, 11) if every.attacks_round(r)] == [1, 4, 7, 10]
    chosen = plan(IG, rounds=[2, 5], clients=[3, 1])
    assert [r for r in range(1, 11) if chosen.attacks_round(r)] == [2, 5]
    assert chosen.targets(2, [3, 2, 1, 0]) == [1, 3]
    assert chosen.targets(2, {2}) == []
    assert chosen.targets(3, [1]) == []
    assert plan(IG).targets(1, {2, 0, 1}) == [0, 1, 2]


def test_a_budget_is_the_attack_tables() -> None:
    found = PlannedAttack.from_table({**IG, "iterations": 7, "restarts": 2, "seconds": 1.5}, "here")
    assert found.budget == Budget(7, 2, 1.5)
    assert found.table == IG
    assert PlannedAttack.from_table(IG, "here").budget == Budget(500, 1, None)


def test_a_trace_is_a_setting_of_its_own_and_its_absence_is_none() -> None:
    plain, traced = (PlannedAttack.from_table({**IG, **more}, "here") for more in ({}, {"trace": 12}))
    assert PlannedAttack.from_table({**IG, "trace": 0}, "here") == plain
    assert traced.table == IG
    assert PlannedAttack.from_json(traced.to_json()) == traced
    assert traced.to_json() != plain.to_json(), "an audit that asks for a trace is not done because there are scores"
    assert "trace" not in plain.to_json(), "jobs of ledgers from before there were traces stay done"
    assert traced.build() == plain.build().traced(12)


def test_every_attack_can_be_planned_by_its_name_alone() -> None:
    for name in ATTACK.names():
        built = PlannedAttack.from_table({"use": name}, "here")
        assert built.name == name
        built.build()


def test_an_attack_with_memory_says_so() -> None:
    found = AttackPlan.from_tables(
        [IG, FB, {**FB, "attack": IDLG, "name": "b"}], {}, 10, 4, limits=[*ERROR_LIMITS, MEMBERSHIP_LIMIT]
    )
    assert [p.name for p in found.attacks if p.is_stateful] == ["feedback_blending", "b"]
    assert PlannedAttack.from_json(found.attacks[2].to_json()) == found.attacks[2]


def test_a_table_on_one_line() -> None:
    assert (
        describe({**FB, "attack": {**IDLG, "restart_above": 0.1}})
        == "feedback_blending(attack=idlg(restart_above=0.1))"
    )
    assert describe({**FB, "attack": "idlg"}) == "feedback_blending(attack=idlg)"
    assert describe({"use": "clip", "max_norm": 1.0}) == "clip(max_norm=1.0)"
    assert describe({"use": "analytic"}) == "analytic()"
    assert describe({"use": "clip", "each": True, "max_norm": 1.0}) == "each clip(max_norm=1.0)"


def test_a_budget_in_words() -> None:
    assert str(Budget(1500, 1)) == "1,500 iterations x 1 restart"
    assert str(Budget(1, 3, 2.5)) == "1 iteration x 3 restarts, at most 2.5 s a wave"
