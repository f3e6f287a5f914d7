"""Claims about SOMP: heads' subspaces rank inputs where these fill the space, and pursuit finds a batch among decoys."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgauge.attacks.base import Budget
from fedgauge.attacks.engine.deadline import Deadline
from fedgauge.attacks.text.certificate import GuessVerifier, Unreadable
from fedgauge.attacks.text.dager import Ids, dager
from fedgauge.attacks.text.somp import Pursuit, head_subspaces, misfit, somp
from fedgauge.client.data.corpora import Text
from fedgauge.client.models.language_parts import BlockParts, Projection
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch
from tests.attacks.text.small_text import batches, bert, certified, gpt2, read, recovered, refused, seen

BLOCK = BlockParts(Projection("q", None), Projection("k", None), Projection("v", None), ())


def sentences(batch: Batch) -> list[Ids]:
    return [tuple(word for word in ids if word) for ids in batch.x.tolist()]


def misfits(inputs: int, width: int, heads: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of the inputs of which a block's gradients are made, and of as many other vectors."""
    rng = generator("heads", seed)
    x, other = torch.randn(2, inputs, width, generator=rng)
    update = {name: torch.randn(width, inputs, generator=rng) @ x for name in "qk"}
    inverse = head_subspaces(update, BLOCK, heads)
    return misfit(x, inverse), misfit(other, inverse)


@given(inputs=st.integers(1, 20), heads=st.sampled_from([1, 2, 4, 8]), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_where_inputs_are_few_all_fit_and_nothing_else_does(inputs: int, heads: int, seed: int) -> None:
    own, other = misfits(inputs, 32, heads, seed)
    assert float(own.max()) < float(other.min()) - 3


def test_where_inputs_fill_the_space_they_still_fit_better_than_others() -> None:
    """No span tells 40 inputs of 32 dimensions from others; the subspaces of 8 heads see more of the inputs on average."""
    pairs = [misfits(40, 32, 8, seed) for seed in range(20)]
    own, other = (torch.stack(some) for some in zip(*pairs, strict=True))
    assert float(own.mean()) < float(other.mean()) - 2 * float(own.mean(1).std() / 20**0.5)


@pytest.mark.parametrize(("seed", "size"), [(0, 1), (1, 2), (2, 4)])
def test_pursuit_finds_the_batch_among_decoys_with_equal_coefficients(spoken: Text, seed: int, size: int) -> None:
    torch.manual_seed(seed)
    rows = torch.randperm(len(spoken.x), generator=generator("rows", seed))[: size + 20]
    every = sentences(Batch(spoken.x[rows], spoken.y[rows]))
    truth = Batch(spoken.x[rows[:size]], spoken.y[rows[:size]])
    wave, known = seen(gpt2(spoken), [truth])
    pursuit = Pursuit(GuessVerifier(wave, known), {ids[:-1]: 0.0 for ids in every}, Deadline())
    pursuit.choose(size)
    assert pursuit._updates.keys() == set(pursuit.chosen), "an update is as large as the network"
    while pursuit.exchange():
        assert len(pursuit._updates) <= size + 2
    assert sorted(pursuit.chosen) == sorted(sentences(truth))
    torch.testing.assert_close(pursuit.coefficients, torch.full((size,), 1 / size).double(), atol=1e-4, rtol=0)


@pytest.mark.full
def test_a_batch_whose_tokens_leave_dager_no_margin_comes_back_with_its_proof(spoken: Text) -> None:
    truth = batches(spoken, 4, 8)[1:2]
    wave, known = seen(gpt2(spoken), truth)
    assert refused(read(dager(), wave, known), "margin")
    found = read(somp(), wave, known, Budget(6))
    assert recovered(found, truth) == [True] and certified(found)


def test_unreadable_input_is_refused(spoken: Text, classified: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(read(somp(), *seen(bert(classified), batches(classified, 1, 1))), "decoders")
    wave, known = seen(gpt2(spoken), batches(spoken, 2, 1)[:1])
    monkeypatch.setattr("fedgauge.attacks.text.somp.MOST_NUMBERS", 1000)
    assert refused(read(somp(), wave, known), "dager")
    with pytest.raises(Unreadable):
        head_subspaces({"q": torch.zeros(8, 8)}, BLOCK, 2)
