"""What tests of server attacks share: a client's answer, what a decoder reads in it, and how many images it proves."""

from functools import partial

import pytest
import torch

from fedgauge.attacks.base import Attack, Budget, Knowledge, Observation, Reconstruction, Wave
from fedgauge.attacks.malicious.server_attack import ServerAttack, craft_weights
from fedgauge.client.components import SpecError
from fedgauge.client.gradient import gradient
from fedgauge.client.models.vision import detached_params
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, Params, Update


def craft(attack: ServerAttack, known: Knowledge, seed: int = 0) -> Params:
    return attack.craft(detached_params(known.model), known, torch.Generator().manual_seed(seed))


def answer(known: Knowledge, params: Params, batch: Batch) -> Update:
    return known.chain(gradient(known.model, known.loss, normalise=known.normalise))(params, batch, generator("noise"))


def read(decoder: Attack, known: Knowledge, params: Params, update: Update, iterations: int = 1) -> Reconstruction:
    wave = Wave.stack([Observation(1, 0, params, update)])
    return decoder.reconstruct(wave, known, Budget(iterations), [partial(generator, "decoder")])[0]


def proven(found: Reconstruction) -> int:
    return int(found.reason.split()[0])


def check_silent(decoder: Attack, known: Knowledge, params: Params) -> None:
    """Updates that say nothing are not applicable, and so are those that are not finite."""
    for fill in (0.0, float("nan")):
        found = read(decoder, known, params, {k: torch.full_like(t, fill) for k, t in params.items()})
        assert found.status == "not_applicable" and found.reason


def check_refused(attack: ServerAttack, decoder: Attack, known: Knowledge) -> None:
    """Neither has anything to do with such a network; both say so."""
    params = detached_params(known.model)
    with pytest.raises(SpecError):
        craft_weights(attack, "here", params, known, torch.Generator())
    found = read(decoder, known, params, params)
    assert found.status == "not_applicable" and found.reason
