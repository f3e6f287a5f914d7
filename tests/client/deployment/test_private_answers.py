"""With noise behind a clip, what comes back (an update, silence, an error, NaN) tells nothing of the examples."""

import warnings

with warnings.catch_warnings():  # typer asks click for names that Click 9 will drop
    warnings.filterwarnings("ignore", "'click.utils.get_.*_stream' is deprecated", DeprecationWarning)
    import flwr.clientapp  # noqa: F401

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgauge.client.app import app
from fedgauge.client.components import SpecError
from fedgauge.client.deployment.deployed_client import STATISTICS, DeployedClient
from fedgauge.client.deployment.owner import OwnerConfig
from fedgauge.client.deployment.state_folder import ClientFolder
from fedgauge.client.deployment.terms import ServerTerms
from fedgauge.client.federation import Federation
from fedgauge.client.models.vision import floating_buffers
from fedgauge.client.protocol import Protocol
from fedgauge.client.transforms import per_example
from fedgauge.client.update import Batch, Params, norm
from fedgauge.defenses.accounting import privacy_statement
from fedgauge.defenses.clip import clip

pytestmark = pytest.mark.usefixtures("identity")

DATA = {"use": "mnist5k", "batch_size": 2, "auxiliary": 64}
SGD = {"use": "local_sgd", "rate": 0.1}
MLP = {"use": "mlp", "hidden": [8]}
CHAINS: dict[str, list[dict[str, Any]]] = {
    "dp_sgd": [{"use": "dp_sgd", "max_norm": 1.0, "noise_multiplier": 400.0}, SGD],
    "clip of each": [{"use": "clip", "max_norm": 1.0, "each": True}, {"use": "gaussian", "sigma": 100.0}, SGD],
    "clip of the update": [
        {**SGD, "steps": 3},
        {"use": "clip", "max_norm": 1.0},
        {"use": "gaussian", "sigma": 100.0},
    ],
    "laplace": [{"use": "clip", "max_norm": 1.0}, {"use": "laplace", "scale": 100.0}, SGD],
}


def protocol(**changes: Any) -> Protocol:
    return Protocol.from_tables(
        {"seed": 3, "rounds": 100, "clients": 3, "data": DATA, "model": MLP, "chain": [SGD], **changes}
    )


@pytest.fixture
def path(tmp_path: Path) -> Callable[..., Path]:
    def make(**changes: Any) -> Path:
        tables = {"client": 1, "data": {**DATA, "sampling": "secret"}, **changes}
        path = tmp_path / "client.toml"
        path.write_text(tomli_w.dumps(tables))
        return path

    return make


def answer(path: Path, weights: Params, round: int, agreed: Protocol | None = None) -> tuple[str, Params]:
    """What the server sees of a client's answer: finite or not, or the words of a refusal; and the update."""
    agreed = agreed or protocol()
    content = RecordDict({"arrays": ArrayRecord(weights), "config": ConfigRecord({"server-round": round})})
    config = {"client": str(path), "partition-id": 1}
    where = Context(1, 7, config, RecordDict(), {"protocol": agreed.to_json()})
    reply = app(Message(content, dst_node_id=7, message_type="train"), where)
    if reply.has_error():
        return f"{reply.error.code} {reply.error.reason}", {}
    assert dict(reply.content.metric_records["metrics"]) == {"num-examples": 2}
    update = dict(reply.content.array_records["update"].to_torch_state_dict())
    return "finite" if all(bool(torch.isfinite(t).all()) for t in update.values()) else "not finite", update


def one_pixel(pixel: int) -> Params:
    """Weights by which one lit pixel overflows the logits, and a dark one gives zeros."""
    params = {name: torch.zeros_like(p) for name, p in Federation(protocol()).initial()[0].items()}
    params["1.weight"][0, pixel] = params["3.weight"][0, 0] = 3e38
    return params


def lit(path: Path, round: int, pixel: int) -> bool:
    """Whether the pixel decided: what the server is after, read as only the owner can."""
    drawn = ClientFolder(OwnerConfig.load(path).state).drawn(1, round)
    assert drawn is not None
    x = OwnerConfig.load(path).batch(drawn.rows).x
    return bool((x.flatten(1)[:, pixel] > 0.2).any())


@pytest.mark.parametrize("chain", CHAINS)
def test_a_pixel_that_decides_on_overflow_is_not_read(path: Callable[..., Path], chain: str) -> None:
    pixels = torch.randint(28 * 10, 28 * 18, (8,), generator=torch.Generator().manual_seed(0)).tolist()
    own = path(chain=CHAINS[chain], guard={"max_norm": 1e6})
    assert {answer(own, one_pixel(pixel), round)[0] for round, pixel in enumerate(pixels, 1)} == {"finite"}
    lit_rounds = [lit(own, round, pixel) for round, pixel in enumerate(pixels, 1)]
    assert 0 < sum(lit_rounds) < 8, "the pixel is lit in some rounds and dark in others"


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([1e-38, 1e-3, 1.0, 1e10, 1e19, 3e38]),
    st.sampled_from([0.0, 1e20, 3e38]),
    st.sampled_from(list(CHAINS)),
)
def test_whatever_the_weights_the_kind_of_answer_is_the_same_for_all_examples(
    seed: int, size: float, outlier: float, chain: str
) -> None:
    """Hostile weights, examples of any kind: finite always, and of the same distribution of kinds, that is one kind."""
    rng = torch.Generator().manual_seed(seed)
    fed = Federation(protocol(chain=CHAINS[chain]))
    weights = {k: size * torch.randn(p.shape, generator=rng) for k, p in fed.initial()[0].items()}
    for p in weights.values():
        p.view(-1)[torch.randint(p.numel(), (3,), generator=rng)] = outlier
        p.clamp_(-3e38, 3e38)
    links = fed.chain.deployed
    assert links.private
    for x in (torch.zeros(2, 1, 28, 28), torch.ones(2, 1, 28, 28), torch.rand(2, 1, 28, 28, generator=rng)):
        update = links(fed.gradient)(weights, Batch(x, torch.tensor([0, 9])), rng)
        assert all(bool(torch.isfinite(t).all()) for t in update.values())


FUSSY = """
from torch import nn


class Fussy(nn.Linear):
    def forward(self, x):
        if x.flatten(1)[:, 28 * 14 + 14].amax() > 0:
            raise ValueError("the middle is lit")
        return super().forward(x.flatten(1))


def net(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Fussy(784, classes)
"""


def test_a_network_that_fails_on_some_examples_is_not_seen_to(path: Callable[..., Path]) -> None:
    """They count as zeros, for themselves alone. Without a promise the client fails, as it did."""
    named = protocol(model={"use": "fussy_network:net"})
    own = path(chain=CHAINS["dp_sgd"], allow=["fussy_network"])
    (own.parent / "fussy_network.py").write_text(FUSSY)
    weights = {"weight": torch.zeros(10, 784), "bias": torch.zeros(10)}
    assert {answer(own, weights, round, named)[0] for round in range(1, 7)} == {"finite"}
    log = ClientFolder(own.parent / "state").log.read_text()
    assert "a gradient counts as zero: ValueError: the middle is lit" in log, "its owner sees it"
    bare = path(chain=[SGD], allow=["fussy_network"], state="bare")
    assert "113 the client failed; its own log says why" in {answer(bare, weights, n, named)[0] for n in range(1, 7)}


def test_one_example_fails_for_itself_alone() -> None:
    """Replacing it moves the mean by no more than its share, also where vmap refuses all of them together."""

    def fussy(params: Params, batch: Batch, rng: torch.Generator | None) -> Params:
        if bool(batch.x.sum() > 2):  # a branch on values, which vmap refuses
            return {"w": torch.full((2,), torch.nan)}
        return {"w": batch.x.mean() * torch.ones(2)}

    each = per_example(clip(10.0))(fussy)
    x = torch.tensor([[1.0], [2.0], [3.0], [1.0]])
    found = each({"w": torch.zeros(2)}, Batch(x, torch.zeros(4)), None)["w"]
    assert found.tolist() == [1.0, 1.0], "(1 + 2 + 0 + 1) / 4"


def test_statistics_are_not_sent_beside_noise(path: Callable[..., Path]) -> None:
    asked = protocol(model={"use": "convnet", "width": 1, "norm": "batch", "mode": "train"})
    own = path(chain=CHAINS["clip of the update"])
    assert answer(own, Federation(asked).initial()[0], 1, asked)[0] == f"110 {STATISTICS}"


@pytest.mark.parametrize("guard", [{"audit": "analytic"}, {"inspect": "refuse", "examples": True}])
def test_a_guard_by_which_examples_decide_does_not_go_with_a_promise(
    path: Callable[..., Path], guard: dict[str, Any]
) -> None:
    own = path(chain=CHAINS["dp_sgd"], guard=guard)
    text = protocol().to_json()
    with pytest.raises(SpecError, match="the examples decide"):
        DeployedClient.of(OwnerConfig.load(own), ServerTerms.parse(text))
    DeployedClient.of(OwnerConfig.load(path(chain=[SGD], guard=guard)), ServerTerms.parse(text))


GIVEN = {"mean": [0.5], "std": [0.25], "classes": 4}


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({}, "mean, std, classes"),
        ({"mean": [0.5], "std": [0.25]}, "classes"),
        ({**GIVEN, "whole": False, "partition": "dirichlet", "auxiliary": 1}, "partition"),
    ],
)
def test_what_is_computed_from_all_examples_does_not_go_with_a_promise(
    path: Callable[..., Path], tmp_path: Path, keys: dict[str, Any], name: str
) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", x=rng.integers(0, 256, (40, 8, 8), dtype=np.uint8), y=np.arange(40) % 4)
    data = {"use": "npz", "path": str(tmp_path / "own.npz"), "batch_size": 2, "whole": True}
    text = protocol(clients=2).to_json()

    def built(chain: list[dict[str, Any]], **more: Any) -> DeployedClient:
        return DeployedClient.of(OwnerConfig.load(path(chain=chain, data=data | more)), ServerTerms.parse(text))

    with pytest.raises(SpecError, match=name):
        built(CHAINS["dp_sgd"], **keys)
    assert privacy_statement(built([SGD], **keys), {1: 1}).record is None, "without a promise anything may be computed"
    assert built(CHAINS["dp_sgd"], **GIVEN).owner.dataset.fitted == ()


IN_ANY_LINK = """
import torch
from torch import nn


class Fussy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(784, 8), nn.Linear(8, 10)

    def forward(self, x):
        features = self.first(x.flatten(1))
        if (x.flatten(1)[:, 28 * 14 + 14] > 0).any():
            raise ValueError("the middle is lit")
        return self.last(features.sigmoid())


def net(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Fussy()
"""
CLIP, NOISE = {"use": "clip", "max_norm": 1.0}, {"use": "gaussian", "sigma": 100.0}
# what stands before a clip, between it and its noise, and behind; a new link needs a line here
LINKS: dict[str, dict[str, Any]] = {
    "ats": {"use": "ats", "policy": "24", "crop_and_flip": False},  # posterize leaves a lit pixel lit
    "clip": {**CLIP, "each": True},
    "dp_sgd": {"use": "dp_sgd", "max_norm": 1.0, "noise_multiplier": 1.0},
    "freeze": {"use": "freeze", "layers": ["first"]},
    "gaussian": {"use": "gaussian", "sigma": 1.0},
    "identity": {"use": "identity"},
    "laplace": {"use": "laplace", "scale": 1.0},
    "local_dp": {"use": "local_dp", "epsilon": 5.0},
    "local_sgd": {**SGD, "steps": 2},
    "local_training": {"use": "local_training", "rate": 0.1, "optimizer": "adam", "epochs": 2},
    "mask": {"use": "mask", "keep": 0.5},
    "mixup": {"use": "mixup", "alpha": 0.4},
    "percentile_privacy": {"use": "percentile_privacy", "percentile": 50.0},
    "private_layers": {"use": "private_layers", "layers": ["first"]},
    "prune": {"use": "prune", "keep": 0.5},
    "quantize": {"use": "quantize", "bits": 4},
    "scaffold": {"use": "scaffold", "rate": 0.1, "steps": 2},
    "sign": {"use": "sign"},
    "soteria": {"use": "soteria"},
    "svt_privacy": {"use": "svt_privacy"},
    "top_k": {"use": "top_k", "keep": 0.5},
}
PLACES = ("before", "between", "behind")


def placed(link: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """A chain with a link before, between or behind a clip and its noise."""
    each = link.get("each", link["use"] == "dp_sgd")
    order = [{**CLIP, "each": each}, {**NOISE, "each": each}]
    order.insert(PLACES.index(place), link)
    if link["use"] in ("local_sgd", "local_training", "scaffold"):
        return order
    return [SGD, *order] if link["use"] in ("top_k", "private_layers") else [*order, SGD]


ORDERS = {
    **{f"{name} {place}": placed(link, place) for name, link in LINKS.items() for place in PLACES},
    "soteria after training": [SGD, {"use": "soteria"}, CLIP, NOISE],
    "soteria of each": [{"use": "soteria"}, *CHAINS["dp_sgd"]],
}
REREADING = {
    "soteria behind": ORDERS.pop("soteria behind"),
    "soteria behind the update's": [SGD, CLIP, NOISE, {"use": "soteria"}],
    "soteria behind dp_sgd": [*CHAINS["dp_sgd"], {"use": "soteria"}],
}


@pytest.mark.parametrize("links", REREADING.values(), ids=list(REREADING))
def test_no_link_reads_the_examples_behind_the_noise(path: Callable[..., Path], links: list[dict[str, Any]]) -> None:
    """The columns that soteria prunes followed from the examples, and the client failed where the network did on one."""
    text = protocol().to_json()
    with pytest.raises(SpecError, match="soteria"):
        DeployedClient.of(OwnerConfig.load(path(chain=links)), ServerTerms.parse(text))
    without = [link for link in links if link["use"] not in ("gaussian", "dp_sgd")]
    DeployedClient.of(OwnerConfig.load(path(chain=without)), ServerTerms.parse(text))


@pytest.mark.parametrize("links", ORDERS.values(), ids=list(ORDERS))
def test_no_link_shows_a_failure_or_a_size_of_a_gradient(
    path: Callable[..., Path], links: list[dict[str, Any]]
) -> None:
    own_path = path(chain=links, allow=["fussy_in_links"])
    (own_path.parent / "fussy_in_links.py").write_text(IN_ANY_LINK)
    named = protocol(model={"use": "fussy_in_links:net"})
    own = DeployedClient.of(OwnerConfig.load(own_path), ServerTerms.parse(named.to_json()))
    assert own.chain.private
    initial, rng = own.initial()[0], torch.Generator().manual_seed(0)
    for size in (3e-44, 1.0, 3e38):
        weights = {k: (size * torch.randn(p.shape, generator=rng)).clamp(-3e38, 3e38) for k, p in initial.items()}
        weights["last.weight"][:, ::2] = 0.0  # so that some entries of the gradient are zero
        for value in (0.0, 1.0):  # the network fails on the second
            batch = Batch(torch.full((2, 1, 28, 28), value), torch.tensor([0, 9]))
            update = own.compute(weights, {}, batch, {})
            assert {k: t.shape for k, t in update.items()} == {k: p.shape for k, p in weights.items()}
            assert all(bool(torch.isfinite(t).all()) for t in update.values()), size
    assert "the middle is lit" in ClientFolder(own.owner.state).log.read_text()


MOVING = """
from torch import nn
import torch


class Own(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.last = kind, nn.Linear(784, 10)
        self.norm = nn.InstanceNorm2d(1, track_running_stats=True, momentum=1.0) if kind == "instance" else nn.Identity()
        self.register_buffer("mean", torch.zeros(28, 28))
        self.register_buffer("table", torch.ones(3))

    def forward(self, x):
        if self.training and self.kind == "moved":
            self.mean.copy_(x.detach().mean((0, 1)))
        if self.training and self.kind == "replaced":
            self.mean = x.detach().mean((0, 1))
        return self.last((self.norm(x) + self.mean).flatten(1))


def net(shape: tuple[int, ...], classes: int, kind: str) -> nn.Module:
    return Own(kind)
"""


def test_a_buffer_that_moves_on_one_example_reaches_no_other_ones_gradient(path: Callable[..., Path]) -> None:
    """vmap refuses to move it, and examples taken one by one got the buffer as the one before had left it."""
    links = [{"use": "dp_sgd", "max_norm": 1.0, "noise_multiplier": 1e-9}, {"use": "local_sgd", "rate": 1.0}]
    own_path = path(chain=links, allow=["passing_on"], data={**DATA, "batch_size": 4})
    summing = MOVING.replace("self.training and ", "").replace("mean.copy_", "mean.add_")
    (own_path.parent / "passing_on.py").write_text(summing)
    asked = protocol(model={"use": "passing_on:net", "kind": "moved"})
    own = DeployedClient.of(OwnerConfig.load(own_path), ServerTerms.parse(asked.to_json()))
    x, y = own.owner.batch([0, 1, 2, 3])
    dark, bright = (own.compute(*own.initial(), Batch(torch.cat([c * x[:1], x[1:]]), y), {}) for c in (0, -1000))
    moved = float(norm({k: dark[k] - bright[k] for k in dark}))
    assert 0 < moved <= 2 * 1.0 / 4, "one example of four moves the mean by twice the clip's norm, over four"


@pytest.mark.parametrize("kind", ["instance", "replaced"])
@pytest.mark.parametrize("chain", ["dp_sgd", "clip of the update"])
def test_no_buffer_leaves_beside_noise(path: Callable[..., Path], kind: str, chain: str) -> None:
    """The mean image of the batch, or the last example's mean, left the client as it was."""
    package = f"moving_{kind}"
    asked = protocol(model={"use": f"{package}:net", "kind": kind, "mode": "train"})
    for links, sent in ((CHAINS[chain], False), ([SGD], True)):
        own_path = path(chain=links, allow=[package], state=f"state-{sent}")
        (own_path.parent / f"{package}.py").write_text(MOVING)
        own = DeployedClient.of(OwnerConfig.load(own_path), ServerTerms.parse(asked.to_json()))
        params, buffers = own.initial()
        update = own.compute(params, buffers, own.owner.batch([0, 1]), {})
        assert bool(update["last.weight"].any()), "it trains"
        held = floating_buffers(own.model)
        assert all(torch.equal(held[k], buffers[k]) for k in buffers) is not sent, "nor is one kept for the next round"
        content = RecordDict({"arrays": ArrayRecord(params), "config": ConfigRecord({"server-round": 1})})
        content["buffers"] = ArrayRecord(buffers)
        where = Context(1, 7, {"client": str(own_path), "partition-id": 1}, RecordDict(), {"protocol": asked.to_json()})
        reply = app(Message(content, dst_node_id=7, message_type="train"), where)
        assert set(reply.content.array_records) == {"update"} | ({"buffers"} if sent else set())
