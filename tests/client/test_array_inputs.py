"""Arrays of floats as inputs: windows, volumes and vectors; masks as labels; dropout and several inputs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Budget
from fedgauge.attacks.engine.compatibility import forward_problem
from fedgauge.attacks.engine.gradient_distances import each, squared
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.matching.problems import scale_of
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.source import FederationSource
from fedgauge.attacks.threat_model import public_knowledge
from fedgauge.client.components import SpecError, allowing
from fedgauge.client.data.own_arrays import arrays
from fedgauge.client.federation import Federation
from fedgauge.client.label_kinds import Mask
from fedgauge.client.protocol import Protocol
from fedgauge.server.views.gallery import picture
from fedgauge.simulations.checks.network_check import check_network

HERE = "tests.client.test_array_inputs"


@pytest.fixture(autouse=True)
def _allowed() -> Iterator[None]:
    with allowing(["tests"]):
        yield


def dense(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 24), nn.ReLU(), nn.Linear(24, classes))


def dropping(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(int(np.prod(shape)), 24), nn.ReLU(), nn.Dropout(0.5), nn.Linear(24, classes)
    )


def segmenting(shape: tuple[int, ...], outputs: int = 2, stride: int = 1) -> nn.Module:
    layers = [nn.Conv2d(shape[0], 24, 3, stride, 1), nn.Sigmoid(), nn.Conv2d(24, 24, 3, 1, 1), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.Conv2d(24, outputs, 1))


class Windows(nn.Module):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Conv1d(shape[0], 16, 5, padding=2), nn.Linear(16 * shape[1], classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).sigmoid().flatten(1))
        return out


class TwoInputs(nn.Module):
    def forward(self, image: Tensor, numbers: Tensor) -> Tensor:
        return image + numbers


def stored(
    folder: Path, shape: tuple[int, ...], y: np.ndarray | None = None, scale: float = 1.0, count: int = 160
) -> str:
    rng = np.random.default_rng(0)
    x = (scale * (3 + rng.normal(size=(count, *shape)).cumsum(-1))).astype(np.float32)
    np.savez(folder / "x.npz", x=x, y=rng.integers(0, 3, count) if y is None else y)
    return str(folder / "x.npz")


def federation(path: str, model: dict[str, Any], **more: Any) -> Federation:
    tables = {
        "rounds": 1,
        "clients": 4,
        "data": {"use": "arrays", "path": path, "batch_size": 1, "auxiliary": 80},
        "model": model,
        "chain": [{"use": "local_sgd", "rate": 0.1}],
    }
    return Federation(Protocol.from_tables({**tables, **more}))


def attacked(fed: Federation, use: str, iterations: int = 1, **settings: Any) -> dict[str, list[float]]:
    source = FederationSource(fed)
    planned = PlannedAttack(use, {"use": use, **settings}, Budget(iterations))
    results = Auditor(source).audit(planned, source.wave(range(2)))
    found: dict[str, list[float]] = {}
    for row in (row for result in results for row in result.rows):
        found.setdefault(row.metric, []).append(float("nan") if row.value is None else row.value)
    return found


def test_the_network_takes_the_values_of_the_file_and_the_attacker_knows_the_public_range(tmp_path: Path) -> None:
    path = stored(tmp_path, (3, 16), scale=100)
    fed = federation(path, {"use": f"{HERE}:dense"})
    data, public = fed.shards.dataset, fed.shards.auxiliary_batch().x
    assert torch.allclose(data.normalise(data.x), arrays(Path(path)).x, rtol=1e-4, atol=1e-3)
    by_channel = public.transpose(0, 1).flatten(1)
    assert torch.allclose(by_channel.amin(1), torch.zeros(3), atol=1e-6)
    assert torch.allclose(by_channel.amax(1), torch.ones(3), atol=1e-6)
    scale = scale_of(public_knowledge(fed))
    assert scale is not None and scale[1].shape == (3, 1) and float(scale[1].min()) > 100  # the search's units


@pytest.mark.parametrize(("shape", "model", "use"), [
    ((20,), "dense", "analytic"),
    ((3, 16), "dense", "analytic"),
    ((3, 16), "Windows", "recursive"),
    ((1, 4, 5, 6), "dense", "analytic"),
])  # fmt: skip
def test_inputs_of_any_shape_are_read_exactly(tmp_path: Path, shape: tuple[int, ...], model: str, use: str) -> None:
    found = attacked(federation(stored(tmp_path, shape), {"use": f"{HERE}:{model}"}), use)
    assert min(found["psnr"]) > 60 and min(found["correlation"]) > 0.999


def test_a_search_has_the_units_of_the_data(tmp_path: Path) -> None:
    fed = federation(stored(tmp_path, (3, 16), scale=0.01), {"use": f"{HERE}:Windows"})
    found, guess = attacked(fed, "inverting_gradients", 100, tv=1e-3), attacked(fed, "mean_image")
    assert np.mean(found["psnr"]) > np.mean(guess["psnr"]) + 6


@pytest.mark.parametrize("use", ["gi_gip", "gifd", "patch_embedding", "spear"])
def test_attacks_on_images_decline_windows(tmp_path: Path, use: str) -> None:
    assert np.isnan(attacked(federation(stored(tmp_path, (3, 16)), {"use": f"{HERE}:Windows"}), use)["psnr"]).all()


def test_values_that_are_not_finite_and_networks_of_images_are_named(tmp_path: Path) -> None:
    path = stored(tmp_path, (3, 16), scale=np.nan)
    with pytest.raises(SpecError):
        federation(path, {"use": f"{HERE}:dense"}).check()
    with pytest.raises(SpecError):
        federation(stored(tmp_path, (3, 16)), {"use": "lenet"}).check()
    found = forward_problem(TwoInputs(), {}, torch.rand(2, 3))
    assert found is not None and found.code == "several inputs"


# ------------------------------------------------------------------------------------------------------------- masks


def masks(count: int = 160, size: int = 8) -> np.ndarray:
    rows, place = np.mgrid[:size, :size], np.random.default_rng(1).integers(1, size - 3, (2, count, 1, 1))
    inside = [(r >= p) & (r < p + 3) for r, p in zip(rows, place, strict=True)]
    return (inside[0] & inside[1]).astype(np.int64)


@pytest.mark.parametrize(("floats", "outputs", "use"), [
    (False, 2, "cross_entropy"),
    pytest.param(False, 1, "binary_cross_entropy", marks=pytest.mark.full),
    pytest.param(True, 1, "binary_cross_entropy", marks=pytest.mark.full),
])  # fmt: skip
def test_a_mask_is_optimised_next_to_the_image(tmp_path: Path, floats: bool, outputs: int, use: str) -> None:
    y = masks()
    path = stored(tmp_path, (1, 8, 8), y[:, None].astype(np.float32) if floats else y)
    fed = federation(path, {"use": f"{HERE}:segmenting", "outputs": outputs}, loss={"use": use})
    assert type(fed.label_kind) is Mask
    found, guess = attacked(fed, "dlg", 250), attacked(fed, "mean_image")
    assert np.mean(found["correlation"]) > np.mean(guess["correlation"]) + 0.1, (found, guess)
    assert all(0 < value <= 1 for value in [*found["mask_iou"], *guess["mask_iou"]])


def test_a_distance_by_tensor_is_the_mean_of_each_one_s() -> None:
    seen = {"a": torch.tensor([100.0, 0.0]), "b": torch.tensor([1.0])}
    guess = {"a": torch.tensor([100.0, 0.0]), "b": torch.tensor([3.0])}
    assert float(each(squared())(seen, guess)) == pytest.approx((0 + 4) / 2)
    assert float(squared()(seen, guess)) == pytest.approx(4 / 10001)


def test_the_overlap_of_masks_by_hand() -> None:
    truth = torch.tensor([[[0, 1, 1, 2]], [[0, 0, 0, 0]]])
    guess = torch.tensor([[[0, 0, 0, 0]], [[0, 1, 2, 2]]])
    kind = Mask(truth, (torch.zeros(2, 3, 1, 4), truth, truth))
    assert kind.scores(truth, guess)["mask_iou"] == pytest.approx((0.5 + 0.5) / 4 + 0.5)  # in any order
    relaxed = kind.relaxed(torch.randn(5, kind.width(3)))
    assert relaxed.shape == (5, 3, 1, 4) and torch.allclose(relaxed.sum(1), torch.ones(5, 1, 4))
    assert torch.equal(kind.decided(kind.soft(truth, 3)), truth)
    binary = Mask(truth.clamp(max=1).float())
    assert (
        torch.equal(binary.decided(binary.public), binary.public) and binary.decided(binary.public).is_floating_point()
    )


def test_a_mask_of_another_size_than_the_output_is_named_before_training(tmp_path: Path) -> None:
    fed = federation(stored(tmp_path, (1, 8, 8), masks()), {"use": f"{HERE}:segmenting", "stride": 2})
    with pytest.raises(SpecError, match="4, 4.* 8, 8"):
        fed.check()


# ----------------------------------------------------------------------------------------------------------- dropout


def test_exact_attacks_in_front_of_dropout_go_on_and_searches_decline(tmp_path: Path) -> None:
    fed = federation(stored(tmp_path, (3, 16)), {"use": f"{HERE}:dropping", "mode": "train"})
    results = {result.name: result for result in check_network(fed)}
    assert results["model"].code == "draws" and not results["model"].stops and results["gradient"].works
    sent = fed.initial()
    once, again = (fed.client_update(*sent, client=0, round=1) for _ in range(2))
    other = fed.client_update(*sent, client=0, round=2)
    assert all(torch.equal(once[k], again[k]) for k in once) and any(bool((once[k] != other[k]).any()) for k in once)
    assert min(attacked(fed, "analytic")["psnr"]) > 60
    assert np.isnan(attacked(fed, "inverting_gradients")["psnr"]).all()


@pytest.mark.parametrize(("shape", "size"), [
    ((3, 64), (1, 72, 64)), ((10,), (1, 24, 90)), ((5, 16, 16), (1, 32, 48)), ((1, 8, 4, 4), (1, 12, 12)),
    ((3, 9, 9), (3, 9, 9)),
])  # fmt: skip
def test_every_input_has_a_picture(shape: tuple[int, ...], size: tuple[int, ...]) -> None:
    found = picture(torch.rand(shape))
    assert found.shape == size and 0 <= float(found.min()) <= float(found.max()) <= 1
