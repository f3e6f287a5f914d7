"""Components from packages of a user's own: loaded where they are allowed, refused everywhere else in words that say how."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedgauge.client import components
from fedgauge.client.components import SpecError, allowed, allowing, build, resolve, with_absolute_paths
from fedgauge.client.federation import DATASET, TRANSFORM, Federation
from fedgauge.client.models.build import MODEL
from fedgauge.client.models.losses import LOSS
from fedgauge.client.protocol import Protocol

OWN = """
import os
from functools import partial
from os import getcwd
from pathlib import Path
import torch
from torch import nn
from fedgauge.client.data.dataset import Dataset
from fedgauge.client.data.images import mnist5k
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

class Makes:
    @classmethod
    def made(cls, classes):
        return Net(classes)

made, given, built, wide = Makes.made, partial(broken, 10), Net(10), partial(small, hidden=5)
"""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    """A folder with a module of a user's, and a package with one inside; not yet allowed."""
    (tmp_path / "mynets.py").write_text(OWN)
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "__init__.py").write_text("from mypackage.inner import Deep\n")
    (tmp_path / "mypackage" / "inner.py").write_text(OWN.replace("Net", "Deep"))
    yield tmp_path
    for name in [n for n in sys.modules if n.split(".")[0] in ("mynets", "mypackage")]:
        del sys.modules[name]


OFFERED = {"shape": (1, 28, 28), "classes": 10}


def test_without_leave_nothing_is_imported_and_the_flag_is_named(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(own))
    with pytest.raises(SpecError, match="--allow mynets .*FEDGAUGE_ALLOW=mynets"):
        resolve({"use": "mynets:Net"}, "[model]", MODEL)
    assert "mynets" not in sys.modules


@pytest.mark.parametrize("use", ["mnist5k", "..mynets:Net", "fedgauge.simulations.cli.main:main", "1a:b"])
def test_names_that_no_flag_could_allow_get_no_such_advice(use: str) -> None:
    with pytest.raises(SpecError) as caught:
        resolve({"use": use}, "[model]", MODEL)
    assert "--allow" not in str(caught.value)


@pytest.mark.parametrize("use", ["mynets:small", "mynets:Net", "mynets:annotated", "mynets:made", "mynets:wide"])
def test_allowed_components_are_built_with_the_arguments_they_request(own: Path, use: str) -> None:
    with allowing(["mynets"], [own]):
        model = build({"use": use}, "[model]", MODEL, OFFERED)
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert str(own) not in sys.path and "mynets" not in allowed()


def test_a_module_in_double_precision_changes_nothing_else(own: Path) -> None:
    doubled = "torch.set_default_dtype(torch.float64)\n"
    later = f"def later() -> nn.Module:\n    {doubled}    return nn.MSELoss()\n"
    (own / "mynets.py").write_text(f"import torch\n{doubled}{OWN}{later}")
    with allowing(["mynets"], [own]):
        model = build({"use": "mynets:Net"}, "[model]", MODEL, OFFERED)
        assert torch.get_default_dtype() == torch.float32 == next(model.parameters()).dtype
        build({"use": "mynets:later"}, "[loss]", LOSS)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("use", "arguments", "name"),
    [
        ("Net", {"sclae": 2}, "sclae"),
        ("Net", {"scale": "x"}, "scale must be"),
        ("Plain", {}, "is not a model"),
        ("text", {}, "is not a model"),
        ("os", {}, "is not a model"),
        ("os.system", {}, "expected torch"),  # written elsewhere
        ("nn.Linear", {}, 'use = "torch.nn.modules.linear:Linear", with --allow torch'),
        ("mlp", {}, "is not a model"),  # ours, under another name
        ("built", {}, "name the class Net"),
        ("given", {"how": "TypeError"}, "TypeError: my bug .*mynets.py, line "),
        ("nothing", {}, "gave int"),
        ("missing", {}, "'missing'"),
        *(
            ("broken", {"how": how}, rf"{how}: .*my bug.*mynets.py, line ")
            for how in ("ValueError", "TypeError", "KeyError")
        ),
    ],
)
def test_failing_and_foreign_entry_points_are_named(own: Path, use: str, arguments: dict[str, Any], name: str) -> None:
    with allowing(["mynets"], [own]):
        assert build({"use": "mynets:Net", "scale": 2}, "[model]", MODEL, OFFERED).scale == 2.0
        with pytest.raises(SpecError, match=rf"^\[model\]: .*{name}"):
            build({"use": f"mynets:{use}", **arguments}, "[model]", MODEL, OFFERED)
        with pytest.raises(SpecError):
            build({"use": f"mynetsx:{use}", **arguments}, "[model]", MODEL, OFFERED)


def test_a_function_of_an_unknown_kind_needs_an_annotation_where_the_plan_reads_it(own: Path) -> None:
    with allowing(["mynets"], [own]), pytest.raises(SpecError):
        resolve({"use": "mynets:sharpened"}, "[[chain]] #1", TRANSFORM)


@pytest.mark.parametrize(("text", "name"), [
    (None, "ModuleNotFoundError"),
    ("def (\n", "SyntaxError"),
    ("x = 1\n1 / 0\n", "ZeroDivisionError.*wrongly.py, line 2"),
    ("import torch\ndef net(x: Nowhere) -> torch.nn.Module: ...\n", "Nowhere"),
])  # fmt: skip
def test_a_module_that_cannot_be_imported_is_named_with_its_line(tmp_path: Path, text: str | None, name: str) -> None:
    if text:
        (tmp_path / "wrongly.py").write_text(text)
    try:
        with allowing(["wrongly"], [tmp_path]), pytest.raises(SpecError, match=f"'wrongly:net'.*{name}"):
            resolve({"use": "wrongly:net"}, "[model]", MODEL)
    finally:
        sys.modules.pop("wrongly", None)


def test_a_part_of_a_package_may_be_allowed_alone(own: Path) -> None:
    with allowing(["mypackage.inner"], [own]):
        assert resolve({"use": "mypackage.inner:Deep"}, "[model]", MODEL).__name__ == "Deep"
        with pytest.raises(SpecError):
            resolve({"use": "mypackage:Deep"}, "[model]", MODEL)
    with allowing(["mypackage"], [own]):
        assert resolve({"use": "mypackage:Deep"}, "[model]", MODEL).__module__ == "mypackage.inner", "handed on by it"


@pytest.mark.parametrize("name", ["client", "attacks", "server"])
def test_a_users_package_may_have_the_name_of_one_of_our_folders(name: str) -> None:
    with allowing([name]):
        assert allowed() == (name,)


@pytest.mark.parametrize("name", ["", ".", "nets.py.", "./nets", "a b", "a-b", "fedgauge", "fedgauge.client"])
def test_only_the_name_of_a_package_outside_fedgauge_can_be_allowed(name: str) -> None:
    with pytest.raises(SpecError), allowing([name]):
        pass


def test_an_owners_list_takes_the_place_of_what_was_allowed_before(own: Path) -> None:
    with allowing(["mynets"], [own]):
        with allowing([]), pytest.raises(SpecError):
            resolve({"use": "mynets:Net"}, "[model]", MODEL)
        assert resolve({"use": "mynets:Net"}, "[model]", MODEL).__name__ == "Net"


def test_the_process_is_as_it_was_afterwards(own: Path) -> None:
    before = dict(os.environ), list(sys.path)
    with pytest.raises(SpecError), allowing(["mynets"], [own]):
        resolve({"use": "mynets:missing"}, "[model]", MODEL)
    assert before == (dict(os.environ), list(sys.path))


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
    assert told.stdout.startswith("Net\nhere: use = 'mypackage:Deep' "), told.stderr


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
    with pytest.raises(SpecError):
        Federation(protocol).check()


HOOKS = """
import sys
from dataclasses import dataclass
from fedgauge.client.transforms import BatchTransform, UpdateTransform
from fedgauge.client.update import Batch

@dataclass(frozen=True)
class Batches(BatchTransform):
    how: str
    def transform(self, batch, rng):
        return {"nothing": None, "pair": (batch.x, batch.y), "fewer": Batch(batch.x[:1], batch.y[:1])}[self.how]

@dataclass(frozen=True)
class Updates(UpdateTransform):
    how: str
    def apply(self, update, rng):
        return sys.exit(0) if self.how == "exit" else {k: t.clone() for k, t in update.items()}
    @property
    def mean(self):
        return {"number": 3, "nothing": None, "typing error": self.meen if self.how == "typing error" else 0}.get(self.how, self)
    def update_distribution(self, before):
        return 3 if self.how == "density" else before
"""


@pytest.mark.parametrize(
    ("use", "how", "named"),
    [
        *(("Batches", how, r"#1.*Batch") for how in ("nothing", "pair", "fewer")),
        *(("Updates", how, r"#1.*mean") for how in ("number", "nothing", "density")),
        ("Updates", "typing error", "meen.*mynets.py"),
        ("Updates", "exit", "SystemExit.*mynets.py"),
    ],
)
def test_what_a_users_link_should_not_give_is_named(own: Path, use: str, how: str, named: str) -> None:
    (own / "mynets.py").write_text(HOOKS)
    tables = {
        "rounds": 1,
        "clients": 2,
        "data": {"use": "mnist5k", "batch_size": 2},
        "model": {"use": "mlp", "hidden": [2]},
        "chain": [{"use": f"mynets:{use}", "how": how}, {"use": "local_sgd", "rate": 0.1}],
    }
    fed = Federation(Protocol.from_tables(tables))
    with allowing(["mynets"], [own]), pytest.raises(SpecError, match=named), components.users_errors():
        fed.check().own_update(*fed.initial(), client=0, round=1)


def test_losses_of_a_users_are_allowed_alike(own: Path) -> None:
    with pytest.raises(SpecError):
        resolve({"use": "torch.nn:MSELoss"}, "[loss]", LOSS)
    with allowing(["torch"]):
        assert resolve({"use": "torch.nn:CrossEntropyLoss"}, "[loss]", LOSS) is nn.CrossEntropyLoss
