"""The statistics of a client's batch, as the buffers that it returns tell them: BatchNorm's own, and an attack that uses them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Observation, Wave
from fedgauge.attacks.engine.computation import layer_inputs
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.grading.knowledge_card import knowledge_card
from fedgauge.attacks.matching.priors import batch_statistics
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.source import FederationSource
from fedgauge.attacks.threat_model import as_known, public_knowledge, waves_known_alike
from fedgauge.client.federation import Federation
from fedgauge.client.update import Batch
from fedgauge.server.store.scenario import Scenario
from tests.attacks.refusals import check_named
from tests.small_runs import trained

TRAIN: dict[str, Any] = {
    "model": {"use": "convnet", "width": 2, "mode": "train"},
    "data": {"use": "mnist5k", "batch_size": 3, "auxiliary": 12},
    "attack": [{"use": "grad_inversion", "iterations": 3}],
}


@pytest.fixture(scope="module")
def scenario(make_scenario: Callable[..., Scenario]) -> Scenario:
    return make_scenario(**TRAIN)


@pytest.fixture(scope="module")
def seen(scenario: Scenario, tmp_path_factory: pytest.TempPathFactory) -> list[Observation]:
    """Two rounds by the real server app and the real client apps, as the tape has them."""
    return trained(tmp_path_factory.mktemp("runs") / "train", scenario)


def true_statistics(fed: Federation, one: Observation, batch: Batch) -> dict[str, Tensor]:
    """Of a batch at every BatchNorm, by the buffers' names."""
    norms = {m: n for n, m in fed.model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        for layer, values in layer_inputs(fed.model, one.params, norms, fed.shards.dataset.normalise(batch.x)):
            name, values = norms[layer], values.transpose(0, 1).flatten(1)  # type: ignore[index]
            found[f"{name}.running_mean"], found[f"{name}.running_var"] = values.mean(1), values.var(1, correction=0)
    return found


def test_returned_buffers_reveal_a_batchs_statistics(scenario: Scenario, seen: list[Observation]) -> None:
    fed = scenario.federation
    bare = public_knowledge(fed)
    parts = waves_known_alike(fed.model, fed.chain, 3, Wave.stack([o for o in seen if o.round == 2]))
    assert [part.clients for part in parts] == [(0,), (1,), (2,)], "each client has statistics of its own"
    for part, one in zip(parts, (o for o in seen if o.round == 2), strict=True):
        known, wave = as_known(bare, part)
        expected = true_statistics(fed, one, fed.batch_at(one.client, one.round))
        assert expected.keys() <= wave.buffers.keys() and len(expected) == 16
        for name, t in expected.items():
            torch.testing.assert_close(wave.buffers[name], t, rtol=1e-3, atol=1e-5)
        fed.load_buffers(wave.buffers)
        energy = batch_statistics(1.0).bind(known, one.params)
        x = known.normalise(fed.batch_at(one.client, one.round).x)
        assert float(energy(x)) < 0.01 * float(energy(x.flip(0) + 0.1)), "only the true batch has them"
        fed.load_buffers(one.buffers)


def test_several_gradients_or_eval_mode_tell_none(
    make_federation: Callable[..., Federation], seen: list[Observation]
) -> None:
    wave = Wave.stack([o for o in seen if o.round == 1])
    for changes in (
        {"model": {"mode": "eval"}},
        {"chain": [{"use": "local_sgd", "rate": 0.1, "steps": 2}]},
        {"chain": [{"use": "local_sgd", "rate": 0.1, "batch_size": 2}]},
    ):
        model = {**TRAIN["model"], **changes.pop("model", {})}
        fed = make_federation(data=TRAIN["data"], model=model, **changes)
        assert len(waves_known_alike(fed.model, fed.chain, 3, wave)) == 1
        assert as_known(public_knowledge(fed), wave)[1] is wave


def test_an_attack_is_graded_with_them_and_its_card_says_so(scenario: Scenario, seen: list[Observation]) -> None:
    fed, (planned, *_) = scenario.federation, scenario.plan.attacks
    wave = Wave.stack([o for o in seen if o.round == 1])
    audited = Auditor(FederationSource(fed)).audit(planned, wave)
    assert [a.client for a in audited] == [0, 1, 2]
    assert all(a.reconstruction.status == "converged" for a in audited)
    assert "statistics known" in knowledge_card(fed, planned)
    several = Federation.having(fed, chain=({"use": "local_sgd", "rate": 0.1, "steps": 2},))
    assert "statistics unknown" in knowledge_card(several, PlannedAttack.from_table({"use": "idlg"}, "here"))


def test_statistics_are_estimated_from_auxiliary_batches(scenario: Scenario) -> None:
    fed = scenario.federation
    params, buffers = fed.initial()
    known = public_knowledge(fed)
    assert known.auxiliary is not None
    batches = [Batch(*part) for part in zip(known.auxiliary.x.split(3), known.auxiliary.y.split(3), strict=True)]
    seen = Observation(1, 0, params, params, buffers)
    each = [true_statistics(fed, seen, batch) for batch in batches]
    prior = batch_statistics(1.0, of="auxiliary").bind(known, params)
    own = true_statistics(fed, seen, batches[0])
    means = {k: torch.stack([one[k] for one in each]).mean(0) for k in own}
    expected = sum(float((own[k] - t).norm()) for k, t in means.items())
    assert float(prior(known.normalise(batches[0].x))) == pytest.approx(expected, rel=1e-4)
    few = public_knowledge(fed, Batch(known.auxiliary.x[:2], known.auxiliary.y[:2]))
    check_named("3", lambda: batch_statistics(1.0, of="auxiliary").bind(few, params))
