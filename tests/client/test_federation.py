"""A federation: the protocol's parts built, and the weights that it starts from."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedgauge.client.chain import chain
from fedgauge.client.components import SpecError, allowing
from fedgauge.client.federation import Federation
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.protocol import Protocol
from fedgauge.client.rng import generator
from fedgauge.client.transforms import per_example
from fedgauge.defenses.clip import clip
from fedgauge.defenses.noise import gaussian
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from tests.client.test_protocol import BATCHNORM, CLIP, SGD, Make


def test_a_client_update_is_the_function_of_its_parts(make_federation: Make) -> None:
    noise = {"use": "gaussian", "sigma": 0.5}
    fed = make_federation(seed=4, data={"batch_size": 3}, chain=[{**CLIP, "each": True}, SGD, noise])
    params, buffers = fed.initial()
    found = fed.client_update(params, buffers, client=1, round=2)
    whole = chain(per_example(clip(1.0)), local_sgd(0.1), gaussian(0.5))(
        gradient(fed.model, normalise=fed.shards.dataset.normalise)
    )
    expected = whole(params, fed.shards.batch_at(1, 2), generator(4, "client", 1, 2))
    assert found.keys() == params.keys()
    assert all(torch.equal(found[k], expected[k]) for k in found)
    for other in (fed.client_update(params, buffers, 0, 2), fed.client_update(params, buffers, 1, 1)):
        assert not torch.equal(found["linear.bias"], other["linear.bias"])


def test_equal_seeds_give_equal_weights_and_leave_the_global_generator_alone(make_federation: Make) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, again, other = (make_federation(seed=s).check() for s in (7, 7, 8))
    first.client_update(*first.initial(), 0, 1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)  # the weights do not depend on it either
    third = make_federation(seed=7)
    weights = [torch.cat([p.flatten() for p in f.initial()[0].values()]) for f in (first, again, other, third)]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[3])
    assert not torch.equal(weights[0], weights[2])


def test_buffers_are_what_the_server_sent(make_federation: Make) -> None:
    fed = make_federation(model={**BATCHNORM, "norm": "batch"})
    params, buffers = fed.initial()
    assert set(buffers) == {f"norm{i}.running_{k}" for i in range(8) for k in ("mean", "var")}
    before = fed.client_update(params, buffers, 0, 1)
    sent = {k: b + 0.5 for k, b in buffers.items()}
    after = fed.client_update(params, sent, 0, 1)
    assert not torch.equal(before["conv0.weight"], after["conv0.weight"])
    back = fed.client_update(params, buffers, 0, 1)
    assert all(torch.equal(before[k], back[k]) for k in before)
    assert all(torch.equal(b, sent[k] - 0.5) for k, b in buffers.items()), "what was sent is not written to"


def test_batchnorm_in_train_mode_trains_and_moves_its_statistics(make_federation: Make) -> None:
    fed = make_federation(model={**BATCHNORM, "mode": "train"}, data={"batch_size": 4}, chain=[{**SGD, "steps": 2}])
    params, buffers = fed.initial()
    first = fed.client_update(params, buffers, 0, 1)
    moved = {k: b.clone() for k, b in fed.model.named_buffers()}
    assert int(moved["norm0.num_batches_tracked"]) == 2
    assert all(not torch.equal(moved[k], buffers[k]) for k in buffers)
    again = fed.client_update(params, buffers, 0, 1)  # starts from what was sent, not from where it ended
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert all(torch.equal(moved[k], dict(fed.model.named_buffers())[k]) for k in buffers)


def test_per_example_chains_accept_every_other_normalisation(make_federation: Make) -> None:
    each = [{**CLIP, "each": True}, SGD]
    for model in (BATCHNORM, {**BATCHNORM, "norm": "group", "mode": "train"}, {**BATCHNORM, "norm": "none"}):
        fed = make_federation(model=model, data={"batch_size": 2}, chain=each).check()
        assert all(torch.isfinite(t).all() for t in fed.client_update(*fed.initial(), 0, 1).values())


def checkpoint(path: Path, fed: Federation, **changed: torch.Tensor) -> Path:
    """What a run leaves as model.safetensors: parameters and floating-point buffers."""
    params, buffers = fed.initial()
    save_file({**params, **buffers, **changed}, path)
    return path


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_weights_are_the_federations_start_buffers_too(make_federation: Make, tmp_path: Path, mode: str) -> None:
    model = {**BATCHNORM, "mode": mode}
    other = make_federation(seed=9, model=model)
    for b in other.model.buffers():
        b.add_(1)
    path = checkpoint(tmp_path / "w.safetensors", other)
    fed = make_federation(seed=0, model={**model, "weights": str(path)}).check()
    assert fed.model.training == (mode == "train")
    for found, expected in zip(fed.initial(), other.initial(), strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[k], expected[k]) for k in found)


def test_a_client_gets_the_weights_with_the_round_and_never_a_path(make_federation: Make, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "w.safetensors", make_federation(seed=9, model=BATCHNORM))
    server = make_federation(model={**BATCHNORM, "weights": str(path)})
    text = server.protocol.to_json()
    assert "w.safetensors" not in text
    path.unlink()  # a client stands on another machine
    client = Federation(Protocol.from_json(text)).check()
    path = checkpoint(path, make_federation(seed=9, model=BATCHNORM))
    sent = server.initial()
    theirs, ours = client.client_update(*sent, 0, 1), server.client_update(*sent, 0, 1)
    assert all(torch.equal(theirs[k], ours[k]) for k in ours)
    assert not torch.equal(client.initial()[0]["linear.weight"], sent[0]["linear.weight"])


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda t: t.pop("linear.bias"), "linear.bias"),
        (lambda t: t.pop("norm3.running_var"), "norm3.running_var"),
        (lambda t: t.update({f"fc{i}": torch.zeros(2) for i in range(5)}), "fc0"),
        (lambda t: t.update({"linear.bias": torch.zeros(9)}), "linear.bias"),
        (lambda t: t.update({"linear.bias": t["linear.bias"].half()}), "float16"),
        (lambda t: t.update({"norm3.running_var": t["norm3.running_var"].double()}), "float64"),
        (lambda t: t["linear.bias"].fill_(float("nan")), "finite 'linear.bias'"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    make_federation: Make, tmp_path: Path, spoil: Callable[[dict[str, torch.Tensor]], object], name: str
) -> None:
    params, buffers = make_federation(model=BATCHNORM).initial()
    tensors = {**params, **buffers}
    spoil(tensors)
    save_file(tensors, tmp_path / "w.safetensors")
    with pytest.raises(SpecError, match=rf"\[model\]: weights: .*w.safetensors .*{name}"):
        make_federation(model={**BATCHNORM, "weights": str(tmp_path / "w.safetensors")}).check()


def test_nothing_is_unpickled(make_federation: Make, tmp_path: Path) -> None:
    torch.save(make_federation().initial()[0], tmp_path / "w.safetensors")
    for weights in (str(tmp_path / "w.safetensors"), 3):
        with pytest.raises(SpecError):
            make_federation(model={"weights": weights}).check()


def test_a_run_keeps_the_weights_it_began_with(
    tables: Make, make_federation: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An audit may come from another folder, after the checkpoint is gone."""
    path = checkpoint(tmp_path / 'wörk "1".safetensors', make_federation(seed=9))
    monkeypatch.chdir(tmp_path)
    scenario = Scenario.from_tables({**tables(), "model": {"use": "lenet", "weights": path.name}})
    run = Run.create(Path("rün"), scenario)
    path.unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    found = Federation(Run(tmp_path / "rün").scenario().protocol).initial()[0]
    expected = make_federation(seed=9).initial()[0]
    assert run.folder == Path("rün")
    assert all(torch.equal(found[k], expected[k]) for k in expected)


def frozen_model() -> torch.nn.Module:
    """Its first layer is not trained."""
    model = torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Sequential(torch.nn.Linear(784, 4), torch.nn.Linear(4, 4)).requires_grad_(False),
        torch.nn.Linear(4, 10),
    )
    model[2].bias.requires_grad_(False)
    return model


def test_what_wants_no_gradient_must_be_frozen_in_the_chain(make_federation: Make) -> None:
    table = {"use": f"{__name__}:frozen_model"}
    with allowing([__name__]):
        for chain, needed in (
            ([SGD], r"\['1', '2.bias'\]"),
            ([{"use": "freeze", "layers": ["1"]}, SGD], r"\['2.bias'\]"),
        ):
            with pytest.raises(SpecError, match=needed):
                _ = make_federation(model=table, chain=chain).chain
        with pytest.raises(SpecError):  # behind it, they would train and not be sent
            _ = make_federation(model=table, chain=[SGD, {"use": "freeze", "layers": ["1", "2.bias"]}]).chain
        fed = make_federation(model=table, chain=[{"use": "freeze", "layers": ["1", "2.bias"]}, SGD])
        params, buffers = fed.initial()
        update = fed.own_update(params, buffers, 0, 1)
    assert [k for k, t in update.items() if t.any()] == ["2.weight"]


def test_evaluation_leaves_each_layer_in_its_own_mode() -> None:
    model = {"use": "convnet", "width": 4, "mode": "train"}
    fed = Federation(Protocol(0, 1, 2, {"use": "mnist5k"}, model, ({"use": "local_sgd", "rate": 0.1},)))
    next(fed.model.children()).eval()
    before = [m.training for m in fed.model.modules()]
    assert len(set(before)) == 2
    fed.evaluate(fed.initial()[0], most=10)
    assert [m.training for m in fed.model.modules()] == before
