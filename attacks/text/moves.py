"""Moves: other orders of a sentence's words, to be scored by a language model and the update (LAMP, section 3.3)."""

import torch
from torch import Generator, Tensor

KINDS = 4


def propose(n: int, count: int, rng: Generator) -> Tensor:
    """Different orders (N, n) int64 of n words, N <= count, the present order first.

    By turns: swap two words, move one, move a span of them, move a prefix behind the rest.

    >>> propose(1, 5, torch.Generator()).tolist()
    [[0]]
    """
    orders = {tuple(range(n)): None}
    for i in range(count - 1 if n > 1 else 0):
        orders.setdefault(tuple(_moved(n, i % KINDS, rng)))
    return torch.tensor(list(orders), dtype=torch.int64).view(len(orders), n)


def shuffles(n: int, count: int, rng: Generator) -> Tensor:
    """Random orders (N, n) of n words, N <= count, the present order first."""
    drawn = [tuple(torch.randperm(n, generator=rng).tolist()) for _ in range(count - 1 if n > 1 else 0)]
    orders = list(dict.fromkeys([tuple(range(n)), *drawn]))
    return torch.tensor(orders, dtype=torch.int64).view(len(orders), n)


def on_all_positions(orders: Tensor, movable: Tensor, length: int) -> Tensor:
    """Orders (N, n) of the movable positions (n,) as orders (N, length) of all positions.

    The other positions, special tokens and padding, stay.

    >>> on_all_positions(torch.tensor([[1, 0]]), torch.tensor([1, 2]), 4).tolist()
    [[0, 2, 1, 3]]
    """
    whole = torch.arange(length, device=movable.device).repeat(len(orders), 1)
    whole[:, movable] = movable[orders.to(movable.device)]
    return whole


def _moved(n: int, kind: int, rng: Generator) -> list[int]:
    order = list(range(n))
    if kind == 0:
        i, j = _drawn(n, rng), _drawn(n, rng)
        order[i], order[j] = order[j], order[i]
        return order
    if kind == 3:
        cut = 1 + _drawn(n - 1, rng)
        return order[cut:] + order[:cut]
    first = _drawn(n, rng)
    last = first + 1 if kind == 1 else first + 1 + _drawn(n - first, rng)
    span, rest = order[first:last], order[:first] + order[last:]
    place = _drawn(len(rest) + 1, rng)
    return rest[:place] + span + rest[place:]


def _drawn(below: int, rng: Generator) -> int:
    return int(torch.randint(below, (1,), generator=rng))
