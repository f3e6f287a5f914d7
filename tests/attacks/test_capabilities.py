"""Attacks announce what they can do: nobody asks which attack it is."""

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import fedgauge.attacks
import fedgauge.server
import fedgauge.simulations
from fedgauge.attacks.base import Attack
from fedgauge.attacks.malicious.server_attack import ServerAttack
from fedgauge.attacks.plan import ATTACK
from fedgauge.client.components import build

PACKAGES = (fedgauge.attacks, fedgauge.server, fedgauge.simulations)


def kinds(base: type) -> set[type]:
    return {kind for below in base.__subclasses__() for kind in {below, *kinds(below)}}


def asked(path: Path) -> list[tuple[int, str]]:
    """The names of classes that a file asks about, with their lines."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            found += [(node.lineno, getattr(n, "id", getattr(n, "attr", ""))) for n in ast.walk(node.args[1])]
        if isinstance(node, ast.MatchClass):
            found.append((node.lineno, getattr(node.cls, "id", getattr(node.cls, "attr", ""))))
    return found


def test_nobody_asks_which_attack_it_is() -> None:
    for module in pkgutil.walk_packages(fedgauge.attacks.__path__, "fedgauge.attacks."):
        importlib.import_module(module.name)
    names = {kind.__name__ for base in (Attack, ServerAttack) for kind in kinds(base)}
    assert {"GradientMatching", "FeedbackBlending", "DelegatingAttack", "StatefulAttack", "class_fishing"} <= names
    files = [path for package in PACKAGES for path in Path(next(iter(package.__path__))).rglob("*.py")]
    asking = [f"{path}:{line} {name}" for path in files for line, name in asked(path) if name in names]
    assert len(files) > 200 and not asking


@pytest.mark.parametrize(
    ("use", "says"),
    [
        ("inverting_gradients", {"starts_from_images": True, "needs_derivative": True, "label_source": "restored"}),
        ("dlg", {"starts_from_images": True, "is_stateful": False, "label_source": "optimised"}),
        ("feedback_blending", {"starts_from_images": False, "is_stateful": True, "label_source": "restored"}),
        ("several_rounds", {"is_stateful": True}),
        ("gi_gip", {"trains_first": True}),
        ("gifd", {"trains_first": True}),
        ("learning_to_invert", {"trains_first": True}),
        ("ridge_inversion", {"trains_first": False}),
        ("lone_target", {"decodes": ("dead_layer",), "needs_secure_sum": True}),
        ("lone_example", {"decodes": ("class_fishing", "feature_fishing"), "needs_secure_sum": False}),
        ("analytic", {"starts_from_images": False, "is_stateful": False, "decodes": (), "needs_derivative": False}),
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
