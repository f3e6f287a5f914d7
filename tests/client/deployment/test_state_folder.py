"""A client's own folder: private, durable, and never silently reset."""

import json
import stat
import threading
from pathlib import Path

import pytest
import torch

from fedgauge.client.deployment.state_folder import ClientFolder, DamagedState, DrawnBatch, digest_of
from fedgauge.client.update import Batch


def test_the_folder_is_its_owners_alone(tmp_path: Path) -> None:
    state = ClientFolder(tmp_path / "state")
    with state.locked():
        state.keep_drawn(1, DrawnBatch(7, (1, 2), "ab"))
        state.keep_answers("ab", {"dlg": {"images": "", "psnr": [1.0]}})
        state.note("sent", round=1)
    for path in (state.folder, *state.folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_what_was_drawn_and_answered_outlives_the_process(tmp_path: Path) -> None:
    ClientFolder(tmp_path).keep_drawn(3, DrawnBatch(7, (5, 1), "ab"))
    ClientFolder(tmp_path).keep_answers("ab", {"dlg": {"images": "x", "psnr": [20.5]}})
    assert ClientFolder(tmp_path).drawn(7, 3) == DrawnBatch(7, (5, 1), "ab")
    assert ClientFolder(tmp_path).drawn(7, 4) is None
    assert ClientFolder(tmp_path).drawn(8, 3) is None, "of another run"
    assert ClientFolder(tmp_path).answers("ab") == {"dlg": {"images": "x", "psnr": [20.5]}}
    assert ClientFolder(tmp_path).answers("cd") == {}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": 1}', '{"run": 1, "rows": ["x"], "digest": ""}'])
def test_a_damaged_count_is_no_fresh_count(tmp_path: Path, text: str) -> None:
    state = ClientFolder(tmp_path)
    state.keep_drawn(1, DrawnBatch(7, (1,), "ab"))
    state.keep_answers("ab", {})
    next(tmp_path.glob("rounds/*")).write_text(text)
    with pytest.raises(DamagedState, match="run-7-round-00001.json is damaged"):
        state.drawn(7, 1)
    next(tmp_path.glob("answers/*")).write_text("{")
    with pytest.raises(DamagedState, match="is damaged"):
        state.answers("ab")


def test_two_holders_wait_for_each_other(tmp_path: Path) -> None:
    state, order = ClientFolder(tmp_path), []

    def other() -> None:
        with ClientFolder(tmp_path).locked():
            order.append("other")

    with state.locked():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.3)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]


def test_lines_of_the_log_are_json_in_their_order(tmp_path: Path) -> None:
    state = ClientFolder(tmp_path)
    for i in range(3):
        state.note("sent", round=i, words="line\nbreak")
    events = [json.loads(line) for line in state.log.read_text().splitlines()]
    assert [(e["event"], e["round"], e["words"]) for e in events] == [("sent", i, "line\nbreak") for i in range(3)]


def test_a_batch_is_known_whatever_its_order() -> None:
    x = torch.rand(3, 1, 4, 4)
    y = torch.zeros(3, dtype=torch.int64)
    assert digest_of(Batch(x, y)) == digest_of(Batch(x[[2, 0, 1]], y))
    assert digest_of(Batch(x, y)) != digest_of(Batch(x + 1e-6, y))
    assert digest_of(Batch(x[:2], y[:2])) != digest_of(Batch(x, y))
