"""Scores: the likelihood ratio against densities written out, the others on paper, and what no score may do."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import scipy.integrate
import scipy.stats
import torch
from torch import Generator, Tensor, nn
from torch.distributions import MultivariateNormal

from fedgauge.attacks.base import Knowledge, Wave
from fedgauge.attacks.membership.candidates import above
from fedgauge.attacks.membership.gradients import CandidateGradients
from fedgauge.attacks.membership.likelihood import RestOfBatch, _Expected, _slopes, gain
from fedgauge.attacks.membership.scores import SCORES, Scoring, against_non_members, check_non_members
from fedgauge.client.chain import Chain, chain
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd, local_training
from fedgauge.client.models.vision import detached_params
from fedgauge.client.rng import generator
from fedgauge.client.transforms import UpdateDistribution, UpdateTransform, per_example
from fedgauge.client.update import Batch, Update, as_rows, concatenate
from fedgauge.defenses.clip import clip
from fedgauge.defenses.dp_sgd import dp_sgd
from fedgauge.defenses.mask import mask
from fedgauge.defenses.noise import gaussian, laplace
from fedgauge.defenses.precode import precode
from fedgauge.defenses.prune import prune
from fedgauge.defenses.quantize import quantize
from fedgauge.defenses.sign import sign
from tests.attacks.refusals import check_named

SIZE, CLASSES, WIDTH = 3, 3, 8
CHAINS: Mapping[str, Chain] = {
    "none": chain(local_sgd(0.1)),
    "noise": chain(gaussian(0.05), local_sgd(0.1)),
    "laplace": chain(laplace(0.05), local_sgd(0.1)),
    "DP-SGD": chain(dp_sgd(1.0, 0.1, SIZE), local_sgd(0.1)),
    "clip": chain(clip(0.5), local_sgd(0.1)),
    "sign": chain(local_sgd(0.1), sign(0.001)),
    "prune": chain(local_sgd(0.1), prune(0.2)),
    "mask": chain(local_sgd(0.1), mask(0.5)),
    "2 bits": chain(local_sgd(0.1), quantize(2)),
    "steps": chain(local_sgd(0.1, 3)),
    "ten steps": chain(local_sgd(0.2, 10)),  # whose later gradients vanish
}


def people(n: int, purpose: str) -> Batch:
    """Examples in clusters by label."""
    rng = generator("people", purpose)
    y = torch.arange(n) % CLASSES
    centres = torch.randn(CLASSES, WIDTH, generator=generator("centres"))
    return Batch((centres[y] + torch.randn(n, WIDTH, generator=rng)).view(n, 1, 1, WIDTH).double(), y)


def knowledge(links: Chain) -> Knowledge:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()
    return Knowledge(model, links, (1, 1, WIDTH), CLASSES, SIZE, (), (), auxiliary=people(300, "public"))


def observed(known: Knowledge, members: Batch, updates: int = 1) -> Wave:
    """Updates on the members, SIZE of them each."""
    params = detached_params(known.model)
    client = known.chain(gradient(known.model))
    seen = [
        client(params, Batch(*(t[k * SIZE : (k + 1) * SIZE] for t in members)), generator("noise", k))
        for k in range(updates)
    ]
    return Wave(1, tuple(range(updates)), params, {k: torch.stack([u[k] for u in seen]) for k in params})


def scoring(known: Knowledge, wave: Wave, candidates: Batch) -> Scoring:
    public = known.auxiliary
    assert public is not None
    rest = RestOfBatch.of_population(CandidateGradients(known, wave.params, public), axes=10)
    return Scoring(CandidateGradients(known, wave.params, candidates), wave, rest)


def by_density(found: Scoring, sigma: float, columns: Tensor, shrink: float = 1.0) -> Tensor:
    """log p(seen | candidate) - log p(seen | another), by normal densities with full covariances."""
    rest, known = found.rest, found.candidates.known
    assert rest is not None
    spread = (rest.axes.T * rest.variances) @ rest.axes + torch.diag(rest.entries)
    floor = 1e-6 * float(as_rows(found.wave.update).square().mean())
    rate, size = known.chain.local.rate, known.batch_size
    noise = (floor + (shrink * sigma) ** 2) * torch.eye(len(columns)).double()
    whole = (rate / size) ** 2 * (size - 1) * spread[columns][:, columns] + noise
    rows = torch.cat(list(found.candidates.rows())) * found.candidates.kept[:, None]
    seen = shrink * as_rows(found.wave.update)[0, columns]

    def log_density(mine: Tensor) -> Tensor:
        found: Tensor = MultivariateNormal(
            -rate / size * ((size - 1) * rest.mean + mine)[..., columns], whole
        ).log_prob(seen)
        return found

    return log_density(rows) - log_density(rest.instead)


@pytest.mark.parametrize(("name", "sigma"), [("none", 0.0), ("noise", 0.005), ("DP-SGD", 0.1 / SIZE * 0.1)])
def test_under_normal_noise_it_is_the_ratio_of_two_densities(name: str, sigma: float) -> None:
    known = knowledge(CHAINS[name])
    members = people(SIZE, "members")
    found = scoring(known, observed(known, members), people(20, "others"))
    every = torch.arange(len(as_rows(found.wave.update)[0]))
    expected = by_density(found, sigma, every)
    assert torch.allclose(SCORES["likelihood_ratio"](found)[0], expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("name", "shrink"), [("prune", 1.0), ("mask", 0.5)])
def test_dropped_entries_are_ignored(name: str, shrink: float) -> None:
    known = knowledge(CHAINS[name])
    found = scoring(known, observed(known, people(SIZE, "members")), people(20, "others"))
    columns = torch.nonzero(as_rows(found.wave.update)[0]).flatten()
    assert 0 < len(columns) < 0.7 * as_rows(found.wave.update).shape[1]
    expected = by_density(found, 0.0, columns, shrink)
    assert torch.allclose(SCORES["likelihood_ratio"](found)[0], expected, rtol=1e-4, atol=1e-3)


@dataclass(frozen=True)
class hides(UpdateTransform):
    """Changes some parameters' updates in an unknown way."""

    name: str

    def apply(self, update: Update, rng: Generator | None) -> Update:
        return {k: torch.randn_like(t) if k == self.name else t for k, t in update.items()}

    def update_distribution(self, before: UpdateDistribution) -> UpdateDistribution | None:
        return replace(before, hidden=frozenset({self.name}))


def test_hidden_parameters_are_left_out() -> None:
    known = knowledge(chain(local_sgd(0.1), hides("1.weight")))
    wave = observed(known, people(SIZE, "members"))
    found = scoring(known, wave, people(20, "others"))
    columns = torch.cat([torch.full((t.numel(),), k != "1.weight") for k, t in wave.params.items()]).nonzero().flatten()
    expected = by_density(found, 0.0, columns)
    assert torch.allclose(SCORES["likelihood_ratio"](found)[0], expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("spread", [0.01, 0.3, 2.0])
def test_the_score_of_laplace_noise_is_the_slope_of_its_density_with_a_normal_part(spread: float) -> None:
    seen = torch.tensor([[-3.0, -0.4, 0.0, 0.1, 2.5]]).double()
    without = _Expected(
        torch.zeros(5).double(),
        torch.zeros(0, 5).double(),
        torch.zeros(0).double(),
        torch.full((5,), spread**2).double(),
    )
    scores, information, _ = _slopes(UpdateDistribution(scale=0.5), seen, without)

    def density(z: float) -> float:
        def joint(e: float) -> float:
            return float(scipy.stats.norm.pdf(z - e, scale=spread) * scipy.stats.laplace.pdf(e, scale=0.5))

        return float(scipy.integrate.quad(joint, -40, 40, points=sorted({0.0, z}), limit=500)[0])

    for z, score in zip(seen[0].tolist(), scores[0].tolist(), strict=True):
        slope = (density(z + 1e-3) - density(z - 1e-3)) / 2e-3 / density(z)
        assert score == pytest.approx(-slope, rel=1e-2, abs=5e-3)
    assert 0 < information[0] <= 1 / 0.5**2


def test_clipping_of_the_mean_enters_the_gain() -> None:
    assert gain(CHAINS["clip"], SIZE, 2.0) == pytest.approx(-0.1 * 0.25)
    assert gain(CHAINS["clip"], SIZE, 0.3) == pytest.approx(-0.1)
    assert gain(CHAINS["steps"], SIZE, 2.0) == pytest.approx(-0.3)
    decayed = chain(local_training(0.1, SIZE, weight_decay=0.5))
    assert gain(decayed, SIZE, 2.0) == pytest.approx(-0.1), "weights of zero do not decay"
    assert gain(chain(per_example(clip(0.5)), local_sgd(0.1)), SIZE, 2.0) == pytest.approx(-0.1), "each example's own"


def test_the_scale_of_signs_is_ignored() -> None:
    values = []
    for scale in (0.001, 7.0):
        known = knowledge(chain(local_sgd(0.1), sign(scale)))
        found = scoring(known, observed(known, people(SIZE, "members")), people(9, "others"))
        values.append(SCORES["likelihood_ratio"](found))
    assert torch.allclose(values[0], values[1], rtol=1e-6)


@pytest.mark.parametrize("name", sorted(CHAINS))
def test_members_score_above_others_and_strangers_do_not(name: str) -> None:
    """Standardised by a null of the same label: members above, those of another update and nobody's at one half."""
    updates = 60
    known = knowledge(CHAINS[name])
    members, strangers, null = people(SIZE * updates, "members"), people(180, "strangers"), people(150, "null")
    wave = observed(known, members, updates)
    everybody = Batch(*(torch.cat(parts) for parts in zip(members, strangers, null, strict=True)))
    found = scoring(known, wave, everybody)
    n = len(members.y)
    aucs = {}
    for method in ("likelihood_ratio", "matched_filter"):
        whole = SCORES[method](found)
        values = against_non_members(whole[:, : n + 180], everybody.y[: n + 180], whole[:, n + 180 :], null.y)
        mine = torch.stack([values[k, k * SIZE : (k + 1) * SIZE] for k in range(updates)])
        shuffled = torch.stack([values[k - 1, k * SIZE : (k + 1) * SIZE] for k in range(updates)])
        half = values[:, n : n + 90], values[:, n + 90 :]
        for what, positive, negative in (
            ("members", mine, values[:, n:]),
            ("shuffled", shuffled, values[:, n:]),
            ("nobody", *half),
        ):
            aucs[method, what] = float(above(positive.flatten(), negative.flatten()).mean())
    for (method, what), auc in aucs.items():
        if what == "members":
            assert auc > 0.65, (name, method, auc)
        else:
            assert abs(auc - 0.5) < 0.08, (name, method, what, auc)
    assert aucs["likelihood_ratio", "members"] > aucs["matched_filter", "members"] - 0.05


def test_the_simple_scores_on_paper() -> None:
    known = knowledge(CHAINS["none"])
    wave = observed(known, people(SIZE, "members"))
    found = scoring(known, wave, people(7, "others"))
    rows, seen = torch.cat(list(found.candidates.rows())), -as_rows(wave.update)[0]
    assert torch.allclose(SCORES["matched_filter"](found)[0], rows @ seen / rows.norm(dim=1))
    assert torch.allclose(SCORES["cosine"](found)[0], torch.cosine_similarity(rows, seen[None]))
    distance = (seen / 0.1).square().sum() - (seen / 0.1 - rows / SIZE).square().sum(1)
    assert torch.allclose(SCORES["gradient_difference"](found)[0], distance)
    moved = {k: t + wave.update[k][0] for k, t in wave.params.items()}
    assert torch.allclose(SCORES["loss_change"](found)[0], found.candidates.losses - found.candidates.losses_at(moved))
    assert SCORES["loss"](found)[0].equal(-found.candidates.losses)
    shares = SCORES["label_frequency"](found)[0]
    assert torch.allclose(shares, torch.full_like(shares, 1 / 3)), "the public labels are even"


def test_fedmia_counts_in_deviations_of_the_other_clients() -> None:
    known = knowledge(CHAINS["none"])
    wave = observed(known, people(4 * SIZE, "members"), 4)
    found = scoring(known, wave, people(5, "others"))
    theirs = [{k: t + wave.update[k][i] for k, t in wave.params.items()} for i in range(4)]
    own = {
        "fedmia": SCORES["cosine"](found),
        "fedmia_loss": -torch.stack([found.candidates.losses_at(weights) for weights in theirs]),
    }
    for name, each in own.items():
        values = SCORES[name](found)
        for k in range(4):
            others = each[[j for j in range(4) if j != k]]
            assert torch.allclose(values[k], (each[k] - others.mean(0)) / others.std(0)), name
        with pytest.raises(ValueError, match="fedmia"):
            SCORES[name](replace(found, wave=wave.of([0, 1])))


def test_the_order_of_candidates_and_updates_changes_nothing() -> None:
    known = knowledge(CHAINS["noise"])
    wave, candidates = observed(known, people(4 * SIZE, "members"), 4), people(11, "others")
    whole = scoring(known, wave, candidates)
    part = replace(
        whole,
        wave=wave.of([2, 0]),
        candidates=replace(whole.candidates, batch=Batch(candidates.x.flip(0), candidates.y.flip(0)), chunk=4),
    )
    for name, score in SCORES.items():
        if name.startswith("fedmia"):  # the other updates of the wave are its null
            continue
        assert torch.allclose(score(part), score(whole)[[2, 0]].flip(1), rtol=1e-6, atol=1e-9), name


def test_a_null_is_of_the_same_label_and_large_enough() -> None:
    non_member_labels = torch.tensor([0] * 10 + [1] * 10)
    null = torch.cat([torch.arange(10.0), 100 + torch.arange(10.0)])[None].double()
    found = against_non_members(
        torch.tensor([[4.5, 104.5, 9.0]]).double(), torch.tensor([0, 1, 0]), null, non_member_labels
    )
    assert found[0].tolist() == pytest.approx([0.0, 0.0, 4.5 / torch.arange(10.0).std().item()])
    check_named("label", lambda: check_non_members(torch.tensor([2]), non_member_labels))


def test_a_score_needs_public_examples() -> None:
    known = knowledge(CHAINS["none"])
    found = scoring(known, observed(known, people(SIZE, "members")), people(2, "others"))
    alone = replace(found.candidates, known=replace(known, auxiliary=None))
    check_named("auxiliary", lambda: SCORES["label_frequency"](replace(found, candidates=alone)))
    for count in 0, 1:  # a half of the public examples may be empty
        with pytest.raises(ValueError, match="public"):
            RestOfBatch.of_population(replace(found.candidates, batch=people(count, "others")))


@pytest.mark.parametrize("latent", [4, 64])
def test_noise_inside_the_network_hides_no_member(latent: int) -> None:
    """PRECODE's clients draw: the rest of the batch has drawn, too, and the candidate counts at the mean of its draws."""
    plain = knowledge(CHAINS["none"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        known = replace(plain, model=precode(plain.model, latent=latent))
    members, others = people(8 * SIZE, "members"), people(90, "others")
    found = scoring(known, observed(known, members, updates=8), concatenate([members, others]))
    for method, least in (("likelihood_ratio", 0.9), ("matched_filter", 0.6)):
        values = SCORES[method](found)
        mine = torch.stack([values[k, k * SIZE : (k + 1) * SIZE] for k in range(8)])
        assert (mine[:, :, None] > values[:, None, len(members.y) :]).double().mean() > least, method
