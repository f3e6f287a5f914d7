"""One small network for every kind of layer, and for every way to use a parameter."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 4
SHAPE = (3, 8, 8)
PIXELS = 192


class Lambda(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def rows(x: Tensor) -> Tensor:
    """An image as a sequence (B, 8, 24) of its rows."""
    return x.transpose(1, 2).flatten(2)


def image(*layers: nn.Module) -> nn.Module:
    """Layers on images, then a classifier; a convolution first, so that gradients pass through them."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *layers, nn.Flatten())
    with torch.no_grad():
        # two examples, since a batch norm in train mode takes no single one
        numbers = net(torch.zeros(2, *SHAPE)).shape[1]
    return nn.Sequential(*net, nn.Linear(numbers, CLASSES))


def flat(*layers: nn.Module) -> nn.Module:
    """Layers on 12 features."""
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 12), *layers, nn.Linear(12, CLASSES))


def sequence(*layers: nn.Module, width: int = 24) -> nn.Module:
    """Layers on rows as a sequence."""
    return nn.Sequential(Lambda(rows), *layers, Lambda(lambda x: x.mean(1)), nn.Linear(width, CLASSES))


class Net(nn.Module):
    """Layers and parameters by name, and a forward pass that is written in some way."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.way = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def recurrent(layer: type[nn.RNNBase], **settings: Any) -> nn.Module:
    """A recurrent layer over an image's rows."""
    own = layer(24, 6, batch_first=True, **settings)
    last = nn.Linear(own(torch.zeros(1, 2, 24))[0].shape[-1], CLASSES)
    return Net(lambda m, x: m.last(m.layer(rows(x))[0][:, -1]), layer=own, last=last)


def cells(cell: type[nn.RNNCellBase]) -> nn.Module:
    """A recurrent cell in a loop of one's own."""

    def forward(m: Any, x: Tensor) -> Tensor:
        state: Any = None
        for row in rows(x).unbind(1):
            state = m.cell(row, state)
        return m.last(state[0] if isinstance(state, tuple) else state)

    return Net(forward, cell=cell(24, 6), last=nn.Linear(6, CLASSES))


def attention(weights: bool) -> nn.Module:
    """`nn.MultiheadAttention`, whose weights are also returned."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.last(m.attention(rows(x), rows(x), rows(x), need_weights=weights)[0].mean(1))

    return Net(forward, attention=nn.MultiheadAttention(24, 2, batch_first=True), last=nn.Linear(24, CLASSES))


def fused(causal: bool) -> nn.Module:
    """`scaled_dot_product_attention` by one's own projections."""

    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 12)).transpose(1, 2) for t in m.qkv(rows(x)).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return m.last(out.transpose(1, 2).flatten(2).mean(1))

    return Net(forward, qkv=nn.Linear(24, 72), last=nn.Linear(24, CLASSES))


def transformer() -> nn.Module:
    """An encoder and a decoder."""
    net = nn.Transformer(24, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    return Net(lambda m, x: m.last(m.net(rows(x), rows(x).flip(1)).mean(1)), net=net, last=nn.Linear(24, CLASSES))


def soft_words(bag: bool) -> nn.Module:
    """Pixels choose among words: an embedding's table read by a product, and an embedding bag by weights of each word."""

    def forward(m: Any, x: Tensor) -> Tensor:
        pixels, every = x.flatten(1), torch.arange(PIXELS).expand(len(x), -1)
        if bag:
            return m.last(m.words(every, per_sample_weights=pixels))
        return m.last((m.words(every) * pixels[..., None]).sum(1))

    words = nn.EmbeddingBag(PIXELS, 6, mode="sum") if bag else nn.Embedding(PIXELS, 6)
    return Net(forward, words=words, last=nn.Linear(6, CLASSES))


def tied() -> nn.Module:
    """An autoencoder's decoder uses the encoder's weight."""
    return Net(
        lambda m, x: m.last(F.linear(torch.tanh(m.encoder(x.flatten(1))), m.encoder.weight.T)),
        encoder=nn.Linear(PIXELS, 8), last=nn.Linear(PIXELS, CLASSES),
    )  # fmt: skip


def used_twice(two_names: bool) -> nn.Module:
    """A layer that is applied twice, perhaps by two names."""
    parts = {"first": nn.Linear(PIXELS, 8), "a": nn.Linear(8, 8), "last": nn.Linear(8, CLASSES)}
    if two_names:
        parts["b"] = parts["a"]
    return Net(lambda m, x: m.last(getattr(m, "b", m.a)(torch.tanh(m.a(torch.tanh(m.first(x.flatten(1))))))), **parts)


def own_parameter() -> nn.Module:
    """A parameter in operators instead of a layer, and an unused one."""
    return Net(
        lambda m, x: m.scale * torch.einsum("bi,ij->bj", x.flatten(1), m.weight),
        weight=nn.Parameter(0.1 * torch.randn(PIXELS, CLASSES)), scale=nn.Parameter(torch.ones(())),
        unused=nn.Parameter(torch.ones(3)),
    )  # fmt: skip


def dict_inside() -> nn.Module:
    """Layers that pass dicts and tuples to each other."""

    def forward(m: Any, x: Tensor) -> Tensor:
        parts = {name: layer(x.flatten(1)) for name, layer in m.layers.items()}
        both = (parts["a"], parts)
        return m.last(torch.cat([both[0].tanh(), both[1]["b"].sigmoid()], 1))

    layers = nn.ModuleDict({"a": nn.Linear(PIXELS, 6), "b": nn.Linear(PIXELS, 6)})
    return Net(forward, layers=layers, last=nn.Linear(12, CLASSES))


def in_place() -> nn.Module:
    """Operators that overwrite their inputs."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.conv(x)
        x *= 2.0
        x.add_(0.1)
        F.leaky_relu(x, 0.1, inplace=True)  # whose result is not taken
        return m.last(x.view(len(x), -1))

    return Net(forward, conv=nn.Conv2d(3, 4, 3), last=nn.Linear(144, CLASSES))


def sampled(x: Tensor) -> Tensor:
    """An image at places of its own."""
    axis = torch.linspace(-0.9, 0.9, 5, dtype=x.dtype)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1).expand(len(x), -1, -1, -1)
    return F.grid_sample(x, grid, align_corners=False)


class OldSquare(torch.autograd.Function):
    """A custom function of the old form, which torch.func refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * g


class NewSquare(torch.autograd.Function):
    """A custom function of the new form."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * g


def branching(x: Tensor) -> Tensor:
    """Control flow that depends on values."""
    return x.tanh() if float(x.detach().mean()) > 1e6 else x.sigmoid()


def squeeze(x: Tensor) -> Tensor:
    """Each channel weighted by a number of its own, as squeeze and excitation do."""
    return x * x.mean((2, 3), keepdim=True).sigmoid()


conv = partial(nn.Conv2d, 4, 4, 3)
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "RNN": partial(recurrent, nn.RNN),
    "RNN with relu": partial(recurrent, nn.RNN, nonlinearity="relu"),
    "GRU": partial(recurrent, nn.GRU),
    "LSTM": partial(recurrent, nn.LSTM),
    "bidirectional GRU of two layers": partial(recurrent, nn.GRU, num_layers=2, bidirectional=True),
    "bidirectional LSTM with projections": partial(recurrent, nn.LSTM, bidirectional=True, proj_size=3),
    "GRU cells": partial(cells, nn.GRUCell),
    "LSTM cells": partial(cells, nn.LSTMCell),
    "RNN cells": partial(cells, nn.RNNCell),
    "1-D convolution": lambda: sequence(nn.Conv1d(8, 8, 3, padding=1), nn.ReLU()),
    "3-D convolution": lambda: nn.Sequential(
        Lambda(lambda x: x[:, None]), nn.Conv3d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, CLASSES)
    ),
    "multi-head attention": partial(attention, False),
    "multi-head attention with weights": partial(attention, True),
    "fused attention": partial(fused, False),
    "fused causal attention": partial(fused, True),
    "transformer encoder layer": lambda: sequence(nn.TransformerEncoderLayer(24, 2, 16, 0.0, batch_first=True)),
    "transformer encoder, norm first, gelu": lambda: sequence(
        nn.TransformerEncoderLayer(24, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True)
    ),
    "transformer": transformer,
    "embedding": partial(soft_words, False),
    "embedding bag": partial(soft_words, True),
    "tied weights": tied,
    "a layer used twice": partial(used_twice, False),
    "a layer with two names": partial(used_twice, True),
    "a parameter of one's own": own_parameter,
    "bilinear": lambda: Net(
        lambda m, x: m.last(m.pair(*x.flatten(1).chunk(2, 1))), pair=nn.Bilinear(96, 96, 3), last=nn.Linear(3, CLASSES)
    ),
    "dicts and tuples inside": dict_inside,
    "grouped convolution": lambda: image(conv(groups=2), nn.ReLU()),
    "depthwise separable convolution": lambda: image(conv(groups=4), nn.Conv2d(4, 6, 1), nn.ReLU6()),
    "dilated convolution": lambda: image(conv(dilation=2), nn.ReLU()),
    "strided convolution": lambda: image(conv(stride=2), nn.ReLU()),
    "reflecting convolution": lambda: image(conv(padding=1, padding_mode="reflect"), nn.ReLU()),
    "same padding": lambda: image(conv(padding="same"), nn.ReLU()),
    "transposed convolution": lambda: image(nn.ConvTranspose2d(4, 4, 3, 2), nn.ReLU()),
    "wide convolution": lambda: image(nn.Conv2d(4, 64, 1), nn.ReLU(), nn.Conv2d(64, 4, 3, padding=1)),
    "upsampling": lambda: image(nn.Upsample(scale_factor=2, mode="bilinear"), conv()),
    "pixel shuffle": lambda: image(nn.PixelShuffle(2), nn.Conv2d(1, 2, 3)),
    "adaptive max pooling": lambda: image(nn.AdaptiveMaxPool2d(3)),
    "average pooling": lambda: image(nn.AvgPool2d(2), nn.Tanh()),
    "power pooling": lambda: image(nn.Softplus(), nn.LPPool2d(2, 2)),
    "grid sampling": lambda: image(Lambda(sampled)),
    "squeeze and excitation": lambda: image(Lambda(squeeze)),
    "channels last": lambda: image(Lambda(lambda x: x.contiguous(memory_format=torch.channels_last)), nn.ReLU()),
    "view after a permutation": lambda: image(Lambda(lambda x: x.permute(0, 2, 3, 1).reshape(len(x), -1)), nn.Tanh()),
    "view after a convolution": lambda: image(Lambda(lambda x: x.view(x.size(0), -1))),
    "in-place operators": in_place,
    "in-place activations": lambda: image(nn.ReLU(True), conv(), nn.ReLU6(True), conv(), nn.ELU(inplace=True)),
    "hard sigmoid": lambda: image(nn.Hardsigmoid()),
    "hard sigmoid in place": lambda: image(nn.Hardsigmoid(inplace=True), conv()),
    "hard swish": lambda: image(nn.Hardswish()),
    "hard swish in place": lambda: image(nn.Hardswish(inplace=True), conv()),
    "hard tanh": lambda: image(nn.Hardtanh()),
    "gelu": lambda: image(nn.GELU()),
    "gelu by tanh": lambda: image(nn.GELU("tanh")),
    "silu": lambda: image(nn.SiLU()),
    "mish": lambda: image(nn.Mish()),
    "prelu": lambda: image(nn.PReLU(4)),
    "selu and celu": lambda: image(nn.SELU(), conv(), nn.CELU()),
    "softplus and log-sigmoid": lambda: image(nn.Softplus(), conv(), nn.LogSigmoid()),
    "shrinking": lambda: image(nn.Softshrink(0.01), conv(), nn.Hardshrink(0.01), conv(), nn.Tanhshrink()),
    "gated linear unit": lambda: image(nn.GLU(1)),
    "softmax inside": lambda: flat(nn.Softmax(1)),
    "maxout": lambda: image(Lambda(lambda x: x.unflatten(1, (2, 2)).amax(1))),
    "weight norm": lambda: flat(nn.utils.parametrizations.weight_norm(nn.Linear(12, 12)), nn.Tanh()),
    "orthogonal weights": lambda: flat(nn.utils.parametrizations.orthogonal(nn.Linear(12, 12)), nn.Tanh()),
    "a custom function of the old form": lambda: flat(Lambda(OldSquare.apply)),
    "a custom function of the new form": lambda: flat(Lambda(NewSquare.apply)),
    "a branch on values": lambda: flat(Lambda(branching)),
    "dropout of probability 0": lambda: flat(nn.Dropout(0.0)),
}


def batch_norm(**settings: Any) -> nn.Module:
    """A batch norm whose statistics are not those of a new one."""
    layer = nn.BatchNorm2d(4, **settings)
    if layer.running_mean is not None and layer.running_var is not None:
        layer.running_mean.add_(0.1)
        layer.running_var.mul_(1.3)
    return layer


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: image(batch_norm(), nn.ReLU()),
    "batch norm without statistics": lambda: image(batch_norm(track_running_stats=False), nn.ReLU()),
    "batch norm without weights": lambda: image(batch_norm(affine=False), nn.ReLU()),
    "batch norm of features": lambda: flat(nn.BatchNorm1d(12), nn.Tanh()),
    "group norm": lambda: image(nn.GroupNorm(2, 4), nn.ReLU()),
    "layer norm": lambda: sequence(nn.LayerNorm(24), nn.Linear(24, 24), nn.GELU()),
    "layer norm without bias": lambda: sequence(nn.LayerNorm(24, bias=False), nn.Linear(24, 24), nn.GELU()),
    "RMS norm": lambda: sequence(nn.RMSNorm(24), nn.Linear(24, 24), nn.GELU()),
    "instance norm": lambda: image(nn.InstanceNorm2d(4), nn.ReLU()),
    "instance norm with weights": lambda: image(nn.InstanceNorm2d(4, affine=True), nn.ReLU()),
    "instance norm with statistics": lambda: image(nn.InstanceNorm2d(4, track_running_stats=True), nn.ReLU()),
    "local response norm": lambda: image(nn.LocalResponseNorm(2), nn.Tanh()),
    "spectral norm": lambda: flat(nn.utils.parametrizations.spectral_norm(nn.Linear(12, 12)), nn.Tanh()),
}
