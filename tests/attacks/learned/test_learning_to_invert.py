"""Attacks that learn: simulated updates, hashing, the ridge inverter, the network, and what may be learned from."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Budget, Knowledge, Observation, Wave
from fedgauge.attacks.engine.scheduler import Deadline
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.grading.image_metrics import match, mse
from fedgauge.attacks.grading.knowledge_card import knowledge_card
from fedgauge.attacks.learned import feature_hashing, learning_to_invert
from fedgauge.attacks.learned.auxiliary import Auxiliary, check_disjoint, cosine_matrix, pseudo_images
from fedgauge.attacks.learned.cache import TensorCache, digest
from fedgauge.attacks.learned.feature_hashing import Sketch
from fedgauge.attacks.learned.learning_to_invert import ImageInverterTraining, Trainer, pairing
from fedgauge.attacks.learned.ridge import RidgeInputs, fit, minimise_on_grid, principal, ridge_inversion
from fedgauge.attacks.learned.shadow_updates import (
    ShadowTrainer,
    Simulator,
    UpdateFeatures,
    aligned_orders,
    flat,
    stages,
)
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.client.chain import Chain, chain
from fedgauge.client.components import SpecError
from fedgauge.client.data.images import mnist5k
from fedgauge.client.models.vision import detached_params, lenet, mlp
from fedgauge.client.rng import generator
from fedgauge.client.training import gradient, local_sgd
from fedgauge.client.transforms import GroupMean, per_example
from fedgauge.client.update import Batch, Update
from fedgauge.defenses.clip import clip
from fedgauge.defenses.noise import gaussian
from fedgauge.defenses.prune import prune
from fedgauge.defenses.sign import sign

SHAPE = (1, 8, 8)
CHAINS = {
    "bare": chain(local_sgd(0.5)),
    "local steps": chain(local_sgd(0.1, 3)),
    "slices": chain(local_sgd(0.1, 2, batch_size=1)),
    "prune": chain(prune(0.1), local_sgd(1.0)),
    "sign of each": chain(per_example(sign()), local_sgd(1.0)),
    "clip of each, then sign": chain(per_example(clip(0.1)), local_sgd(1.0), sign()),
    "sum of two": Chain((prune(0.2), local_sgd(1.0), GroupMean(2))),
}


@pytest.fixture
def cache(tmp_path: Path) -> TensorCache:
    return TensorCache(tmp_path / "shelf")


def images(n: int, shape: tuple[int, int, int] = SHAPE, classes: int = 4) -> Batch:
    rng = generator("images", n)
    return Batch(torch.rand(n, *shape, generator=rng), torch.randint(classes, (n,), generator=rng))


def known_of(model: nn.Module, links: Chain, batch_size: int = 2, auxiliary: Batch | None = None) -> Knowledge:
    return Knowledge(model, links, SHAPE, 4, batch_size, (0.3,), (0.6,), auxiliary=auxiliary)


def small(kind: Callable[..., nn.Module] = lenet, seed: int = 0, **arguments: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(SHAPE, 4, **arguments).eval()


# ----------------------------------------------------------------------------------------------------------- simulated


@pytest.mark.parametrize("links", CHAINS.values(), ids=CHAINS)
def test_simulated_updates_are_those_of_clients_one_by_one(links: Chain) -> None:
    model = small()
    params, known, batch = detached_params(model), known_of(model, links), images(14)
    x, y = batch.x.view(7, 2, *SHAPE), batch.y.view(7, 2)
    found = torch.cat([flat(u) for u in Simulator(known, params).updates(x, y, generator("draws"), chunk=3)])
    client = links(gradient(model, normalise=known.normalise))
    alone = [client(params, Batch(a, b), None) for a, b in zip(x, y, strict=True)]
    torch.testing.assert_close(found, torch.stack([flat({k: t[None] for k, t in u.items()})[0] for u in alone]))


def test_most_chains_take_all_gradients_in_one_pass() -> None:
    assert [
        name for name, links in CHAINS.items() if stages(Simulator(known_of(small(), links), {}).client) is None
    ] == ["slices"]


@pytest.mark.parametrize("links", [chain(gaussian(0.1), local_sgd(0.5)), chain(local_sgd(0.5), gaussian(0.05))])
def test_each_simulated_client_draws_its_own_noise(links: Chain) -> None:
    model = small(mlp, hidden=[32])
    params, known, batch = detached_params(model), known_of(model, links, 1), images(64)
    found = [
        torch.cat([flat(u) for u in Simulator(known, params, quiet).updates(batch.x[:, None], batch.y[:, None], rng)])
        for quiet, rng in ((False, generator("a")), (True, generator("a")))
    ]
    noise = found[0] - found[1]
    assert float(noise.std()) == pytest.approx(0.05, rel=0.01)
    assert float(torch.corrcoef(noise)[0, 1:].abs().max()) < 0.15


def test_a_sum_of_clients_averages_noise_out() -> None:
    model = small(mlp, hidden=[32])
    links = Chain((local_sgd(1.0), gaussian(0.1), GroupMean(4, together=True)))
    known, batch = known_of(model, links, 4), images(64)
    x, y = batch.x.view(16, 4, *SHAPE), batch.y.view(16, 4)
    drawn, mean = (
        torch.cat([flat(u) for u in Simulator(known, detached_params(model), q).updates(x, y, generator("b"))])
        for q in (False, True)
    )
    assert float((drawn - mean).std()) == pytest.approx(0.05, rel=0.02)


def test_the_own_label_s_row_comes_first() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    weight = torch.arange(4.0)[:, None].expand(4, 64)
    update: Update = {"1.weight": weight.expand(2, 4, 64), "1.bias": torch.arange(4.0).expand(2, 4)}
    rows = UpdateFeatures().rows(known_of(model, CHAINS["bare"]), update, torch.tensor([[0, 2], [1, 3]]))
    assert rows[:, -4:].tolist() == [[0, 1, 2, 3], [2, 0, 1, 3], [1, 0, 2, 3], [3, 0, 1, 2]]
    assert rows[1, : 4 * 64 : 64].tolist() == [2, 0, 1, 3]


# ------------------------------------------------------------------------------------------------------------- hashing


def test_a_sketch_by_hand() -> None:
    sketch = Sketch(torch.tensor([0, 1, 0, 2]), torch.tensor([1.0, -1.0, -1.0, 1.0]), 3)
    assert sketch(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).tolist() == [[-2.0, -2.0, 4.0]]
    assert sketch.counts.tolist() == [2, 1, 1]
    unsigned = replace(sketch, signs=None)
    assert unsigned(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).tolist() == [[4.0, 2.0, 4.0]]


def test_signs_keep_inner_products_in_the_mean_and_plain_sums_do_not() -> None:
    a, b = torch.rand(2, 200, generator=generator("pair")).double()
    draws = {
        signed: torch.stack(
            [(s(a[None]) * s(b[None])).sum() for i in range(400) for s in [Sketch.draw(200, 20, signed, generator(i))]]
        )
        for signed in (True, False)
    }
    error = float(draws[True].std()) / 20  # of the mean of 400
    assert abs(float(draws[True].mean() - a @ b)) < 4 * error
    assert float(draws[False].mean()) > float(a @ b) + 20 * error


def test_a_table_too_large_for_memory_is_refused_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_hashing, "free_bytes", lambda device: 8000)
    feature_hashing.check_memory(10, 100, torch.device("cpu"))
    with pytest.raises(ValueError, match="set buckets to at most 100$"):
        feature_hashing.check_memory(10, 101, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"buckets must lie in 1\.\.99"):
        Sketch.draw(100, 100, True, generator("x"))


# --------------------------------------------------------------------------------------------------------------- shelf


def test_the_shelf_forgets_what_was_not_read_for_longest(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path, bound=1000)
    for name in ("a", "b"):
        cache.put(name, {"x": torch.zeros(80)})
    import os

    os.utime(tmp_path / "b.safetensors", (1, 1))
    cache.put("c", {"x": torch.ones(80)})
    assert [cache.read(name) is not None for name in "abc"] == [True, False, True]
    cache.put("d", {"x": torch.zeros(1000)})
    assert cache.read("d") is None


def test_what_is_damaged_is_made_again(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path)
    cache.put("a", {"x": torch.zeros(80)})
    path = tmp_path / "a.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.warns(UserWarning, match="is damaged"):
        made = cache.get("a", lambda: {"x": torch.ones(2)})
    assert made["x"].tolist() == [1, 1]
    assert cache.get("a", lambda: {})["x"].tolist() == [1, 1]


def test_a_digest_tells_apart_what_differs() -> None:
    a = torch.zeros(4)
    different = [a, a.view(2, 2), a.double(), a + 1, {"w": a}, {"v": a}, [a], [a, a], 0, "0", nn.functional.relu]
    assert len({digest(part) for part in different}) == len(different)
    assert digest(a, {"b": a, "a": 1}) == digest(a.clone(), {"a": 1, "b": a})


# --------------------------------------------------------------------------------------------------------------- ridge


def test_ridge_in_a_linear_world_reaches_the_error_that_paper_gives() -> None:
    """x ~ N(0, .05^2), seen = x + N(0, .1^2): the least mean squared error is 1 / (1 / .05^2 + 1 / .1^2) = .002."""
    rng = generator("world")
    x = 0.5 + 0.05 * torch.randn(4000, 6, generator=rng)
    seen = x + 0.1 * torch.randn(4000, 6, generator=rng)
    found = fit(RidgeInputs(seen[:3000]), x[:3000], RidgeInputs(seen[3000:]), x[3000:], 0.0, 1, 1e-3)
    assert found.error == pytest.approx(0.002, rel=0.05)


def test_a_ridge_fitted_without_noise_is_the_best_for_noise_of_any_size() -> None:
    rng = generator("quiet")
    x = 0.5 + 0.05 * torch.randn(4000, 6, generator=rng)
    seen = x + 0.1 * torch.randn(4000, 6, generator=rng)
    found = fit(RidgeInputs(x[:3000]), x[:3000], RidgeInputs(seen[3000:]), x[3000:], 0.0, 1, 1e-3)
    assert found.error == pytest.approx(0.002, rel=0.05)
    # n sigma^2 of |x|^2, within the search's step
    assert 0.5 < found.regulariser / (3000 * 0.1**2 / (6 * 0.05**2)) < 2


@pytest.mark.parametrize("bond", [0.0, 3.0])
def test_both_forms_of_a_ridge_are_one(bond: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = generator("forms")
    x, y, targets = (
        torch.randn(80, 5, generator=rng),
        torch.randint(3, (80,), generator=rng),
        torch.rand(80, 2, generator=rng),
    )
    found = []
    for primal in (True, False):
        # as many rows, of which most are zeros that no form sees, decide which form it is
        padded = x if primal else torch.cat([x, torch.zeros(80, 200)], 1)
        rows = [RidgeInputs(padded[part], y[part]) for part in (slice(60), slice(60, 80))]
        made = fit(rows[0], targets[:60], rows[1], targets[60:], bond, 3, 1.0)
        assert (made.rows is None) == primal
        found.append((made.regulariser, made(rows[1])))
    assert found[0][0] == pytest.approx(found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-8, atol=1e-10)


def test_a_bond_learns_a_map_of_each_label_s_own() -> None:
    rng = generator("bond")
    x, y = torch.rand(600, 1, generator=rng) - 0.5, torch.randint(2, (600,), generator=rng)
    targets = 0.5 + torch.where(y[:, None] == 0, x, -x)
    errors = [
        fit(
            RidgeInputs(x[:500], y[:500]), targets[:500], RidgeInputs(x[500:], y[500:]), targets[500:], bond, 2, 1e-3
        ).error
        for bond in (0.0, 10.0)
    ]
    assert errors[0] > 0.05
    assert errors[1] < 1e-3


def test_downhill_ends_where_the_error_is_least() -> None:
    assert minimise_on_grid(lambda r: (torch.tensor(r).log10() + 3).square().item(), 1.0) == pytest.approx(
        1e-3, rel=1e-6
    )
    with pytest.raises(ValueError, match="not finite"):
        minimise_on_grid(lambda r: float("inf"), 1.0)


def test_principal_directions_are_those_of_the_covariance() -> None:
    rows = torch.randn(300, 12, generator=generator("p")) * torch.tensor([9.0, 5.0, 3.0, *[0.1] * 9])
    found = principal(rows, 3, generator("q"))
    torch.testing.assert_close(found.T @ found, torch.eye(3), atol=1e-5, rtol=0)
    assert float(found[3:].abs().max()) < 0.02


# ------------------------------------------------------------------------------------------------------------- network


@pytest.mark.parametrize("size", range(2, 8))
def test_outputs_are_paired_at_the_least_error(size: int) -> None:
    rng = generator("pairs", size)
    truth, found = torch.rand(3, size, 2, generator=rng), torch.rand(3, size, 2, generator=rng)
    order = pairing(found, truth)
    for k in range(3):
        costs = [float((truth[k] - found[k, list(p)]).square().sum()) for p in permutations(range(size))]
        assert float((truth[k] - found[k, order[k]]).square().sum()) == pytest.approx(min(costs))


def digits(
    batch_size: int = 1, count: int = 400, links: Chain = CHAINS["bare"], seed: int = 0
) -> tuple[Knowledge, Wave, list[Tensor]]:
    """An MLP on digits of 14 x 14, with auxiliary images and the updates of four clients that hold others."""
    data = mnist5k()
    x = nn.functional.avg_pool2d(data.x[: count + 4 * batch_size].float() / 255, 2)
    y = data.y[: count + 4 * batch_size]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = mlp((1, 14, 14), 10, hidden=(32,)).eval()
    auxiliary = Batch(x[:count], y[:count])
    known = Knowledge(model, links, (1, 14, 14), 10, batch_size, (0.13,), (0.31,), auxiliary=auxiliary)
    params, client = detached_params(model), links(gradient(model, normalise=known.normalise))
    batches = [Batch(*(t[count + k * batch_size :][:batch_size] for t in (x, y))) for k in range(4)]
    seen = [Observation(1, k, params, client(params, b, generator("client", k))) for k, b in enumerate(batches)]
    return known, Wave.stack(seen), [b.x for b in batches]


def error_of(found: list[Any], truth: list[Tensor]) -> float:
    return float(torch.stack([mse(t, r.x[match(t, r.x)]).mean() for r, t in zip(found, truth, strict=True)]).mean())


STREAMS: list[Any] = [partial(generator, "learned", k) for k in range(4)]


@pytest.mark.product
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize(
    "links", [chain(local_sgd(0.5)), chain(per_example(sign()), local_sgd(1.0)), chain(local_sgd(1.0), gaussian(0.01))]
)
def test_ridge_beats_the_mean_image_behind_every_defense(batch_size: int, links: Chain) -> None:
    known, wave, truth = digits(batch_size, links=links)
    assert known.auxiliary is not None
    y = mnist5k().y[len(known.auxiliary.y) :][: 4 * batch_size]
    known = replace(known, labels=y.view(4, batch_size))  # how well labels are restored is another question
    found = ridge_inversion().reconstruct(wave, known, Budget(1), STREAMS)
    floor = float(torch.stack([mse(t, known.auxiliary.x.mean(0).expand_as(t)).mean() for t in truth]).mean())
    assert error_of(found, truth) < 0.75 * floor
    assert len({r.objective for r in found}) == 1, "one inverter serves all clients"


def test_a_network_is_trained_once_for_all_waves_of_a_round_and_packing_changes_nothing() -> None:
    known, wave, _ = digits()
    attack = learning_to_invert.learning_to_invert(hidden=24, batch=32)
    together = attack.reconstruct(wave, known, Budget(30), STREAMS)
    kept = sorted((TensorCache.own().folder).glob("inverter-*.safetensors"))
    apart = [attack.reconstruct(wave.of([k]), known, Budget(30), STREAMS[k : k + 1])[0] for k in range(4)]
    assert sorted((TensorCache.own().folder).glob("inverter-*.safetensors")) == kept
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a.x, b.x)


class Killed(Exception):
    """What a killed training looks like from within."""


def test_a_killed_training_goes_on_from_its_checkpoint_to_the_same_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, wave, _ = digits(batch_size=2, links=chain(local_sgd(1.0), gaussian(0.01)))
    attack, learned = learning_to_invert.learning_to_invert(hidden=8, batch=16), []

    def training(folder: str) -> ImageInverterTraining:
        shadow = ShadowTrainer(known, wave.params, UpdateFeatures(False), cache=TensorCache(tmp_path / folder))
        return ImageInverterTraining(attack, shadow, Budget(40), "")

    whole = training("whole").inverter(Deadline(0.0, None))
    monkeypatch.setattr(learning_to_invert, "SAVED", 0.0)
    train_step = Trainer.train_step

    def dies(self: Trainer, rows: Tensor, truth: Tensor) -> None:
        if len(learned) == 17:
            raise Killed
        learned.append(self.step)
        train_step(self, rows, truth)

    monkeypatch.setattr(Trainer, "train_step", dies)
    with pytest.raises(Killed):
        training("killed").inverter(Deadline(0.0, None))
    learned.append(-1)
    again = training("killed").inverter(Deadline(0.0, None))
    assert learned[17:20] == [-1, 17, 18]
    for a, b in zip(whole.network.parameters(), again.network.parameters(), strict=True):
        assert torch.equal(a, b)
    assert (whole.error, whole.steps) == (again.error, again.steps)


def test_the_next_round_s_network_begins_with_the_last_one_s_weights() -> None:
    known, wave, _ = digits()
    attack = learning_to_invert.learning_to_invert(hidden=64, batch=32, rate=1e-3)
    cold, kept = attack.advance(wave, known, Budget(120), STREAMS, [attack.initial()] * 4)
    moved = replace(
        wave, params={k: t + 1e-3 * torch.randn(t.shape, generator=generator(k)) for k, t in wave.params.items()}
    )
    warm, _ = attack.advance(moved, known, Budget(120), STREAMS, kept)
    anew, _ = attack.advance(moved, known, Budget(30), STREAMS, [attack.initial()] * 4)
    assert warm[0].iterations == anew[0].iterations == 30
    assert warm[0].objective <= cold[0].objective * 1.02
    assert warm[0].objective < anew[0].objective * 0.95


def test_training_that_runs_out_of_time_says_so() -> None:
    known, wave, _ = digits()
    attack = learning_to_invert.learning_to_invert(hidden=24, batch=32)
    (found, *_) = attack.reconstruct(wave, known, Budget(10**6, seconds=0.2), STREAMS)
    assert found.status == "out_of_budget"
    assert "steps of training when its seconds were over" in found.reason
    assert found.x is not None


def test_the_held_out_error_is_of_images_that_nothing_was_learned_from(cache: TensorCache) -> None:
    known, wave, _ = digits(batch_size=2)
    shadow = ShadowTrainer(known, wave.params, UpdateFeatures(), passes=2, cache=cache)
    learned, held = (set(shadow.shadow_data(part).groups.flatten().tolist()) for part in (False, True))
    assert not learned & held
    assert len(learned) == 360 and len(held) == 40
    y = known.auxiliary.y if known.auxiliary is not None else torch.empty(0)
    assert bool((y[shadow.groups(False)].diff(dim=1) >= 0).all())


def test_lessons_bear_the_labels_that_the_attacker_would_restore(
    cache: TensorCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistakes and all; an image stands where its own label does, as far as that is among them."""
    known, wave, _ = digits(batch_size=2)
    assert known.auxiliary is not None
    y = known.auxiliary.y

    def restored(seen: Wave, known: Knowledge, method: str = "auto") -> Tensor:
        return torch.tensor([[3, 0]]).expand(len(seen), 2)

    monkeypatch.setattr("fedgauge.attacks.labels.restore", restored)
    shadow_data = ShadowTrainer(known, wave.params, UpdateFeatures(), cache=cache).shadow_data(False)
    assert shadow_data.labels.unique(dim=0).tolist() == [[0, 3]]
    own = y[shadow_data.groups]
    swapped = (own[:, 0] == 3) | (own[:, 1] == 0)
    assert int(((own == 0) | (own == 3)).any(1).sum()) > 20
    assert not bool((swapped & (own != shadow_data.labels).all(1)).any()), "the one that has its label stands there"
    given = ShadowTrainer(
        replace(known, labels=torch.zeros(4, 2, dtype=torch.int64)), wave.params, UpdateFeatures(), cache=cache
    )
    assert torch.equal(given.shadow_data(False).labels, y[given.groups(False)]), (
        "right ones where the clients' are given"
    )


def test_arranged_images_stand_at_their_labels() -> None:
    groups = torch.tensor([[10, 11, 12], [20, 21, 22], [30, 31, 32]])
    y = torch.tensor([[1, 2, 5], [0, 0, 4], [1, 2, 3]])
    labels = torch.tensor([[1, 2, 5], [0, 4, 4], [2, 3, 7]])
    found = aligned_orders(groups, y, labels).tolist()
    assert found[0] == [10, 11, 12]
    assert (found[1][0] in (20, 21)) and 22 in found[1][1:]
    assert found[2] == [31, 32, 30]


# ----------------------------------------------------------------------------------------------------------- bad input


def test_an_inverter_serves_the_batch_size_that_it_was_trained_on() -> None:
    """By label, a network's shape is the same for any batch size, and would be taken for one that fits."""
    attack = learning_to_invert.learning_to_invert(hidden=8, batch=16, by_label=True)
    known, wave, _ = digits(batch_size=1)
    _, kept = attack.advance(wave, known, Budget(2), STREAMS, [attack.initial()] * 4)
    other, theirs, _ = digits(batch_size=2)
    found, _ = attack.advance(theirs, other, Budget(2), STREAMS, kept)
    assert {r.status for r in found} == {"not_applicable"}
    assert "was trained on batches of 1, and these updates are of batches of 2" in found[0].reason
    for make in (attack, ridge_inversion(), learning_to_invert.learning_to_invert(architecture="refined")):
        given = replace(known, labels=torch.zeros(4, 2, dtype=torch.int64))
        (refused, *_) = make.reconstruct(wave, given, Budget(2), STREAMS)
        assert refused.status == "not_applicable"
        assert "expected 1 given labels for each update" in refused.reason


def test_a_table_of_updates_too_large_for_memory_is_not_applicable_with_the_buckets_that_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, wave, _ = digits()
    monkeypatch.setattr(feature_hashing, "free_bytes", lambda device: 8 * 360 * 500)
    for make in (ridge_inversion(), learning_to_invert.learning_to_invert(hidden=8)):
        (found, *_) = make.reconstruct(wave, known, Budget(1), STREAMS)
        assert found.status == "not_applicable"
        assert found.reason.endswith("set buckets to at most 500")
    (fits, *_) = ridge_inversion(buckets=500).reconstruct(wave, known, Budget(1), STREAMS)
    assert fits.status == "converged"


@pytest.mark.parametrize(
    ("auxiliary", "words"),
    [
        (None, "needs auxiliary images, and the attacker has none"),
        (images(20, (3, 8, 8)), r"expected auxiliary images of the clients' shape \(1, 14, 14\), got \(3, 8, 8\)"),
        (Batch(torch.rand(3, 1, 14, 14), torch.zeros(3, dtype=torch.int64)), "at least 4 auxiliary images, got 3"),
    ],
)
@pytest.mark.parametrize("make", [ridge_inversion, partial(learning_to_invert.learning_to_invert, hidden=8)])
def test_auxiliary_images_that_will_not_do_are_told(make: Any, auxiliary: Batch | None, words: str) -> None:
    known, wave, _ = digits()
    (found, *_) = make().reconstruct(wave, replace(known, auxiliary=auxiliary), Budget(1), STREAMS)
    assert found.status == "not_applicable"
    with pytest.raises(ValueError, match=words):
        raise ValueError(found.reason)


def test_settings_out_of_range_are_refused() -> None:
    for wrong in ({"hidden": 0}, {"rate": 0.0}, {"again": 0.0}, {"buckets": -1}, {"patience": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            learning_to_invert.learning_to_invert(**wrong)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match="passes must be at least 1, got 0"):
        ridge_inversion(passes=0)


# ----------------------------------------------------------------------------------------------------------- auxiliary


def test_an_auxiliary_image_in_a_client_s_shard_is_refused_with_the_count(make_federation: Callable[..., Any]) -> None:
    shards = make_federation().shards
    check_disjoint(shards)
    both = replace(shards, auxiliary=torch.cat([shards.auxiliary, shards.indices[1][:3]]))
    with pytest.raises(ValueError, match=r"^3 of the .* auxiliary images are in client 1's shard"):
        check_disjoint(both)


def test_a_mixture_holds_the_share_that_it_says() -> None:
    batch = images(400)
    found = Auxiliary(size=50, classes=(0, 1), beta=0.3).of(batch, 4, generator("mix"))
    assert len(found.y) == 50
    assert int((found.y >= 2).sum()) == 15
    own = {x.numpy().tobytes() for x in batch.x}
    assert len({x.numpy().tobytes() for x in found.x} & own) == 50
    assert set(Auxiliary(classes=(3,)).of(batch, 4, generator("ood")).y.tolist()) == {3}
    with pytest.raises(ValueError, match="expected at most 400 auxiliary images"):
        Auxiliary(size=500).of(batch, 4, generator("many"))
    with pytest.raises(ValueError, match=r"classes lie in 0\.\.3, got 4"):
        Auxiliary(classes=(4,)).of(batch, 4, generator("class"))


def test_pseudo_images_have_the_moments_of_the_images_in_their_basis() -> None:
    torch.testing.assert_close(cosine_matrix(8) @ cosine_matrix(8).T, torch.eye(8, dtype=torch.float64))
    smooth = 0.5 + 0.05 * torch.randn(500, 1, 1, 1, generator=generator("s")).expand(500, 1, 8, 8)
    dct, pixel = (pseudo_images(smooth, 2000, kind, generator("m")) for kind in ("dct", "pixel"))  # type: ignore[arg-type]
    for made in (dct, pixel):
        assert float(made.mean()) == pytest.approx(0.5, abs=0.01)
        assert float(made[:, 0, 3, 3].std()) == pytest.approx(0.05, rel=0.1)
    assert float(dct.std(dim=(2, 3)).max()) < 1e-5, "constant images have one coefficient"
    assert float(pixel.std(dim=(2, 3)).mean()) == pytest.approx(0.05, rel=0.1)


def test_the_knowledge_card_and_the_knowledge_have_the_chosen_images(make_federation: Callable[..., Any]) -> None:
    fed = make_federation()
    table = {"use": "ridge_inversion", "auxiliary": {"size": 40, "classes": [0, 1], "pseudo": 10}}
    planned = PlannedAttack.from_table(table, "[[attack]] #1")
    known = Auditor(fed).knowledge(planned)
    assert known.auxiliary is not None
    assert len(known.auxiliary.x) == 50
    assert set(known.auxiliary.y[:40].tolist()) == {0, 1}
    assert (
        "40 auxiliary images, 100% of them of classes 0, 1 alone and 10 pseudo-images, normal in the cosine"
        in knowledge_card(fed, planned)
    )
    assert PlannedAttack.from_json(planned.to_json()) == planned
    assert "auxiliary" not in PlannedAttack("x", {"use": "ridge_inversion"}).to_json(), "old keys stay"
    with pytest.raises(SpecError, match=r"auxiliary: Auxiliary\(\) has no argument 'sise'"):
        PlannedAttack.from_table({**table, "auxiliary": {"sise": 4}}, "[[attack]] #1")
