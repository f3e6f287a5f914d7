"""Imprinting: as many images are read as are alone in their bin, which theory says on paper, and what is called exact is."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.malicious.decoding import LayerRows, on_grid, snap_to_grid
from fedgauge.attacks.malicious.imprint import STRENGTH, SortingBlock, imprint, imprint_block, read_imprint
from fedgauge.client.chain import Chain, chain
from fedgauge.client.label_kinds import Numbers
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.columns import Column, Columns
from fedgauge.client.models.losses import mean_squared_error
from fedgauge.client.models.vision import lenet, mlp
from fedgauge.client.transforms import per_example
from fedgauge.client.update import Batch, Params
from fedgauge.defenses.clip import clip
from fedgauge.defenses.noise import gaussian
from tests.attacks.malicious.served import answer, check_refused, check_silent, craft, proven, read
from tests.attacks.refusals import check_named

SHAPE, CLASSES = (1, 6, 6), 5
MEAN, STD = (0.4,), (0.3,)


def pictures(seed: int, n: int) -> Tensor:
    """8-bit images, each with a brightness and a contrast of its own."""
    rng = torch.Generator().manual_seed(seed)
    middle, reach = torch.rand(n, 1, 1, 1, generator=rng), torch.rand(n, 1, 1, 1, generator=rng)
    return (255 * (middle + 0.5 * reach * torch.randn(n, *SHAPE, generator=rng)).clamp(0, 1)).round() / 255


def examples(seed: int, n: int) -> Batch:
    return Batch(pictures(seed, n), torch.randint(CLASSES, (n,), generator=torch.Generator().manual_seed(seed)))


@lru_cache
def shown(n: int) -> Batch:
    """The public images."""
    return examples(10**6, n)


def network(bins: int, seed: int = 0) -> SortingBlock:
    torch.manual_seed(seed)
    return imprint_block(mlp(SHAPE, CLASSES, hidden=[20]), SHAPE, bins)


def knowledge(model: nn.Module, size: int, public: int = 2000, links: Chain | None = None) -> Knowledge:
    return Knowledge(model, links or chain(local_sgd(0.1)), SHAPE, CLASSES, size, MEAN, STD, auxiliary=shown(public))


def crafted(known: Knowledge, bins: int, seed: int = 0) -> Params:
    return craft(imprint(bins), known, seed)


def bins_of(params: Params, x: Tensor) -> Tensor:
    """Which bin each image falls in: rows that are on, by the weights as they were sent, in float64."""
    fed = ((x.double() - MEAN[0]) / STD[0]).flatten(1)
    rows: Tensor = (fed @ params["query.weight"].double().T + params["query.bias"].double() > 0).sum(1)
    return rows


def signals(known: Knowledge, params: Params, batch: Batch) -> Tensor:
    """Each image's error signal (B,) when it is the whole batch: what it adds to the bias gradient of every row it turns on."""
    alone = [answer(known, params, Batch(batch.x[i : i + 1], batch.y[i : i + 1])) for i in range(len(batch.x))]
    return torch.stack([LayerRows.of(update, "query").bias[0] for update in alone])  # every image turns on row 0


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 12), bins=st.integers(1, 24))
@example(seed=3199, size=12, bins=4)  # no image is alone, and of two in a bin one signal is 400 times the other
def test_proven_are_the_images_alone_in_their_bins(seed: int, size: int, bins: int) -> None:
    """And those whose bin holds only images beside them that are too weak to change a grey value."""
    known, batch = knowledge(network(bins, seed), size), examples(seed, size)
    params = crafted(known, bins, seed)
    update = answer(known, params, batch)
    found = read(read_imprint(), known, params, update)
    bin_of_each = bins_of(params, batch.x)
    assert int(bin_of_each.min()) > 0, "below the lowest threshold there is no image"
    assert found.x is not None and found.status == "converged"
    signal = signals(known, params, batch)
    # rounding may spoil weaker signals
    strong = signal.abs() > 0.01 * size * LayerRows.of(update, "query").bias.abs().max()
    alone = alone_and_strong = dominated = 0
    for inside in ((bin_of_each == k).nonzero().flatten() for k in bin_of_each.unique()):
        if len(inside) == 1:
            alone += 1
            alone_and_strong += int(strong[inside[0]])
            continue
        mixture = torch.tensordot(signal[inside] / signal[inside].sum(), batch.x[inside].double(), 1)
        dominated += bool((255 * (batch.x[inside] - mixture).abs().flatten(1).amax(1) < 0.5).any())
    assert alone_and_strong <= proven(found) <= alone + dominated
    for x in found.x[: proven(found)]:
        assert bool((batch.x == x).flatten(1).all(1).any()), "what is proven is the image to the bit"


@pytest.mark.parametrize(("bins", "size"), [(16, 8), (32, 32)])
def test_one_of_n_images_is_alone_in_its_bin_as_theory_has_it(bins: int, size: int) -> None:
    known, batches = knowledge(network(bins), size), 600 // size
    alone = 0
    for k in range(batches):
        batch, params = examples(k, size), crafted(known, bins, k)
        alone += proven(read(read_imprint(), known, params, answer(known, params, batch)))
    rate, n = (1 - 1 / bins) ** (size - 1), batches * size
    assert abs(alone / n - rate) < 4 * (rate * (1 - rate) / n) ** 0.5


@pytest.mark.parametrize("public", [50, 2000])
def test_a_black_image_turns_on_the_first_row_alone_and_is_read(public: int) -> None:
    known = knowledge(network(16), 2, public)
    params = crafted(known, 16)
    batch = Batch(torch.stack([torch.zeros(SHAPE), torch.ones(SHAPE)]), torch.tensor([0, 1]))
    assert bins_of(params, batch.x).tolist() == [1, 16]
    assert proven(read(read_imprint(), known, params, answer(known, params, batch))) == 2


def test_images_of_one_bin_are_read_as_their_mixture_and_not_as_exact() -> None:
    known, batch = knowledge(network(1), 2), examples(3, 2)
    params = crafted(known, 1)
    update = answer(known, params, batch)
    found = read(read_imprint(), known, params, update)
    assert proven(found) == 0 and found.x is not None and found.x.shape == (2, *SHAPE)
    (mixture,) = LayerRows.of(update, "query").differences().images(known).double()
    a, b = batch.x.double()
    share = float(((mixture - a) * (b - a)).sum() / (b - a).square().sum())
    assert torch.allclose(mixture, a + share * (b - a), atol=1e-4)


def test_it_lasts_through_local_steps_and_clipping_of_each_example() -> None:
    batch = examples(5, 6)
    for links in (chain(local_sgd(0.01, steps=3)), chain(per_example(clip(0.1)), local_sgd(0.1))):
        known = knowledge(network(64), 6, links=links)
        params = crafted(known, 64)
        expected = int((torch.bincount(bins_of(params, batch.x)) == 1).sum())
        assert proven(read(read_imprint(), known, params, answer(known, params, batch))) == expected >= 4


def test_noise_leaves_nothing_that_is_called_exact() -> None:
    known = knowledge(network(32), 4, links=chain(local_sgd(0.1), gaussian(1e-2)))
    params = crafted(known, 32)
    found = read(read_imprint(), known, params, answer(known, params, examples(1, 4)))
    assert found.x is not None and found.x.shape == (4, *SHAPE) and proven(found) == 0


def test_the_block_is_nothing_before_it_is_crafted_and_next_to_nothing_after() -> None:
    plain = lenet(SHAPE, CLASSES)
    model, x = imprint_block(plain, SHAPE, 64), (pictures(0, 50) - MEAN[0]) / STD[0]
    assert torch.equal(model(x), plain(x))
    seen: list[Tensor] = []
    plain.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model.load_state_dict(crafted(knowledge(model, 1), 64), strict=False)
    with torch.no_grad():
        model(x)
    moved = (seen[0] - x).abs()
    assert 0 < float(moved.max()) < 6 * STRENGTH
    assert torch.allclose(moved, moved.flatten(1).mean(1)[:, None, None, None].expand_as(moved), atol=1e-5)


def test_invalid_arguments_are_refused() -> None:
    blind = replace(of_rows(16, 4, chain(local_sgd(0.01))), auxiliary=None)
    check_named("bins", lambda: imprint(0))
    check_named("images", lambda: imprint_block(mlp(SHAPE, 2), (2, 8), 4))
    check_named("bins", lambda: crafted(knowledge(network(8), 1), 4))
    check_named("auxiliary", lambda: craft(imprint(16), blind))
    check_refused(imprint(4), read_imprint(), knowledge(mlp(SHAPE, CLASSES), 1))
    known = knowledge(network(8), 2)
    check_silent(read_imprint(), known, crafted(known, 8))


@given(seed=st.integers(0, 10**6), share=st.floats(0.05, 0.95))
def test_the_grid_knows_images_from_mixtures(seed: int, share: float) -> None:
    x = torch.randint(1, 255, (2, 3, 8, 8), generator=torch.Generator().manual_seed(seed)).double() / 255
    noise = 1e-4 * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
    assert bool(on_grid(x).all()) and bool(on_grid(x + noise).all())
    assert torch.equal(snap_to_grid(x + noise), x.float())
    assert not bool(on_grid(share * x[:1] + (1 - share) * x[1:]).any())
    assert not bool(on_grid(x + 1).any()), "out of range"


ROWS = Columns(
    (Column("age", mean=40.0, std=15.0), Column("trade", ("a", "b", "c")), Column("hours", mean=30.0, std=9.0))
)


def table(seed: int, n: int) -> Batch:
    """Rows with a whole age and whole hours."""
    rng = torch.Generator().manual_seed(seed)
    cells = [
        torch.randint(16, 90, (n,), generator=rng),
        torch.randint(3, (n,), generator=rng),
        torch.randint(1, 60, (n,), generator=rng),
    ]
    return Batch(ROWS.rows(torch.stack(cells, 1).double()), torch.randint(2, (n,), generator=rng))


def of_rows(bins: int, size: int, links: Chain | None = None, seed: int = 0) -> Knowledge:
    torch.manual_seed(seed)
    model = imprint_block(mlp((ROWS.entries,), 2, hidden=[20]), (ROWS.entries,), bins)
    links = links or chain(local_sgd(0.1))
    return Knowledge(model, links, (ROWS.entries,), 2, size, (), (), auxiliary=table(10**6, 500), columns=ROWS)


def test_rows_alone_in_their_bins_are_proven_and_no_others() -> None:
    """Of 16 rows in 64 bins (1 - 1/64)^15 = 79 % are alone, and of any in one bin the mean is not taken for a row."""
    alone = proved = 0
    for k in range(20):
        known, batch = of_rows(64, 16, seed=k), table(k, 16)
        params = craft(imprint(64), known, k)
        found = read(read_imprint(), known, params, answer(known, params, batch))
        bin_of_each = (batch.x.double() @ params["query.weight"].double().T + params["query.bias"].double() > 0).sum(1)
        assert int(bin_of_each.min()) > 0, "below the lowest threshold there is no row"
        alone += int((bin_of_each.bincount() == 1).sum())
        assert found.x is not None and found.x.shape == batch.x.shape
        for x in found.x[: proven(found)]:
            assert float((batch.x - x).abs().amax(1).min()) < 1e-2, "what is proven is a row of the batch"
        proved += proven(found)
    rate = (1 - 1 / 64) ** 15
    assert abs(alone / 320 - rate) < 4 * (rate * (1 - rate) / 320) ** 0.5
    assert 0.9 * alone <= proved <= alone


def test_equal_rows_of_one_bin_are_read_and_not_proven() -> None:
    """Their signals add up to twice the row's."""
    known, one = of_rows(8, 2), table(1, 1)
    params = craft(imprint(8), known)
    found = read(read_imprint(), known, params, answer(known, params, Batch(one.x.repeat(2, 1), one.y.repeat(2))))
    assert proven(found) == 0 and found.x is not None
    assert torch.allclose(ROWS.cells(found.x[0]), ROWS.cells(one.x[0]), atol=1e-2)


def test_rows_with_numbers_as_labels_are_read_and_not_proven() -> None:
    """Some number explains any signal of a bin."""
    known, batch, numbers = of_rows(64, 4), table(1, 4), torch.randn(4, generator=torch.Generator().manual_seed(0))
    model = imprint_block(mlp((ROWS.entries,), 1, hidden=[20]), (ROWS.entries,), 64)
    kind, batch = Numbers(torch.randn(50)), Batch(batch.x, numbers)
    known = replace(known, model=model, classes=1, loss=mean_squared_error(), label_kind=kind, labels=numbers[None])
    params = craft(imprint(64), known)
    found = read(read_imprint(), known, params, answer(known, params, batch))
    assert proven(found) == 0 and found.x is not None
    near = (found.x[:, None] - batch.x).abs().amax(2).amin(0)
    assert int((near < 1e-2).sum()) >= 3, "one of four is alone in its bin of 64 with probability .95"


def test_several_steps_prove_no_row() -> None:
    known, batch = of_rows(16, 4, chain(local_sgd(0.01, steps=3))), table(2, 4)
    params = craft(imprint(16), known)
    found = read(read_imprint(), known, params, answer(known, params, batch))
    assert proven(found) == 0 and found.status == "converged"
