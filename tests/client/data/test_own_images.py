"""Data of a user's own: the same pixels whichever way they come, split the same every time, and mistakes told by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import functional as tv

from fedgauge.client.data.corpora import held_out
from fedgauge.client.data.dataset import Dataset
from fedgauge.client.data.images import mnist5k
from fedgauge.client.data.own_images import hugging_face, image_folder, npz
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol
from tests.client.data.refusals import refused

SIZE = 8


def pixels(seed: int, high: int = 12, wide: int = 20) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (high, wide, 3), dtype=np.uint8)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Three classes of pictures of several sizes and kinds, beside what is no class and no picture."""
    folder = tmp_path / "pictures"
    for k, (name, count) in enumerate({"cats": 10, "ants": 5, "bees": 2}.items()):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            kind = ("png", "jpg", "JPEG")[i % 3]
            Image.fromarray(pixels(100 * k + i, 9 + i, 20 - i)).save(folder / name / f"{i}.{kind}")
    (folder / ".hidden").mkdir()
    (folder / "readme.txt").write_text("not a class")
    (folder / "cats" / "notes.txt").write_text("not a picture")
    return folder


# ------------------------------------------------------------------------------------------------------------- pictures


def test_a_picture_is_resized_and_cropped_as_torchvision_does(tmp_path: Path) -> None:
    sizes = [(12, 20), (20, 12), (8, 8), (5, 31), (9, 10)]
    for k, (high, wide) in enumerate(sizes):
        (tmp_path / f"{k}").mkdir()
        for i in range(2):
            Image.fromarray(pixels(10 * k + i, high, wide)).save(tmp_path / f"{k}" / f"{i}.png")
    data = image_folder(tmp_path, SIZE, test=0.5)
    for k in range(len(sizes)):
        found = torch.cat([data.x[data.y == k], data.x_test[data.y_test == k]])
        drawn = [Image.open(tmp_path / f"{k}" / f"{i}.png") for i in range(2)]
        wanted = [
            torch.from_numpy(np.array(tv.center_crop(tv.resize(p, SIZE), [SIZE, SIZE]))).permute(2, 0, 1) for p in drawn
        ]
        assert all(any(torch.equal(f, w) for w in wanted) for f in found), sizes[k]


def test_classes_are_sub_folders_in_alphabetical_order_and_all_pictures_are_there(pictures: Path) -> None:
    data = image_folder(pictures, SIZE)
    assert (data.classes, data.shape, data.name) == (3, (3, SIZE, SIZE), "pictures")
    counts = (data.y.bincount() + data.y_test.bincount()).tolist()
    assert counts == [5, 2, 10], "ants, bees, cats"
    assert len(data.y_test) == 3, "a fifth"
    data.check()


def test_mean_and_deviation_are_the_training_images_own(pictures: Path) -> None:
    data = image_folder(pictures, SIZE)
    x = data.x.double() / 255
    assert data.mean == pytest.approx(x.mean((0, 2, 3)).tolist(), abs=1e-12)
    assert data.std == pytest.approx(x.std((0, 2, 3), correction=0).tolist(), abs=1e-12)
    normal = data.normalise(data.x.double() / 255)
    assert normal.mean().abs() < 1e-6 and (normal.std(correction=0) - 1).abs() < 1e-6
    given_ones = image_folder(pictures, SIZE, mean=[0.5] * 3, std=[0.25] * 3)
    assert (given_ones.mean, given_ones.std) == ((0.5,) * 3, (0.25,) * 3)


def test_grey_pictures_have_one_channel(pictures: Path) -> None:
    data = image_folder(pictures, SIZE, grey=True)
    assert data.shape == (1, SIZE, SIZE) and len(data.mean) == 1


def test_a_picture_lies_as_its_camera_was_held(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    raw = Image.fromarray(pixels(1, 8, 8))
    turned = Image.Exif()
    turned[0x0112] = 6  # the camera was turned by a quarter
    for name, exif in (("a", turned), ("b", Image.Exif())):
        for i in range(2):
            raw.save(tmp_path / name / f"{i}.png", exif=exif)
    data = image_folder(tmp_path, 8)
    x, y = torch.cat([data.x, data.x_test]), torch.cat([data.y, data.y_test])
    assert torch.equal(x[y == 0], x[y == 1].rot90(-1, (2, 3)))


def test_unusable_parts_are_named(pictures: Path, tmp_path: Path) -> None:
    own = {"use": "image_folder", "path": str(pictures), "size": SIZE}
    refused("nowhere holds no pictures", **{**own, "path": str(tmp_path / "nowhere")})
    refused("path", **{**own, "path": 3})
    refused("test", **own, test=1.0)
    refused("mean", **own, mean=[0.5])
    refused("std", **own, std=[1.0, 0.0, 1.0])
    (pictures / "dogs").mkdir()
    refused("dogs", **own)
    (pictures / "dogs" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and nothing more")
    refused("broken.png", **own)
    Image.fromarray(pixels(0)).save(pictures / "dogs" / "broken.png", format="EPS")  # whatever its name
    refused("broken.png", **own)
    Image.fromarray(np.full((12, 20), 1000, np.uint16)).save(pictures / "dogs" / "broken.png")  # not 255 everywhere
    refused("broken.png", **own)
    (tmp_path / "one" / "only").mkdir(parents=True)
    for name in ("a.png", "b.png"):
        Image.fromarray(pixels(0)).save(tmp_path / "one" / "only" / name)
    refused("one class", **{**own, "path": str(tmp_path / "one")})


@given(count=st.integers(2, 60), share=st.floats(0.01, 0.99))
def test_a_share_is_tested_never_all_or_none(count: int, share: float) -> None:
    tested = held_out(count, share, Path("own"))
    assert tested.sum() == min(max(1, round(share * count)), count - 1)
    assert torch.equal(tested, held_out(count, share, Path("own")))


def with_names_of_their_own(pictures: Path) -> Path:
    for folder in pictures.iterdir():
        if folder.is_dir():
            for file in sorted(folder.iterdir()):
                file.rename(folder / f"{folder.name}-{file.name}")
    return pictures


def test_a_picture_of_another_class_moves_no_other_between_training_and_test_part(pictures: Path) -> None:
    with_names_of_their_own(pictures)
    classes = ["ants", "bees", "cats"]
    before = image_folder(pictures, SIZE, classes=classes)
    for name in ("ants", "bees"):
        for file in sorted((pictures / name).glob("*.*")):
            file.rename(pictures / "cats" / file.name)
            after = image_folder(pictures, SIZE, classes=classes)
            assert torch.equal(before.x, after.x) and torch.equal(before.x_test, after.x_test)
            changed = [int((a != b).sum()) for a, b in ((before.y, after.y), (before.y_test, after.y_test))]
            assert sorted(changed) == [0, 1]
            before = after
    assert (before.classes, before.names) == (3, tuple(classes)), "also without a picture of two"
    refused("cats", use="image_folder", path=str(pictures), size=SIZE, classes=classes[:2])


def test_images_say_what_was_fitted_on_them(pictures: Path, tmp_path: Path, written: Callable[..., Path]) -> None:
    constants: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.25] * 3}
    names, own = ["ants", "bees", "cats"], written(**arrays())
    with_names_of_their_own(pictures)
    stored = saved(tmp_path / "hf", {"train": (list(arrays()["x"]), ["a", "b", "c"] * 4)})
    declared = datasets.ClassLabel(names=["a", "b", "c"])
    numbered = saved(tmp_path / "hf2", {"train": (list(arrays()["x"]), [0, 1, 2] * 4)}, label=declared)
    for bare, complete in (
        (image_folder(pictures, SIZE), image_folder(pictures, SIZE, classes=names, **constants)),
        (npz(own), npz(own, classes=4, **constants)),
        (hugging_face(stored), hugging_face(stored, classes=["c", "b", "a", "d"], **constants)),
    ):
        assert bare.fitted == ("mean", "std", "classes") and complete.fitted == ()
    assert npz(own, mean=[0.5] * 3).fitted == ("std", "classes")
    assert hugging_face(numbered).fitted == ("mean", "std")
    assert mnist5k().fitted == (), "its constants are published"
    assert npz(own, classes=4).classes == 4 and hugging_face(stored, classes=["c", "b", "a", "d"]).classes == 4
    refused("label", use="hugging_face", path=str(stored), classes=["b", "c"])


# --------------------------------------------------------------------------------------------------------------- arrays


def arrays(n: int = 12, shape: tuple[int, ...] = (6, 5, 3), seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"x": rng.integers(0, 256, (n, *shape), dtype=np.uint8), "y": np.arange(n) % 3}


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    def write(**stored: np.ndarray) -> Path:
        path = tmp_path / "own.npz"
        np.savez(path, **stored)
        return path

    return write


def test_channels_are_found_wherever_they_stand(written: Callable[..., Path]) -> None:
    stored = arrays()
    last = npz(written(**stored))
    first = npz(written(x=stored["x"].transpose(0, 3, 1, 2), y=stored["y"]))
    assert last.shape == first.shape == (3, 6, 5)
    assert torch.equal(last.x, first.x) and torch.equal(last.x_test, first.x_test) and last.mean == first.mean
    found = {tuple(x.flatten().tolist()) for x in torch.cat([last.x, last.x_test])}
    assert found == {tuple(x.transpose(2, 0, 1).flatten().tolist()) for x in stored["x"]}
    assert npz(written(**arrays(shape=(6, 5)))).shape == (1, 6, 5)


def test_ambiguous_input_is_asked_about(written: Callable[..., Path]) -> None:
    stored = arrays(shape=(3, 4, 3))
    refused("layout", use="npz", path=str(written(**stored)))
    assert npz(written(**stored), layout="NHWC").shape == (3, 3, 4)
    assert npz(written(**stored), layout="NCHW").shape == (3, 4, 3)


def test_a_test_part_of_its_own_is_kept_apart(written: Callable[..., Path]) -> None:
    stored, apart = arrays(), arrays(7, seed=1)
    data = npz(written(**stored, x_test=apart["x"], y_test=apart["y"] + 1))
    assert torch.equal(data.x, torch.from_numpy(stored["x"]).permute(0, 3, 1, 2)), "in its own order, all of it"
    assert torch.equal(data.y_test, torch.from_numpy(apart["y"] + 1))
    assert data.classes == 4, "the test part counts"


FLAT = np.zeros((12, 6, 5, 3), np.uint8)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"x": None}, "x"),
        ({"y": None}, "x, y"),
        ({"x": FLAT.astype(np.float32)}, "x has dtype torch.float32"),
        ({"x": np.zeros((12, 30), np.uint8)}, "x has examples of shape (30,)"),
        ({"x": FLAT[..., :2]}, "x has examples of shape (6, 5, 2)"),
        ({"x": FLAT}, "set std"),
        ({"y": np.arange(11) % 3}, "11 labels"),
        ({"y": np.zeros(12, np.int64)}, "one class"),
        ({"y": np.arange(12) - 1}, "labels of x"),
        ({"y": np.array(list("abcabcabcabc"))}, "y of <U1"),
        ({"x_test": FLAT[:2]}, "y_test"),
        ({"x_test": FLAT[:2, :4], "y_test": np.arange(2)}, "x_test"),
        ({"x": np.array([{}, {}], dtype=object)}, "own.npz"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(written: Callable[..., Path], change: dict[str, Any], name: str) -> None:
    path = written(**{k: v for k, v in {**arrays(), **change}.items() if v is not None})
    refused(name, use="npz", path=str(path))
    refused("the labels", use="npz", path=str(written(**arrays())), classes=2)


@given(junk=st.binary(max_size=200))
def test_any_file_is_read_or_refused_with_its_name(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "junk.npz"
    path.write_bytes(junk)
    refused("junk.npz", use="npz", path=str(path))


# --------------------------------------------------------------------------------------------------------- Hugging Face


def saved(folder: Path, parts: dict[str, tuple[list[np.ndarray], list[Any]]], **features: Any) -> Path:
    """Pictures and labels as `save_to_disk` writes them."""
    made = {}
    for name, (images, labels) in parts.items():
        table = datasets.Dataset.from_dict({"image": [Image.fromarray(x) for x in images], "label": labels})
        for column, feature in features.items():
            table = table.cast_column(column, feature)
        made[name] = table
    whole = datasets.DatasetDict(made) if len(made) > 1 else made["train"]
    whole.save_to_disk(str(folder))
    return folder


def test_it_gives_what_the_same_pixels_give_as_arrays(tmp_path: Path, written: Callable[..., Path]) -> None:
    stored, apart = arrays(), arrays(6, seed=1)
    path = saved(tmp_path / "hf", {"train": (list(stored["x"]), stored["y"].tolist()),
                                   "test": (list(apart["x"]), apart["y"].tolist())})  # fmt: skip
    found = hugging_face(path)
    same = npz(written(**stored, x_test=apart["x"], y_test=apart["y"]))
    assert torch.equal(found.x, same.x) and torch.equal(found.x_test, same.x_test)
    assert torch.equal(found.y, same.y) and torch.equal(found.y_test, same.y_test)
    assert (found.classes, found.mean, found.std) == (3, same.mean, same.std)


def test_names_of_classes_count_in_alphabetical_order_and_known_classes_all_count(tmp_path: Path) -> None:
    images = list(arrays(6)["x"])
    named = hugging_face(
        saved(tmp_path / "a", {"train": (images, ["bee", "ant", "bee", "cat", "ant", "cat"])}), test=0.5
    )
    assert named.classes == 3 and sorted([*named.y.tolist(), *named.y_test.tolist()]) == [0, 0, 1, 1, 2, 2]
    label = datasets.ClassLabel(names=["a", "b", "c", "d", "e"])
    told = hugging_face(saved(tmp_path / "b", {"train": (images, [0, 1, 0, 1, 0, 1])}, label=label))
    assert told.classes == 5
    assert (named.names, told.names) == (("ant", "bee", "cat"), ("a", "b", "c", "d", "e"))


def test_its_columns_and_sizes_are_checked(tmp_path: Path) -> None:
    images = [*arrays(4)["x"], pixels(0)]
    own = {"use": "hugging_face", "path": str(saved(tmp_path / "hf", {"train": (images, [0, 1, 0, 1, 0])}))}
    refused("img", **own, image="img")
    refused("pictures in 'label'", **own, image="label", label="image")
    refused("(3, 12, 20)", **own)
    assert hugging_face(tmp_path / "hf", size=4).shape == (3, 4, 4)
    refused("save_to_disk", **{**own, "path": str(tmp_path)})
    unlabelled = saved(tmp_path / "unlabelled", {"train": (images[:4], [0, 1, None, 1])})
    refused("column 'label'", **{**own, "path": str(unlabelled)})
    empty = datasets.load_from_disk(str(tmp_path / "hf")).map(lambda row: {"image": None}, load_from_cache_file=False)
    empty.save_to_disk(str(tmp_path / "empty"))
    refused("row 0", **{**own, "path": str(tmp_path / "empty")})
    refused("save_to_disk", **{**own, "path": str(tmp_path / "nowhere")})


def test_what_lies_on_the_network_is_not_fetched(tmp_path: Path) -> None:
    rows = {"image": [{"bytes": None, "path": f"http://127.0.0.1:9/{i}.png"} for i in range(4)], "label": [0, 1, 0, 1]}
    stored = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    features = datasets.Features({"image": stored, "label": datasets.Value("int64")})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "hf"))
    info = tmp_path / "hf" / "dataset_info.json"  # as pictures, which save_to_disk itself would have fetched
    described = json.loads(info.read_text())
    described["features"]["image"] = {"_type": "Image"}
    info.write_text(json.dumps(described))
    refused("row 0", use="hugging_face", path=str(tmp_path / "hf"))


# --------------------------------------------------------------------------------------------------- as scenarios use it


def test_a_scenario_trains_on_a_folder_of_pictures(pictures: Path) -> None:
    data = {"use": "image_folder", "path": str(pictures), "size": SIZE, "batch_size": 2, "auxiliary": 3}
    chain = ({"use": "local_sgd", "rate": 0.1},)
    federation = Federation(Protocol(0, 1, 2, data, {"use": "mlp", "hidden": [4]}, chain)).check()
    update = federation.own_update(*federation.initial(), client=0, round=1)
    assert update["1.weight"].shape == (4, 3 * SIZE * SIZE) and update["1.weight"].any()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"x": torch.zeros(4, 1, 2, 2)}, "x is torch.float32"),
        ({"y": torch.zeros(4)}, "labels of"),
        ({"y": torch.zeros(4, 1, dtype=torch.int64)}, "labels of"),
        ({"y": torch.tensor([0, 1, 2, 1])}, "labels of x"),
        ({"y_test": torch.zeros(0, dtype=torch.int64), "x_test": torch.zeros(0, 1, 2, 2, dtype=torch.uint8)}, "x_test"),
        ({"x_test": torch.zeros(1, 1, 3, 2, dtype=torch.uint8)}, "x_test"),
        ({"mean": (0.1, 0.2)}, "mean"),
        ({"std": (0.0,)}, "std"),
    ],
)
def test_a_dataset_of_anybodys_is_checked(change: dict[str, Any], name: str) -> None:
    x, y = torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])
    parts = {"x": x, "y": y, "x_test": x[:1], "y_test": y[:1], "classes": 2, "mean": (0.5,), "std": (1.0,)}
    Dataset("own", **parts).check()
    with pytest.raises(ValueError, match=name):
        Dataset("own", **{**parts, **change}).check()
