"""The registry: all components of ours are registered, and other packages add theirs by entry points."""

import importlib
import inspect
import os
import pkgutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import pytest

import fedgauge
from fedgauge.client import entry_points
from fedgauge.client.components import ComponentKind
from tests.forks import forked

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT: dict[str, dict[str, str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
OURS = [(group, name, value) for group, table in PYPROJECT.items() for name, value in table.items()]
# functions that return such an object, and are no components: they choose or find one
HELPERS = {
    "build_model",
    "build_servers_model",
    "build_strategy",
    "head",
    "module_of_weight",
    "perceptron",
    "secured",
}
HELPERS |= {"language_model"}  # the attacked one, of what an attack knows
HELPERS |= {"discrete"}  # a link that is named changes itself into it in a deployment
PACKAGES = ("client", "defenses", "attacks", "server", "simulations.experiments", "simulations.reproduction")


@cache
def modules() -> tuple[ModuleType, ...]:
    """Every module that may hold components."""
    found = []
    for package in (f"fedgauge.{name}" for name in PACKAGES):
        path = importlib.import_module(package).__path__
        names = [package, *(m.name for m in pkgutil.walk_packages(path, f"{package}."))]
        found += [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    return tuple(found)


@cache
def kinds() -> tuple[ComponentKind, ...]:
    return tuple({value: None for m in modules() for value in vars(m).values() if isinstance(value, ComponentKind)})


def written_here() -> Iterator[tuple[str, Any]]:
    """Every public function and class of ours in lower case, as scenarios write components; engines are CamelCase."""
    for module in modules():
        for name, value in vars(module).items():
            is_object = inspect.isclass(value) or inspect.isfunction(value)
            if is_object and value.__module__ == module.__name__ and name.islower() and not name.startswith("_"):
                yield f"{module.__name__}:{name}", value


def admits(kind: ComponentKind, target: Any) -> bool:
    """Check that an object is a component of this kind by its class or its annotation."""
    made = target if inspect.isclass(target) else get_type_hints(target).get("return")
    fits = inspect.isclass(made) and issubclass(made, kind.type) and not inspect.isabstract(target)
    return fits and target is not kind.type


# ---------------------------------------------------------------------------------------------------------- our own


@pytest.mark.parametrize(("group", "name", "value"), OURS, ids=[f"{g}:{n}" for g, n, _ in OURS])
def test_what_pyproject_registers_is_a_component_of_its_kind(group: str, name: str, value: str) -> None:
    target = pkgutil.resolve_name(value)
    assert target.__name__ == name
    asked = [kind for kind in kinds() if group in kind.groups]
    assert asked, f"no kind of component reads the group {group}"
    assert all(admits(kind, target) for kind in asked)


def test_every_component_is_registered() -> None:
    registered = {value for _, _, value in OURS}
    missing = [
        f'pyproject.toml needs a line under [project.entry-points."{kind.groups[0]}"]: {value.split(":")[1]} = "{value}"'
        for value, target in written_here()
        if value not in registered and target.__name__ not in HELPERS
        for kind in kinds()
        if admits(kind, target)
    ]
    assert not missing, "\n".join(missing)


def test_a_name_refers_to_one_component_of_a_kind() -> None:
    for kind in kinds():
        named: dict[str, set[str]] = {}
        for entry in kind.entries():
            if entry.own:
                named.setdefault(entry.name, set()).add(entry.value)
        # one attack may be registered for several kinds of data
        assert {name: values for name, values in named.items() if len(values) > 1} == {}, kind.noun


def test_the_installation_registers_what_pyproject_says() -> None:
    installed = {
        g: {e.name: e.value for e in metadata.distribution("fedgauge").entry_points.select(group=g)} for g in PYPROJECT
    }
    assert installed == PYPROJECT, "pyproject.toml has changed since fedgauge was installed: run pip install -e . again"


# ------------------------------------------------------------------------------------------------------ other packages

PLUG_IN = """
from dataclasses import dataclass
import torch
from fedgauge.attacks.base import Attack
from fedgauge.client.data.dataset import Dataset
from fedgauge.client.data.images import mnist5k
from fedgauge.client.transforms import UpdateTransform
from fedgauge.defenses.clip import clip


@dataclass(frozen=True)
class scaled(UpdateTransform):
    by: float

    def apply(self, update, rng):
        return {k: self.by * t for k, t in update.items()}


class grey(Attack):
    def __init__(self, level: float = 0.5):
        self.level = level

    def reconstruct(self, knowledge, observations):
        raise NotImplementedError  # a scenario names it, and nothing runs it


def few(count: int = 8) -> Dataset:
    return mnist5k()


def plain():
    return 7
"""
ENTRIES = {
    "fedgauge.links": {"scaled": "PACKAGE:scaled"},
    "fedgauge.attacks": {"grey": "PACKAGE:grey"},
    "fedgauge.datasets": {"few": "PACKAGE:few"},
}
Install = Callable[..., Path]
Run = Callable[[str], list[str]]
PRELUDE = """
from fedgauge.attacks.plan import ATTACK
from fedgauge.client.components import SpecError, allowing, build, resolve
from fedgauge.client.federation import DATASET, TRANSFORM, Federation
from fedgauge.client.models.build import MODEL
from fedgauge.client.protocol import Protocol

def attempt(name, kind, **arguments):
    try:
        return build({"use": name, **arguments}, "[x]", kind)
    except SpecError as error:
        return error
"""


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Puts a package with its dist-info, as pip leaves it, into a folder for Python's path."""

    def make(package: str, entries: dict[str, dict[str, str]] = ENTRIES, code: str = PLUG_IN) -> Path:
        (tmp_path / f"{package}.py").write_text(code)
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"[{g}]\n" + "".join(f"{n} = {v}\n" for n, v in table.items()) for g, table in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(lines).replace("PACKAGE", package))
        return tmp_path

    return make


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a program with that folder on Python's path, in another process; gives the lines that it printed."""

    def work(program: str) -> None:
        for name in [name for name in os.environ if name.startswith("FEDGAUGE_")]:
            del os.environ[name]
        os.environ["PYTHONPATH"] = str(tmp_path)
        sys.path.insert(0, str(tmp_path))
        entry_points._installed.cache_clear()
        with (tmp_path / "printed").open("w") as printed, redirect_stdout(printed):
            exec(PRELUDE + program, {})

    def start(program: str) -> list[str]:
        child = forked(work, program)
        child.join()
        assert child.exitcode == 0
        return (tmp_path / "printed").read_text().splitlines()

    return start


def test_a_plug_in_adds_components_that_a_scenario_can_name_unless_an_owner_lists_packages(
    install: Install, run: Run
) -> None:
    """A deployed client reads its owner's file: there an installed package is not allowed by being installed."""
    install("gadgets")
    install(
        "widgets",
        {"fedgauge.links": {"clip": "PACKAGE:scaled", "local_sgd": "PACKAGE:scaled", "twice": "PACKAGE:scaled"}},
    )
    install("thirds", {"fedgauge.links": {"twice": "PACKAGE:scaled"}})
    printed = run("""
tables = {"rounds": 1, "clients": 2, "data": {"use": "few", "count": 4, "batch_size": 2}, "model": {"use": "lenet"},
          "chain": [{"use": "scaled", "by": 2}, {"use": "local_sgd", "rate": 0.1}]}
federation = Federation(Protocol.from_json(Protocol.from_tables(tables).to_json())).check()
print(federation.chain.links[0], federation.shards.dataset.name)
print(build({"use": "grey", "level": 0.25}, "[[attack]] #1", ATTACK).level)
print("scaled" in TRANSFORM.names(), "grey" in ATTACK.names(), "few" in DATASET.names())
print(attempt("grye", ATTACK))
print(resolve({"use": "clip"}, "", TRANSFORM).__module__, resolve({"use": "local_sgd"}, "", TRANSFORM).__module__)
print(attempt("twice", TRANSFORM, by=1.0))
with allowing(["thirds"], plug_ins=False):
    print(type(attempt("twice", TRANSFORM, by=1.0)).__module__)
import subprocess, sys
with allowing([], plug_ins=False):
    print(attempt("scaled", TRANSFORM, by=1.0), attempt("gadgets:scaled", TRANSFORM, by=1.0))
    print("scaled" in TRANSFORM.names(), attempt("clip", TRANSFORM, max_norm=1.0))
    code = "from fedgauge.client.federation import TRANSFORM; print('scaled' in TRANSFORM.names())"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip())
with allowing(["gadgets"], plug_ins=False):
    print(attempt("scaled", TRANSFORM, by=1.0), attempt("gadgets:scaled", TRANSFORM, by=1.0))
with allowing(["other"]):
    print(attempt("scaled", TRANSFORM, by=1.0))
""")
    assert printed[:3] == ["scaled(by=2.0) mnist5k", "0.25", "True True True"]
    assert "'grey'?" in printed[3]
    assert printed[4] == "fedgauge.defenses.clip fedgauge.client.local_training", "no plug-in takes a name of ours"
    assert "thirds and widgets" in printed[5], "neither of two of one name is taken"
    assert printed[6] == "thirds", "only the package that is allowed counts"
    assert "unknown component 'scaled'" in printed[7] and "'gadgets:scaled' is not" in printed[7]
    assert printed[8:10] == ["False clip(max_norm=1.0)", "False"], "nor in processes that it starts"
    assert printed[10:] == ["scaled(by=1.0) scaled(by=1.0)", "scaled(by=1.0)"]


def test_a_plug_in_that_fails_or_is_no_component_is_named_and_the_rest_works(install: Install, run: Run) -> None:
    entries = {"plain": "PACKAGE:plain", "theirs": "PACKAGE:clip", "stranger": "os:system", "scaled": "PACKAGE:scaled"}
    install("gadgets", {"fedgauge.links": entries, "fedgauge.models": {"plain": "PACKAGE:plain"}})
    install("broken", {"fedgauge.links": {"torn": "broken:torn"}}, "x = 1\nraise RuntimeError('no licence')\n")
    install("half", {"fedgauge.links": {"lost": "half:lost"}}, "")
    printed = run("""
for name in ("torn", "lost", "plain", "theirs", "stranger"):
    print(attempt(name, TRANSFORM))
print(attempt("plain", MODEL))
print(attempt("scaled", TRANSFORM, by=3), attempt("clip", TRANSFORM, max_norm=1.0))
""")
    assert "RuntimeError: no licence" in printed[0] and "broken.py, line 2" in printed[0]
    assert "AttributeError" in printed[1]
    assert all("is not a link" in line for line in printed[2:5])
    assert "gave int" in printed[5]
    assert printed[6] == "scaled(by=3.0) clip(max_norm=1.0)"


def test_fedgauge_is_one_package() -> None:
    assert {value.split(":")[0].split(".")[0] for _, _, value in OURS} <= {fedgauge.__name__, "flwr"}
