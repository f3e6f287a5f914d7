"""Data of a user's own: the same pixels whichever way they come, split the same every time, and mistakes told by name."""

import io
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

from fedgauge.client.components import SpecError
from fedgauge.client.data.corpora import held_out
from fedgauge.client.data.images import Dataset, mnist5k
from fedgauge.client.data.own_images import SHARED_NAMES, hugging_face, image_folder, npz
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol

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
    assert data.fault == ""


def test_the_split_and_the_pixels_are_the_same_every_time(pictures: Path) -> None:
    first, again = image_folder(pictures, SIZE), image_folder(pictures, SIZE)
    assert all(torch.equal(getattr(first, k), getattr(again, k)) for k in ("x", "y", "x_test", "y_test"))
    assert (first.mean, first.std) == (again.mean, again.std)


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


def test_what_cannot_be_used_is_named(pictures: Path, tmp_path: Path) -> None:
    def told(**changes: Any) -> str:
        with pytest.raises(ValueError, match=".") as error:
            image_folder(**{"path": pictures, "size": SIZE, **changes})
        return str(error.value)

    assert "size must be at least 1" in told(size=0)
    assert "nowhere is not a folder" in told(path=tmp_path / "nowhere")
    assert "test must be above 0 and below 1, got 1" in told(test=1.0)
    assert "mean has 1 numbers, and the images of" in told(mean=[0.5])
    assert "std of channel 1 is 0" in told(std=[1.0, 0.0, 1.0])
    (pictures / "dogs").mkdir()
    assert "the sub-folder 'dogs' has no picture (.png, .jpg, .jpeg)" in told()
    (pictures / "dogs" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and nothing more")
    assert str(pictures / "dogs" / "broken.png") + " is not a picture that can be read" in told()
    Image.fromarray(pixels(0)).save(pictures / "dogs" / "broken.png", format="EPS")  # whatever its name
    assert str(pictures / "dogs" / "broken.png") + " is not a picture that can be read" in told()
    (tmp_path / "one" / "only").mkdir(parents=True)
    Image.fromarray(pixels(0)).save(tmp_path / "one" / "only" / "a.png")
    assert "has images of one class only" in told(path=tmp_path / "one")


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


def test_pictures_that_share_a_name_take_their_places_from_their_classes(pictures: Path) -> None:
    """One of another class may then move another one between training and test part."""
    assert image_folder(pictures, SIZE).fitted == ("mean", "std", "classes", SHARED_NAMES)
    assert image_folder(with_names_of_their_own(pictures), SIZE).fitted == ("mean", "std", "classes")


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
    with pytest.raises(ValueError, match=r"a sub-folder has 'cats', which is none of classes \(ants, bees\)"):
        image_folder(pictures, SIZE, classes=classes[:2])


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
    with pytest.raises(ValueError, match="own.npz has the label 2, and classes says that there are 2, counted from 0"):
        npz(own, classes=2)
    with pytest.raises(ValueError, match=r"column 'label' has 'a', which is none of classes \(b, c\)"):
        hugging_face(stored, classes=["b", "c"])


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


def test_what_is_ambiguous_is_asked_for(written: Callable[..., Path]) -> None:
    stored = arrays(shape=(3, 4, 3))
    with pytest.raises(ValueError, match='give a layout, "NHWC" or "NCHW"'):
        npz(written(**stored))
    assert npz(written(**stored), layout="NHWC").shape == (3, 3, 4)
    assert npz(written(**stored), layout="NCHW").shape == (3, 4, 3)


def test_a_test_part_of_its_own_is_kept_apart(written: Callable[..., Path]) -> None:
    stored, apart = arrays(), arrays(7, seed=1)
    data = npz(written(**stored, x_test=apart["x"], y_test=apart["y"] + 1))
    assert torch.equal(data.x, torch.from_numpy(stored["x"]).permute(0, 3, 1, 2)), "in its own order, all of it"
    assert torch.equal(data.y_test, torch.from_numpy(apart["y"] + 1))
    assert data.classes == 4, "the test part counts"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": None}, "has no 'x' (it has: y)"),
        ({"y": None}, "has no 'y' (it has: x)"),
        (
            {"x": np.zeros((12, 6, 5, 3), np.float32)},
            "x has dtype float32, expected uint8: whole numbers from 0 to 255",
        ),
        ({"x": np.zeros((12, 30), np.uint8)}, "x has shape (12, 30), expected (N, H, W), (N, H, W, C) or (N, C, H, W)"),
        ({"x": np.zeros((12, 6, 5, 2), np.uint8)}, "x has shape (12, 6, 5, 2), expected 1 or 3 channels"),
        ({"x": np.zeros((12, 0, 5, 3), np.uint8)}, "it is empty"),
        ({"x": np.zeros((12, 6, 5, 3), np.uint8)}, "std of channel 0 is 0: all its pixels are the same"),
        ({"y": np.arange(11) % 3}, "has 12 images and 11 labels"),
        ({"y": np.zeros(12, np.int64)}, "has images of one class only"),
        ({"y": np.arange(12) - 1}, "y has the label -1; labels count from 0"),
        ({"y": np.arange(12) % 3 * 4 * 10**8}, "y has the label 800000000; labels count from 0, to 99999 at most"),
        ({"y": np.arange(12.0)}, "y has dtype float64 and shape (12,), expected whole numbers (N,)"),
        ({"y": np.eye(12, 3, dtype=np.int64)}, "y has dtype int64 and shape (12, 3), expected whole numbers (N,)"),
        ({"x_test": np.zeros((2, 6, 5, 3), np.uint8)}, "it needs both, or neither"),
        (
            {"x_test": np.zeros((2, 7, 5, 3), np.uint8), "y_test": np.arange(2)},
            "images of x_test are (3, 7, 5) (C, H, W), those of x (3, 6, 5)",
        ),
        ({"x": np.array([{}, {}], dtype=object)}, "that can be read without unpickling"),
    ],
)
def test_arrays_that_do_not_fit_are_told(written: Callable[..., Path], change: dict[str, Any], message: str) -> None:
    stored = {k: v for k, v in {**arrays(), **change}.items() if v is not None}
    with pytest.raises(ValueError, match=".") as told:
        npz(written(**stored))
    assert "own.npz" in str(told.value) and message in str(told.value)


@given(junk=st.binary(max_size=200))
def test_any_file_is_read_or_refused_with_its_name(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "junk.npz"
    path.write_bytes(junk)
    with pytest.raises(ValueError, match="junk.npz"):
        npz(path)


def test_a_header_that_claims_more_than_there_is_costs_nothing(tmp_path: Path) -> None:
    import zipfile

    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (10**9, 10**9, 3)})
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as file:
        file.writestr("x.npy", header.getvalue() + b"123")
        file.writestr("y.npy", header.getvalue())
    with pytest.raises(ValueError, match="huge.npz is not an npz file"):
        npz(tmp_path / "huge.npz")


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


def test_its_columns_and_sizes_are_checked_by_name(tmp_path: Path) -> None:
    images = [*arrays(4)["x"], pixels(0)]
    path = saved(tmp_path / "hf", {"train": (images, [0, 1, 0, 1, 0])})
    with pytest.raises(ValueError, match=r"train has no column 'img' \(it has: 'image', 'label'\)"):
        hugging_face(path, image="img")
    with pytest.raises(ValueError, match="expected pictures; arrays can be read by npz"):
        hugging_face(path, image="label", label="image")
    with pytest.raises(ValueError, match=r"pictures are of several sizes, \(3, 6, 5\) and \(3, 12, 20\)"):
        hugging_face(path)
    assert hugging_face(path, size=4).shape == (3, 4, 4)
    with pytest.raises(ValueError, match="is not a dataset that save_to_disk wrote"):
        hugging_face(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        hugging_face(tmp_path / "nowhere")


@pytest.mark.parametrize("many", [False, True])
def test_labels_that_are_pictures_are_refused_before_the_library_opens_them(tmp_path: Path, many: bool) -> None:
    """It would decode them by more formats than ours, wait for pipes and fetch addresses."""
    file = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    named: Any = {"bytes": None, "path": str(tmp_path / "nowhere")}
    rows = {"image": [Image.fromarray(x) for x in arrays(4)["x"]], "label": [[named] if many else named] * 4}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.List(file) if many else file})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "hf"))
    info = tmp_path / "hf" / "dataset_info.json"
    described = json.loads(info.read_text())
    picture = {"_type": "Image"}
    described["features"]["label"] = {"_type": "List", "feature": picture} if many else picture
    info.write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"column 'label' holds .*Image.*, expected numbers or names"):
        hugging_face(tmp_path / "hf")


def test_what_lies_on_the_network_is_not_fetched(tmp_path: Path) -> None:
    rows = {"image": [{"bytes": None, "path": f"http://127.0.0.1:9/{i}.png"} for i in range(4)], "label": [0, 1, 0, 1]}
    stored = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    features = datasets.Features({"image": stored, "label": datasets.Value("int64")})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "hf"))
    info = tmp_path / "hf" / "dataset_info.json"  # as pictures, which save_to_disk itself would have fetched
    described = json.loads(info.read_text())
    described["features"]["image"] = {"_type": "Image"}
    info.write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"row 0 lies at http://127.0.0.1:9/0.png: nothing is downloaded"):
        hugging_face(tmp_path / "hf")


# --------------------------------------------------------------------------------------------------- as scenarios use it


def test_a_scenario_trains_on_a_folder_of_pictures(pictures: Path) -> None:
    tables: dict[str, Any] = {
        "rounds": 1,
        "clients": 2,
        "data": {
            "use": "image_folder",
            "path": str(pictures),
            "size": SIZE,
            "batch_size": 2,
            "auxiliary": 3,
        },
        "model": {"use": "mlp", "hidden": [4]},
        "chain": [{"use": "local_sgd", "rate": 0.1}],
    }
    federation = Federation(Protocol.from_tables(tables)).check()
    update = federation.own_update(*federation.initial(), client=0, round=1)
    assert update["1.weight"].shape == (4, 3 * SIZE * SIZE) and update["1.weight"].any()
    tables["data"]["path"] = str(pictures / "nowhere")
    with pytest.raises(SpecError, match=r"\[data\]: .*nowhere is not a folder"):
        Federation(Protocol.from_tables(tables)).check()
    tables["data"]["path"] = 3
    with pytest.raises(SpecError, match=r"\[data\]: path must be a path, got 3"):
        Federation(Protocol.from_tables(tables)).check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4, 1, 2, 2)}, "x is torch.float32 of shape (4, 1, 2, 2), expected uint8 (N, C, H, W)"),
        ({"y": torch.zeros(4)}, "the labels of x are torch.float32"),
        ({"y": torch.tensor([0, 1, 2, 1])}, "the labels of x lie in 0..2, expected 0..1"),
        ({"y_test": torch.zeros(0, dtype=torch.int64), "x_test": torch.zeros(0, 1, 2, 2, dtype=torch.uint8)}, "one at least"),
        ({"x_test": torch.zeros(1, 1, 3, 2, dtype=torch.uint8)}, "x_test has shape (1, 1, 3, 2), expected images of (1, 2, 2)"),
        ({"mean": (0.1, 0.2)}, "should be 1 numbers each"),
        ({"std": (0.0,)}, "those of std above 0"),
    ],
)  # fmt: skip
def test_a_dataset_of_anybodys_is_checked(change: dict[str, Any], message: str) -> None:
    x, y = torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])
    parts = {"x": x, "y": y, "x_test": x[:1], "y_test": y[:1], "classes": 2, "mean": (0.5,), "std": (1.0,)}
    assert Dataset("own", **parts).fault == ""
    assert message in Dataset("own", **{**parts, **change}).fault
