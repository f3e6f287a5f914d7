"""Layers that never travel: a plain loop of FedBN finds the same updates, and what an attacker takes them for is said."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fedgauge.attacks.base import Observation, Wave
from fedgauge.attacks.grading.knowledge_card import knowledge_card
from fedgauge.attacks.grading.replay import replay
from fedgauge.attacks.label_restoration import restore
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.threat_model import public_knowledge, waves_known_alike
from fedgauge.client.chain import Chain, chain
from fedgauge.client.components import SpecError
from fedgauge.client.federation import Federation
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.transforms import TransformState
from fedgauge.client.update import Params
from fedgauge.defenses.accounting import mechanism
from fedgauge.defenses.clip import clip
from fedgauge.defenses.freeze import private_layers
from fedgauge.defenses.noise import gaussian
from fedgauge.server.store.scenario import Scenario
from tests.client.networks import examples, largest_difference, network, params_of
from tests.small_runs import trained

SGD = {"use": "local_sgd", "rate": 0.1}
PRIVATE = {"use": "private_layers", "layers": ["norm0", "norm3", "linear"]}
Make = Callable[..., Federation]


def test_a_client_trains_its_own_layers_and_ignores_the_servers(double: None) -> None:
    """FedPer's loop in plain torch: the server's values of the private layer change nothing after the first round."""
    model, memory = network(), dict[str, torch.Tensor]()
    client = chain(local_sgd(0.2, 3), private_layers(model, ["3"])).with_state(memory)(gradient(model))
    sent, own = params_of(model), {k: p for k, p in params_of(model).items() if k.startswith("3")}
    rng = torch.Generator().manual_seed(0)
    for round in range(3):
        batch, at_home = examples(4, round), network()
        at_home.load_state_dict({**sent, **own})
        before = params_of(at_home)
        optimizer = torch.optim.SGD(at_home.parameters(), lr=0.2)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(at_home(batch.x), batch.y).backward()
            optimizer.step()
        after = params_of(at_home)
        expected = {k: torch.zeros_like(p) if k in own else after[k] - p for k, p in before.items()}
        assert largest_difference(client(sent, batch, None), expected) < 1e-12
        own = {k: after[k] for k in own}
        sent = {k: p + torch.randn(p.shape, generator=rng, dtype=p.dtype) for k, p in sent.items()}


def test_an_update_that_is_not_finite_spoils_no_later_one() -> None:
    memory: TransformState = {}
    updates = iter([{"w": torch.tensor([float("nan")]), "b": torch.ones(1)}, {"w": torch.ones(1), "b": torch.ones(1)}])
    link = private_layers(torch.nn.ParameterDict({"w": torch.zeros(1), "b": torch.zeros(1)}), ["w"])
    seen: list[Params] = []

    def compute(params: Params, *_: Any) -> Params:
        seen.append(params)
        return next(updates)

    for _ in range(2):
        link.bound(memory, "")(compute)({"w": torch.zeros(1), "b": torch.zeros(1)}, examples(1), None)
    assert all(torch.equal(p["w"], torch.zeros(1)) for p in seen)
    assert torch.equal(memory["w"], torch.ones(1))


def test_its_state_ends_amplification_only_before_noise() -> None:
    local, noisy, kept = local_sgd(0.1), [clip(1.0), gaussian(0.1)], private_layers(network(), ["3"])
    assert mechanism(Chain((local, *noisy, kept)), 8) == mechanism(Chain((local, *noisy)), 8)
    assert mechanism(Chain((local, *noisy)), 8).sampled
    assert not mechanism(Chain((local, kept, *noisy)), 8).sampled


@pytest.fixture(scope="module")
def scenario(make_scenario: Callable[..., Scenario]) -> Scenario:
    return make_scenario(
        rounds=3,
        clients=2,
        data={"use": "mnist5k", "batch_size": 2, "auxiliary": 20},
        model={"use": "convnet", "width": 1, "mode": "train"},
        chain=[SGD, PRIVATE],
        attack=[{"use": "idlg"}],
    )


@pytest.fixture(scope="module")
def seen(scenario: Scenario, tmp_path_factory: pytest.TempPathFactory) -> list[Observation]:
    """Three rounds by the real server app and the real client apps, each with a context of its own."""
    return trained(tmp_path_factory.mktemp("runs") / "private", scenario)


def test_the_clients_of_a_federation_keep_them(scenario: Scenario, seen: list[Observation]) -> None:
    fed = scenario.federation
    own: dict[int, Params] = {0: {}, 1: {}}
    initial, _ = fed.initial()
    assert len(seen) == 6
    for one in seen:
        at_home = {**one.params, **own[one.client]}
        bare = fed.chain.local(fed.gradient)(at_home, fed.batch_at(one.client, one.round), None)
        for name, t in one.update.items():
            if fed.chain.stays(name):
                assert not t.any()
                assert torch.equal(one.params[name], initial[name]), "the server never learns of it"
                own[one.client][name] = at_home[name] + bare[name]
            else:
                torch.testing.assert_close(t, bare[name], rtol=1e-4, atol=1e-7)
        kept = {k for k in one.returned if k.startswith(("norm0.", "norm3."))}
        assert len(kept) == 4
        assert all(torch.equal(t, one.buffers[k]) == (k in kept) for k, t in one.returned.items())
    assert replay(fed, seen[0]).ok and not replay(fed, seen[-1]).ok


def test_the_card_lists_the_attackers_assumptions(scenario: Scenario, seen: list[Observation]) -> None:
    fed = scenario.federation
    assert "(norm0, norm3, linear)" in knowledge_card(fed, PlannedAttack.from_table({"use": "idlg"}, "here"))
    known, first = public_knowledge(fed), seen[0]
    guess = known.forward(first.params, fed.batch_at(first.client, 1), None)
    for name, t in first.update.items():  # in the first round the values are right
        torch.testing.assert_close(guess[name], t, rtol=1e-4, atol=1e-7)
    wave = Wave.stack([first])
    assert len(waves_known_alike(fed.model, fed.chain, 2, wave)) == 1
    assert restore(wave, known).shape == (1, 2), "the classifier says nothing, so labels are guessed"


@pytest.mark.parametrize("links", [[PRIVATE, SGD], [{"use": "scaffold", "rate": 0.1}, PRIVATE]])
def test_invalid_settings_are_refused(links: list[dict[str, Any]], make_federation: Make) -> None:
    with pytest.raises(SpecError):
        make_federation(model={"use": "convnet", "width": 1}, chain=links).check()
