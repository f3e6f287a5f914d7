"""`fedgauge deploy init|up|status|down`, and the two that containers run once: register and start."""

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from rich.console import Console

from fedgauge.simulations.live.view import Log

FAILED = 1


def add_actions(deploy: argparse.ArgumentParser, told: Callable[[argparse.Namespace], None]) -> None:
    """Give the command `deploy` its actions.

    Args:
        told: prints a run's end; called with options that name the run.
    """
    actions = deploy.add_subparsers(required=True, metavar="ACTION")

    def add(name: str, action: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
        added = actions.add_parser(name, help=summary, description=summary)
        added.set_defaults(action=action)
        added.add_argument("folder", type=Path, metavar="DIR", help="the deployment's folder")
        words = "let components be named from this package of your own, which is then run here (repeatable)"
        # of another name: what stands before the action is not to be overwritten
        added.add_argument("--allow", action="append", default=[], metavar="PACKAGE", help=words, dest="allow_too")
        return added

    made = add("init", init, "write certificates, keys, a file for each client's owner, and settings for containers")
    made.add_argument("--clients", type=_positive, required=True, metavar="N")
    words = "a name or address by which clients on other machines reach the server (repeatable)"
    made.add_argument("--host", action="append", default=[], metavar="NAME", help=words)
    made.add_argument("--scenario", type=Path, metavar="FILE", help="the server's (default: a demo of three rounds)")
    words = "scores: clients tell the server how well its attacks did, to 0.5 dB (default: off)"
    made.add_argument("--grading", choices=("off", "scores"), default="off", help=words)
    words = "agreed: what each client trains on follows from the seed, as in a simulation (default: secret)"
    made.add_argument("--sampling", choices=("secret", "agreed"), default="secret", help=words)
    begun = add("up", up, "start every process on this machine, train, attack, end; again: go on where it stopped")
    begun.add_argument("--local", action="store_true", required=True, help="without containers (with: docker compose)")
    begun.add_argument("--new", action="store_true", help="begin another run, be the last one finished or not")
    begun.add_argument("--log", choices=get_args(Log), default="auto", help="as of fedgauge run")
    begun.set_defaults(told=told)
    add("status", status, "which processes of a local start live, and how its last run stands")
    add("down", down, "end a local start, and what one that was killed has left")
    for name, action, summary in (
        ("register", register, "make the clients' keys known to the SuperLink"),
        ("start", start, "train and wait until all is attacked; the SuperLink and the clients are up"),
    ):
        once = add(name, action, summary)
        once.add_argument("--superlink", required=True, metavar="HOST:PORT")
        if action is start:
            once.add_argument("--name", required=True, metavar="RUN")


def init(options: argparse.Namespace) -> int:
    """Write a deployment's folder."""
    from fedgauge.simulations.deploy.folder import DEMO, Deployment

    chosen = options.scenario or DEMO
    made = Deployment.create(options.folder, options.clients, options.host, chosen, options.grading, options.sampling)
    print(f"{made.folder}: {options.clients} clients; start it with: fedgauge deploy up {made.folder} --local")
    if own := made.foreign():
        print(
            f"each client's owner must let the code be loaded that the scenario names: allow = {json.dumps(own)} in "
            f"{made.folder}/clients/*/client.toml, and {' and '.join(own)} beside that file (or installed)"
        )
    return 0


def up(options: argparse.Namespace) -> int:
    """Start everything here, and tell how it ended."""
    from fedgauge.simulations.deploy.folder import Deployment
    from fedgauge.simulations.deploy.lifecycle import up as start_here
    from fedgauge.simulations.run.launch import TrainingFailed
    from fedgauge.simulations.run.simulate import Interrupt

    deployment = Deployment.open(options.folder)
    run, ended = None, FAILED
    with Interrupt().caught() as interrupt:
        try:
            run, ended = start_here(deployment, Console(stderr=True), interrupt, options.log, options.new)
        except TrainingFailed as error:
            print(f"fedgauge: {error}", file=sys.stderr)
            run = next(iter(deployment.runs()[-1:]), None)
    if run is not None and ended and not run.model.exists():
        command = f"fedgauge deploy up {shlex.quote(str(options.folder))} --local"
        print(f"fedgauge: the training can go on: {command}", file=sys.stderr)
    if run is not None:
        options.told(argparse.Namespace(run=run, log=options.log))
    return ended


def register(options: argparse.Namespace) -> int:
    """Make the clients' keys known."""
    from fedgauge.simulations.deploy.folder import Deployment
    from fedgauge.simulations.deploy.lifecycle import register as make_known

    return _tried(lambda: make_known(Deployment.open(options.folder), options.superlink))


def start(options: argparse.Namespace) -> int:
    """Train one run."""
    from fedgauge.simulations.deploy.folder import Deployment
    from fedgauge.simulations.deploy.lifecycle import start as train
    from fedgauge.simulations.run.simulate import Interrupt

    with Interrupt().caught() as interrupt:
        return _tried(lambda: train(Deployment.open(options.folder), options.superlink, options.name, interrupt))


def status(options: argparse.Namespace) -> int:
    """What lives; exit status 1 where nothing does."""
    from fedgauge.simulations.deploy.folder import Deployment
    from fedgauge.simulations.deploy.lifecycle import status as look

    alive, lines = look(Deployment.open(options.folder))
    for name, lives in alive.items():
        print(f"{name}: {'alive' if lives else 'ended'}")
    print(*(lines or ["no run has begun"]), sep="\n")
    return 0 if any(alive.values()) else FAILED


def down(options: argparse.Namespace) -> int:
    """End a local start."""
    from fedgauge.simulations.deploy.folder import Deployment
    from fedgauge.simulations.deploy.lifecycle import down as end

    deployment = Deployment.open(options.folder)
    if (holder := deployment.holder()) is not None:
        print(
            f"fedgauge: process {holder} is asked to end; it parks its attacks first, and ends what it started",
            file=sys.stderr,
        )
    left = end(deployment)
    if deployment.holder() is not None:
        print(f"fedgauge: {deployment.folder} is still finishing its attacks in flight", file=sys.stderr)
        return FAILED
    print(f"{deployment.folder}: down" + (f"; {len(left)} processes had been left behind" if left else ""))
    return 0


def _tried(action: Callable[[], int | None]) -> int:
    from fedgauge.simulations.run.launch import TrainingFailed

    try:
        return action() or 0
    except TrainingFailed as error:
        print(f"fedgauge: {error}", file=sys.stderr)
        return FAILED


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return int(text)
