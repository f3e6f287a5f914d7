"""Setups hold what clients upload and what the server knows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fedgauge.client.components import SpecError
from fedgauge.client.data.batches import batch_of
from fedgauge.client.data.images import mnist5k
from fedgauge.client.gradient import gradient
from fedgauge.client.models.losses import next_token
from fedgauge.client.rng import generator
from fedgauge.simulations.reproduction import setups
from fedgauge.simulations.reproduction.paper_tables import (
    Images,
)
from fedgauge.simulations.reproduction.setups import build_setup, choose
from tests.simulations.reproduction.small_tables import (
    GPT2,
    SGD,
    WORDS,
    known_to_the_server,
    only,
    paper_table,
    sentences,
    truth_of,
)


@pytest.mark.parametrize("part", ["train", "test"])
def test_images_are_the_first_of_their_part_in_order(part: Any) -> None:
    data = mnist5k()
    x, y = (data.x_test, data.y_test) if part == "test" else (data.x, data.y)
    images = Images("mnist5k", part, first=3, batch_size=2)
    assert torch.equal(torch.cat(choose(data, images, n=5)), torch.arange(3, 13))
    found = truth_of(build_setup(replace(only(paper_table()), images=images, n=5), 0))
    assert torch.equal(torch.cat([b.x for b in found]), x[3:13].float() / 255)
    assert torch.equal(torch.cat([b.y for b in found]), y[3:13])


def test_distinct_batches_have_no_class_twice_and_leave_no_image_out() -> None:
    data = mnist5k()
    found = choose(data, Images("", batch_size=8, distinct=True), n=6)
    assert all(len(set(data.y_test[rows].tolist())) == 8 for rows in found)
    taken = torch.cat(found).tolist()
    assert len(set(taken)) == 48
    assert set(range(8)) <= set(taken), "the first images come first, whatever their classes"


def test_too_few_images_are_reported() -> None:
    for images, n in ((Images(""), 1001), (Images("", batch_size=11, distinct=True), 1)):
        with pytest.raises(SpecError):
            choose(mnist5k(), images, n)


def test_a_scene_is_what_clients_upload_and_what_a_server_knows() -> None:
    noise = {"use": "gaussian", "sigma": 0.1}
    cell = only(paper_table(chain=[noise, SGD], data={"use": "mnist5k", "batch_size": 3}))
    setup = build_setup(cell, seed=5)
    data = mnist5k()
    plain = gradient(known_to_the_server(setup).model, normalise=data.normalise)
    for k, (seen, truth) in enumerate(zip(setup.observations, truth_of(setup), strict=True)):
        assert torch.equal(truth.x, data.x_test[3 * k : 3 * k + 3].float() / 255)
        rng = generator(5, "client", k, 1)
        g = plain(seen.params, truth, None)
        for name in g:
            drawn = torch.randn(g[name].shape, generator=rng)
            torch.testing.assert_close(seen.update[name], -0.5 * (g[name] + 0.1 * drawn))
    assert known_to_the_server(setup).labels is None
    assert known_to_the_server(setup).auxiliary is not None
    assert torch.equal(known_to_the_server(setup).auxiliary.y, data.y[-200:]), (
        "public images, of which none is attacked or trained on"
    )


def test_the_last_of_several_rounds_is_graded_against_what_it_was_trained_on() -> None:
    """Each round draws its blends anew."""
    chain, data = [{"use": "mixup", "alpha": 1.0}, SGD], {"use": "mnist5k", "batch_size": 3}
    setup = build_setup(only(paper_table(chain=chain, data=data, cell={"rounds": 2})), seed=5)
    fed = setup.auditor.federation
    plain = gradient(fed.model, normalise=mnist5k().normalise)
    for seen in setup.observations:
        blends = fed.trained_on(seen.params, seen.buffers, seen.client, seen.round)
        assert blends is not None
        for name, g in plain(seen.params, blends, None).items():
            torch.testing.assert_close(seen.update[name], -0.5 * g)


def test_mean_and_std_can_be_those_the_network_was_trained_with() -> None:
    data = {"use": "mnist5k", "mean": [0.5], "std": [0.25]}
    setup = build_setup(only(paper_table(data=data)), 0)
    assert (known_to_the_server(setup).mean, known_to_the_server(setup).std) == ((0.5,), (0.25,))


def test_trained_networks_are_trained_and_training_is_pure_in_the_seed() -> None:
    trained = only(paper_table(train={"steps": 150, "rate": 3e-3}))
    first = build_setup(trained, 0)
    assert first.note.startswith("150 steps of training, ")
    assert int(first.note.split()[4].removesuffix("%")) > 75
    setups._STATES.clear()
    again, other = build_setup(trained, 0), build_setup(only(paper_table()), 0)
    params = [torch.cat([p.flatten() for p in s.observations[0].params.values()]) for s in (first, again, other)]
    assert torch.equal(params[0], params[1])
    assert (params[0] - params[2]).abs().mean() > 1e-3


def test_training_with_the_defense_on_learns_from_defended_gradients() -> None:
    """Signs of each example's gradient, averaged, are not the sign of the average: the two runs part at once."""
    chain = [{"use": "sign"}, SGD]
    runs = [
        build_setup(only(paper_table(chain=chain, train={"steps": 1, "batch_size": 8, "defended": on, "rate": 0.1})), 0)
        for on in (True, False)
    ]
    fed = build_setup(only(paper_table(chain=chain)), 0).auditor.federation
    plain, compute = fed.gradient, setups.defended_gradient(fed, 8)
    batch = batch_of(mnist5k().x, mnist5k().y, torch.arange(8))
    params = dict(fed.model.named_parameters())
    signs = [plain(params, type(batch)(batch.x[[i]], batch.y[[i]]), None) for i in range(8)]
    for name, found in compute(params, batch, None).items():
        torch.testing.assert_close(found, torch.stack([g[name].sign() for g in signs]).mean(0))
    differ = [(runs[0].observations[0].params[k] - runs[1].observations[0].params[k]).abs().max() for k in params]
    assert max(differ) > 0.1


def test_checkpoints_come_from_the_local_data_folder(no_local_data: Path) -> None:
    cell = only(paper_table(cell={"weights": "w.safetensors"}))
    with pytest.raises(SpecError):
        build_setup(cell, 0)
    state = {k: p + 1 for k, p in build_setup(only(paper_table()), 0).observations[0].params.items()}
    save_file(state, no_local_data / "w.safetensors")
    params = build_setup(cell, 0).observations[0].params
    assert all(torch.equal(params[k], state[k]) for k in state)


def test_clients_that_predict_words_minimise_the_words_surprise() -> None:
    setup = build_setup(only(sentences(WORDS, cell={"model": GPT2})), 0)
    seen, x = setup.observations[0], truth_of(setup)[0].x
    with torch.enable_grad():
        own = {k: p.clone().requires_grad_() for k, p in seen.params.items()}
        logits = torch.func.functional_call(known_to_the_server(setup).model, own, (x,))
        length = int((x[0] != 0).sum())
        by_hand = torch.nn.functional.cross_entropy(logits[0, : length - 1], x[0, 1:length])
        found = torch.autograd.grad(by_hand, list(own.values()))
    assert known_to_the_server(setup).loss == next_token()
    for name, g in zip(own, found, strict=True):
        torch.testing.assert_close(seen.update[name], -0.5 * g, rtol=1e-4, atol=1e-7)
