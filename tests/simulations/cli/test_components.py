"""fedgauge list: every component is listed, and a broken plug-in stops nothing."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jsonschema import Draft7Validator

from docs.generate.arguments import listed_arguments
from fedgauge.client import entry_points
from fedgauge.simulations.cli.components import KINDS, components_of
from fedgauge.simulations.cli.main import main

PLUG_IN = '''
from fedgauge.client.transforms import UpdateTransform


class loud(UpdateTransform):
    """Adds nothing | but says so.

    More of it.
    """

    def __init__(self, volume: float, shape: tuple[int, ...], echo: str = "yes") -> None: ...

    def apply(self, update, rng):
        return update


def wrong() -> int:
    return 3
'''
METADATA = "Metadata-Version: 2.1\nName: loud-links\nVersion: 1\n"
ENTRY_POINTS = """
[fedgauge.links]
loud = loudlinks:loud
gone = loudlinks:gone
wrong = loudlinks:wrong
broken = brokenlinks:anything
clip = loudlinks:loud
[fedgauge.defenses]
quiet = loudlinks:loud
"""


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed distribution that adds a good link and four that cannot be used."""
    site = tmp_path / "site"
    information = site / "loud_links-1.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(METADATA)
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    (site / "loudlinks.py").write_text(PLUG_IN)
    (site / "brokenlinks.py").write_text("raise SystemExit('no licence')\n")
    monkeypatch.syspath_prepend(site)
    entry_points._installed.cache_clear()
    yield
    entry_points._installed.cache_clear()
    for name in ("loudlinks", "brokenlinks"):
        sys.modules.pop(name, None)


def test_every_kind_has_components_and_each_says_what_it_is() -> None:
    listed = components_of()
    assert {c.kind for c in listed} == set(KINDS)
    for kind, components in KINDS.items():
        assert [c.name for c in listed if c.kind == kind] == list(dict.fromkeys(e.name for e in components.entries()))
    assert [c.name for c in listed if not c.description or c.error] == []
    assert {"dlg", "lamp", "read_rows", "mean_image"} <= {c.name for c in listed if c.kind == "attack"}


def test_arguments_are_those_that_a_scenario_sets() -> None:
    arguments = {(c.kind, c.name): listed_arguments(c.target) for c in components_of() if c.target is not None}
    assert arguments["link", "local_sgd"] == "rate, steps = 1, batch_size = none, proximal_mu = 0.0"
    assert arguments["link", "mixup"] == "alpha", "the number of classes and the batch size are filled in"
    assert arguments["model", "mlp"] == 'hidden = [256], activation = "relu"'
    assert arguments["attack", "separated"] == 'attack = { use = "analytic" }'
    assert arguments["prior", "gaussian"] == "weight = 1.0, by_class = false", "TOML holds no tensor"
    assert arguments["strategy", "FedAvg"] == "fraction_train = 1.0, min_train_nodes = 1, min_available_nodes = all"


def test_the_command_prints_names_and_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "loss"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "loss" and [line.split()[0] for line in lines[1:]] == [e.name for e in KINDS["loss"].entries()]
    assert main(["list"]) == 0
    headings = [line for line in capsys.readouterr().out.splitlines() if line and not line.startswith(" ")]
    assert headings == list(KINDS)


def test_an_unknown_kind_is_answered_with_all_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "atack"]) == 2
    error = capsys.readouterr().err
    assert "'atack'" in error and all(kind in error for kind in KINDS)
    assert error.count("'attack'") == 1, "the nearest"


@pytest.mark.usefixtures("plug_in")
def test_plug_ins_are_listed_with_their_package_and_broken_ones_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    listed = components_of("link")
    theirs = {c.name: c for c in listed if c.package == "loud-links"}
    assert set(theirs) == {"loud", "gone", "wrong", "broken", "clip"}
    good = theirs.pop("loud")
    assert good.target is not None and listed_arguments(good.target) == 'volume, echo = "yes"'
    assert (good.description, good.error) == ("Adds nothing | but says so.", "")
    words = {"gone": "AttributeError: ", "wrong": "is not", "broken": "SystemExit: no licence", "clip": "fedgauge"}
    assert all(words[name] in component.error for name, component in theirs.items())
    assert [c.error for c in listed if c.package == "fedgauge"] == [""] * len(
        KINDS["link"].entries()[: -len(theirs) - 1]
    )
    assert main(["list", "link"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:] if "[loud-links]" in line}
    assert set(lines) == {"loud", "gone", "wrong", "broken", "clip"}
    assert "[loud-links]: " in lines["broken"] and "SystemExit: no licence" in lines["broken"]


@pytest.mark.usefixtures("plug_in")
def test_the_schema_accepts_usable_plug_ins(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    links = Draft7Validator(json.loads(capsys.readouterr().out)["definitions"]["link"])
    assert links.is_valid("loud") and links.is_valid("mine.links:quiet")
    assert not links.is_valid("gone") and not links.is_valid("louder")


@pytest.mark.usefixtures("plug_in")
def test_the_doctor_names_every_plug_in_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = tmp_path / "small.toml"
    assert main(["init", str(scenario)]) == 0
    assert main(["doctor", str(scenario)]) == 0, "what the scenario does not use does not stop it"
    said = " ".join(capsys.readouterr().out.split())
    assert all(f"{name} of the package" in said for name in ("gone", "wrong", "broken", "clip"))
