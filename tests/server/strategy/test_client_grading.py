"""A deployment's clients grade: the same scores as a simulation's, to the precision, and no truth at the server."""

import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict

from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.source import NO_TRUTH, FederationSource
from fedgauge.client.components import SpecError
from fedgauge.client.federation import Federation
from fedgauge.defenses.accounting import Accountant
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.strategy.client_grading import ANSWERING, UNGRADED, ClientGrader, read
from fedgauge.simulations.run.create import create_run
from fedgauge.simulations.run.in_memory import flower, train
from tests import small_runs
from tests.owned import OwnedGrid, train_owned

CHAIN = [{"use": "local_sgd", "rate": 0.1}]
ATTACKS = [
    {"use": "inverting_gradients", "iterations": 40},
    {"use": "analytic"},  # does not apply to two examples an update
]
Scores = dict[tuple[int, int, str], list[float | None]]


def small(**changes: Any) -> Scenario:
    return small_runs.scenario(**{"attack": ATTACKS, "simulation": {"round_timeout": 60.0}} | changes)


def owner(folder: Path, client: int, scenario: Scenario, **changes: Any) -> Path:
    """A client's file, by which it does what the scenario assumes."""
    place = folder / str(client)
    place.mkdir(parents=True)
    tables: dict[str, Any] = {
        "client": client,
        "data": {**scenario.protocol.data, "sampling": "agreed"},
        "chain": list(scenario.protocol.chain),
        "grading": {"mode": "scores"},
    }
    (place / "client.toml").write_text(tomli_w.dumps(tables | changes))
    return place / "client.toml"


def owners(folder: Path, scenario: Scenario, **changes: Any) -> list[Path]:
    return [owner(folder / "clients", c, scenario, **changes) for c in range(scenario.protocol.clients)]


def deployed(folder: Path, scenario: Scenario, files: Sequence[Path], number: int = 1) -> Run:
    """A deployment's run, trained and attacked side by side, graded by its clients."""
    run = create_run(scenario, folder / "run", mode="deployment")
    training = threading.Event()
    training.set()
    service = threading.Thread(
        target=serve, args=(run, LocalExecutor()), kwargs={"scenario": run.scenario(), "follow": training.is_set}
    )
    service.start()
    try:
        train_owned(run, files, number)
    finally:
        training.clear()
        service.join()
    return run


def psnr(ledger: Ledger) -> Scores:
    found: Scores = {}
    for row in ledger.scores("psnr"):
        found.setdefault((row["round"], row["client"], row["attack"]), []).append(row["value"])
    return found


def cards(ledger: Ledger) -> dict[str, str]:
    return {row["name"]: row["knowledge"] for row in ledger.attacks()}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """The same scenario as a simulation and as a deployment."""
    folder, scenario = tmp_path_factory.mktemp("pair"), small()
    simulation = create_run(scenario, folder / "simulation")
    train(simulation)
    serve(simulation, LocalExecutor())
    return simulation, deployed(folder, scenario, owners(folder, scenario))


def test_clients_give_the_simulations_scores_to_half_a_decibel(pair: tuple[Run, Run]) -> None:
    with pair[0].ledger() as simulation, pair[1].ledger() as deployment:
        true, told = psnr(simulation), psnr(deployment)
    assert true.keys() == told.keys(), "attacks, baselines and attacks on somebody else's update alike"
    compared = 0
    for key, values in true.items():
        known = [v for v in values if v is not None]
        assert len(told[key]) == len(values)
        for a, b in zip(sorted(known), sorted(v for v in told[key] if v is not None), strict=True):
            assert abs(a - b) <= 0.25 + 1e-6, key
            assert math.isclose(b / 0.5, round(b / 0.5)), "a multiple of the precision"
            compared += 1
    assert compared == 2 * 3 * 5 * 2  # rounds, clients, (an attack, its wrong client and three baselines), examples


def test_an_attack_that_left_no_images_is_a_row_with_its_status_and_no_question(pair: tuple[Run, Run]) -> None:
    with pair[1].ledger() as ledger:
        rows = [r for r in ledger.scores("psnr") if r["attack"] == "analytic"]
        assert {r["status"] for r in rows} == {"not_applicable"}
        assert [r["value"] for r in rows] == [None] * (2 * 3 * 2)
        assert len([r for r in ledger.scores("psnr") if r["attack"] == "wrong_client(analytic)"]) == 2 * 3 * 2
        assert not any("analytic" in (r["reason"] or "") for r in ledger.graded())


def test_the_cards_say_who_graded_and_how_exactly(pair: tuple[Run, Run]) -> None:
    with pair[0].ledger() as simulation, pair[1].ledger() as deployment:
        assert not any("graded" in card for card in cards(simulation).values())
        found = cards(deployment)
        grading = deployment.meta()["grading"]
        assert grading.startswith("graded by the clients") and grading.endswith("0.5 dB")
        assert found["inverting_gradients"].endswith(f"; {grading}") and found["mean_image"].endswith(f"; {grading}")
        assert found["inverting_gradients"].count("graded") == 1, "the words from before are gone"
        assert found["analytic"].endswith("; not graded")


def trained_only(folder: Path, scenario: Scenario, **changes: Any) -> tuple[Run, "Counting"]:
    """A deployment whose attack service is to come later, and its clients."""
    run = create_run(scenario, folder / "run", mode="deployment")
    grid = Counting(scenario, owners(folder, scenario, **changes))
    with flower(), pytest.MonkeyPatch.context() as patch:
        # nobody attacks yet: there is nothing to grade
        patch.setattr("fedgauge.server.strategy.client_grading.ClientGrader.finish", lambda self: None)
        from fedgauge.server.app import federate

        federate(run, grid)
    return run, grid


def attacked(folder: Path, scenario: Scenario, **changes: Any) -> tuple[Run, "Counting"]:
    """The same, attacked."""
    run, grid = trained_only(folder, scenario, **changes)
    serve(run, LocalExecutor(), scenario)
    return run, grid


class Counting(OwnedGrid):
    """Counts what is asked, and can lose a client."""

    def __init__(self, scenario: Scenario, files: Sequence[Path], number: int = 1) -> None:
        super().__init__(scenario.protocol, files, number)
        self.asked: list[tuple[int, str]] = []
        self.away: set[int] = set()
        self.mute: set[int] = set()
        self.waited: list[float | None] = []
        self.tamper: Callable[[Message], Message] = lambda answer: answer

    def get_node_ids(self) -> list[int]:
        return [node for node in super().get_node_ids() if node not in self.away]

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        sent = list(messages)
        self.asked += [(m.metadata.dst_node_id, m.metadata.message_type) for m in sent]
        self.waited.append(timeout)
        answers = super().send_and_receive(sent, timeout=timeout)
        return [self.tamper(m) for m in answers if m.metadata.src_node_id not in self.mute]

    @property
    def queries(self) -> list[int]:
        return [node for node, kind in self.asked if kind == "query.grade"]


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """No attack service comes back in these tests."""
    monkeypatch.setattr("fedgauge.server.strategy.client_grading.GRACE", 0.0)


def grader(run: Run, ledger: Ledger, grid: Counting) -> ClientGrader:
    return ClientGrader(run, ledger, grid, grid.clients, timeout=30.0)


def test_one_query_a_client_and_round_and_none_again(tmp_path: Path) -> None:
    run, grid = attacked(tmp_path, small())
    with run.ledger() as ledger, flower():
        grader(run, ledger, grid).ask()
        assert sorted(grid.queries) == [1, 1, 2, 2, 3, 3]
        grader(run, ledger, grid).ask()
        grader(run, ledger, grid).finish()
        assert len(grid.queries) == 6


def test_a_round_is_asked_about_once_its_attacks_have_ended(tmp_path: Path) -> None:
    scenario = small()
    run, grid = trained_only(tmp_path, scenario)
    waves = iter(range(100))
    serve(run, LocalExecutor(), scenario, stop=lambda: next(waves) > 3)
    with run.ledger() as ledger, flower():
        progress = ledger.progress()
        assert progress.done and progress.queued
        ended = {1, 2} - {r for (r,) in ledger._db.execute("SELECT round FROM jobs WHERE state = 'queued'")}
        grader(run, ledger, grid).ask()
        assert {
            r for r, _, _ in psnr(ledger) if any(psnr(ledger)[k][0] is not None for k in psnr(ledger) if k[0] == r)
        } == ended
        before = len(grid.queries)
        grader(run, ledger, grid).finish()  # no service lives: what is there is graded, and nothing waited for
        assert ledger.progress().queued == progress.queued
        assert len(grid.queries) >= before


def test_an_absent_client_is_asked_again_and_reported_at_the_end(tmp_path: Path) -> None:
    run, grid = attacked(tmp_path, small(rounds=1))
    with run.ledger() as ledger, flower():
        grid.away = {2}
        grader(run, ledger, grid).ask()
        told = psnr(ledger)
        assert (1, 2, "inverting_gradients") in told, "client 2's job needs client 0, who is there"
        assert (1, 1, "inverting_gradients") not in told
        assert (1, 0, "inverting_gradients") not in told, "its wrong client is away"
        assert not [r for r in ledger.scores("psnr") if r["status"] == UNGRADED]
        grid.away = set()
        grader(run, ledger, grid).ask()
        assert all(v is not None for c in range(3) for v in psnr(ledger)[1, c, "inverting_gradients"])


def test_a_client_that_never_answers_is_waited_for_once_in_training_and_once_at_the_end(tmp_path: Path) -> None:
    run, grid = attacked(tmp_path, small())
    with run.ledger() as ledger, flower():
        grid.mute = {2}
        grid.waited.clear()  # the training's own
        asks = ClientGrader(run, ledger, grid, grid.clients, timeout=300.0)
        for _ in range(3):
            asks.ask()
        assert grid.queries.count(2) == 1, "it let one question pass"
        assert set(grid.waited) == {ANSWERING}
        asks.finish()
        assert grid.queries.count(2) == 2, "and had one more chance"
        assert all(value is None for values in (psnr(ledger)[r, 1, "analytic"] for r in (1, 2)) for value in values)
        assert all(v is not None for r in (1, 2) for v in psnr(ledger)[r, 0, "inverting_gradients"])


def test_grading_is_off_unless_the_owner_says_otherwise(tmp_path: Path) -> None:
    run, grid = attacked(tmp_path, small(rounds=1), grading={})
    with run.ledger() as ledger, flower():
        grader(run, ledger, grid).finish()
        grading = ledger.meta()["grading"]
        assert grading.startswith("not graded") and "owner" in grading
        assert cards(ledger)["inverting_gradients"].endswith(f"; {grading}")
        assert all(value is None for values in psnr(ledger).values() for value in values)
        statuses = {r["status"] for r in ledger.scores("psnr")}
        assert statuses == {UNGRADED, "not_applicable"}
    assert not any((tmp_path / "clients" / "0" / "state").glob("answers/*"))


def test_beyond_an_owners_number_of_questions_the_floors_go_first(tmp_path: Path) -> None:
    run, grid = attacked(tmp_path, small(rounds=1), grading={"mode": "scores", "queries": 1})
    with run.ledger() as ledger, flower():
        grader(run, ledger, grid).finish()
        told = psnr(ledger)
        assert all(v is not None for v in told[1, 0, "inverting_gradients"])
        assert told[1, 0, "mean_image"] == [None]
        assert "as many questions" in cards(ledger)["mean_image"]


# ------------------------------------------------------------------------------------- what a client says is not trusted


def answer(values: Any, precision: Any = 0.5, refused: Mapping[str, str] | None = None) -> Message:
    content = RecordDict({"psnr": MetricRecord(values), "grading": ConfigRecord({"precision": precision})})
    content["refused"] = ConfigRecord(dict(refused or {}))
    question = Message(RecordDict(), dst_node_id=1, message_type="query.grade")
    return Message(content, reply_to=question)


@pytest.mark.parametrize(
    ("values", "precision"),
    [
        *(
            ({"dlg": values}, 0.5)
            for values in ([20.0], 20.0, [20.0, math.nan], [20.0, -1.0], [1e300, 20.0], [20.0] * 3)
        ),
        *(({"dlg": [20.0, 21.0]}, precision) for precision in (0.0, -1.0, math.nan, math.inf, "fine", 1)),
    ],
    ids=str,
)
def test_an_answer_that_is_no_decibels_of_these_images_or_has_no_precision_is_none(values: Any, precision: Any) -> None:
    with flower():
        found = read(answer(values, precision), {"dlg": 2})
    assert not found.psnr and found.reason("dlg")


def test_only_requested_clients_are_scored() -> None:
    with flower():
        found = read(answer({"dlg": [20.0, 21.0], "other": [50.0, 50.0]}, refused={"third": "no"}), {"dlg": 2})
    assert dict(found.psnr) == {"dlg": [20.0, 21.0]}
    assert "third" not in found.refused


def test_a_clients_words_are_shown_as_one_short_line() -> None:
    with flower():
        question = Message(RecordDict(), dst_node_id=1, message_type="query.grade")
        found = read(Message(Error(112, "\x1b[31mno\nreally" + "x" * 5000), reply_to=question), {"dlg": 2})
    words = found.reason("dlg")
    assert words.startswith("[31mno really") and len(words) <= 300 and words.isprintable()


# -------------------------------------------------------------------------------------------- there is no truth at the server


def test_an_auditor_of_a_deployment_never_asks_for_the_truth(
    monkeypatch: pytest.MonkeyPatch, observe: Callable[..., Any]
) -> None:
    scenario = small()
    wave = observe(scenario.federation, (0, 1))

    def secret(self: Federation, *_: object) -> None:
        raise AssertionError("the truth was fetched")

    monkeypatch.setattr(Federation, "batch_at", secret)
    monkeypatch.setattr(Federation, "trained_on", secret)
    audited = Auditor(FederationSource(scenario.federation, blind=True)).audit(
        scenario.plan.attacks[0], wave, {0: 1, 1: 0}
    )
    assert [[r.metric for r in a.rows] for a in audited] == [["objective"]] * 2
    with pytest.raises(AssertionError):
        Auditor(FederationSource(scenario.federation)).audit(scenario.plan.attacks[0], wave)


def test_labels_cannot_be_given_without_a_truth(tmp_path: Path, observe: Callable[..., Any]) -> None:
    scenario = small(attack=[{**ATTACKS[0], "labels": "given"}])
    with pytest.raises(SpecError):
        create_run(scenario, tmp_path / "run", mode="deployment")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=f"^{re.escape(NO_TRUTH)}$"):
        Auditor(FederationSource(scenario.federation, blind=True)).audit(
            scenario.plan.attacks[0], observe(scenario.federation, (0,))
        )


# ------------------------------------------------------------------------------------------------------------- epsilons


@pytest.fixture
def private() -> Federation:
    chain = [
        {"use": "clip", "max_norm": 1.0, "each": True},
        {"use": "gaussian", "sigma": 1.0},
        *CHAIN,
    ]
    return small(chain=chain).federation


def test_what_the_server_may_know_amplifies_nothing(private: Federation) -> None:
    """Without amplification it is the exact Gaussian mechanism: sensitivity 2 C / B, composed over the rounds.

    What rounding costs a deployment's discrete noise comes on top, some thousandths.
    """
    import dp_accounting

    shard = len(private.shards.indices[0])
    secret, agreed = (Accountant.of(private, secret=s).spent(2, shard) for s in (True, False))
    exact = dp_accounting.get_epsilon_gaussian(1.0 / (2 * 1.0 / 2) / math.sqrt(2), 1e-5)
    assert exact < agreed.record < 1.005 * exact
    assert secret.record < agreed.record
    assert secret.client == pytest.approx(agreed.client, rel=2e-3), (
        "all of a client's data is in whatever is drawn of it"
    )
