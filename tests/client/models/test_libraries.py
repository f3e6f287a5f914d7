"""Networks of torchvision and timm by name: sizes, weights from files, names that are refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedgauge.client.models.libraries import timm, torchvision

COLOUR, GREY = (3, 32, 32), (1, 28, 28)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "vit_b_32", "squeezenet1_1"])
def test_a_network_of_torchvision_takes_the_images_and_classes(name: str) -> None:
    side = 64 if name == "vit_b_32" else 32
    with torch.device("meta"):
        logits = torchvision((3, side, side), 7, name).eval()(torch.zeros(2, 3, side, side))
    assert logits.shape == (2, 7)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet26", "convnext_atto", "test_vit"])
def test_a_network_of_timm_takes_the_images_and_classes(name: str) -> None:
    with torch.device("meta"):
        logits = timm((1, 64, 48), 7, name).eval()(torch.zeros(2, 1, 64, 48))
    assert logits.shape == (2, 7)


def test_the_weights_are_the_librarys_for_the_seed() -> None:
    import timm as library

    torch.manual_seed(3)
    ours = timm(COLOUR, 10, "resnet10t").state_dict()
    torch.manual_seed(3)
    theirs = library.create_model("resnet10t", num_classes=10).state_dict()
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs) and ours.keys() == theirs.keys()


@pytest.mark.parametrize(
    ("build", "shape", "name"),
    [
        (timm, COLOUR, "resnet17"),
        (timm, COLOUR, "hf-hub:somebody/network"),
        (timm, COLOUR, "local-dir:somewhere"),
        (torchvision, COLOUR, "fcn_resnet50"),
        (torchvision, GREY, "resnet18"),
        (torchvision, (3, 32, 64), "vit_b_32"),
    ],
)
def test_names_of_no_list_and_other_images_are_refused(build: object, shape: tuple[int, ...], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}|colours"):
        build(shape, 10, name)  # type: ignore[operator]


def test_weights_come_from_a_file_and_a_classifier_of_other_classes_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    stored = timm(COLOUR, 1000, "resnet10t").state_dict()
    save_file(stored, path)
    torch.manual_seed(1)
    loaded = timm(COLOUR, 10, "resnet10t", path).state_dict()
    torch.manual_seed(1)
    drawn = timm(COLOUR, 10, "resnet10t").state_dict()
    own = {k for k in loaded if k.startswith("fc.")}
    assert own and all(torch.equal(loaded[k], drawn[k]) for k in own)
    assert all(torch.equal(loaded[k], stored[k]) for k in loaded.keys() - own if loaded[k].is_floating_point())
    same = timm(COLOUR, 1000, "resnet10t", path).state_dict()
    assert all(torch.equal(same[k], stored[k]) for k in own)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(timm(COLOUR, 10, "resnet10t").state_dict(), path)
    spoiled = timm(COLOUR, 10, "resnet10t").state_dict()
    spoiled["fc.bias"] = torch.full_like(spoiled["fc.bias"], float("nan"))
    save_file(spoiled, tmp_path / "spoiled.safetensors")
    for name, file, named in (
        ("resnet14t", path.name, "fit"),
        ("resnet10t", "spoiled.safetensors", "'fc.bias'"),
        ("resnet10t", "none.safetensors", "none.safetensors"),
    ):
        with pytest.raises(ValueError, match=named):
            timm(COLOUR, 10, name, tmp_path / file)
