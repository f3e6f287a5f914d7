"""Claims about ghost products: they are what a plain loop computes, for every model, and step aside where they cannot be."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedgauge.attacks.base import Knowledge, Wave
from fedgauge.attacks.engine.gradients.factored import FactoredGradient, factored
from fedgauge.attacks.text.certificate import Unreadable
from fedgauge.attacks.text.distance import Kind, Matcher, Way
from fedgauge.attacks.text.ghost_products import SentenceGuess, gradients
from fedgauge.client.chain import Chain, chain
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.language import LanguageModel, tiny_bert, tiny_gpt2, transformer3
from fedgauge.client.models.tokenizer import Tokenizer, framed, wordpiece
from fedgauge.client.models.transformer import Transformer
from fedgauge.client.models.vision import detached_params
from fedgauge.client.rng import generator
from fedgauge.client.transforms import per_example
from fedgauge.client.update import Batch, Transform
from fedgauge.defenses.clip import clip
from fedgauge.defenses.mask import mask
from fedgauge.defenses.noise import gaussian
from fedgauge.defenses.prune import prune
from fedgauge.defenses.sign import sign
from tests.attacks.text.small_text import seen

SENTENCES = ("the cat sat on the mat", "a dog barks", "rain falls on the town", "we sing")
LENGTH = 8
RATE = 0.5
LARGE = 192  # a width from which weights are large enough to stay products


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return wordpiece(SENTENCES, 100)


def bert(words: Tokenizer, width: int = LARGE, **more: Any) -> LanguageModel:
    return tiny_bert((LENGTH,), words, "classification", 2, width=width, **more)


def gpt2(words: Tokenizer, width: int = LARGE) -> LanguageModel:
    return tiny_gpt2((LENGTH,), words, "next_token", width=width)


def three(words: Tokenizer, width: int = LARGE) -> LanguageModel:
    return transformer3((LENGTH,), words, "next_token", 2, width, hidden=300)


MODELS = [bert, gpt2, three]
Make = Callable[..., LanguageModel]
each_model = pytest.mark.parametrize("make", MODELS, ids=lambda m: m.__name__)


def seen_of(
    model: LanguageModel, links: Chain, batch_size: int = 1, clients: int = 2
) -> tuple[Wave, Knowledge, list[Batch]]:
    """Real updates of a model in its own dtype, what is known of them, and the truth."""
    ids = [model.tokenizer.encode(s) for s in SENTENCES]
    batches = []
    for k in range(clients):
        chosen = [ids[(k + i) % len(ids)] for i in range(batch_size)]
        x = framed(chosen, LENGTH, model.pad, model.start, model.end)
        y = torch.arange(batch_size) % 2 if model.task == "classification" else x.masked_fill(x == model.pad, -100)
        batches.append(Batch(x, y))
    return *seen(model, batches, links.links), batches


def guess_of(model: LanguageModel, batches: list[Batch], owners: list[int]) -> SentenceGuess:
    """Random guesses at some of the batches, of the right lengths."""
    params, count = detached_params(model), len(owners)
    like = next(iter(params.values()))
    rng = generator("ghost", "guess")
    masks = torch.stack([batches[k].x != model.pad for k in owners])
    x = 0.1 * torch.randn(count, len(batches[0].x), LENGTH, model.width, generator=rng, dtype=torch.float64)
    if model.task == "classification":
        y = torch.stack([batches[k].y for k in owners])
    else:
        logits = torch.randn(*x.shape[:3], model.vocabulary, generator=rng, dtype=torch.float64)
        y = (logits.softmax(-1) * masks[..., None]).to(like)
    return SentenceGuess(x.to(like), y, masks, torch.tensor(owners))


def true_guess(model: LanguageModel, batches: list[Batch]) -> SentenceGuess:
    """The truth as a guess."""
    params, ids = detached_params(model), torch.stack([b.x for b in batches])
    masks = ids != model.pad
    y = torch.stack([b.y for b in batches])
    if model.task == "next_token":
        y = F.one_hot(ids, model.vocabulary).to(next(iter(params.values()))) * masks[..., None]
    return SentenceGuess(model.value(model.parts.word, params)[ids], y, masks, torch.arange(len(batches)))


def plain(
    model: LanguageModel, known: Knowledge, wave: Wave, guess: SentenceGuess, names: list[str], kind: Kind
) -> Any:
    """Distances and slopes as the published code computes them: one by one, every gradient formed."""
    leaves = {n: wave.params[n].clone().requires_grad_() for n in names}
    values, slopes = [], []
    for x, y, there, owner in zip(guess.x, guess.y, guess.mask, guess.owners.tolist(), strict=True):
        leaf = x.clone().requires_grad_()
        loss = known.loss(functional_call(model, {**wave.params, **leaves}, (leaf, there)), y)
        found = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, materialize_grads=True)
        seen = [wave.update[n][owner] / -known.scale for n in names]
        pairs = [(a.flatten(), b.flatten()) for a, b in zip(seen, found, strict=True)]
        if kind == "cosine":
            value = torch.stack([1 - torch.cosine_similarity(a, b, 0, 1e-300) for a, b in pairs]).mean()
        else:
            l1 = 0.01 if kind == "l2_l1" else 0.0
            value = torch.stack([(a - b).square().sum() + l1 * (a - b).abs().sum() for a, b in pairs]).sum()
        values.append(value.detach())
        slopes.append(torch.autograd.grad(value, leaf)[0])
    return torch.stack(values), torch.stack(slopes)


@pytest.mark.product
@each_model
@pytest.mark.parametrize("kind", ["cosine", "squared", "l2_l1"])
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("noise", [0.0, 1e-3], ids=["bare", "noise"])
def test_value_and_slopes_are_those_of_the_plain_loop(
    make: Make, kind: Kind, batch_size: int, noise: float, words: Tokenizer
) -> None:
    """Key biases are left out of both: Matcher leaves them out of the comparison (keys=False)."""
    model = make(words).double()
    links = chain(gaussian(noise), local_sgd(RATE)) if noise else chain(local_sgd(RATE))
    wave, known, batches = seen_of(model, links, batch_size)
    guess = guess_of(model, batches, [0, 0, 1])
    matcher = Matcher(wave, known, kind)
    values, slopes, _ = matcher.value_and_slopes(guess)
    assert matcher.way == ("formed" if kind == "l2_l1" else "products")
    expected, by_x = plain(model, known, wave, guess, matcher.names, kind)
    assert torch.allclose(values, expected, rtol=1e-5, atol=1e-10)
    assert torch.allclose(slopes, by_x, rtol=1e-5, atol=1e-5 * float(by_x.abs().max()))
    assert torch.allclose(matcher.value(guess), expected, rtol=1e-5, atol=1e-10)


@each_model
def test_float32_keeps_the_plain_value_to_a_part_in_100_000(make: Make, words: Tokenizer) -> None:
    exact, rounded = make(words), make(words)
    rounded.load_state_dict(exact.state_dict())
    found = []
    for model in (exact.double(), rounded):
        wave, known, batches = seen_of(model, chain(local_sgd(RATE)), 2)
        matcher = Matcher(wave, known, "cosine")
        found.append(matcher.value_and_slopes(guess_of(model, batches, [0, 1])))
    assert torch.allclose(found[1][0].double(), found[0][0], atol=1e-5)
    assert torch.allclose(found[1][1].double(), found[0][1], atol=1e-5 * float(found[0][1].abs().max()))


@pytest.mark.product
@each_model
@pytest.mark.parametrize("kind", ["cosine", "squared", "l2_l1"])
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("width", [16, LARGE])
def test_by_the_whole_chain_everything_is_the_same_with_soft_labels_too(
    make: Make, kind: Kind, pruned: bool, width: int, words: Tokenizer
) -> None:
    model = make(words, width).double()
    wave, known, batches = seen_of(model, chain(local_sgd(RATE), *[prune(0.3)] * pruned), 2)
    matcher, guess = Matcher(wave, known, kind), guess_of(model, batches, [0, 1])
    products = matcher.value_and_slopes(guess)
    matcher.way = "chain"
    for ours, theirs in zip(products, matcher.value_and_slopes(guess), strict=True):
        assert (ours is None) == (theirs is None) == (ours is products[2] and model.task == "classification")
        if ours is not None and theirs is not None:
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-9)


def test_large_gradients_stay_products_on_both_sides(words: Tokenizer) -> None:
    model = bert(words)
    wave, known, batches = seen_of(model, chain(local_sgd(RATE)))
    guess, matcher = guess_of(model, batches, [0, 1]), Matcher(wave, known, "cosine")
    x = guess.x.requires_grad_()
    found = gradients(model, wave.params, guess._replace(x=x), known.loss, matcher.names)
    large = {name for name, part in found.items() if isinstance(part, FactoredGradient)}
    inside = {n for n, p in wave.params.items() if p.dim() == 2 and "layer." in n}
    assert large >= inside and len(inside) == 2 * 6
    for name in inside:
        assert factored(matcher.seen.gradient[name], LENGTH) is not None, "a sentence has as many rows as tokens"


@each_model
def test_padding_says_nothing(make: Make, words: Tokenizer) -> None:
    model = make(words).double()
    wave, known, batches = seen_of(model, chain(local_sgd(RATE)), 1)
    whole = guess_of(model, batches, [1])
    length = int(whole.mask.sum())
    assert length < LENGTH
    y = whole.y if whole.y.dim() == 2 else whole.y[:, :, :length]
    cut = SentenceGuess(whole.x[:, :, :length], y, whole.mask[:, :, :length], whole.owners)
    matcher = Matcher(wave, known, "cosine")
    (values, slopes, _), (less, fewer, _) = matcher.value_and_slopes(whole), matcher.value_and_slopes(cut)
    assert torch.allclose(values, less, rtol=1e-9)
    assert torch.allclose(slopes[:, :, :length], fewer, atol=1e-9)
    assert float(slopes[:, :, length:].abs().max()) == 0


def test_guesses_of_many_are_those_of_one(words: Tokenizer) -> None:
    model = bert(words).double()
    wave, known, batches = seen_of(model, chain(local_sgd(RATE)))
    matcher, guess = Matcher(wave, known, "cosine"), guess_of(model, batches, [0] * 3 + [1] * 40)
    values, slopes, _ = matcher.value_and_slopes(guess)
    for i in (0, 2, 3, 42):
        alone, by_x, _ = matcher.value_and_slopes(SentenceGuess(*(t[i : i + 1] for t in guess)))
        assert torch.allclose(values[i], alone[0], rtol=1e-9)
        assert torch.allclose(slopes[i], by_x[0], rtol=1e-6, atol=1e-12)


WAYS: list[tuple[tuple[Transform, ...], int, Kind, Way]] = [
    ((local_sgd(RATE),), 2, "cosine", "products"),
    ((local_sgd(RATE),), 2, "l2_l1", "formed"),
    ((local_sgd(RATE), prune(0.3)), 1, "l2_l1", "formed"),
    ((gaussian(0.01), local_sgd(RATE)), 2, "squared", "products"),
    ((local_sgd(RATE), prune(0.3)), 1, "cosine", "products"),
    ((local_sgd(RATE), mask(0.5)), 1, "squared", "chain"),
    ((local_sgd(RATE), mask(0.5, seed=1)), 1, "squared", "chain"),
    ((local_sgd(RATE), sign()), 1, "cosine", "chain"),
    ((clip(0.1), local_sgd(RATE)), 1, "squared", "chain"),
    ((per_example(clip(0.1)), local_sgd(RATE)), 2, "cosine", "chain"),
    ((local_sgd(RATE, steps=3),), 2, "cosine", "chain"),
    ((local_sgd(RATE, steps=2, batch_size=1),), 2, "cosine", "chain"),
]


@pytest.mark.parametrize(("links", "batch_size", "kind", "way"), WAYS, ids=lambda v: "-" if isinstance(v, tuple) else v)
def test_the_chain_selects_the_likelihood_and_the_truth_maximises_it(
    links: tuple[Transform, ...], batch_size: int, kind: Kind, way: Way, words: Tokenizer
) -> None:
    model = bert(words, 16).double()
    wave, known, batches = seen_of(model, Chain(links), batch_size)
    matcher = Matcher(wave, known, kind)
    assert matcher.way == way
    truth = matcher.value(true_guess(model, batches))
    others = matcher.value_and_slopes(guess_of(model, batches, [0, 0, 1, 1]))
    assert float(truth.max()) < float(others[0].min())
    assert bool(others[1].isfinite().all()) and float(others[1].abs().max()) > 0


class Scaled(Transformer):
    """Uses a parameter in a way that ghost products do not know."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary, 1, 16, 2, 24)
        self.scale = nn.Parameter(torch.full((16,), 1.5))

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **more: Any) -> Any:
        x = self.words(input_ids) if inputs_embeds is None else inputs_embeds
        return super().forward(None, x * self.scale, **more)


def test_a_model_that_is_not_known_goes_by_the_whole_chain(words: Tokenizer) -> None:
    model = LanguageModel(Scaled(words.size), "next_token", words).eval().double()
    wave, known, batches = seen_of(model, chain(local_sgd(RATE)))
    matcher = Matcher(wave, known, "cosine")
    guess = guess_of(model, batches, [0, 1])
    values, slopes, _ = matcher.value_and_slopes(guess)
    assert matcher.way == "chain"
    expected, by_x = plain(model, known, wave, guess, matcher.names, "cosine")
    assert torch.allclose(values, expected, rtol=1e-6)
    assert torch.allclose(slopes, by_x, rtol=1e-5, atol=1e-9)


class Repeated(Transformer):
    """Runs its only block twice, as ALBERT does, and has a norm without a bias, as ModernBERT does."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary, 1, LARGE, 2, 2 * LARGE)
        (block,) = self.blocks
        block.norm2 = nn.LayerNorm(LARGE, bias=False)
        self.blocks = nn.ModuleList([block, block])


def test_a_layer_used_twice_and_a_norm_without_bias_are_known(words: Tokenizer) -> None:
    model = LanguageModel(Repeated(words.size), "next_token", words).eval().double()
    wave, known, batches = seen_of(model, chain(local_sgd(RATE)))
    matcher, guess = Matcher(wave, known, "cosine"), guess_of(model, batches, [0, 1])
    values, slopes, _ = matcher.value_and_slopes(guess)
    assert matcher.way == "products"
    expected, by_x = plain(model, known, wave, guess, matcher.names, "cosine")
    assert torch.allclose(values, expected, rtol=1e-6)
    assert torch.allclose(slopes, by_x, rtol=1e-5, atol=1e-9)


def test_nothing_but_word_embeddings_is_nothing_to_compare(words: Tokenizer) -> None:
    model = bert(words, 16)
    wave, known, _ = seen_of(model, chain(local_sgd(RATE)))
    alone = replace(wave, update={model.parts.word: wave.update[model.parts.word]})
    with pytest.raises(Unreadable):
        Matcher(alone, known, "cosine")
