"""`fedgauge run` and `audit`: train and attack a federation, attack it again."""

import argparse
import os
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from hashlib import sha256
from pathlib import Path
from typing import get_args

from rich.console import Console

from fedgauge.attacks.base import Status
from fedgauge.attacks.plan import AttackPlan
from fedgauge.client.components import SpecError
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_file import LedgerError
from fedgauge.server.store.ledger_types import EMPTY
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario, attack_from, component_of, plan_of
from fedgauge.server.store.tester_truth import TesterTruth
from fedgauge.server.views.formatting import many
from fedgauge.server.views.outcomes import none_accepted
from fedgauge.server.views.participation import other_sizes
from fedgauge.simulations.cli.finding_runs import find_run
from fedgauge.simulations.cli.options import Commands, add_log, add_settings, flag, numbers, path, refuse, several, tell
from fedgauge.simulations.cli.run_summary import print_summary
from fedgauge.simulations.live.view import view_of
from fedgauge.simulations.run.exit_status import FAILED, INTERRUPTED, exit_status


def add_to(commands: Commands) -> None:
    start = commands.add(run, with_run=False)
    path(start, "scenario", "SCENARIO.toml", nargs="?")
    path(start, "--resume", "RUN", "continue a run that was interrupted, failed or was killed")
    text = "train in one process, without Flower's servers: the same messages and bit-identical results, without the start-up"
    flag(start, "--in-memory", text)
    start.add_argument("--rounds", type=int, metavar="N", help="number of rounds (default: the scenario's)")
    add_log(start)
    add_settings(start)
    again = commands.add(audit)
    add_log(again)
    several(again, "--attack", "'NAME KEY=VALUE ...'", "attack with this (repeatable)")
    again.add_argument("--rounds", type=numbers, metavar="1,2,3", help="with --attack: rounds to attack")
    again.add_argument("--clients", type=numbers, metavar="0,1", help="with --attack: clients to attack")
    text = "repeat these jobs once their cause is fixed, or all after a change to the run's scenario.toml (repeatable)"
    again.add_argument("--retry", action="append", choices=("failed", "not-applicable", "all"), default=[], help=text)
    text = "grade reconstructions against the clients' own examples: a folder of files"
    again.add_argument("--truth", metavar="FOLDER|'NAME KEY=VALUE ...'", help=text)
    again.add_argument("--devices", metavar="cuda:0,cuda:1", help="auto, cpu, cuda or names (default: the scenario's)")
    flag(again, "--force", "attack although the replay check fails")
    flag(again, "--follow", "wait for jobs until the training ends; in a deployment, until it is complete")


def run(options: argparse.Namespace) -> int:
    from fedgauge.simulations.checks.scenario_check import try_first
    from fedgauge.simulations.run.create import new_run, resume
    from fedgauge.simulations.run.launch import AuditFailed, TrainingFailed
    from fedgauge.simulations.run.simulate import Interrupt, simulate

    both = options.resume is not None and (options.set or options.rounds is not None)
    one = (options.scenario is None) != (options.resume is None)
    refuse({"name either a SCENARIO.toml or --resume RUN": not one})
    refuse({"--resume continues with the run's scenario: leave out --set and --rounds": both})
    before = find_run(options.resume, options.runs) if options.resume is not None else None
    scenario = resume(before) if before else Scenario.load(options.scenario, options.set, options.rounds)
    if scenario.audit.curious:
        scenario.audit.devices_here()  # refused before training rather than after it
    console = Console(stderr=True, markup=False, highlight=False)
    if before is None:
        try_first(scenario, console, str(options.scenario))
    folder = before or new_run(scenario, options.scenario.stem, options.runs)
    if options.log == "auto":
        counts = f"{many(scenario.protocol.clients, 'client')}, {many(scenario.protocol.rounds, 'round')}"
        console.print(f"run {folder.name}: {counts}")
    status = INTERRUPTED
    with suppress(KeyboardInterrupt), Interrupt().caught() as interrupt:
        try:
            simulate(folder, scenario, console, interrupt, options.log == "quiet", options.in_memory)
            if not interrupt.asked:
                status = exit_status(folder)
        except (TrainingFailed, AuditFailed) as error:
            tell(error)
            status = FAILED
    if status == 0:
        _try_closed_forms(folder)
    print_summary(folder, options.log == "quiet")
    return status


def audit(options: argparse.Namespace) -> int:
    from fedgauge.server.pool.service import attack_devices
    from fedgauge.server.pool.tester_grading import grade, regrade
    from fedgauge.simulations.checks.scenario_check import refuse_misfit
    from fedgauge.simulations.run.create import enter_attacks, prepare_app

    more = options.attack or options.retry or options.truth
    refuse({"--follow carries out the run's plan: omit --attack, --retry and --truth": options.follow and more})
    refuse({"--rounds and --clients need --attack": not options.attack and (options.rounds or options.clients)})
    run = find_run(options.run, options.runs)
    devices = options.devices.split(",") if options.devices and "," in options.devices else options.devices
    _repeat_problems(run)  # before the scenario is read, which may be one of them
    scenario = run.scenario([f"audit.devices={devices}"] if devices else [])
    console = Console(stderr=True, markup=False, highlight=False)
    if options.truth is None:  # before anything is put into the queue
        attack_devices(scenario.audit, in_cluster="RAY_ADDRESS" in os.environ)
    with run.ledger() as ledger:
        refuse({f"--truth: {run.folder} is graded by its own data": options.truth and not ledger.deployed})
        truth = None if options.truth is None else TesterTruth.named(options.truth)
        if ledger.foreign:
            replies = prepare_app(run, ledger, scenario)
            console.print(f"the app's clients upload {replies} ([tape] replies = {scenario.tape.replies!r})")
        if options.follow and ledger.foreign:  # the app's server has entered no attack
            _assume(run, ledger, scenario, enter_attacks(ledger, scenario, scenario.plan), [])
        if not options.follow:
            if truth is None and not any(o["digest"] for o in ledger.observations()):
                other = "[audit] curious is false, or they were deleted ([tape] keep, fedgauge prune), or the reason is above"
                why = none_accepted(ledger) or ledger.meta().get(EMPTY, other)
                raise LedgerError(f"{run.folder} has no recorded updates: {why}")
            refuse_misfit(scenario.federation, str(run.folder / "scenario.toml"))
            plan = _extra_plan(options, scenario) if options.attack else scenario.plan
            known = enter_attacks(ledger, scenario, plan)
            ledger.enqueue(plan)
            if ledger.foreign:
                _assume(run, ledger, scenario, known, options.retry)
            if options.retry:
                _retry(run, ledger, scenario, options.retry, console)
        waiting = ledger.progress().waiting
        if waiting and (words := other_sizes(ledger, scenario.tables)):
            console.print(f"warning: {words}", soft_wrap=True)  # before hours of work
        own = ledger.deployed and not ledger.foreign  # its training may fail, and be continued

        def coming() -> bool:
            return options.follow and (run.at_work("training") or (own and not run.model.exists()))

        interrupted = _attack(options, run, scenario, console, coming) if truth is None or waiting else False
        if truth is not None and not interrupted:
            if options.log == "auto":
                console.print("grading, and testing membership again, by the truth")
            grade(run, ledger, scenario, truth)
        elif not (interrupted or options.follow):
            regrade(run, ledger, scenario)
    if options.follow:  # the driver of the training prints the summary
        return INTERRUPTED if interrupted else 0
    if not interrupted:
        _try_closed_forms(run)
    print_summary(run, options.log == "quiet")
    judged = [planned.name for planned in plan.attacks] if options.attack else None
    return INTERRUPTED if interrupted else exit_status(run, judged, options.force)


def _repeat_problems(run: Run) -> None:
    """Print what the recording of a user's app could not do, each kind once."""
    with run.ledger(readonly=True) as ledger:
        problems = ledger.problems()
    counts = Counter(problem.code for problem in problems)
    for problem in {problem.code: problem for problem in reversed(problems)}.values():
        tell(f"recording: {problem.words} ({counts[problem.code]} x)")


def _attack(
    options: argparse.Namespace, run: Run, scenario: Scenario, console: Console, coming: Callable[[], bool]
) -> bool:
    """Attack what waits, and what is coming; returns whether somebody interrupted it."""
    from fedgauge.server.pool.service import make_executor, serve
    from fedgauge.simulations.run.simulate import Interrupt

    following = view_of(run, console, options.log == "quiet", scenario)
    # before our own signal handlers: Ray sets a SIGTERM handler when it starts
    executor = make_executor(scenario.audit)
    with suppress(KeyboardInterrupt), Interrupt().caught() as interrupt, closing(executor), following.shown() as view:
        serve(
            run, executor, scenario, follow=coming, stop=lambda: interrupt.asked, tick=view.update, force=options.force
        )
    return interrupt.asked


def _try_closed_forms(run: Run) -> None:
    """If no attack shows a leak, note for the verdict whether one without a search reads simulated clients."""
    from fedgauge.server.views.snapshot import read_once
    from fedgauge.server.views.verdict import CLOSED_FORM, verdict_of
    from fedgauge.simulations.checks.scenario_check import read_exactly

    with read_once(run) as reading:
        strongest, before = verdict_of(reading).strongest, reading.meta.get(CLOSED_FORM, "")
    words = "" if strongest is None or strongest.leaks else read_exactly(run.scenario())
    if words != before:
        with run.ledger() as ledger:
            ledger.set_meta(**{CLOSED_FORM: words})


def _assume(run: Run, ledger: Ledger, scenario: Scenario, known: dict[str, str], retry: list[str]) -> None:
    """Note what is assumed of an app; refuse to go on under other assumptions than those of its finished attacks."""
    assumed = sha256(f"{scenario.protocol.to_json()}{scenario.tape.replies}".encode()).hexdigest()
    before = ledger.meta().get("assumed", assumed)
    if before != assumed and ledger.progress().done and "all" not in retry:
        remedy = f"attack all again with fedgauge audit {run.folder} --retry all, or restore the file"
        raise SpecError(f"{run.folder / 'scenario.toml'} is not what it was when attacks were made: {remedy}")
    if before != assumed:
        ledger.describe("knowledge", known)
        ledger.set_meta(replay="", training="")  # they were of the other assumptions
    ledger.set_meta(assumed=assumed)


def _retry(run: Run, ledger: Ledger, scenario: Scenario, kinds: list[str], console: Console) -> None:
    with run.lock("audit"):  # no service may be at work on them
        statuses = {"failed", *get_args(Status)} if "all" in kinds else {kind.replace("-", "_") for kind in kinds}
        again, gone = ledger.retry_ended(statuses, scenario.plan.wave)
    lost = f"; {gone} cannot be: their updates are deleted" if gone else ""
    console.print(f"fedgauge: {again} attacks ({' or '.join(kinds)}) are tried again{lost}")


def _extra_plan(options: argparse.Namespace, scenario: Scenario) -> AttackPlan:
    """The plan of --attack 'dlg iterations=300 name=longer': components by name, with their settings."""
    tables = [attack_from(component_of(text), Path()) for text in options.attack]
    plan = scenario.plan
    rounds, clients = options.rounds or plan.rounds, options.clients or plan.clients
    when = {"every": plan.every} if rounds is None else {"rounds": list(rounds)}
    whom = {} if clients is None else {"clients": list(clients)}
    return plan_of(tables, {"seed": plan.seed, "wave": plan.wave, **when, **whom}, scenario.federation)
