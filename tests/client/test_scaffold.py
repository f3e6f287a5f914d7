"""SCAFFOLD's clients: a plain loop of server and clients finds the same weights, and the server knows each control variate."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fedgauge.attacks.base import Observation, Wave
from fedgauge.attacks.engine.gradients.per_problem import local_training_changes
from fedgauge.attacks.threat_model import as_known, public_knowledge
from fedgauge.client.chain import Chain, chain
from fedgauge.client.components import SpecError
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import ControlledSGD, Correction, local_sgd, scaffold
from fedgauge.client.transforms import Link, TransformState
from fedgauge.client.update import Batch, Params, Update
from fedgauge.defenses.accounting import mechanism
from fedgauge.defenses.clip import clip
from fedgauge.defenses.noise import gaussian
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape_source import TapeSource
from fedgauge.simulations.run.in_memory import train
from tests.client.networks import examples, largest_difference, network, params_of

CLIENTS, ROUNDS, STEPS, RATE = 3, 4, 3, 0.2
SMALL: dict[str, Any] = {
    "rounds": 3,
    "data": {"use": "mnist5k", "batch_size": 1, "auxiliary": 10},
    "model": {"use": "mlp", "hidden": [16]},
    "attack": [{"use": "analytic"}],
}
SCAFFOLD = {"use": "scaffold", "rate": 0.1, "steps": 2}


def batches(round: int) -> list[Batch]:
    """Each client's of a round: other examples, and other labels, so that the clients drift apart."""
    found = []
    for client in range(CLIENTS):
        batch = examples(4, 10 * round + client)
        found.append(Batch(batch.x, torch.full_like(batch.y, client)))
    return found


def plain_scaffold(defended: Callable[[Update], Update] = lambda u: u) -> list[Params]:
    """Algorithm 1 of Karimireddy et al. (2020) with option II and all clients: the weights before each round, and at the end."""
    model = network()
    x = params_of(model)
    zeros = {k: torch.zeros_like(p) for k, p in x.items()}
    c, own = zeros, [zeros] * CLIENTS
    seen = [x]
    for round in range(ROUNDS):
        sent, variates = [], []
        for client, batch in enumerate(batches(round)):
            model.load_state_dict(x)
            for _ in range(STEPS):
                slopes = torch.autograd.grad(F.cross_entropy(model(batch.x), batch.y), list(model.parameters()))
                with torch.no_grad():
                    for (k, p), g in zip(model.named_parameters(), slopes, strict=True):
                        p -= RATE * (g - own[client][k] + c[k])
            moved = defended({k: p.detach() - x[k] for k, p in model.named_parameters()})
            sent.append(moved)
            variates.append({k: own[client][k] - c[k] - t / (STEPS * RATE) for k, t in moved.items()})
        x = {k: p + sum(u[k] for u in sent) / CLIENTS for k, p in x.items()}
        c = {
            k: t + sum(new[k] - old[k] for new, old in zip(variates, own, strict=True)) / CLIENTS for k, t in c.items()
        }
        own = variates
        seen.append(x)
    return seen


@pytest.mark.parametrize("link", [None, clip(0.05)], ids=["alone", "clipped"])
def test_clients_that_derive_their_variates_train_as_scaffold(double: None, link: Link | None) -> None:
    """Behind a defense the variates are of what was sent."""
    model = network()
    x, links = params_of(model), [scaffold(RATE, STEPS), *([link] if link else [])]
    memories: list[TransformState] = [{} for _ in range(CLIENTS)]
    expected = plain_scaffold((lambda u: clip(0.05).apply(u, None)) if link else lambda u: u)
    for round in range(ROUNDS):
        assert largest_difference(x, expected[round]) < 1e-12
        sent = [
            chain(*links).with_state(memory)(gradient(model))(x, batch, None)
            for memory, batch in zip(memories, batches(round), strict=True)
        ]
        x = {k: p + sum(u[k] for u in sent) / CLIENTS for k, p in x.items()}
    assert largest_difference(x, expected[-1]) < 1e-12
    bare = chain(local_sgd(RATE, STEPS), *links[1:])(gradient(model))
    averaged = params_of(network())
    for round in range(ROUNDS):
        sent = [bare(averaged, batch, None) for batch in batches(round)]
        averaged = {k: p + sum(u[k] for u in sent) / CLIENTS for k, p in averaged.items()}
    assert largest_difference(averaged, expected[-1]) > 5e-4, "the variates matter here"


def test_its_epsilon_is_that_of_plain_steps() -> None:
    """What a client remembers follows from what it sent: post-processing."""
    for before, after in (([clip(1.0), gaussian(0.1)], []), ([], [clip(1.0), gaussian(0.1)])):
        known = (mechanism(Chain((*before, local, *after)), 8) for local in (scaffold(0.1, 3), local_sgd(0.1, 3)))
        assert len(set(known)) == 1


@pytest.mark.parametrize("corrected", [False, True])
def test_many_problems_share_a_pass(double: None, corrected: bool) -> None:
    model = network()
    params = params_of(model)
    rng = torch.Generator().manual_seed(1)
    correction = Correction({k: 0.1 * torch.randn(p.shape, generator=rng, dtype=p.dtype) for k, p in params.items()})
    local, several = (
        ControlledSGD(RATE, STEPS, correction=correction, corrected=corrected),
        [examples(4, k) for k in range(3)],
    )
    x, y = (torch.stack([batch[i] for batch in several]) for i in (0, 1))
    together = local_training_changes(model, params, x.requires_grad_(), y, local, factors=False)
    for k, batch in enumerate(several):
        alone = local(gradient(model))(params, batch, None)
        assert largest_difference({name: t[k].detach() for name, t in together.items()}, alone) < 1e-12  # type: ignore[index]  # formed


# ------------------------------------------------------------------------------------------- through a real federation


def test_caches_tell_two_corrections_apart() -> None:
    one, other = (ControlledSGD(0.1, correction=Correction({"w": torch.full((2,), v)})) for v in (1.0, 2.0))
    assert repr(one) != repr(other)
    assert repr(one) == repr(ControlledSGD(0.1, correction=Correction({"w": torch.ones(2)})))


@pytest.fixture(scope="module", params=["alone", "behind a clip", "behind noise", "one step"])
def trained(
    request: pytest.FixtureRequest, make_scenario: Callable[..., Scenario], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Scenario, Run]:
    """Three rounds by the real server app and the real client apps, each with a context of its own; not to be changed."""
    links: dict[str, list[dict[str, Any]]] = {
        "alone": [SCAFFOLD],
        "behind a clip": [SCAFFOLD, {"use": "clip", "max_norm": 0.05}],
        "behind noise": [SCAFFOLD, {"use": "gaussian", "sigma": 1e-4}],
        "one step": [{**SCAFFOLD, "steps": 1}],
    }
    scenario = make_scenario(**SMALL, chain=links[request.param])
    run = begun(tmp_path_factory.mktemp("runs") / "scaffold", scenario)
    train(run)
    return scenario, run


def begun(folder: Path, scenario: Scenario) -> Run:
    """A run that training can begin with."""
    run = Run.create(folder, scenario)
    with run.ledger() as ledger:
        ledger.add_attacks(scenario.plan, {p.name: "card" for p in scenario.plan.attacks})
    return run


def observations(run: Run, scenario: Scenario) -> list[Observation]:
    """What the server saw, with what it knows of the control variates."""
    with run.ledger() as ledger:
        source = TapeSource(scenario.federation, run=run, ledger=ledger)
        return [source.observation(*key) for key in source.taped()]


def test_an_attacker_who_guesses_right_computes_what_it_saw(trained: tuple[Scenario, Run]) -> None:
    scenario, run = trained
    fed, bare = scenario.federation, public_knowledge(scenario.federation)
    seen = observations(run, scenario)
    assert {(o.round, o.client) for o in seen} == {(r, c) for r in range(1, 4) for c in range(3)}
    for one in seen:
        known, wave = as_known(bare, Wave.stack([one]))
        assert bool(one.correction) == (one.round > 1)
        batch = fed.batch_at(one.client, one.round)
        guess = known.forward(one.params, batch, None)
        sigma = 1e-4 if any("gaussian" in str(t["use"]) for t in fed.protocol.chain) else 0.0
        difference = torch.cat([(guess[k] - t).flatten() for k, t in wave.alone(0).items()])
        size = torch.cat([t.flatten() for t in guess.values()]).norm() / len(difference) ** 0.5
        assert float(difference.square().mean().sqrt()) < 1e-4 * float(size) + 1.05 * sigma
        if one.round > 1:
            wrong = bare.forward(one.params, batch, None)
            ignored = torch.cat([(wrong[k] - t).flatten() for k, t in one.update.items()])
            assert float(ignored.norm()) > 2 * float(difference.norm()), "who ignores the variates is farther off"


@pytest.mark.parametrize("trained", ["alone", "behind a clip", "one step"], indirect=True)
def test_exact_attacks_read_every_round_or_say_why_not(trained: tuple[Scenario, Run]) -> None:
    scenario, run = trained
    serve(run, LocalExecutor())
    clipped = any("clip" in str(t["use"]) for t in scenario.federation.protocol.chain)
    with run.ledger() as ledger:
        assert ledger.meta()["replay"] == "ok"
        found = {(r["round"], r["client"]): r for r in ledger.scores("psnr") if r["attack"] == "analytic"}
        said = {row["reason"] for row in ledger.reasons() if row["attack"] == "analytic"}
    assert len(found) == 9
    for (round, _), row in found.items():
        if clipped and round > 1:
            assert row["status"] == "not_applicable" and row["value"] is None
        else:
            assert row["value"] > 30
    assert any("SCAFFOLD" in words for words in said) == clipped


@pytest.mark.parametrize(
    "changed",
    [
        {"strategy": {"use": "FedAdam"}},
        {"strategy": {"use": "FedAvg", "fraction_train": 0.5}},
        {"tape": {"keep": "attacked"}},
        {"secure_sum": {"group": 3}},
    ],
    ids=str,
)
def test_settings_that_break_scaffold_are_refused(
    changed: dict[str, Any], make_scenario: Callable[..., Scenario]
) -> None:
    with pytest.raises(SpecError):
        make_scenario(chain=[SCAFFOLD], **changed)
