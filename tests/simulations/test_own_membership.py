"""A user's own test of membership counts as one in a run and wherever the run is read, as in a paper's table."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fedgauge.attacks.modality.membership import HELD, MEMBER
from fedgauge.client.components import SpecError, allowing
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.overview import Overview
from fedgauge.server.views.snapshot import RunSnapshot
from fedgauge.server.views.tables import in_json
from fedgauge.server.views.verdict import verdict_of
from fedgauge.simulations.reports.report import write_report
from fedgauge.simulations.reproduction.paper_tables import AttackSpec

OWN = """
from dataclasses import dataclass
from typing import ClassVar
from fedgauge.attacks.base import Attack
from fedgauge.attacks.membership.attack import membership
from fedgauge.attacks.membership.gradients import CandidateGradients
from fedgauge.attacks.membership.scores import SCORES, Scoring


@dataclass(frozen=True)
class aligned(membership):
    strangers: int = 150
    held: int = 5

    def scores(self, wave, known, candidates):
        return SCORES["cosine"](Scoring(CandidateGradients(known, wave.params, candidates), wave, None))


@dataclass(frozen=True)
class remembering(aligned):
    is_stateful: ClassVar[bool] = True


def remembers() -> Attack:  # its annotation says less than what it returns
    return remembering()
"""
PLANNED = ("aligned", "remembers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("own")
    (made / "own_tests.py").write_text(OWN)
    with allowing(()):
        yield made
    sys.modules.pop("own_tests", None)


@pytest.fixture(scope="module")
def run(folder: Path, make_scenario: Callable[..., Scenario], make_taped: Callable[..., Run]) -> Run:
    """A run that is attacked by both, in a process that may load them."""
    with allowing(["own_tests"], [folder]):
        scenario = make_scenario(
            attack=[{"use": "idlg", "iterations": 5}, *({"use": f"own_tests:{name}"} for name in PLANNED)],
            chain=[{"use": "local_sgd", "rate": 0.1}],
            data={"use": "mnist5k", "batch_size": 2, "auxiliary": 400},
            model={"use": "mlp", "hidden": [8]},
        )
        made = make_taped(folder / "run", scenario)
        serve(made, LocalExecutor())
    return made


def test_a_run_and_a_table_agree_on_what_tests_membership(folder: Path) -> None:
    with allowing(["own_tests"], [folder]):
        asked = {name: AttackSpec(name, {"use": f"own_tests:{name}"}).metric for name in PLANNED}
    assert asked == {"aligned": MEMBER, "remembers": HELD}


def test_its_numbers_are_in_the_ledger_next_to_the_guesses(run: Run) -> None:
    with run.ledger() as ledger:
        rows = [(row["attack"], row["metric"], row["value"]) for row in ledger.scores()]
        assert ledger.progress().failed == 0
    values = {name: [v for a, metric, v in rows if (a, metric) == (name, MEMBER)] for name, _, _ in rows}
    assert sum(values["aligned"]) / len(values["aligned"]) > 0.7, values["aligned"]
    assert values["label_frequency"] and values["loss"] and values["wrong_client(aligned)"]
    assert any((name, metric) == ("remembers", HELD) for name, metric, _ in rows)
    assert not any(name in PLANNED and metric == "psnr" for name, metric, _ in rows)


def test_it_is_shown_where_its_module_may_not_be_loaded(run: Run) -> None:
    sys.modules.pop("own_tests", None)
    with pytest.raises(SpecError):
        AttackSpec("aligned", {"use": "own_tests:aligned"}).build()
    with run.ledger() as ledger:
        planned = {name: attack.metric for name, attack in ledger.planned().items()}
    assert (planned["aligned"], planned["remembers"]) == (MEMBER, HELD)
    with closing(RunSnapshot(run)) as reading, reading.now():
        told, found = in_json(Overview(reading)), verdict_of(reading)
    rows = {tuple(row[:2]) for row in told["membership_table"]["rows"]}
    assert rows >= {("Batch membership", "aligned"), ("Dataset membership", "remembers")}
    assert {s["name"] for f in told["over_rounds"] if f["metric"] == MEMBER for s in f["series"]} >= {"aligned"}
    assert {test.attack for test in found.members} == set(PLANNED)
    assert not any("not tested" in sentence for sentence in found.sentences)
    assert "aligned" in write_report(run).read_text()
