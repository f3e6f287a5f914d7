"""Who may import whom: read from every source file, so that a notebook needs torch alone and training never needs Ray."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = ("client", "defenses", "attacks", "server", "simulations")
FLOWER = (
    "client/app.py",
    "client/mods.py",
    "client/deployment/",
    "server/app.py",
    "server/tap_recorder.py",
    "server/tap.py",
    "server/strategy/",
    "server/tap.py",
    "server/store/checkpoint.py",
)
LEAN = ("client", "defenses", "attacks")  # need torch alone
MAY_IMPORT = {
    "client": {"client"},
    "defenses": {"defenses", "client"},
    "attacks": {"attacks", "client"},
    "server": {"server", "attacks", "client", "defenses"},
    "simulations": set(OURS),
}


@dataclass(frozen=True)
class Import:
    """One import statement: where it stands, what it names, and whether importing the file runs it."""

    file: str
    line: int
    module: str
    eager: bool

    @property
    def top(self) -> str:
        """The package that is imported: one of ours by its folder, another by its name."""
        return self.module.removeprefix("fedgauge.").split(".")[0]

    @property
    def package(self) -> str:
        return self.file.split("/")[0]


def sources() -> list[str]:
    return sorted(p.relative_to(ROOT).as_posix() for package in OURS for p in (ROOT / package).rglob("*.py"))


@cache
def parse(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(), file)


def nodes(tree: ast.AST, lazy: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node, and whether it stands inside a function, which importing the file does not run."""
    yield tree, lazy
    lazy = lazy or isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(tree):
        yield from nodes(child, lazy)


def last_name(node: ast.expr) -> str:
    """The name of what is called, without what it is called of."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def imports(file: str) -> Iterator[Import]:
    for node, lazy in nodes(parse(file)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import hides its package"
            names = [f"fedgauge.{a.name}" for a in node.names] if node.module == "fedgauge" else [node.module or ""]
        elif isinstance(node, ast.Call) and last_name(node.func) == "import_module":
            names = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        else:
            continue
        for name in names:
            yield Import(file, node.lineno, name, not lazy)


def docstrings(tree: ast.Module) -> set[ast.AST]:
    """Strings that stand alone: nothing reads them."""
    return {n.value for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}


def names_in_strings(file: str) -> Iterator[Import]:
    """What a file names without importing it: modules and folders of ours in strings that the program uses."""
    tree = parse(file)
    silent = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in silent:
            ours = "|".join(OURS)
            named = rf"\b(?:fedgauge\.)?(?:{ours})(?:[./][a-z_]+)+|\bfedgauge\.(?:{ours})\b"
            for name in re.findall(named, node.value):
                dotted = name.replace("/", ".").removeprefix("fedgauge.")
                if (ROOT / dotted.replace(".", "/")).is_dir() or (ROOT / (dotted.replace(".", "/") + ".py")).is_file():
                    yield Import(file, node.lineno, dotted, False)


@cache
def every_import() -> list[Import]:
    return [i for file in sources() for i in imports(file)]


@cache
def every_name_in_a_string() -> list[Import]:
    return [i for file in sources() for i in names_in_strings(file)]


def outside(top: set[str], allowed: tuple[str, ...]) -> list[Import]:
    """Imports of these packages from files, or folders, that may not."""
    return [i for i in every_import() if i.top in top and not i.file.startswith(allowed)]


@pytest.mark.parametrize("package", OURS)
def test_a_package_imports_only_what_stands_below_it(package: str) -> None:
    everything = [i for i in [*every_import(), *every_name_in_a_string()] if i.package == package and i.top in OURS]
    assert [i for i in everything if i.top not in MAY_IMPORT[package]] == []


def test_attacks_and_defenses_do_not_know_each_other() -> None:
    assert [i for i in every_import() if i.package == "attacks" and i.top == "defenses"] == []
    assert [i for i in every_import() if i.package == "defenses" and i.top == "attacks"] == []


def test_the_server_asks_defenses_only_what_they_promise() -> None:
    found = {i.module for i in every_import() if i.package == "server" and i.top == "defenses"}
    assert found == {"fedgauge.defenses.accounting"}


def test_only_the_faces_to_flower_import_flower() -> None:
    assert outside({"flwr"}, (*FLOWER, "simulations/")) == []


def test_only_the_pool_imports_ray() -> None:
    assert outside({"ray"}, ("server/pool/",)) == []


def test_only_the_ledger_imports_sqlite() -> None:
    assert outside({"sqlite3"}, ("server/store/ledger",)) == []


def test_only_the_dashboard_imports_a_web_framework() -> None:
    assert outside({"starlette", "uvicorn", "fastapi"}, ("server/dashboard/",)) == []


def test_client_defenses_and_attacks_need_torch_alone_at_import() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "numpy", *OURS}
    eager = [
        i
        for i in every_import()
        if i.package in LEAN and not i.file.startswith(FLOWER) and i.eager and i.top not in allowed
    ]
    assert eager == [], "import it where it is used"


def test_what_is_installed_imports_nothing_that_is_not() -> None:
    """The command line only names reproduction, and says what to do where it is missing."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {name.removeprefix("fedgauge.").replace(".", "/") for name in listed}
    left_out = {f.rpartition("/")[0].replace("/", ".") for f in sources() if f.rpartition("/")[0] not in folders}
    assert left_out == {"simulations.benchmarks", "simulations.reproduction"}
    found = [
        i
        for i in [*every_import(), *every_name_in_a_string()]
        if i.file.rpartition("/")[0] in folders
        and (i.top in {"docs", "tests"} or i.module.removeprefix("fedgauge.").startswith(tuple(left_out)))
    ]
    assert {(i.file, i.module, i.eager) for i in found} == {
        ("simulations/cli/main.py", "simulations.reproduction", False)
    }


def test_a_notebook_loads_nothing_but_torch() -> None:
    """The same in a fresh process; and clients and searches make torch import nothing more for itself."""
    modules = [
        "fedgauge." + f.removesuffix(".py").replace("/", ".")
        for f in sources()
        if f.split("/")[0] in LEAN and not f.startswith(FLOWER)
    ]
    heavy = ["flwr", "ray", "starlette", "scipy", "torchvision", "lpips", "datasets", "flwr_datasets"]
    program = f"""
import importlib, os, sys
environment = dict(os.environ)
for module in {[m.removesuffix(".__init__") for m in modules]}:
    importlib.import_module(module)
loaded = sorted(set({heavy}) & set(sys.modules))
assert not loaded, loaded
assert dict(os.environ) == environment, "a user's app imports some of them"

from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.source import FederationSource
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol

links = ({{"use": "local_sgd", "rate": 0.1}},)
source = FederationSource(Federation(Protocol(0, 1, 1, {{"use": "mnist5k"}}, {{"use": "mlp"}}, links)))
attack = PlannedAttack.from_table({{"use": "inverting_gradients", "iterations": 1}}, "here")
assert Auditor(source).audit(attack, source.wave())[0].reconstruction.x is not None
assert "torch._dynamo" not in sys.modules, "torch's compiler takes longer to import than all else"
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_nothing_of_the_server_side_is_imported_anywhere_in_them() -> None:
    heavy = {"flwr", "ray", "sqlite3", "starlette", "uvicorn", "fastapi", "server", "simulations"}
    assert [i for i in every_import() if i.package in LEAN and not i.file.startswith(FLOWER) and i.top in heavy] == []


def test_a_package_mends_torchvision_before_anything_else() -> None:
    """Every process of ours passes through one of these files first."""
    for package in set(OURS) - {"client"}:
        assert "fedgauge.client" in [i.module for i in imports(f"{package}/__init__.py")], package
    assert "mend_when_imported()" in (ROOT / "client/__init__.py").read_text()


# ------------------------------------------------------------------------------------------------ the shape of the house


@cache
def siblings() -> dict[str, dict[str, set[str]]]:
    """For each folder, which of its files and folders import which others of it."""
    files = {f.removesuffix(".py").removesuffix("/__init__").replace("/", "."): f for f in sources()}
    found: dict[str, dict[str, set[str]]] = {}
    for file in sources():
        for node in ast.walk(parse(file)):
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{a.name}" for a in node.names]
            else:
                continue
            modules = [name.removeprefix("fedgauge.") for name in names if name.startswith("fedgauge.")]
            for target in {files.get(m, files.get(m.rpartition(".")[0])) for m in modules} - {None, file}:
                mine, other = file.split("/"), str(target).split("/")
                if "__init__.py" in (mine[-1], other[-1]):
                    continue  # a package's face
                depth = next(i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b)
                found.setdefault("/".join(mine[:depth]), {}).setdefault(mine[depth], set()).add(other[depth])
    return found


@pytest.mark.parametrize("folder", sorted({"", *(f.rpartition("/")[0] for f in sources())}))
def test_no_circle_ties_the_files_and_folders_of_a_folder(folder: str) -> None:
    graph = dict(siblings().get(folder, {}))
    while free := [node for node in graph if not graph[node] & graph.keys()]:
        for node in free:
            del graph[node]
    assert graph == {}, "these import each other in a circle"


# ------------------------------------------------------------------------------------------- nothing is ever unpickled

UNPICKLERS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


@cache
def calls(file: str) -> list[tuple[int, str, dict[str, Any]]]:
    """Each call: its line, its dotted name and its constant keyword arguments."""
    found = []
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Call):
            constants = {
                k.arg: k.value.value for k in node.keywords if k.arg is not None and isinstance(k.value, ast.Constant)
            }
            found.append((node.lineno, ast.unparse(node.func), constants))
    return found


def test_nothing_is_unpickled() -> None:
    assert outside(UNPICKLERS, ()) == []
    found = [
        f"{file}:{line}: {name}"
        for file in sources()
        for line, name, constants in calls(file)
        if name in {"torch.load", "torch.save", "pickle.load", "pickle.loads", "np.fromfile"}  # what must stand nowhere
        or name.endswith("read_pickle")
        or constants.get("allow_pickle") is True
        or constants.get("weights_only") is False
    ]
    assert found == []


def test_every_numpy_load_refuses_pickles_in_words() -> None:
    loads = [(file, constants) for file in sources() for _, name, constants in calls(file) if name == "np.load"]
    assert loads, "the test reads nothing"
    assert all(constants.get("allow_pickle") is False for _, constants in loads), loads


def test_no_text_is_run_as_a_program() -> None:
    found = [f"{file}:{line}: {name}" for file in sources() for line, name, _ in calls(file) if name in FORBIDDEN_CALLS]
    assert found == []


def test_no_shell_is_started() -> None:
    found = [
        f"{file}:{line}: {name}"
        for file in sources()
        for line, name, constants in calls(file)
        if name in {"os.system", "os.popen", "subprocess.getoutput"} or constants.get("shell") is True
    ]
    assert found == []


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    homes = ("/wo" + "rk/", "/ho" + "me/", "/ro" + "ot/", "/Us" + "ers/")
    strings = [
        f"{file}:{node.lineno}: {node.value!r}"
        for file in sources()
        for node in ast.walk(parse(file))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and any(h in node.value for h in homes)
    ]
    assert strings == []


def test_editors_find_the_packages_of_a_clone() -> None:
    """Pyright, and with it an editor's "go to definition", resolves fedgauge.client by the link that mypy uses."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    (path,) = tools["pyright"]["extraPaths"]
    assert path == tools["mypy"]["mypy_path"] and (ROOT / path / "fedgauge").resolve() == ROOT
