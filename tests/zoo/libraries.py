"""Networks of torchvision, timm and Hugging Face from their public constructors, as small as these build them."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

CLASSES = 4
Entry = tuple[Callable[[], nn.Module], tuple[int, int, int], bool, str, bool]  # make, shape, train, declined, quick
SMALL = (3, 32, 32)


def _tv(name: str, **settings: Any) -> nn.Module:
    from torchvision import models

    found: nn.Module = getattr(models, name)(weights=None, num_classes=CLASSES, **settings)
    return found


def _densenet() -> nn.Module:
    from torchvision.models import DenseNet

    return DenseNet(4, (1, 2, 1), 8, num_classes=CLASSES)


def _resnet(bottleneck: bool, **settings: Any) -> nn.Module:
    from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

    return ResNet(Bottleneck if bottleneck else BasicBlock, [1, 1, 1, 1], num_classes=CLASSES, **settings)


def _vgg(norm: bool) -> nn.Module:
    from torchvision.models.vgg import VGG, make_layers

    net = VGG(make_layers([4, "M", 8, "M", 8], norm), CLASSES, init_weights=False)
    net.avgpool, net.classifier = (
        nn.AdaptiveAvgPool2d(2),
        nn.Sequential(nn.Linear(32, 16), nn.ReLU(True), nn.Linear(16, CLASSES)),
    )
    return net


def _convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], num_classes=CLASSES)


def _vit(dropout: float = 0.0) -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(16, 8, 2, 2, 16, 32, dropout, num_classes=CLASSES)


def _swin(version: int) -> nn.Module:
    from torchvision.models.swin_transformer import (
        PatchMerging,
        PatchMergingV2,
        SwinTransformer,
        SwinTransformerBlock,
        SwinTransformerBlockV2,
    )

    block, merging = ((SwinTransformerBlock, PatchMerging), (SwinTransformerBlockV2, PatchMergingV2))[version - 1]
    return SwinTransformer(
        [2, 2], 8, [2, 1], [2, 2], [2, 2], stochastic_depth_prob=0.0, num_classes=CLASSES, block=block,
        downsample_layer=merging,
    )  # fmt: skip


def _maxvit() -> nn.Module:
    from torchvision.models import MaxVit

    return MaxVit((16, 16), 8, 2, [8], [1], 4, 0.0, num_classes=CLASSES)


def _mobilenet_v3() -> nn.Module:
    from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3

    rows = [(16, 3, 16, 16, True, "RE", 2, 1), (16, 3, 24, 16, False, "HS", 2, 1), (16, 5, 32, 16, True, "HS", 1, 2)]
    return MobileNetV3([InvertedResidualConfig(*row, 0.5) for row in rows], 16, num_classes=CLASSES)


def _efficientnet() -> nn.Module:
    from torchvision.models.efficientnet import EfficientNet, FusedMBConvConfig, MBConvConfig

    rows = [FusedMBConvConfig(2, 3, 2, 8, 8, 1), MBConvConfig(2, 3, 2, 8, 8, 1)]
    return EfficientNet(rows, 0.0, 0.0, CLASSES)


def _regnet() -> nn.Module:
    from torchvision.models.regnet import BlockParams, RegNet

    return RegNet(BlockParams([1, 1], [8, 8], [4, 4], [2, 2], [1, 1], 0.25), CLASSES, stem_width=8)


def _segmentation() -> nn.Module:
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    return lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=CLASSES)


_whole: dict[str, tuple[int, int, int]] = {  # a family's smallest member as users know it
    "resnet18": SMALL,
    "mobilenet_v3_small": SMALL,
    "mobilenet_v2": SMALL,
    "squeezenet1_1": SMALL,
    "shufflenet_v2_x0_5": SMALL,
    "mnasnet0_5": SMALL,
    "densenet121": SMALL,
    "googlenet": SMALL,
    "regnet_y_400mf": SMALL,
    "efficientnet_b0": SMALL,
}
TORCHVISION: dict[str, Entry] = {
    "resnet of basic blocks": (partial(_resnet, False), SMALL, False, "", False),
    "resnet of bottlenecks": (partial(_resnet, True, width_per_group=4), SMALL, False, "", False),
    "resnext": (partial(_resnet, True, groups=4, width_per_group=4), SMALL, False, "", False),
    "vgg": (partial(_vgg, False), (3, 8, 8), False, "", True),
    "vgg with batch norm": (partial(_vgg, True), (3, 8, 8), True, "", False),
    "densenet": (_densenet, SMALL, False, "", True),
    "densenet in train mode": (_densenet, SMALL, True, "", False),
    "convnext": (_convnext, SMALL, False, "", True),
    "vision transformer": (_vit, (3, 16, 16), False, "", True),
    "swin transformer": (partial(_swin, 1), (3, 16, 16), False, "", True),
    "swin transformer v2": (partial(_swin, 2), (3, 16, 16), False, "", True),
    "maxvit": (_maxvit, (3, 16, 16), False, "", True),
    "mobilenet v3": (_mobilenet_v3, SMALL, False, "", True),
    "efficientnet": (_efficientnet, SMALL, False, "", True),
    "efficientnet in train mode": (_efficientnet, SMALL, True, "", False),
    "regnet": (_regnet, SMALL, False, "", True),
    **{name: (partial(_tv, name), shape, False, "", False) for name, shape in _whole.items()},
    "efficientnet_b0 in train mode": (partial(_tv, "efficientnet_b0"), SMALL, True, "lacks its draws", False),
    "vision transformer with dropout": (partial(_vit, 0.1), (3, 16, 16), True, "lacks its draws", True),
    "inception_v3": (partial(_tv, "inception_v3", aux_logits=False, init_weights=False), (3, 75, 75), False, "", False),
    "lraspp (segments an image)": (
        _segmentation,
        SMALL,
        False,
        "a OrderedDict with out",
        False,
    ),
}


def _timm(name: str, **settings: Any) -> nn.Module:
    import timm

    found: nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES, **settings)
    return found


def _mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    net: nn.Module = MlpMixer(CLASSES, 16, 3, 8, 2, 16)
    return net


TIMM: dict[str, Entry] = {
    "timm vit": (
        partial(_timm, "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=24, depth=2, num_heads=2),
        (3, 16, 16), False, "", True,
    ),
    "timm deit": (
        partial(_timm, "deit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=24, depth=2, num_heads=2),
        (3, 16, 16), False, "", False,
    ),
    "timm mixer": (_mixer, (3, 16, 16), False, "", True),
    "timm convnext": (partial(_timm, "convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 8, 16)), SMALL, False, "", True),
    "timm resnet": (partial(_timm, "resnet10t"), SMALL, False, "", False),
    "timm lcnet": (partial(_timm, "lcnet_035"), SMALL, False, "", False),
    "timm mobilenet v3": (partial(_timm, "mobilenetv3_small_050"), SMALL, False, "", False),
    "timm tinynet": (partial(_timm, "tinynet_e"), SMALL, False, "", False),
    "timm ghostnet": (partial(_timm, "ghostnet_050"), SMALL, False, "", False),
    "timm edgenext": (partial(_timm, "edgenext_xx_small"), SMALL, False, "", False),
    "timm mobilevit": (partial(_timm, "mobilevit_xxs"), (3, 64, 64), False, "", False),
    "timm levit": (
        partial(_timm, "levit_128s", img_size=64), (3, 64, 64), False, "caches values computed from its parameters", False,
    ),
    "timm poolformer": (partial(_timm, "poolformer_s12"), SMALL, False, "", False),
    "timm regnet": (partial(_timm, "regnetx_002"), SMALL, False, "", False),
    "timm swin": (
        partial(
            _timm, "swin_tiny_patch4_window7_224", img_size=16, patch_size=2, window_size=2, embed_dim=8, depths=(2, 1),
            num_heads=(2, 2),
        ),
        (3, 16, 16), False, "", False,
    ),
    "timm normaliser-free resnet": (partial(_timm, "nf_resnet26", width_factor=0.125), SMALL, False, "", False),
}  # fmt: skip


class Logits(nn.Module):
    """A Hugging Face network of images, as an attackable model: images in, logits out."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(pixel_values=x).logits
        return logits


def _hf(kind: str, wrapped: bool = True, **settings: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(num_labels=CLASSES, **settings)
    net: nn.Module = getattr(transformers, f"{kind}ForImageClassification")(config)
    return Logits(net) if wrapped else net


_encoder = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=16, patch_size=8,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
HUGGING_FACE: dict[str, Entry] = {
    "hugging face vit": (partial(_hf, "ViT", **_encoder), (3, 16, 16), False, "", True),
    "hugging face vit, not wrapped": (
        partial(_hf, "ViT", False, **_encoder), (3, 16, 16), False, "a ImageClassifierOutput with logits", True,
    ),
    "hugging face vit, eager": (
        partial(_hf, "ViT", **_encoder, attn_implementation="eager"), (3, 16, 16), False, "", False,
    ),
    "hugging face deit": (partial(_hf, "DeiT", **_encoder), (3, 16, 16), False, "", False),
    "hugging face beit": (partial(_hf, "Beit", **_encoder), (3, 16, 16), False, "", False),
    "hugging face dinov2": (
        partial(_hf, "Dinov2", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8),
        (3, 16, 16), False, "", False,
    ),
    "hugging face swin": (
        partial(_hf, "Swin", image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2),
        (3, 16, 16), False, "", False,
    ),
    "hugging face resnet": (
        partial(_hf, "ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]), SMALL, False, "", True,
    ),
    "hugging face convnext": (
        partial(_hf, "ConvNext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2), SMALL, False, "", False,
    ),
    "hugging face mobilenet v2": (partial(_hf, "MobileNetV2", depth_multiplier=0.1), SMALL, False, "", False),
}  # fmt: skip
