"""Canary examples in a federation: a bound on a record's epsilon in numbers, on the page and in the report, blind to the coins."""

import math
from contextlib import closing

import pytest
import torch
from torch import Tensor

from fedgauge.attacks.base import Observation, Wave
from fedgauge.attacks.grading.audit import NOT_FINITE, Auditor, AuditResult
from fedgauge.attacks.grading.knowledge_card import knowledge_card
from fedgauge.attacks.membership.one_run import EVIDENCE, GuessBound, guess_bound, least_epsilon
from fedgauge.attacks.plan import CANARIES
from fedgauge.attacks.source import FederationSource
from fedgauge.client.components import Table
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import CanaryOptions, Protocol, SecureSumOptions
from fedgauge.defenses.accounting import Accountant
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.gate import Threshold, gate_of_run
from fedgauge.server.views.overview import Overview
from fedgauge.server.views.privacy import CanaryBound, _accounted, bound_of, bound_words, canary_bound
from fedgauge.server.views.scores import Scores
from fedgauge.server.views.snapshot import RunSnapshot
from fedgauge.server.views.tables import in_json
from fedgauge.simulations.cli.run_summary import print_summary
from fedgauge.simulations.reports.report import write_report
from tests.small_runs import scenario, taped

DELTA = 1e-5
PLANTED: Table = {"clients": 4, "examples": 10}


def chain(noise: float) -> list[Table]:
    return [{"use": "dp_sgd", "max_norm": 1.0, "noise_multiplier": noise}, {"use": "local_sgd", "rate": 0.5}]


def planned(clients: int = 7, **changes: object) -> Scenario:
    data = {"use": "mnist5k", "batch_size": 4, "auxiliary": 400}
    return scenario(
        clients=clients, chain=chain(0.5), canaries=PLANTED, data=data, model={"use": "mlp", "hidden": [4]}, **changes
    )


def federation(noise: float, holders: int = 8, **changes: object) -> Federation:
    """Clients that train on all of their 60 examples in each round, some of which are up to 40 canaries."""
    data = {"use": "mnist5k", "batch_size": 60, "auxiliary": 400}
    model = {"use": "mlp", "hidden": [16]}
    return Federation(
        Protocol(0, 1, 36, data, model, tuple(chain(noise)), canaries=CanaryOptions(holders, 40), **changes)
    )


def audited(fed: Federation, seen: Federation, clients: list[int]) -> list[AuditResult]:
    """The canaries' evidence in a round's updates of another federation, such as one with less noise."""
    params, buffers = fed.initial()
    wave = [Observation(1, c, params, seen.client_update(params, buffers, c, 1), buffers) for c in clients]
    (looked_at,) = [p for p in planned().plan.attacks if p.name == CANARIES]
    return Auditor(FederationSource(fed)).audit(looked_at, Wave.stack(wave))


def evidence(results: list[AuditResult]) -> Tensor:
    """By the canaries' numbers; all must be there."""
    found = {row.example: row.value for result in results for row in result.rows}
    return torch.tensor([found[number] for number in range(len(found))], dtype=torch.float64)


@pytest.fixture(scope="module")
def silent() -> tuple[Federation, Tensor]:
    """A federation that claims much noise, and what 320 canaries show of its updates, which have hardly any."""
    fed = federation(6.0)
    return fed, evidence(audited(fed, federation(0.01), list(fed.protocol.canary_clients)))


def test_noise_that_is_left_out_is_found_in_one_round(silent: tuple[Federation, Tensor]) -> None:
    fed, found = silent
    accounted = Accountant.of(fed).spent(1, 60).record
    assert len(found) == 320 and accounted == pytest.approx(1.27, abs=0.01)
    assert guess_bound(found, fed.protocol.coins, DELTA).epsilon > accounted


def test_noise_that_is_there_is_not_called_too_small() -> None:
    fed = federation(6.0)
    found = evidence(audited(fed, fed, list(fed.protocol.canary_clients)))
    assert guess_bound(found, fed.protocol.coins, DELTA).epsilon < 0.5 * Accountant.of(fed).spent(1, 60).record


def test_the_evidence_does_not_know_the_coins(
    silent: tuple[Federation, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same updates, judged by somebody whose coins fell the other way."""
    fed, found = silent
    fallen, seen, toss = fed.protocol.coins, federation(0.01).check(), vars(Protocol)["coins"].fget
    monkeypatch.setattr(Protocol, "coins", property(lambda protocol: ~toss(protocol)))
    other = federation(6.0)
    assert torch.equal(evidence(audited(other, seen, list(fed.protocol.canary_clients))), found)
    held = torch.isin(torch.cat(fed.shards.canaries), torch.cat(other.shards.indices))
    assert torch.equal(held, ~fallen), "or nothing was tested"


def test_a_secure_sum_shows_the_canaries_of_its_members() -> None:
    """Of groups of three, the last has two clients with canaries; without them it shows nothing, and that is no failure."""
    fed = federation(1.0, 2, secure_sum=SecureSumOptions(3, 2))
    params, buffers = fed.initial()
    (looked_at,) = [p for p in planned().plan.attacks if p.name == CANARIES]
    seen = Observation(1, 33, params, fed.client_update(params, buffers, 33, 1), buffers)
    (result,) = Auditor(FederationSource(fed)).audit(looked_at, Wave.stack([seen]))
    assert [row.example for row in result.rows] == list(range(80)) and {row.client for row in result.rows} == {33}
    none = Observation(1, 0, params, fed.client_update(params, buffers, 0, 1), buffers)
    (result,) = Auditor(FederationSource(fed)).audit(looked_at, Wave.stack([none]))
    assert result.rows == () and result.reconstruction.status == "converged"


def test_an_update_that_is_no_number_shows_nothing() -> None:
    fed = federation(6.0, 1)
    params, buffers = fed.initial()
    (looked_at,) = [p for p in planned().plan.attacks if p.name == CANARIES]
    broken = Observation(1, 35, params, {k: t * math.nan for k, t in params.items()}, buffers)
    (result,) = Auditor(FederationSource(fed)).audit(looked_at, Wave.stack([broken]))
    assert [(row.metric, row.value, row.status) for row in result.rows] == [(EVIDENCE, None, "not_applicable")]
    assert result.reconstruction.reason == NOT_FINITE


# ----------------------------------------------------------------------------------------------------------- the views


def scored(rows: list[tuple[int, int, float]]) -> Scores:
    """Scores of (round, canary, value)."""
    return Scores.of([(r, 0, CANARIES, c, EVIDENCE, "converged", v) for r, c, v in rows])


def test_evidence_adds_up_over_rounds() -> None:
    """In the first round each of 32 canaries' evidence is wrong, in the second twice as much is right."""
    coins = torch.arange(32) % 3 == 0
    right = torch.where(coins, 1.0, -1.0).tolist()
    rows = [(1, c, -v) for c, v in enumerate(right)] + [(2, c, 2 * v) for c, v in enumerate(right)]
    first, second = (canary_bound(scored(rows[:n]), coins, DELTA) for n in (32, 64))
    assert first is not None and second is not None
    assert (first.canaries, first.releases, first.bound.right, first.bound.epsilon) == (32, 1, 0, 0.0)
    assert (second.releases, second.bound.right, second.bound.guesses) == (2, 32, 32)
    assert second.bound.epsilon == second.most == first.most == least_epsilon(32, 32, 32, DELTA, 0.05 / 3) > 1


@pytest.mark.parametrize("number", [-1, 2, 10**9])
def test_a_row_of_no_canary_counts_for_nothing(number: int) -> None:
    coins = torch.tensor([True, False])
    assert canary_bound(scored([(1, number, 5.0)]), coins, DELTA) is None
    bound = canary_bound(scored([(1, 0, 1e99), (1, 1, math.nan)]), coins, DELTA)
    assert bound is not None and (bound.canaries, bound.bound.right, bound.bound.epsilon) == (1, 1, 0.0)


def bounded(epsilon: float, accounted: float | None) -> str:
    guesses = GuessBound(32, 30, epsilon, 2 * epsilon, 3 * epsilon)
    return bound_words(CanaryBound(64, 1, guesses, 3.04), DELTA, accounted)


def test_the_sentence_says_which_side_the_accounted_epsilon_is_on() -> None:
    assert "protects less" in bounded(2, 1.9)
    assert "at most 3.04" in bounded(2, 2.1)
    assert "No epsilon" in bounded(2, None)
    assert "30 of the 32 surest" in bounded(2, None)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    attacks = [{"use": "idlg", "iterations": 5, "tune": "off"}]
    audit = {"executor": "local", "every": 2, "clients": [0, 5]}
    made = taped(tmp_path_factory.mktemp("canaries") / "run", planned(attack=attacks, audit=audit))
    serve(made, LocalExecutor())
    return made


def test_canaries_are_looked_at_in_every_round_and_attacks_leave_nobody_alone(run: Run) -> None:
    with closing(RunSnapshot(run)) as reading, reading.now():
        scores, told, coins = reading.scores, in_json(Overview(reading)), reading.scenario.protocol.coins
        found, accounted = canary_bound(scores, coins, DELTA), _accounted(reading, 2)
    looked_at = {
        name: {(int(r), int(c)) for r, c in zip(rows.round, rows.client, strict=True)}
        for name in ("idlg", CANARIES)
        for rows in [scores.of_attack(name)]
    }
    assert looked_at["idlg"] == {(1, 0), (1, 5)}  # client 5 holds canaries
    assert looked_at[CANARIES] == {
        (round, client) for round in (1, 2) for client in (3, 4, 5)
    }  # the last one was refused
    assert found is not None and (found.canaries, found.releases) == (30, 2)
    shard, accountant = (4000 - 400) // 7 - 10, Accountant.of(run.scenario().federation)
    assert accounted == pytest.approx(accountant.spent(2, shard).record, rel=1e-3)
    assert accounted is not None and found.bound.epsilon <= accounted
    assert "each of 30 canary" in told["canaries"]
    assert EVIDENCE not in {figure["metric"] for figure in told["over_rounds"]}
    assert CANARIES not in {row[0] for row in told["summary"]["rows"]}
    (looked_at,) = [p for p in run.scenario().plan.attacks if p.name == CANARIES]
    card = knowledge_card(run.scenario().federation, looked_at)
    assert "40 canary examples, but not" in card


def test_a_gate_takes_the_bound_without_an_assumption(run: Run) -> None:
    with closing(RunSnapshot(run)) as reading, reading.now():
        shown, (result,) = bound_of(reading), gate_of_run(reading, [Threshold("canary_epsilon", -1)])
    assert shown is not None and (result.outcome, result.value) == ("failed", shown.bound.epsilon)


def test_report_and_terminal_say_it(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    report = write_report(run).read_text()
    assert "<h2>What canaries" in report and "each of 30 canary" in report
    assert "surest guesses" in report
    print_summary(run, quiet=False)
    assert "each of 30 canary" in capsys.readouterr().out
