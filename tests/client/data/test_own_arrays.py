"""Rows and token ids from a user's arrays."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fedgauge.client.components import SpecError, build
from fedgauge.client.data.own_arrays import arrays, rows, token_ids
from fedgauge.client.federation import DATASET


def test_rows_stay_as_they_are_and_one_hot_entries_are_one_column(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    numbers, kinds = rng.normal(5, 0.1, (20, 2)), np.eye(3)[np.arange(20) % 3]
    x = np.concatenate([numbers[:, :1], kinds, numbers[:, 1:], np.ones((20, 1))], 1)
    np.savez(tmp_path / "mine.npz", x=x, y=np.arange(20) % 2)
    found = rows(tmp_path / "mine.npz")
    found.check()
    assert [len(column.categories) for column in found.columns] == [0, 3, 0, 0]
    both = torch.cat([found.x, found.x_test])
    assert torch.equal(both.sort(0).values, torch.from_numpy(x).float().sort(0).values), "nothing is scaled"
    assert torch.allclose(found.columns.rows(found.columns.cells(both)), both)
    assert float(found.columns.tolerance[0]) == pytest.approx(0.319 * numbers[:, 0].std())


def test_numbers_of_more_than_64_bits_are_refused_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x=np.zeros((4, 2), np.longdouble), y=np.arange(4) % 2)
    for use in ("arrays", "rows"):
        with pytest.raises(SpecError):
            build({"use": use, "path": str(tmp_path / "mine.npz")}, "[data]", DATASET)


def test_examples_that_are_no_numbers_are_counted_among_all(tmp_path: Path) -> None:
    x = np.zeros((10, 3, 4), np.float32)
    x[3] = np.nan
    np.savez(tmp_path / "mine.npz", x=x, y=np.arange(10) % 2)
    faults = list(arrays(tmp_path / "mine.npz", test=0.1).faults())
    assert len(faults) == 1 and "1 of 9 examples of x" in faults[0]  # the places of the file are shuffled


def test_token_ids_are_sentences_of_their_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra [text] is not installed")
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({str(i): i for i in range(9)}, unk_token="0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0").save_pretrained(tmp_path)
    x, y = np.array([[1, 2, 0], [3, 4, 5]]), np.array([0, 1])
    np.savez(tmp_path / "mine.npz", x=x, y=y, x_test=x, y_test=y)
    found = token_ids(tmp_path / "mine.npz", tmp_path)
    assert found.x.tolist() == x.tolist() and found.classes == 2 and found.tokenizer.tokens([3]) == ["3"]
    learnt = token_ids(tmp_path / "mine.npz", tmp_path, task="next_token")
    assert learnt.y.tolist() == [[1, 2, -100], [3, 4, 5]] and learnt.classes == 9


@pytest.mark.parametrize(
    "bad",
    [
        {"y": np.zeros(2)},
        {"x": np.zeros((9, 3), np.float32)},
        {"x": np.array(["a", "b"]), "y": np.zeros(2)},
        {"x": np.zeros((2, 3)), "y": np.zeros(3)},
        {"x": np.zeros((2, 3)), "y": np.int64(1)},
        {"x": np.zeros((2, 3)), "y": np.arange(2), "x_test": np.zeros((2, 4)), "y_test": np.arange(2)},
    ],
)
def test_other_arrays_are_refused(bad: dict[str, np.ndarray], tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", **bad)
    with pytest.raises(SpecError):
        build({"use": "rows", "path": str(tmp_path / "mine.npz")}, "[data]", DATASET)


def test_classes_in_a_column_of_their_own_are_classes(tmp_path: Path) -> None:
    x = np.zeros((9, 3), np.float32)
    y = np.arange(9)[:, None] % 3
    np.savez(tmp_path / "keras.npz", x=x, y=y, x_test=x[:2], y_test=y[:2])  # two of the classes in its test part
    np.savez(tmp_path / "finding.npz", x=np.zeros((9, 3), np.float32), y=np.arange(9)[:, None] % 2)
    keras, finding = (arrays(tmp_path / f"{name}.npz") for name in ("keras", "finding"))
    assert (keras.classes, keras.y.dim(), finding.classes, finding.y.shape[1]) == (3, 1, 1, 1)
    assert keras.y_test.tolist() == [0, 1]


def test_arrays_of_another_byte_order_are_the_same(tmp_path: Path) -> None:
    x, y = np.arange(27, dtype=np.float32).reshape(9, 3), np.arange(9) % 2
    for name, order in (("little", "<"), ("big", ">")):
        np.savez(tmp_path / f"{name}.npz", x=x.astype(f"{order}f4"), y=y.astype(f"{order}i8"))
    little, big = (arrays(tmp_path / f"{name}.npz") for name in ("little", "big"))
    assert torch.equal(little.x, big.x) and torch.equal(little.y, big.y)


def test_arrays_beside_the_examples_are_not_read(tmp_path: Path) -> None:
    names = np.array(["cat", "dog"])
    np.savez(tmp_path / "mine.npz", x=np.zeros((9, 3), np.float32), y=np.arange(9) % 2, names=names)
    assert build({"use": "rows", "path": str(tmp_path / "mine.npz")}, "[data]", DATASET).classes == 2
