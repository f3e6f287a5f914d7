"""Grading without moving the truth: a client says how near the server's reconstructions are to what it trained on.

Each answer is a measurement of the private images: d + 1 exact squared errors would solve for d pixels. So they are few,
counted in the client's own folder, rounded, and of PSNR alone.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgauge.client.deployment.owner import GradingPolicy, OwnerConfig
from fedgauge.client.deployment.state_folder import ClientFolder, digest_of
from fedgauge.client.deployment.terms import RequestRefused
from fedgauge.client.pairing import PSNR_CAP, match, psnr_of
from fedgauge.client.update import Batch

NOT_ALLOWED = "the owner does not allow it"
MOST_NAMES = 64  # in one question: each is written down
_NAME = 100  # characters of an attack's name


@dataclass(frozen=True)
class GradingAnswer:
    """What a client says of a round.

    Args:
        psnr: by attack, of each of its images in their order, paired one to one with the batch's; dB, rounded, at most 60.
        refused: by attack, why there is none.
    """

    psnr: Mapping[str, tuple[float, ...]]
    refused: Mapping[str, str]


def batch_to_grade(owner: OwnerConfig, state: ClientFolder, run: int, round: int) -> Batch:
    """What was trained on in a round of one of the server's runs; Refused where nothing may be said of it."""
    if owner.grading.mode == "off":
        raise RequestRefused(NOT_ALLOWED)
    if not owner.dataset.mean:
        raise RequestRefused("this client's data are no images, and only images are graded at a client")
    drawn = state.drawn(run, round)
    if drawn is None:
        raise RequestRefused(f"this client did not train in round {round}")
    if not drawn.sent:
        raise RequestRefused(f"this client sent nothing in round {round}")
    if not all(0 <= row < len(owner.dataset.y) for row in drawn.rows):
        raise RequestRefused("the owner's data has changed since")
    batch = owner.batch(drawn.rows)
    if digest_of(batch) != drawn.digest:
        raise RequestRefused("the owner's data has changed since")
    return batch


def grade(
    grading: GradingPolicy, state: ClientFolder, round: int, batch: Batch, questions: Mapping[str, Tensor], run: int = 0
) -> GradingAnswer:
    """Score an attack's images (B, C, H, W) each; what was answered before is answered so again, and counts once."""
    if len(questions) > MOST_NAMES or any(len(name) > _NAME for name in questions):
        raise RequestRefused(f"a question has at most {MOST_NAMES} names of at most {_NAME} characters")
    digest = digest_of(batch)
    known = state.answers(digest)
    told: dict[str, tuple[float, ...]] = {}
    refused: dict[str, str] = {}
    exact: dict[str, list[float]] = {}
    for name, images in questions.items():
        asked = hashlib.sha256(images.contiguous().numpy().tobytes()).hexdigest()
        place = f"{round} {name}"  # the same examples may come again in another round, and all questions of them count
        if place in known and known[place]["images"] == asked:
            told[name] = tuple(known[place]["psnr"])
        elif place in known:
            refused[name] = "it was answered for other images"
        elif len(known) >= grading.queries:
            refused[name] = (
                f"{grading.queries} questions of these examples were answered, which is the most the owner allows"
            )
        elif reason := _unfit(images, batch):
            refused[name] = reason
        else:
            values = _psnr(images, batch)
            told[name] = tuple(rounded(v, grading.precision) for v in values)
            exact[name] = [min(v, PSNR_CAP) for v in values]
            known[place] = {"images": asked, "psnr": told[name]}
    if exact:
        state.keep_answers(digest, known)
    facts = {"precision": grading.precision, "exact": exact, "refused": refused}
    state.note("graded", round=round, run=run, told=told, answered=len(known), **facts)
    return GradingAnswer(told, refused)


def rounded(value: float, precision: float) -> float:
    """PSNR to a multiple of precision dB, an exact hit's as the largest below the cap."""
    if value >= PSNR_CAP:
        return math.floor(PSNR_CAP / precision) * precision
    return round(value / precision) * precision


def _unfit(images: Tensor, batch: Batch) -> str:
    """Why images are not those of a guess; empty where they are."""
    if images.shape != batch.x.shape or images.dtype != torch.float32:
        return f"expected float32 images of shape {tuple(batch.x.shape)}, got {images.dtype} of {tuple(images.shape)}"
    # far outside, a squared error is linear in the truth, and rounding to dB would hide nothing of it
    return "" if bool(((images >= 0) & (images <= 1)).all()) else "images must lie in [0, 1]"


def _psnr(images: Tensor, batch: Batch) -> list[float]:
    """In the images' order, not the batch's: that order would be one more thing told."""
    order = match(images, batch.x)
    values: list[float] = psnr_of(images, batch.x[order]).tolist()
    return values
