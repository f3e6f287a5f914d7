"""`fedgauge deploy init|up|down`, and `register` and `start`, which containers run once."""

import argparse
import json
import shlex
from typing import get_args

from rich.console import Console

from fedgauge.server.views.formatting import many
from fedgauge.simulations.cli.options import Command, Commands, flag, path, positive, several, tell
from fedgauge.simulations.cli.run_summary import print_summary
from fedgauge.simulations.live.log import Log
from fedgauge.simulations.run.exit_status import FAILED


def add_to(commands: Commands) -> None:
    actions = commands.add(deploy, with_run=False).add_subparsers(required=True, metavar="ACTION")

    def add(name: str, action: Command, summary: str) -> argparse.ArgumentParser:
        added = actions.add_parser(name, help=summary, description=summary)
        added.set_defaults(action=action)
        path(added, "folder", "DIR", "the deployment's folder")
        text = "allow components from this package of your own; its code is run here (repeatable)"
        # another name, so that an --allow before the action is not overwritten
        several(added, "--allow", "PACKAGE", text, dest="allow_too")
        return added

    created = add("init", init, "write certificates, keys, a file for each client's owner, and settings for containers")
    created.add_argument("--clients", type=positive, required=True, metavar="N")
    several(
        created, "--host", "NAME", "a name or address by which clients on other machines reach the server (repeatable)"
    )
    path(created, "--scenario", "FILE", "the server's (default: a demo of three rounds)")
    text = "scores: clients report to the server how well its attacks did, to 0.5 dB (default: off)"
    created.add_argument("--grading", choices=("off", "scores"), default="off", help=text)
    text = "agreed: the seed decides which examples each client trains on, as in a simulation (default: secret)"
    created.add_argument("--sampling", choices=("secret", "agreed"), default="secret", help=text)
    text = "start every process on this machine, train, attack, end; a second call continues where it stopped"
    begun = add("up", up, text)
    flag(begun, "--local", "without containers (with containers: docker compose)", required=True)
    flag(begun, "--new", "begin another run, even if the last one is unfinished")
    begun.add_argument("--log", choices=get_args(Log), default="auto", help="as in fedgauge run")
    add("down", down, "end a local start, and the processes that a killed one has left behind")
    for name, action, summary in (
        ("register", register, "make the clients' keys known to the SuperLink"),
        ("start", start, "train, and wait until everything is attacked; the SuperLink and the clients must be up"),
    ):
        once = add(name, action, summary)
        once.add_argument("--superlink", required=True, metavar="HOST:PORT")
        if action is start:
            once.add_argument("--name", required=True, metavar="RUN")


def deploy(options: argparse.Namespace) -> int:
    action: Command = options.action
    return action(options)


def init(options: argparse.Namespace) -> int:
    from fedgauge.server.store.scenario import Scenario
    from fedgauge.simulations.checks.scenario_check import try_first
    from fedgauge.simulations.deploy.folder import DEMO, Deployment

    chosen = options.scenario or DEMO
    if options.scenario is not None:  # before anything is handed to the clients' owners
        try_first(Scenario.load(chosen, [f"clients={options.clients}"]), Console(stderr=True), str(chosen))
    deployment = Deployment.create(
        options.folder, options.clients, options.host, chosen, options.grading, options.sampling
    )
    folder, quoted = deployment.folder, shlex.quote(str(deployment.folder))
    print(f"{folder}: {many(options.clients, 'client')}; start it with: fedgauge deploy up {quoted} --local")
    token = (folder / "secrets" / "dashboard").read_text()
    print(f"or in containers: ./compose.sh {quoted} up --detach; the page is then http://127.0.0.1:8765/?token={token}")
    if packages := [*options.allow, *options.allow_too]:
        files = f"{folder}/clients/*/client.toml"
        print(f"each owner must allow your packages: write allow = {json.dumps(packages)} into {files}")
    return 0


def up(options: argparse.Namespace) -> int:
    from fedgauge.simulations.deploy.folder import Deployment
    from fedgauge.simulations.deploy.local_start import up as start_here
    from fedgauge.simulations.run.launch import TrainingFailed
    from fedgauge.simulations.run.simulate import Interrupt

    deployment = Deployment.open(options.folder)
    tell(
        "while it is up, every user of this machine can run code in it and read its updates, because Flower does not "
        "authenticate local processes: use a machine without other users (SECURITY.md)"
    )
    run, ended = None, FAILED
    with Interrupt().caught() as interrupt:
        try:
            run, ended = start_here(deployment, Console(stderr=True), interrupt, options.log, options.new)
        except TrainingFailed as error:
            tell(error)
            run = next(iter(deployment.runs()[-1:]), None)
    if run is not None and ended and not run.model.exists():
        command = f"fedgauge deploy up {shlex.quote(str(options.folder))} --local"
        tell(f"continue the training with: {command}")
    if run is not None:
        print_summary(run, options.log)
    return ended


def register(options: argparse.Namespace) -> int:
    from fedgauge.simulations.deploy.folder import Deployment
    from fedgauge.simulations.deploy.train import register as make_known

    make_known(Deployment.open(options.folder), options.superlink)
    return 0


def start(options: argparse.Namespace) -> int:
    from fedgauge.simulations.deploy.folder import Deployment
    from fedgauge.simulations.deploy.train import start as train
    from fedgauge.simulations.run.simulate import Interrupt

    with Interrupt().caught() as interrupt:
        return train(Deployment.open(options.folder), options.superlink, options.name, interrupt)


def down(options: argparse.Namespace) -> int:
    from fedgauge.server.store.run import Run
    from fedgauge.simulations.deploy.folder import Deployment
    from fedgauge.simulations.deploy.local_start import down as end

    deployment = Deployment.open(options.folder)
    if (holder := Run(deployment.folder).holder("up")) is not None:
        tell(f"asking process {holder} to end: it parks its attacks first, then ends every process it started")
    left = end(deployment)
    if Run(deployment.folder).at_work("up"):
        tell(f"{deployment.folder} is still finishing its attacks in flight")
        return FAILED
    print(f"{deployment.folder}: down" + (f"; {len(left)} processes had been left behind" if left else ""))
    return 0
