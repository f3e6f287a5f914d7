"""`fedgauge init`, `list`, `schema`, `preflight`, `doctor`: write a scenario and check it before it runs; `sweep`: run a grid."""

import argparse
import json
import sys
import tomllib
import warnings
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedgauge.client import toml_text
from fedgauge.client.deployment.owner_file import OwnerConfig
from fedgauge.client.files import read_file
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.cli.options import Commands, add_jobs, add_settings, flag, path, refuse
from fedgauge.simulations.run.exit_status import FAILED, MISTAKE

QUICKSTARTS = {"images": "quickstart.toml", "text": "quickstart-text.toml", "tables": "quickstart-table.toml"}


def add_to(commands: Commands) -> None:
    started = commands.add(init, with_run=False)
    path(started, "file", "FILE", nargs="?", default=Path("scenario.toml"))
    started.add_argument("--data", choices=tuple(QUICKSTARTS), default="images", help="kind of data (default: images)")
    listed = commands.add(list_components, with_run=False, name="list")
    listed.add_argument("kind", nargs="?", metavar="KIND", help="dataset, model, link, attack, ...; default: all")
    commands.add(schema, with_run=False)
    estimate = commands.add(preflight, with_run=False)
    path(estimate, "scenario", "SCENARIO.toml")
    add_settings(estimate)
    flag(estimate, "--json", "print one JSON object instead of tables")
    examined = commands.add(doctor, with_run=False)
    text = "a scenario, or a client's own file; default: this machine"
    path(examined, "scenario", "SCENARIO.toml|CLIENT.toml", text, nargs="?")
    flag(
        examined,
        "--speed",
        "also measure, in about a minute, how many updates an hour the scenario's searches read here",
    )
    add_settings(examined)
    grid = commands.add(sweep, with_run=False)
    path(grid, "sweep", "SWEEP.toml")
    path(grid, "--output -o", "FOLDER", "default: the file's name under runs/")
    add_jobs(grid, 2)


def init(options: argparse.Namespace) -> int:
    target: Path = options.file
    refuse({f"{target} exists; choose another name": target.exists()})
    target.write_bytes((Path(__file__).parents[1] / QUICKSTARTS[options.data]).read_bytes())
    print(f"{target}: edit it, then: fedgauge run {target}")
    return 0


def list_components(options: argparse.Namespace) -> int:
    from fedgauge.simulations.cli.components import KINDS, components_of, print_components

    unknown = options.kind is not None and options.kind not in KINDS
    near = "".join(f"; did you mean {kind!r}?" for kind in get_close_matches(options.kind or "", KINDS, 1))
    refuse({f"there is no kind {options.kind!r}: the kinds are {', '.join(KINDS)}{near}": unknown})
    print_components(components_of(options.kind), Console(soft_wrap=True))
    return 0


def schema(options: argparse.Namespace) -> int:
    from fedgauge.simulations.cli.components import components_of

    made = json.loads((Path(__file__).parents[1] / "scenario.schema.json").read_text("utf-8"))
    for component in components_of():  # a plug-in's name, with any arguments
        if component.package != "fedgauge" and not component.error and component.kind in made["definitions"]:
            named: dict[str, list[object]] = made["definitions"][component.kind]
            named.setdefault("anyOf", [{"type": "string", "pattern": named.pop("pattern")}])
            named["anyOf"].append({"const": component.name, "description": component.description})
    print(json.dumps(made, indent=1))
    return 0


def preflight(options: argparse.Namespace) -> int:
    from fedgauge.simulations.checks.preflight import preflight as examine
    from fedgauge.simulations.checks.preflight import show
    from fedgauge.simulations.checks.scenario_check import refuse_misfit

    scenario = Scenario.load(options.scenario, options.set)
    refuse_misfit(scenario.federation, str(options.scenario))
    found = examine(scenario)
    if options.json:
        print(json.dumps({"findings": [asdict(finding) for finding in found]}, indent=1))
    else:
        show(found, Console(markup=False, width=None if sys.stdout.isatty() else 132))
    return 0


def doctor(options: argparse.Namespace) -> int:
    from fedgauge.simulations.checks.check_result import CheckResult
    from fedgauge.simulations.checks.machine import examine
    from fedgauge.simulations.cli.components import components_of

    file: Path | None = options.scenario
    if file is None:
        refuse({"--set and --speed are of a scenario: name its file": options.set or options.speed})
        results = examine()
    elif _is_owners(file):
        from fedgauge.simulations.checks.owner_check import check_owner, history

        more = options.set or options.speed or options.allow
        refuse({f"{file}: an owner decides by the file only: omit --set, --speed and --allow": more})
        owner = OwnerConfig.load(file)
        results = [*check_owner(owner), *history(owner)]
    else:
        from fedgauge.simulations.checks.attack_trial import speeds
        from fedgauge.simulations.checks.scenario_check import check

        with warnings.catch_warnings(record=True) as warned:
            # how fast a transformer infers without a mask: nothing is inferred here
            warnings.filterwarnings("ignore", "enable_nested_tensor is True", UserWarning)
            scenario = Scenario.load(file, options.set)
            results = check(scenario)
            if options.speed and not any(result.needed and result.works is False for result in results):
                results += speeds(scenario)
        for words in dict.fromkeys(str(w.message) for w in warned):  # the network is built and run many times
            print(f"warning: {words}", file=sys.stderr)
    missing, optional = ("missing", "optional") if file is None else ("wrong", "note")
    table = Table(box=None, show_header=False)
    unusable = "of the package {0.package} cannot be used: {0.error}"
    plug_ins = [c for c in components_of() if c.error]
    first = [CheckResult(f"{c.kind} {c.name}", False, False, unusable.format(c)) for c in plug_ins]
    for result in [*first, *results]:
        lacks = Text(missing, "red") if result.needed else Text(optional, "yellow")
        mark = Text("not checked", "dim") if result.works is None else Text("ok", "green") if result.works else lacks
        table.add_row(mark, result.name, Text(result.message, overflow="fold"))
    (Console() if sys.stdout.isatty() or file is None else Console(width=160)).print(table)
    status = MISTAKE if file is not None else FAILED
    return status if any(result.needed and not result.works for result in results) else 0


def _is_owners(file: Path) -> bool:
    """Return whether a file is a client's: it has the key `client`, and a scenario has `clients`."""
    try:
        tables = toml_text.parse(read_file(file, toml_text.MOST))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):  # reading it as a scenario reports this
        return False
    return "client" in tables and "clients" not in tables


def sweep(options: argparse.Namespace) -> int:
    from fedgauge.simulations.experiments.sweep import sweep_of_file

    return sweep_of_file(options.sweep, options.output or options.runs / options.sweep.stem, options.jobs)
