"""What torch compiles lies in a folder of the user alone, whatever others have put into the one for temporary files."""

import getpass
import os
import subprocess
import sys
from pathlib import Path

import pytest

NAMED = "import os, fedgauge.client; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
TAKEN = """
import os, fedgauge.client
from torch._inductor.runtime.cache_dir_utils import cache_dir
folder = cache_dir()
open(os.path.join(folder, "code"), "w").close()
print(folder)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's home."""
    (tmp_path / "home").mkdir(mode=0o700)
    return tmp_path / "home"


def folder_of(program: str, home: Path, **more: str) -> Path:
    """The folder that a process with this home prints."""
    unset = ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR")
    env = {key: value for key, value in os.environ.items() if key not in unset} | {"HOME": str(home), **more}
    done = subprocess.run([sys.executable, "-P", "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def test_it_lies_in_the_cache_folder_and_is_the_users_alone(home: Path) -> None:
    found = folder_of(NAMED, home)
    assert found == home / ".cache" / "fedgauge" / "compiled"
    assert found.stat().st_mode & 0o777 == 0o700
    assert folder_of(NAMED, home) == found, "what was compiled is found again"
    assert folder_of(NAMED, home, TORCHINDUCTOR_CACHE_DIR="/mine") == Path("/mine")


def test_torch_takes_it_and_not_the_one_that_somebody_made_for_us(home: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "tmp"
    theirs.mkdir()
    (theirs / f"torchinductor_{getpass.getuser()}").write_text("a file, in which no folder can be made")
    assert folder_of(TAKEN, home, TMPDIR=str(theirs), LOGNAME=getpass.getuser()) == home / ".cache/fedgauge/compiled"


def test_without_a_home_in_which_it_can_be_made_torch_takes_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    program = "import os, fedgauge.client; print(os.environ.get('TORCHINDUCTOR_CACHE_DIR', 'none'))"
    assert folder_of(program, tmp_path / "file") == Path("none")
