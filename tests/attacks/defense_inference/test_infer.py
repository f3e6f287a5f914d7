"""Inference: the defense is read off the updates alone, whatever it was, and an attack that had to do so loses little by it."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.attacks.defense_inference.infer import Inferred, infer
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.grading.knowledge_card import knowledge_card
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.source import FederationSource
from fedgauge.client.chain import chain
from fedgauge.client.data.images import Dataset, batch_of, mnist5k
from fedgauge.client.models.vision import convnet, detached_params, lenet, mlp, resnet20
from fedgauge.client.rng import generator
from fedgauge.client.training import gradient, local_sgd
from fedgauge.client.update import Batch, Transform, Update, norm
from fedgauge.defenses.clip import clip
from fedgauge.defenses.mask import mask
from fedgauge.defenses.noise import gaussian, laplace
from fedgauge.defenses.prune import prune
from fedgauge.defenses.sign import sign

KINDS = ("none", "sign", "prune", "mask", "clip")
RIGHT = 0.95


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return mnist5k()


# --------------------------------------------------------------------------------------------- a hundred random chains


@dataclass(frozen=True, eq=False)
class World:
    """A random federation's round: a net, its local training, and several clients' batches."""

    net: str
    model: nn.Module
    local: local_sgd
    batches: list[Batch]
    normalise: Callable[[Tensor], Tensor] | None
    draws: np.random.Generator

    @classmethod
    def random(cls, seed: int, digits: Dataset) -> "World":
        draws = np.random.default_rng(seed)
        torch.manual_seed(seed)
        net = str(draws.choice(["mlp", "deep mlp", "lenet", "convnet16", "resnet20"]))
        written = net in ("mlp", "deep mlp", "lenet") and draws.random() < 0.7
        shape = (1, 28, 28) if written else (3, 20, 20)
        model = {
            "mlp": lambda: mlp(shape, 10, [int(draws.choice([16, 64, 256]))]),
            "deep mlp": lambda: mlp(shape, 10, [64, 32]),
            "lenet": lambda: lenet(shape, 10),
            "convnet16": lambda: convnet(shape, 10, 16),
            "resnet20": lambda: resnet20(shape, 10),
        }[net]()
        size, steps = int(draws.choice([1, 1, 2, 4, 8])), int(draws.choice([1, 1, 2, 3]))
        local = local_sgd(
            float(10 ** draws.uniform(-2, -0.5)), steps, max(1, size // 2) if draws.random() < 0.3 else None
        )

        def batch(client: int) -> Batch:
            if written:
                return batch_of(digits.x, digits.y, torch.from_numpy(draws.integers(0, len(digits.x), size)))
            rng = generator(seed, "batch", client)
            return Batch(torch.rand(size, *shape, generator=rng), torch.randint(10, (size,), generator=rng))

        batches = [batch(client) for client in range(int(draws.integers(2, 6)))]
        normalise = (lambda x: (x - 0.13) / 0.31) if draws.random() < 0.7 else None  # black is zero, or is not
        return cls(net, model.eval(), local, batches, normalise, draws)

    def updates(self, *links: Transform) -> list[Update]:
        client, params = chain(*links)(gradient(self.model, normalise=self.normalise)), detached_params(self.model)
        return [client(params, batch, generator(i, "client")) for i, batch in enumerate(self.batches)]

    def defended(self, kind: str) -> tuple[tuple[Transform, ...], list[Update]]:
        """By one random defense at a random place."""
        draws = self.draws
        keep = float(draws.uniform(0.01, 0.9) if draws.random() < 0.5 else 10 ** draws.uniform(-2, math.log10(0.9)))
        known_to_all = int(draws.integers(100)) if draws.random() < 0.5 else None
        link = {
            "sign": sign(float(10 ** draws.uniform(-3, 0))),
            "prune": prune(keep),
            "mask": mask(keep, known_to_all),
        }.get(kind)
        inside = draws.random() < 0.5 and self.local.steps == 1  # a sum of several defended steps is not inferred
        if kind == "clip":
            bare = self.updates(self.local)
            norms = sorted(float(norm(u)) / (self.local.rate if inside else 1) for u in bare)
            second_largest_or_all = norms[-2] if draws.random() < 0.3 else norms[0]
            link = clip(second_largest_or_all * float(draws.uniform(0.3, 0.99)))
        links = (self.local,) if link is None else (link, self.local) if inside else (self.local, link)
        return links, self.updates(*links)

    def inferred(self, updates: list[Update]) -> Inferred:
        return infer(updates, self.model, self.local, len(self.batches[0].x))


@pytest.mark.slow
@pytest.mark.parametrize(("chains", "fewest"), [(30, 3), pytest.param(100, 11, marks=pytest.mark.full)])
def test_a_single_defense_is_inferred_from_the_updates(digits: Dataset, chains: int, fewest: int) -> None:
    confusion: Counter[tuple[str, str]] = Counter()
    wrong, keeps = [], []
    for seed in range(chains):
        kind, world = KINDS[seed % len(KINDS)], World.random(seed, digits)
        links, updates = world.defended(kind)
        found = world.inferred(updates)
        confusion[kind, found.kind] += 1
        if found.kind != kind:
            wrong.append(f"{seed}: {world.net}, {len(world.batches)} x {len(world.batches[0].x)}, {links} -> {found}")
        elif kind in ("prune", "mask") and isinstance(links[1], prune | mask):
            keeps.append(abs(math.log(found.parameters["keep"] / links[1].keep)))
    table = "\n".join(f"{k:>6} " + " ".join(f"{f}={n}" for (t, f), n in confusion.items() if t == k) for k in KINDS)
    assert chains - len(wrong) >= RIGHT * chains, "\n".join([table, *wrong])
    assert len(keeps) >= fewest
    assert np.median(keeps) < 0.05, keeps


def test_a_clip_needs_several_updates(digits: Dataset) -> None:
    world = World.random(7, digits)
    updates = world.updates(world.local, clip(1e-3))
    assert world.inferred(updates[:1]).kind == "none"
    assert world.inferred(updates).kind == "clip"


# ------------------------------------------------------------------------------------------------- what is read off it


@pytest.fixture
def world(digits: Dataset) -> World:
    """A relu net on digits whose background is zero: half of an undefended update is zero by nature."""
    torch.manual_seed(0)
    batches = [batch_of(digits.x, digits.y, torch.arange(4 * i, 4 * i + 4)) for i in range(4)]
    return World("mlp", mlp((1, 28, 28), 10, [32, 24]), local_sgd(0.1), batches, None, np.random.default_rng(0))


def test_natural_zeros_are_no_defense(world: World) -> None:
    updates = world.updates(world.local)
    zeros = [float((u["1.weight"] == 0).float().mean()) for u in updates]
    assert min(zeros) > 0.3, "else this shows nothing"
    found = world.inferred(updates)
    assert (found.kind, found.parameters, found.chain.links) == ("none", {}, (world.local,))


def test_zeros_of_a_trained_network_are_no_defense(digits: Dataset) -> None:
    torch.manual_seed(0)
    model = mlp((1, 28, 28), 10, [64])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    few = batch_of(digits.x, digits.y, torch.arange(64))
    for _ in range(300):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(few.x), few.y)
        loss.backward()
        optimizer.step()
    assert loss < 1e-3, "else this shows nothing: signals of labels must vanish"
    batches = [batch_of(digits.x, digits.y, torch.arange(60 + 8 * i, 68 + 8 * i)) for i in range(3)]  # learnt and new
    world = World("mlp", model, local_sgd(0.1), batches, None, np.random.default_rng(0))
    assert world.inferred(world.updates(world.local)).kind == "none"
    assert world.inferred(world.updates(world.local, mask(0.9))).kind == "mask"


@pytest.mark.parametrize("keep", [0.03, 0.1, 0.5, 0.85])
def test_the_share_of_pruning_is_inferred_exactly(world: World, keep: float) -> None:
    found = world.inferred(world.updates(world.local, prune(keep)))
    assert (found.kind, found.parameters) == ("prune", {"keep": keep})
    undefended = world.updates(world.local)
    for bare, pruned in zip(undefended, world.updates(world.local, prune(keep)), strict=True):
        again = found.chain.links[1](lambda *_, bare=bare: bare)({}, world.batches[0], None)  # type: ignore[misc]  # mypy infers no default
        for k, t in pruned.items():
            assert torch.equal(again[k], t), k


def test_a_sign_is_inferred_with_its_scale(world: World) -> None:
    for links, scale in (((world.local, sign(0.02)), 0.02), ((sign(0.5), world.local), 0.05)):
        found = world.inferred(world.updates(*links))
        assert (found.kind, found.chain.links[0]) == ("sign", world.local)
        assert found.parameters["scale"] == pytest.approx(scale)


@pytest.mark.parametrize("seed", [5, None])
def test_a_masks_share_is_inferred(world: World, seed: int | None) -> None:
    found = world.inferred(world.updates(world.local, mask(0.3, seed)))
    assert found.kind == "mask"
    assert found.parameters["keep"] == pytest.approx(0.3, rel=0.2)


def test_a_clips_bound_is_its_norm(world: World) -> None:
    found = world.inferred(world.updates(clip(0.5), world.local))
    assert found.kind == "clip"
    assert found.parameters["max_norm"] == pytest.approx(0.05)
    assert world.inferred(world.updates(clip(1e6), world.local)).kind == "none", (
        "a bound that nobody reaches shows nothing"
    )


def test_equal_updates_are_no_clip(world: World) -> None:
    updates = world.updates(world.local)
    assert world.inferred([updates[0], updates[0]]).kind == "none"


@pytest.mark.parametrize("sigma", [1e-4, 1e-2])
def test_the_spread_of_noise_is_inferred_from_the_rank(world: World, sigma: float) -> None:
    for noise in (gaussian(sigma), laplace(sigma / math.sqrt(2))):
        found = world.inferred(world.updates(world.local, noise))
        assert found.kind == "noise"
        assert found.parameters["sigma"] == pytest.approx(sigma, rel=0.1)
        assert found.chain.update_distribution is not None
        assert found.chain.update_distribution.sigma == found.parameters["sigma"]


def test_noise_without_evidence_is_not_reported(digits: Dataset) -> None:
    batches = [batch_of(digits.x, digits.y, torch.arange(32 * i, 32 * i + 32)) for i in range(2)]
    world = World("lenet", lenet((1, 28, 28), 10), local_sgd(0.1), batches, None, np.random.default_rng(0))
    found = world.inferred(world.updates(world.local, gaussian(1e-3)))
    assert found.kind == "none"


@pytest.mark.parametrize("defense", [sign(0.1), prune(0.2), mask(0.4), clip(1e-3), gaussian(1e-3)], ids=repr)
def test_the_inferred_chain_computes_the_true_update(world: World, defense: Transform) -> None:
    true, found = chain(world.local, defense), world.inferred(world.updates(world.local, defense)).chain
    bare, params = gradient(world.model), detached_params(world.model)
    expected, got = (c.mean(bare)(params, world.batches[0], None) for c in (true, found))
    for k, t in expected.items():
        assert torch.allclose(got[k], t, rtol=0.2, atol=0), k
    assert true.update_distribution is not None
    assert found.update_distribution is not None
    for name in ("sparse", "signed", "noisy"):
        assert getattr(found.update_distribution, name) == getattr(true.update_distribution, name)
    assert found.update_distribution.shrink == pytest.approx(true.update_distribution.shrink, rel=0.2)


def test_zero_updates_do_not_disturb_the_inference(world: World) -> None:
    zero = {k: torch.zeros_like(t) for k, t in world.updates(world.local)[0].items()}
    assert world.inferred([zero, zero]).kind == "none"
    found = world.inferred([*world.updates(world.local, prune(0.1)), zero])
    assert (found.kind, found.updates) == ("prune", 5), "a client without a gradient disturbs nothing"


# -------------------------------------------------------------------------------------------------- through the audit


def planned(**table: Any) -> PlannedAttack:
    table = {"use": "bayes", "iterations": 80, "name": "attack", **table}
    return PlannedAttack.from_table(table, "here")


@pytest.mark.full
@pytest.mark.slow
def test_inferred_pruning_is_nearly_as_good_as_known_pruning(make_federation: Any, observe: Any) -> None:
    local = {"use": "local_sgd", "rate": 0.1}
    fed = make_federation(clients=4, chain=[local, {"use": "prune", "keep": 0.03}])
    wave, scores = observe(fed, (0, 1, 2, 3)), {}
    for defense in ("known", "unknown", "inferred"):
        audited = Auditor(FederationSource(fed)).audit(
            planned(defense=defense), wave
        )  # of one name: all start from the same image
        said = "chain inferred: prune(keep~0.03) from 4 updates" if defense == "inferred" else ""
        assert all(a.reconstruction.reason.startswith(said) for a in audited)
        values = [row.value for a in audited for row in a.rows if (row.attack, row.metric) == ("attack", "psnr")]
        scores[defense] = np.array(values, dtype=float)
    assert len(scores["inferred"]) == 4
    assert np.abs(scores["inferred"] - scores["known"]).max() < 1, scores
    assert (scores["inferred"] > scores["unknown"]).all(), scores
    assert (scores["inferred"] - scores["unknown"]).mean() > 2, scores


def test_the_inferred_chain_has_no_link_of_the_client(make_federation: Any, observe: Any) -> None:
    fed = make_federation(clients=2, chain=[{"use": "local_sgd", "rate": 0.1}, {"use": "sign", "scale": 0.5}])
    auditor, plan = Auditor(FederationSource(fed)), planned(defense="inferred")
    assert "chain inferred" in knowledge_card(fed, plan)
    inferred = auditor.infer_defense(observe(fed, (0, 1)))
    assert str(inferred) == "sign(scale~0.5) from 2 updates"
    known = auditor.knowledge(plan, inferred=inferred)
    assert not any(isinstance(link, sign) for link in known.chain.links)


def test_inference_reads_only_local_training_from_the_true_chain(make_federation: Any, observe: Any) -> None:
    def found(**changes: Any) -> Inferred:
        fed = make_federation(clients=2, **changes)
        return Auditor(FederationSource(fed)).infer_defense(pruned)

    local = {"use": "local_sgd", "rate": 0.1}
    fed = make_federation(clients=2, chain=[local, {"use": "prune", "keep": 0.1}])
    pruned = observe(fed, (0, 1))
    for link in ({"use": "prune", "keep": 0.5}, {"use": "sign"}):
        assert (
            found(chain=[local, link]).chain
            == found(chain=[local]).chain
            == Auditor(FederationSource(fed)).infer_defense(pruned).chain
        )
