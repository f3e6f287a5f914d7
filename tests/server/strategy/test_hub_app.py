"""The app that `fedgauge init --app` writes: Flower bundles it, Flower Hub's own checks take it, and its server sees the digits."""

import importlib
import io
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate

from fedgauge.attacks.modality.image_metrics import psnr_of
from fedgauge.client.components import allowing
from fedgauge.server.store.run import Run
from fedgauge.simulations.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's own
CLIENTS, ROUNDS = 2, 2
OWN = {f"curious_app/{name}" for name in ("__init__.py", "task.py", "client_app.py", "server_app.py", "audit.toml")}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The app, in whose folder a run has left what it reconstructed."""
    folder = tmp_path / "curious-app"
    assert main(["init", "--app", str(folder), "--publisher", "somebody"]) == 0
    (folder / "runs" / "curious").mkdir(parents=True)
    (folder / "runs" / "curious" / "environment.json").write_text("{}")
    return folder


@pytest.fixture
def project(written: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Its checked pyproject.toml, with the app's modules to be found."""
    monkeypatch.syspath_prepend(str(written))
    with allowing(["curious_app"]):
        yield load_and_validate(written / "pyproject.toml")[0]
    for name in [n for n in sys.modules if n.split(".")[0] == "curious_app"]:
        del sys.modules[name]


def test_flower_bundles_the_app_and_nothing_that_a_run_left(written: Path, project: dict[str, Any]) -> None:
    app = project["tool"]["flwr"]["app"]
    assert (project["project"]["name"], app["publisher"], app["fab-format-version"]) == ("curious-app", "somebody", 1)
    held = set(zipfile.ZipFile(io.BytesIO(build_fab_from_disk(written))).namelist())
    assert held - {".info/CONTENT"} == {"pyproject.toml", "README.md", "LICENSE", *OWN}


def test_the_checks_before_an_upload_to_flower_hub_take_it(written: Path, project: dict[str, Any]) -> None:
    """Those of `flwr app publish`, which asks for an account before it comes to them."""
    publish = importlib.import_module("flwr.cli.app_cmd.publish")  # the package's name of it is a function
    publish._validate_app_name(written.name, "directory")
    publish._validate_description(project["project"]["description"])
    files = publish._collect_file_paths(written)
    publish._validate_files(files)
    named = {path.relative_to(written.resolve()).as_posix() for path in files}
    assert named >= {"pyproject.toml", "README.md", "LICENSE", *OWN}
    assert not any(name.startswith("runs/") for name in named)


def test_its_server_reads_the_clients_digits(kit: Any, written: Path, project: dict[str, Any]) -> None:
    parts = project["tool"]["flwr"]["app"]["components"]
    client, server = (
        importlib.import_module(ref.split(":")[0]).app for ref in (parts["clientapp"], parts["serverapp"])
    )
    folder = written / "runs" / "theirs"
    config = {**project["tool"]["flwr"]["app"]["config"], "record-to": str(folder)}
    grid = kit.MemoryGrid("", CLIENTS, app=client)
    for context in grid.contexts.values():
        context.run_config = config
    server(grid, Context(1, 1, {}, RecordDict(), config))
    run = Run.open(folder)
    assert main(["audit", str(folder), "--allow", "curious_app", "--log", "quiet"]) == 0
    with run.ledger() as ledger:
        assert ledger.progress().failed == 0 and len(ledger.observations()) == CLIENTS * ROUNDS
    found = [run.read_reconstruction(1, c, "analytic")["x"].clamp(0, 1) for c in range(CLIENTS)]
    private_digits = importlib.import_module("curious_app.task").private_digits
    best = [max(float(psnr_of(private_digits(c, 1)[0], x)) for x in found) for c in range(CLIENTS)]
    assert min(best) > 50, best


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="finds children by /proc: Linux")
def test_the_app_runs_under_flower_itself(kit: Any, written: Path, tmp_path: Path, project: dict[str, Any]) -> None:
    folder = tmp_path / "theirs"
    config = {**project["tool"]["flwr"]["app"]["config"], "record-to": str(folder)}
    kit.run_under_flower(tmp_path, "curious_app", config, source=written)
    with Run.open(folder).ledger() as ledger:
        assert ledger.meta()["state"] == "trained" and len(ledger.observations()) == CLIENTS * ROUNDS


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--app", "two_words"], "two_words"),
        (["--app", "fine", "--publisher", "a b"], "'a b'"),
        (["--app"], "--app"),
        (["--app", "there"], "there"),
    ],
)
def test_a_mistake_is_one_sentence(
    tmp_path: Path, words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert main(["init", *words]) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
