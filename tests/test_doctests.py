"""The examples in docstrings run, and print what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("attacks", "client", "defenses", "server", "simulations")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) if ">>> " in path.read_text()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_of_a_module(path: Path) -> None:
    name = ".".join(("fedgauge", *path.relative_to(ROOT).with_suffix("").parts))
    assert doctest.testmod(importlib.import_module(name)).failed == 0
