"""Claims about adapters: what is trained and travels, what it computes, and which tables are refused before training."""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedgauge.client.components import SpecError
from fedgauge.client.data.corpora import Text, phrases
from fedgauge.client.federation import Federation
from fedgauge.client.gradient import gradient
from fedgauge.client.models.adapters import frozen_backbone, lora
from fedgauge.client.models.build import build_model
from fedgauge.client.models.language import LanguageModel, tiny_bert, tiny_gpt2, transformer3
from fedgauge.client.models.losses import next_token
from fedgauge.client.models.vision import detached_params, floating_buffers, mlp
from fedgauge.client.update import Batch

pytest.importorskip("transformers", reason="the extra [text] is not installed")
pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="the extra [adapters] is not installed")
LENGTH = 8


@pytest.fixture(scope="module")
def classified() -> Text:
    return phrases(LENGTH)


@pytest.fixture(scope="module")
def spoken() -> Text:
    return phrases(LENGTH, task="next_token")


def bert(data: Text) -> LanguageModel:
    torch.manual_seed(0)
    return tiny_bert(data.shape, data.tokenizer, "classification", 2)


def speakers(data: Text) -> list[tuple[LanguageModel, list[str]]]:
    torch.manual_seed(0)
    return [
        (tiny_gpt2(data.shape, data.tokenizer, "next_token"), ["c_attn"]),
        (transformer3(data.shape, data.tokenizer, "next_token", width=32, heads=4, hidden=32), ["query", "value"]),
    ]


def test_only_the_factors_and_the_named_parts_travel(classified: Text) -> None:
    model = lora(bert(classified), 4, ["query", "value"], train=["classifier"])
    names = {name.partition("net.")[2] for name in detached_params(model)}
    blocks = [f"bert.encoder.layer.{i}.attention.self.{part}" for i in (0, 1) for part in ("query", "value")]
    factors = {f"{block}.lora_{factor}.default.weight" for block in blocks for factor in "AB"}
    assert names == factors | {"classifier.weight", "classifier.bias"}
    assert all(p.requires_grad for p in model.parameters()) and floating_buffers(model) == {}
    assert model.state_dict().keys() == detached_params(model).keys()


def test_the_factors_gradients_are_those_of_the_weights_next_to_them(classified: Text) -> None:
    """On paper: with W + s B A, dB = s dW A^T and dA = s B^T dW; and B = 0 changes no logit."""
    plain, batch = bert(classified), Batch(classified.x[:3], classified.y[:3])
    whole = gradient(plain, F.cross_entropy)(detached_params(plain), batch, None)
    logits = plain(batch.x)
    model = lora(bert(classified), 4, ["query", "value"], scale=0.5)
    torch.testing.assert_close(model(batch.x), logits)
    params = detached_params(model)
    found = gradient(model, F.cross_entropy)(params, batch, None)
    assert isinstance(model, LanguageModel)
    for before, part in zip((b.value for b in plain.parts.layers), (b.value for b in model.parts.layers), strict=True):
        assert part.factors is not None and part.weight not in params
        torch.testing.assert_close(model.value(part.weight), plain.value(before.weight).detach())
        a, b = part.factors
        torch.testing.assert_close(found[b], 0.5 * whole[before.weight] @ params[a].T, rtol=1e-4, atol=1e-7)
        assert not found[a].any()


def test_decoders_are_adapted_like_encoders(spoken: Text) -> None:
    batch = Batch(spoken.x[:2], spoken.y[:2])
    for plain, modules in speakers(spoken):
        logits = plain(batch.x)
        model = lora(plain, 3, modules)
        torch.testing.assert_close(model(batch.x), logits)
        params = {name: t + 0.01 for name, t in detached_params(model).items()}
        assert all("lora_" in name for name in params)
        found = gradient(model, next_token())(params, batch, None)
        assert all(bool(t.any()) for t in found.values())
        assert isinstance(model, LanguageModel)
        assert all(b.query.factors and set(b.query.factors) <= params.keys() for b in model.parts.layers)


def test_both_sides_build_the_same_base_and_factors(classified: Text) -> None:
    table = {"use": "tiny_bert", "adapter": [{"use": "lora", "rank": 4, "train": ["classifier"]}]}
    ours, theirs = (dict(build_model(table, classified.offered, 7).named_buffers()) for _ in range(2))
    assert ours.keys() == theirs.keys() and all(torch.equal(t, theirs[k]) for k, t in ours.items())


def test_a_frozen_backbone_shares_the_named_parts_alone(classified: Text) -> None:
    plain = bert(classified)
    logits = plain(classified.x[:2])
    model = frozen_backbone(plain, ["classifier", "LayerNorm"])
    assert all("classifier" in name or "LayerNorm" in name for name in detached_params(model))
    assert len(detached_params(model)) == 2 + 2 * 5
    torch.testing.assert_close(model(classified.x[:2]), logits)


def test_networks_of_images_take_factors_too() -> None:
    plain = mlp((1, 4, 4), 3)
    x = torch.rand(2, 1, 4, 4)
    logits = plain(x)
    name = next(n for n, m in plain.named_modules() if isinstance(m, nn.Linear))
    model = lora(plain, 2, [name])
    torch.testing.assert_close(model(x), logits)
    assert [tuple(p.shape) for p in detached_params(model).values()] == [(2, 16), (256, 2)]


@pytest.mark.parametrize(
    ("adapter", "name"),
    [
        ({"use": "lora", "rank": 0}, "rank"),
        ({"use": "lora", "scale": 0.0}, "scale"),
        ({"use": "lora", "modules": []}, "modules"),
        ({"use": "lora", "modules": ["q_proj"]}, "q_proj"),
        ({"use": "lora", "modules": ["encoder"]}, "modules"),
        ({"use": "lora", "modules": ["LayerNorm"]}, "modules"),
        ({"use": "lora", "train": ["head"]}, "head"),
        ({"use": "frozen_backbone", "train": []}, "train"),
        ({"use": "frozen_backbone", "train": ["dropout"]}, "train"),
        ({"use": "frozen_backbone", "train": ["nothing"]}, "nothing"),
    ],
)
def test_clients_that_share_nothing_are_refused_before_training(
    adapter: dict[str, Any], name: str, make_federation: Callable[..., Federation]
) -> None:
    model = {"use": "tiny_bert", "adapter": [adapter]}
    with pytest.raises(SpecError, match=rf"\[model\]: adapter #1.*{name}"):
        make_federation(model=model, data={"use": "phrases", "length": LENGTH}).check()


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, classified: Text) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"fedgauge\[adapters\]"):
        lora(bert(classified), 4)
