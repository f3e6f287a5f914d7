"""The Flower ServerApp: builds the strategy, wraps it, trains, and records every round."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from logging import WARNING
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedgauge.attacks.engine.batch_limiter import exhausted
from fedgauge.attacks.threat_model import public_knowledge
from fedgauge.client.deployment.secure_sum import PairwiseMasking
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol
from fedgauge.client.update import Params
from fedgauge.server.store import checkpoint
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import REPEATED, STARTED, Participation, repeated, sanitised
from fedgauge.server.store.run import NotResumable, Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import TapeError, write_tensors
from fedgauge.server.store.tape_source import TapeSource
from fedgauge.server.strategy.build import build_strategy
from fedgauge.server.strategy.client_grading import ClientGrader
from fedgauge.server.strategy.malicious_strategy import MaliciousStrategy
from fedgauge.server.strategy.node_discovery import LateJoiners, discover_nodes
from fedgauge.server.strategy.reply_checks import CheckedStrategy, RoundReplies
from fedgauge.server.strategy.secure_aggregation import SecureSumStrategy
from fedgauge.server.update_recorder import UpdateRecorder

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the scenario of the run folder that the run-config names."""
    federate(Run(Path(str(context.run_config["run-dir"]))), grid, context.run_id)


def federate(run: Run, grid: Grid, flower_run: int = 1) -> None:
    """Train a run's federation over a grid of nodes, from its last checkpoint on, and record every round.

    Args:
        flower_run: Flower's number for this training, by which a deployment's clients know it.

    Raises:
        RunBusy: another server trains this run; it may outlive a driver that was killed.
    """
    torch.set_num_threads(1)  # like the clients, so that equal seeds give equal bits
    with run.lock("server"), run.ledger() as ledger:
        _train(run, ledger, grid, flower_run)


def one_round(strategy: Strategy, grid: Grid, round: int, arrays: ArrayRecord, timeout: float) -> ArrayRecord:
    """Let clients train, and aggregate; a round without replies leaves the weights as they are."""
    messages = strategy.configure_train(round, arrays, ConfigRecord(), grid)
    aggregated, _ = strategy.aggregate_train(round, grid.send_and_receive(messages, timeout=timeout))
    return arrays if aggregated is None else aggregated


def _train(run: Run, ledger: Ledger, grid: Grid, flower_run: int) -> None:
    scenario = run.scenario()
    fed, protocol, timeout = scenario.federation, scenario.protocol, scenario.simulation.round_timeout
    start = checkpoint.starting_point(run, ledger, scenario)
    done, params, buffers = (start.round, start.params, start.buffers) if start else (0, *fed.initial())
    recorder = UpdateRecorder(ledger, run.tape(), scenario.plan if scenario.audit.curious else None, scenario.tape.keep)
    # in a deployment a client may never come back, and the rounds go on with the others
    inner = build_strategy(scenario.strategy, protocol.clients, 1 if ledger.deployed else None)
    if start is not None:
        vars(inner).update(start.strategy)
    malicious = _malicious(run, ledger, scenario, inner)
    together = protocol.secure_sum if ledger.deployed else None  # a simulation's is the checked strategy's
    answered: list[RoundReplies] = []
    claimed = None if ledger.deployed else fed.shards.batch_size  # a deployment's clients choose their own
    strategy = CheckedStrategy(
        malicious or inner,
        answered.append,
        buffers,
        protocol.seed,
        discover_nodes(grid, protocol.clients, timeout if ledger.deployed else None),
        protocol=replace(protocol, secure_sum=None) if together else protocol,
        counts=malicious.counts if malicious else lambda round, client: True,
        options=replace(scenario.validator, max_examples=scenario.validator.max_examples or claimed),
    )
    if malicious is not None:
        malicious.clients = strategy.clients
    grader: ClientGrader | None = None
    between: list[Callable[[], None]] = []
    if ledger.deployed:
        _note_start(ledger, done, flower_run)
        grader = ClientGrader(run, ledger, grid, strategy.clients, timeout)
        between = [grader.ask, LateJoiners(grid, protocol.clients, strategy.clients).admit]
    served = strategy if together is None else _secured(strategy, protocol, timeout)
    arrays, began = ArrayRecord(params), time.perf_counter()
    for round in range(done, protocol.rounds + 1):
        if round > done:
            arrays = one_round(served, grid, round, arrays, timeout)
            params = dict(arrays.to_torch_state_dict())
            intake = answered.pop() if together is None else _of_sums(answered.pop(), protocol)
            if malicious is not None:
                malicious.note(intake)
            at = checkpoint.Checkpoint(round, params, strategy.buffers, vars(inner), ())
            recorder(intake, partial(_keep, run, ledger, at))
        elif any(row["round"] == done for row in ledger.rounds(done)):
            continue
        accuracy, loss = _figures(fed, ledger, round, params, strategy.buffers)
        ledger.record_round(round, accuracy, loss, time.perf_counter() - began)
        for wait in between:
            wait()
        began = time.perf_counter()
    if grader is not None:
        grader.finish()
    write_tensors(run.model, {**params, **strategy.buffers})


# ---------------------------------------------------------------------------------------- a deployment's secure sum


def _secured(strategy: CheckedStrategy, protocol: Protocol, timeout: float) -> SecureSumStrategy:
    """The strategy behind the secure sum of the scenario's terms, which every client's owner has agreed to.

    Args:
        timeout: seconds that clients have to answer a question without training.
    """
    assert protocol.secure_sum is not None

    def groups(nodes: Sequence[int]) -> list[list[int]]:
        of = {strategy.clients[node]: node for node in nodes}
        return [[of[client] for client in group if client in of] for group in protocol.groups]

    return SecureSumStrategy(strategy, PairwiseMasking(**protocol.secure_sum.real), "updates", timeout, groups)


def _of_sums(intake: RoundReplies, protocol: Protocol) -> RoundReplies:
    """A round by groups: members of a sum have no entries of their own, and only complete sums are attacked.

    An attack computes what the scenario's whole group would send; a sum that lacks a member is another function.
    """
    complete, partial = [], []
    for reply in intake.accepted:
        gone = [c for c in protocol.group(reply.client) if c != reply.client and c not in intake.summed]
        if not gone:
            complete.append(reply)
            continue
        why = f"the sum of its group without client {', '.join(map(str, gone))}: trained on, not attacked"
        partial.append(Participation(reply.client, "accepted", why, reply.examples))
    others = [p for p in intake.refused if p.client not in intake.summed]
    return replace(intake, accepted=tuple(complete), refused=(*others, *partial))


# ------------------------------------------------------------------------------------------- what a round leaves


def _note_start(ledger: Ledger, done: int, flower_run: int) -> None:
    """Note which Flower run trains from here on, and that clients may already have answered the round before it started.

    Args:
        done: the last round that counts; later ones that were recorded are counted where they are deleted.
    """
    if any(key.startswith(STARTED) for key in ledger.meta()):
        ledger.set_meta(**{REPEATED: str(repeated(ledger.meta()) + 1)})
    ledger.set_meta(**{f"{STARTED}{done + 1}": str(flower_run)})


def _malicious(run: Run, ledger: Ledger, scenario: Scenario, inner: Strategy) -> MaliciousStrategy | None:
    """The scenario's malicious server around a strategy; it remembers replies to earlier starts that are still on the tape."""
    if not scenario.server_attack:
        return None

    def trouble(message: str) -> None:
        ledger.set_meta(server_attack=message)

    malicious = MaliciousStrategy(
        inner, scenario.server_attack, public_knowledge(scenario.federation), scenario.protocol, trouble=trouble
    )
    source = TapeSource(scenario.federation, run=run, ledger=ledger)
    for round, client, digest in source.taped():
        if malicious.is_stateful(round, client):
            try:
                malicious.remember(source.observation(round, client, digest))
            except TapeError as error:
                trouble(f"an earlier reply is lost: {error}")
    return malicious


def _figures(
    fed: Federation, ledger: Ledger, round: int, params: Params, buffers: Mapping[str, Tensor]
) -> tuple[float | None, float | None]:
    """Test accuracy and loss; None, with a note, if the model fails with weights that the training has led to."""
    fed.load_buffers(buffers)
    try:
        return fed.evaluate(params)
    except Exception as error:
        # a user's model or loss may raise anything over weights that one client made extreme; the first are nobody's
        if round == 0 or exhausted(error):
            raise
        why = sanitised(f"{type(error).__name__}: {error}")
        note = f"the test figures are missing, as the model fails with the round's weights ({why})"
    ledger.add_problem("figures", note, round)
    log(WARNING, "fedgauge: round %d: %s", round, note)
    return None, None


def _keep(run: Run, ledger: Ledger, at: checkpoint.Checkpoint, seen: Sequence[Participation]) -> None:
    """Write a checkpoint; if that fails the training goes on, and the run records why it cannot be resumed there."""
    try:
        replace(at, seen=tuple(seen)).write(run.folder)
    except NotResumable as error:
        checkpoint.mark_not_resumable(run.folder, str(error))
    except OSError as error:  # e.g. a full disk; the previous checkpoint is still complete
        ledger.add_problem("checkpoint", f"there is no checkpoint: {error.strerror or error}", at.round)
