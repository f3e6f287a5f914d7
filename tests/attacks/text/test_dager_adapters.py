"""Claims about DAGER through LoRA's factors: what each factor's gradient spans, when it suffices, and what is said when not."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from fedgauge.attacks.base import Reconstruction
from fedgauge.attacks.text.certificate import Unreadable
from fedgauge.attacks.text.dager import dager
from fedgauge.attacks.text.gradient_spans import SAME, PartialSpan, Spans, block_span
from fedgauge.client.chain import Chain
from fedgauge.client.data.corpora import Text
from fedgauge.client.gradient import gradient
from fedgauge.client.models.adapters import lora
from fedgauge.client.models.language import LanguageModel, transformer3
from fedgauge.client.models.language_parts import Projection
from fedgauge.client.models.vision import detached_params
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, Params
from tests.attacks.text import small_text
from tests.attacks.text.small_text import SGD, batches, certified, gpt2, loss_of, read, refused, seen

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="the extra [adapters] is not installed")
Make = Callable[[Text], LanguageModel]
Seen = tuple[dict[str, Tensor], Params, list[Projection]]
SEEN = ["query", "value"]


def adapted(model: LanguageModel, rank: int, modules: Sequence[str] = SEEN, train: Sequence[str] = ()) -> LanguageModel:
    made = lora(model, rank, modules, train=train)
    assert isinstance(made, LanguageModel)
    return made


def bert(data: Text, rank: int, modules: Sequence[str] = SEEN, layers: int = 2) -> LanguageModel:
    return adapted(small_text.bert(data, layers=layers), rank, modules, ["classifier"])


def attacked(model: LanguageModel, data: Text, truth: list[Batch], rounds: int) -> list[Reconstruction]:
    """What DAGER answers to the updates of the last of some rounds of a federation of four other clients."""
    client, params = Chain((SGD,))(gradient(model, loss_of(model))), detached_params(model)
    for batch in batches(data, rounds, 4)[1:]:
        update = client(params, batch, generator("other"))
        params = {name: t + update[name] for name, t in params.items()}
    return read(dager(), *seen(model, truth, params=params))


def exact(found: list[Reconstruction], truth: list[Batch]) -> list[bool]:
    return [f.x is not None and sorted(f.x.tolist()) == sorted(t.x.tolist()) for f, t in zip(found, truth, strict=True)]


def inputs_of(batch: Batch) -> int:
    """Different words in their positions, as the first block sees them."""
    return len({(word, place) for row in batch.x.tolist() for place, word in enumerate(row) if word})


# ------------------------------------------------------------------------------------------------------- spans on paper


def seen_through(inputs: Tensor, factors: Sequence[Tensor], slopes: Sequence[Tensor], bs: Sequence[Tensor]) -> Seen:
    """The gradients of LoRA's factors for inputs (T, d), output gradients (T, out) and factors A (r, d), B (out, r)."""
    update, params = {}, {}
    for i, (a, b, s) in enumerate(zip(factors, bs, slopes, strict=True)):
        params |= {f"a{i}": a, f"b{i}": b}
        update |= {f"a{i}": (s @ b).T @ inputs, f"b{i}": s.T @ (inputs @ a.T)}
    return update, params, [Projection(f"w{i}", None, factors=(f"a{i}", f"b{i}")) for i in range(len(factors))]


def drawn(
    count: int, rank: int, maps: int, trained: bool, width: int = 64, scales: Sequence[float] = (1.0,)
) -> tuple[Tensor, Seen]:
    rng = generator("drawn", count, rank)
    inputs = torch.randn(count, width, generator=rng)
    factors = [torch.randn(rank, width, generator=rng) for _ in range(maps)]
    slopes = [torch.randn(count, width, generator=rng) * torch.tensor(scales)[:, None] for _ in range(maps)]
    bs = [torch.randn(width, rank, generator=rng) * trained for _ in range(maps)]
    return inputs, seen_through(inputs, factors, slopes, bs)


@pytest.mark.parametrize(
    ("count", "trained", "kind"),
    [
        (7, False, Spans),
        (8, False, None),
        (15, True, Spans),
        (16, True, PartialSpan),
        (30, True, PartialSpan),
    ],
)
def test_the_rank_decides_what_two_factors_of_rank_8_tell(count: int, trained: bool, kind: type | None) -> None:
    """On paper: at B = 0 fewer than 8 inputs show in A x; with B, 2 x 8 combinations span fewer than 16 inputs."""
    inputs, (update, params, maps) = drawn(count, 8, 2, trained)
    if kind is None:
        with pytest.raises(Unreadable):
            block_span(update, params, maps, 60, 20, generator("span"))
        return
    found = block_span(update, params, maps, 60, 20, generator("span"))
    assert isinstance(found, kind)
    if isinstance(found, PartialSpan):
        assert len(found.rows) == 16
        return
    assert isinstance(found, Spans) and {len(view.basis) for view in found.views} == {count}
    assert float(found.distance(inputs).max()) <= found.threshold
    assert bool(found.near(inputs).all())
    others = torch.randn(200, 64, generator=generator("others"))
    assert float(found.distance(others).min()) > found.threshold


@pytest.mark.parametrize("count", [16, 18, 24, 30])
def test_more_inputs_than_combinations_are_the_fewest_vectors_that_explain_them(count: int) -> None:
    """Of 500 others none is in the span that is completed; without one of the inputs there is no explanation."""
    inputs, (update, params, maps) = drawn(count, 8, 2, True)
    found = block_span(update, params, maps, 60, 20, generator("span"))
    assert isinstance(found, PartialSpan)
    others = torch.randn(500, 64, generator=generator("pool"))
    pool = torch.nn.functional.normalize(torch.cat([inputs, others]).double(), dim=1)
    basis = found.completed(pool, torch.eye(64, dtype=torch.float64))
    assert basis is not None and len(basis) == count
    outside = (pool - pool @ basis.mT @ basis).norm(dim=1)
    assert (outside <= SAME).nonzero()[:, 0].tolist() == list(range(count))
    lacks_one = torch.cat([pool[: count // 2], pool[count // 2 + 1 :]])
    assert found.completed(lacks_one, torch.eye(64, dtype=torch.float64)) is None


def test_a_span_with_as_many_dimensions_as_there_can_be_inputs_lacks_none() -> None:
    """One input matters 2e-5 of the others: others may be as faint where more are possible, so only A x is trusted there."""
    inputs, (update, params, maps) = drawn(4, 16, 1, True, scales=[1, 1, 1, 2e-5])
    for most, whole in ((4, True), (8, False)):
        found = block_span(update, params, maps, most, 20, generator("span"))
        assert isinstance(found, Spans) and [view.through is None for view in found.views] == [whole]
        assert float(found.distance(inputs).max()) <= found.threshold


# ------------------------------------------------------------------------------------------------------ reconstruction


@pytest.mark.parametrize("layers", [2, 3])
def test_sentences_shorter_than_the_rank_come_back_in_the_first_round(layers: int, classified: Text) -> None:
    truth = batches(classified, 3, 1)
    assert max(map(inputs_of, truth)) < 16
    found = attacked(bert(classified, 16, layers=layers), classified, truth, 1)
    assert exact(found, truth) == [True] * 3 and certified(found)


@pytest.mark.parametrize("words", [range(4, 8), range(6, 7)], ids=["span", "completed span"])
def test_as_many_words_as_the_rank_hide_each_other_in_the_first_round_alone(words: range, classified: Text) -> None:
    """Any word fits where A shows all of its dimensions; one round later B is not zero, and the same sentences come back.

    It then has hardly more than one direction: two factors of rank 4 span less than six words, and the vocabulary completes them.
    """
    truth = [b for b in batches(classified, 12, 1) if inputs_of(b) in words][:2]
    assert refused(attacked(bert(classified, 4), classified, truth, 1), "all 4 dimensions")
    later = attacked(bert(classified, 4), classified, truth, 2)
    right = exact(later, truth)
    assert any(right)
    # rounding decides whether a span that lacks most of its directions is completed; none is completed wrongly
    assert all(
        ok if f.status == "converged" else f.status == "not_applicable" for ok, f in zip(right, later, strict=True)
    )


def test_pairs_come_back_once_the_factors_span_their_inputs(classified: Text) -> None:
    truth = batches(classified, 2, 2)
    model = bert(classified, 32, ["query", "key", "value"])
    for rounds in (1, 3):
        assert exact(attacked(model, classified, truth, rounds), truth) == [True, True]


def llama(data: Text) -> LanguageModel:
    """A tiny Llama: its first block's inputs do not depend on the position, as attention alone turns queries and keys."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=data.tokenizer.size, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=None, eos_token_id=3,
        attn_implementation="eager",
    )  # fmt: skip
    return LanguageModel(LlamaForCausalLM(config), "next_token", data.tokenizer).eval()


def sines(data: Text) -> LanguageModel:
    torch.manual_seed(0)
    return transformer3(data.shape, data.tokenizer, "next_token", width=64, heads=4, hidden=64)


@pytest.mark.parametrize(
    ("make", "modules", "rounds"),
    [
        (gpt2, ["c_attn"], 2),
        (sines, SEEN, 2),
        (llama, ["q_proj", "v_proj"], 1),
        (llama, ["q_proj", "v_proj"], 3),
    ],
)
def test_decoders_give_their_sentences_though_their_heads_are_frozen(
    make: Make, modules: list[str], rounds: int, spoken: Text
) -> None:
    truth = [b for b in batches(spoken, 6, 1) if inputs_of(b) > 6][:2]
    found = attacked(adapted(make(spoken), 16, modules), spoken, truth, rounds)
    assert exact(found, truth) == [True, True] and certified(found)


def test_factors_elsewhere_than_in_the_first_attention_are_no_span(classified: Text) -> None:
    truth = batches(classified, 1, 1)
    assert refused(attacked(bert(classified, 4, ["intermediate.dense"]), classified, truth, 2), "not shared")
