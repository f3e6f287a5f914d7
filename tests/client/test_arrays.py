"""Headers of npy files against NumPy's own writer."""

import contextlib
import io

import numpy as np
import pytest
import torch

from fedgauge.client.arrays import npy_array, npy_header

KINDS = ["<f4", "<f2", ">f8", "<i8", "|i1", "|u1", "<u2", "|b1", "<c8"]


def _saved(array: object) -> bytes:
    file = io.BytesIO()
    np.save(file, array)  # type: ignore[arg-type]  # any array
    return file.getvalue()


@pytest.mark.product
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (1, 3), (2, 0, 3), (4, 3, 2)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_comes_back_as_numpy_saved_it(kind: str, shape: tuple[int, ...], order: str) -> None:
    numbers = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(len(shape))).numpy()
    array = np.asarray(numbers, np.dtype(kind), order)  # type: ignore[call-overload]  # C or F
    back = npy_array(_saved(array))
    assert back.dtype == array.dtype and back.shape == array.shape and np.array_equal(back, array)
    assert back.flags.writeable


def test_a_long_shape_in_the_second_version_is_read() -> None:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ones((2, 1, 3), np.float32), (2, 0))
    assert npy_header(file.getvalue()).shape == (2, 1, 3)


def test_arrays_that_are_not_numeric_or_not_whole_are_refused() -> None:
    whole = _saved(np.arange(6, dtype=np.float32).reshape(2, 3))
    odd = [np.array([{}]), np.array(["word"]), np.zeros(2, "i4,f4"), np.array(["2026"], "M8[Y]")]
    unknown = _saved(np.zeros(4, "<f4")).replace(b"<f4", b"<f3")  # which numpy does not have
    for saved in (*map(_saved, odd), unknown, *(whole[:end] for end in range(len(whole)))):
        with pytest.raises(ValueError, match="expected|claims"):
            npy_array(saved)


def test_any_changed_byte_is_a_value_error_or_an_array() -> None:
    whole = _saved(np.arange(6, dtype=np.float32).reshape(2, 3))
    draws = torch.Generator().manual_seed(0)
    for _ in range(500):
        changed = bytearray(whole)
        changed[int(torch.randint(0, 128, (), generator=draws))] = int(torch.randint(0, 256, (), generator=draws))
        with contextlib.suppress(ValueError):
            assert npy_array(bytes(changed)).nbytes <= len(whole)
