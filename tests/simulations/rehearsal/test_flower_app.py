"""The copy of an app's folder in which it runs, and the errors of its code."""

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fedgauge.client.components import SpecError
from fedgauge.simulations.rehearsal.flower_app import MANY, SMALL, AppGrid, FlowerApp, blamed, mirror


def test_code_is_copied_and_data_and_environments_are_linked(tmp_path: Path) -> None:
    app, copy = tmp_path / "app", tmp_path / "copy"
    for folder in ("src/theirs", "venv/lib", ".git", "images"):
        (app / folder).mkdir(parents=True)
    copy.mkdir()
    (app / "src/theirs/app.py").write_text("x = 1")
    (app / "large.bin").write_bytes(bytes(SMALL + 1))
    (app / "venv/pyvenv.cfg").touch()
    for i in range(MANY + 1):
        (app / "images" / f"{i}.png").touch()
    mirror(app, copy)
    linked = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_symlink()}
    assert linked == {"venv", ".git", "images", "large.bin"}
    (copy / "src/theirs/app.py").write_text("x = 2")
    assert (app / "src/theirs/app.py").read_text() == "x = 1"


def test_further_clients_appear_only_if_a_strategy_waits_for_them() -> None:
    """A strategy of its own asks three times before it sends; Flower's older servers ask from a second thread meanwhile."""
    nothing: Any = None
    grid = AppGrid(FlowerApp(Path(), "", "", {}), nothing, 5, nothing)
    for _ in range(3):
        assert len([*grid.get_node_ids()]) == 5
    other = threading.Thread(target=grid.get_node_ids)
    other.start()
    other.join()
    assert grid._here == 5
    assert len([*grid.get_node_ids()]) == 10


def test_a_misspelt_part_of_an_app_names_no_line_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "misspelt.py").write_text("client = 1")
    with pytest.raises(AttributeError) as caught:
        FlowerApp(tmp_path, "misspelt:server", "misspelt:clinet", {}).part("misspelt:clinet")
    assert blamed(caught.value, tmp_path) == "AttributeError: module 'misspelt' has no attribute 'clinet'"


@pytest.mark.parametrize(
    "text", ["tool = 1", "[tool]\nflwr = 1", "[tool.flwr]\napp = 1", "[tool.flwr.app]\ncomponents = 'x'"]
)
def test_an_app_without_components_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(SpecError, match="serverapp"):
        FlowerApp.read(tmp_path, {})


def test_a_config_that_is_no_table_is_none(tmp_path: Path) -> None:
    parts = "components = {serverapp = 'a:b', clientapp = 'a:c'}"
    (tmp_path / "pyproject.toml").write_text(f"[tool.flwr]\nfederations = 'x'\n[tool.flwr.app]\nconfig = 'x'\n{parts}")
    assert FlowerApp.read(tmp_path, {}) == FlowerApp(tmp_path, "a:b", "a:c", {})
