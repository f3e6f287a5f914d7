"""Knowledge cards: the threat model in words, and chains through which no derivative passes."""

import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Generator, Tensor

from fedgauge.attacks.grading.knowledge_card import NO_DERIVATIVE, knowledge_card
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.client.components import allowing
from fedgauge.client.transforms import UpdateTransform
from fedgauge.client.update import Update

Make = Callable[..., Any]
MLP = {"use": "mlp", "hidden": [16]}
SGD = {"use": "local_sgd", "rate": 0.1}


def planned(use: str, **table: Any) -> PlannedAttack:
    return PlannedAttack.from_table({"iterations": 2, **table, "use": use}, "here")


@pytest.mark.parametrize(
    ("changes", "table", "text"),
    [
        (
            {},
            {"use": "idlg"},
            "honest server; labels restored; chain known: local_sgd(rate=0.1); 1 example an update; "
            "normalisation known, 1000 auxiliary images of the same distribution; 500 iterations x 1 restart",
        ),
        (
            {
                "data": {"batch_size": 4, "auxiliary": 20},
                "chain": [{"use": "clip", "max_norm": 1.0, "each": True}, {**SGD, "steps": 2}],
            },
            {"use": "dlg", "labels": "given", "defense": "unknown", "iterations": 7, "restarts": 3},
            "honest server; labels given; chain unknown: each clip(max_norm=1.0) > local_sgd(rate=0.1, steps=2); "
            "4 examples an update; normalisation known, 20 auxiliary images of the same distribution; "
            "7 iterations x 3 restarts",
        ),
        (
            {"model": {"use": "convnet", "width": 1, "mode": "train"}, "data": {"batch_size": 2}},
            {"use": "idlg"},
            "honest server; labels restored; chain known: local_sgd(rate=0.1); 2 examples an update; normalisation "
            "known, 1000 auxiliary images of the same distribution; BatchNorm in train mode, the batch's statistics known from the "
            "returned buffers; 500 iterations x 1 restart",
        ),
        (
            {},
            {"use": "dlg", "iterations": 1500, "seconds": 60},  # it looks for labels beside the image
            "honest server; labels optimised; chain known: local_sgd(rate=0.1); 1 example an update; normalisation "
            "known, 1000 auxiliary images of the same distribution; 1,500 iterations x 1 restart, at most 60 s a wave",
        ),
        (
            {},
            {"use": "feedback_blending", "attack": "dlg"},
            "honest server; labels optimised; chain known: local_sgd(rate=0.1); 1 example an update; normalisation "
            "known, 1000 auxiliary images of the same distribution; each client's earlier rounds; 500 iterations x 1 restart",
        ),
        (
            {"data": {"auxiliary": 20}},
            {"use": "mean_image"},
            "20 auxiliary images of the same distribution and nothing else",
        ),
    ],
)
def test_the_card_is_the_threat_model_in_words(
    changes: dict[str, Any], table: dict[str, Any], text: str, make_federation: Make
) -> None:
    fed, plan = make_federation(**changes), PlannedAttack.from_table(table, "here")
    assert knowledge_card(fed, plan) == text


@pytest.fixture
def defense() -> Iterator[Callable[[Callable[[Tensor], Tensor]], dict[str, Any]]]:
    """Adds a defense as a package of a user's own would, an entrywise function; returns its component table."""
    added = []

    def add(entrywise: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        @dataclass(frozen=True)
        class plugin(UpdateTransform):
            def apply(self, update: Update, rng: Generator | None) -> Update:
                return {k: entrywise(t) for k, t in update.items()}

        name = f"plugin_{len(added)}"
        plugin.__module__ = name
        module = types.ModuleType(name)
        module.plugin = plugin  # type: ignore[attr-defined]  # what a file would hold
        sys.modules[name] = module
        added.append(name)
        return {"use": f"{name}:plugin"}

    with allowing(["plugin_0"]):
        yield add
    for name in added:
        del sys.modules[name]


FLAT = [lambda t: t.floor(), lambda t: (100 * t).round() / 100, lambda t: t.sign(), lambda t: t.detach()]


@pytest.mark.parametrize("entrywise", FLAT, ids=["floor", "round", "sign", "detach"])
@pytest.mark.parametrize("before", [True, False])
def test_a_chain_that_lets_no_derivative_through_is_said_to(
    entrywise: Callable[[Tensor], Tensor], before: bool, make_federation: Make, defense: Make
) -> None:
    link = defense(entrywise)
    fed = make_federation(model=MLP, chain=[link, SGD] if before else [SGD, link])
    assert NO_DERIVATIVE in knowledge_card(fed, planned("inverting_gradients"))
    assert NO_DERIVATIVE not in knowledge_card(fed, planned("inverting_gradients", defense="unknown"))
    assert NO_DERIVATIVE not in knowledge_card(fed, planned("analytic")), "it needs no derivative"


@pytest.mark.parametrize("link", [
    {"use": "clip", "max_norm": 0.01, "each": True},
    {"use": "gaussian", "sigma": 1.0},
    {"use": "sign"},
    {"use": "prune", "keep": 0.01},
    {"use": "mask", "keep": 0.1},
], ids=lambda link: link["use"])  # fmt: skip
def test_every_shipped_defense_has_a_derivative(link: dict[str, Any], make_federation: Make) -> None:
    fed = make_federation(model=MLP, chain=[link, SGD])
    assert NO_DERIVATIVE not in knowledge_card(fed, planned("inverting_gradients"))


def test_an_update_that_is_zero_is_not_the_derivatives_fault(make_federation: Make, defense: Make) -> None:
    fed = make_federation(model=MLP, chain=[SGD, defense(lambda t: 0 * t)])
    assert NO_DERIVATIVE not in knowledge_card(fed, planned("inverting_gradients"))
