"""Soteria against the published algorithm written as a loop, on paper, and inside a federation."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedgauge.attacks.engine.gradient_distances import likelihood
from fedgauge.attacks.limits import known_noise
from fedgauge.client.chain import Chain, chain
from fedgauge.client.federation import Federation
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import convbig, detached_params
from fedgauge.client.transforms import UpdateDistribution, noise_free, per_example
from fedgauge.client.update import Batch, Params
from fedgauge.defenses.clip import clip
from fedgauge.defenses.mask import mask
from fedgauge.defenses.noise import gaussian, laplace
from fedgauge.defenses.prune import prune
from fedgauge.defenses.sign import sign
from fedgauge.defenses.soteria import soteria
from tests.tensors import identical, seeded

in_double = pytest.mark.usefixtures("double")


def normalise(x: Tensor) -> Tensor:
    return (x - 0.4) / 0.3


def conv() -> nn.Module:
    """A representation of 32 features, some of them off, behind a convolution and a fully connected layer."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, 32), nn.ReLU(), nn.Linear(32, 5)
    )


MODEL = conv()  # drawn in float32
PARAMS: Params = {k: t.double() for k, t in detached_params(MODEL).items()}
BATCH = Batch(torch.rand(3, 1, 6, 6, generator=seeded(), dtype=torch.float64), torch.tensor([0, 4, 2]))
BARE = gradient(MODEL, normalise=normalise)
LAST = soteria(MODEL, normalise, layer="5", rate=0.75)


def published_scores(x: Tensor) -> Tensor:
    """One backward pass for every feature, each example's norm over its feature, summed over the batch (Sun et al.)."""
    x = normalise(x).clone().requires_grad_()
    hidden = F.relu(F.conv2d(x, PARAMS["0.weight"], PARAMS["0.bias"])).flatten(1)
    r = F.relu(F.linear(hidden, PARAMS["3.weight"], PARAMS["3.bias"]))
    columns = []
    for j in range(r.shape[1]):
        (slope,) = torch.autograd.grad(r[:, j].sum(), x, retain_graph=True)
        columns.append(slope.flatten(1).norm(dim=1) / (r[:, j].detach() + 0.1))
    return torch.stack(columns, 1).sum(0)


def test_the_scores_are_the_published_loops() -> None:
    expected = published_scores(BATCH.x)
    assert (expected == 0).any()  # a feature that is off for all examples
    torch.testing.assert_close(LAST.scores(PARAMS, BATCH.x), expected, rtol=1e-12, atol=1e-14)


def test_the_mask_is_the_published_loops() -> None:
    expected = published_scores(BATCH.x).numpy()
    threshold = np.percentile(expected, 75)
    kept = LAST.kept(LAST.scores(PARAMS, BATCH.x))
    assert kept.tolist() == (expected >= threshold).tolist()
    assert int(kept.sum()) == 8


@in_double
def test_scores_on_paper() -> None:
    # r = W x + b with rows of norm 5, 1, 2 and r = (6.9, 0.9, 0.15): scores 5 / 7, 1 / 1, 2 / .25
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 3), nn.Linear(3, 2))
    params = {
        "1.weight": torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]]),
        "1.bias": torch.tensor([-0.1, -0.1, -1.85]),
        "2.weight": torch.ones(2, 3),
        "2.bias": torch.zeros(2),
    }
    link = soteria(model, lambda x: x, layer="2", rate=0.5)
    scores = link.scores(params, torch.tensor([[[[1.0, 1.0]]]]))
    assert scores.tolist() == pytest.approx([5 / 7, 1.0, 8.0], rel=1e-12)
    assert link.kept(scores).tolist() == [False, True, True]
    assert replace(link, rate=0.0).kept(scores).all()


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=40, unique=True), st.floats(0.0, 0.99))
def test_as_many_features_fall_as_by_numpys_percentile(scores: list[float], rate: float) -> None:
    position = rate * (len(scores) - 1)
    kept = replace(LAST, rate=rate).kept(torch.tensor(scores, dtype=torch.float64))
    below = sorted(scores)[: len(scores) - int(kept.sum())]
    assert set(below) == {s for s, k in zip(scores, kept.tolist(), strict=True) if not k}, "the lowest fall"
    assert position - 1e-6 <= len(below) < position + 1 + 1e-6


def test_one_weights_columns_are_zeroed_and_nothing_else_changes() -> None:
    g, defended = BARE(PARAMS, BATCH, None), LAST(BARE)(PARAMS, BATCH, None)
    kept = LAST.kept(LAST.scores(PARAMS, BATCH.x))
    assert list(defended) == list(g)
    assert identical(
        {k: t for k, t in defended.items() if k != "5.weight"}, {k: t for k, t in g.items() if k != "5.weight"}
    )
    assert torch.equal(defended["5.weight"][:, kept], g["5.weight"][:, kept])
    assert not defended["5.weight"][:, ~kept].any()
    assert g["5.weight"][:, ~kept].any()


def test_the_largest_layer_is_the_default() -> None:
    assert soteria(MODEL, normalise).weight == "3.weight"
    assert soteria(convbig((3, 8, 8), 10), normalise).weight == "linear2.weight"
    assert soteria(convbig((3, 32, 32), 10), normalise).weight == "linear1.weight"


@in_double
def test_before_local_steps_each_steps_own_features_fall_after_them_the_rounds() -> None:
    sgd = local_sgd(0.5, steps=2, batch_size=1)
    first, second = (Batch(BATCH.x[i : i + 1], BATCH.y[i : i + 1]) for i in (0, 1))
    step = {k: -0.5 * t for k, t in LAST(BARE)(PARAMS, first, None).items()}
    there = {k: p + step[k] for k, p in PARAMS.items()}
    by_hand = {k: step[k] - 0.5 * t for k, t in LAST(BARE)(there, second, None).items()}
    before = chain(LAST, sgd)(BARE)(PARAMS, BATCH, None)
    assert all(torch.allclose(before[k], by_hand[k], rtol=0, atol=1e-15) for k in by_hand)

    after = chain(sgd, LAST)(BARE)(PARAMS, BATCH, None)
    bare, kept = sgd(BARE)(PARAMS, BATCH, None), LAST.kept(LAST.scores(PARAMS, BATCH.x))
    assert torch.equal(after["5.weight"], torch.where(kept, bare["5.weight"], torch.zeros(())))
    assert not torch.equal(before["5.weight"] == 0, after["5.weight"] == 0)


def test_per_example_is_the_loop_over_examples() -> None:
    found = per_example(LAST)(BARE)(PARAMS, BATCH, None)
    looped = [LAST(BARE)(PARAMS, Batch(x[None], y[None]), None) for x, y in zip(*BATCH, strict=True)]
    for k, t in found.items():
        torch.testing.assert_close(t, torch.stack([u[k] for u in looped]).mean(0), rtol=0, atol=1e-14)


def test_batchnorm_in_train_mode_keeps_its_statistics() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5)).double()
    before = {k: b.clone() for k, b in model.named_buffers()}
    soteria(model, normalise)(gradient(model))(detached_params(model), BATCH, None)
    assert all(torch.equal(b, before[k]) for k, b in model.named_buffers())


# ------------------------------------------------------------------------------------------------- what an attacker holds

HIDDEN = frozenset({"5.weight"})
LINKS: dict[str, Callable[[], Chain]] = {
    "alone": lambda: chain(LAST, local_sgd(0.1)),
    "after": lambda: chain(local_sgd(0.1, 3), LAST),
    "several steps": lambda: chain(LAST, local_sgd(0.1, 3)),
    "clip": lambda: chain(LAST, clip(1.0), local_sgd(0.1)),
    "normal noise": lambda: chain(LAST, gaussian(0.1), local_sgd(0.1)),
    "noise in each step": lambda: chain(gaussian(0.1), LAST, gaussian(0.1), local_sgd(0.1, 3)),
    "Laplace noise": lambda: chain(LAST, local_sgd(0.1), laplace(0.1)),
    "mask": lambda: chain(LAST, local_sgd(0.1), mask(0.5)),
    "known mask": lambda: chain(LAST, local_sgd(0.1), mask(0.5, seed=1)),
    "prune": lambda: chain(LAST, local_sgd(0.1), prune(0.5)),
    "sign": lambda: chain(LAST, local_sgd(0.1), sign()),
}


@pytest.mark.parametrize("name", LINKS)
def test_hidden_layers_stay_hidden_through_the_chain(name: str) -> None:
    links = LINKS[name]()
    known = links.update_distribution
    assert known is not None
    assert known.hidden == links.hidden == HIDDEN
    bare = Chain(tuple(link for link in links.links if link is not LAST)).update_distribution
    assert replace(known, hidden=frozenset()) == bare, "all else is as without it"


@in_double
@pytest.mark.parametrize("name", LINKS)
def test_the_chains_likelihood_does_not_read_what_is_hidden(name: str) -> None:
    distance = likelihood(LINKS[name]().update_distribution, 1)
    seen, expected = BARE(PARAMS, BATCH, None), BARE(PARAMS, Batch(BATCH.x.flip(0), BATCH.y), None)
    other = {k: torch.randn(t.shape, generator=seeded()) if k in HIDDEN else t for k, t in seen.items()}
    assert float(distance(seen, expected)) > 1e-3
    assert torch.equal(distance(seen, expected), distance(other, expected))
    moved = {k: t + 1 if k == "5.bias" else t for k, t in seen.items()}
    assert not torch.equal(distance(moved, expected), distance(seen, expected))


def test_the_attackers_form_is_the_undefended_client() -> None:
    expected = local_sgd(0.1, 2)(BARE)(PARAMS, BATCH, None)
    assert identical(chain(LAST, local_sgd(0.1, 2)).mean(BARE)(PARAMS, BATCH, None), expected)
    assert noise_free(LAST)(BARE) is BARE
    assert UpdateDistribution(hidden=HIDDEN) == LAST.update_distribution(UpdateDistribution())


def test_no_limit_is_claimed_where_what_falls_is_chosen_by_the_data() -> None:
    assert known_noise(chain(gaussian(0.1), local_sgd(0.1))) is not None
    assert known_noise(chain(LAST, gaussian(0.1), local_sgd(0.1))) is None


# ------------------------------------------------------------------------------------------------------- in a scenario


def test_a_layer_that_sees_parts_of_an_example_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Flatten(), nn.Linear(24, 3)).double()  # the first sees each row of pixels
    with pytest.raises(ValueError, match="vector"):
        soteria(model, lambda x: x.flatten(1, 2), layer="0").scores(detached_params(model), BATCH.x)


def test_it_works_in_a_federation(make_federation: Callable[..., Federation]) -> None:
    sgd = {"use": "local_sgd", "rate": 0.1}
    link = {"use": "soteria", "rate": 0.5}
    fed = make_federation(chain=[link, sgd], data={"batch_size": 2})
    params, buffers = fed.initial()
    update = fed.client_update(params, buffers, 0, 1)
    assert identical(update, fed.client_update(params, buffers, 0, 1))
    batch = fed.batch_at(0, 1)
    x = fed.shards.dataset.normalise(batch.x)
    features: list[Tensor] = []
    hook = fed.model.get_submodule("linear").register_forward_pre_hook(lambda m, inputs: features.append(inputs[0]))
    functional_call(fed.model, params, (x,))
    hook.remove()
    zeros = (update["linear.weight"] == 0).all(0)
    assert int(zeros.sum()) == features[0].shape[1] // 2
