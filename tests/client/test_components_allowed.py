"""Components from packages of a user's own: loaded where they are allowed, refused everywhere else in words that say how."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w
import torch
from torch import nn

from fedgauge.client import components
from fedgauge.client.components import SpecError, allowed, allowing, build, resolve, with_absolute_paths
from fedgauge.client.federation import DATASET, TRANSFORM, Federation
from fedgauge.client.models.build import MODEL
from fedgauge.client.models.losses import LOSS
from fedgauge.client.protocol import Protocol
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.run import Run
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.run import in_memory

OWN = """
import os
from os import getcwd
from pathlib import Path
import torch
from torch import nn
from fedgauge.client.data.images import Dataset, mnist5k
from fedgauge.client.models.vision import mlp

def small(shape, classes, hidden=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], hidden), nn.Linear(hidden, classes))

class Net(nn.Module):
    def __init__(self, classes: int, scale: float = 1.0):
        super().__init__()
        self.head, self.scale = nn.Linear(784, classes), scale
    def forward(self, x):
        return self.scale * self.head(x.flatten(1))

def annotated(classes: int) -> nn.Module:
    return Net(classes)

def text() -> str:
    return "no model"

def nothing():
    return 7

def sharpened():
    pass

def stored(path: Path, size: int = 3) -> Dataset:
    assert path.is_absolute()
    return mnist5k()

class Plain:
    pass

def broken(classes, how="ValueError"):
    raise {"ValueError": ValueError("my bug"), "TypeError": TypeError("my bug"), "KeyError": KeyError("my bug")}[how]
"""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    """A folder with a module of a user's, and a package with one inside; not yet allowed."""
    (tmp_path / "mynets.py").write_text(OWN)
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "__init__.py").write_text("from mypackage.inner import Deep\n")
    (tmp_path / "mypackage" / "inner.py").write_text(OWN.replace("class Net", "class Deep"))
    yield tmp_path
    for name in [n for n in sys.modules if n.split(".")[0] in ("mynets", "mypackage")]:
        del sys.modules[name]


OFFERED = {"shape": (1, 28, 28), "classes": 10}


def test_without_leave_nothing_is_imported_and_the_flag_is_named(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(own))
    with pytest.raises(SpecError) as caught:
        resolve({"use": "mynets:Net"}, "[model]", MODEL)
    words = str(caught.value)
    assert words.startswith("[model]: use = 'mynets:Net' is not allowed here; a model is one of convbig")
    assert "--allow mynets " in words and "FEDGAUGE_ALLOW=mynets" in words and 'allow = ["mynets"]' in words
    assert "mynets" not in sys.modules


@pytest.mark.parametrize("use", ["mnist5k", "..mynets:Net", "fedgauge.simulations.cli.main:main", "1a:b"])
def test_names_that_no_flag_could_allow_get_no_such_advice(use: str) -> None:
    with pytest.raises(SpecError) as caught:
        resolve({"use": use}, "[model]", MODEL)
    assert "--allow" not in str(caught.value)


@pytest.mark.parametrize("use", ["mynets:small", "mynets:Net", "mynets:annotated"])
def test_what_is_allowed_is_built_with_what_it_asks_for(own: Path, use: str) -> None:
    with allowing(["mynets"], [own]):
        model = build({"use": use}, "[model]", MODEL, OFFERED)
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert str(own) not in sys.path and "mynets" not in allowed()


def test_arguments_of_a_users_component_are_checked_as_ours_are(own: Path) -> None:
    with allowing(["mynets"], [own]):
        assert build({"use": "mynets:Net", "scale": 2}, "[model]", MODEL, OFFERED).scale == 2.0
        with pytest.raises(SpecError, match=r"Net\(\) has no argument 'sclae' \(it has: scale\)"):
            build({"use": "mynets:Net", "sclae": 2}, "[model]", MODEL, OFFERED)
        with pytest.raises(SpecError, match=r"\[model\]: scale must be a number, got 'x'"):
            build({"use": "mynets:Net", "scale": "x"}, "[model]", MODEL, OFFERED)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("mynets:Plain", "is not a model: expected, written in mynets, a class that derives from torch.nn.modules.module.Module"),
        ("mynets:text", "is not a model"),
        ("mynets:os", "is not a model"),
        ("mynets:os.system", "is not a model"),  # written elsewhere
        ("mynets:getcwd", "is not a model"),
        ("mynets:nn.Linear", "is not a model"),
        ("mynets:mlp", "is not a model"),  # ours, under another name
        ("mynets:nothing", "'mynets:nothing' gave int, expected a model (torch.nn.modules.module.Module)"),
        ("mynets:missing", "nothing is called 'mynets:missing' (module 'mynets' has no attribute 'missing'; mynets was read from"),
        ("mypackage:Net", "'mypackage:Net' is not allowed here"),  # another package
        ("mynetsx:Net", "'mynetsx:Net' is not allowed here"),
    ],
)  # fmt: skip
def test_what_is_none_is_told_and_never_called(own: Path, use: str, message: str) -> None:
    with allowing(["mynets"], [own]), pytest.raises(SpecError) as caught:
        build({"use": use}, "[model]", MODEL, OFFERED)
    assert message in str(caught.value)


@pytest.mark.parametrize("how", ["ValueError", "TypeError", "KeyError"])
def test_what_a_users_code_raises_is_told_with_its_kind_and_line(own: Path, how: str) -> None:
    line = 1 + OWN.splitlines().index(next(words for words in OWN.splitlines() if "raise {" in words))
    with allowing(["mynets"], [own]), pytest.raises(SpecError) as caught:
        build({"use": "mynets:broken", "how": how}, "[model]", MODEL, OFFERED)
    assert str(caught.value).startswith(f"[model]: {how}: ") and "my bug" in str(caught.value)
    assert str(caught.value).endswith(f"({own / 'mynets.py'}, line {line})")


def test_a_function_of_an_unknown_kind_needs_an_annotation_where_the_plan_reads_it(own: Path) -> None:
    with (
        allowing(["mynets"], [own]),
        pytest.raises(SpecError, match=r"a function that returns one that says so \(-> \.\.\.\)"),
    ):
        resolve({"use": "mynets:sharpened"}, "[[chain]] #1", TRANSFORM)


def test_a_package_that_is_not_there_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with allowing(["nosuchpackage"], [tmp_path]), pytest.raises(SpecError) as caught:
        resolve({"use": "nosuchpackage:Net"}, "[model]", MODEL)
    assert f"(No module named 'nosuchpackage'; looked for in {tmp_path})" in str(caught.value)


@pytest.mark.parametrize(("text", "says"), [
    ("def (\n", "wrongly cannot be imported: SyntaxError: invalid syntax (wrongly.py, line 1)"),
    ("x = 1\n1 / 0\n", "wrongly cannot be imported: ZeroDivisionError: division by zero ({folder}/wrongly.py, line 2)"),
])  # fmt: skip
def test_a_module_that_cannot_be_imported_is_told_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "wrongly.py").write_text(text)
    try:
        with allowing(["wrongly"], [tmp_path]), pytest.raises(SpecError) as caught:
            resolve({"use": "wrongly:net"}, "[model]", MODEL)
    finally:
        sys.modules.pop("wrongly", None)
    assert str(caught.value) == f"[model]: {says.format(folder=tmp_path)}"


def test_a_part_of_a_package_may_be_allowed_alone(own: Path) -> None:
    with allowing(["mypackage.inner"], [own]):
        assert resolve({"use": "mypackage.inner:Deep"}, "[model]", MODEL).__name__ == "Deep"
        with pytest.raises(SpecError, match="is not allowed here"):
            resolve({"use": "mypackage:Deep"}, "[model]", MODEL)
    with allowing(["mypackage"], [own]):
        assert resolve({"use": "mypackage:Deep"}, "[model]", MODEL).__module__ == "mypackage.inner", "handed on by it"


@pytest.mark.parametrize("name", ["fedgauge", "fedgauge.client", "fedgauge.defenses.clip"])
def test_fedgauges_own_package_cannot_be_allowed(name: str) -> None:
    with pytest.raises(SpecError, match=f"--allow {name}: .*fedgauge's own"), allowing([name]):
        pass


@pytest.mark.parametrize("name", ["client", "attacks", "server"])
def test_a_users_package_may_have_the_name_of_one_of_our_folders(name: str) -> None:
    with allowing([name]):
        assert allowed() == (name,)


@pytest.mark.parametrize("name", ["", ".", "nets.py.", "./nets", "a b", "a-b", "../a"])
def test_only_a_packages_name_can_be_allowed(name: str) -> None:
    with pytest.raises(SpecError, match="takes a package's name"), allowing([name]):
        pass


def test_an_owners_list_takes_the_place_of_what_was_allowed_before(own: Path) -> None:
    with allowing(["mynets"], [own]):
        with allowing([]), pytest.raises(SpecError, match="is not allowed here"):
            resolve({"use": "mynets:Net"}, "[model]", MODEL)
        assert resolve({"use": "mynets:Net"}, "[model]", MODEL).__name__ == "Net"


def test_the_process_is_as_it_was_afterwards(own: Path) -> None:
    before = (
        {k: os.environ.get(k) for k in (components.ALLOW, components.ALLOW_PATH, components.PLUG_INS)},
        list(sys.path),
    )
    with pytest.raises(SpecError, match="nothing is called"), allowing(["mynets"], [own]):
        resolve({"use": "mynets:missing"}, "[model]", MODEL)
    assert before == (
        {k: os.environ.get(k) for k in (components.ALLOW, components.ALLOW_PATH, components.PLUG_INS)},
        list(sys.path),
    )


def test_a_process_that_starts_elsewhere_keeps_to_the_same_list(own: Path, tmp_path: Path) -> None:
    """As Flower's and Ray's do: by the environment alone, from another folder."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    root = Path(components.__file__).resolve().parents[1]
    program = """
from fedgauge.client.components import SpecError, resolve
from fedgauge.client.models.build import MODEL
print(resolve({"use": "mynets:Net"}, "here", MODEL).__name__)
try:
    resolve({"use": "mypackage:Deep"}, "here", MODEL)
except SpecError as error:
    print(error)
"""
    with allowing(["mynets"], [own]):
        environment = {**os.environ, "PYTHONPATH": str(root)}
        told = subprocess.run(
            [sys.executable, "-c", program], cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=120
        )
    assert told.stdout.startswith("Net\nhere: use = 'mypackage:Deep' is not allowed here"), told.stderr


def test_a_folder_of_the_users_takes_no_name_away_from_anybody(own: Path) -> None:
    (own / "client.py").write_text("raise AssertionError('not this one')")
    (own / "json.py").write_text("raise AssertionError('not this one')")
    with allowing(["mynets"], [own]):
        resolve({"use": "mynets:Net"}, "[model]", MODEL)
        assert sys.path[-1] == str(own)


def test_paths_start_from_where_fedgauge_is_called(own: Path) -> None:
    table = {"use": "mynets:stored", "path": "data/x", "size": 4, "batch_size": 2}
    with allowing(["mynets"], [own]):
        assert with_absolute_paths(table, DATASET, own) == {**table, "path": str(own / "data/x")}
        assert with_absolute_paths({**table, "path": "/a/b"}, DATASET, own)["path"] == "/a/b"
    assert with_absolute_paths(table, DATASET, own) == table, "what cannot be resolved is told where it is built"
    ours = {"use": "npz", "path": "x.npz"}
    assert with_absolute_paths(ours, DATASET, own)["path"] == str(own / "x.npz")


def test_a_federation_of_a_users_parts_travels_as_json(own: Path) -> None:
    tables = {
        "rounds": 1,
        "clients": 2,
        "data": {"use": "mynets:stored", "path": str(own), "batch_size": 2},
        "model": {"use": "mynets:small", "hidden": 5},
        "chain": [{"use": "local_sgd", "rate": 0.1}],
    }
    with allowing(["mynets"], [own]):
        protocol = Protocol.from_tables(tables)
        first, again = Federation(protocol).check(), Federation(Protocol.from_json(protocol.to_json())).check()
        update = first.own_update(*first.initial(), client=1, round=1)
        same = again.own_update(*again.initial(), client=1, round=1)
    assert isinstance(first.model, nn.Module) and update["1.weight"].shape == (5, 784)
    assert all(torch.equal(update[k], same[k]) for k in update)
    with pytest.raises(SpecError, match=r"\[data\]: use = 'mynets:stored' is not allowed here"):
        Federation(protocol).check()


def test_losses_of_a_users_are_allowed_alike(own: Path) -> None:
    with pytest.raises(SpecError, match=r"--allow torch "):
        resolve({"use": "torch.nn:MSELoss"}, "[loss]", LOSS)
    with allowing(["torch"]):
        assert resolve({"use": "torch.nn:CrossEntropyLoss"}, "[loss]", LOSS) is nn.CrossEntropyLoss


# ----------------------------------------------------------------------------------------------- and as Flower and Ray run it


LOSSES = """
def squared(logits, labels, scale: float = 1.0):
    return scale * (logits.softmax(1) - (labels.unsqueeze(-1) == labels.new_tensor(range(10))).float()).square().mean()
"""


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a run's processes are found by /proc: Linux")
def test_a_run_of_a_users_data_model_and_loss_in_processes(own: Path, tmp_path: Path) -> None:
    """In Flower's copy of the app, in its Ray workers and in those of the attack service, which all start elsewhere."""
    elsewhere = elsewhere_with_scenario(own, {"executor": "ray", "workers": 1})
    root = Path(components.__file__).resolve().parents[1]
    ended = subprocess.run(
        [sys.executable, "-m", "fedgauge.simulations.cli.main", *ALLOWING, str(own / "own.toml"), "--runs", "runs"],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert_read_off(elsewhere, ended.stdout)


@pytest.mark.slow
def test_a_run_of_a_users_data_model_and_loss(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real server, clients and attacks in this process; in the processes of Flower and Ray: make test-all."""

    def in_this_process(run: Run, *_: object) -> None:
        in_memory.train(run)
        serve(run, LocalExecutor())

    elsewhere = elsewhere_with_scenario(own, {"executor": "local"})
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr("fedgauge.simulations.run.simulate.simulate", in_this_process)
    assert main([*ALLOWING, str(own / "own.toml"), "--runs", "runs"]) == 0
    assert_read_off(elsewhere, capsys.readouterr().out)


ALLOWING = ["run", "--allow", "mynets", "--allow", "mylosses"]


def elsewhere_with_scenario(own: Path, audit: dict[str, object]) -> Path:
    """Writes own.toml, and returns another folder."""
    (own / "mylosses.py").write_text(LOSSES)
    tables = {
        "rounds": 1,
        "clients": 2,
        "data": {"use": "mynets:stored", "path": "data"},
        "model": {"use": "mynets:small", "hidden": 32},
        "loss": {"use": "mylosses:squared", "scale": 2.0},
        "chain": [{"use": "local_sgd", "rate": 0.1}],
        "audit": audit,
        "attack": [{"use": "analytic"}],
    }
    (own / "own.toml").write_text(tomli_w.dumps(tables))
    (own / "elsewhere").mkdir()
    return own / "elsewhere"


def assert_read_off(elsewhere: Path, printed: str) -> None:
    assert "exact to rounding" in printed and "failed" not in printed, printed
    (run,) = (elsewhere / "runs").iterdir()
    assert f'path = "{elsewhere / "data"}"' in (run / "scenario.toml").read_text(), "relative to where it was called"
    line = next(line for line in printed.splitlines() if line.split()[3:4] == ["analytic"])
    assert float(line.split()[5]) > 60, "the best PSNR: one example into a fully connected layer is read off"
