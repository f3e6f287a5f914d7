"""What torch compiles lies in a folder of the user alone, whatever others have put into the one for temporary files."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, fedgauge.client
print(os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""


def folder_of(home: Path, **more: str) -> Path:
    """The folder in which torch keeps what a process with this home compiles."""
    unset = ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR")
    env = {key: value for key, value in os.environ.items() if key not in unset} | {"HOME": str(home), **more}
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def test_it_is_in_the_cache_folder_and_readable_only_by_the_user(tmp_path: Path) -> None:
    found = folder_of(tmp_path)
    assert found == tmp_path / ".cache" / "fedgauge" / "compiled" and found.stat().st_mode & 0o777 == 0o700
    assert folder_of(tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "mine")) == tmp_path / "mine"
