"""Uploads as users' apps send them: what is read as parameters, what beside them, and what is refused with which words."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from fedgauge.attacks.base import Observation
from fedgauge.client.federation import Federation
from fedgauge.server.store.tape_source import UploadMismatch, as_the_model_has_it

Make = Callable[..., Federation]


@pytest.fixture
def normed(make_federation: Make) -> Federation:
    """A network with BatchNorm: running statistics, and a counter of whole numbers."""
    return make_federation(model={"use": "resnet", "mode": "train"}, clients=1)


def uploaded(state: Mapping[str, Tensor], step: float = 0.5) -> Observation:
    """Every array moved by the same step, as a server sees it."""
    moved = {k: torch.full_like(t, step) if t.is_floating_point() else torch.ones_like(t) for k, t in state.items()}
    return Observation(1, 0, dict(state), moved)


def test_a_whole_state_is_split_into_parameters_and_buffers(normed: Federation) -> None:
    state = {k: t + 0.25 if t.is_floating_point() else t + 7 for k, t in normed.model.state_dict().items()}
    assert any(k.endswith("num_batches_tracked") for k in state)
    seen = as_the_model_has_it(uploaded(state), normed, "updates")
    names = [name for name, _ in normed.model.named_parameters()]
    assert list(seen.params) == list(seen.update) == names
    assert all(torch.equal(seen.params[k], state[k]) and (seen.update[k] == 0.5).all() for k in names)
    statistics = {k for k in state if k.endswith(("running_mean", "running_var"))}
    assert set(seen.buffers) == statistics
    assert all(torch.equal(seen.buffers[k], state[k]) for k in statistics)


@pytest.mark.parametrize("kind", [torch.float16, torch.float64])
def test_another_precision_becomes_the_models(normed: Federation, kind: torch.dtype) -> None:
    state = {k: t.to(kind) if t.is_floating_point() else t for k, t in normed.model.state_dict().items()}
    seen = as_the_model_has_it(uploaded(state), normed, "updates")
    assert {t.dtype for t in (*seen.params.values(), *seen.update.values(), *seen.buffers.values())} == {torch.float32}


def test_arrays_without_names_have_the_models_order(normed: Federation) -> None:
    state, named = normed.model.state_dict(), dict(normed.model.named_parameters())
    for chosen in (state, {k: t.detach() for k, t in named.items()}):
        by_place = {str(i): t for i, t in enumerate(chosen.values())}
        shuffled = dict(sorted(by_place.items()))  # "10" before "2"
        seen = as_the_model_has_it(uploaded(shuffled), normed)
        assert all(torch.equal(seen.params[k], chosen[k]) for k in named)


def test_a_wrappers_prefix_is_removed(normed: Federation) -> None:
    state = {f"_orig_mod.{k}": t for k, t in normed.model.state_dict().items()}
    assert list(as_the_model_has_it(uploaded(state), normed).params) == [k for k, _ in normed.model.named_parameters()]


@pytest.mark.parametrize("wrapper", ["", "model.", "module._orig_mod."])
def test_an_apps_network_of_hugging_face_has_its_own_names(make_federation: Make, wrapper: str) -> None:
    """[model] holds it as `net`; the app sends the network itself, or holds it under another name."""
    fed = make_federation(data={"use": "phrases"}, model={"use": "tiny_bert"}, clients=1)
    theirs = fed.model.net.state_dict()
    assert isinstance(theirs, dict) and not any(k.startswith("net.") for k in theirs)
    seen = as_the_model_has_it(uploaded({f"{wrapper}{k}": t for k, t in theirs.items()}), fed)
    assert list(seen.params) == [k for k, _ in fed.model.named_parameters()]
    assert all(torch.equal(seen.params[k], p) for k, p in fed.model.named_parameters())


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers by a deprecated name
@pytest.mark.parametrize("adapter", ["default", "mine"])
def test_adapters_have_the_names_that_peft_gives_them(make_federation: Make, adapter: str) -> None:
    """As saved, the adapter's own name is left out; among the parameters it stands, and copies of modules beside the originals."""
    peft = pytest.importorskip("peft", reason="the extra [adapters] is not installed")
    lora = {"use": "lora", "rank": 4, "train": ["classifier"]}
    fed = make_federation(data={"use": "phrases"}, model={"use": "tiny_bert", "adapter": [lora]}, clients=1)
    base = make_federation(data={"use": "phrases"}, model={"use": "tiny_bert"}, clients=1).model.net
    options = {"target_modules": ["query", "value"], "modules_to_save": ["classifier"], "task_type": "SEQ_CLS"}
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=4, **options), adapter_name=adapter)
    saved = peft.get_peft_model_state_dict(theirs, adapter_name=adapter)
    trained = {name: p.detach() for name, p in theirs.named_parameters() if p.requires_grad}
    names = [name for name, _ in fed.model.named_parameters()]
    for sent in (saved, trained, {str(i): t for i, t in enumerate(saved.values())}):
        seen = as_the_model_has_it(uploaded(sent), fed)
        assert list(seen.params) == list(seen.update) == names
        assert {k.partition("encoder.")[2] for k in names if "lora_A" in k} == {
            k.replace(adapter, "default").partition("encoder.")[2] for k in trained if "lora_A" in k
        }
        first = next(k for k in trained if "lora_A" in k)
        ours = next(k for k in names if "lora_A" in k)
        assert torch.equal(seen.params[ours], trained[first])


def test_frozen_layers_need_not_be_uploaded(make_federation: Make) -> None:
    chain = [{"use": "freeze", "layers": ["hidden"]}, {"use": "local_sgd", "rate": 0.1}]
    plain = make_federation(model={"use": "mlp", "hidden": [8]})
    names = [name for name, _ in plain.model.named_parameters()]
    first = names[0].split(".")[0]
    chain[0]["layers"] = [first]
    fed = make_federation(model={"use": "mlp", "hidden": [8]}, chain=chain)
    kept = {k: t for k, t in fed.model.state_dict().items() if not k.startswith(first + ".")}
    assert 0 < len(kept) < len(names)
    seen = as_the_model_has_it(uploaded(kept), fed)
    initial = fed.initial()[0]
    assert list(seen.update) == names
    assert all((seen.update[k] == 0).all() and torch.equal(seen.params[k], initial[k]) for k in names if k not in kept)
    with pytest.raises(UploadMismatch):
        as_the_model_has_it(uploaded(kept), plain)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: {**state, "head.weight": torch.zeros(2)},
        lambda state: {k: t.repeat(2, *[1] * (t.dim() - 1)) for k, t in state.items()},
        lambda state: {k: t.to(torch.int16) for k, t in state.items()},
        lambda state: {str(i): t for i, t in enumerate(list(state.values())[:-1])},
    ],
)
def test_uploads_of_another_model_are_refused(
    make_federation: Make, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    fed = make_federation(model={"use": "mlp", "hidden": [8]})
    with pytest.raises(UploadMismatch):
        as_the_model_has_it(uploaded(change(dict(fed.model.state_dict()))), fed)
