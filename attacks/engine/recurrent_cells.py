"""Recurrent layers as loops over their cells' formulas, since torch's fused ones lack a second derivative or a rule for vmap."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

State = tuple[Tensor, ...]  # (hidden,), or (hidden, cell)
Cell = Callable[[Tensor, Tensor, State], State]  # products with input and hidden weights (B, gates), state -> new state


def _simple(activation: Callable[[Tensor], Tensor], by_input: Tensor, by_hidden: Tensor, state: State) -> State:
    return (activation(by_input + by_hidden),)


def _gru(by_input: Tensor, by_hidden: Tensor, state: State) -> State:
    (r, z, n), (hr, hz, hn) = by_input.chunk(3, -1), by_hidden.chunk(3, -1)
    kept = torch.sigmoid(z + hz)
    return ((1 - kept) * torch.tanh(n + torch.sigmoid(r + hr) * hn) + kept * state[0],)


def _lstm(by_input: Tensor, by_hidden: Tensor, state: State) -> State:
    i, f, g, o = (by_input + by_hidden).chunk(4, -1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _layer(cell: Cell, original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """`torch.lstm`, `torch.gru` and so on, of padded sequences without dropout; anything else by the original."""
    if named or len(arguments) != 9 or isinstance(arguments[2], Tensor):
        return original(*arguments, **named)
    x, start, weights, biased, layers, dropout, training, both, batch_first = arguments
    if dropout and training:
        return original(*arguments)
    starts = start if isinstance(start, list | tuple) else (start,)
    x = x.transpose(0, 1) if batch_first else x
    own = len(weights) // (layers * (1 + both))
    parts = [weights[i : i + own] for i in range(0, len(weights), own)]
    ends: list[State] = []
    for _ in range(layers):
        sides = []
        for side in range(1 + both):
            place = len(ends)
            out, end = _passed(cell, x.flip(0) if side else x, tuple(s[place] for s in starts), parts[place], biased)
            sides.append(out.flip(0) if side else out)
            ends.append(end)
        x = torch.cat(sides, -1) if both else sides[0]
    last = tuple(torch.stack(same) for same in zip(*ends, strict=True))
    return (x.transpose(0, 1) if batch_first else x, *last)


def _passed(cell: Cell, x: Tensor, state: State, weights: Sequence[Tensor], biased: bool) -> tuple[Tensor, State]:
    """Outputs (L, B, hidden) of one direction of one layer, and its last state."""
    by_input, by_hidden = weights[:2]
    biases = weights[2:4] if biased else (None, None)
    projection = weights[4 if biased else 2 :]
    outs = []
    for step in F.linear(x, by_input, biases[0]).unbind(0):
        state = cell(step, F.linear(state[0], by_hidden, biases[1]), state)
        if projection:
            state = (F.linear(state[0], projection[0]), *state[1:])
        outs.append(state[0])
    return torch.stack(outs), state


RECURRENT: dict[Any, Callable[..., Any]] = {
    torch.rnn_tanh: partial(_layer, partial(_simple, torch.tanh), torch.rnn_tanh),
    torch.rnn_relu: partial(_layer, partial(_simple, torch.relu), torch.rnn_relu),
    torch.gru: partial(_layer, _gru, torch.gru),
    torch.lstm: partial(_layer, _lstm, torch.lstm),
}
