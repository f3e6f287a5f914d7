"""Scale-MIA: the features of an image that is alone in its bin are read as they are, and the image comes from them."""

from dataclasses import replace
from functools import lru_cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.malicious.decoding import LayerRows
from fedgauge.attacks.malicious.optimised_features import layer_input, principal_layers
from fedgauge.attacks.malicious.scale_mia import read_latents, scale_mia
from fedgauge.attacks.modality.image_metrics import psnr
from fedgauge.client.chain import Chain, chain
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params, lenet, mlp
from fedgauge.client.rng import generator
from fedgauge.client.transforms import GroupMean
from fedgauge.client.update import Batch, Params, average
from fedgauge.defenses.noise import gaussian
from tests.attacks.malicious.served import answer, check_refused, check_silent, craft, proven, read
from tests.attacks.refusals import check_named

SHAPE, CLASSES, ROWS = (3, 8, 8), 5, 60
MEAN, STD = (0.4, 0.5, 0.3), (0.3, 0.2, 0.25)


@lru_cache
def pictures(count: int, seed: int) -> Tensor:
    """Smooth 8-bit images."""
    smooth = torch.rand(count, 3, 3, 3, generator=generator(seed))
    return (255 * nn.functional.interpolate(smooth, SHAPE[1:], mode="bilinear", align_corners=True)).round() / 255


def examples(seed: int, n: int) -> Batch:
    return Batch(pictures(n, seed), torch.randint(CLASSES, (n,), generator=torch.Generator().manual_seed(seed)))


def lossless(rows: int = ROWS) -> nn.Module:
    """A convolution with as many channels as its tiles have pixels: its features hold the whole image."""
    torch.manual_seed(0)
    tiles = nn.Sequential(nn.Conv2d(3, 12, 2, stride=2), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*tiles, nn.Linear(192, rows), nn.ReLU(), nn.Linear(rows, CLASSES))


def knowledge(model: nn.Module, size: int, public: int = 400, links: Chain | None = None) -> Knowledge:
    auxiliary = Batch(pictures(public, 10**6), torch.zeros(public, dtype=torch.int64))
    return Knowledge(model, links or chain(local_sgd(0.1)), SHAPE, CLASSES, size, MEAN, STD, auxiliary=auxiliary)


def crafted(known: Knowledge, seed: int = 0) -> Params:
    return craft(scale_mia(), known, seed)


def features(known: Knowledge, params: Params, layer: str, x: Tensor) -> Tensor:
    return layer_input(known, params, layer, x).flatten(1).double()


def bins_of(known: Knowledge, params: Params, layer: str, x: Tensor) -> Tensor:
    """Which bin each image falls in: rows that are on, by the weights as they were sent, in float64."""
    h = features(known, params, layer, x)
    on: Tensor = (h @ params[f"{layer}.weight"].double().T + params[f"{layer}.bias"].double() > 0).sum(1)
    return on


def alone(bins: Tensor) -> Tensor:
    counts = torch.bincount(bins)
    return counts[bins] == 1


def layer_of(model: nn.Module) -> str:
    return next(name for name, m in model.named_modules() if isinstance(m, nn.Linear))


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), size=st.integers(2, 8))
def test_what_is_read_are_the_features_of_the_images_alone_in_their_bins(seed: int, size: int) -> None:
    known, batch = knowledge(lossless(), size), examples(seed, size)
    params, layer = crafted(known, seed), layer_of(known.model)
    bins = bins_of(known, params, layer, batch.x)
    assert int(bins.min()) > 0, "below the lowest threshold there is no image"
    differences = LayerRows.of(answer(known, params, batch), layer).differences()
    inputs = differences.weight / differences.bias[:, None]
    wanted = features(known, params, layer, batch.x)[alone(bins)]
    off = torch.cdist(wanted, inputs).min(1).values / wanted.norm(dim=1)
    assert len(inputs) <= len(bins.unique()) and bool((off < 1e-2).all())


def test_an_image_alone_in_its_bin_is_reconstructed_where_its_features_hold_it() -> None:
    known, batch = knowledge(lossless(), 4), examples(3, 4)
    params = crafted(known)
    assert bool(alone(bins_of(known, params, layer_of(known.model), batch.x)).all())
    found = read(read_latents(), known, params, answer(known, params, batch))
    assert found.x is not None and proven(found) == 0
    best = torch.stack([psnr(x.expand_as(batch.x), batch.x).max() for x in found.x])
    assert float(best.min()) > 35


def test_a_network_that_reads_the_image_itself_gives_it_verbatim() -> None:
    known, batch = knowledge(mlp(SHAPE, CLASSES, hidden=[ROWS, 20]), 6), examples(5, 6)
    params = crafted(known)
    found = read(read_latents(), known, params, answer(known, params, batch))
    expected = int(alone(bins_of(known, params, "1", batch.x)).sum())
    assert expected >= 3 and int(found.reason.split()[0]) == expected and found.x is not None
    for x in found.x[:expected]:
        assert bool((batch.x == x).flatten(1).all(1).any()), "what is proven is the image to the bit"


def test_a_secure_sum_reads_as_one_batch_does() -> None:
    parts = [examples(seed, 3) for seed in (7, 8)]
    both = Batch(*(torch.cat(t) for t in ([p.x for p in parts], [p.y for p in parts])))
    one = knowledge(lossless(), 6)
    params = crafted(one)
    summed = knowledge(lossless(), 6, links=Chain((*one.chain.links, GroupMean(2, together=True))))
    update = average([answer(one, params, part) for part in parts], [1, 1])
    found, wanted = (
        read(read_latents(), summed, params, update),
        read(read_latents(), one, params, answer(one, params, both)),
    )
    assert found.x is not None and wanted.x is not None
    torch.testing.assert_close(found.x, wanted.x, atol=1e-2, rtol=0)


def test_noise_that_drowns_the_features_leaves_the_mean_image() -> None:
    known = knowledge(lossless(), 2, links=chain(local_sgd(0.1), gaussian(1e4)))
    params = crafted(known)
    found = read(read_latents(), known, params, answer(known, params, examples(1, 2)))
    assert found.x is not None and known.auxiliary is not None
    mean = known.auxiliary.x.mean(0).expand_as(found.x)
    torch.testing.assert_close(found.x, mean, atol=2e-2, rtol=0)


def test_a_pooled_convolution_keeps_components_of_the_mean_patch() -> None:
    """They are uncorrelated behind the pool, where no ReLU cuts."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, CLASSES))
    known = knowledge(model, 1)
    made = principal_layers("3", detached_params(model), known)
    assert known.auxiliary is not None
    h = features(known, made, "3", known.auxiliary.x).unflatten(1, (8, 16)).transpose(1, 2).flatten(0, 1)
    spread = torch.cov(h.T)
    assert float((spread - spread.diag().diag()).abs().max()) < 1e-4 * float(spread.diag()[0])
    assert bool((spread.diag().diff() <= 1e-9).all()), "the largest variance first"


def test_limitations_are_reported() -> None:
    check_refused(scale_mia(), read_latents(), knowledge(lenet(SHAPE, CLASSES), 1))
    check_refused(scale_mia(), read_latents(), knowledge(lossless(), 1, public=3))
    same = Batch(torch.full((20, *SHAPE), 0.5), torch.zeros(20).long())
    check_named("threshold", lambda: crafted(replace(knowledge(lossless(), 1), auxiliary=same)))
    known = knowledge(lossless(), 2)
    check_silent(read_latents(), known, crafted(known))
