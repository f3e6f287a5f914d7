"""A client's own folder: private, durable, and never silently reset."""

import json
import stat
from pathlib import Path

import pytest
import torch

from fedgauge.client.deployment.state_folder import Answer, ClientFolder, DrawnBatch, digest_of
from fedgauge.client.update import Batch


def test_the_folder_is_its_owners_alone(tmp_path: Path) -> None:
    state = ClientFolder(tmp_path / "state")
    with state.locked():
        state.keep_drawn(1, DrawnBatch(7, (1, 2), "ab"))
        state.keep_answers("ab", {"dlg": Answer("", (1.0,))})
        state.note("sent", round=1)
    for path in (state.folder, *state.folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_a_damaged_count_is_no_fresh_count(tmp_path: Path) -> None:
    state = ClientFolder(tmp_path)
    state.keep_drawn(1, DrawnBatch(7, (1,), "ab"))
    state.keep_answers("ab", {})
    for path in tmp_path.glob("*/*"):
        path.write_text("{")
    with pytest.raises(json.JSONDecodeError):
        state.drawn(7, 1)
    with pytest.raises(json.JSONDecodeError):
        state.answers("ab")


def test_a_batch_is_known_whatever_its_order() -> None:
    x = torch.rand(3, 1, 4, 4)
    y = torch.zeros(3, dtype=torch.int64)
    assert digest_of(Batch(x, y)) == digest_of(Batch(x[[2, 0, 1]], y))
    assert digest_of(Batch(x, y)) != digest_of(Batch(x + 1e-6, y))
    assert digest_of(Batch(x[:2], y[:2])) != digest_of(Batch(x, y))
