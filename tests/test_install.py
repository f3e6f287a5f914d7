"""What an installation is, which a checkout cannot show: the wheel, installed alone, beside a user's own files."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import uuid
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import tomli_w
import yaml

from fedgauge.server.store.run import Run
from fedgauge.simulations.run import processes
from fedgauge.simulations.run.launch import child_environment
from tests.server.strategy.test_three_apps import QUICKSTART
from tests.waiting import free_port, listens, wait_for

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("client", "defenses", "attacks", "server", "simulations")
WHEEL = ["wheel", "--no-deps", "--no-index", "--no-build-isolation"]
PROGRAM = "#!{python}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"


def pip(*arguments: str | Path) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves folders in what it builds
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip(*WHEEL, "--wheel-dir", folder, source)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds the wheel, and reaches what it depends on where the tests have it."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    program = folder / "bin" / "python"
    (site,) = (folder / "lib").glob("python*/site-packages")
    # a path in a .pth file is searched, but its own .pth files, such as an editable fedgauge's, are not read
    (site / "dependencies.pth").write_text("\n".join({p for p in sys.path if p.endswith("site-packages")}))
    pip("--python", program, "install", "--no-deps", "--no-index", wheel)
    for entry in metadata.entry_points(group="console_scripts"):
        if entry.dist is not None and entry.dist.name in ("flwr", "ray"):
            script = folder / "bin" / entry.name
            script.write_text(PROGRAM.format(python=program, module=entry.module, function=entry.attr))
            script.chmod(0o755)
    return program


CLONE_ONLY = ("benchmarks", "papers", "reproduction")  # folders of simulations/ that an audit does not need


def installed(path: Path) -> bool:
    folder, *inner = path.relative_to(ROOT).parts
    return not (folder == "simulations" and inner[0] in CLONE_ONLY)


def test_a_wheel_holds_every_module_and_every_scenario(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    suffixes = ("py", "toml", "html", "js", "css")
    ours = [path for name in PACKAGES for suffix in suffixes for path in (ROOT / name).rglob(f"*.{suffix}")]
    owed = {f"fedgauge/{path.relative_to(ROOT).as_posix()}" for path in ours if installed(path)}
    assert len(owed) > 100
    assert owed - held == set()
    assert not [name for name in held if name.startswith(tuple(f"fedgauge/simulations/{f}/" for f in CLONE_ONLY))]


def test_a_wheel_installs_one_top_level_package(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fedgauge"}


def test_the_extras_are_those_that_the_docs_promise() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"].keys() >= {"text", "docs", "dev"}
    page = (ROOT / "docs/guides/install.md").read_text()
    assert all(f"`[{extra}]`" in page for extra in project["optional-dependencies"])


def test_citation_and_changelog_are_of_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    headings = re.findall(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == version


def test_every_folder_of_code_is_listed_as_a_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {
        "fedgauge." + ".".join(path.parent.relative_to(ROOT).parts)
        for name in PACKAGES
        for path in (ROOT / name).rglob("*.py")
        if installed(path)
    }
    assert sorted(listed) == sorted(folders)


@pytest.mark.parametrize("command", ["reproduce suite", "reproduce --help", "compare suite_small"])
def test_commands_of_a_clone_say_so_where_the_wheel_is_installed(python: Path, tmp_path: Path, command: str) -> None:
    program = [python.parent / "fedgauge", *command.split()]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (2, "")
    assert "clone" in done.stderr and "make install" in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_wheel_lists_every_command(python: Path, tmp_path: Path) -> None:
    assert "reproduce" in run(python, tmp_path, "--help")


# ------------------------------------------------------------------------------------- beside files of the user's own


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Flower app in the usual shape, client.py and server.py, with three more files whose names are fedgauge's folders'."""
    app = tmp_path_factory.mktemp("app")
    theirs = ROOT / "tests/foreign" / QUICKSTART.name
    shutil.copytree(theirs, app / theirs.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("client", "server"):
        (app / f"{name}.py").write_text(f"from {theirs.name} import {name}_app\n\napp = {name}_app.app\n")
    for name in ("attacks", "defenses", "simulations"):
        (app / f"{name}.py").write_text(f"raise RuntimeError('the {name}.py of the user was imported')\n")
    described = tomllib.loads((ROOT / "tests/foreign/pyproject.toml").read_text())
    described["tool"]["flwr"]["app"]["components"] = {"serverapp": "server:app", "clientapp": "client:app"}
    (app / "pyproject.toml").write_text(tomli_w.dumps(described))
    return app


def run(python: Path, folder: Path, *command: str | Path) -> str:
    env = {**os.environ, "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]])}
    done = subprocess.run(
        [python.parent / "fedgauge", *command], cwd=folder, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.slow
def test_the_doctor_finds_everything_in_a_users_folder(python: Path, folder: Path) -> None:
    assert "Ray" in run(python, folder, "doctor")


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds children by /proc: Linux")
def test_a_foreign_app_is_recorded_under_flower(python: Path, folder: Path, tmp_path: Path) -> None:
    audit, record = QUICKSTART.write_audit(tmp_path), tmp_path / "theirs"
    mark, port = uuid.uuid4().hex, free_port()
    (tmp_path / "home").mkdir()
    links = {"default": "here", "here": {"address": f"127.0.0.1:{port}", "insecure": True}}
    (tmp_path / "home" / "config.toml").write_text(tomli_w.dumps({"superlink": links}))
    short = Path(tempfile.mkdtemp(prefix="fl-"))  # Ray's sockets live below it
    env = child_environment(short, mark) | {"FLWR_HOME": str(tmp_path / "home"), "FEDGAUGE_ALLOW": QUICKSTART.name}
    env["PATH"] = os.pathsep.join([str(python.parent), env["PATH"]])
    superlink = ["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess", "--port", str(port)]
    process = processes.start([str(python.parent / superlink[0]), *superlink[1:]], tmp_path / "superlink.log", env)
    try:
        wait_for(lambda: listens(port), 90, process=process)
        federation = "num-supernodes=2 client-resources-num-cpus=1 init-args-num-cpus=1 init-args-log-to-driver=false"
        flwr = [str(python.parent / "flwr")]
        config = f'audit="{audit}" record-to="{record}" examples=1'
        command = [*flwr, "run", str(folder), "here", "--stream", "--run-config", config]
        trained = subprocess.run(
            [*command, "--federation-config", federation], env=env, capture_output=True, text=True, timeout=600
        )
        listing = subprocess.run(
            [*flwr, "ls", "here", "--format", "json"], env=env, capture_output=True, text=True, timeout=120
        )
        status = json.loads(listing.stdout)["runs"][0]["status"]
        log = (tmp_path / "superlink.log").read_text()
        assert status == "finished:completed", trained.stdout[-3000:] + log[-3000:]
    finally:
        processes.end(process)
        processes.sweep(mark)
        shutil.rmtree(short, ignore_errors=True)
    with Run.open(record).ledger() as ledger:
        rows, meta = ledger.observations(), ledger.meta()
        assert [row["round"] for row in ledger.rounds()] == [1, 2]
        assert all(row["accuracy"] is not None for row in ledger.rounds())
    assert (meta["state"], meta["rounds"]) == ("trained", "2")
    places = [(round, client, "accepted") for round in (1, 2) for client in (0, 1)]
    assert [(row["round"], row["client"], row["status"]) for row in rows] == places
    assert all(row["digest"] for row in rows)
