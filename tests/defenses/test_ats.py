"""ATS: each operation against the PIL call of the published code, and what clients and attackers see of a policy."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Generator, Tensor
from torch.nn import functional as F

from fedgauge.attacks.base import Budget, Wave
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.source import FederationSource
from fedgauge.client.chain import chain
from fedgauge.client.components import build
from fedgauge.client.federation import TRANSFORM, Federation
from fedgauge.client.local_training import local_sgd
from fedgauge.client.update import Batch
from fedgauge.defenses.ats import OPERATIONS, apply_operation, ats, crop_and_flip, magnitude
from tests.tensors import seeded

SHAPE = (3, 32, 32)
Make = Callable[..., Federation]
SGD = {"use": "local_sgd", "rate": 0.1}
ATS = {"use": "ats", "policy": "7-4-15"}


def pictures(count: int = 2, channels: int = 3, side: int = 32) -> Tensor:
    """Smooth images of whole grey values, as PIL holds them."""
    coarse = torch.rand(count, channels, 6, 6, generator=seeded(), dtype=torch.float64)
    smooth = F.interpolate(coarse, size=(side, side), mode="bicubic").clamp(0, 1)
    return (smooth * 255).round() / 255


# --------------------------------------------------------------------------------------------------- the published list


def test_the_list_is_the_published_one() -> None:
    """policy.py of the paper's code: which operation has which number decides what a policy's name means."""
    assert len(OPERATIONS) == 50
    named = {n: OPERATIONS[n] for n in (3, 4, 7, 13, 15, 21, 1, 18, 43)}
    assert named == {
        7: ("translate_y", 2), 4: ("sharpness", 1), 15: ("brightness", 9),
        21: ("translate_x", 5), 13: ("brightness", 5), 3: ("translate_x", 9),
        1: ("contrast", 6), 43: ("translate_y", 3), 18: ("contrast", 7),
    }  # fmt: skip
    from torchvision.transforms import AutoAugment, AutoAugmentPolicy

    # torchvision's own list of the sub-policies that were taken apart: the same operations in the same order
    taken_apart = [o[0] for pair in AutoAugment(AutoAugmentPolicy.CIFAR10).policies for o in pair]
    assert [name.replace("_", "") for name, _ in OPERATIONS] == [name.lower() for name in taken_apart]


def by_pil(number: int, image: Image.Image, plus: bool) -> Image.Image:
    """The published code's call of an operation, with its sign given."""
    name, size = OPERATIONS[number][0], magnitude(number)
    signed, (width, height) = size if plus else -size, image.size
    black = 0 if image.mode == "L" else (0, 0, 0)
    if name == "rotate":
        turned = image.convert("RGBA").rotate(size)
        return Image.composite(turned, Image.new("RGBA", turned.size, (128,) * 4), turned).convert(image.mode)
    moves = {
        "translate_x": (1, 0, signed * width, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, signed * height),
        "shear_y": (1, 0, 0, signed, 1, 0),
    }
    if name in moves:
        cubic = Image.Resampling.BICUBIC if name == "shear_y" else Image.Resampling.NEAREST
        return image.transform(image.size, Image.Transform.AFFINE, moves[name], cubic, fillcolor=black)
    if name in ("brightness", "color", "contrast", "sharpness"):
        enhanced: Image.Image = getattr(ImageEnhance, name.capitalize())(image).enhance(1 + signed)
        return enhanced
    if name == "posterize":
        return ImageOps.posterize(image, round(size))
    if name == "solarize":
        return ImageOps.solarize(image, size)
    changed: Image.Image = getattr(ImageOps, name)(image)
    return changed


@pytest.mark.product
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("number", range(50))
def test_each_operation_is_pils_to_the_rounding_of_a_grey_value(number: int, channels: int) -> None:
    x = pictures(2, channels)
    for plus in (True, False):
        ours = apply_operation(number, x, torch.tensor([plus, plus]))
        for image, found in zip(x, ours, strict=True):
            values = (image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
            drawn = by_pil(number, Image.fromarray(values if channels == 3 else values[..., 0]), plus)
            expected = np.asarray(drawn, dtype=np.float64).reshape(32, 32, channels)
            difference = np.abs(found.permute(1, 2, 0).numpy() * 255 - expected)
            # a shear may put a border's pixel exactly half way, where either side is right
            allowed = 2 if OPERATIONS[number][0] == "shear_y" else 0
            assert int((difference > 1.2).any(-1).sum()) <= allowed, (OPERATIONS[number], plus, difference.max())


# -------------------------------------------------------------------------------------------------------------- policies


@pytest.mark.parametrize(
    ("policy", "policies"),
    [
        ("7-4-15", ((7, 4, 15),)),
        ("7-4-15+21-13-3", ((7, 4, 15), (21, 13, 3))),
        ([3, 1, 7], ((3, 1, 7),)),
        ((43,), ((43,),)),
        ("0", ((0,),)),
    ],
)
def test_a_policy_is_written_as_in_the_paper_or_as_numbers(policy: Any, policies: tuple[tuple[int, ...], ...]) -> None:
    link = build({"use": "ats", "policy": policy}, "here", TRANSFORM, {"shape": SHAPE})
    assert link.policies == policies
    assert str(link) == "+".join("-".join(map(str, p)) for p in policies)


def transformed(link: ats, x: Tensor, seed: int = 0) -> Tensor:
    made = link.transform(Batch(x, torch.arange(len(x))), seeded(seed))
    assert torch.equal(made.y, torch.arange(len(x))), "labels stay"
    return made.x


def test_every_image_gets_every_operation_in_order_with_signs_of_its_own() -> None:
    """Which of the eight results an image gets is drawn evenly; nothing else can come out."""
    link = ats("7-4-15", SHAPE)
    one = pictures(1)
    found = transformed(link, one.expand(400, -1, -1, -1))
    counts = []
    for signs in product([True, False], repeat=3):
        expected = one
        for number, plus in zip((7, 4, 15), signs, strict=True):
            expected = apply_operation(number, expected, torch.tensor([plus]))
        counts.append(int((found == expected).flatten(1).all(1).sum()))
    assert sum(counts) == 400
    assert min(counts) > 25  # 50 each expected, four standard errors


def test_a_hybrid_draws_one_of_its_policies_for_each_image() -> None:
    """Operations 0 (inverts) and 28 (leaves all as it is): an image shows which of the two it got."""
    x = pictures(1).expand(200, -1, -1, -1)
    found = transformed(ats("0+28", SHAPE), x)
    inverted, kept = ((found == t).flatten(1).all(1) for t in (1 - x, x))
    assert (inverted ^ kept).all()
    assert 70 < int(inverted.sum()) < 130


@pytest.mark.parametrize("number", range(50))
def test_pixels_stay_pixels(number: int) -> None:
    found = transformed(ats([number, number], SHAPE), pictures(6).float())
    assert found.shape == (6, *SHAPE)
    assert found.dtype == torch.float32
    assert 0 <= float(found.min()) <= float(found.max()) <= 1


def test_crop_and_flip_is_a_window_of_the_bordered_image_or_its_mirror() -> None:
    x = pictures(300, 1, 8)
    found = crop_and_flip(x, seeded())
    padded = F.pad(x, (4,) * 4)
    places, mirrors = [], []
    for image, made in zip(padded, found, strict=True):
        fitting = [
            (r, c, mirrored)
            for r in range(9)
            for c in range(9)
            for mirrored in (False, True)
            if torch.equal(
                image[:, r : r + 8, c : c + 8].flip(-1) if mirrored else image[:, r : r + 8, c : c + 8], made
            )
        ]
        assert fitting
        places.append(fitting[0][:2])
        mirrors.append(fitting[0][2])
    assert len(set(places)) > 70, "nearly all of the 81 places"
    assert 110 < sum(mirrors) < 190
    assert torch.equal(
        transformed(ats([28], SHAPE, crop_and_flip=True), pictures(9)), crop_and_flip(pictures(9), seeded())
    )


# ------------------------------------------------------------------------------------------------ clients and attackers


def test_the_client_trains_on_what_came_out(make_federation: Make) -> None:
    fed = make_federation(chain=[{**ATS, "policy": "7-4-15+21-13-3"}, SGD], data={"batch_size": 4})
    params, buffers = fed.initial()
    seen = fed.trained_on(params, buffers, 0, 1)
    assert seen is not None
    batch = fed.batch_at(0, 1)
    assert not torch.equal(seen.x, batch.x)
    assert torch.equal(seen.y, batch.y)
    update = fed.client_update(params, buffers, 0, 1)
    expected = fed.gradient(params, seen, None)
    for name, t in update.items():
        torch.testing.assert_close(t, -0.1 * expected[name], rtol=1e-4, atol=1e-8)


def test_after_local_training_images_are_made_once_a_round_and_before_it_in_every_step(make_federation: Make) -> None:
    params, made = {"w": torch.zeros(1)}, []

    def watched(params: Any, batch: Batch, rng: Generator | None) -> dict[str, Tensor]:
        made.append(batch.x)
        return {"w": torch.zeros(1)}

    batch = Batch(pictures(8), torch.arange(8))
    chain(ats("7-4-15", SHAPE), local_sgd(0.1, 2))(watched)(params, batch, seeded())
    chain(local_sgd(0.1, 2), ats("7-4-15", SHAPE))(watched)(params, batch, seeded())
    assert not torch.equal(made[0], made[1])
    assert torch.equal(made[2], made[3])


def test_the_attackers_form_leaves_the_images_as_they_are() -> None:
    x, made = pictures(), list[Tensor]()
    ats("7-4-15", SHAPE).mean(lambda p, b, r: made.append(b.x) or {})({}, Batch(x, torch.arange(2)), None)  # type: ignore[func-returns-value]  # an expression
    assert torch.equal(made[0], x)


@pytest.mark.slow
@pytest.mark.full
def test_an_early_attack_finds_what_was_trained_on(make_federation: Make, observe: Callable[..., Wave]) -> None:
    """DLG on an untrained LeNet, images moved by three rows up or down."""
    fed = make_federation(chain=[{**ATS, "policy": "7"}, SGD])
    (found,) = Auditor(FederationSource(fed)).audit(PlannedAttack("dlg", {"use": "dlg"}, Budget(200)), observe(fed))
    psnr = {row.metric: row.value for row in found.rows}
    assert psnr["psnr_augmented"] > 30 > 20 > psnr["psnr"]
