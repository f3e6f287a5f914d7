"""Creates a run's folder, or prepares an interrupted run to continue."""

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Literal

import torch

from fedgauge.attacks.engine.devices import CPU
from fedgauge.attacks.grading.knowledge_card import SEPARATOR, cannot_move, knowledge_card
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.attacks.plan import AttackPlan
from fedgauge.attacks.source import NO_TRUTH
from fedgauge.client.components import SpecError
from fedgauge.server.store import run_files
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import DEPLOYMENT, LABEL_METRIC, MAIN_METRIC, OWN
from fedgauge.server.store.run import NotResumable, Run, RunBusy
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape_source import REPLIES, Replies, replies_of
from fedgauge.simulations.run.environment import environment, package

DECISIVE = ("fedgauge", "torch", "numpy", "flwr")  # versions of these packages change the trained bits
GPU_WAVE = 64  # observations that a GPU attacks together, if nothing else is asked for
Mode = Literal["simulation", "deployment"]


def new_run(scenario: Scenario, name: str, runs: Path) -> Run:
    """Create a run under runs/, named by time and scenario."""
    return create_run(scenario, free_folder(re.sub(r"[^A-Za-z0-9_-]+", "-", name), runs))


def free_folder(name: str, runs: Path) -> Path:
    """Return a folder that does not exist yet, named by the time and this name."""
    stem = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{name}"
    return next(folder for n in count(1) if not (folder := runs / (stem if n == 1 else f"{stem}-{n}")).exists())


def create_run(scenario: Scenario, folder: Path, mode: Mode = "simulation") -> Run:
    """Create a run in this folder, with its attacks in the ledger.

    Raises:
        SpecError: a deployment cannot do what the scenario asks for, or simulated clients would hold no examples.
    """
    if mode == DEPLOYMENT:
        check_deployable(scenario)
    elif scenario.protocol.data.get("partition") == "none":
        raise SpecError('[data] partition = "none" leaves simulated clients no examples of their own: use "iid"')
    elif "RAY_ADDRESS" not in os.environ:
        scenario = _with_waves_for(scenario, scenario.audit.devices_here())
    run = Run.create(folder, scenario)
    _keep_environment(run)
    with run.ledger() as ledger:
        ledger.set_meta(rounds=str(scenario.protocol.rounds), **_metrics(scenario))
        if mode == DEPLOYMENT:
            ledger.set_meta(mode=mode, **{OWN: "1"})
        if scenario.audit.curious:
            enter_attacks(ledger, scenario, scenario.plan)
    return run


def _keep_environment(run: Run) -> None:
    run_files.write(run.folder / "environment.json", json.dumps(environment(), indent=2).encode())


def prepare_app(run: Run, ledger: Ledger, scenario: Scenario) -> Replies:
    """Write what the tap in a user's app left to the audit: data, versions; return what the clients are taken to upload.

    Raises:
        SpecError: the scenario asks for what no deployment gives.
    """
    check_deployable(scenario)
    if not (run.folder / "environment.json").exists():
        _keep_environment(run)
    ledger.set_meta(**_metrics(scenario))
    if scenario.tape.replies != "auto":
        ledger.set_meta(**{REPLIES: scenario.tape.replies})
    return replies_of(run, ledger)


def _metrics(scenario: Scenario) -> dict[str, str]:
    fed = scenario.federation
    return {MAIN_METRIC: modality_of(fed.shards.dataset).main.key, LABEL_METRIC: fed.label_kind.metric}


def _with_waves_for(scenario: Scenario, devices: Sequence[torch.device]) -> Scenario:
    """The scenario with waves of a size for its devices, unless it names one; where CPUs work, waves are for them."""
    audit = scenario.tables.get("audit", {})
    if "wave" in audit or CPU in devices:
        return scenario
    tables = {**scenario.tables, "audit": {**audit, "wave": GPU_WAVE}}
    return replace(scenario, tables=tables, plan=replace(scenario.plan, wave=GPU_WAVE))


def resume(run: Run, mode: Mode = "simulation") -> Scenario:
    """Bring an interrupted run's ledger and tape to its last checkpoint; returns its scenario.

    Call `simulate` next, as for a new run: the server continues from the checkpoint by itself.

    Raises:
        NotResumable: the run is complete, has the other mode, was trained by another version, or its checkpoint is unusable.
        RunBusy: a process still trains it.
    """
    from fedgauge.server.store.checkpoint import starting_point
    from fedgauge.server.strategy.build import build_strategy  # imports Flower, which an audit does not need

    if (server := run.holder("server")) is not None:
        raise RunBusy(f"{run.folder} is still trained by process {server}; if you killed it, try again in a minute")
    with run.lock("training"), run.ledger() as ledger:
        if ledger.deployed and mode != DEPLOYMENT:
            raise NotResumable(f"{run.folder} is no simulation: continue it with ./compose.sh FOLDER up")
        scenario = run.scenario()
        if run.model.exists():
            waiting = ledger.progress().waiting
            left = f"; {waiting} attacks wait: fedgauge audit {run.folder}" if waiting else ""
            raise NotResumable(f"{run.folder} is complete: its {scenario.protocol.rounds} rounds are trained{left}")
        _same_versions(run)
        start = starting_point(run, ledger, scenario)
        if start is not None:  # tried here, where it is refused in a sentence
            least = 1 if ledger.deployed else None  # as the server builds it
            build_strategy(scenario.strategy, scenario.protocol.clients, least)
    return scenario


def _same_versions(run: Run) -> None:
    path = run.folder / "environment.json"
    then: dict[str, str] = {}
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        then = dict(json.loads(run_files.read(path, run_files.MOST_VERSIONS))["packages"])
    for name in DECISIVE:
        if (before := then.get(name)) != (now := package(name)):
            raise NotResumable(f"{path} names {name} {before}, and this is {now}; resume the run with {before}")


def check_deployable(scenario: Scenario) -> None:
    """Raise SpecError for a scenario that only a simulation can run."""
    protocol = scenario.protocol
    refused: dict[str, object] = {
        "[canaries]: examples are planted only in a simulation": protocol.canary_examples,
        "[canaries]: they are read one by one, which [secure_sum] hides": protocol.canaries and protocol.secure_sum,
    }
    if protocol.secure_sum is not None:
        _ = protocol.secure_sum.real  # it needs a clip
        sums = "[secure_sum]: it sums only parameters, and the network has BatchNorm's statistics: set [model] norm"
        refused[sums] = scenario.federation.initial()[1]
    for planned in scenario.plan.attacks:
        refused[f"[[attack]] {planned.name}: {NO_TRUTH}"] = planned.labels == "given" and planned.role != "baseline"
    if words := [words for words, holds in refused.items() if holds]:
        raise SpecError(f"{words[0]}; a deployment cannot have it")


def enter_attacks(ledger: Ledger, scenario: Scenario, plan: AttackPlan) -> dict[str, str]:
    """Enter a plan's attacks into a run's ledger; returns their threat-model cards."""
    mode = ledger.meta().get("mode", "simulation")
    known = cards(scenario, plan, mode)
    flat = [planned.name for planned in plan.attacks if cannot_move(scenario.federation, planned)]
    ledger.add_attacks(plan, known, flat, "not graded" if mode == DEPLOYMENT else None)
    return known


def cards(scenario: Scenario, plan: AttackPlan, mode: str = "simulation") -> dict[str, str]:
    """The threat-model card of each attack of a plan; of a deployment's attacks with what is assumed of the clients."""
    fed, server = scenario.federation, scenario.server
    texts = {planned.name: knowledge_card(fed, planned, server=server) for planned in plan.attacks}
    if scenario.audit.precision != "ieee":
        for planned in plan.attacks:
            if not planned.build().on_cpu:
                texts[planned.name] += f"{SEPARATOR}precision {scenario.audit.precision} on a GPU"
    if mode != DEPLOYMENT:
        return texts
    return {name: f"{text}{SEPARATOR}assumed of the clients, who may do otherwise" for name, text in texts.items()}
