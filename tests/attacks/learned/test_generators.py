"""A user's own generator, from its package and file to what attacks make of it; and a generator as the prior of a search."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributions import Normal

from fedgauge.attacks.base import Budget, Knowledge, Observation, Wave
from fedgauge.attacks.generative.gi_gip import gi_gip
from fedgauge.attacks.learned.generators import (
    GENERATOR,
    check,
    convolutional,
    fully_connected,
    own,
    with_absolute_paths,
)
from fedgauge.attacks.matching.priors import generator_prior, total_variation
from fedgauge.attacks.matching.recipes import bayes, inverting_gradients
from fedgauge.attacks.modality.image_metrics import mse
from fedgauge.client.chain import Chain, chain
from fedgauge.client.components import SpecError, allowing
from fedgauge.client.data.images import mnist5k
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params, mlp
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch
from fedgauge.defenses.noise import gaussian
from tests.attacks.refusals import check_named

SHAPE = (1, 6, 5)
OWN = """
import torch
from torch import nn

class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(784, 400), nn.Linear(400, 20), nn.Linear(400, 20)
        self.fc3, self.fc4 = nn.Linear(20, 400), nn.Linear(400, 784)

class decoder(VAE):
    def forward(self, z):
        return torch.sigmoid(self.fc4(torch.relu(self.fc3(z))))

class Upwards(nn.Module):
    def __init__(self, end: str = "sigmoid"):
        super().__init__()
        self.up, self.norm, self.end = nn.ConvTranspose2d(3, 1, (6, 5)), nn.BatchNorm2d(1), end
    def forward(self, z):
        x = self.norm(self.up(z))
        return {"sigmoid": torch.sigmoid, "tanh": torch.tanh, "none": lambda t: 255 * t.sigmoid()}[self.end](x)

class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 30)
    def forward(self, z):
        return torch.sigmoid(self.fc(z))

class Two(Flat):
    def forward(self, z):
        return super().forward(z), z

class Broken(Flat):
    def forward(self, z):
        return torch.full((len(z), 30), float("nan"))

def no_network():
    return 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a user's module, which is allowed."""
    (tmp_path / "mygenerators.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    with allowing(["mygenerators"], [tmp_path]):
        yield tmp_path
    sys.modules.pop("mygenerators", None)


def table(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """A generator's table, and its weights as its constructor draws them."""
    import mygenerators  # type: ignore[import-not-found]  # written by the fixture

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = getattr(mygenerators, name)()
    save_file(network.state_dict(), folder / f"{name}.safetensors")
    return {"use": f"mygenerators:{name}", "weights": str(folder / f"{name}.safetensors"), **changes}


# ------------------------------------------------------------------------------------------------------- from file to images


def test_the_latents_are_found_and_images_are_the_networks_own(here: Path) -> None:
    flat = own(table(here, "Flat"), SHAPE)
    z = torch.randn(7, 3)
    assert (flat.latent, flat.numbers) == ((3,), 3)
    torch.testing.assert_close(flat(z), flat.network(z).view(7, *SHAPE))
    up = own(table(here, "Upwards"), SHAPE)
    assert (up.latent, up.numbers) == ((3, 1, 1), 3)
    torch.testing.assert_close(up(z), up.network(z[..., None, None]))
    assert not any(p.requires_grad for p in up.network.parameters()) and not up.network.training


def test_a_tanh_is_declared_and_brought_to_pixels(here: Path) -> None:
    """(t + 1) / 2 of the same network."""
    said = table(here, "Upwards", end="tanh", range=[-1, 1])
    z, found = torch.randn(5, 3), own(said, SHAPE)
    torch.testing.assert_close(found(z), (found.network(z[..., None, None]) + 1) / 2)
    assert 0 <= float(found(z).min()) <= float(found(z).max()) <= 1


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("Upwards", {"end": "tanh"}, "range"),
        ("Upwards", {"end": "none"}, "range"),
        ("Flat", {"latent": 4}, "latents"),
        ("Flat", {"latent": 0}, "latent"),
        ("Flat", {"range": [1, 0]}, "range"),
        ("Flat", {"weights": "none.safetensors"}, "none.safetensors"),
        ("Flat", {"weights": 3}, "weights"),
        ("Flat", {"wieghts": "a"}, "wieghts"),
        ("Two", {}, "shape"),
        ("Broken", {}, "range"),
        ("no_network", {}, "int"),
        ("os", {}, "mygenerators:os"),
    ],
)
def test_a_generator_that_will_not_do_is_refused(here: Path, name: str, changes: dict[str, Any], words: str) -> None:
    made = table(here, name if name not in ("os", "no_network") else "Flat", **changes)
    check_named(words, lambda: own({**made, "use": f"mygenerators:{name}"}, SHAPE))


def test_settings_that_do_not_fit_images_or_network_are_refused(here: Path) -> None:
    flat = table(here, "Flat")
    swapped = {**flat, "weights": table(here, "Upwards")["weights"]}
    for made, shape, named in ((flat, (1, 7, 5), "shape"), (swapped, SHAPE, "fit")):
        with pytest.raises(ValueError, match=named):
            own(made, shape)


def test_what_a_table_says_wrong_is_reported_before_a_file_is_read(here: Path) -> None:
    check({"use": "mygenerators:Flat", "weights": "not there yet"})
    with pytest.raises(SpecError):
        gi_gip(generator={"use": "mygenerators:Flat"})
    for prior in (
        {"use": "theirs:prior"},
        {"use": "generator_prior", "generator": {"use": "theirs:x", "weights": "a"}},
    ):
        with pytest.raises(SpecError):
            bayes(prior=prior)


def test_paths_inside_an_attacks_table_become_absolute(tmp_path: Path) -> None:
    inner = {"use": "m:x", "weights": "a.safetensors"}
    said = {"use": "n:y", "prior": {"generator": inner}, "iterations": 3}
    found = with_absolute_paths(said, tmp_path)
    assert found == {**said, "prior": {"generator": {**inner, "weights": str(tmp_path / "a.safetensors")}}}
    assert with_absolute_paths(found, Path("elsewhere")) == found


def test_the_networks_that_have_a_name_make_every_shape() -> None:
    for network in (convolutional((3, 9, 6), 4, 2), fully_connected((3, 9, 6), 4, (8,), "tanh")):
        assert network(torch.zeros(2, 4)).flatten(1).shape == (2, 162)
    assert GENERATOR.names() == ["convolutional", "fully_connected"]


def test_an_attacker_without_images_searches_a_users_generator(here: Path) -> None:
    """In its range the truth lies exactly, so the search has to find it."""
    said = table(here, "Flat")
    truth = own(said, SHAPE)(torch.randn(2, 3, generator=generator("truth")))
    wave, known, streams = seen(seeded(1, SHAPE, 4, (24,)), chain(local_sgd(1.0)), truth, torch.tensor([0, 3]))
    attack = gi_gip(generator=said, share=1.0, tv=0.0, prior=0.0)
    found = attack.reconstruct(wave, known, Budget(300, restarts=2), streams)
    assert [r.status for r in found] == ["converged"] * 2
    images = torch.cat([r.x for r in found if r.x is not None])
    assert float(mse(truth, images).max()) < 1e-5
    (refused, _) = gi_gip(generator={**said, "latent": 5}).reconstruct(wave, known, Budget(2), streams)
    assert refused.status == "not_applicable" and "latents" in refused.reason


def seen(model: nn.Module, links: Chain, truth: Tensor, y: Tensor) -> tuple[Wave, Knowledge, list[Any]]:
    """What the server saw of clients with an image each, what it knows, and its streams."""
    classes = len(list(model.parameters())[-1])
    known = Knowledge(model, links, tuple(truth.shape[1:]), classes, 1, (0.2,), (0.3,), labels=y[:, None])
    client, params = links(gradient(model, normalise=known.normalise)), detached_params(model)
    updates = [client(params, Batch(truth[[k]], y[[k]]), generator("client", k)) for k in range(len(truth))]
    wave = Wave.stack([Observation(1, k, params, update) for k, update in enumerate(updates)])
    return wave, known, [partial(generator, "own", k) for k in range(len(truth))]


def seeded(seed: int, *arguments: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return mlp(*arguments).eval()


# ------------------------------------------------------------------------------------------------------------- real weights


@pytest.mark.parametrize(("name", "numbers"), [("mnist_vae.safetensors", 20), ("mnist_gan_mlp_G.safetensors", 64)])
def test_real_generators_make_digits(here: Path, local_file: Callable[[str], Path], name: str, numbers: int) -> None:
    """Nearer to a real digit than a random one is, and not all the same: the file's weights, in the right places and range."""
    weights = str(local_file(f"weights/{name}"))
    said: dict[str, Any] = {"use": "mygenerators:decoder", "weights": weights}
    if numbers == 64:
        said |= {"use": "fully_connected", "latent": 64, "end": "tanh", "range": [-1, 1]}
    made = own(said, (1, 28, 28))
    assert made.numbers == numbers
    images = made(torch.randn(100, made.numbers, generator=generator("real")))
    digits = mnist5k().x.float() / 255
    assert 0 <= float(images.min()) <= float(images.max()) <= 1
    apart = torch.cdist(images.flatten(1), digits.flatten(1)).amin(1).square().mean() / 784
    spread = float(digits.var(0, correction=0).mean())  # a random digit is at twice that
    assert float(apart) < 0.6 * spread
    assert float(images.var(0).mean()) > 0.5 * spread


# ------------------------------------------------------------------------------------------------------------ as a prior


def gains(x: Tensor, y: Tensor, model: nn.Module, said: dict[str, Any], deviation: float, iterations: int) -> None:
    """Bayes behind noise: a generator's prior lowers the error of the best of four weights of total variation by 30 %.

    The weight is chosen by the truth, and the difference exceeds its 95 % interval (Student's t of 15 degrees of freedom).
    """
    wave, known, streams = seen(model, chain(gaussian(0.1), local_sgd(1.0)), x, y)

    def errors(tv: float, prior: dict[str, Any] | None = None) -> Tensor:
        found = bayes(tv=tv, rate=0.05, prior=prior).reconstruct(wave, known, Budget(iterations), streams)
        assert {r.status for r in found} == {"converged"}
        return mse(x, torch.cat([r.x for r in found if r.x is not None]))

    best = min((errors(tv) for tv in (30.0, 100.0, 300.0, 1000.0)), key=lambda error: float(error.mean()))
    less = best - errors(0.0, {"use": "generator_prior", "generator": said, "deviation": deviation})
    assert float(less.mean()) > max(2.13 * float(less.std()) / 4, 0.3 * float(best.mean()))


def test_the_density_is_that_of_a_latent_and_of_noise_round_its_image(here: Path) -> None:
    """By torch's normal distributions, up to what depends on neither; weights of 0 leave total variation out."""
    said = table(here, "Flat")
    wave, known, _ = seen(mlp(SHAPE, 4, (8,)), chain(local_sgd(1.0)), torch.rand(1, *SHAPE), torch.tensor([3]))
    bound = generator_prior(generator=said, deviation=0.2).bind(known, wave.params)
    made = own(said, SHAPE)

    def density(x: Tensor, z: Tensor) -> Tensor:
        return -Normal(made(z), 0.2).log_prob(known.pixels(x)).sum() - Normal(0.0, 1.0).log_prob(z).sum()

    pairs = [(torch.randn(2, *SHAPE), torch.randn(2, 3)) for _ in range(2)]
    by_hand = density(*pairs[0]) - density(*pairs[1])
    torch.testing.assert_close(bound.energy(*pairs[0]) - bound.energy(*pairs[1]), by_hand, rtol=1e-4, atol=1e-3)
    named = {"use": "generator_prior", "generator": said}
    assert bayes(tv=0.0, prior=named).objective.priors[1:] == (generator_prior(generator=said),)
    assert inverting_gradients(prior=named).objective.priors == (total_variation(0.01), generator_prior(generator=said))


def test_where_the_prior_is_the_truth_it_wins_under_noise(here: Path) -> None:
    """Images that the generator has made, its noise added: what the prior says of them is exactly so."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        network = fully_connected(SHAPE, 3, (12,))
    save_file({name: 3 * t for name, t in network.state_dict().items()}, here / "vivid.safetensors")
    said = {"use": "fully_connected", "latent": 3, "hidden": [12], "weights": str(here / "vivid.safetensors")}
    rng = generator("prior")
    made = own(said, SHAPE)(torch.randn(16, 3, generator=rng))
    x = (made + 0.05 * torch.randn(made.shape, generator=rng)).clamp(0, 1)
    gains(x, torch.arange(16) % 4, seeded(3, SHAPE, 4, (24,), "sigmoid"), said, 0.05, 150)
