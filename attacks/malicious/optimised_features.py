"""Weights optimised for reconstruction: layers that keep as much of the image in the classifier's input as fits.

An idea of Inverting Gradients (Geiping et al., 2020, appendix A). The classifier's input h(x) is read off its gradient
(decoding.py) and mapped back by the best linear estimate, fitted to public images under the weights that were sent,

    x = mean(x) + Cov(x, h) (Cov(h) + s)^(-1) (h - mean(h)),

where s is the variance of the noise that the clients' chain leaves in h. It also works with honest weights. Its error is
smallest where every layer before the classifier keeps the principal components of its own input: of each tile by which a
convolution strides, of the mean patch that an average pool behind it leaves, or of a fully connected layer's whole input. A layer
that is wide enough then loses nothing, and a narrow one loses what varies least; activations are kept where they are nearly linear.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fedgauge.attacks.base import Knowledge, Observation, Reconstruction, Wave
from fedgauge.attacks.engine.computation import classifier, layer_inputs
from fedgauge.attacks.exact.closed_form import ClosedForm, Reader
from fedgauge.attacks.malicious.decoding import ClassifierInputs, check_readable
from fedgauge.attacks.malicious.server_attack import ServerAttack, with_zero_classifier
from fedgauge.client.models.vision import check_images
from fedgauge.client.update import Batch, Params, relative_error

TOGETHER = 256  # images in one forward pass
FITTED = 512  # public images from which the components are taken
TINY = 1e-6  # a standard deviation below it counts as zero
RIDGE = 1e-2  # as a part of the inputs' mean variance, against overfitting to the public images
LEAST = 16  # public images that a fit needs


@torch.no_grad()
def layer_input(known: Knowledge, params: Params, layer: str, x: Tensor) -> Tensor:
    """A layer's inputs (n, ...) for images x (n, C, H, W) in pixels."""
    module = known.model.get_submodule(layer)
    parts = (layer_inputs(known.model, params, [module], known.normalise(part)) for part in x.split(TOGETHER))
    return torch.cat([inputs for uses in parts for _, inputs in uses])


@dataclass(frozen=True, eq=False)
class LinearEstimate:
    """The best linear estimate of images from the classifier's inputs.

    Args:
        inputs: (d,) mean; left: (d, r), right: (r, pixels), values: (r,) the spectrum of the public images' inputs.
        x: (pixels,) mean; ridge: a variance added to that of the noise.
    """

    inputs: Tensor
    x: Tensor
    left: Tensor
    values: Tensor
    right: Tensor
    ridge: float

    @classmethod
    def fitted(cls, h: Tensor, x: Tensor, ridge: float) -> "LinearEstimate":
        """Fitted to inputs h (n, d) of images x (n, ...); ridge: as a part of the inputs' mean variance."""
        h, x = h.double(), x.double().flatten(1)
        u, values, right = torch.linalg.svd(h - h.mean(0), full_matrices=False)
        own = ridge * float(h.var(0).mean())
        return cls(h.mean(0), x.mean(0), right.T, values / len(h) ** 0.5, u.T @ (x - x.mean(0)) / len(h) ** 0.5, own)

    def __call__(self, h: Tensor, noise: Tensor) -> Tensor:
        """Images (n, pixels) from inputs (n, d) with noise of these variances (n,)."""
        shrunk = self.values / (self.values.square() + self.ridge + noise[:, None]).clamp(min=1e-30)
        return self.x + ((h.double() - self.inputs) @ self.left * shrunk) @ self.right


def public_images(known: Knowledge) -> Tensor:
    """Public images (n, C, H, W) in pixels.

    Raises:
        ValueError: there are too few.
    """
    check_images(known.shape)
    return known.enough(LEAST).x


@dataclass(frozen=True)
class optimised_features(ServerAttack):
    """Makes every layer before the classifier keep the principal components of its input.

    zero: send a classifier of zeros, which separates batches.
    """

    zero: bool = False

    def craft(self, sent: Params, known: Knowledge, rng: Generator, seen: Sequence[Observation] = ()) -> Params:
        made = principal_layers(classifier(known.model, known.shape), sent, known)
        return with_zero_classifier(made, known, self.zero)


def principal_layers(end: str, sent: Params, known: Knowledge) -> dict[str, Tensor]:
    """The weights, in which every layer before the layer `end` keeps the principal components of its input."""
    public, made = public_images(known)[:FITTED], dict(sent)
    leaves = [(name, m) for name, m in known.model.named_modules() if not list(m.children())]
    before = [name for name, _ in leaves].index(end)
    layers = [i for i, (_, m) in enumerate(leaves[:before]) if isinstance(m, nn.Linear) or _plain(m)]
    if not layers:
        raise ValueError(f"no layer before {end!r} can be optimised")
    for i in layers:
        name, layer = leaves[i]
        inputs = layer_input(known, made, name, public)
        made |= _components(name, layer, inputs, made, leaves[i + 1 : before][:3])
    return made


def _plain(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv2d) or isinstance(module.padding, str):
        return False
    return module.groups == 1 and module.dilation == (1, 1)


def _windows(conv: nn.Conv2d, pool: nn.AvgPool2d | None) -> tuple[slice, slice]:
    """The part of a kernel that keeps components: as long as the stride, starting at the image's edge; pooled, all of it."""
    if pool is not None:
        return slice(None), slice(None)
    found = []
    for kernel, step, padding in zip(conv.kernel_size, conv.stride, conv.padding, strict=True):
        assert isinstance(padding, int)
        size = min(step, kernel)
        start = min(padding, kernel - size)
        found.append(slice(start, start + size))
    return found[0], found[1]


def _tiles(layer: nn.Module, inputs: Tensor, pool: nn.AvgPool2d | None) -> Tensor:
    """Return the inputs (n, d) float64, as far as a layer's outputs preserve them."""
    if not isinstance(layer, nn.Conv2d):
        return inputs.flatten(0, -2).double()
    assert not isinstance(layer.padding, str)
    patches = F.unfold(inputs, layer.kernel_size, padding=layer.padding, stride=layer.stride)
    if pool is not None:
        width = (inputs.shape[-1] + 2 * layer.padding[1] - layer.kernel_size[1]) // layer.stride[1] + 1
        patches = pool(patches.unflatten(2, (-1, width))).flatten(2)
    whole = patches.transpose(1, 2).reshape(-1, inputs.shape[1], *layer.kernel_size)
    return whole[:, :, *_windows(layer, pool)].flatten(1).double()


def _components(
    name: str, layer: nn.Module, inputs: Tensor, sent: Params, behind: Sequence[tuple[str, nn.Module]]
) -> dict[str, Tensor]:
    """The layer's new parameters, and those that make a BatchNorm behind it the identity."""
    pool = next((m for _, m in behind if isinstance(m, nn.Conv2d | nn.Linear | nn.AvgPool2d)), None)
    pool = pool if isinstance(pool, nn.AvgPool2d) else None  # none behind another layer is this one's
    tiles = _tiles(layer, inputs, pool)
    weight, middle = sent[f"{name}.weight"].clone(), tiles.mean(0)
    axes, largest = _principal(tiles - middle)
    kept, activation = min(len(weight), len(axes)), [m for _, m in behind if not isinstance(m, nn.BatchNorm2d)][:1]
    # the offset of a ReLU's inputs, in standard deviations of the first component
    shift = 3.0 if activation and isinstance(activation[0], nn.ReLU) else 0.0
    rows = axes[:kept] / max(largest, TINY)
    if isinstance(layer, nn.Conv2d):
        weight[:kept] = 0
        part = weight[:kept, :, *_windows(layer, pool)]
        part.copy_(rows.view(part.shape).to(weight))
    else:
        weight[:kept] = rows.to(weight)
    offset = shift - rows @ middle
    made = {f"{name}.weight": weight}
    if f"{name}.bias" in sent:
        made[f"{name}.bias"] = sent[f"{name}.bias"].clone()
        made[f"{name}.bias"][:kept] = offset.to(weight)
        offset = torch.zeros_like(offset)
    for norm_name, norm in behind[:1]:
        if isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None and norm.running_var is not None:
            made[f"{norm_name}.weight"] = (norm.running_var + norm.eps).sqrt()
            made[f"{norm_name}.bias"] = norm.running_mean.clone()
            made[f"{norm_name}.bias"][:kept] += offset.to(weight)
    return made


def _principal(centred: Tensor) -> tuple[Tensor, float]:
    """Principal directions (r, d) of points (n, d), the largest variance first, and the standard deviation along the first."""
    if len(centred) < centred.shape[1]:
        _, values, axes = torch.linalg.svd(centred, full_matrices=False)
        return axes, float(values[0]) / len(centred) ** 0.5
    variances, axes = torch.linalg.eigh(centred.T @ centred / len(centred))
    return axes.T.flip(0), float(variances[-1].clamp(min=0).sqrt())


@dataclass(frozen=True)
class read_features(ClosedForm):
    """Estimates images linearly from the classifier's inputs: one example, or a batch if the classifier is zero.

    For examples that share a label it gives their mean. Nothing is proven exact.
    """

    def reader(self, wave: Wave, known: Knowledge) -> Reader:
        public = public_images(known)
        check_readable(known, wave.params)
        h = layer_input(known, wave.params, classifier(known.model, known.shape), public).flatten(1)
        fit = LinearEstimate.fitted(h, public, RIDGE)
        return partial(_read, fit)


def _read(fit: LinearEstimate, alone: Wave, known: Knowledge) -> Reconstruction:
    update, params = alone.alone(0), alone.params
    decoded = ClassifierInputs.from_update(update, params, known)
    noise = known.chain.update_distribution
    variance = noise.variance if noise else 0.0
    on_inputs = variance * decoded.gain.square()
    if known.batch_size == 1:  # the bias gradient that divides is noisy, too: part of its length is noise
        on_inputs = on_inputs / (1 - known.classes * on_inputs).clamp(min=TINY)
    x = fit(decoded.inputs, on_inputs).clamp(0, 1).float().view(-1, *known.shape)
    off = relative_error(known.forward(params, Batch(x, decoded.y), None), update)
    return Reconstruction(x, decoded.y, off, 1, 0.0, "converged", "")
