"""Top-k with error feedback: what is kept, what is remembered, and how a federation's clients remember it."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgauge.attacks.base import Observation
from fedgauge.attacks.grading.replay import replay
from fedgauge.client.chain import chain
from fedgauge.client.local_training import local_sgd
from fedgauge.client.transforms import TransformState
from fedgauge.client.update import Batch, Update
from fedgauge.defenses.top_k import largest, top_k
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.run.in_memory import train
from tests.tensors import seeded

SGD = {"use": "local_sgd", "rate": 0.1}
TOP = {"use": "top_k", "keep": 0.1}


def update(*entries: float) -> Update:
    return {"w": torch.tensor(entries[:2], dtype=torch.float64), "b": torch.tensor(entries[2:], dtype=torch.float64)}


def flat(u: Update) -> list[float]:
    return torch.cat([t.flatten() for t in u.values()]).tolist()


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.01, 1.0), st.integers(0, 1000))
def test_it_keeps_its_part(n: int, m: int, keep: float, seed: int) -> None:
    rng = seeded(seed)
    u = {
        "w": torch.randn(n, generator=rng, dtype=torch.float64),
        "b": torch.randn(m, generator=rng, dtype=torch.float64),
    }
    found, before = torch.tensor(flat(largest(u, keep))), torch.tensor(flat(u))
    kept = found != 0
    assert int(kept.sum()) == max(1, round(keep * (n + m)))
    assert torch.equal(found[kept], before[kept])
    assert kept.all() or float(before[kept].abs().min()) >= float(before[~kept].abs().max())


def test_two_rounds_by_hand() -> None:
    link = top_k(0.25)
    sent, held = link.advance(update(1.0, -4.0, 3.0, 0.0), link.initial(update(0, 0, 0, 0)), None)
    assert flat(sent) == [0.0, -4.0, 0.0, 0.0]
    assert flat(held) == [1.0, 0.0, 3.0, 0.0]
    sent, held = link.advance(update(1.0, 1.0, -1.0, 0.0), held, None)
    assert flat(sent) == [2.0, 0.0, 2.0, 0.0], "1 + 1 and 3 - 1: what was held back counts"
    assert flat(held) == [0.0, 1.0, 0.0, 0.0]


@given(st.floats(0.05, 1.0), st.integers(2, 8), st.integers(0, 1000))
def test_nothing_is_lost_with_error_feedback(keep: float, rounds: int, seed: int) -> None:
    """What was sent and what is still held back add up to everything that was computed (Stich et al., 2018, eq. 10)."""
    link, rng = top_k(keep), seeded(seed)
    updates = [{"w": torch.randn(30, generator=rng, dtype=torch.float64)} for _ in range(rounds)]
    memory = link.initial(updates[0])
    total = torch.zeros(30, dtype=torch.float64)
    for u in updates:
        before = memory["w"]
        sent, memory = link.advance(u, memory, None)
        total = total + sent["w"]
        # a contraction: what is held back is at most 1 - k/d of what there was
        whole = float((u["w"] + before).square().sum())
        kept = max(1, round(keep * 30))
        assert float(memory["w"].square().sum()) <= (1 - kept / 30) * whole * (1 + 1e-12)
    torch.testing.assert_close(total + memory["w"], torch.stack([u["w"] for u in updates]).sum(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("entry", [float("inf"), float("nan"), 1.7e308])
def test_an_update_that_is_not_finite_spoils_no_later_one(entry: float) -> None:
    """It stayed in the memory, and behind a clip the client sent nothing more for ever."""
    link = top_k(0.25)
    _, held = link.advance(update(1.7e308, entry, 1.0, -entry), link.initial(update(0, 0, 0, 0)), None)
    for _ in range(4):
        sent, held = link.advance(update(1.7e308, 1.0, 3.0, entry), held, None)
        assert all(map(math.isfinite, flat(held)))
    for _ in range(3):
        sent, held = link.advance(update(1.0, 1.0, 3.0, 0.0), held, None)
    assert all(map(math.isfinite, flat(sent)))


def test_without_error_feedback_nothing_is_remembered() -> None:
    memory: TransformState = {}
    bare = iter([update(1.0, -4.0, 3.0, 0.0), update(1.0, 1.0, -1.5, 0.0)])
    client_fn = chain(local_sgd(1.0), top_k(0.25, error_feedback=False)).with_state(memory)(lambda *_: next(bare))
    batch = Batch(torch.zeros(1), torch.zeros(1))
    assert flat(client_fn({}, batch, None)) == [0.0, 4.0, 0.0, 0.0]
    assert flat(client_fn({}, batch, None)) == [0.0, 0.0, 1.5, 0.0]
    assert memory == {}


# ------------------------------------------------------------------------------------------- through a real federation


@pytest.fixture(scope="module")
def scenario(make_scenario: Callable[..., Scenario]) -> Scenario:
    return make_scenario(rounds=4, chain=[SGD, TOP], attack=[{"use": "analytic"}])


@pytest.fixture(scope="module")
def trained(scenario: Scenario, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four rounds by the real server app and the real client apps, each with a context of its own; not to be changed."""
    run = begun(tmp_path_factory.mktemp("runs") / "top_k", scenario)
    train(run)
    return run


def begun(folder: Path, scenario: Scenario) -> Run:
    """A run that training can begin with."""
    run = Run.create(folder, scenario)
    with run.ledger() as ledger:
        ledger.add_attacks(scenario.plan, {p.name: "card" for p in scenario.plan.attacks})
    return run


def observations(run: Run) -> list[Observation]:
    with run.ledger() as ledger:
        rows = [o for o in ledger.observations() if o["status"] == "accepted"]
    return [run.tape().read(o["round"], o["client"], o["digest"]) for o in rows]


def test_the_clients_of_a_federation_remember(trained: Run, scenario: Scenario) -> None:
    """Each update that the server saw is what error feedback makes of the bare updates of its client's rounds."""
    bare = scenario.federation.chain.local(scenario.federation.gradient)
    held: dict[int, torch.Tensor] = {}
    seen = observations(trained)
    assert {(o.round, o.client) for o in seen} == {(r, c) for r in range(1, 5) for c in range(3)}
    for o in seen:
        own = bare(o.params, scenario.federation.batch_at(o.client, o.round), None)
        whole = torch.cat([own[k].flatten() for k in o.update])
        whole = whole + held.get(o.client, torch.zeros_like(whole))
        sent = torch.cat([t.flatten() for t in o.update.values()])
        kept = sent != 0
        assert 0.1 <= float(kept.double().mean()) < 0.2, "a tenth, and ties: black pixels have equal entries"
        assert float(sent[kept].abs().min()) >= float(whole[~kept].abs().max()) * (1 - 1e-5)
        torch.testing.assert_close(sent[kept], whole[kept], rtol=1e-5, atol=1e-8)
        held[o.client] = whole - sent


def test_a_first_update_can_be_recomputed_and_a_later_one_cannot(trained: Run, scenario: Scenario) -> None:
    told = {(o.round, o.client): replay(scenario.federation, o) for o in observations(trained)}
    assert all(found.ok == (round == 1) for (round, _), found in told.items())
