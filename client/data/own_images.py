"""A user's own images: folders of pictures, arrays, Hugging Face datasets on disk; nothing is downloaded, unpickled or copied.

Paths in a scenario start from the folder in which fedgauge is called. If the data has no test part, a fixed share of it becomes
the test part, by place and the same for every seed.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedgauge.client.data.corpora import MOST_CLASSES, held_out, numbers
from fedgauge.client.data.images import Dataset
from fedgauge.client.files import MOST_ARCHIVE, MOST_PICTURE, MOST_WORDS, open_data, read_file
from fedgauge.client.local_data import read_npz

SUFFIXES = (".png", ".jpg", ".jpeg")
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # Pillow hands others, as EPS, to programs of their own
SHARED_NAMES = "the places of pictures with one file name"  # in their order, which a picture's class then changes
Layout = Literal["auto", "NHWC", "NCHW"]
Statistics = Sequence[float] | None


def image_folder(
    path: Path,
    size: int,
    test: float = 0.2,
    grey: bool = False,
    mean: Statistics = None,
    std: Statistics = None,
    classes: Sequence[str] | None = None,
) -> Dataset:
    """PNG and JPEG files in one sub-folder for each class; the sub-folders in alphabetical order are the classes.

    Args:
        size: each picture becomes a square of this many pixels: the shorter side is resized to it, and the centre is kept.
        test: the share of the pictures that no client trains on, above 0 and below 1, chosen by their files' names.
        grey: whether pictures get one channel instead of three.
        mean, std: of each channel, in [0, 1] pixels; default: those of the training images.
        classes: the names of all sub-folders in order, if some may be missing or empty; default: those that are there.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; expected one with a sub-folder of pictures for each class")
    there = {p.name: p for p in sorted(path.iterdir()) if p.is_dir() and not p.name.startswith(".")}
    files = {name: sorted(f for f in p.iterdir() if f.suffix.lower() in SUFFIXES) for name, p in there.items()}
    if classes is None and (empty := [name for name, found in files.items() if not found]):
        raise ValueError(f"{path}: the sub-folder {empty[0]!r} has no picture ({', '.join(SUFFIXES)})")
    names = tuple(files) if classes is None else tuple(classes)
    # by name first: a picture of another class leaves the others in their places
    pictures = sorted((file.name, name, file) for name, found in files.items() for file in found)
    x = _stacked([_picture(file, str(file), size, grey) for *_, file in pictures], path)
    y = torch.tensor(numbers([name for _, name, _ in pictures], names, f"{path}: a sub-folder"), dtype=torch.int64)
    found = _dataset(path, x, y, None, test, None if classes is None else len(names), mean, std)
    shared = () if len({file for file, *_ in pictures}) == len(pictures) else (SHARED_NAMES,)
    return replace(found, classes=len(names), names=names, fitted=found.fitted + shared)


def npz(
    path: Path,
    test: float = 0.2,
    layout: Layout = "auto",
    mean: Statistics = None,
    std: Statistics = None,
    classes: int | None = None,
) -> Dataset:
    """A NumPy archive: x uint8 (N, H, W), (N, H, W, C) or (N, C, H, W), y whole numbers (N,), and x_test, y_test if there are.

    Args:
        test: without x_test: the share of the images that no client trains on, above 0 and below 1.
        layout: the position of the 1 or 3 channels; auto: read it from the shape.
        mean, std: as for image_folder.
        classes: their number; default: the largest label and 1.
    """
    try:
        arrays = read_npz(path)
    except FileNotFoundError as error:
        raise ValueError(f"{path}: there is no such file") from error
    except Exception as error:  # a damaged file raises BadZipFile, zlib.error, ValueError, MemoryError and more
        raise ValueError(f"{path} is not an npz file that can be read without unpickling: {error}") from error
    if missing := [key for key in ("x", "y") if key not in arrays]:
        raise ValueError(f"{path} has no {missing[0]!r} (it has: {', '.join(sorted(arrays)) or 'nothing'})")
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise ValueError(f"{path} has one of x_test and y_test; it needs both, or neither")
    x, y = _images(arrays["x"], f"{path}: x", layout), _labels(arrays["y"], f"{path}: y")
    apart = None
    if "x_test" in arrays:
        apart = _images(arrays["x_test"], f"{path}: x_test", layout), _labels(arrays["y_test"], f"{path}: y_test")
        if apart[0].shape[1:] != x.shape[1:]:
            raise ValueError(
                f"{path}: images of x_test are {tuple(apart[0].shape[1:])} (C, H, W), those of x {tuple(x.shape[1:])}"
            )
    return _dataset(path, x, y, apart, test, classes, mean, std)


def hugging_face(
    path: Path,
    image: str = "image",
    label: str = "label",
    size: int | None = None,
    test: float = 0.2,
    grey: bool = False,
    mean: Statistics = None,
    std: Statistics = None,
    classes: Sequence[str] | None = None,
) -> Dataset:
    """A dataset that `save_to_disk` of Hugging Face's datasets wrote, with parts train and, optionally, test.

    Args:
        image, label: its columns of pictures and of classes (numbers or names).
        size: as for image_folder; None: all pictures have one size already.
        test, grey, mean, std: as for image_folder; the share test is used if there is no part called test.
        classes: the names of all classes in order; default: those that the dataset declares, or that occur.
    """
    import datasets

    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; expected one that save_to_disk of Hugging Face's datasets wrote")
    try:
        _check_stored(path)
        stored: Any = datasets.load_from_disk(str(path))
    except Exception as error:  # missing or damaged files of several formats
        raise ValueError(f"{path} is not a dataset that save_to_disk wrote: {error}") from error
    parts: Mapping[str, Any] = stored if isinstance(stored, datasets.DatasetDict) else {"train": stored}
    if "train" not in parts:
        raise ValueError(f"{path} has no part called 'train' (it has: {', '.join(map(repr, parts))})")
    for name, part in parts.items():
        if lacking := [c for c in (image, label) if c not in part.column_names]:
            raise ValueError(
                f"{path}: {name} has no column {lacking[0]!r} (it has: {', '.join(map(repr, part.column_names))})"
            )
        if not isinstance(part.features[image], datasets.Image):
            raise ValueError(
                f"{path}: column {image!r} holds {part.features[image]}, expected pictures; arrays can be read by npz"
            )

        # a label of another type is decoded where it is read, and a picture by more formats than ours, from wherever it lies
        if not isinstance(part.features[label], datasets.ClassLabel | datasets.Value):
            raise ValueError(f"{path}: column {label!r} holds {part.features[label]}, expected numbers or names")

    def pictures(part: Any) -> Tensor:
        # decoded here: the library would download pictures that are given as addresses
        rows = part.cast_column(image, datasets.Image(decode=False))[image]
        return _stacked([_stored(row, f"{path}: row {i}", size, grey) for i, row in enumerate(rows)], path)

    used = {name: parts[name] for name in ("train", "test") if name in parts}
    feature = used["train"].features[label]
    known = classes if classes is not None else feature.names if isinstance(feature, datasets.ClassLabel) else None
    labels, names = _numbered(used, label, f"{path}: column {label!r}", tuple(known or ()))
    x = pictures(used["train"])
    apart = (pictures(used["test"]), labels["test"]) if "test" in used else None
    found = _dataset(path, x, labels["train"], apart, test, len(known or ()) or None, mean, std)
    return replace(found, names=names)


def _check_stored(path: Path) -> None:
    """Raise what comes unless all that load_from_disk opens there are files of a size that data has."""
    alone = all((path / name).is_file() for name in ("dataset_info.json", "state.json"))
    parts = [""] if alone else json.loads(read_file(path / "dataset_dict.json", MOST_WORDS))["splits"]
    for part in parts:
        folder = path / part
        open_data(folder / "dataset_info.json", MOST_WORDS).close()
        for file in json.loads(read_file(folder / "state.json", MOST_WORDS))["_data_files"]:
            open_data(folder / file["filename"], MOST_ARCHIVE).close()


def _stored(row: Mapping[str, Any], name: str, size: int | None, grey: bool) -> Tensor:
    """A picture as Hugging Face's datasets store it: its bytes, or the path of its file."""
    if row["bytes"] is not None:
        return _picture(io.BytesIO(row["bytes"]), name, size, grey)
    if "://" in row["path"]:
        raise ValueError(
            f"{name} lies at {row['path']}: nothing is downloaded; save the dataset with its pictures in it"
        )
    return _picture(Path(row["path"]), f"{name}, {row['path']}", size, grey)


def _numbered(
    parts: Mapping[str, Any], label: str, where: str, declared: tuple[str, ...]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The labels of each part as numbers, and the classes' names; names that are not declared count in alphabetical order."""
    written, names = {name: list(part[label]) for name, part in parts.items()}, declared
    if all(isinstance(v, str) for values in written.values() for v in values):
        names = declared or tuple(sorted(set().union(*written.values())))
        written = {part: numbers(values, names, where) for part, values in written.items()}
    return {name: _labels(np.asarray(values), where) for name, values in written.items()}, names


# --------------------------------------------------------------------------------------------------------------- parts


def _picture(source: Path | IO[bytes], name: str, size: int | None, grey: bool) -> Tensor:
    """One picture (C, size, size) uint8; ValueError with its name if it cannot be read."""
    from PIL import Image, ImageOps
    from torchvision.transforms import functional

    try:
        with (
            open_data(source, MOST_PICTURE) if isinstance(source, Path) else source as file,
            Image.open(file, formats=FORMATS) as opened,
        ):
            upright = ImageOps.exif_transpose(opened).convert("L" if grey else "RGB")
    except Exception as error:  # broken files raise SyntaxError, OSError, DecompressionBombError and more
        raise ValueError(f"{name} is not a picture that can be read: {error}") from error
    if size is not None:
        upright = functional.center_crop(functional.resize(upright, size), [size, size])
    pixels: Tensor = functional.pil_to_tensor(upright)
    return pixels


def _stacked(pictures: Sequence[Tensor], path: Path) -> Tensor:
    if not pictures:
        raise ValueError(f"{path} has no pictures")
    if sizes := {tuple(p.shape) for p in pictures if p.shape != pictures[0].shape}:
        first = tuple(pictures[0].shape)
        raise ValueError(f"{path}: pictures are of several sizes, {first} and {min(sizes)} (C, H, W): give a size")
    return torch.stack(list(pictures))


def _images(array: np.ndarray, where: str, layout: Layout) -> Tensor:
    """(N, C, H, W) uint8."""
    if array.dtype != np.uint8:
        raise ValueError(
            f"{where} has dtype {array.dtype}, expected uint8: whole numbers from 0 to 255 (of floats in [0, 1]: "
            "(255 * x).round().astype('uint8'))"
        )
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4:
        array = _channels_first(array, where, layout)
    else:
        raise ValueError(f"{where} has shape {array.shape}, expected (N, H, W), (N, H, W, C) or (N, C, H, W)")
    if 0 in array.shape:
        raise ValueError(f"{where} has shape {array.shape}: it is empty")
    return torch.from_numpy(np.ascontiguousarray(array))


def _channels_first(array: np.ndarray, where: str, layout: Layout) -> np.ndarray:
    places = {"NCHW": 1, "NHWC": 3}
    possible = [name for name, axis in places.items() if array.shape[axis] in (1, 3)]
    chosen = possible if layout == "auto" else [name for name in possible if name == layout]
    if len(chosen) != 1:
        wanted = "1 or 3 channels" if layout == "auto" else f"1 or 3 channels as {layout} has them"
        hint = ': give a layout, "NHWC" or "NCHW"' if len(chosen) > 1 else ""
        raise ValueError(f"{where} has shape {array.shape}, expected {wanted}{hint}")
    return array if chosen == ["NCHW"] else array.transpose(0, 3, 1, 2)


def _labels(array: np.ndarray, where: str) -> Tensor:
    if not np.issubdtype(array.dtype, np.integer) or array.ndim != 1:
        raise ValueError(f"{where} has dtype {array.dtype} and shape {array.shape}, expected whole numbers (N,)")
    if len(array) and array.min() < 0:
        raise ValueError(f"{where} has the label {array.min()}; labels count from 0")
    if len(array) and array.max() >= MOST_CLASSES:
        raise ValueError(f"{where} has the label {array.max()}; labels count from 0, to {MOST_CLASSES - 1} at most")
    return torch.from_numpy(array.astype(np.int64))


def _dataset(
    path: Path,
    x: Tensor,
    y: Tensor,
    apart: tuple[Tensor, Tensor] | None,
    share: float,
    classes: int | None,
    mean: Statistics,
    std: Statistics,
) -> Dataset:
    """Check the data, take a test part from it if none is given, and compute what else is not given."""
    for images, labels in [(x, y), *([apart] if apart else [])]:
        if len(images) != len(labels):
            raise ValueError(f"{path} has {len(images)} images and {len(labels)} labels")
    fitted = tuple(key for key, given in (("mean", mean), ("std", std), ("classes", classes)) if given is None)
    most = int((y if apart is None else torch.cat([y, apart[1]])).max())
    if classes is None and len(y.unique()) < 2:
        raise ValueError(f"{path} has images of one class only: there is nothing to learn, and every label is known")
    if classes is not None and not most < classes:
        raise ValueError(f"{path} has the label {most}, and classes says that there are {classes}, counted from 0")
    if apart is None:
        tested = held_out(len(y), share, path)
        (x, y), apart = (x[~tested], y[~tested]), (x[tested], y[tested])
    found = _statistics(x)
    mean, std = (_given(name, v, own, path) for name, v, own in (("mean", mean, found[0]), ("std", std, found[1])))
    if flat := [i for i, s in enumerate(std) if not s > 0]:
        raise ValueError(
            f"{path}: std of channel {flat[0]} is {std[flat[0]]:g}: all its pixels are the same; give a std"
        )
    parts = (x, y, *apart, most + 1 if classes is None else classes)
    return Dataset(path.stem or str(path), *parts, tuple(mean), tuple(std), fitted=fitted)


def _statistics(x: Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel in [0, 1] pixels, from counts of grey values, which are exact."""
    channels = [x[:, c] for c in range(x.shape[1])]
    counts = [torch.bincount(channel.flatten(), minlength=256).double() / channel.numel() for channel in channels]
    levels = torch.arange(256, dtype=torch.float64) / 255
    means = [float(count @ levels) for count in counts]
    return means, [float((count @ (levels - m).square()).sqrt()) for count, m in zip(counts, means, strict=True)]


def _given(name: str, value: Statistics, own: Sequence[float], path: Path) -> Sequence[float]:
    if value is not None and len(value) != len(own):
        raise ValueError(f"{name} has {len(value)} numbers, and the images of {path} have {len(own)} channels")
    return own if value is None else value
