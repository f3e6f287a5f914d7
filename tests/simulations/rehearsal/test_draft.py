"""What a draft says of an upload, of frozen layers and of rounding."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedgauge.attacks.base import Observation
from fedgauge.client.federation import whole_parts
from fedgauge.simulations.rehearsal import rehearse
from fedgauge.simulations.rehearsal.draft import Draft, _examples, _networks, check_reported
from fedgauge.simulations.rehearsal.losses import Target, target_of


@pytest.mark.parametrize(("examples", "noted"), [(200, []), (4000, ["examples"])])
def test_as_many_steps_as_examples_are_no_batches(examples: int, noted: list[str]) -> None:
    """200 examples in 20 epochs of batches of 20 make 200 steps."""
    draft, facts = Draft(), {"sizes": [20] * 200}
    draft.add("[data]", "observed", batch_size=examples)
    check_reported(draft, 200, facts)
    assert [problem.code for problem in draft.problems] == noted


def test_a_librarys_network_lacks_what_its_component_has_no_argument_for() -> None:
    arguments = {"model_name": "resnet18", "num_classes": 10, "act_layer": None}
    built = [{"module": "timm.models", "name": "create_model", "arguments": arguments}]
    ((network, _, left_out),) = _networks({"built": built}, SimpleNamespace(language=None))  # type: ignore[arg-type]
    assert (network, left_out) == ({"use": "timm", "name": "resnet18"}, ["act_layer"])


def test_frozen_layers_are_named_as_a_whole() -> None:
    network = ["body.0.weight", "body.0.bias", "body.1.weight", "head.weight", "head.bias", "scale"]
    assert whole_parts(["body.0.weight", "body.0.bias", "body.1.weight"], network) == ["body"]
    assert whole_parts(["body.0.weight", "body.0.bias", "head.bias", "scale"], network) == [
        "body.0",
        "head.bias",
        "scale",
    ]


@pytest.mark.parametrize(
    ("options", "part", "ndim"), [({}, 1.0, 1), ({"weight": [1.0, 2.0, 3.0]}, 1.0, 2), ({}, 0.9, 2)]
)
def test_one_hot_labels_are_classes(options: dict[str, Any], part: float, ndim: int) -> None:
    """With weights, the mean over probabilities differs from that over classes."""
    y = part * np.eye(3, dtype=np.float32)[[2, 0]]
    facts = {"losses": {"cross_entropy": options}, "notes": {}, "network": "", "output": [2, 3], "reconstructs": False}
    target = target_of(facts, y)
    assert isinstance(target, Target) and target.labels(y).ndim == ndim


@pytest.mark.parametrize(("changes", "explained"), [((0.0,) * 8, False), ((0.0,) * 5 + (1e-2, 0.0, 0.0), True)])
def test_the_largest_of_several_roundings_counts(
    changes: tuple[float, ...], explained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that is wrong by 1 %, and how much other last bits of the examples change it."""
    true, update = {"w": torch.ones(4)}, {"w": torch.full((4,), 1.01)}

    def computed(*args: Any) -> tuple[dict[str, torch.Tensor], float]:
        return {"w": update["w"] + changes[args[-1] - 1]}, 0.0

    monkeypatch.setattr(rehearse, "_computed", computed)
    nothing: Any = None
    images: Any = (SimpleNamespace(language=None), None)
    seen = Observation(1, 0, true, true)
    assert rehearse._compared(update, nothing, seen, nothing, images, 0.0)[2] is explained


@pytest.mark.parametrize(
    ("x", "y", "sizes", "found"),
    [
        pytest.param([1, 2, 3, 1], [0, 1, 2, 0], [2, 2], (4, 1, False), id="an example twice in an epoch"),
        pytest.param([1, 2, 1, 1, 1, 2], [0, 1, 0, 0, 0, 1], [2, 1, 2, 1], (3, 2, True), id="twice in each of two"),
        pytest.param([5, 5, 5, 5], [0, 1, 2, 3], [4], (4, 1, False), id="equal images in a batch"),
        pytest.param([5, 5, 5, 5], [0, 1, 2, 3], [2, 2], (4, 1, False), id="equal images, other labels"),
        pytest.param([5, 5, 5, 5], [0, 0, 0, 0], [4], (4, 1, False), id="equal examples in a batch"),
        pytest.param([1, 2, 1, 2], [], [4], (4, 1, False), id="a batch of two halves"),
        pytest.param([1, 2, 1, 2], [], [2, 2], (2, 2, False), id="two epochs"),
    ],
)
def test_equal_examples_are_no_epochs(
    x: list[float], y: list[int], sizes: list[int], found: tuple[int, int, bool], tmp_path: Path
) -> None:
    path = tmp_path / "node-1-1.npz"
    np.savez(path, x=np.array(x)[:, None], y=np.array(y))
    assert _examples([{"data": str(path), "sizes": sizes}]) == found
