"""LOKI: however many clients a sum has, as many images of each are read as are alone in their bin among its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedgauge.attacks.base import Knowledge, Reconstruction
from fedgauge.attacks.malicious.imprint import imprint, imprint_block, read_imprint
from fedgauge.attacks.malicious.loki import client_kernels, loki, read_kernels
from fedgauge.client.chain import Chain, chain
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params, mlp
from fedgauge.client.transforms import GroupMean
from fedgauge.client.update import Batch, Params, Update, average
from fedgauge.defenses.clip import clip
from tests.attacks.malicious.served import check_refused, check_silent, craft, proven
from tests.attacks.malicious.served import read as read_update
from tests.attacks.refusals import check_named

SHAPE, CLASSES, CLIENTS, BINS = (3, 4, 4), 5, 3, 32
MEAN, STD = (0.4, 0.5, 0.3), (0.3, 0.2, 0.25)


def examples(seed: int, n: int) -> Batch:
    """8-bit images, each with a brightness of its own."""
    rng = torch.Generator().manual_seed(seed)
    middle = torch.rand(n, 1, 1, 1, generator=rng)
    x = (255 * (middle + 0.2 * torch.randn(n, *SHAPE, generator=rng)).clamp(0, 1)).round() / 255
    return Batch(x, torch.randint(CLASSES, (n,), generator=rng))


def knowledge(model: nn.Module, size: int, links: Chain | None = None, members: int = CLIENTS) -> Knowledge:
    steps = links or chain(local_sgd(0.1))
    summed = Chain((*steps.links, GroupMean(members)))
    return Knowledge(model, summed, SHAPE, CLASSES, size * members, MEAN, STD, auxiliary=examples(10**6, 2000))


def network(bins: int = BINS) -> nn.Module:
    torch.manual_seed(0)
    return client_kernels(mlp(SHAPE, CLASSES, hidden=[20]), SHAPE, CLIENTS, bins)


def sent_to(known: Knowledge, seed: int = 0, bins: int = BINS) -> list[Params]:
    """What each client of the sum is sent."""
    attack, honest = loki(CLIENTS, bins), detached_params(known.model)
    return [attack.for_member(k).craft(honest, known, torch.Generator().manual_seed(seed)) for k in range(CLIENTS)]


def answers(known: Knowledge, sent: list[Params], batches: list[Batch]) -> list[Update]:
    client = Chain(known.chain.links[:-1])(gradient(known.model, normalise=known.normalise))
    return [client(params, batch, None) for params, batch in zip(sent, batches, strict=True)]


def read(known: Knowledge, sent: list[Params], updates: list[Update]) -> Reconstruction:
    return read_update(read_kernels(), known, sent[0], average(updates, [1] * len(updates)))


def alone(params: Params, x: Tensor, client: int) -> Tensor:
    """Which images are alone in their bin, by the weights as they were sent, in float64."""
    fed = ((x.double() - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)).flatten(1)
    row = params["query.weight"][0].double().chunk(CLIENTS)[client][: fed.shape[1]]
    bins = ((fed @ row)[:, None] + params["query.bias"].double() > 0).sum(1)
    counts = torch.bincount(bins)
    return counts[bins] == 1


@settings(max_examples=12)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 6))
def test_proven_are_the_images_of_each_client_that_are_alone_among_its_own(seed: int, size: int) -> None:
    known = knowledge(network(), size)
    sent, batches = sent_to(known, seed), [examples(seed + k, size) for k in range(CLIENTS)]
    found = read(known, sent, answers(known, sent, batches))
    single = [b.x[alone(p, b.x, k)] for k, (p, b) in enumerate(zip(sent, batches, strict=True))]
    expected = sum(map(len, single))
    assert found.x is not None and found.x.shape == (size * CLIENTS, *SHAPE)
    everything = torch.cat([b.x for b in batches])
    for x in found.x[: proven(found)]:
        assert bool((everything == x).flatten(1).all(1).any()), "what is proven is the image to the bit"
    # a signal that is far weaker than another client's loses digits, and one may drown its neighbour in a bin
    assert abs(proven(found) - expected) <= max(1, expected // 6)


def test_a_clients_columns_hold_nothing_of_the_others() -> None:
    known = knowledge(network(), 4)
    sent = sent_to(known)
    first = answers(known, sent, [examples(k, 4) for k in range(CLIENTS)])
    other = answers(known, sent, [examples(k + 10 * (k != 1), 4) for k in range(CLIENTS)])
    ours, theirs = (average(updates, [1] * CLIENTS)["query.weight"].chunk(CLIENTS, 1) for updates in (first, other))
    assert torch.equal(ours[1], theirs[1])
    assert not torch.equal(ours[0], theirs[0]) and not torch.equal(ours[2], theirs[2])
    assert bool(ours[1].any())


def test_a_sum_leaks_as_much_as_one_client_does_and_imprinting_less() -> None:
    """Of N images in K bins (1 - 1/K)^(N-1) are alone: N are a client's images here, and the sum's there."""
    size, trials = 8, 6
    known, whole = (
        knowledge(network(), size),
        knowledge(imprint_block(mlp(SHAPE, CLASSES, hidden=[20]), SHAPE, BINS), size),
    )
    ours = theirs = 0
    for k in range(trials):
        sent, batches = sent_to(known, k), [examples(100 * k + i, size) for i in range(CLIENTS)]
        ours += proven(read(known, sent, answers(known, sent, batches)))
        same = craft(imprint(BINS), whole, k)
        update = average(answers(whole, [same] * CLIENTS, batches), [1] * CLIENTS)
        theirs += proven(read_update(read_imprint(), whole, same, update))
    n = size * CLIENTS * trials
    for count, images in ((ours, size), (theirs, size * CLIENTS)):
        rate = (1 - 1 / BINS) ** (images - 1)
        assert abs(count / n - rate) < 5 * (rate * (1 - rate) / n) ** 0.5
    assert ours > 1.4 * theirs


@pytest.mark.parametrize(
    "links", [chain(local_sgd(0.01, steps=3)), chain(clip(0.1), local_sgd(0.1))], ids=["steps", "clip"]
)
def test_it_lasts_through_local_steps_and_clipping(links: Chain) -> None:
    known = knowledge(network(64), 5, links)
    sent, batches = sent_to(known, bins=64), [examples(k, 5) for k in range(CLIENTS)]
    expected = sum(int(alone(p, b.x, k).sum()) for k, (p, b) in enumerate(zip(sent, batches, strict=True)))
    assert proven(read(known, sent, answers(known, sent, batches))) >= 0.8 * expected >= 8


def test_invalid_arguments_are_refused() -> None:
    check_named("members", lambda: loki(members=0))
    check_named("bins", lambda: loki(bins=0))
    check_named("members", lambda: loki(place=4))
    check_named("images", lambda: client_kernels(mlp(SHAPE, CLASSES), (16,), 2, 4))
    check_named("members", lambda: craft(loki(2, 32), knowledge(network(), 1)))
    check_refused(loki(), read_kernels(), knowledge(mlp(SHAPE, CLASSES), 1))
    known = knowledge(network(), 1)
    check_silent(read_kernels(), known, sent_to(known)[0])
