"""Tuning on shadow updates: it reads no private update, and finds the prior that a noise asks for."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Stream, Wave
from fedgauge.attacks.engine.cache import TensorCache
from fedgauge.attacks.engine.gradient_distances import (
    rounding_likelihood,
)
from fedgauge.attacks.generative.gifd import gifd
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.grading.tuning import Tuning
from fedgauge.attacks.learned.generators import GeneratorTraining
from fedgauge.attacks.matching.priors import fitted_total_variation, gaussian, total_variation
from fedgauge.attacks.matching.recipes import bayes, inverting_gradients
from fedgauge.attacks.modality.images import ImageModality
from fedgauge.attacks.plan import AttackPlan, PlannedAttack
from fedgauge.attacks.source import FederationSource
from fedgauge.attacks.threat_model import public_knowledge
from fedgauge.client.chain import chain
from fedgauge.client.federation import Federation
from fedgauge.client.local_training import local_sgd
from fedgauge.client.protocol import Protocol
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch
from fedgauge.defenses.quantize import quantize

WHITE = 0.9
NOISY = [{"use": "gaussian", "sigma": 0.1}, {"use": "local_sgd", "rate": 0.1}]


@lru_cache
def federation(batch_size: int = 2, auxiliary: int = 200) -> Federation:
    data = {"use": "mnist5k", "batch_size": batch_size, "auxiliary": auxiliary}
    tables = {"rounds": 1, "clients": 4, "data": data, "model": {"use": "lenet"}, "chain": NOISY}
    return Federation(Protocol.from_tables(tables))


@lru_cache
def wave() -> Wave:
    return FederationSource(federation()).wave(range(4))


def tuned(folder: Path, seen: Wave, attack: Attack, iterations: int = 30) -> tuple[Attack, str]:
    fed = federation()
    tuning = Tuning(ImageModality(fed.shards.dataset), Budget(iterations), 4, 0, 1, TensorCache(folder))
    return tuning.of(attack, public_knowledge(fed), seen)


# ------------------------------------------------------------------------------------------------- what is tried


def simple(x: Tensor, y: Tensor, classes: int = 2) -> Knowledge:
    model = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), classes))
    rest = chain(local_sgd(0.1))
    return Knowledge(model, rest, tuple(x.shape[1:]), classes, 2, (0.4,), (0.3,), auxiliary=Batch(x, y))


def test_the_gaussian_by_class_is_a_density_around_each_class_mean() -> None:
    y = torch.arange(400) % 2
    x = torch.rand(400, 1, 2, 3, generator=generator(0)) * 0.2 + 0.5 * y.view(-1, 1, 1, 1)
    known = simple(x, y)
    bound = gaussian(by_class=True).bind(known, {})
    means = torch.stack([x[y == c].flatten(1).double().mean(0) for c in range(2)])
    centred = x.flatten(1).double() - means[y]
    # Ledoit and Wolf shrink 400 draws of 6 pixels of equal variance to nearly one variance for all
    oracle = torch.distributions.MultivariateNormal(torch.zeros(6).double(), centred.square().mean() * torch.eye(6))
    guess, labels = torch.rand(2, 1, 2, 3, dtype=torch.float64), torch.tensor([1, 0])
    apart = guess.flatten(1) - means[labels]
    expected = float((oracle.log_prob(torch.zeros(6).double()) - oracle.log_prob(apart)).sum())
    assert float(bound.energy(known.normalise(guess), labels)) == pytest.approx(expected, rel=0.1)
    soft = nn.functional.one_hot(labels, 2).double()
    assert float(bound.energy(known.normalise(guess), soft)) == pytest.approx(
        float(bound.energy(known.normalise(guess), labels))
    )
    best = bound.likeliest(labels[None])
    assert float(bound.energy(best[0], labels)) == pytest.approx(0, abs=1e-8)


def test_a_class_without_examples_has_the_mean_of_all() -> None:
    x = torch.rand(6, 1, 2, 2, generator=generator(1))
    known = simple(x, torch.zeros(6, dtype=torch.int64), classes=3)
    best = gaussian(by_class=True).bind(known, {}).likeliest(torch.tensor([[2]]))
    torch.testing.assert_close(best[0, 0], known.normalise(x.double().mean(0)), rtol=1e-5, atol=1e-5)


def test_total_variation_is_fitted_by_maximum_likelihood() -> None:
    x = torch.rand(50, 1, 4, 5, generator=generator(2))
    known = simple(x, torch.zeros(50, dtype=torch.int64))
    weight, pixels = fitted_total_variation(known), 2 * 20
    energy = float(total_variation(1.0).bind(known, {})(known.normalise(x)))  # type: ignore[operator]

    def log_density(w: float) -> float:  # of one batch: the energy is homogeneous of degree 1
        return pixels * math.log(w) - w * energy

    assert all(log_density(weight) > log_density(weight * factor) for factor in (0.5, 0.9, 1.1, 2.0))
    assert fitted_total_variation(simple(2 * x, known.auxiliary.y)) == pytest.approx(weight / 2, rel=1e-5)  # type: ignore[union-attr]


@pytest.mark.parametrize("bits", [2, 4])
def test_the_variance_of_a_rounding_is_read_from_the_update(bits: int) -> None:
    link = quantize(bits)
    exact = {"w": torch.randn(5000, generator=generator(3)), "b": 0.01 * torch.randn(3000, generator=generator(4))}
    values = []
    for i in range(20):
        seen = link.apply(exact, generator("rounding", i))
        values.append(float(rounding_likelihood(link.levels_in_norm)(seen, exact)))
    # each of 8,000 standardised squares has mean 1, halved
    assert sum(values) / len(values) == pytest.approx(4000, rel=0.1)
    zeros = {"w": torch.zeros(4)}
    assert math.isfinite(float(rounding_likelihood(1)(zeros, zeros)))


def test_levels_are_known_where_nothing_else_changes_the_update() -> None:
    step = local_sgd(0.1)
    links = (chain(step, quantize(3)), chain(step), chain(step, quantize(3, "uniform")))
    assert [one.levels_in_norm for one in links] == [3, 0, 0]


def test_other_priors_stay_where_total_variation_is_replaced() -> None:
    known = public_knowledge(federation())
    attack = bayes(prior={"use": "magnitude", "weight": 2.0})
    found = attack.variants(known)
    assert len(found) == 5
    for one in found.values():
        assert any(getattr(p, "weight", 0) == 2.0 for p in one.objective.priors)  # type: ignore[attr-defined]
    assert not inverting_gradients().variants(replace(known, auxiliary=None))


def test_a_generator_is_searched_under_the_priors_of_pixels() -> None:
    known = public_knowledge(federation())
    theirs = bayes().variants(known)
    found = gifd(radius=0.3, normal=5.0).variants(known)  # its own is replaced, too
    assert found.keys() == theirs.keys() and len(found) == 5
    for words, one in found.items():
        assert isinstance(one, gifd) and one.radius == 0.3
        same = {repr(p) for p in (total_variation(one.tv), gaussian(one.normal, by_class=True)) if p.weight}
        assert same == {repr(p) for p in theirs[words].objective.priors}  # type: ignore[attr-defined]
    assert gifd().variants(replace(known, auxiliary=None)) == {}


# ------------------------------------------------------------------------------------------------- what is chosen


def test_tuning_finds_a_stronger_prior_under_noise(tmp_path: Path) -> None:
    fed, seen, budget = federation(), wave(), Budget(30)
    known = replace(public_knowledge(fed), labels=torch.stack([fed.batch_at(c, 1).y.sort().values for c in range(4)]))
    tuning = Tuning(ImageModality(fed.shards.dataset), budget, 4, 0, 1, TensorCache(tmp_path))
    best = tuning.of(bayes(), known, seen)
    streams = [partial(generator, "tuned", k) for k in range(4)]
    errors = []
    for attack in (bayes(), best[0]):
        found = attack.reconstruct(seen, known, budget, streams)
        truth = [fed.batch_at(c, 1) for c in range(4)]
        pairs = [(t.x[t.y.argsort()], f.x) for t, f in zip(truth, found, strict=True)]
        errors.append(sum(float((a - b).square().mean()) for a, b in pairs if b is not None) / 4)
    assert "Gaussian prior" in best[1]
    assert errors[1] < 0.5 * errors[0], "more than 3 dB"


def test_the_choice_reads_no_update_and_is_made_once(tmp_path: Path) -> None:
    seen = wave()
    blank = replace(seen, update={k: torch.full_like(t, math.nan) for k, t in seen.update.items()})
    first = tuned(tmp_path / "a", seen, bayes(), 3)
    assert tuned(tmp_path / "b", blank, bayes(), 3)[1] == first[1]
    assert tuned(tmp_path / "a", seen.of([2]), bayes(), 3)[1] == first[1]
    assert len(list((tmp_path / "a").glob("*.safetensors"))) == 1
    moved = replace(seen, params={k: t + 0.1 for k, t in seen.params.items()})
    tuned(tmp_path / "a", moved, bayes(), 3)
    assert len(list((tmp_path / "a").glob("*.safetensors"))) == 2, "other weights are tuned anew"


class _Saturating(Attack):
    """Its variant is ahead after few iterations and behind after all, as a strong prior is where nothing hides the update."""

    tunes = True

    def __init__(self, early: bool, spent: list[int]) -> None:
        self.early, self.spent = early, spent  # spent: evaluations of gradients

    def __repr__(self) -> str:
        return f"_Saturating({self.early})"

    def variants(self, known: Knowledge) -> dict[str, Attack]:
        return {"early": _Saturating(True, self.spent)}

    def reconstruct(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream]
    ) -> list[Reconstruction]:
        self.spent.append(budget.iterations * len(streams))
        error = 0.2 if self.early else 0.5 - 0.4 * budget.iterations / 100
        x = (WHITE - error) * torch.ones(known.batch_size, *known.shape)
        return [Reconstruction(x, None, 0.0, budget.iterations, 0.0, "converged") for _ in streams]


def test_an_early_lead_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the attack as given has an error of .22 after 70 of 100 iterations, of .1 after all; the variant has .2 throughout
    seen, known = wave(), public_knowledge(federation())
    assert known.auxiliary is not None
    white = replace(known, auxiliary=known.auxiliary._replace(x=torch.full_like(known.auxiliary.x, WHITE)))
    tuning = Tuning(ImageModality(federation().shards.dataset), Budget(100), 4, 0, 1, TensorCache(tmp_path))
    spent: list[int] = []
    chosen, told = tuning.of(_Saturating(False, spent), white, seen)
    assert repr(chosen) == "_Saturating(False)" and "20.0 dB" in told
    assert 0 < sum(spent) <= 0.5 * 4 * 100, "half of what the attack itself costs"


def test_the_images_of_the_trial_are_not_among_the_attackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[tuple[Knowledge, Wave]] = []
    attack = bayes()

    def spy(self: Attack, seen: Wave, known: Knowledge, *others: object) -> object:
        met.append((known, seen))
        return original(self, seen, known, *others)  # type: ignore[arg-type]

    original = type(attack).reconstruct
    monkeypatch.setattr(type(attack), "reconstruct", spy)
    tuned(tmp_path, wave(), attack, 10)
    assert met
    everybody = public_knowledge(federation()).auxiliary
    for known, seen in met:
        assert known.auxiliary is not None
        assert everybody is not None
        assert len(known.auxiliary.y) + len(seen) * known.batch_size == len(everybody.y)


@pytest.mark.full
def test_a_generator_is_trained_once_for_the_trials_of_all_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Tensor] = []
    train = GeneratorTraining._train

    def counted(self: GeneratorTraining, x: Tensor, name: str) -> dict[str, Tensor]:
        trained.append(x)
        return train(self, x, name)

    monkeypatch.setattr(GeneratorTraining, "_train", counted)
    monkeypatch.setenv("FEDGAUGE_CACHE", str(tmp_path))
    fed, attack = federation(), gifd(latent=4, width=4, training=3)
    for round in (1, 2):
        tuning = Tuning(ImageModality(fed.shards.dataset), Budget(2), 4, 0, round, TensorCache(tmp_path / str(round)))
        assert tuning.of(attack, public_knowledge(fed), wave())[1].startswith("tuned")
    assert len(trained) == 1
    everybody = public_knowledge(fed).auxiliary
    assert everybody is not None and len(trained[0]) == len(everybody.y) - 2, "it knows no image of the trial"


def test_too_few_auxiliary_images_skip_tuning() -> None:
    planned = PlannedAttack.from_table({"use": "bayes", "iterations": 3, "tune": "shadow"}, "here")
    few = federation(batch_size=2, auxiliary=2)
    seen = FederationSource(few).wave()
    (result,) = Auditor(FederationSource(few)).audit(planned, seen)
    assert result.reconstruction.reason.startswith("not tuned")
    assert result.reconstruction.x is not None


# ------------------------------------------------------------------------------------------------- the plan


def test_attacks_are_tuned_where_the_chain_draws_noise_unless_told_otherwise() -> None:
    tables = [{"use": "bayes"}, {"use": "bayes", "name": "as_is", "tune": "off"}, {"use": "analytic"}]
    plans = {noisy: AttackPlan.from_tables(tables, {}, 1, 1, noisy=noisy).attacks for noisy in (False, True)}
    assert [p.tune for p in plans[True][:3]] == ["shadow", "off", "off"]
    assert [p.tune for p in plans[False][:3]] == ["off", "off", "off"]
    for planned in plans[True]:
        assert PlannedAttack.from_json(planned.to_json()) == planned
        assert ("tune" in planned.to_json()) == (planned.tune == "shadow"), "older ledgers lack the key"
