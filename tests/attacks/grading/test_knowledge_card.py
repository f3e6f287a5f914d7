"""Knowledge cards: the threat model in words, and chains through which no derivative passes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedgauge.attacks.grading.knowledge_card import NO_DERIVATIVE, knowledge_card
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.client.components import allowing

Make = Callable[..., Any]
MLP = {"use": "mlp", "hidden": [16]}
SGD = {"use": "local_sgd", "rate": 0.1}


def planned(use: str, **table: Any) -> PlannedAttack:
    return PlannedAttack.from_table({"iterations": 2, **table, "use": use}, "here")


@pytest.mark.parametrize(
    ("changes", "table", "parts"),
    [
        ({}, {"use": "idlg"}, ["honest server", "labels restored", "chain known: local_sgd(rate=0.1)", "1 example per update"]),
        (
            {"data": {"batch_size": 4, "auxiliary": 20}, "chain": [{"use": "clip", "max_norm": 1.0, "each": True}, SGD]},
            {"use": "dlg", "labels": "given", "defense": "unknown", "iterations": 7, "restarts": 3},
            ["labels given", "chain unknown: each clip(max_norm=1.0) > local_sgd(rate=0.1)", "4 examples per update",
             "normalisation known, 20 auxiliary images of the same distribution", "7 iterations x 3 restarts"],
        ),
        ({"model": {"use": "convnet", "width": 1, "mode": "train"}}, {"use": "idlg"},
         ["BatchNorm in train mode, the batch's statistics known from the returned buffers"]),
        ({}, {"use": "dlg", "seconds": 60},
         ["labels optimised", "500 iterations x 1 restart, at most 60 s for a batch of updates"]),
        ({}, {"use": "analytic"}, ["labels restored", "no search"]),
        ({}, {"use": "feedback_blending", "attack": "dlg"}, ["each client's earlier rounds"]),
        ({"data": {"auxiliary": 20}}, {"use": "mean_image"}, ["20 auxiliary images of the same distribution and nothing else"]),
    ],
)  # fmt: skip
def test_the_card_describes_the_threat_model(
    changes: dict[str, Any], table: dict[str, Any], parts: list[str], make_federation: Make
) -> None:
    card = knowledge_card(make_federation(**changes), PlannedAttack.from_table(table, "here"))
    assert set(parts) <= set(card.split("; ")), card


OWN = """
import torch
from dataclasses import dataclass
from fedgauge.client.transforms import UpdateTransform

@dataclass(frozen=True)
class entrywise(UpdateTransform):
    name: str
    def apply(self, update, rng):
        return {k: FUNCTIONS[self.name](t) for k, t in update.items()}

FUNCTIONS = {"floor": torch.floor, "sign": torch.sign, "detach": torch.detach, "zero": lambda t: 0 * t}
"""


@pytest.fixture
def defense(tmp_path: Path) -> Iterator[Callable[[str], dict[str, Any]]]:
    """The table of a user's own defense that applies a function to each entry."""
    (tmp_path / "myflat.py").write_text(OWN)
    with allowing(["myflat"], [tmp_path]):
        yield lambda name: {"use": "myflat:entrywise", "name": name}


@pytest.mark.parametrize("name", ["floor", "sign", "detach"])
@pytest.mark.parametrize("before", [True, False])
def test_the_card_names_a_chain_without_derivative(
    name: str, before: bool, make_federation: Make, defense: Make
) -> None:
    link = defense(name)
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


def test_a_zero_update_is_no_missing_derivative(make_federation: Make, defense: Make) -> None:
    fed = make_federation(model=MLP, chain=[SGD, defense("zero")])
    assert NO_DERIVATIVE not in knowledge_card(fed, planned("inverting_gradients"))
