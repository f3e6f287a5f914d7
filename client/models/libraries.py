"""Networks of torchvision and timm by their names, for images of any size that they take."""

import importlib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedgauge.client.models.vision import Shape, copy_weights, read_weights


def torchvision(shape: Shape, classes: int, name: str, pretrained: Path | None = None) -> nn.Module:
    """A classifier of torchvision by its name there, such as resnet18, vit_b_16, mobilenet_v3_small or convnext_tiny.

    Args:
        pretrained: a safetensors file of its weights; a classifier for other classes stays as drawn from the seed.

    Raises:
        ValueError: no such network, or it does not take such images.
    """
    models = import_library("torchvision", "vision").models
    _check_name("torchvision", name, models.list_models(module=models))
    if shape[0] != 3:
        raise ValueError(f"torchvision's networks take images of three colours, and these have {shape[0]}: use timm's")
    vit = name.startswith("vit_")
    if vit and shape[1] != shape[2]:
        raise ValueError(f"{name} takes square images, got {shape[1]} x {shape[2]}")
    sized = {"image_size": shape[1]} if vit else {}
    extra = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    return _loaded(models.get_model(name, weights=None, num_classes=classes, **sized, **extra), pretrained, classes)


def timm(shape: Shape, classes: int, name: str, pretrained: Path | None = None) -> nn.Module:
    """A classifier of timm by its name there, such as vit_small_patch16_224, resnet26 or convnext_atto.

    Args:
        pretrained: a safetensors file of its weights; a classifier for other classes stays as drawn from the seed.
    """
    library = import_library("timm", "vision")
    _check_name("timm", name, library.list_models())
    config = library.get_pretrained_cfg(name)
    sized: dict[str, Any] = {"img_size": tuple(shape[1:])} if config and config.fixed_input_size else {}
    built = library.create_model(name, pretrained=False, num_classes=classes, in_chans=shape[0], **sized)
    return _loaded(built, pretrained, classes)


def import_library(name: str, extra: str) -> Any:
    """Import an optional package.

    Raises:
        ValueError: it is missing; the message has the command to install it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"this needs the package {name} ({error}): pip install 'fedgauge[{extra}]'") from error


def _check_name(library: str, name: str, names: Sequence[str]) -> None:
    """Only names of the library's own list: others may mean a hub."""
    if name not in names:
        near = ", ".join(get_close_matches(name, names, 3, 0)) or "none"
        raise ValueError(f"{library} has no classifier {name!r}; the nearest names are {near}")


def _loaded(network: nn.Module, pretrained: Path | None, classes: int) -> nn.Module:
    """The network with a file's weights, except those of a classifier for other classes."""
    if pretrained is None:
        return network
    stored, own = read_weights(pretrained), network.state_dict()

    def other_classes(k: str) -> bool:
        mine, theirs = own[k].shape, stored[k].shape if k in stored else None
        return theirs is not None and mine[:1] == (classes,) != theirs[:1] and mine[1:] == theirs[1:]

    needed = [k for k, t in own.items() if torch.is_floating_point(t) and not other_classes(k)]
    copy_weights(own, {k: stored[k] for k in needed if k in stored}, needed, pretrained)
    return network
