"""Attacks announce what they can do: nobody asks which attack it is."""

from fedgauge.attacks.plan import ATTACK
from fedgauge.client.components import build


def test_a_wrapper_has_the_needs_of_its_attack() -> None:
    """However deep a prior that trains a network is, and whatever hands over an attack that descends."""
    learned = {"use": "inverting_gradients", "prior": {"use": "generator_prior"}}
    plain = {"use": "analytic"}
    for wrapper in ("lone_example", "separated"):
        assert build({"use": wrapper, "attack": learned}, "here", ATTACK).trains_first
        assert build({"use": wrapper, "attack": learned}, "here", ATTACK).needs_derivative
        inner_exact = build({"use": wrapper, "attack": plain}, "here", ATTACK)
        assert not inner_exact.needs_derivative and not inner_exact.trains_first
    assert build({"use": "feedback_blending", "attack": learned}, "here", ATTACK).trains_first
