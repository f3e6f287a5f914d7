"""Seeds: they depend on every part, and are the same on every machine."""

import torch

from fedgauge.client.rng import generator, seed_of


def test_seeds_depend_on_every_part_and_on_their_order() -> None:
    parts: list[tuple[str | int, ...]] = [(1, "a"), ("a", 1), ("1", "a"), (1, "a", 0), (1,), (), (11, "a"), (1, 1, "a")]
    seeds = [seed_of(*p) for p in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= s < 2**63 for s in seeds)


def test_seeds_are_the_same_on_every_machine() -> None:
    # blake2b("(0, 'batch', 1, 2)"), computed by b2sum -l 64
    assert seed_of(0, "batch", 1, 2) == 0x16417D442201E917 >> 1
    assert torch.equal(torch.rand(3, generator=generator(1, "x")), torch.rand(3, generator=generator(1, "x")))
    assert not torch.equal(torch.rand(3, generator=generator(1, "x")), torch.rand(3, generator=generator(2, "x")))
