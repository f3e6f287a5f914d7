"""Networks of text of Hugging Face, as small as their configurations allow: each matched with right numbers, or declined."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedgauge.attacks.base import Budget, Knowledge, Observation, Reconstruction, Wave
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.text.distance import Kind, Matcher
from fedgauge.attacks.text.ghost_products import SentenceGuess
from fedgauge.client.chain import chain
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.losses import next_token
from fedgauge.client.models.tokenizer import Task, Tokenizer, framed, wordpiece
from fedgauge.client.models.vision import detached_params
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, Loss, Params, Update

SENTENCES = ("the cat sat on the mat", "a dog barks", "rain falls on the town", "we sing")
LENGTH, CLASSES, CLIENTS, EXAMPLES, RATE = 8, 3, 2, 2, 0.5
KINDS: tuple[Kind, ...] = ("cosine", "squared", "l2_l1")
LAMP = {"lm_steps": 10, "draws": 3, "orders": 3, "period": 2, "candidates": 4}
ATTACKS: Mapping[str, Mapping[str, Any]] = {"dlg_text": {}, "tag": {}, "lamp": LAMP}
EQUAL = 1e-9

_bert = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, max_position_embeddings=20,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
_albert = {**_bert, "embedding_size": 12, "classifier_dropout_prob": 0.0}
_distil = dict(
    dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=20, dropout=0.0, attention_dropout=0.0,
    seq_classif_dropout=0.0,
)  # fmt: skip
_gpt = dict(n_embd=16, n_layer=2, n_head=2, n_positions=20, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
_gpt2 = {**_gpt, "summary_first_dropout": 0.0, "bos_token_id": None, "eos_token_id": None}
_opt = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=24, max_position_embeddings=20, dropout=0.0,
    attention_dropout=0.0, layerdrop=0.0, word_embed_proj_dim=16, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
_neo = dict(
    hidden_size=16, num_layers=2, num_heads=2, intermediate_size=24, max_position_embeddings=20, window_size=4,
    attention_types=[[["global", "local"], 1]], resid_dropout=0.0, embed_dropout=0.0, attention_dropout=0.0,
    classifier_dropout=0.0, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
_llama = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=24,
    max_position_embeddings=20, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
_bart = dict(
    d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=20, dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
_squeeze = {
    **_bert, "embedding_size": 16, "q_groups": 1, "k_groups": 1, "v_groups": 1, "post_attention_groups": 1,
    "intermediate_groups": 1, "output_groups": 1,
}  # fmt: skip


@dataclass(frozen=True)
class TextNetwork:
    """One network of text.

    Args:
        kind: the beginning of its classes' names in the package transformers.
        settings: of its configuration.
        declined: words of the sentence why it is refused when it is built; empty: it is attacked.
    """

    name: str
    kind: str
    task: Task
    settings: Mapping[str, Any] = field(repr=False)
    declined: str = ""

    def build(self, words: Tokenizer) -> LanguageModel:
        """The network in float64, every parameter off its trivial value."""
        import transformers

        made = "SequenceClassification" if self.task == "classification" else "CausalLM"
        labels = {"num_labels": CLASSES} if self.task == "classification" else {}
        settings = {"vocab_size": words.size, "pad_token_id": words.pad, **self.settings, **labels}
        config = getattr(transformers, f"{self.kind}Config")(**settings)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = getattr(transformers, f"AutoModelFor{made}").from_config(config, attn_implementation="eager")
            model = LanguageModel(net, self.task, words).eval().double()
            for parameter in model.parameters():
                nn.init.normal_(parameter, std=0.3)
        return model


_ENCODERS: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "bert": ("Bert", _bert, ""),
    "roberta": ("Roberta", _bert, ""),
    "xlm-roberta, its classifier registered first": ("XLMRoberta", _bert, ""),
    "camembert": ("Camembert", _bert, ""),
    "electra": ("Electra", {**_bert, "embedding_size": 12, "summary_last_dropout": 0.0}, ""),
    "albert": ("Albert", _albert, ""),
    "albert of two groups": ("Albert", {**_albert, "num_hidden_groups": 2}, ""),
    "distilbert": ("DistilBert", _distil, ""),
    "convbert": ("ConvBert", _bert, ""),
    "roformer": ("RoFormer", _bert, ""),
    "gpt-2 that classifies": ("GPT2", _gpt2, ""),
    "opt that classifies": ("OPT", _opt, ""),
    "llama that classifies": ("Llama", _llama, ""),
    "squeezebert": ("SqueezeBert", _squeeze, "'transformer.encoder.layers.0.attention.query'"),
    "mpnet": ("MPNet", _bert, "no blocks with query"),
    "bart": ("Bart", _bart, "different logits"),
}
_DECODERS: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "gpt-2": ("GPT2", _gpt2, ""),
    "gpt-2, untied": ("GPT2", {**_gpt2, "tie_word_embeddings": False}, ""),
    "gpt": ("OpenAIGPT", {**_gpt, "summary_first_dropout": 0.0}, ""),
    "opt": ("OPT", _opt, ""),
    "opt, projected": ("OPT", {**_opt, "word_embed_proj_dim": 12}, ""),
    "gpt-neo": ("GPTNeo", _neo, ""),
    "llama": ("Llama", _llama, ""),
    "bert as a decoder": ("Bert", {**_bert, "is_decoder": True}, ""),
    "gemma": ("Gemma", {**_llama, "head_dim": 8}, "different logits"),
}
NETWORKS: tuple[TextNetwork, ...] = (
    *(TextNetwork(n, kind, "classification", s, why) for n, (kind, s, why) in _ENCODERS.items()),
    *(TextNetwork(n, kind, "next_token", s, why) for n, (kind, s, why) in _DECODERS.items()),
)


def vocabulary() -> Tokenizer:
    """The words of the sentences."""
    return wordpiece(SENTENCES, 100)


@dataclass(frozen=True, eq=False)
class TextCase:
    """Two clients' updates of a network, what is known of them, and their batches."""

    model: LanguageModel
    wave: Wave
    known: Knowledge
    batches: list[Batch]


def posed(model: LanguageModel) -> TextCase:
    """Two clients train a network on two sentences each."""
    loss: Loss = next_token() if model.task == "next_token" else F.cross_entropy
    params, links = detached_params(model), chain(local_sgd(RATE))
    client, ids = links(gradient(model, loss)), [model.tokenizer.encode(s) for s in SENTENCES]

    def labelled(x: Tensor) -> Batch:
        return Batch(x, torch.arange(len(x)) % CLASSES if model.task == "classification" else _targets(model, x))

    def batch(first: int, size: int) -> Batch:
        return labelled(
            framed([ids[(first + i) % len(ids)] for i in range(size)], LENGTH, model.pad, model.start, model.end)
        )

    batches = [batch(k, EXAMPLES) for k in range(CLIENTS)]
    updates: list[Update] = [client(params, b, generator("text zoo", k)) for k, b in enumerate(batches)]
    wave = Wave.stack([Observation(1, k, params, update) for k, update in enumerate(updates)])
    classes = CLASSES if model.task == "classification" else model.vocabulary
    known = Knowledge(model, links, (LENGTH,), classes, EXAMPLES, (), (), loss=loss, auxiliary=batch(0, 12))
    return TextCase(model, wave, known, batches)


def _targets(model: LanguageModel, x: Tensor) -> Tensor:
    return x.masked_fill(x == model.pad, -100)


def largest_gap(case: TextCase, kind: Kind) -> float:
    """The largest relative difference of a distance and its slopes from plain autograd's, over both clients."""
    model, known, wave = case.model, case.known, case.wave
    matcher, rng = Matcher(wave, known, kind), torch.Generator().manual_seed(3)
    masks = torch.stack([b.x != model.pad for b in case.batches])
    x = 0.1 * torch.randn(*masks.shape, model.width, dtype=torch.float64, generator=rng)
    if model.task == "classification":
        y = torch.stack([b.y for b in case.batches])
    else:
        drawn = torch.randn(*masks.shape, model.vocabulary, dtype=torch.float64, generator=rng)
        y = drawn.softmax(-1) * masks[..., None]
    value, slopes, _ = matcher.value_and_slopes(SentenceGuess(x, y, masks, torch.arange(CLIENTS)))
    gaps = []
    for k in range(CLIENTS):
        leaf = x[k].clone().requires_grad_()
        expected = _distance(case, kind, matcher.names, k, leaf, y[k], masks[k])
        (slope,) = torch.autograd.grad(expected, leaf)
        gaps += [
            float((value[k] - expected.detach()).abs() / expected.detach().abs()),
            float((slopes[k] - slope).abs().max() / slope.abs().max()),
        ]
    return max(gaps)


def _distance(case: TextCase, kind: Kind, names: list[str], k: int, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """LAMP's, DLG's or TAG's distance of one problem, as their published code computes it."""
    leaves: Params = {n: case.wave.params[n].clone().requires_grad_() for n in names}
    loss = case.known.loss(functional_call(case.model, {**case.wave.params, **leaves}, (x, mask)), y)
    found = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, materialize_grads=True)
    pairs = [(case.wave.update[n][k] / -case.known.scale, g) for n, g in zip(names, found, strict=True)]
    if kind == "cosine":
        one = x.new_ones(())
        terms = [1 - (a * g).sum() / (a.norm() * g.norm()) if a.any() and g.any() else one for a, g in pairs]
        return torch.stack(terms).mean()
    apart = [a - g for a, g in pairs]
    total = torch.stack([t.square().sum() for t in apart]).sum()
    return total + 0.01 * torch.stack([t.abs().sum() for t in apart]).sum() if kind == "l2_l1" else total


def attacked(case: TextCase, name: str) -> list[Reconstruction]:
    """Two iterations of an attack."""
    attack = PlannedAttack.from_table({"use": name, **ATTACKS[name]}, "[[attack]]").build()
    streams = [partial(generator, "text zoo", client) for client in case.wave.clients]
    return attack.reconstruct(case.wave, case.known, Budget(2), streams)


def rows() -> list[Mapping[str, object]]:
    """What becomes of each network: attacked, declined, wrong or unhandled."""
    words = vocabulary()
    return [{"network": n.name, "family": "hugging face text", **_outcome(partial(n.build, words))} for n in NETWORKS]


def _outcome(build: Callable[[], LanguageModel]) -> Mapping[str, object]:
    try:
        model = build()
    except ValueError as error:
        return {"outcome": "declined", "reason": str(error)}
    try:
        case = posed(model)
        gap = max(largest_gap(case, kind) for kind in KINDS)
        found = [one for name in ATTACKS for one in attacked(case, name)]
    except Exception as error:  # counted, and shown with its words
        return {"outcome": "unhandled", "reason": f"{type(error).__name__}: {error}"}
    if refused := [one.reason for one in found if one.x is None]:
        return {"outcome": "declined", "reason": refused[0]}
    return {"outcome": "attacked" if gap <= EQUAL else "wrong", "gap": gap}
