"""A user's own images: folders of pictures, arrays, Hugging Face datasets on disk; nothing is downloaded, unpickled or copied.

Paths in a scenario start from the folder in which fedgauge is called. If the data has no test part, a fixed share of it becomes
the test part, by place and the same for every seed.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedgauge.client.data.corpora import held_out, numbers
from fedgauge.client.data.dataset import Dataset
from fedgauge.client.data_folder import read_npz

SUFFIXES = (".png", ".jpg", ".jpeg")
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # Pillow hands others, as EPS, to programs of their own
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
    """PNG and JPEG files in one sub-folder for each class.

    The sub-folders in alphabetical order are the classes.

    Args:
        size: each picture becomes a square of this many pixels: the shorter side is resized to it, and the centre is kept.
        test: the share of the pictures that no client trains on, above 0 and below 1, chosen by their files' names.
        grey: whether pictures get one channel instead of three.
        mean, std: of each channel, in [0, 1] pixels; default: those of the training images.
        classes: the names of all sub-folders in order, if some may be missing or empty; default: those that are there.

    Raises:
        ValueError: a picture cannot be read, or a class has none.
    """
    folders = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith(".")) if path.is_dir() else []
    # by name first: a picture of another class leaves the others in their places
    found = ((f.name, p.name, f) for p in folders for f in p.iterdir() if f.suffix.lower() in SUFFIXES)
    pictures = sorted(found)
    names = tuple(p.name for p in folders) if classes is None else tuple(classes)
    if classes is None and (empty := set(names) - {name for _, name, _ in pictures}):
        raise ValueError(f"{path}: the sub-folder {min(empty)!r} has no picture ({', '.join(SUFFIXES)})")
    x = _stacked([_picture(file, str(file), size, grey) for *_, file in pictures], path)
    y = torch.tensor(numbers([name for _, name, _ in pictures], names, f"{path}: a sub-folder"), dtype=torch.int64)
    made = _dataset(path, x, y, None, test, None if classes is None else len(names), mean, std)
    return replace(made, classes=len(names), names=names)


def npz(
    path: Path,
    test: float = 0.2,
    layout: Layout = "auto",
    mean: Statistics = None,
    std: Statistics = None,
    classes: int | None = None,
) -> Dataset:
    """A NumPy archive: x uint8 (N, H, W), (N, H, W, C) or (N, C, H, W), y labels, and x_test, y_test if there are.

    Args:
        test: without x_test: the share of the images that no client trains on, above 0 and below 1.
        layout: the position of the 1 or 3 channels; auto: read it from the shape.
        mean, std: as for image_folder.
        classes: their number; default: largest label + 1.

    Raises:
        ValueError: the arrays are missing, or have another shape or dtype.
    """
    arrays = read_npz(path)
    if not {"x", "y"} <= arrays.keys() or ("x_test" in arrays) != ("y_test" in arrays):
        raise ValueError(f"{path} needs x and y, and both or none of x_test and y_test; it has {', '.join(arrays)}")
    x, y = _images(arrays["x"], f"{path}: x", layout), _labels(arrays["y"], f"{path}: y")
    apart = None
    if "x_test" in arrays:
        apart = _images(arrays["x_test"], f"{path}: x_test", layout), _labels(arrays["y_test"], f"{path}: y_test")
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
    """A folder written by `save_to_disk` of Hugging Face's datasets, with parts train and, optionally, test.

    Args:
        image, label: its columns of pictures and of classes (numbers or names).
        size: as for image_folder; None: all pictures have one size already.
        test, grey, mean, std: as for image_folder; the share test is used if there is no part called test.
        classes: the names of all classes in order; default: those that the dataset declares, or that occur.

    Raises:
        ValueError: the dataset cannot be read, or lacks a column.
    """
    import datasets

    try:
        stored: Any = datasets.load_from_disk(str(path))
    except Exception as error:  # missing or damaged files of several formats
        raise ValueError(f"{path} is not a dataset that save_to_disk wrote: {error}") from error
    parts: Mapping[str, Any] = stored if isinstance(stored, datasets.DatasetDict) else {"train": stored}
    used = {name: parts[name] for name in ("train", "test") if name in parts}
    if "train" not in used or any(
        not isinstance(p.features.get(image), datasets.Image) or label not in p.features for p in used.values()
    ):
        raise ValueError(
            f"{path} needs a part train with pictures in {image!r} and a column {label!r}, and has {stored}"
        )

    def pictures(part: Any) -> Tensor:
        # decoded here: the library would download pictures that are given as addresses
        rows = part.cast_column(image, datasets.Image(decode=False))[image]
        sources = [Path(row["path"]) if row["bytes"] is None else io.BytesIO(row["bytes"]) for row in rows]
        return _stacked([_picture(s, f"{path}: row {i}", size, grey) for i, s in enumerate(sources)], path)

    feature = used["train"].features[label]
    known = classes if classes is not None else feature.names if isinstance(feature, datasets.ClassLabel) else None
    labels, names = _numbered(used, label, f"{path}: column {label!r}", tuple(known or ()))
    x = pictures(used["train"])
    apart = (pictures(used["test"]), labels["test"]) if "test" in used else None
    found = _dataset(path, x, labels["train"], apart, test, len(known or ()) or None, mean, std)
    return replace(found, names=names)


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
        with Image.open(source, formats=FORMATS) as opened:
            upright = ImageOps.exif_transpose(opened).convert("L" if grey else "RGB")
        if size is not None:
            upright = functional.center_crop(functional.resize(upright, size), [size, size])
    except Exception as error:  # broken files raise SyntaxError, OSError, DecompressionBombError and more
        raise ValueError(f"{name} is not a picture that can be read: {error}") from error
    pixels: Tensor = functional.pil_to_tensor(upright)
    return pixels


def _stacked(pictures: Sequence[Tensor], path: Path) -> Tensor:
    if len(sizes := {tuple(p.shape) for p in pictures}) != 1:
        raise ValueError(f"{path} needs pictures of one size, or a size to make them; it has {sorted(sizes) or 'none'}")
    return torch.stack(list(pictures))


def _images(array: np.ndarray, where: str, layout: Layout) -> Tensor:
    """(N, C, H, W) uint8."""
    if array.dtype != np.uint8:
        raise ValueError(f"{where} has dtype {array.dtype}, expected uint8 from 0 to 255")
    if array.ndim == 3:
        return torch.from_numpy(array[:, None].copy())
    places = {"NCHW": 1, "NHWC": 3} if array.ndim == 4 else {}
    possible = [name for name, axis in places.items() if array.shape[axis] in (1, 3) and layout in ("auto", name)]
    if len(possible) != 1:
        raise ValueError(f'{where} has shape {array.shape}: give a layout, "NHWC" or "NCHW"')
    return torch.from_numpy(np.ascontiguousarray(array if possible == ["NCHW"] else array.transpose(0, 3, 1, 2)))


def _labels(array: np.ndarray, where: str) -> Tensor:
    if np.issubdtype(array.dtype, np.floating) and array.ndim in (1, 2):  # findings or numbers
        return torch.from_numpy(array.astype(np.float32))
    if not np.issubdtype(array.dtype, np.integer) or array.ndim != 1 or (len(array) and array.min() < 0):
        raise ValueError(f"{where} has dtype {array.dtype} and shape {array.shape}, expected whole numbers from 0 (N,)")
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
    """Take a test part from the data if none is given, and compute what else is not given."""
    if len(x) != len(y):
        raise ValueError(f"{path} has {len(x)} images and {len(y)} labels")
    if classes is None and y.is_floating_point():
        classes = y.shape[1] if y.dim() == 2 else 1
    fitted = tuple(key for key, given in (("mean", mean), ("std", std), ("classes", classes)) if given is None)
    if classes is None and len(y.unique()) < 2:
        raise ValueError(f"{path} has images of one class only: there is nothing to learn, and every label is known")
    if apart is None:
        tested = held_out(len(y), share, path)
        (x, y), apart = (x[~tested], y[~tested]), (x[tested], y[tested])
    # of counts of grey values, which are exact
    counts = [torch.bincount(x[:, c].flatten(), minlength=256).double() / x[:, c].numel() for c in range(x.shape[1])]
    levels = torch.arange(256, dtype=torch.float64) / 255
    means = [float(count @ levels) for count in counts]
    if std is None:
        std = [float((count @ (levels - m).square()).sqrt()) for count, m in zip(counts, means, strict=True)]
    every = int(torch.cat([y, apart[1]]).max()) + 1 if classes is None else classes
    statistics = tuple(means if mean is None else mean), tuple(std)
    return Dataset(path.stem or str(path), x, y, *apart, every, *statistics, fitted=fitted)
