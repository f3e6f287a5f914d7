"""ATS: train on images that a searched sequence of augmentations has made hard to invert (Gao et al., CVPR 2021).

The list of operations is that of the published code, which always applies each operation of a policy and does not use the
probabilities in its list [code].
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fedgauge.client.transforms import BatchTransform, Link, UpdateDistribution
from fedgauge.client.update import Batch
from fedgauge.defenses.noise import identity

Policy = tuple[int, ...]

# name and magnitude (0 to 9) by number; AutoAugment's CIFAR-10 sub-policies, one operation at a time [code: policy.py]
OPERATIONS: tuple[tuple[str, int], ...] = (
    ("invert", 7), ("contrast", 6), ("rotate", 2), ("translate_x", 9), ("sharpness", 1),
    ("sharpness", 3), ("shear_y", 2), ("translate_y", 2), ("autocontrast", 5), ("equalize", 2),
    ("shear_y", 5), ("posterize", 5), ("color", 3), ("brightness", 5), ("sharpness", 9),
    ("brightness", 9), ("equalize", 5), ("equalize", 1), ("contrast", 7), ("sharpness", 5),
    ("color", 5), ("translate_x", 5), ("equalize", 7), ("autocontrast", 8), ("translate_y", 3),
    ("sharpness", 6), ("brightness", 6), ("color", 8), ("solarize", 0), ("invert", 0),
    ("equalize", 0), ("autocontrast", 0), ("equalize", 8), ("equalize", 4), ("color", 5),
    ("equalize", 5), ("autocontrast", 4), ("solarize", 4), ("brightness", 3), ("color", 0),
    ("solarize", 1), ("autocontrast", 0), ("translate_y", 3), ("translate_y", 3), ("autocontrast", 1),
    ("solarize", 1), ("equalize", 5), ("invert", 0), ("translate_y", 3), ("autocontrast", 1),
)  # fmt: skip
# what magnitudes 0 and 9 mean, evenly between; narrower in colours than AutoAugment's own [code: autoaugment.py]
RANGES = {
    "brightness": (0.0, 0.5),
    "color": (0.0, 0.5),
    "contrast": (0.0, 0.5),
    "posterize": (8.0, 4.0),  # bits
    "rotate": (0.0, 30.0),  # degrees
    "sharpness": (0.0, 0.5),
    "shear_y": (0.0, 0.3),
    "solarize": (256.0, 0.0),  # the first grey value that is inverted
    "translate_x": (0.0, 150 / 331),  # of the width
    "translate_y": (0.0, 150 / 331),  # of the height
}
SIGNED = {"brightness", "color", "contrast", "sharpness", "shear_y", "translate_x", "translate_y"}  # + or - at random


@dataclass(frozen=True)
class ats(BatchTransform):
    """Apply a policy's operations to every image, in order; operations with a sign draw it for each image.

    The attacker's form leaves the images as they are: it reconstructs the images that were trained on.

    Args:
        policy: numbers into OPERATIONS: "7-4-15", or [7, 4, 15]; "7-4-15+21-13-3" draws one of the two for each image.
        shape: (C, H, W) of an image; the federation offers it.
        crop_and_flip: before the policy, a random crop with a border of 4 black pixels and a random flip, as in the published
            training.

    Raises:
        ValueError: the policy is not of this form, or the examples are not images in grey or colour.

    Example:
        >>> ats("7-4-15+21-13-3", shape=(3, 32, 32)).policies
        ((7, 4, 15), (21, 13, 3))
    """

    policy: str | Sequence[int]
    shape: tuple[int, ...]
    crop_and_flip: bool = False

    def __post_init__(self) -> None:
        numbers = sorted(set(itertools.chain(*self.policies)))
        if unknown := [n for n in numbers if not 0 <= n < len(OPERATIONS)]:
            raise ValueError(f"policy {self} names operation {unknown[0]}, the last is {len(OPERATIONS) - 1}")
        if len(self.shape) != 3 or self.shape[0] not in (1, 3):
            raise ValueError(f"ATS augments images of 1 or 3 channels, (C, H, W); these have the shape {self.shape}")

    def __str__(self) -> str:
        return "+".join("-".join(map(str, numbers)) for numbers in self.policies)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The sequences of operations; each image gets one of them."""
        if not isinstance(self.policy, str):
            return (tuple(self.policy),)
        try:
            return tuple(tuple(int(number) for number in part.split("-")) for part in self.policy.split("+"))
        except ValueError:
            raise ValueError(f'write a policy as "7-4-15", several with +; got {self.policy!r}') from None

    @property
    def mean(self) -> Link:
        return identity()

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        """The distribution around the noise-free update does not depend on the images."""
        return before

    def transform(self, batch: Batch, rng: Generator | None) -> Batch:
        x = crop_and_flip(batch.x, rng) if self.crop_and_flip else batch.x
        chosen = torch.randint(len(self.policies), (len(x),), generator=rng)
        plus = torch.rand(len(x), max(map(len, self.policies)), generator=rng) < 0.5
        made = x
        for i, numbers in enumerate(self.policies):
            augmented = x
            for place, number in enumerate(numbers):
                augmented = apply_operation(number, augmented, plus[:, place])
            made = torch.where(_by_image(chosen == i, x), augmented, made)  # a new tensor, whatever the operations do
        return Batch(made, batch.y)


def apply_operation(number: int, x: Tensor, plus: Tensor) -> Tensor:
    """One operation on images (B, C, H, W) in [0, 1]; plus (B,): whether a signed operation takes the plus sign."""
    if OPERATIONS[number][0] not in SIGNED:
        return _with_sign(number, x, True)
    return torch.where(_by_image(plus, x), _with_sign(number, x, True), _with_sign(number, x, False))


def magnitude(number: int) -> float:
    """An operation's magnitude in the units of RANGES; 0 if it has none."""
    name, level = OPERATIONS[number]
    low, high = RANGES.get(name, (0.0, 0.0))
    return low + (high - low) * level / 9


def crop_and_flip(x: Tensor, rng: Generator | None, border: int = 4) -> Tensor:
    """Each image shifted by up to `border` pixels each way, filled with black, and mirrored at random."""
    height, width = x.shape[-2:]
    by = torch.randint(2 * border + 1, (2, len(x)), generator=rng).tolist()
    padded = F.pad(x, (border,) * 4)
    cropped = torch.stack([image[:, r : r + height, c : c + width] for image, r, c in zip(padded, *by, strict=True)])
    mirrored = torch.rand(len(x), generator=rng) < 0.5
    return torch.where(_by_image(mirrored, x), cropped.flip(-1), cropped)


def _by_image(flags: Tensor, x: Tensor) -> Tensor:
    return flags.to(x.device).view(-1, 1, 1, 1)


def _with_sign(number: int, x: Tensor, plus: bool) -> Tensor:
    import torchvision.transforms.v2.functional as tv

    name, size = OPERATIONS[number][0], magnitude(number)
    signed = size if plus else -size
    match name:
        case "translate_x":
            return _translated(x, 0, math.floor(signed * x.shape[-1] + 0.5))  # the nearest pixel, as PIL takes it
        case "translate_y":
            return _translated(x, math.floor(signed * x.shape[-2] + 0.5), 0)
        case "shear_y":
            return _sheared(x, signed)
        case "solarize":  # between two grey values, so that rounding cannot move one across
            return torch.where(x >= (math.ceil(size) - 0.5) / 255, 1 - x, x)
        case "posterize":
            step = 1 << 8 - round(size)
            return (x * 255).round().div(step, rounding_mode="floor") * step / 255
        case "rotate":
            return torch.as_tensor(tv.rotate(x, size, fill=[128 / 255] * x.shape[-3]))
        case "invert" | "autocontrast" | "equalize":
            return torch.as_tensor(getattr(tv, name)(x))
    adjusted = "saturation" if name == "color" else name
    return torch.as_tensor(getattr(tv, f"adjust_{adjusted}")(x, 1 + signed))


def _translated(x: Tensor, rows: int, columns: int) -> Tensor:
    """Move pixel (r + rows, c + columns) to (r, c), with black borders."""
    return F.pad(x, (-columns, columns, -rows, rows))


def _sheared(x: Tensor, slope: float) -> Tensor:
    """Pixel (r, c) is what stood at (r + slope * (c + 1/2), c), by PIL's cubic (torch's has another parameter), or black."""
    height, width = x.shape[-2:]
    rows, columns = (torch.arange(n, dtype=x.dtype, device=x.device) for n in (height, width))
    at = rows[:, None] + slope * (columns + 0.5)  # (H, W)
    low = at.floor()
    d = at - low
    weights = (-d + 2 * d**2 - d**3, 1 - 2 * d**2 + d**3, d + d**2 - d**3, d**3 - d**2)
    total = torch.zeros_like(x)
    for step, weight in zip((-1, 0, 1, 2), weights, strict=True):
        row = (low + step).clamp(0, height - 1).long()
        total = total + weight * x.gather(-2, row.expand_as(x))
    inside = (at >= -0.5) & (at < height - 0.5)
    return torch.where(inside, total.clamp(0, 1), 0)
