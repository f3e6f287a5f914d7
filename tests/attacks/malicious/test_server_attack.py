"""The contract of every registered server attack and decoder."""

from functools import partial
from typing import Any

import pytest
import torch

from fedgauge.attacks.base import Budget, Knowledge, Observation, Wave
from fedgauge.attacks.engine.computation import classifier
from fedgauge.attacks.malicious.label_flipping import label_flipping
from fedgauge.attacks.malicious.server_attack import SERVER_ATTACK, ServerAttack, craft_weights
from fedgauge.attacks.modality.images import DECODERS
from fedgauge.attacks.plan import ATTACK
from fedgauge.client.chain import chain
from fedgauge.client.components import SpecError, build
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.build import build_model
from fedgauge.client.models.vision import detached_params
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch
from tests.attacks.malicious.served import craft

SHAPE, CLASSES, SIZE = (3, 8, 8), 5, 2
ARGUMENTS: dict[str, dict[str, Any]] = {"feature_fishing": {"target": 1}}  # those without a default
NETWORKS: tuple[dict[str, Any], ...] = (
    {"use": "mlp", "hidden": [30, 12]},
    {"use": "lenet"},
    {"use": "lenet", "stride": 1},
)
DECODER_NAMES = [entry.name for entry in ATTACK.entries() if entry.group == DECODERS]
every = pytest.mark.parametrize("name", SERVER_ATTACK.names())


def server_attack(name: str) -> ServerAttack:
    found: ServerAttack = build({"use": name, **ARGUMENTS.get(name, {})}, "test", SERVER_ATTACK)
    return found


def known(how: ServerAttack | None = None) -> Knowledge:
    """The threat model of the first network that a server attack does not refuse."""
    offered = {"shape": SHAPE, "classes": CLASSES}
    public = Batch(torch.rand(60, *SHAPE, generator=generator("public")), torch.arange(60) % CLASSES)
    refusals: list[str] = []
    for table in NETWORKS:
        if how is not None and how.architecture is not None:
            table = {**table, "architectures": [how.architecture]}
        model = build_model(table, offered, 0).eval()
        threat = Knowledge(model, chain(local_sgd(0.1)), SHAPE, CLASSES, SIZE, (0.4,) * 3, (0.3,) * 3, auxiliary=public)
        try:
            if how is not None:
                how.craft(detached_params(model), threat, generator("malice"))
            return threat
        except ValueError as refusal:
            refusals.append(str(refusal))
    raise AssertionError(refusals)


@every
def test_a_server_attack_crafts_weights_of_the_same_form_and_leaves_the_honest_ones_alone(name: str) -> None:
    how = server_attack(name)
    threat = known(how)
    sent = detached_params(threat.model)
    before = {k: t.clone() for k, t in sent.items()}
    once, again = (how.craft(sent, threat, generator("malice")) for _ in range(2))
    assert all(torch.equal(sent[k], t) for k, t in before.items())
    assert {k: (t.shape, t.dtype) for k, t in once.items()} == {k: (t.shape, t.dtype) for k, t in sent.items()}
    assert list(once) == list(sent)
    assert all(bool(torch.isfinite(t).all()) for t in once.values())
    assert all(torch.equal(again[k], t) for k, t in once.items())
    assert how.architecture is not None or any(not torch.equal(sent[k], t) for k, t in once.items())


@pytest.mark.parametrize("crafted", [None, [], {"1.weight": [0.0]}])
def test_weights_that_are_none_are_refused(crafted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_flipping, "craft", lambda *_, **__: crafted)
    threat = known()
    with pytest.raises(SpecError, match="#1.*craft"):
        craft_weights(label_flipping(), "#1", detached_params(threat.model), threat, generator("malice"))


@pytest.mark.parametrize("name", DECODER_NAMES)
def test_a_decoder_says_why_an_honest_update_is_not_for_it(name: str) -> None:
    threat = known()
    params = detached_params(threat.model)
    batch = Batch(torch.rand(SIZE, *SHAPE, generator=generator("own")), torch.arange(SIZE))
    update = threat.chain(gradient(threat.model, normalise=threat.normalise))(params, batch, None)
    wave = Wave.stack([Observation(1, c, params, {k: t.detach() for k, t in update.items()}) for c in range(2)])
    decoder = build({"use": name}, "test", ATTACK)
    found = decoder.reconstruct(wave, threat, Budget(2), [partial(generator, k) for k in range(2)])
    assert len(found) == 2
    for one in found:  # a decoder of weights alone may read what honest ones leave, and says what it could not prove
        assert one.reason or one.x is not None
        assert one.x is None or one.x.shape == batch.x.shape
        assert one.status != "not_applicable" or (one.x is None and len(one.reason) > 20)


def test_flipping_moves_rows_and_changes_nothing_else() -> None:
    threat = known()
    sent, name = detached_params(threat.model), classifier(threat.model, threat.shape)
    moved = craft(label_flipping(), threat)
    for part in ("weight", "bias"):
        key = f"{name}.{part}"
        assert torch.equal(moved[key].roll(-1, 0), sent[key])
    assert all(torch.equal(moved[k], t) for k, t in sent.items() if not k.startswith(name))
