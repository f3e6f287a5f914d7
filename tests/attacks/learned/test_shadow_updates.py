"""Shadow updates: they are those of the clients, with the labels that the attacker would restore."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Budget, Knowledge, Wave
from fedgauge.attacks.engine.gradients.per_problem import whole_batch_update
from fedgauge.attacks.engine.simulator import Simulator
from fedgauge.attacks.learned import learning_to_invert, shadow_updates
from fedgauge.attacks.learned.ridge import ridge_inversion
from fedgauge.attacks.learned.shadow_updates import ShadowTrainer, UpdateFeatures, aligned_orders, sketch
from fedgauge.client.chain import Chain, chain
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params, lenet, mlp
from fedgauge.client.rng import generator
from fedgauge.client.transforms import GroupMean
from fedgauge.client.update import Batch, Update, as_rows
from fedgauge.defenses.noise import gaussian
from tests.attacks.learned.small_threats import CHAINS, SHAPE, STREAMS, digits, images


def known_of(model: nn.Module, links: Chain, batch_size: int = 2, auxiliary: Batch | None = None) -> Knowledge:
    return Knowledge(model, links, SHAPE, 4, batch_size, (0.3,), (0.6,), auxiliary=auxiliary)


def small(kind: Callable[..., nn.Module] = lenet, seed: int = 0, **arguments: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(SHAPE, 4, **arguments).eval()


@pytest.mark.parametrize("links", CHAINS.values(), ids=CHAINS)
def test_simulated_updates_are_those_of_clients_one_by_one(links: Chain) -> None:
    model = small()
    params, known, batch = detached_params(model), known_of(model, links), images(14)
    x, y = batch.x.view(7, 2, *SHAPE), batch.y.view(7, 2)
    found = torch.cat([as_rows(u) for u in Simulator(known, params).updates(x, y, generator("draws"), chunk=3)])
    client = links(gradient(model, normalise=known.normalise))
    alone = [client(params, Batch(a, b), None) for a, b in zip(x, y, strict=True)]
    torch.testing.assert_close(found, torch.stack([as_rows({k: t[None] for k, t in u.items()})[0] for u in alone]))


def test_most_chains_take_all_gradients_in_one_pass() -> None:
    clients = {name: Simulator(known_of(small(), links), {}).client for name, links in CHAINS.items()}
    assert [name for name, links in clients.items() if whole_batch_update(links, by_example=True) is None] == ["slices"]


@pytest.mark.parametrize("links", [chain(gaussian(0.1), local_sgd(0.5)), chain(local_sgd(0.5), gaussian(0.05))])
def test_each_simulated_client_draws_its_own_noise(links: Chain) -> None:
    model = small(mlp, hidden=[32])
    params, known, batch = detached_params(model), known_of(model, links, 1), images(64)
    found = [
        torch.cat(
            [as_rows(u) for u in Simulator(known, params, quiet).updates(batch.x[:, None], batch.y[:, None], rng)]
        )
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
        torch.cat([as_rows(u) for u in Simulator(known, detached_params(model), q).updates(x, y, generator("b"))])
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


def test_the_held_out_error_is_of_images_that_nothing_was_learned_from() -> None:
    known, wave, _ = digits(batch_size=2)
    shadow = ShadowTrainer(known, wave.params, UpdateFeatures(), passes=2)
    learned, held = (set(shadow.shadow_data(part).groups.flatten().tolist()) for part in (False, True))
    assert not learned & held
    assert len(learned) == 360 and len(held) == 40
    y = known.auxiliary.y if known.auxiliary is not None else torch.empty(0)
    assert bool((y[shadow.groups(False)].diff(dim=1) >= 0).all())


def test_lessons_bear_the_labels_that_the_attacker_would_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistakes and all; an image stands where its own label does, as far as that is among them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # a name there does not tell how labels are restored
    known, wave, _ = digits(batch_size=2)
    assert known.auxiliary is not None
    y = known.auxiliary.y

    def restored(seen: Wave, known: Knowledge, method: str = "auto") -> Tensor:
        return torch.tensor([[3, 0]]).expand(len(seen), 2)

    monkeypatch.setattr("fedgauge.attacks.label_restoration.restore", restored)
    shadow_data = ShadowTrainer(known, wave.params, UpdateFeatures()).shadow_data(False)
    assert shadow_data.labels.unique(dim=0).tolist() == [[0, 3]]
    own = y[shadow_data.groups]
    swapped = (own[:, 0] == 3) | (own[:, 1] == 0)
    assert int(((own == 0) | (own == 3)).any(1).sum()) > 20
    assert not bool((swapped & (own != shadow_data.labels).all(1)).any()), "the one that has its label stands there"
    given = ShadowTrainer(
        replace(known, labels=torch.zeros(4, 2, dtype=torch.int64)),
        wave.params,
        UpdateFeatures(),
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


@pytest.mark.parametrize(
    "auxiliary",
    [None, Batch(torch.rand(3, 1, 14, 14), torch.zeros(3, dtype=torch.int64))],
    ids=["none", "too few"],
)
@pytest.mark.parametrize("make", [ridge_inversion, partial(learning_to_invert.learning_to_invert, hidden=8)])
def test_too_few_auxiliary_images_are_reported(make: Any, auxiliary: Batch | None) -> None:
    known, wave, _ = digits()
    (found, *_) = make().reconstruct(wave, replace(known, auxiliary=auxiliary), Budget(1), STREAMS)
    assert found.status == "not_applicable" and "4 auxiliary" in found.reason


# -------------------------------------------------------------------------------------- feature hashing


@pytest.mark.parametrize("signed", [True, False])
def test_hashing_is_a_matrix_of_one_sign_in_each_row_and_adds_up_variances(signed: bool) -> None:
    bins, signs = sketch(30, 7, signed)
    matrix = torch.nn.functional.one_hot(bins, 7) * signs[:, None]
    rows, features = torch.randn(5, 30, generator=generator("rows")), UpdateFeatures(False, 7, signed)
    torch.testing.assert_close(features.hashed(rows), rows @ matrix)
    torch.testing.assert_close(features.noise(30).square(), matrix.square().sum(0))
    assert signs.unique().tolist() == ([-1, 1] if signed else [1])


def test_a_table_of_updates_too_large_for_memory_is_not_applicable_with_the_buckets_that_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, wave, _ = digits()
    monkeypatch.setattr(shadow_updates, "free_bytes", lambda device: 8 * 360 * 500)
    for make in (ridge_inversion(), learning_to_invert.learning_to_invert(hidden=8)):
        (found, *_) = make.reconstruct(wave, known, Budget(1), STREAMS)
        assert found.status == "not_applicable"
        assert "buckets" in found.reason and found.reason.endswith(" 500")
    (fits, *_) = ridge_inversion(buckets=500).reconstruct(wave, known, Budget(1), STREAMS)
    assert fits.status == "converged"
