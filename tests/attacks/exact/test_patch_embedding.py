"""One image of a vision transformer is read off its embeddings' gradients: networks of timm, torchvision and Hugging Face."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from fedgauge.attacks.base import Budget, Knowledge, Observation, Reconstruction, Wave
from fedgauge.attacks.exact.patch_embedding import Patches, patch_embedding
from fedgauge.attacks.modality.image_metrics import psnr
from fedgauge.client.chain import Chain, chain
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd, local_training
from fedgauge.client.models.libraries import timm
from fedgauge.client.models.torchvision_mend import mend_when_imported
from fedgauge.client.models.vision import detached_params, lenet
from fedgauge.client.update import Batch
from fedgauge.defenses.clip import clip
from fedgauge.defenses.noise import gaussian

SHAPE, CLASSES = (3, 32, 32), 10
MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.3)
TINY = {"embed_dim": 80, "depth": 2, "num_heads": 4}


def timm_vit(**settings: object) -> nn.Module:
    mend_when_imported()
    import timm as library

    made: nn.Module = library.models.vision_transformer.VisionTransformer(
        **{"img_size": 32, "patch_size": 4, "num_classes": CLASSES, **TINY, **settings}
    )
    return made


def torchvision_vit() -> nn.Module:
    mend_when_imported()
    from torchvision.models import VisionTransformer

    made = VisionTransformer(32, 4, 2, 4, 80, 96, num_classes=CLASSES)
    nn.init.normal_(made.heads.head.weight)  # torchvision's is zero at first, and lets no gradient through
    return made


class HuggingFaceVit(nn.Module):
    def __init__(self) -> None:
        transformers = pytest.importorskip("transformers")
        super().__init__()
        config = transformers.ViTConfig(
            image_size=32, patch_size=4, num_labels=CLASSES, hidden_size=80, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=96, attn_implementation="eager",
        )  # fmt: skip
        self.network = transformers.ViTForImageClassification(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.network(x).logits
        return logits


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "timm": timm_vit,
    "timm, mean of patches": lambda: timm_vit(global_pool="avg", class_token=False),
    "timm, two tokens before": lambda: timm_vit(reg_tokens=1),
    "torchvision": torchvision_vit,
    "hugging face": HuggingFaceVit,
}


def pictures(n: int, seed: int = 0) -> torch.Tensor:
    """Smooth images, as photographs are."""
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, 3, 4, 4, generator=rng)
    return nn.functional.interpolate(coarse, SHAPE[1:], mode="bicubic").clamp(0, 1)


def attacked(
    model: nn.Module, links: Chain | None = None, images: int = 1, auxiliary: int = 0
) -> tuple[torch.Tensor, Reconstruction]:
    links = links or chain(local_sgd(0.1))
    params, batch = detached_params(model.eval()), Batch(pictures(images), torch.arange(images) % CLASSES)
    public = Batch(pictures(auxiliary, 1), torch.zeros(auxiliary, dtype=torch.int64)) if auxiliary else None
    known = Knowledge(model, links, SHAPE, CLASSES, images, MEAN, STD, auxiliary=public)
    update = links(gradient(model, normalise=known.normalise))(params, batch, torch.Generator().manual_seed(0))
    found = patch_embedding().reconstruct(Wave.stack([Observation(1, 0, params, update)]), known, Budget(1), [])[0]
    return batch.x, found


def decibels(x: torch.Tensor, found: Reconstruction) -> float:
    assert found.status == "converged" and found.x is not None, found.reason
    return float(psnr(x, found.x))


@pytest.mark.parametrize("name", NETWORKS)
def test_one_image_is_read_exactly(name: str) -> None:
    x, found = attacked(NETWORKS[name]())
    assert decibels(x, found) > 60 and found.reason == ""
    assert found.y is not None and found.y.tolist() == [0]


@pytest.mark.parametrize("links", [chain(local_sgd(0.01, 3)), chain(local_sgd(0.1), clip(1e-3))], ids=["steps", "clip"])
def test_local_steps_and_a_clip_hide_nothing(links: Chain) -> None:
    assert decibels(*attacked(timm_vit(), links)) > 60


def test_the_system_has_the_image_for_its_solution_on_paper() -> None:
    """dL/dW = D^T X of the layer as it is found, with X the true patches: an identity of the chain rule."""
    model = timm_vit().double()
    params, x = {k: p.double() for k, p in detached_params(model).items()}, pictures(1).double()
    known = Knowledge(model, chain(local_sgd(1.0)), SHAPE, CLASSES, 1, (), ())
    update = gradient(model)(params, Batch(x, torch.tensor([2])), None)
    found = Patches.of(Knowledge(model.float(), known.chain, SHAPE, CLASSES, 1, (), ()), detached_params(model))
    assert (found.reads.name, found.positions, found.first, found.grid) == ("patch_embed.proj", "pos_embed", 1, (8, 8))
    signal = update["pos_embed"][0, 1:]
    torch.testing.assert_close(update["patch_embed.proj.weight"].flatten(1), signal.T @ found.cut(x)[0])
    assert torch.equal(found.joined(found.cut(x), SHAPE), x)


def test_more_patches_than_width_are_completed_by_public_images() -> None:
    model = timm_vit(embed_dim=48)  # 64 patches
    (x, alone), (_, helped) = attacked(model), attacked(model, auxiliary=200)
    assert "of 64 directions" in alone.reason
    assert decibels(x, helped) > decibels(x, alone) + 3 > 15


@pytest.mark.full
def test_noise_takes_the_image_away_bit_by_bit() -> None:
    model = timm_vit()
    found = [decibels(*attacked(model, chain(gaussian(s), local_sgd(0.1)), auxiliary=200)) for s in (1e-7, 1e-4, 1.0)]
    mean = float(psnr(pictures(1), pictures(200, 1).mean(0, keepdim=True)))
    assert found[0] > found[1] + 10 and found[1] > mean + 3 and abs(found[2] - mean) < 1, (found, mean)


@pytest.mark.parametrize(
    ("model", "images", "links", "reason"),
    [
        (timm_vit, 2, None, "one example in each update"),
        (timm_vit, 1, chain(local_training(0.1, 1, "adam", steps=1)), "needs a gradient's magnitudes"),
        (lambda: lenet(SHAPE, CLASSES), 1, None, "layer 'conv1' overlaps its windows"),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, CLASSES)),
            1,
            None,
            "no convolution reads the example itself",
        ),
        (lambda: timm(SHAPE, CLASSES, "convnext_atto"), 1, None, "no learnt position is added to each patch"),
    ],
)
def test_unreadable_input_is_reported(
    model: Callable[[], nn.Module], images: int, links: Chain | None, reason: str
) -> None:
    _, found = attacked(model(), links, images)
    assert found.status == "not_applicable" and reason in found.reason


def test_a_classifier_of_zeros_lets_nothing_through() -> None:
    model = torchvision_vit()
    nn.init.zeros_(model.heads.head.weight)  # type: ignore[union-attr,arg-type]  # torch types every attribute alike
    assert "weights" in attacked(model)[1].reason


@pytest.mark.full
@pytest.mark.parametrize(("name", "least"), [("vit_small_patch16_224", 60), ("vit_tiny_patch16_224", 30)])
def test_a_photograph_at_224_is_read(name: str, least: float, local_file: Callable[[str], Path]) -> None:
    """A kept figure: ViT-S/16 has 384 numbers for 196 patches (71.7 dB and more), ViT-Ti/16 192 (40.4 and more)."""
    picture = Image.open(local_file("photos/astronaut.png")).convert("RGB").resize((224, 224))
    x = torch.tensor(np.array(picture)).permute(2, 0, 1)[None] / 255
    model = timm((3, 224, 224), CLASSES, name).eval()
    known = Knowledge(model, chain(local_sgd(0.1)), (3, 224, 224), CLASSES, 1, MEAN, STD)
    params = detached_params(model)
    update = known.chain(gradient(model, normalise=known.normalise))(params, Batch(x, torch.tensor([3])), None)
    found = patch_embedding().reconstruct(Wave.stack([Observation(1, 0, params, update)]), known, Budget(1), [])[0]
    assert decibels(x, found) > least
