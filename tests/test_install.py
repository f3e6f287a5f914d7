"""What an installation holds, which a checkout cannot tell: `pip install .` takes what is listed, an editable one the tree."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("client", "defenses", "attacks", "server", "simulations")
WHEEL = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation"]


def test_a_wheel_holds_every_module_and_every_scenario(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a build leaves folders in what it builds
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    done = subprocess.run([*WHEEL, "--wheel-dir", str(tmp_path), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    ours = [
        path for name in PACKAGES for suffix in ("py", "toml", "html") for path in (ROOT / name).rglob(f"*.{suffix}")
    ]
    owed = {path.relative_to(ROOT).as_posix() for path in ours}
    assert len(owed) > 100
    assert owed - held == set()
