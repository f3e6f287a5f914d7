"""Whatever is wrong on the command line: exit status 2 and a sentence that names it, never a traceback."""

import shutil
import sqlite3
from pathlib import Path

import pytest

from fedgauge.simulations.cli.main import main
from tests.simulations.cli.conftest import TABLES, taped_run

RUN, FILE = ("newer", "damaged", "lost"), ("folder", "newer")
# a command, and what its PLACE may be besides ALWAYS
FORMS: dict[str, tuple[str, ...]] = {
    "audit PLACE": RUN,
    "run --resume PLACE": RUN,
    "report PLACE": RUN,
    "export PLACE": RUN,
    "stop PLACE": ("lost",),
    "prune PLACE": ("lost",),
    "run PLACE": FILE,
    "run --in-memory PLACE": FILE,
    "preflight PLACE": FILE,
    "doctor PLACE": FILE,
    "sweep PLACE": FILE,
    "deploy init new --clients 2 --scenario PLACE": FILE,
    "deploy register PLACE --superlink x:1": ("folder", "newer"),
    "deploy start PLACE --superlink x:1 --name one": ("folder", "newer"),
    "reproduce PLACE": ("folder",),
    "list PLACE": ("folder",),
    "runs --runs PLACE": ("newer",),
    "prune --runs PLACE": ("newer",),
}
ALWAYS = ("missing", "text", "binary", "below a file")
CASES = [(form, place) for form, places in FORMS.items() for place in (*ALWAYS, *places)]
CASES += [("watch PLACE", place) for place in ("missing", "text", "below a file")]
CASES += [("init PLACE", place) for place in ("text", "folder", "below a file", "in no folder")]
CASES += [("app PLACE", place) for place in ("missing", "text", "folder", "below a file")]
CASES += [("compare PLACE", place) for place in (*ALWAYS, "folder")]
WRITTEN = ("export good -o PLACE", "app good --draft PLACE", "gate good --junit PLACE", "reproduce spear -o PLACE")
CASES += [(form, place) for form in WRITTEN for place in ("folder", "below a file")]


VALUES = {  # a command with a wrong value, and what names it
    "doctor --set rounds=3": "--set",
    "stop run --patience -1": "--patience",
    "stop run --patience nan": "--patience",
    "audit run --rounds first": "expected a whole number",
    "app . --fail-above pnsr=20": "did you mean psnr",
    "schema --allow nosuch": "no such package",
    "watch . --host nosuch.invalid": "choose another --host",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Everything that a path on the command line may be and should not."""
    folder = tmp_path_factory.mktemp("wrong")
    good = taped_run(folder / "runs", TABLES).folder
    named = {name: folder / name for name in ("missing", "text", "binary", "folder")}
    named["text"].write_text("hello")
    named["binary"].write_bytes(bytes(range(256)))
    named["folder"].mkdir()
    for name in ("newer", "damaged", "lost"):
        named[name] = shutil.copytree(good, folder / "runs" / name)
    with sqlite3.connect(named["newer"] / "ledger.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    (named["damaged"] / "ledger.sqlite").write_bytes(b"no ledger" * 1000)
    (named["lost"] / "ledger.sqlite").unlink()
    return {**named, "below a file": named["text"] / "x", "in no folder": folder / "none" / "x", "good": good}


def ended(arguments: list[str]) -> int | str | None:
    try:
        return main(arguments)
    except SystemExit as end:
        return end.code


@pytest.mark.product
@pytest.mark.parametrize(("form", "place"), CASES)
def test_unsuitable_paths_are_named(
    places: dict[str, Path],
    form: str,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = str(places[place])
    arguments = [{"PLACE": path, "good": str(places["good"])}.get(word, word) for word in form.split()]
    assert ended(arguments) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told and "[Errno" not in told
    named = path if place != "below a file" else str(places["text"])
    assert named in told, "the sentence names what is wrong"
    last = told.strip().splitlines()[-1]
    assert last.startswith(("fedgauge: ", "fedgauge "))
    assert [p for p in tmp_path.iterdir() if p.name != ".cache"] == [], "nothing was begun"


@pytest.mark.product
@pytest.mark.parametrize("line", VALUES)
def test_unsuitable_values_are_named(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(line.split()) == 2
    assert VALUES[line] in capsys.readouterr().err
