"""The attack plan: checked like every other table, complete with its baselines."""

from typing import Any

import pytest

from fedgauge.attacks.base import Budget
from fedgauge.attacks.plan import ATTACK, AttackPlan, PlannedAttack, describe
from fedgauge.client.components import SpecError

IG = {"use": "inverting_gradients"}
IDLG = {"use": "idlg"}
FB = {"use": "feedback_blending"}


def plan(*tables: dict[str, Any], **options: Any) -> AttackPlan:
    """Of a federation of ten rounds and four clients."""
    return AttackPlan.from_tables(tables, options, 10, 4)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"use": "ig"}, "'ig'"),
    ({"use": "fedgauge.server.pool.executors:Pool"}, "not allowed"),
    ({}, "use ="),
    ({**IG, "tvv": 0.1}, "'tvv'"),
    ({**IG, "tv": -1}, "tv must"),
    ({**IG, "rate": 0}, "rate"),
    ({**IG, "iterations": 0}, "iterations"),
    ({**IG, "iterations": 5.0}, "iterations"),
    ({**IG, "restarts": True}, "restarts"),
    ({**IG, "seconds": -1}, "seconds"),
    ({**IG, "seconds": float("inf")}, "seconds"),
    ({**IG, "labels": "known"}, "labels"),
    ({**IG, "defense": True}, "defense"),
    ({**IG, "tune": "truth"}, "tune"),
    ({"use": "analytic", "tune": "shadow"}, "tune"),
    *(({**IG, "name": name}, "name") for name in ("", "a/../b", 3, "a" * 65)),
    *(({**FB, "attack": inner}, "(recipe|attack)") for inner in ("ig", "analytic", FB["use"], {"double": True}, 3)),
    *(
        ({**FB, "attack": {**IDLG, **inner}}, name)
        for name, inner in {"fitt": {"fitt": 1}, "rate": {"rate": 0}}.items()
    ),
    *(({**FB, "alpha": alpha}, "alpha") for alpha in (-0.1, 1.1)),
    ({**FB, "discard_failures": 1}, "discard_failures"),
    ({**FB, "start": "zero"}, "start"),
]


@pytest.mark.parametrize(("table", "named"), WRONG)
def test_a_mistake_in_an_attack_table_is_named(table: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError, match=rf"^\[\[attack\]\] #2.*{named}"):
        plan({"use": "analytic"}, table)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        *(({"rounds": rounds}, "rounds") for rounds in ([], [0], [1, 11])),
        *(({"clients": clients}, "clients") for clients in ([4], [-1], 2)),
        *(
            ({"every": 0}, "every"),
            ({"every": 2, "rounds": [1]}, "every"),
            ({"wave": 0}, "wave"),
            ({"seed": -1}, "seed"),
        ),
        *(({"evry": 1}, "'evry'"), ({"attacks": []}, "'attacks'")),
    ],
)
def test_a_mistake_in_the_audit_table_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError, match=rf"^\[audit\].*{named}"):
        plan(IG, **options)


def test_baselines_are_always_there_once() -> None:
    assert [p.name for p in plan(IG).attacks] == [
        "inverting_gradients",
        "mean_image",
        "class_mean_image",
        "random_image",
    ]
    assert [p.name for p in plan().attacks] == ["mean_image", "class_mean_image", "random_image"]
    assert [p.role for p in plan(IG).attacks] == ["attack", "baseline", "baseline", "baseline"]
    assert plan(IG).attacks[1:] == plan().attacks, "the same ones in every plan: a later audit finds them done"
    assert plan(IG).attacks[1].budget == Budget(1)
    assert [p.labels for p in plan().attacks] == ["restored", "given", "restored"], "what the threat model gives each"


@pytest.mark.parametrize("table", [{"use": "random_image", "name": "luck"}, {"use": "random_image"}])
def test_baselines_are_no_attacks_of_a_plan(table: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        plan(IG, table)


def test_limits_are_added_where_the_chain_has_them() -> None:
    found = AttackPlan.from_tables([IG], {}, 10, 4, noisy=True)
    assert [p.name for p in found.attacks] == [
        "inverting_gradients",
        "mean_image",
        "class_mean_image",
        "random_image",
        "bayes_limit",
        "candidate_bound",
    ]
    assert [p.role for p in found.attacks[4:]] == ["estimate", "limit"]
    assert PlannedAttack.from_json(found.attacks[4].to_json()) == found.attacks[4]
    with pytest.raises(SpecError):
        plan({"use": "bayes_limit"})


def test_a_name_is_only_a_name() -> None:
    """It says nothing of the role, and is refused only where another attack of the plan has it."""
    assert plan({**IG, "name": "bayes_limit"}, {**IG, "name": "loss"}).attacks[0].role == "attack"
    with pytest.raises(SpecError):
        plan({**IG, "name": "mean_image"})
    with pytest.raises(SpecError):
        AttackPlan.from_tables([{**IG, "name": "bayes_limit"}], {}, 10, 4, noisy=True)


def test_two_attacks_of_one_name_are_refused() -> None:
    with pytest.raises(SpecError):
        plan(IG, {**IG, "tv": 0.5})
    assert len(plan(IG, {**IG, "tv": 0.5, "name": "smoother"}).attacks) == 5


def test_the_plan_selects_rounds_and_clients() -> None:
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


def test_every_attack_can_be_planned_by_its_name_alone() -> None:
    for name in ATTACK.names():
        built = PlannedAttack.from_table({"use": name}, "here")
        assert built.name == name
        built.build()


def test_stateful_attacks_are_marked() -> None:
    found = AttackPlan.from_tables([IG, FB, {**FB, "attack": IDLG, "name": "b"}], {}, 10, 4, noisy=True)
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
