"""fedgauge export: a table that other programs can read, in a file or a pipe."""

import csv
import io
import os
import subprocess
import webbrowser
from collections.abc import Callable
from pathlib import Path

import pytest

from fedgauge.server.dashboard import web
from fedgauge.server.store.run import Run
from fedgauge.simulations.cli.main import main


def test_export_is_one_long_table(attacked: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(attacked.folder)]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {"run", "round", "client", "attack", "metric", "value", "status", "knowledge"} <= rows[0].keys()
    exact = [float(r["value"]) for r in rows if r["attack"] == "analytic" and r["metric"] == "psnr"]
    assert len(exact) == 4 and min(exact) > 100
    assert {r["run"] for r in rows} == {attacked.name}
    own = [r for r in rows if r["attack"] in ("analytic", "wrong_client(analytic)")]
    assert own and all("labels restored" in r["knowledge"] for r in own)
    assert all("and nothing else" in r["knowledge"] for r in rows if r not in own), "baselines restore nothing"


def test_an_export_takes_the_place_of_a_file_and_goes_into_a_pipe(
    attacked: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(attacked.folder)]) == 0
    expected = capsys.readouterr().out
    target, pipe = tmp_path / "scores.csv", tmp_path / "pipe"
    target.write_text("old")
    assert main(["export", str(attacked.folder), "-o", str(target)]) == 0
    assert target.read_text() == expected
    assert target.stat().st_mode & 0o777 == 0o600, "scores are of somebody's data"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True)
    assert main(["export", str(attacked.folder), "-o", str(pipe)]) == 0
    assert reader.communicate(timeout=60)[0] == expected
    assert pipe.is_fifo()


def test_a_browser_is_not_started_with_the_token_in_its_command_line(
    attacked: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every user of the machine reads it: the browser gets a file, which leads to the page and is deleted."""
    opened: list[tuple[Path, str, int]] = []

    def note(address: str) -> None:
        file = Path(address.removeprefix("file://"))
        opened.append((file, file.read_text(), file.parent.stat().st_mode & 0o777))

    def announced(path: Path, host: str, port: int, token: str, ready: Callable[[str], None]) -> None:
        ready(f"http://127.0.0.1:1/?token={token}")

    monkeypatch.setattr(web, "serve", announced)
    monkeypatch.setattr(webbrowser, "open", note)
    assert main(["watch", str(attacked.folder), "--open", "--token", "secret"]) == 0
    [(file, page, mode)] = opened
    assert "http://127.0.0.1:1/?token=secret" in page and "secret" not in str(file)
    assert mode == 0o700 and not file.exists()
