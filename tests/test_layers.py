"""Who may import whom: read from every source file, so that a notebook needs torch alone and training never needs Ray."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = ("client", "defenses", "attacks", "server", "simulations")
FLOWER = {
    *("client/app.py", "client/deployment/guard.py", "client/mods.py", "client/deployment/secure_sum_mod.py"),
    *(
        "server/app.py",
        "server/store/checkpoint.py",
        "server/strategy/curious.py",
        "server/strategy/validator.py",
        "server/strategy/node_discovery.py",
        "server/strategy/client_grading.py",
        "server/strategy/malicious_strategy.py",
        "server/strategy/secure_aggregation.py",
        "server/strategy/wrapper.py",
    ),
}
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
        return self.module.split(".")[0]

    @property
    def package(self) -> str:
        return self.file.split("/")[0]


def sources() -> list[str]:
    return sorted(p.relative_to(ROOT).as_posix() for package in OURS for p in (ROOT / package).rglob("*.py"))


def parse(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(), file)


def lazy_nodes(tree: ast.Module) -> set[ast.AST]:
    """Everything inside a function's body, which importing the file does not run."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    return {inner for function in functions for inner in ast.walk(function) if inner is not function}


def imports(file: str) -> Iterator[Import]:
    tree = parse(file)
    lazy = lazy_nodes(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import hides its package"
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        else:
            continue
        for name in names:
            yield Import(file, node.lineno, name, node not in lazy)


ALL = [i for file in sources() for i in imports(file)]


def outside(top: set[str], allowed: set[str]) -> list[Import]:
    """Imports of these packages from files that may not."""
    return [i for i in ALL if i.top in top and i.file not in allowed]


def test_the_reader_sees_every_file_and_both_kinds_of_import() -> None:
    assert {i.package for i in ALL} == set(OURS)
    assert len(sources()) > 40
    assert Import("client/data/images.py", 0, "numpy", True) in {Import(i.file, 0, i.module, i.eager) for i in ALL}
    assert Import("client/data/images.py", 0, "datasets", False) in {Import(i.file, 0, i.module, i.eager) for i in ALL}


@pytest.mark.parametrize("package", OURS)
def test_a_package_imports_only_what_stands_below_it(package: str) -> None:
    wrong = [i for i in ALL if i.package == package and i.top in OURS and i.top not in MAY_IMPORT[package]]
    assert wrong == []


def test_attacks_and_defenses_do_not_know_each_other() -> None:
    assert [i for i in ALL if i.package == "attacks" and i.top == "defenses"] == []
    assert [i for i in ALL if i.package == "defenses" and i.top == "attacks"] == []


def test_the_server_asks_defenses_only_what_they_promise() -> None:
    found = {i.module for i in ALL if i.package == "server" and i.top == "defenses"}
    assert found == {"fedgauge.defenses.accounting"}


def test_only_the_faces_to_flower_import_flower() -> None:
    simulations = {file for file in sources() if file.startswith("simulations/")}
    assert outside({"flwr"}, FLOWER | simulations) == []


def test_only_the_pool_imports_ray() -> None:
    assert outside({"ray"}, {"server/pool/executors.py"}) == []


def test_only_the_ledger_imports_sqlite() -> None:
    assert outside({"sqlite3"}, {"server/store/ledger.py"}) == []


def test_only_the_dashboard_imports_a_web_framework() -> None:
    dashboard = {file for file in sources() if file.startswith("server/dashboard")}
    assert outside({"starlette", "uvicorn", "fastapi"}, dashboard) == []


def test_client_defenses_and_attacks_need_torch_alone_at_import() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "numpy", *OURS}
    eager = [i for i in ALL if i.package in LEAN and i.file not in FLOWER and i.eager and i.top not in allowed]
    assert eager == [], "import it where it is used"


def test_a_notebook_loads_nothing_but_torch() -> None:
    """The same in a fresh process, where what torch and NumPy import for themselves is the only other thing."""
    modules = [
        f.removesuffix(".py").replace("/", ".") for f in sources() if f.split("/")[0] in LEAN and f not in FLOWER
    ]
    heavy = ["flwr", "ray", "starlette", "scipy", "torchvision", "torchmetrics", "lpips", "datasets", "flwr_datasets"]
    program = f"""
import importlib, sys
for module in {[m.removesuffix(".__init__") for m in modules]}:
    importlib.import_module(module)
loaded = sorted(set({heavy}) & set(sys.modules))
assert not loaded, loaded
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_nothing_of_the_server_side_is_imported_anywhere_in_them() -> None:
    heavy = {"flwr", "ray", "sqlite3", "starlette", "uvicorn", "fastapi", "server", "simulations"}
    assert [i for i in ALL if i.package in LEAN and i.file not in FLOWER and i.top in heavy] == []


def test_a_package_mends_torchvision_before_anything_else() -> None:
    """Every process of ours passes through one of these files first."""
    for package in set(OURS) - {"client"}:
        assert "client" in [i.module for i in imports(f"{package}/__init__.py")], package
    assert "mend_torchvision()" in (ROOT / "client/__init__.py").read_text()


# ------------------------------------------------------------------------------------------- nothing is ever unpickled

UNPICKLERS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def calls(file: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Each call: its line, its dotted name and its constant keyword arguments."""
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Call):
            constants = {
                k.arg: k.value.value for k in node.keywords if k.arg is not None and isinstance(k.value, ast.Constant)
            }
            yield node.lineno, ast.unparse(node.func), constants


def test_nothing_is_unpickled() -> None:
    assert outside(UNPICKLERS, set()) == []
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
