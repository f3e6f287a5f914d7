"""`[audit] effort`: attacks that fit the federation, chosen without its data, and run without anybody knowing a setting."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedgauge.attacks.effort import EFFORTS, attacks_by_effort
from fedgauge.client.components import SpecError, allowing
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.leakage import leakage
from fedgauge.simulations.checks.attack_trial import check_attacks
from tests.client.test_array_inputs import stored
from tests.small_runs import scores_of

LOCAL = {"use": "local_sgd", "rate": 0.1}
NOISE = [{"use": "gaussian", "sigma": 0.1}, LOCAL]
ONE, TWO = ({"use": "mnist5k", "batch_size": size, "auxiliary": 100} for size in (1, 2))
WORDS = {"use": "phrases", "length": 8, "batch_size": 1, "auxiliary": 60}
CONVSMALL = {"use": "convsmall"}

SETTINGS: dict[str, tuple[dict[str, Any], set[str]]] = {  # the tables, and what must be among the attacks of standard effort
    "one example, dense": ({"data": ONE}, {"analytic"}),
    "a batch, dense": ({"data": TWO}, {"spear", "spear_plus_plus"}),
    "a sum, dense": ({"data": ONE, "clients": 4, "secure_sum": {"group": 2}}, {"spear"}),
    "a batch, dense, noise": ({"data": TWO, "chain": NOISE}, {"spear_plus_plus", "bayes_tuned"}),
    "convolutions": (
        {"data": TWO, "model": CONVSMALL},
        {"inverting_gradients_tuned_labels_given", "gifd_tuned", "feature_separation"},
    ),
    "noise": ({"data": TWO, "model": CONVSMALL, "chain": NOISE}, {"bayes_tuned", "bayes_tuned_labels_given"}),
    "local steps": ({"data": TWO, "chain": [LOCAL | {"steps": 2}]}, {"surrogate"}),
    "batch norm": ({"data": ONE, "model": {"use": "resnet20"}}, {"grad_inversion"}),
    "a hidden layer": ({"data": ONE, "chain": [{"use": "soteria", "layer": "1"}, LOCAL]}, {"leave_layer_out"}),
    "a random bottleneck": (
        {"data": ONE, "model": CONVSMALL | {"defense": [{"use": "precode", "latent": 8}]}},
        {"precode_joint", "precode_joint_tuned"},
    ),
    "the same examples again": ({"data": {**ONE, "partition": "iid", "batch_size": 1300}}, {"several_rounds"}),
    "words": ({"data": WORDS, "model": {"use": "tiny_bert"}}, {"exact", "dager", "lamp"}),
    "a batch of sentences": ({"data": {**WORDS, "batch_size": 2}, "model": {"use": "tiny_bert"}}, {"dager", "tag_known_words"}),
}  # fmt: skip


def tables(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"rounds": 2, "clients": 3, "model": {"use": "mlp", "hidden": [16]}, "chain": [LOCAL]}
    return base | changes


@pytest.mark.parametrize("setting", SETTINGS)
def test_more_effort_adds_attacks_and_iterations_and_takes_none_away(setting: str) -> None:
    changes, wanted = SETTINGS[setting]
    federation = Scenario.from_tables(tables(**changes)).federation
    quick, standard, thorough = (
        {t.get("name", t["use"]): t for t in attacks_by_effort(effort, federation)} for effort in EFFORTS
    )
    assert wanted <= standard.keys()
    assert quick.keys() <= standard.keys() <= thorough.keys() and len(quick) < len(thorough)
    assert "membership" in quick and len(quick) > 1, "both kinds of leak"
    for less, more in ((quick, standard), (standard, thorough)):
        assert all(more[name].get("iterations", 1) >= table.get("iterations", 1) for name, table in less.items())
        settings = [{k: v for k, v in t.items() if k != "iterations"} for names in (less, more) for t in names.values()]
        assert all(one in settings[len(less) :] for one in settings[: len(less)])


CHEAP = ("a batch, dense", "words")
COSTLY = SETTINGS.keys() - {"the same examples again", *CHEAP}


@pytest.mark.parametrize("setting", [*CHEAP, *(pytest.param(name, marks=pytest.mark.full) for name in sorted(COSTLY))])
def test_chosen_attacks_work_on_a_stand_in(setting: str) -> None:
    """No attack fails; one that was chosen by the network's structure may still say why it cannot read this update."""
    changes, wanted = SETTINGS[setting]
    scenario = Scenario.from_tables(tables(**changes, audit={"effort": "standard"}))
    failed = {r.name: r.message for r in check_attacks(scenario) if r.works is False and r.needed}
    assert failed == {}


def test_the_choice_differs_where_the_attack_could_not_work() -> None:
    chosen = {
        name: {t["use"] for t in attacks_by_effort("thorough", Scenario.from_tables(tables(**changes)).federation)}
        for name, (changes, _) in SETTINGS.items()
    }
    assert "analytic" not in chosen["a batch, dense"] | chosen["convolutions"] | chosen["a sum, dense"]
    assert (
        "spear" not in chosen["convolutions"] | chosen["a batch, dense, noise"]
        and "bayes" not in chosen["convolutions"]
    )
    assert {"surrogate", "grad_inversion", "leave_layer_out", "precode_joint", "lamp"}.isdisjoint(
        chosen["convolutions"]
    )
    assert "inverting_gradients" not in chosen["words"] and "tag" not in chosen["words"], "one sentence is read exactly"


def test_arrays_are_searched_tensor_by_tensor_too(tmp_path: Path) -> None:
    arrays = {"use": "arrays", "path": stored(tmp_path, (1, 28, 28)), "batch_size": 1, "auxiliary": 50}
    of_arrays, of_images = (
        attacks_by_effort("standard", Scenario.from_tables(tables(data=data)).federation) for data in (arrays, ONE)
    )
    own = [table for table in of_arrays if table not in of_images]
    assert own == [{"use": "dlg", "by_tensor": True, "iterations": 300}]


def test_a_table_of_the_same_name_takes_the_place_of_the_efforts() -> None:
    own = {"use": "inverting_gradients", "iterations": 7, "tune": "off"}
    scenario = Scenario.from_tables(tables(data=TWO, audit={"effort": "quick"}, attack=[own]))
    planned = [p for p in scenario.plan.attacks if p.name == "inverting_gradients"]
    assert [p.budget.iterations for p in planned] == [7]
    assert "spear" in {p.name for p in scenario.plan.attacks}


WAYS = """
from torch import nn
from torch.nn import functional as F

class Small(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(784, 64), nn.Linear(64, 10), nn.ReLU()
        self.act = act

    def forward(self, x):
        return self.b(self.act(self.a(x.flatten(1))))

def in_order(shape, classes): return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
def functional(shape, classes): return Small(F.relu)
def method(shape, classes): return Small(lambda h: h.relu())
def registered_last(shape, classes): return Small(nn.ReLU())
def tanh(shape, classes): return Small(lambda h: h.tanh())
def fails(shape, classes): return nn.Linear(3, 10)
"""


def test_the_choice_follows_what_the_network_computes_and_not_how_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "ways.py").write_text(WAYS)
    with allowing(["ways"], [tmp_path]):
        chosen = {
            way: {
                t["use"]
                for t in attacks_by_effort(
                    "standard", Scenario.from_tables(tables(data=TWO, model={"use": f"ways:{way}"})).federation
                )
            }
            for way in ("in_order", "functional", "method", "registered_last", "tanh", "fails")
        }
    assert "spear" in chosen["in_order"]
    assert chosen["in_order"] == chosen["functional"] == chosen["method"] == chosen["registered_last"]
    assert chosen["tanh"] == chosen["in_order"] - {"spear", "spear_plus_plus"}
    assert chosen["fails"] == chosen["tanh"] - {"feature_separation"}


def test_no_effort_is_no_attack_and_an_unknown_one_is_named() -> None:
    assert all(p.role != "attack" for p in Scenario.from_tables(tables(data=TWO)).plan.attacks)
    with pytest.raises(SpecError):
        Scenario.from_tables(tables(data=TWO, audit={"effort": "most"}))


@pytest.mark.full
def test_behind_noise_the_efforts_own_attacks_pass_what_the_labels_tell(
    tmp_path: Path, make_taped: Callable[..., Run]
) -> None:
    """Nobody named an attack, a weight or a prior."""
    data = {"use": "mnist5k", "batch_size": 4, "auxiliary": 500}
    audit = {"effort": "quick", "executor": "local"}
    run = make_taped(
        tmp_path / "run",
        Scenario.from_tables(tables(data=data, chain=NOISE, audit=audit)),
        1,
    )
    serve(run, LocalExecutor())
    with run.ledger() as ledger:
        means = {k.attack: k.mean for k in leakage(scores_of(ledger), "psnr") if k.round is None}
    assert means["bayes_tuned"] > 1 + max(means["class_mean_image"], means["inverting_gradients"]), means
