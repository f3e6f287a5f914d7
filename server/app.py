"""The Flower ServerApp: builds the strategy, wraps it, trains, and records every round."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from logging import WARNING
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy

from fedgauge.attacks.engine.batch_limiter import exhausted
from fedgauge.attacks.threat_model import public_knowledge
from fedgauge.client.federation import Federation
from fedgauge.client.update import Params
from fedgauge.server.recorder import UpdateRecorder
from fedgauge.server.store import checkpoint
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import REPEATED, STARTED, Participation, repeated, sanitised
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import TapeError, write_tensors
from fedgauge.server.store.uploads import read_observation
from fedgauge.server.strategy.build import build_strategy
from fedgauge.server.strategy.checked import CheckedStrategy, RoundReplies
from fedgauge.server.strategy.client_grading import ClientGrader
from fedgauge.server.strategy.deployed_sum import of_sums, secured
from fedgauge.server.strategy.malicious_strategy import MaliciousStrategy
from fedgauge.server.strategy.node_discovery import LateJoiners, discover_nodes
from fedgauge.server.strategy.strategy_wrapper import Wrapper

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


def _train(run: Run, ledger: Ledger, grid: Grid, flower_run: int) -> None:
    scenario = run.scenario()
    fed = scenario.federation
    start = checkpoint.starting_point(run, ledger, scenario)
    done, params, buffers = (start.round, start.params, start.buffers) if start else (0, *fed.initial())
    recorder = UpdateRecorder(ledger, run.tape(), scenario.plan if scenario.audit.curious else None, scenario.tape.keep)
    # in a deployment a client may never come back, and the rounds go on with the others
    inner = build_strategy(scenario.strategy, scenario.protocol.clients, 1 if ledger.deployed else None)
    if start is not None:
        checkpoint.restore(inner, start.strategy)
    seen: list[Participation] = []
    malicious = _malicious(run, ledger, scenario, inner)

    together = scenario.protocol.secure_sum if ledger.deployed else None  # a simulation's is the checked strategy's

    def take(intake: RoundReplies) -> None:
        if together is not None:
            intake = of_sums(intake, scenario.protocol)
        if malicious is not None:
            malicious.note(intake)
        seen[:] = recorder.put(intake)

    def over(round: int, arrays: ArrayRecord) -> None:
        weights = dict(arrays.to_torch_state_dict())
        _keep(run, ledger, checkpoint.Checkpoint(round, weights, strategy.buffers, vars(inner), tuple(seen)))
        recorder.enter(round, seen)

    claimed = None if ledger.deployed else fed.shards.batch_size  # a deployment's clients choose their own
    strategy = CheckedStrategy(
        malicious or inner,
        take,
        buffers,
        scenario.protocol.seed,
        discover_nodes(grid, scenario.protocol.clients, scenario.simulation.round_timeout if ledger.deployed else None),
        protocol=replace(scenario.protocol, secure_sum=None) if together else scenario.protocol,
        strict=True,
        counts=malicious.counts if malicious else lambda round, client: True,
        options=replace(scenario.validator, max_examples=scenario.validator.max_examples or claimed),
    )
    if malicious is not None:
        malicious.clients = strategy.clients
    between: list[Callable[[], None]] = []
    finish: Callable[[], None] | None = None
    if ledger.deployed:
        _note_start(ledger, done, flower_run)
        grader = ClientGrader(run, ledger, grid, strategy.clients, scenario.protocol, scenario.simulation.round_timeout)
        late = LateJoiners(grid, scenario.protocol.clients, strategy.clients)
        between, finish = [grader.ask, late.admit], grader.finish
    record = _Record(fed, ledger, strategy, recorder, done, between)
    rounds, timeout = scenario.protocol.rounds - done, scenario.simulation.round_timeout
    served = strategy if together is None else secured(strategy, scenario.protocol, timeout)
    continued = ResumedStrategy(served, done, over)
    result = continued.start(grid, ArrayRecord(params), rounds, timeout, evaluate_fn=record)
    trained = result.arrays.to_torch_state_dict() if result.arrays else params
    if finish is not None:
        finish()
    write_tensors(run.model, {**trained, **strategy.buffers})


class ResumedStrategy(Wrapper):
    """A strategy that resumes after some rounds: Flower counts from 1, the wrapped strategy gets the true round.

    Args:
        done: how many rounds are finished.
        over: called after each round's aggregation with the true round and the new weights.
    """

    def __init__(self, inner: Strategy, done: int, over: Callable[[int, ArrayRecord], None]) -> None:
        self.inner, self.done, self.over = inner, done, over
        self._arrays = ArrayRecord()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The wrapped strategy's."""
        self._arrays = arrays
        return self.inner.configure_train(self.done + server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The wrapped strategy's; a round without replies leaves the weights unchanged."""
        arrays, metrics = self.inner.aggregate_train(self.done + server_round, replies)
        self.over(self.done + server_round, self._arrays if arrays is None else arrays)
        return arrays, metrics


def _note_start(ledger: Ledger, done: int, flower_run: int) -> None:
    """Note which of Flower's runs trains from here on, and that clients may have answered the round before its start already.

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
    for o in ledger.observations():
        if o["status"] == "accepted" and o["digest"] and malicious.is_stateful(o["round"], o["client"]):
            try:
                key = o["round"], o["client"], o["digest"]
                malicious.remember(read_observation(run, ledger, scenario.federation, *key))
            except TapeError as error:
                trouble(f"an earlier reply is lost: {error}")
    return malicious


@dataclass
class _Record:
    """Flower calls it between rounds: it evaluates and records the round once, then calls whoever waits for the round's end."""

    fed: Federation
    ledger: Ledger
    strategy: CheckedStrategy
    recorder: UpdateRecorder
    done: int  # rounds before this start
    between: Sequence[Callable[[], None]]
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.recorded = {row["round"] for row in self.ledger.rounds(self.done)}

    def __call__(self, counted: int, arrays: ArrayRecord) -> MetricRecord | None:
        if (round := self.done + counted) in self.recorded:
            return None
        figures = self._figures(round, dict(arrays.to_torch_state_dict()))
        accuracy, loss = figures or (None, None)
        seconds = time.perf_counter() - self.began
        self.ledger.record_round(round, accuracy, loss, seconds, self.recorder.seconds.pop(round, 0.0))
        for wait in self.between:
            wait()
        self.began = time.perf_counter()
        return figures and MetricRecord({"accuracy": figures[0], "loss": figures[1]})

    def _figures(self, round: int, params: Params) -> tuple[float, float] | None:
        """Test accuracy and loss; None, with a note, if the model fails with weights that the training has led to."""
        self.fed.load_buffers(self.strategy.buffers)
        try:
            return self.fed.evaluate(params)
        except Exception as error:
            # a user's model or loss may raise anything over weights that one client made extreme; the first are nobody's
            if round == 0 or exhausted(error):
                raise
            why = sanitised(f"{type(error).__name__}: {error}")
            note = f"the test figures are missing, as the model fails with the round's weights ({why})"
        self.ledger.add_problem("figures", note, round)
        log(WARNING, "fedgauge: round %d: %s", round, note)
        return None


def _keep(run: Run, ledger: Ledger, at: checkpoint.Checkpoint) -> None:
    """Write a checkpoint; if that fails the training goes on, and the run records why it cannot be resumed there."""
    try:
        at.write(run.folder)
    except checkpoint.StateNotSavable as error:
        checkpoint.mark_not_resumable(run.folder, str(error))
    except OSError as error:  # e.g. a full disk; the previous checkpoint is still complete
        ledger.set_meta(checkpoint=f"round {at.round} has no checkpoint: {error.strerror or error}")
