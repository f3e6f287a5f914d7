"""A deployed client: the server's word and its limits, and what is drawn in secret."""

import json
from typing import Any

import pytest
import torch

from fedgauge.client.deployment.deployed_client import DeployedClient
from fedgauge.client.deployment.owner_file import OwnerConfig
from fedgauge.client.deployment.server_terms import RequestRefused, ServerTerms
from fedgauge.client.rng import secret_generator
from fedgauge.defenses.accounting import privacy_statement
from tests.client.deployment.conftest import DATA, MLP, SERVERS, SGD, Write, terms


@pytest.mark.parametrize(
    "changes", ["no json", "[" * 5000, {"seed": "0"}, {"model": {**MLP, "weights": "secret.safetensors"}}]
)
def test_a_protocol_that_is_none_is_refused(changes: str | dict[str, Any]) -> None:
    text = changes if isinstance(changes, str) else json.dumps(SERVERS | changes)
    with pytest.raises(RequestRefused):
        ServerTerms.parse(text)


def test_a_client_beyond_the_protocols_is_none_of_it(write: Write) -> None:
    with pytest.raises(RequestRefused):
        DeployedClient.of(OwnerConfig.load(write(client=7)), terms())


def test_secret_sampling_draws_every_image_equally_often(write: Write) -> None:
    """A chi-squared statistic over a shard of 20 images: 19 degrees of freedom, so beyond 60 once in 250,000 times."""
    owner = OwnerConfig.load(write(client=0, data={**DATA, "auxiliary": 3980, "batch_size": 5}))
    few = DeployedClient.of(owner, terms(clients=1))
    shard = few.shards.indices[0].tolist()
    assert len(shard) == 20
    counts = dict.fromkeys(shard, 0)
    for _ in range(400):
        for row in few.draw(1):
            counts[row] += 1
    expected = 400 * 5 / 20
    statistic = sum((n - expected) ** 2 / expected for n in counts.values())
    assert statistic < 60


def test_whole_is_all_of_the_training_images(write: Write) -> None:
    data = {"use": "mnist5k", "batch_size": 4, "whole": True}
    own = DeployedClient.of(OwnerConfig.load(write(data=data)), terms())
    assert [len(each) for each in own.shards.indices] == [0, 4000, 0]
    assert len(own.shards.auxiliary) == 0


def test_a_secret_generator_has_more_than_the_32_bits_of_a_seed() -> None:
    """Torch's own manual_seed throws the upper half of a seed away: a server could try the rest."""
    seeded = [torch.Generator().manual_seed(s) for s in (5, 5 + 2**32)]
    assert torch.equal(*(torch.randn(8, generator=g) for g in seeded)), "why manual_seed is not enough"
    words = secret_generator().get_state()[24 : 24 + 8 * 624].view(torch.int64)
    assert words.min() >= 0 and words.max() < 2**32
    # MT19937's own initialisation makes each word of the one before; entropy does not
    before, after = words[:-1], words[1:]
    made = (1812433253 * (before ^ (before >> 30)) + torch.arange(1, 624)) & 0xFFFFFFFF
    assert not (made == after).any()
    seeded_words = seeded[0].manual_seed(9).get_state()[24 : 24 + 8 * 624].view(torch.int64)
    made = (1812433253 * (seeded_words[:-1] ^ (seeded_words[:-1] >> 30)) + torch.arange(1, 624)) & 0xFFFFFFFF
    assert bool((made == seeded_words[1:]).all()), "the test knows the initialisation"


NOISY = [SGD, {"use": "clip", "max_norm": 1.0}, {"use": "gaussian", "sigma": 100.0}]


@pytest.mark.parametrize(("chain", "sends"), [(NOISY, False), ([SGD], True)])
def test_no_statistics_are_sent_next_to_noise(write: Write, chain: list[Any], sends: bool) -> None:
    model = {"use": "convnet", "width": 1, "norm": "batch", "mode": "train"}
    own = DeployedClient.of(OwnerConfig.load(write(chain=chain)), terms(model=model))
    assert own.sends_buffers is sends and privacy_statement(own, {1: 1}).record is None
