"""Recurrent layers as fully connected ones, step by step: their gradients are known, and vmap accepts them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

States = tuple[Tensor, ...]


def _gru(x: Tensor, states: States, w: Sequence[Tensor]) -> States:
    (h,) = states
    (r, z, n), (hr, hz, hn) = x.chunk(3, -1), F.linear(h, *w).chunk(3, -1)
    z = (z + hz).sigmoid()
    return ((1 - z) * (n + (r + hr).sigmoid() * hn).tanh() + z * h,)


def _lstm(x: Tensor, states: States, w: Sequence[Tensor]) -> States:
    h, c = states
    i, f, g, o = (x + F.linear(h, *w)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _rnn(x: Tensor, states: States, w: Sequence[Tensor], activation: Callable[[Tensor], Tensor]) -> States:
    return (activation(x + F.linear(states[0], *w)),)


_CELLS: Mapping[Any, Callable[..., States]] = {
    torch.gru: _gru,
    torch.lstm: _lstm,
    torch.rnn_tanh: partial(_rnn, activation=torch.tanh),
    torch.rnn_relu: partial(_rnn, activation=torch.relu),
}


def stepwise(function: Any, given: Sequence[Any]) -> Callable[..., Any] | None:
    """A recurrent layer by its cell; None for other functions, packed sequences and projections."""
    if function not in _CELLS or len(given) != 9 or not isinstance(given[2], list):
        return None
    states = given[1][0] if isinstance(given[1], tuple | list) else given[1]
    return partial(_layer, _CELLS[function]) if len(given[2]) == (4 if given[3] else 2) * len(states) else None


def _layer(
    cell: Callable[..., States],
    x: Tensor,
    first: Any,
    weights: Sequence[Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    train: bool,
    both: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    given = list(first) if isinstance(first, tuple | list) else [first]
    each, sides, along = 4 if biased else 2, 2 if both else 1, x.dim() - 2
    turned = along == 1 and not batch_first
    x, last = x.transpose(0, 1) if turned else x, list[States]()
    for i in range(layers):
        outs = []
        for k in range(sides * i, sides * (i + 1)):
            own, backwards = weights[each * k : each * (k + 1)], both and k % 2 == 1
            steps = F.linear(x, own[0], *own[2:3]).unbind(along)
            states, made = tuple(s[k] for s in given), list[Tensor]()
            for step in reversed(steps) if backwards else steps:
                states = cell(step, states, own[1::2])
                made.append(states[0])
            last.append(states)
            outs.append(torch.stack(made[::-1] if backwards else made, along))
        x = torch.cat(outs, -1)
        x = F.dropout(x, dropout) if dropout and train and i < layers - 1 else x
    return x.transpose(0, 1) if turned else x, *(torch.stack(parts) for parts in zip(*last, strict=True))
