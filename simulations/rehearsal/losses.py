"""The loss and labels of an observed training, as a scenario has them."""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.nn import functional

from fedgauge.attacks.problem import Problem
from fedgauge.simulations.rehearsal.observer import OF_CLASSES

OWN: Mapping[str, tuple[str, Sequence[str]]] = {  # a loss of fedgauge for torch's, and the settings that both have
    "cross_entropy": ("cross_entropy", ("label_smoothing", "weight")),
    "nll_loss": ("cross_entropy", ("weight",)),
    "mse_loss": ("mean_squared_error", ()),
    "l1_loss": ("mean_absolute_error", ()),
    "huber_loss": ("huber", ("delta",)),
    "binary_cross_entropy_with_logits": ("binary_cross_entropy", ("pos_weight",)),
}
OF_TORCH = ("binary_cross_entropy", "smooth_l1_loss", "poisson_nll_loss", "soft_margin_loss")
TWO_CLASSES = ("binary_cross_entropy", "binary_cross_entropy_with_logits")  # or findings, or a mask's pixels


@dataclass(frozen=True)
class Target:
    """Labels, as a loss compares them with the network's output."""

    name: str  # of torch's function
    loss: Mapping[str, Any]  # lines of [loss]; none for the plain cross-entropy
    classes: int  # of [data]
    reads_input: bool = False  # the labels are the inputs themselves
    left_out: Sequence[str] = ()  # settings of the loss that a scenario cannot express
    one_hot: bool = False  # observed labels have a 1 at the class, and are 0 elsewhere

    def labels(self, y: np.ndarray) -> np.ndarray:
        """Return observed labels as the scenario's data has them: classes (N,), findings or numbers (N, K) or (N,), masks."""
        if self.reads_input:
            return np.zeros(len(y), np.int64)
        if self.one_hot:
            return np.asarray(y.argmax(1))
        if np.issubdtype(y.dtype, np.integer):
            return y
        if y.ndim > 2 and self.name in TWO_CLASSES:
            return y.astype(np.float32)
        flat = y.reshape(len(y), -1).astype(np.float32)
        single = flat[:, 0] if flat.shape[1] == 1 else flat
        return single.astype(np.int64) if _two_classes(self.name, y) else single


def _two_classes(name: str, y: np.ndarray) -> bool:
    """Check if labels are one 0 or 1 for each example."""
    return name in TWO_CLASSES and y.size == len(y) and bool(((y == 0) | (y == 1)).all())


def _is_one_hot(y: np.ndarray) -> bool:
    """Check if labels have a single 1 among the classes, and are 0 elsewhere."""
    floats = y.ndim > 1 and np.issubdtype(y.dtype, np.floating)  # whole numbers are classes
    return floats and bool(((y == 0) | (y == 1)).all() and (y.sum(1) == 1).all())


def target_of(first: Mapping[str, Any], y: np.ndarray | None) -> Target | Problem:
    """Return what a training's loss compares, with observed labels y, or why no scenario has such a loss."""
    losses, notes, network = first["losses"], first["notes"], first["network"]
    known = [name for name in losses if name in OWN or name in OF_TORCH]
    if not known:
        seen = ", ".join(losses) or "none of torch's losses"
        remedy = "name a loss of (logits, labels) as [loss] use, and record it by tap; split learning has no attack"
        return Problem("loss", "", f"clients minimise {seen}", remedy)
    if "output" in notes or "values" in notes:
        remedy = "only a network that returns one tensor, used directly by the loss, can be attacked"
        return Problem("output", network, notes.get("output") or notes["values"], remedy)
    if y is None or not y.size:
        remedy = "each pass through the network needs one loss of torch that compares its outputs with labels"
        return Problem("labels", "", "no labels were seen for some examples", remedy)
    name, outputs = known[0], math.prod(first["output"][1:])
    one_hot = name == "cross_entropy" and losses[name].get("weight") is None and _is_one_hot(y)
    y = y.argmax(1) if one_hot else y
    classes = np.issubdtype(y.dtype, np.integer) and y.ndim == 1
    remedy = "one class, or one number for each output, is needed for an example"
    masks = y.ndim == 3 and [len(y), *first["output"][2:]] == list(y.shape) and name in OF_CLASSES  # of images
    if name in OF_CLASSES and (y == (ignored := losses[name].get("ignore_index", -100))).any():
        why = f"{name} ignores labels of {ignored}, which no attack restores"
        return Problem("labels", "", why, "train on examples without ignored labels")
    if classes and (len(first["output"]) != 2 or y.min() < 0 or name not in OF_CLASSES):
        return Problem("labels", "", f"{name} compares classes {y.shape} with {tuple(first['output'])}", remedy)
    if not classes and not masks and (y.size != len(y) * outputs or not np.issubdtype(y.dtype, np.floating)):
        why = f"labels are {y.dtype} of shape {y.shape[1:]}, outputs have shape {tuple(first['output'][1:])}"
        return Problem("labels", "", why, remedy)
    masks = masks or (y.ndim > 2 and name in TWO_CLASSES)
    if masks and len(first["output"]) > 2 and not first["reconstructs"]:
        outputs = first["output"][1]
    count = 2 if outputs == 1 and _two_classes(name, y) else outputs
    return _target(name, losses[name], count, first["reconstructs"], one_hot)


def _target(name: str, options: Mapping[str, Any], classes: int, reconstructs: bool, one_hot: bool) -> Target | Problem:
    parameters = inspect.signature(getattr(functional, name)).parameters
    given = {k: v for k, v in options.items() if k != "reduction" and v != parameters[k].default}  # which is measured
    if reconstructs:
        measure = {"mse_loss": "squared_error", "binary_cross_entropy": "cross_entropy"}.get(name)
        if measure is None:
            why, remedy = f"{name} compares inputs with outputs", "name a loss (output, y, x) as [loss] use"
            return Problem("loss", "", why, remedy)
        settings = {} if measure == "squared_error" else {"measure": measure}
        return Target(name, {"use": "reconstruction", **settings}, classes, True, tuple(given))
    if name in OF_TORCH:
        plain = {k: v for k, v in given.items() if isinstance(v, bool | int | float | str)}
        left_out = tuple(given.keys() - plain.keys())
        return Target(name, {"use": f"torch.nn.functional:{name}", **plain}, classes, left_out=left_out)
    own, shared = OWN[name]
    kept: dict[str, Any] = {k: v for k, v in given.items() if k in shared}
    if isinstance(weight := kept.get("pos_weight"), float):
        kept["pos_weight"] = [weight]
    table = {"use": own, **kept} if kept or name not in OF_CLASSES else {}
    return Target(name, table, classes, left_out=tuple(given.keys() - kept.keys()), one_hot=one_hot)
