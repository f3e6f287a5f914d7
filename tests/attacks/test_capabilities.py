"""Attacks announce what they can do: nobody asks which attack it is."""

import pytest

from fedgauge.attacks.plan import ATTACK
from fedgauge.client.components import build


@pytest.mark.parametrize(
    ("use", "says"),
    [
        ("inverting_gradients", {"needs_derivative": True, "label_source": "restored"}),
        ("dlg", {"is_stateful": False, "label_source": "optimised"}),
        ("feedback_blending", {"is_stateful": True, "label_source": "restored"}),
        ("several_rounds", {"is_stateful": True}),
        ("gi_gip", {"trains_first": True}),
        ("gifd", {"trains_first": True}),
        ("learning_to_invert", {"trains_first": True}),
        ("ridge_inversion", {"trains_first": False}),
        ("lone_target", {"decodes": ("dead_layer",), "needs_secure_sum": True}),
        ("lone_example", {"decodes": ("class_fishing", "feature_fishing"), "needs_secure_sum": False}),
        ("analytic", {"is_stateful": False, "decodes": (), "needs_derivative": False}),
    ],
)
def test_an_attack_says_what_it_can_do(use: str, says: dict[str, object]) -> None:
    attack = build({"use": use}, "here", ATTACK)
    assert {name: getattr(attack, name) for name in says} == says


def test_who_wraps_an_attack_says_what_that_one_needs() -> None:
    """However deep a prior that trains a network is, and whatever hands over an attack that descends."""
    learned = {"use": "inverting_gradients", "prior": {"use": "generator_prior"}}
    plain = {"use": "analytic"}
    for wrapper in ("lone_example", "separated"):
        assert build({"use": wrapper, "attack": learned}, "here", ATTACK).trains_first
        assert build({"use": wrapper, "attack": learned}, "here", ATTACK).needs_derivative
        inner_exact = build({"use": wrapper, "attack": plain}, "here", ATTACK)
        assert not inner_exact.needs_derivative and not inner_exact.trains_first
    assert build({"use": "feedback_blending", "attack": learned}, "here", ATTACK).trains_first
