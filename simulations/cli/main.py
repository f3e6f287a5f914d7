"""The command line: fedgauge run | preflight | sweep | audit | watch | report | export | reproduce | bench | ..."""

import argparse
import logging
import os
import signal
import sys
import time
import tomllib
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedgauge.attacks.plan import AttackPlan, describe
from fedgauge.client import components, registry
from fedgauge.client.components import SpecError
from fedgauge.client.deployment.grading import NOT_ALLOWED
from fedgauge.client.deployment.owner import OwnerConfig
from fedgauge.client.files import replacing
from fedgauge.client.local_data import data_folder
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_file import LedgerError
from fedgauge.server.store.run import Run, RunBusy
from fedgauge.server.store.scenario import Scenario, apply_setting
from fedgauge.server.store.tape import TapeError
from fedgauge.server.views.leakage import RoundLeak, round_table
from fedgauge.server.views.reading import state_of, tables_of
from fedgauge.server.views.roles import is_attack
from fedgauge.server.views.scores import Scores, best_so_far
from fedgauge.server.views.server_attacks import server_attack_effects
from fedgauge.simulations.cli import deploy_commands
from fedgauge.simulations.live import json_log
from fedgauge.simulations.live.progress import guarded, participation
from fedgauge.simulations.live.view import Log
from fedgauge.simulations.live.views import view_of

RUNS = Path("runs")
FAILED, MISTAKE = 1, 2
MOST_REASONS = 10  # told at the end of a run: some name a number, and so differ from job to job


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake is told in a sentence, with exit status 2."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        data_folder()  # one that is named and is not there is told before anything begins
        with _own_packages(options):
            return command(options)
    except (SpecError, LedgerError, TapeError, RunBusy) as error:
        print(f"fedgauge: {error}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print("fedgauge: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if command not in (run, audit):
            return 0
        print("fedgauge: stopped, as nobody reads the output any more", file=sys.stderr)
        return FAILED
    except OSError as error:
        print(f"fedgauge: {error}", file=sys.stderr)
        return MISTAKE


def _own_packages(options: argparse.Namespace) -> AbstractContextManager[None]:
    """Packages of the user's own from which a scenario may name components; they lie here, or beside the scenario."""
    names = [*registry.allowed(), *options.allow, *getattr(options, "allow_too", [])]
    if not names:
        return nullcontext()
    beside = [Path(file).parent for key in ("scenario", "sweep") if (file := getattr(options, key, None))]
    beside += [options.folder] if "folder" in options else []  # a deployment's, where its scenario lies
    further = [Path(p) for p in os.environ.get(components.ALLOW_PATH, "").split(os.pathsep) if p]
    return components.allowing(names, [*further, *beside, Path.cwd()])


def run(options: argparse.Namespace) -> int:
    """fedgauge run SCENARIO.toml: train a federation and attack it, or go on with one that was interrupted."""
    from fedgauge.server.app import build_strategy  # imports Flower: seconds, which only this command pays
    from fedgauge.simulations.run.launch import AuditFailed, TrainingFailed
    from fedgauge.simulations.run.simulate import INTERRUPTED, Interrupt, new_run, resume, simulate

    if (options.scenario is None) == (options.resume is None):
        raise SpecError("a run needs a SCENARIO.toml to begin with, or --resume RUN to go on with one that has begun")
    if options.resume is not None and (options.set or options.rounds is not None):
        raise SpecError("--resume goes on with the scenario as it was begun: leave out --set and --rounds")
    before = _find(options.resume, options.runs) if options.resume is not None else None
    scenario = resume(before) if before else Scenario.load(options.scenario, options.set, options.rounds)
    logging.getLogger("flwr").setLevel(logging.ERROR)  # it warns of evaluation being off, which is our own choice
    try:
        build_strategy(scenario.strategy, scenario.protocol.clients)
    except SpecError as error:
        raise SpecError(f"{options.scenario or options.resume}: {error}") from error
    folder = before or new_run(scenario, options.scenario.stem, options.runs)
    console = Console(stderr=True)
    if options.log == "auto":
        console.print(
            f"run {folder.name}: {scenario.protocol.clients} clients, {scenario.protocol.rounds} rounds",
            highlight=False,
        )
        if scenario.left_out:
            beyond = ", ".join(map(str, scenario.left_out))
            console.print(f"not attacked, as they are beyond --rounds: {beyond}", highlight=False)
    status = 0
    with Interrupt().caught() as interrupt:
        try:
            simulate(folder, scenario, console, interrupt, options.log)
            status = INTERRUPTED if interrupt.asked else FAILED if _mismatched(folder) else 0
        except (TrainingFailed, AuditFailed) as error:
            print(f"fedgauge: {error}", file=sys.stderr)
            if options.log == "json":
                json_log.emit("error", words=str(error))
            status = FAILED
    if status and not folder.model.exists():
        print(f"fedgauge: the training can go on: fedgauge run --resume {folder.folder}", file=sys.stderr)
    _tell_end(folder, options.log)
    return status


def audit(options: argparse.Namespace) -> int:
    """fedgauge audit RUN: attack what is on the tape, with the run's own plan or another attack; goes on where it stopped."""
    from fedgauge.server.pool.service import make_executor, serve
    from fedgauge.simulations.run.simulate import INTERRUPTED, Interrupt, cards

    if options.follow and options.attack:
        raise SpecError(
            "--attack is of updates on the tape; with --follow the plan that the run began with is carried out"
        )
    if not options.attack and (options.rounds or options.clients):
        raise SpecError("--rounds and --clients choose what --attack meets: they need an --attack")
    run = _find(options.run, options.runs)
    changes = {"executor": options.executor, "workers": options.workers}
    scenario = run.scenario([f"audit.{key}={value}" for key, value in changes.items() if value is not None])
    console = Console(stderr=True)
    with run.ledger() as ledger:
        if not options.follow:
            if not any(o["digest"] for o in ledger.observations()):
                raise LedgerError(f"{run.folder} has no updates on its tape: {_why_empty(ledger, scenario)}")
            plan = _extra_plan(options, scenario) if options.attack else scenario.plan
            ledger.add_attacks(plan, cards(scenario, plan, ledger.meta().get("mode", "simulation")))
            ledger.enqueue(plan)
        following = view_of(run, ledger, scenario, console, options.log, training=options.follow)
        # before the signals are ours: Ray sets a SIGTERM handler when it starts
        executor = make_executor(scenario.audit.executor, scenario.audit.workers)
        with Interrupt().caught() as interrupt, closing(executor), following.shown() as view:
            serve(
                run,
                executor,
                scenario,
                follow=lambda: options.follow and run.holder("training") is not None,
                stop=lambda: interrupt.asked,
                tick=view.update,
                force=options.force,
            )
    if options.follow:  # the driver tells the rest
        return INTERRUPTED if interrupt.asked else 0
    _tell_end(run, options.log)
    return INTERRUPTED if interrupt.asked else FAILED if _mismatched(run) and not options.force else 0


def _why_empty(ledger: Ledger, scenario: Scenario) -> str:
    """Why nothing is on a tape."""
    observations = ledger.observations()
    if not scenario.audit.curious:
        return "the server was not curious ([audit] curious = false)"
    if not observations:
        return "the run ended before its first round"
    if not any(o["status"] == "accepted" for o in observations):
        return "no reply was accepted"
    if "pruned" in ledger.meta():
        return "fedgauge prune has deleted them"
    if reasons := {o["reason"] for o in observations if o["status"] == "accepted" and o["reason"]}:
        return "; ".join(sorted(reasons))
    return f'[tape] keep = "{scenario.tape.keep}" has deleted them'


def report(options: argparse.Namespace) -> int:
    """fedgauge report RUN ...: write the HTML report of each run, and of several how they compare; figures and a PDF if asked."""
    from fedgauge.simulations.reports.pdf import find_browser, write_pdf
    from fedgauge.simulations.reports.report import write_comparison, write_report

    if options.pdf:
        find_browser()  # before the work, which may be long
    found = [run for named in options.run for run in _find_all(named, options.runs)]
    if options.output is not None and len(found) == 1:
        raise SpecError("--output is where a comparison of several runs goes; a run's own report lies in its folder")
    for run in found:
        print(write_report(run))
        if options.pdf:
            print(write_pdf(run))
    if len(found) > 1:
        beside = found[0].folder.resolve().parent / "comparison.html"
        print(write_comparison(found, options.output or beside))
    if options.figures is not None:
        from fedgauge.simulations.reports.figures import write_figures

        paths, missing = write_figures(found, options.figures)
        print(*paths, sep="\n", end="\n" if paths else "")
        for words in missing:
            print(f"fedgauge: {words}", file=sys.stderr)
    return 0


def watch(options: argparse.Namespace) -> int:
    """fedgauge watch [RUN|FOLDER]: show runs in the browser, while they work and afterwards; Ctrl-C ends it."""
    from fedgauge.server.dashboard.web import serve  # a web framework, which only this command needs

    below = options.runs / options.path if options.path is not None else options.runs
    path = options.path if options.path is not None and options.path.exists() else below
    if not path.is_dir():
        raise LedgerError(f"{path} is no folder: name a run, or the folder in which runs are kept")

    def tell(address: str) -> None:
        print(address, flush=True)
        print("showing what is there until Ctrl-C", file=sys.stderr)
        if not (path / "ledger.sqlite").exists() and not any(path.glob("*/ledger.sqlite")):
            print(f"{path} has no runs yet; start one with: fedgauge run simulations/quickstart.toml", file=sys.stderr)
        if options.open:
            webbrowser.open(address)

    token = options.token if options.token_file is None else options.token_file.read_text().strip()
    serve(path, options.host, options.port, token, tell)
    return 0


def export(options: argparse.Namespace) -> int:
    """fedgauge export RUN: every score as CSV or parquet, or curves and pictures for TensorBoard."""
    from fedgauge.simulations.reports.export import save_csv, write_csv, write_parquet, write_tensorboard

    run = _find(options.run, options.runs)
    if options.to == "parquet":
        path = options.output or run.folder / "scores.parquet"
        write_parquet(run, path)
        print(path)
    elif options.to == "tensorboard":
        path = options.output or run.folder / "tensorboard"
        print(f"fedgauge: {write_tensorboard(run, path)}", file=sys.stderr)
        print(path)
    elif options.output:
        save_csv(run, options.output)
        print(options.output)
    else:
        write_csv(run, sys.stdout)
    return 0


def preflight(options: argparse.Namespace) -> int:
    """fedgauge preflight SCENARIO.toml: what would leak, in seconds and before any training, and what to change."""
    from fedgauge.simulations.checks.preflight import preflight as examine
    from fedgauge.simulations.checks.preflight import show

    found = examine(Scenario.load(options.scenario, options.set))
    if options.json:
        print(found.to_json())
    else:
        show(found, Console() if sys.stdout.isatty() else Console(width=132))
    return 0


def sweep(options: argparse.Namespace) -> int:
    """fedgauge sweep SWEEP.toml: a grid of defenses, attacks and seeds, trained in memory and attacked; goes on where it stopped."""
    from fedgauge.simulations.experiments.sweep import run_sweep

    if options.parallel < 1:
        raise SpecError(f"--parallel must be at least 1, got {options.parallel}")
    return run_sweep(options.sweep, options.output or options.runs / options.sweep.stem, options.parallel)


def reproduce(options: argparse.Namespace) -> int:
    """fedgauge reproduce NAME: attack what a paper attacked, and print its figures beside ours."""
    import json

    from fedgauge.simulations.experiments import reproduce as reproduction
    from fedgauge.simulations.experiments.paper_tables import load, restrict

    paper_table = restrict(load(options.name), options.n, options.budget, options.cells, options.attacks)
    started, rows = time.monotonic(), []
    with reproduction.ProgressReporter(paper_table.name, Console(stderr=True)) as tell:
        for row in reproduction.reproduce(paper_table, tell):
            rows.append(row)
            if options.json:
                print(row.to_json(), flush=True)
            if options.output is not None:  # after every row: an interruption loses none
                kept = reproduction.record(paper_table, rows, time.monotonic() - started)
                with replacing(options.output) as file:
                    file.write((json.dumps(kept, indent=1, allow_nan=False) + "\n").encode())
    if not options.json:
        reproduction.show(paper_table, rows, Console() if sys.stdout.isatty() else Console(width=180))
    if options.output is not None:
        print(f"kept in {options.output}", file=sys.stderr)
    return 0


def bench(options: argparse.Namespace) -> int:
    """fedgauge bench [NAME ...]: measure speed and quality, and keep the figures in simulations/benchmarks/results."""
    from fedgauge.simulations.benchmarks.__main__ import main as measure

    return measure([*options.names, *(["--json"] if options.json else [])])


def runs(options: argparse.Namespace) -> int:
    """fedgauge runs: every run under runs/, newest first."""
    table = Table("run", "state", "rounds", "chain", "attacks", "attacks done", "best", box=None)
    folders = sorted((p.parent for p in options.runs.glob("*/ledger.sqlite")), reverse=True)
    for folder in folders:
        try:
            table.add_row(Text(folder.name), *_summary(Run(folder)))
        except (LedgerError, OSError) as error:
            table.add_row(Text(folder.name), "unreadable")
            print(f"fedgauge: {error}", file=sys.stderr)
    if not folders:
        print(
            f"fedgauge: no runs in {options.runs}; start one with: fedgauge run simulations/quickstart.toml",
            file=sys.stderr,
        )
        return 0
    _console().print(table)
    return 0


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=160)  # 80 would cut names off in files and pipes


def _summary(run: Run) -> list[str | Text]:
    """State, rounds, chain, attacks by name, how many are done, and the best that an attack reached."""
    with run.ledger() as ledger:
        progress, rounds = ledger.progress(), ledger.rounds()
        measure, best = best_so_far(ledger)
        trained = f"{rounds[-1]['round'] if rounds else 0}/{ledger.meta().get('rounds', '?')}"
        chain = " > ".join(map(describe, tables_of(run)["chain"]))
        attacks = ", ".join(row["name"] for row in ledger.attacks() if is_attack(row["name"]))
        done = f"{progress.done}/{progress.total}"
        found = "" if best is None else f"{measure.name} {best:.1f} {measure.unit}"
        return [state_of(run, ledger), trained, Text(chain), attacks, done, found]


def stop(options: argparse.Namespace) -> int:
    """fedgauge stop RUN: end its training, finish the attacks in flight, keep everything for `fedgauge audit`."""
    run = _find(options.run, options.runs)
    holders = {purpose: pid for purpose in ("training", "audit") if (pid := run.holder(purpose)) is not None}
    if not holders:
        print(f"{run.name}: nothing is at work")
        return 0
    os.kill(next(iter(holders.values())), signal.SIGTERM)  # the driver, if it still trains, parks the audit itself
    deadline = time.monotonic() + options.patience
    while any(run.holder(purpose) is not None for purpose in ("training", "audit")):
        if time.monotonic() > deadline:
            print(f"fedgauge: {run.name} is still finishing its attacks in flight", file=sys.stderr)
            return FAILED
        time.sleep(0.2)
    with run.ledger() as ledger:
        print(f"{run.name}: stopped; {_left(run, ledger) or 'every attack on what was sent is done'}")
    return 0


def prune(options: argparse.Namespace) -> int:
    """fedgauge prune [RUN ...]: delete what can be inverted, of runs older than --days or their retention_days; scores stay."""
    from fedgauge.simulations.run.retention import prune as delete

    found = [run for named in options.run for run in _find_all(named, options.runs)]
    for run in found or [Run(path.parent) for path in sorted(options.runs.glob("*/ledger.sqlite"))]:
        days = options.days if options.days is not None else tables_of(run).get("tape", {}).get("retention_days")
        if days is None:
            print(f"{run.name}: kept, as neither --days nor its [tape] retention_days says for how long")
            continue
        try:
            deleted = delete(run, days, time.time())
        except RunBusy as error:
            print(f"{run.name}: kept, as it is at work: {error}")
            continue
        print(
            f"{run.name}: {deleted} files deleted"
            if deleted
            else f"{run.name}: kept, as it is younger than {days} days"
        )
    return 0


def init(options: argparse.Namespace) -> int:
    """fedgauge init [FILE]: a commented scenario to start from."""
    target: Path = options.file
    if target.exists():
        raise SpecError(f"{target} exists; choose another name")
    target.write_text((Path(__file__).parents[1] / "quickstart.toml").read_text())
    print(f"{target}: edit it, then: fedgauge run {target}")
    return 0


def deploy(options: argparse.Namespace) -> int:
    """fedgauge deploy init|up|status|down DIR: a federation of real processes, each client its own, here or in containers."""
    action: Callable[[argparse.Namespace], int] = options.action
    return action(options)


def client_report(options: argparse.Namespace) -> int:
    """fedgauge client-report CLIENT.toml: what a client of a deployment sent, answered and leaked, from its own log."""
    from fedgauge.simulations.reports.client_report import read, show

    show(read(options.file), _console())
    return 0


def doctor(options: argparse.Namespace) -> int:
    """fedgauge doctor [FILE]: what works on this machine and what is missing; what is wrong with a scenario, or a client's file."""
    from fedgauge.simulations.checks.doctor import check, check_owner, examine

    table = Table(box=None, show_header=False)
    if options.scenario is None:
        findings = examine()
    elif _is_owners(options.scenario):
        if options.set or options.allow:
            raise SpecError(
                f"{options.scenario}: a client's owner decides by the file alone: leave out --set and --allow"
            )
        findings = check_owner(OwnerConfig.load(options.scenario))
    else:
        findings = check(Scenario.load(options.scenario, options.set))
    for f in findings:
        missing, optional = ("missing", "optional") if options.scenario is None else ("wrong", "note")
        lacks = Text(missing, "red") if f.needed else Text(optional, "yellow")
        mark = Text("not checked", "dim") if f.works is None else Text("ok", "green") if f.works else lacks
        table.add_row(mark, f.name, Text(f.words))
    (Console() if sys.stdout.isatty() or options.scenario is None else Console(width=160)).print(table)
    broken = MISTAKE if options.scenario is not None else FAILED
    return broken if any(f.needed and not f.works for f in findings) else 0


def _is_owners(path: Path) -> bool:
    """Whether a file is a client's: a scenario counts its clients, and says no number of one."""
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):  # told by whoever reads it as a scenario
        return False
    return "client" in tables and "clients" not in tables


def _tell_end(run: Run, log: Log) -> None:
    """What a command leaves on standard output: its results, of which the run's folder comes last."""
    from fedgauge.simulations.reports.report import write_report

    if log == "json":
        report = write_report(run)
        with run.ledger() as ledger:
            state = state_of(run, ledger)
        json_log.finish(run, state, report)
        return
    if log == "quiet":
        _tell_errors(run)
        print(f"report: {write_report(run)}")
    else:
        _tell(run)
    print(run.folder)


def _tell_errors(run: Run) -> None:
    """On standard error, why not everything that was to be attacked was."""
    with run.ledger() as ledger:
        meta, progress = ledger.meta(), ledger.progress()
        if meta.get("replay") == "mismatch":
            print(f"fedgauge: replay check: {meta['replay_detail']}", file=sys.stderr)
        if progress.failed:
            print(f"fedgauge: {progress.failed} attacks failed: {'; '.join(ledger.errors())}", file=sys.stderr)
        if lacking := _lacking(ledger):
            print(f"fedgauge: {lacking}", file=sys.stderr)
        if left := _left(run, ledger):
            print(f"fedgauge: {left}", file=sys.stderr)


def _tell(run: Run) -> None:
    """The end of a run in words: table, failures, report, how to go on."""
    from fedgauge.simulations.reports.report import write_report

    console = _console()
    with run.ledger() as ledger:
        scores = Scores.read(ledger)
        of = f"{scores.measure.name} ({scores.measure.unit})"
        values = [f"{which} {of}" for which in ("mean", "best", "baseline")]
        table = Table("round", "accuracy", "attack", *values, "label accuracy", box=None)
        for line in round_table(scores, ledger):
            table.add_row(*_cells(line))
        if table.row_count:
            console.print(table)
        meta, progress = ledger.meta(), ledger.progress()
        if "replay_detail" in meta:
            style = "yellow" if meta["replay"] != "ok" else None
            console.print(f"replay check: {meta['replay_detail']}", style=style, markup=False, highlight=False)
        for name, words in (
            server_attack_effects(run.scenario(), scores, ledger) if tables_of(run).get("server_attack") else {}
        ).items():
            console.print(f"malicious server, {name}: {words}", markup=False, highlight=False, soft_wrap=True)
        for words in filter(None, (_lacking(ledger), _graded(ledger))):
            console.print(words, markup=False, highlight=False, soft_wrap=True)
        if progress.failed:
            console.print(
                f"{progress.failed} attacks failed: {'; '.join(ledger.errors())}", style="yellow", markup=False
            )
        reasons = ledger.reasons()
        for row in reasons[:MOST_REASONS]:
            words = f"{row['attack']} ({row['jobs']} x): {row['reason']}"
            console.print(words, markup=False, highlight=False, soft_wrap=True)
        if len(reasons) > MOST_REASONS:
            console.print(f"and {len(reasons) - MOST_REASONS} more reasons of attacks", highlight=False)
        if left := _left(run, ledger):
            style = "yellow" if meta.get("replay") == "mismatch" else None
            console.print(left, style=style, markup=False, highlight=False, soft_wrap=True)
    print(f"report: {write_report(run)}")


def _lacking(ledger: Ledger) -> str:
    """What clients' guards said, and who of a deployment's clients gave no update, and why; empty where all did in silence."""
    seen = ledger.observations()
    if not ledger.deployed:
        return guarded(seen)
    lacking = participation(seen)
    return lacking and f"{lacking} (in full: fedgauge client-report CLIENT.toml, at the client)"


def _graded(ledger: Ledger) -> str:
    """What a deployment's clients said of the attacks' success, and how they may be let say more."""
    told = ledger.meta().get("grading")
    if told is None:
        return ""
    allow = 'an owner may allow it: mode = "scores" under [grading] in client.toml (all: fedgauge deploy init --grading scores)'
    return "; ".join([f"grading: {told}", *([allow] if NOT_ALLOWED in told else []), "labels are graded by no client"])


def _left(run: Run, ledger: Ledger) -> str:
    """What is left to do on a run that is at rest, and how; empty where nothing is."""
    from fedgauge.simulations.run.simulate import again

    progress = ledger.progress()
    waiting = progress.queued + progress.leased
    if not ledger.attacks():
        return "the server was not curious ([audit] curious = false): there is nothing to attack"
    if waiting and ledger.meta().get("replay") == "mismatch":
        return (
            f"{waiting} attacks wait: they would invert another computation than the clients'. Mend what differs, in the "
            f"scenario or in the code, and have it checked again with: fedgauge audit {run.folder} (--force: attack anyway)"
        )
    if waiting:
        return f"{waiting} attacks are parked; go on with: fedgauge audit {run.folder}"
    if not ledger.observations():
        return f"it ended before its first round: there is nothing to attack; begin again with: {again(run, ledger)}"
    return ""


def _mismatched(run: Run) -> bool:
    with run.ledger() as ledger:
        return ledger.meta().get("replay") == "mismatch"


def _cells(line: RoundLeak) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "" if value is None or value != value else format(value, form)

    return [
        str(line.round),
        number(line.accuracy, ".1%"),
        line.attack,
        number(line.psnr.mean, ".1f"),
        number(line.psnr.best, ".1f"),
        number(line.baseline.mean if line.baseline else None, ".1f"),
        number(line.labels, ".0%"),
    ]


def _find(named: Path, folder: Path) -> Run:
    """A run by its folder or by its id under runs/."""
    below = folder / named
    return Run.open(named if named.exists() or not below.exists() else below)


def _find_all(named: Path, folder: Path) -> list[Run]:
    """A run, or all runs of a sweep's folder."""
    place = named if named.exists() else folder / named
    if not (place / "sweep.toml").exists():
        return [_find(named, folder)]
    return [Run.open(path.parent) for path in sorted(place.glob("*/ledger.sqlite"))]


def _extra_plan(options: argparse.Namespace, scenario: Scenario) -> AttackPlan:
    """The plan of --attack 'dlg iterations=300 name=longer': components by name, with their settings."""
    tables = []
    for words in options.attack:
        name, *settings = words.split()
        table: dict[str, object] = {"use": name}
        for setting in settings:
            apply_setting(table, setting)
        tables.append(table)
    chosen = {"rounds": options.rounds, "clients": options.clients}
    given = {"seed": scenario.plan.seed, "wave": scenario.plan.wave}
    plan = {k: v if v is not None else getattr(scenario.plan, k) for k, v in chosen.items()}
    if plan["rounds"] is None:
        given["every"] = scenario.plan.every
    limits = scenario.protocol.rounds, scenario.protocol.clients
    options_ = {**given, **{k: list(v) for k, v in plan.items() if v is not None}}
    baselines = [p.name for p in scenario.plan.attacks if p.is_baseline]
    return AttackPlan.from_tables(tables, options_, *limits, baselines=baselines)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 65535, got {text!r}")
    return int(text)


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not 0 <= days < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of days, got {text!r}")
    return days


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers with commas between, 1,2,3, got {text!r}") from None


class _Commands:
    """The command line's commands, in the order in which help lists them."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(self, command: Callable[[argparse.Namespace], int], with_run: bool = True) -> argparse.ArgumentParser:
        summary = (command.__doc__ or "").split(": ", 1)[1]
        added = self.commands.add_parser(command.__name__.replace("_", "-"), help=summary, description=summary)
        added.set_defaults(command=command)
        added.add_argument(
            "--runs", type=Path, default=RUNS, metavar="FOLDER", help="where runs are kept (default: runs)"
        )
        words = "let components be named from this package of your own, which is then run (repeatable)"
        added.add_argument("--allow", action="append", default=[], metavar="PACKAGE", help=words)
        if with_run:
            added.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or its name under runs/")
        return added


def _logged(added: argparse.ArgumentParser) -> None:
    words = "auto: a live picture in a terminal, else lines; quiet: errors and results alone; json: an event a line"
    added.add_argument("--log", choices=get_args(Log), default="auto", help=words)
    added.set_defaults(command=json_log.with_errors(added.get_default("command")))


def _settable(added: argparse.ArgumentParser) -> None:
    words = "set one value, e.g. chain.0.max_norm=2 (repeatable)"
    added.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=words)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedgauge", description="Run a real federation whose server is curious, and see what it can reconstruct."
    )
    commands = _Commands(parser)
    for step in (_of_runs, _of_results, _of_many, _of_pages, _of_deployments, _of_scenarios):
        step(commands)
    return parser


def _of_runs(commands: _Commands) -> None:
    start = commands.add(run, with_run=False)
    start.add_argument("scenario", type=Path, nargs="?", metavar="SCENARIO.toml")
    start.add_argument(
        "--resume", type=Path, metavar="RUN", help="go on with a run that was interrupted, failed or was killed"
    )
    start.add_argument("--rounds", type=int, metavar="N", help="instead of the scenario's")
    _logged(start)
    _settable(start)
    again = commands.add(audit)
    _logged(again)
    again.add_argument(
        "--attack", action="append", default=[], metavar="'NAME KEY=VALUE ...'", help="attack with this (repeatable)"
    )
    again.add_argument("--rounds", type=_numbers, metavar="1,2,3", help="with --attack: which rounds")
    again.add_argument("--clients", type=_numbers, metavar="0,1", help="with --attack: which clients")
    again.add_argument("--executor", choices=("ray", "local"), help="instead of the scenario's")
    again.add_argument("--workers", type=int, metavar="N", help="instead of the scenario's")
    again.add_argument("--force", action="store_true", help="attack although the replay check fails")
    again.add_argument("--follow", action="store_true", help="wait for jobs while the training goes on")


def _of_results(commands: _Commands) -> None:
    told = commands.add(report, with_run=False)
    told.add_argument("run", type=Path, nargs="+", metavar="RUN", help="a run's folder, or its name under runs/")
    told.add_argument("--figures", type=Path, metavar="FOLDER", help="each plot as PNG and SVG, one column wide")
    told.add_argument(
        "--output",
        "-o",
        type=Path,
        metavar="FILE",
        help="of several runs: how they compare (default: comparison.html beside the first)",
    )
    told.add_argument("--pdf", action="store_true", help="report.pdf beside report.html, by an installed Chromium")
    out = commands.add(export)
    out.add_argument("--to", choices=("csv", "parquet", "tensorboard"), default="csv")
    out.add_argument(
        "--output",
        "-o",
        type=Path,
        metavar="PATH",
        help="default: standard output (csv), scores.parquet or the folder tensorboard in the run",
    )


def _of_many(commands: _Commands) -> None:
    look = commands.add(preflight, with_run=False)
    look.add_argument("scenario", type=Path, metavar="SCENARIO.toml")
    _settable(look)
    look.add_argument("--json", action="store_true", help="one object instead of tables")
    grid = commands.add(sweep, with_run=False)
    grid.add_argument("sweep", type=Path, metavar="SWEEP.toml")
    grid.add_argument("--output", "-o", type=Path, metavar="FOLDER", help="default: the file's name under runs/")
    grid.add_argument(
        "--parallel", type=int, default=2, metavar="N", help="cells at a time, one core each (default: 2)"
    )
    again = commands.add(reproduce, with_run=False)
    again.add_argument("name", metavar="NAME", help="a published table: a file's name in simulations/papers")
    again.add_argument("--n", type=int, metavar="N", help="updates attacked in each cell, instead of the sheet's")
    again.add_argument("--budget", type=int, metavar="N", help="iterations of every attack, instead of the sheet's")
    again.add_argument("--cells", metavar="PATTERN", help="only these: a part of their name, or with * and ?")
    again.add_argument(
        "--attacks", metavar="PATTERN", help="only these in each cell: a part of their name, or with * and ?"
    )
    again.add_argument("--json", action="store_true", help="one object a line instead of a table")
    again.add_argument("--output", "-o", type=Path, metavar="FILE", help="keep the figures too, with seed and versions")
    measured = commands.add(bench, with_run=False)
    measured.add_argument("names", nargs="*", metavar="NAME", help="engine, quality, labels, ...; default: all")
    measured.add_argument("--json", action="store_true", help="one object a line instead of tables")


def _of_pages(commands: _Commands) -> None:
    page = commands.add(watch, with_run=False)
    page.add_argument("path", type=Path, nargs="?", metavar="RUN|FOLDER", help="default: all of --runs")
    page.add_argument("--host", default="127.0.0.1", help="default: this machine alone; elsewhere a token is asked for")
    page.add_argument("--port", type=_port, metavar="N", help="default: 8765, or where that is taken a free one")
    page.add_argument("--token", help="let nobody in without it (default: none here, a fresh one on other hosts)")
    page.add_argument("--token-file", type=Path, metavar="FILE", help="a file that holds the token")
    page.add_argument("--open", action="store_true", help="open the browser")
    commands.add(runs, with_run=False)
    end = commands.add(stop)
    end.add_argument(
        "--patience", type=float, default=120.0, metavar="SECONDS", help="for attacks in flight (default: 120)"
    )


def _of_deployments(commands: _Commands) -> None:
    deploy_commands.add_actions(commands.add(deploy, with_run=False), lambda ended: _tell_end(ended.run, ended.log))
    commands.add(client_report, with_run=False).add_argument(
        "file", type=Path, metavar="CLIENT.toml", help="the owner's file"
    )
    old = commands.add(prune, with_run=False)
    old.add_argument("run", type=Path, nargs="*", metavar="RUN", help="default: all of --runs")
    old.add_argument("--days", type=_days, metavar="N", help="instead of the scenario's [tape] retention_days")


def _of_scenarios(commands: _Commands) -> None:
    commands.add(init, with_run=False).add_argument(
        "file", type=Path, nargs="?", default=Path("scenario.toml"), metavar="FILE"
    )
    examined = commands.add(doctor, with_run=False)
    words = "a scenario, or a client's own file; default: this machine"
    examined.add_argument("scenario", type=Path, nargs="?", metavar="SCENARIO.toml|CLIENT.toml", help=words)
    _settable(examined)


if __name__ == "__main__":
    sys.exit(main())
