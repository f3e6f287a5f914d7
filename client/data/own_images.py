"""A user's own images: folders of pictures, arrays, Hugging Face datasets on disk; nothing is downloaded, unpickled or copied.

Paths in a scenario start from the folder in which fedgauge is called. If the data has no test part, a fixed share of it becomes
the test part, by place and the same for every seed.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Literal

import torch
from torch import Tensor

from fedgauge.client.components import Count, Part
from fedgauge.client.data.corpora import numbers, parted
from fedgauge.client.data.dataset import Dataset, Parts
from fedgauge.client.data.own_arrays import count_classes, read_parts
from fedgauge.client.files import reading

SUFFIXES = (".png", ".jpg", ".jpeg")
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # Pillow runs programs for others, such as EPS
Layout = Literal["auto", "NHWC", "NCHW"]
Statistics = Sequence[float] | None


def image_folder(
    path: Path,
    size: Count,
    test: Part = 0.2,
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
    pictures = sorted((f.name, p.name, f) for p in folders for f in p.iterdir() if f.suffix.lower() in SUFFIXES)
    names = tuple(p.name for p in folders) if classes is None else tuple(classes)
    if classes is None and (empty := set(names) - {name for _, name, _ in pictures}):
        raise ValueError(f"{path}: the sub-folder {min(empty)!r} has no picture ({', '.join(SUFFIXES)})")
    x = _stacked([_picture(file, str(file), size, grey) for *_, file in pictures], path)
    y = torch.tensor(numbers([name for _, name, _ in pictures], names, f"{path}: a sub-folder"), dtype=torch.int64)
    made = _dataset(path, parted(x, y, test, path), None if classes is None else len(names), mean, std)
    return replace(made, classes=len(names), names=names)


def npz(
    path: Path,
    test: Part = 0.2,
    layout: Layout = "auto",
    mean: Statistics = None,
    std: Statistics = None,
    classes: Count | None = None,
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
    x, y, x_test, y_test = read_parts(path, test)
    x, x_test = _images(x, f"{path}: x", layout), _images(x_test, f"{path}: x_test", layout)
    return _dataset(path, (x, y, x_test, y_test), classes, mean, std)


def hugging_face(
    path: Path,
    image: str = "image",
    label: str = "label",
    size: Count | None = None,
    test: Part = 0.2,
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

    with reading(path, "a dataset of save_to_disk"):
        stored: Any = datasets.load_from_disk(str(path))
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
        rows = [row or {"bytes": b""} for row in part.cast_column(image, datasets.Image(decode=False))[image]]
        sources = [Path(row["path"]) if row["bytes"] is None else io.BytesIO(row["bytes"]) for row in rows]
        return _stacked([_picture(s, f"{path}: row {i}", size, grey) for i, s in enumerate(sources)], path)

    known = tuple(classes or getattr(used["train"].features[label], "names", None) or ())
    written, names = {part: list(rows[label]) for part, rows in used.items()}, known
    if all(isinstance(v, str) for values in written.values() for v in values):
        # names that are not declared count in alphabetical order
        names = known or tuple(sorted(set().union(*written.values())))
        written = {part: numbers(values, names, f"{path}: column {label!r}") for part, values in written.items()}
    with reading(f"{path}: column {label!r}", "a column of labels"):
        labels = {part: torch.tensor(values) for part, values in written.items()}
    x, y = pictures(used["train"]), labels["train"]
    divided = (x, y, pictures(used["test"]), labels["test"]) if "test" in used else parted(x, y, test, path)
    return replace(_dataset(path, divided, len(known) or None, mean, std), names=names)


def _picture(source: Path | IO[bytes], name: str, size: int | None, grey: bool) -> Tensor:
    """One picture (C, size, size) uint8; ValueError with its name if it cannot be read."""
    from PIL import Image, ImageOps
    from torchvision.transforms import functional

    with reading(name, "a picture"), Image.open(source, formats=FORMATS) as opened:
        if opened.mode[0] in "IF":  # Pillow would cut off whatever is above 255
            raise ValueError("its pixels have more than 8 bits: save it with 8, or use arrays")
        upright = ImageOps.exif_transpose(opened).convert("L" if grey else "RGB")
        if size is not None:
            upright = functional.center_crop(functional.resize(upright, size), [size, size])
    pixels: Tensor = functional.pil_to_tensor(upright)
    return pixels


def _stacked(pictures: Sequence[Tensor], path: Path) -> Tensor:
    if not pictures:
        raise ValueError(f"{path} holds no pictures; those of image_folder are in one sub-folder for each class")
    if len(sizes := {tuple(p.shape) for p in pictures}) != 1:
        raise ValueError(f"{path} needs pictures of one size, or a size to make them; it has {sorted(sizes)}")
    return torch.stack(list(pictures))


def _images(x: Tensor, where: str, layout: Layout) -> Tensor:
    """(N, C, H, W) uint8."""
    if x.dtype != torch.uint8:
        raise ValueError(f"{where} has dtype {x.dtype}, expected uint8 from 0 to 255")
    if x.dim() == 3:
        return x[:, None]
    places = {"NCHW": 1, "NHWC": 3} if x.dim() == 4 else {}
    possible = [name for name, axis in places.items() if x.shape[axis] in (1, 3) and layout in ("auto", name)]
    if len(possible) != 1:
        raise ValueError(f"{where} has examples of shape {tuple(x.shape[1:])}: set layout, NHWC or NCHW, C = 1 or 3")
    return x if possible == ["NCHW"] else x.permute(0, 3, 1, 2).contiguous()


def _dataset(path: Path, parts: Parts, classes: int | None, mean: Statistics, std: Statistics) -> Dataset:
    """Compute what is not given."""
    x, y, _, y_test = parts
    computed = {"mean": mean is None, "std": std is None, "classes": classes is None and not y.is_floating_point()}
    # of counts of grey values, which are exact
    counts = [torch.bincount(x[:, c].flatten(), minlength=256).double() / x[:, c].numel() for c in range(x.shape[1])]
    levels = torch.arange(256, dtype=torch.float64) / 255
    means = [float(count @ levels) for count in counts]
    if std is None:
        std = [float((count @ (levels - m).square()).sqrt()) for count, m in zip(counts, means, strict=True)]
    statistics = tuple(means if mean is None else mean), tuple(std)
    fitted = tuple(key for key, own in computed.items() if own)
    return Dataset(path.stem or str(path), *parts, classes or count_classes(y, y_test), *statistics, fitted=fitted)
