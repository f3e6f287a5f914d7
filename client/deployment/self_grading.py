"""Grading at the client: it scores the server's reconstructions against its own examples, which never leave it.

Each answer measures the private images: d + 1 exact squared errors would determine d pixels. So answers are few, counted in
the client's own folder, rounded, and PSNR only.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgauge.client.deployment.owner_file import GradingPolicy, OwnerConfig
from fedgauge.client.deployment.server_terms import RequestRefused
from fedgauge.client.deployment.state_folder import Answer, ClientFolder, digest_of
from fedgauge.client.psnr import PSNR_CAP, match, psnr_of
from fedgauge.client.update import Batch

NOT_ALLOWED = "the owner does not allow it"


@dataclass(frozen=True)
class GradingAnswer:
    """A client's answer about a round, by attack."""

    psnr: Mapping[str, tuple[float, ...]]  # of each image, paired one to one with the batch; dB, rounded, at most 60
    refused: Mapping[str, str]  # why there is no score


def batch_to_grade(owner: OwnerConfig, state: ClientFolder, run: int, round: int) -> Batch:
    """Return the client's batch in a round of a run.

    Raises:
        RequestRefused: it must not answer.
    """
    why = "the owner's data has changed since"
    if owner.grading.mode == "off":
        why = NOT_ALLOWED
    elif not owner.dataset.mean:
        why = "this client's data are not images, and a client grades only images"
    elif (drawn := state.drawn(run, round)) is None:
        why = f"this client did not train in round {round}"
    elif not drawn.sent:
        why = f"this client sent nothing in round {round}"
    elif max(drawn.rows) < len(owner.dataset.y) and digest_of(batch := owner.batch(drawn.rows)) == drawn.digest:
        return batch
    raise RequestRefused(why)


def grade(
    grading: GradingPolicy, state: ClientFolder, round: int, batch: Batch, questions: Mapping[str, Tensor], run: int = 0
) -> GradingAnswer:
    """Score the images (B, C, H, W) of each attack; a repeated question gets the same answer and counts once."""
    digest = digest_of(batch)
    known = state.answers(digest)
    scores: dict[str, tuple[float, ...]] = {}
    refused: dict[str, str] = {}
    exact: dict[str, list[float]] = {}
    for name, images in questions.items():
        asked = hashlib.sha256(images.contiguous().numpy().tobytes()).hexdigest()
        place = f"{round} {name}"  # all questions about the same examples count, whatever the round
        if place in known and known[place].images == asked:
            scores[name] = known[place].psnr
        elif place in known:
            refused[name] = "it was answered for other images"
        elif len(known) >= grading.queries:
            refused[name] = "as many questions about these examples were answered as the owner allows"
        elif reason := _unfit(images, batch):
            refused[name] = reason
        else:
            # in the images' order: the batch's order would reveal more
            values: list[float] = psnr_of(images, batch.x[match(images, batch.x)]).tolist()
            scores[name] = tuple(rounded(v, grading.precision) for v in values)
            exact[name] = [min(v, PSNR_CAP) for v in values]
            known[place] = Answer(asked, scores[name])
    if exact:
        state.keep_answers(digest, known)
    facts = {"precision": grading.precision, "exact": exact, "refused": refused}
    state.note("graded", round=round, run=run, reported=scores, answered=len(known), **facts)
    return GradingAnswer(scores, refused)


def rounded(value: float, precision: float) -> float:
    """Round a PSNR >= 0 dB to whole steps of precision below the cap; an exact hit becomes the cap."""
    steps = round((PSNR_CAP - min(value, PSNR_CAP)) / precision)
    return max(PSNR_CAP - steps * precision, 0.0)


def _unfit(images: Tensor, batch: Batch) -> str:
    """Return the reason why these images cannot be scored; empty if they can."""
    if images.shape != batch.x.shape or images.dtype != torch.float32:
        return f"not a batch of this client's images: {images.dtype} of shape {tuple(images.shape)}"
    # far outside [0, 1] a squared error is linear in the truth, and rounding to dB would hide nothing
    return "" if bool(((images >= 0) & (images <= 1)).all()) else "images must be in [0, 1]"
