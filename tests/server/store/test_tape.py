"""The tape: what comes off it is what went on, or an error that names the file."""

import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedgauge.client import files
from fedgauge.server.store import tape as tape_module
from fedgauge.server.store.tape import Tape, TapeError, read_tensors, write_tensors
from tests.forks import forked

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
PARAMS = {"1.weight": torch.linspace(-1, 1, 6).reshape(2, 3), "1.bias": torch.tensor([math.pi, -0.0])}
BUFFERS = {"norm.running_var": torch.tensor([1e-38, 3e38])}
UPDATE = {k: t * 1e-3 for k, t in PARAMS.items()}


def bits(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """Dtype, shape and the very bytes: NaN is equal to NaN, and -0.0 is not 0.0."""
    return {k: (t.dtype, tuple(t.shape), bytes(t.contiguous().view(torch.uint8).flatten().tolist()) if t.ndim else
                bytes(t.reshape(1).view(torch.uint8).tolist())) for k, t in tensors.items()}  # fmt: skip


@st.composite
def named_tensors(draw: st.DrawFn) -> dict[str, Tensor]:
    names = draw(st.lists(st.text(min_size=1, max_size=12), max_size=4, unique=True))
    tensors = {}
    for name in names:
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        count = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
        raw = torch.tensor(list(draw(st.binary(min_size=count, max_size=count))), dtype=torch.uint8)
        raw = raw % 2 if dtype == torch.bool else raw
        tensors[name] = raw.view(dtype).reshape(shape)
    return tensors


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors=named_tensors())
def test_tensors_are_read_bit_for_bit(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    digest = write_tensors(tmp_path / "t.safetensors", tensors)
    assert bits(read_tensors(tmp_path / "t.safetensors", digest)) == bits(tensors)


def test_transposed_and_expanded_tensors_are_read_again(tmp_path: Path) -> None:
    tensors = {"t": torch.arange(6.0).reshape(2, 3).T, "e": torch.tensor([1.0]).expand(4), "g": torch.ones(2)}
    tensors["g"].requires_grad_()
    write_tensors(tmp_path / "t", tensors)
    back = read_tensors(tmp_path / "t")
    assert all(torch.equal(back[k], tensors[k]) for k in tensors)


def taped(folder: Path) -> tuple[Tape, str]:
    tape = Tape(folder)
    sent = tape.write_round(3, PARAMS, BUFFERS)
    return tape, f"{sent}:{tape.write_update(3, 7, UPDATE)}"


def test_an_observation_is_read_bit_for_bit(tmp_path: Path) -> None:
    tape, digest = taped(tmp_path)
    seen = tape.read(3, 7, digest)
    assert (seen.round, seen.client) == (3, 7)
    assert bits(seen.params) == bits(PARAMS)
    assert bits(dict(seen.buffers)) == bits(BUFFERS)
    assert bits(seen.update) == bits(UPDATE)


UPDATE_FILE, ROUND_FILE = "round-00003-client-00007.safetensors", "round-00003.safetensors"


@pytest.mark.parametrize("name", [UPDATE_FILE, ROUND_FILE])
def test_every_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    """Of the update and of the weights it was computed from: an attack on either would be wrong in silence."""
    tape, digest = taped(tmp_path)
    original = (tmp_path / name).read_bytes()
    for position in range(len(original)):
        spoiled = bytearray(original)
        spoiled[position] ^= 1 << (position % 8)
        (tmp_path / name).write_bytes(spoiled)
        with pytest.raises(TapeError):
            tape.read(3, 7, digest)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=64), header=st.booleans())
@example(data=b"PK\x03\x04 a zip", header=False)
@example(data=b"\x80\x04\x95 a pickle", header=False)
@example(data=(1 << 63).to_bytes(8, "little") + b"{}", header=False)
@example(data=b'{"a":{"dtype":"F8_E8M0","shape":[1],"data_offsets":[0,4]}}    ', header=True)
@example(data=b"[]", header=True)
def test_any_bytes_are_tensors_or_a_tape_error(tmp_path: Path, data: bytes, header: bool) -> None:
    path = tmp_path / "any"
    path.write_bytes(len(data).to_bytes(8, "little") + data if header else data)
    words = f"{path} was read"
    try:
        assert all(isinstance(t, Tensor) for t in read_tensors(path).values())
    except TapeError as error:
        words = str(error)
    assert str(path) in words


def test_forgetting_an_update_deletes_it_and_the_last_takes_the_weights_along(tmp_path: Path) -> None:
    tape, _ = taped(tmp_path)
    tape.write_update(3, 8, UPDATE)
    tape.write_round(30, PARAMS, {})
    tape.write_update(30, 7, UPDATE)
    tape.forget(3, [7])
    assert not (tmp_path / UPDATE_FILE).exists()
    assert (tmp_path / ROUND_FILE).exists(), "client 8's update still needs it"
    assert torch.equal(tape.read(3, 8).update["1.bias"], UPDATE["1.bias"])
    tape.forget(3, [8])
    tape.forget(3, [8, 9])  # nothing left to forget is no mistake
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "round-00030-client-00007.safetensors",
        "round-00030.safetensors",
    ]


def write_number(path: Path) -> float:
    """Which write a file comes from, after checking that it holds one whole write."""
    values = read_tensors(path)["w"]
    assert len(values) == 200_000
    assert (values == values[0]).all(), f"{path.name} has two writes in it"
    return float(values[0])


def write_and_die(folder: Path, number: int, line: int | None = None) -> None:
    """Write an update, and be killed at one line of it."""

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal line
        if line is None or frame.f_code.co_filename not in (files.__file__, tape_module.__file__):
            return None
        line -= event == "line"
        if line < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    Tape(folder).write_update(1, 0, {"w": torch.full((200_000,), float(number))})


def test_a_writer_killed_at_any_line_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    """The kill comes at every line of a write in turn, so the result does not depend on when a signal arrives."""
    numbers, ended = [0.0], -signal.SIGKILL
    forked(write_and_die, tmp_path, 0).join()
    (path,) = tmp_path.glob("round-*")
    while ended == -signal.SIGKILL:
        child = forked(write_and_die, tmp_path, len(numbers), len(numbers) - 1)
        child.join()
        ended = child.exitcode
        numbers.append(write_number(path))
        assert numbers[-1] in (numbers[-2], len(numbers) - 1), "the previous write, or the one that was killed"
    assert ended == 0 and numbers[-1] == len(numbers) - 1
    assert len(numbers) > 20, "lines of a write"
    assert numbers[1] == 0 and numbers[-2] == len(numbers) - 2, "the first kill left the old file, the last the new one"


def test_tensors_are_read_in_their_written_order(tmp_path: Path) -> None:
    """safetensors' own order differs from process to process, and a client's noise is drawn in the order of the names."""
    names = [f"layer{i * 7 % 40}" for i in range(40)]
    tape = Tape(tmp_path)
    tape.write_round(1, {name: torch.zeros(2) for name in names}, {"count": torch.zeros(1, dtype=torch.float64)})
    tape.write_update(1, 0, {name: torch.zeros(2) for name in reversed(names)})
    seen = tape.read(1, 0)
    assert list(seen.params) == names
    assert list(seen.update) == names[::-1]
