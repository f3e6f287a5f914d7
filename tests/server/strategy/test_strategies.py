"""Several rounds of real clients behind the door, with Flower's own strategies."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedgauge.client.components import SpecError, allowing
from fedgauge.client.federation import Federation
from fedgauge.server.app import app as server_app
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import Tape, read_tensors
from fedgauge.server.strategy.build import STRATEGY, build_strategy
from fedgauge.server.strategy.node_discovery import TIMES, LateJoiners, discover_nodes
from fedgauge.server.strategy.reply_checks import CheckedStrategy
from fedgauge.server.update_recorder import UpdateRecorder
from tests.tensors import identical

USES = STRATEGY.names()


def scenario_of(kit: Any, use: str, **changes: Any) -> Scenario:
    strategy = {"use": use, **changes.pop("strategy", {})}
    scenario: Scenario = kit.scenario(strategy=strategy, **changes)
    return scenario


def strategy_of(scenario: Scenario) -> Strategy:
    return build_strategy(scenario.strategy, scenario.protocol.clients)


def train(
    kit: Any,
    scenario: Scenario,
    wrap: Callable[[Strategy, dict[str, Tensor], Any], Strategy] | None = None,
    rounds: int = 3,
    **grid: Any,
) -> dict[str, Tensor]:
    """The trained weights of some rounds on a grid of its own."""
    params, buffers = Federation(scenario.protocol).initial()
    network = kit.grid(scenario, **grid)
    inner = strategy_of(scenario)
    outer = (
        wrap(inner, buffers, network)
        if wrap
        else CheckedStrategy(inner, buffers=buffers, seed=1, clients=dict(network.nodes))
    )
    result = outer.start(network, ArrayRecord(params), rounds)
    return dict(result.arrays.to_torch_state_dict()) if result.arrays else params


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in a)


def by_hand(scenario: Scenario, rounds: int = 3) -> dict[str, Tensor]:
    """FedAvg of equal clients on paper: theta + the mean update, in float64."""
    federation = Federation(scenario.protocol)
    params, buffers = federation.initial()
    for round in range(1, rounds + 1):
        updates = [federation.client_update(params, buffers, c, round) for c in range(scenario.protocol.clients)]
        mean = {k: torch.stack([u[k].double() for u in updates]).mean(0) for k in params}
        params = {k: (t.double() + mean[k]).float() for k, t in params.items()}
    return params


def alone(kit: Any, scenario: Scenario, rounds: int) -> dict[str, Tensor]:
    """The trained weights of a strategy without a door or a recorder: clients' weights in order, as float32."""
    params, _ = Federation(scenario.protocol).initial()
    network, strategy = kit.grid(scenario), strategy_of(scenario)
    for round in range(1, rounds + 1):
        asked = strategy.configure_train(round, ArrayRecord(params), ConfigRecord(), network)
        replies = sorted(network.send_and_receive(asked), key=lambda m: network.nodes[m.metadata.src_node_id])
        for reply in replies:
            update = reply.content.array_records.pop("update").to_torch_state_dict()
            reply.content["arrays"] = ArrayRecord({k: params[k] + update[k] for k in params})
        arrays, _ = strategy.aggregate_train(round, replies)
        assert arrays is not None
        params = {k: t.float() for k, t in arrays.to_torch_state_dict().items()}
    return params


@pytest.mark.parametrize("use", USES)
def test_strategies_train_in_float32_and_do_not_depend_on_arrival_node_ids_or_recording(
    kit: Any, use: str, tmp_path: Path
) -> None:
    scenario = scenario_of(kit, use)
    trained = train(kit, scenario, rounds=2, draw=0)
    assert all(t.dtype == torch.float32 and torch.isfinite(t).all() for t in trained.values())
    assert distance(trained, Federation(scenario.protocol).initial()[0]) > 1e-5, "nothing was trained"
    with Ledger(tmp_path / "ledger.sqlite", create=True) as ledger:
        ledger.add_attacks(scenario.plan, {p.name: "" for p in scenario.plan.attacks})
        tap = UpdateRecorder(ledger, Tape(tmp_path / "tape"), scenario.plan)
        seen = train(kit, scenario, lambda inner, b, g: CheckedStrategy(inner, tap, b, 1, dict(g.nodes)), 2, draw=1)
        assert ledger.progress().total
    assert identical(trained, seen)
    assert identical(trained, alone(kit, scenario, 2))


@pytest.mark.product
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("arrive", [0, 1, 3])
def test_strategies_survive_rounds_in_which_few_answer(kit: Any, use: str, arrive: int) -> None:
    trained = train(kit, scenario_of(kit, use), tamper=lambda round, replies: replies[:arrive], rounds=2)
    assert all(torch.isfinite(t).all() for t in trained.values())


@pytest.mark.parametrize("use", ["FedAvg", "FedAdam", "FedMedian"])
def test_a_round_without_replies_keeps_the_weights_and_goes_on(kit: Any, use: str) -> None:
    """Round 2 is lost: the weights that clients get in round 3 are those of round 2."""
    scenario = scenario_of(kit, use)
    network: list[Any] = []

    def wrap(inner: Strategy, buffers: dict[str, Tensor], grid: Any) -> Strategy:
        network.append(grid)
        return CheckedStrategy(inner, clients=dict(grid.nodes))

    train(kit, scenario, wrap, tamper=lambda round, replies: [] if round == 2 else replies)
    sent = {m.content["config"]["server-round"]: m.content.array_records["arrays"] for m in network[0].sent}
    at = {round: dict(record.to_torch_state_dict()) for round, record in sent.items()}
    assert not identical(at[1], at[2])
    assert identical(at[2], at[3])


# ---------------------------------------------------------------------------------------------------------- FedProx


PROX = {"chain": [{"use": "local_sgd", "rate": 0.1, "steps": 3}]}


def test_fedprox_is_the_proximal_step_on_paper(kit: Any) -> None:
    scenario = scenario_of(kit, "FedProx", strategy={"proximal_mu": 2.0}, **PROX)
    federation = Federation(scenario.protocol)
    params, _ = federation.initial()
    changes = []
    for client in range(4):
        here = dict(params)
        for _ in range(3):
            g = federation.gradient(here, federation.batch_at(client, 1), None)
            here = {k: t - 0.1 * (g[k] + 2.0 * (t - params[k])) for k, t in here.items()}
        changes.append(here)
    expected = {k: torch.stack([c[k] for c in changes]).mean(0) for k in params}
    assert distance(train(kit, scenario, rounds=1), expected) < 1e-6


# ------------------------------------------------------------------------------- failures, participation


def test_a_run_with_chaos_in_it_goes_on_to_the_end(kit: Any, tmp_path: Path) -> None:
    """Lost, doubled, spoiled, dead, strange: every round has its rows, and the model stays finite."""
    chance = random.Random(0)

    def tamper(round: int, replies: list[Message]) -> list[Message]:
        kept = []
        for message in replies:
            fate = chance.choice(["keep", "keep", "lose", "double", "nan", "error"])
            if fate == "nan" and not message.has_error():
                record = message.content.array_records["update"]
                record["1.bias"] = ArrayRecord({"x": torch.full((8,), float("nan"))})["x"]
            if fate == "error" and not message.has_error():
                message = Message(Error(2, "gone"), metadata=message.metadata)  # type: ignore[call-overload]
            kept += {"lose": [], "double": [message, message]}.get(fate, [message])
        return kept

    scenario = scenario_of(kit, "FedAvg")
    with Ledger(tmp_path / "ledger.sqlite", create=True) as ledger:
        ledger.add_attacks(scenario.plan, {p.name: "" for p in scenario.plan.attacks})
        tap = UpdateRecorder(ledger, Tape(tmp_path / "tape"), scenario.plan)
        trained = train(
            kit,
            scenario,
            lambda inner, b, g: CheckedStrategy(inner, tap, b, 1, dict(g.nodes)),
            rounds=12,
            tamper=tamper,
        )
        rows = ledger.observations()
    assert [(o["round"], o["client"]) for o in rows] == [(r, c) for r in range(1, 13) for c in range(4)]
    assert {o["status"] for o in rows} == {"accepted", "rejected", "missing"}
    assert all(o["reason"] for o in rows if o["status"] != "accepted")
    assert all(torch.isfinite(t).all() for t in trained.values())


# -------------------------------------------------------------------------------------------------- the whole server


@pytest.mark.parametrize("curious", [True, False])
def test_the_serverapp_trains_evaluates_and_records(kit: Any, tmp_path: Path, curious: bool) -> None:
    scenario = kit.scenario(audit={"executor": "local", "curious": curious})
    run = kit.make_run(tmp_path / "run", scenario, tape=False)
    grid = kit.grid(scenario)
    serve(grid, run)
    with run.ledger() as ledger:
        rounds, seen = ledger.rounds(), ledger.observations()
        assert [r["round"] for r in rounds] == [0, 1, 2, 3]
        assert all(0 <= r["accuracy"] <= 1 and r["loss"] > 0 and r["seconds"] > 0 for r in rounds)
        assert len(seen) == 12
        assert all(bool(o["digest"]) == curious for o in seen)
        assert ledger.progress().total == (48 if curious else 0)
    assert distance(read_tensors(run.folder / "model.safetensors"), by_hand(scenario)) < 1e-6


def serve(grid: Any, run: Run) -> None:
    """server/app.py's main, as Flower calls it."""
    server_app(grid, Context(1, 1, {}, RecordDict(), {"run-dir": str(run.folder)}))


def test_a_simulation_waits_for_its_clients_however_busy_the_machine_is(kit: Any) -> None:
    """Processes that were starting for two minutes were taken for clients that do not exist."""
    grid = kit.grid(kit.scenario())
    deliver = grid.send_and_receive
    grid.send_and_receive = lambda messages, timeout=None: deliver(messages) if timeout is None else []
    assert discover_nodes(grid, 4) == grid.nodes
    with pytest.raises(RuntimeError):
        discover_nodes(grid, 4, patience=0.1)


def test_a_census_in_which_two_nodes_are_the_same_client_is_refused(kit: Any) -> None:
    grid = kit.grid(kit.scenario())
    for context in grid.contexts.values():
        context.node_config["partition-id"] = 2
    with pytest.raises(RuntimeError):
        discover_nodes(grid, 4)


def test_in_a_deployment_one_client_does_not_stop_the_others(kit: Any) -> None:
    """Four nodes: two claim to be client 2, one says a number that is none, one is client 0; a fifth client never comes."""
    grid = kit.grid(kit.scenario())
    contexts = dict(zip(grid.nodes.values(), grid.contexts.values(), strict=True))
    contexts[1].node_config["partition-id"], contexts[3].node_config["partition-id"] = 2, 77
    assert list(discover_nodes(grid, 5, patience=0.5).values()) == [0]
    for context in grid.contexts.values():
        context.node_config["partition-id"] = 1
    with pytest.raises(RuntimeError):
        discover_nodes(grid, 5, patience=0.5)


def test_nodes_that_reconnect_to_a_deployment_are_asked_again(kit: Any) -> None:
    """A SuperLink that was restarted calls its old nodes connected, and answers for them itself until they are."""
    grid = kit.grid(kit.scenario())
    deliver, away = grid.send_and_receive, [[0, 1, 2, 3], [1, 3], []]
    client = dict(grid.nodes)

    def answer(messages: Any, **options: Any) -> Any:
        gone = away.pop(0)
        errors = [Message(Error(5), reply_to=m) for m in messages if client[m.metadata.dst_node_id] in gone]
        return errors + list(deliver([m for m in messages if client[m.metadata.dst_node_id] not in gone], **options))

    grid.send_and_receive = answer
    assert discover_nodes(grid, 4, patience=60) == client
    assert not away


def test_a_late_client_joins_a_deployment_once_under_its_own_number(kit: Any) -> None:
    grid = kit.grid(kit.scenario())
    nodes = {client: node for node, client in grid.nodes.items()}
    there, asked = [nodes[0], nodes[2]], Counter[int]()
    deliver = grid.send_and_receive

    def counted(messages: Any, **options: Any) -> Any:
        asked.update(m.metadata.dst_node_id for m in messages)
        return deliver(messages, **options)

    grid.get_node_ids, grid.send_and_receive = lambda: there, counted
    known = discover_nodes(grid, 4, patience=0.0)
    late = LateJoiners(grid, 4, known)
    late.admit()
    assert sorted(known.values()) == [0, 2] and sum(asked.values()) == 2, "nobody new, nobody asked"
    there.append(nodes[3])
    late.admit()
    assert known[nodes[3]] == 3
    grid.contexts[nodes[1]].node_config["partition-id"] = 2  # says that it is who is already there
    there.append(nodes[1])
    for _ in range(TIMES + 2):
        late.admit()
    assert sorted(known.values()) == [0, 2, 3] and asked[nodes[1]] == TIMES


# ---------------------------------------------------------------------------------------------------- build_strategy


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "use"),
        ({"use": "flwr.serverapp.strategy:FedAvg"}, "FedAvg"),
        ({"use": "os:system"}, "os:system"),
        ({"use": "Strategy"}, "Strategy"),
        ({"use": "FedXgbBagging"}, "FedXgbBagging"),
        ({"use": "QFedAvg", "client_learning_rate": 0.1}, "QFedAvg"),
        ({"use": "FedAvg", "eta": 1.0}, "eta"),
        ({"use": "FedAvg", "fraction_train": "all"}, "fraction_train"),
        ({"use": "FedAvg", "fraction_train": 0.0}, "fraction_train"),
        ({"use": "FedAvg", "fraction_train": 1.01}, "fraction_train"),
        ({"use": "FedAvg", "fraction_evaluate": 0.5}, "fraction_evaluate"),
        ({"use": "FedAvg", "min_train_nodes": 5}, "min_train_nodes"),
        ({"use": "FedAvg", "min_available_nodes": 5}, "min_available_nodes"),
        ({"use": "MultiKrum", "num_nodes_to_select": 0}, "num_nodes_to_select"),
        ({"use": "Krum", "num_malicious_nodes": -1}, "num_malicious_nodes"),
        ({"use": "Bulyan", "num_malicious_nodes": 1}, "needs 7 clients"),
        ({"use": "FedAdam", "eta": -0.1}, "eta must be above 0"),
        ({"use": "FedAvgM", "server_learning_rate": 0.0}, "server_learning_rate"),
        ({"use": "FedAvg", "train_metrics_aggr_fn": "sum"}, "train_metrics_aggr_fn"),
        ({"use": "FedAvg", "arrayrecord_key": "weights"}, "arrayrecord_key"),
        ({"use": "FedAvg", "weighted_by_key": "examples"}, "weighted_by_key"),
    ],
)
def test_strategies_that_cannot_be_honoured_are_refused(table: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=rf"\[strategy\].*{words}"):
        build_strategy(table, 4)


def test_what_a_users_function_gives_is_a_strategy_or_refused(tmp_path: Path) -> None:
    lines = "from flwr.serverapp.strategy import FedAvg, Strategy\n\ndef {}(**_) -> Strategy:\n    return {}\n"
    (tmp_path / "givers.py").write_text(lines.format("right", "FedAvg()") + lines.format("wrong", "None"))
    with allowing(["givers"], [tmp_path]):
        assert isinstance(build_strategy({"use": "givers:right"}, 4), Strategy)
        with pytest.raises(SpecError, match="NoneType"):
            build_strategy({"use": "givers:wrong"}, 4)


def test_a_strategy_gets_its_arguments_and_a_simulations_defaults() -> None:
    strategy = build_strategy({"use": "FedAdam", "eta": 1, "fraction_train": 0.5}, 7)
    seen = vars(strategy)
    assert (seen["eta"], seen["fraction_train"], seen["fraction_evaluate"]) == (1.0, 0.5, 0.0)
    assert (seen["min_train_nodes"], seen["min_available_nodes"]) == (1, 7)
