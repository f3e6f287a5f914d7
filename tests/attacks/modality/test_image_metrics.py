"""Metrics, against other people's implementations, values on paper, and brute force."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch import Tensor

from fedgauge.attacks.modality.image_metrics import (
    PSNR_CAP,
    identified,
    image_metrics,
    lpips_metric,
    lpips_weights,
    match,
    mse,
    psnr,
    ssim,
)
from fedgauge.attacks.modality.images import ImageModality
from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.client.label_kinds import LabelKind
from fedgauge.client.psnr import in_db


def images(seed: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def smooth(seed: int, *shape: int) -> Tensor:
    coarse = images(seed, *shape[:2], 5, 5)
    return torch.nn.functional.interpolate(coarse, shape[2:], mode="bilinear", align_corners=False)


# ---------------------------------------------------------------------------------------------------------- mse, psnr


def test_mse_and_psnr_on_paper() -> None:
    truth, guess = torch.zeros(3, 1, 2, 2), torch.zeros(3, 1, 2, 2)
    guess[0] += 0.1
    guess[1, 0, 0, 0] = 1.0
    assert mse(truth, guess).tolist() == pytest.approx([0.01, 0.25, 0.0])
    assert psnr(truth, guess)[:2].tolist() == pytest.approx([20.0, 10 * math.log10(4)])
    assert psnr(truth, guess)[2] == math.inf, "an exact hit has no finite PSNR; the cap is for means"
    assert PSNR_CAP == 60
    assert list(map(ImageModality.main.came_back_whole, (59.9, PSNR_CAP, math.inf))) == [False, True, True]


@pytest.mark.parametrize("shape", [(4, 3, 32, 32), (3, 1, 28, 28)])
def test_psnr_and_ssim_are_scikit_images(shape: tuple[int, ...]) -> None:
    for truth, guess in (
        (images(0, *shape), images(1, *shape)),
        (smooth(0, *shape), (smooth(0, *shape) + 0.1 * images(2, *shape)).clamp(0, 1)),
        (smooth(0, *shape), smooth(3, *shape)),
        (torch.zeros(*shape), smooth(3, *shape)),
    ):
        found_psnr, found_ssim = psnr(truth, guess).tolist(), ssim(truth, guess).tolist()
        for i in range(shape[0]):
            a, b = truth[i].double().numpy(), guess[i].double().numpy()
            assert found_psnr[i] == pytest.approx(peak_signal_noise_ratio(a, b, data_range=1.0), abs=1e-6)
            oracle = structural_similarity(
                a, b, data_range=1.0, channel_axis=0, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
            )
            assert found_ssim[i] == pytest.approx(oracle, abs=1e-5)


@pytest.mark.parametrize("metric", [mse, psnr, ssim, identified(images(5, 7, 1, 12, 12))], ids=lambda m: m.name)
def test_a_metric_is_one_value_an_example_whatever_the_batch(metric: object) -> None:
    truth, guess = images(0, 4, 1, 12, 12), images(1, 4, 1, 12, 12)
    together = metric(truth, guess)  # type: ignore[operator]
    alone = torch.cat([metric(truth[i : i + 1], guess[i : i + 1]) for i in range(4)])  # type: ignore[operator]
    torch.testing.assert_close(together, alone)


# -------------------------------------------------------------------------------------------------------------- match


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(0, 10**6))
def test_the_pairing_is_the_best_of_all(batch: int, seed: int) -> None:
    truth, guess = images(seed, batch, 1, 2, 3), images(seed + 1, batch, 1, 2, 3)
    order = match(truth, guess)
    assert sorted(order.tolist()) == list(range(batch)), "a pairing uses each guess once"
    best = min(float(mse(truth, guess[list(p)]).sum()) for p in itertools.permutations(range(batch)))
    assert float(mse(truth, guess[order]).sum()) == pytest.approx(best, abs=1e-6)


def test_an_exact_hit_is_no_other_images_guess() -> None:
    """Grey levels 1/2 and 0, guessed as 1/2 and 1: the least total, 1/4 + 1/4 < 0 + 1, would part the hit."""
    truth, guess = (torch.tensor(v).view(2, 1, 1, 1) for v in ([0.5, 0.0], [0.5, 1.0]))
    assert match(truth, guess).tolist() == [0, 1]
    assert match(truth, guess + torch.tensor([0.01, 0.0]).view(2, 1, 1, 1)).tolist() == [1, 0]


# --------------------------------------------------------------------------------------------------------- identified


def test_identification_by_hand() -> None:
    gallery = torch.tensor([0.0, 0.5]).view(2, 1, 1, 1).expand(2, 1, 2, 2)
    truth = torch.full((4, 1, 2, 2), 0.3)
    guess = torch.tensor([0.3, 0.35, 0.45, 0.1]).view(4, 1, 1, 1).expand(4, 1, 2, 2)
    # distances to the truth .0 .05 .15 .2; to the nearest of the gallery .2 .15 .05 .1
    assert identified(gallery)(truth, guess).tolist() == [1.0, 1.0, 0.0, 0.0]


def test_identification_is_the_brute_force_search() -> None:
    gallery, truth = images(0, 200, 3, 6, 6), images(1, 30, 3, 6, 6)
    noise = torch.linspace(0, 2.0, 30).view(-1, 1, 1, 1) * torch.randn(30, 3, 6, 6, generator=torch.manual_seed(0))
    guess = truth + noise
    expected = []
    for t, g in zip(truth.double().numpy(), guess.double().numpy(), strict=True):
        others = [np.square(g - o).mean() for o in gallery.double().numpy()]
        expected.append(float(np.square(g - t).mean() < min(others)))
    assert identified(gallery)(truth, guess).tolist() == expected
    assert 0 < sum(expected) < 30


# -------------------------------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("truth", "guess", "accuracy"),
    [
        ([1, 2, 3], [3, 1, 2], 1.0),
        ([1, 1, 2], [1, 2, 2], 2 / 3),
        ([5], [4], 0.0),
        ([0, 0, 0, 0], [0, 1, 2, 3], 0.25),
        ([9, 0], [9, 9], 0.5),
        ([5], [4, 5, 6], 1 / 3),
        ([4, 5, 6], [5], 1 / 3),
    ],
)
def test_label_accuracy_counts_multisets(truth: list[int], guess: list[int], accuracy: float) -> None:
    assert LabelKind().scores(torch.tensor(truth), torch.tensor(guess))["label_accuracy"] == pytest.approx(accuracy)


# --------------------------------------------------------------------------------------------------------------- lpips


def test_without_real_weights_there_is_no_lpips(no_local_data: Path) -> None:
    assert lpips_weights("alex") is None
    assert lpips_metric("alex") is None
    assert "lpips_alex" not in [m.name for m in image_metrics((3, 64, 64), images(0, 5, 3, 64, 64))]


def test_metrics_stand_where_they_have_a_meaning(no_local_data: Path) -> None:
    gallery = images(0, 5, 1, 28, 28)
    assert [m.name for m in image_metrics((1, 28, 28), gallery)] == ["mse", "psnr", "ssim", "identified"]
    assert [m.name for m in image_metrics((3, 10, 32), gallery)] == ["mse", "psnr", "identified"]
    higher = {m.name: MEASURED[m.name].higher_is_better for m in image_metrics((1, 28, 28), gallery)}
    assert higher == {"mse": False, "psnr": True, "ssim": True, "identified": True}


@pytest.mark.parametrize("channels", [1, 3])
def test_lpips_is_zero_for_the_same_grows_with_noise_and_is_symmetric(
    local_file: Callable[[str], Path], channels: int
) -> None:
    local_file("weights/alexnet_features_torchvision.safetensors")
    metric = lpips_metric("alex")
    assert metric is not None
    truth = smooth(0, 2, channels, 32, 32)
    noise = torch.randn(truth.shape, generator=torch.Generator().manual_seed(1))
    values = [metric(truth, (truth + s * noise).clamp(0, 1)) for s in (0.0, 0.05, 0.1, 0.2, 0.4)]
    assert values[0].abs().max() < 1e-6
    assert all((later > earlier).all() for earlier, later in itertools.pairwise(values))
    other = smooth(5, 2, channels, 32, 32)
    torch.testing.assert_close(metric(truth, other), metric(other, truth))
    assert not MEASURED[metric.name].higher_is_better
    assert metric.name in [m.name for m in image_metrics((channels, 32, 32), truth)]


def test_an_error_of_zero_has_the_largest_psnr() -> None:
    assert [in_db(error) for error in (0.0, 0.1)] == [PSNR_CAP, pytest.approx(10.0)]
