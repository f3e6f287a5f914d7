"""`fedgauge deploy init`, and `register` and `start`, which containers run once."""

import argparse
import json
import shlex

from rich.console import Console

from fedgauge.server.views.formatting import many
from fedgauge.simulations.cli.options import Command, Commands, path, positive, several


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
    several(created, "--host", "NAME", "a name or address of the server for clients on other machines (repeatable)")
    path(created, "--scenario", "FILE", "the server's (default: a demo of three rounds)")
    text = "scores: clients report to the server how well its attacks did, to 0.5 dB (default: off)"
    created.add_argument("--grading", choices=("off", "scores"), default="off", help=text)
    text = "agreed: the seed decides which examples each client trains on, as in a simulation (default: secret)"
    created.add_argument("--sampling", choices=("secret", "agreed"), default="secret", help=text)
    known = add("register", register, "make the clients' keys known to the SuperLink")
    begins = add("start", start, "train, and wait until all is attacked; the SuperLink and the clients must be up")
    begins.add_argument("--name", required=True, metavar="RUN")
    for once in (known, begins):
        once.add_argument("--superlink", required=True, metavar="HOST:PORT")


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
    owners = (options.grading, options.sampling)
    folder = Deployment.create(options.folder, options.clients, options.host, chosen, *owners).folder
    quoted, token = shlex.quote(str(folder)), (folder / "secrets" / "dashboard").read_text()
    print(f"{folder}: {many(options.clients, 'client')}; start it in a clone with: ./compose.sh {quoted} up --detach")
    print(f"the page is then http://127.0.0.1:8765/?token={token}")
    if packages := [*options.allow, *options.allow_too]:
        files = f"{folder}/clients/*/client.toml"
        print(f"each owner must allow your packages: write allow = {json.dumps(packages)} into {files}")
    return 0


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
