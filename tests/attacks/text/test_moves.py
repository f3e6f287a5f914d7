"""Moves of words: different permutations that leave special tokens in place."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgauge.attacks.text.sentence_layout import on_all_positions, propose, shuffles


@given(st.integers(0, 14), st.integers(1, 60), st.integers(0, 2**31))
def test_moves_are_different_permutations_that_begin_with_none(n: int, count: int, seed: int) -> None:
    for draw in (propose, shuffles):
        orders = draw(n, count, torch.Generator().manual_seed(seed))
        assert orders[0].tolist() == list(range(n))
        assert 1 <= len(orders) <= count
        assert all(row.sort().values.tolist() == list(range(n)) for row in orders)
        assert len({tuple(row) for row in orders.tolist()}) == len(orders)


@given(st.lists(st.booleans(), min_size=1, max_size=14), st.integers(0, 2**31))
def test_moves_never_touch_special_tokens(free: list[bool], seed: int) -> None:
    movable = torch.tensor(free).nonzero().flatten()
    orders = on_all_positions(propose(len(movable), 40, torch.Generator().manual_seed(seed)), movable, len(free))
    assert (orders.sort(1).values == torch.arange(len(free))).all()
    fixed = (~torch.tensor(free)).nonzero().flatten()
    assert (orders[:, fixed] == fixed).all()


def test_every_kind_of_move_is_proposed() -> None:
    found = {tuple(row) for row in propose(5, 4000, torch.Generator().manual_seed(0)).tolist()}
    swap, moved, span, prefix = (3, 1, 2, 0, 4), (1, 2, 3, 0, 4), (0, 3, 4, 1, 2), (2, 3, 4, 0, 1)
    assert {swap, moved, span, prefix} <= found
    assert (1, 0, 3, 2, 4) not in found, "two swaps are two moves"
