"""Canaries in a federation: the epsilon that they show is the accounted one, in numbers, on the page and in the report."""

import math
from contextlib import closing
from pathlib import Path

import pytest

from fedgauge.attacks.base import Observation, Wave
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.membership.canary_epsilon import CANARY, gaussian_epsilon
from fedgauge.attacks.plan import CANARIES
from fedgauge.attacks.source import FederationSource
from fedgauge.client.components import SpecError, Table
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import CanaryOptions, Protocol, SecureSumOptions
from fedgauge.defenses.accounting import Accountant
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.figures import rounds_figures
from fedgauge.server.views.overview import Overview
from fedgauge.server.views.privacy import CanaryEstimate, _accounted, canaries, canary_estimate, canary_words
from fedgauge.server.views.scores import Scores
from fedgauge.server.views.snapshot import RunSnapshot, read_once
from fedgauge.server.views.tables import in_json
from fedgauge.simulations.cli.run_summary import print_summary
from fedgauge.simulations.reports.report import write_report
from fedgauge.simulations.run.create import check_deployable
from tests.small_runs import scenario, taped

SGD: Table = {"use": "local_sgd", "rate": 0.5}
CLIP: Table = {"use": "clip", "max_norm": 1.0}
# a network of 805 weights behind little noise: a canary's own part is much of its update's norm
SMALL: tuple[Table, list[Table]] = (
    {"use": "mlp", "hidden": [1]},
    [SGD, CLIP, {"use": "gaussian", "sigma": 0.1}],
)
CHAINS: dict[str, list[Table]] = {
    "clipped updates": [SGD, CLIP, {"use": "gaussian", "sigma": 2.0}],
    "clipped examples": [{"use": "dp_sgd", "max_norm": 1.0, "noise_multiplier": 8.0}, SGD],
    "three noisy steps": [CLIP | {"each": True}, {"use": "gaussian", "sigma": 3.0}, SGD | {"steps": 3}],
}
ROUNDS, SEEDS, DELTA = 3, 20, 1e-5


def scored(rows: list[tuple[int, int, float]]) -> Scores:
    """Scores of (round, canary, value)."""
    return Scores.of([(r, c, CANARIES, c, CANARY, "converged", v) for r, c, v in rows])


def estimate(
    chain: list[Table], seed: int, together: int = 1, model: Table | None = None
) -> tuple[CanaryEstimate, float]:
    """What 32 canaries among 36 clients show in three rounds, from the updates as the server sees them; the accounted epsilon."""
    summed = None if together == 1 else SecureSumOptions(together)
    data = {"use": "mnist5k", "batch_size": 4}
    model = model or {"use": "mlp", "hidden": [16]}
    protocol = Protocol(seed, ROUNDS, 36, data, model, tuple(chain), secure_sum=summed, canaries=CanaryOptions(32))
    fed = Federation(protocol)
    params, buffers = fed.initial()
    first = [group[0] for group in protocol.groups if set(group) & set(protocol.canary_clients)]
    planned = next(p for p in scenario_of(together).plan.attacks if p.name == CANARIES)
    rows = []
    for round in range(1, ROUNDS + 1):
        seen = [Observation(round, c, params, fed.client_update(params, buffers, c, round), buffers) for c in first]
        for result in Auditor(FederationSource(fed)).audit(planned, Wave.stack(seen)):
            rows += [(r.round, r.example, r.value or math.nan) for r in result.rows]
    found = canary_estimate(scored(rows), DELTA)
    assert found is not None
    return found, Accountant.of(fed).spent(found.releases, 4).client


def scenario_of(together: int = 1, clients: int = 8) -> Scenario:
    summed = {} if together == 1 else {"secure_sum": {"group": together}}
    return scenario(clients=clients, chain=CHAINS["clipped updates"], canaries={"clients": 4}, attack=[], **summed)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if i else []) for i, name in enumerate(CHAINS)]
)
def test_the_accounted_epsilon_lies_in_the_interval(name: str) -> None:
    """The Gaussian mechanism's epsilon is exact, and a canary is its worst case; 95 % intervals miss two in twenty at times."""
    found = [estimate(CHAINS[name], seed) for seed in range(SEEDS)]
    accounted = found[0][1]
    assert {(e.canaries, e.releases) for e, _ in found} == {(32, ROUNDS)}
    assert sum(e.low <= accounted <= e.high for e, _ in found) >= SEEDS - 1
    mean = sum(e.epsilon for e, _ in found) / SEEDS
    assert mean == pytest.approx(accounted, rel=0.06)
    # one that holds everything would say nothing
    assert all(e.low > 0 and e.high < 2.5 * accounted for e, _ in found)


def test_in_small_networks_a_canarys_own_part_does_not_count_as_noise() -> None:
    found = [estimate(SMALL[1], seed, model=SMALL[0]) for seed in range(10)]
    assert sum(e.low <= accounted <= e.high for e, accounted in found) >= 9


def test_a_sum_is_a_canarys_whoever_answers_first() -> None:
    """Client 4 may miss a round; the sum of clients 5 to 7 is then called by client 5."""
    chosen = scenario(
        clients=8, chain=CHAINS["clipped updates"], canaries={"clients": 3}, attack=[{"use": "idlg"}],
        secure_sum={"group": 4, "threshold": 3},
    )  # fmt: skip
    idlg, looked = chosen.plan.attacks[0], chosen.plan.attacks[-1]
    assert looked.name == CANARIES
    for first in (4, 5, 6):
        assert chosen.plan.targets(1, [0, first], idlg) == [0]
        assert chosen.plan.targets(1, [0, first], looked) == [first]


def test_a_secure_sum_hides_what_the_accounting_does_not_count() -> None:
    """Of four clients' mean, the noise is half as large and a canary's part a quarter: half of each update's own."""
    found = [estimate(CHAINS["clipped updates"], seed, together=4) for seed in range(6)]
    ratio = 2 * math.sqrt(ROUNDS) * (1 / 4) / (2.0 / 2)  # opposite directions, over the noise of a mean of four
    assert sum(e.epsilon for e, _ in found) / 6 == pytest.approx(gaussian_epsilon(ratio, DELTA), rel=0.2)
    assert all(accounted == pytest.approx(gaussian_epsilon(2 * ratio, DELTA)) for _, accounted in found)


def test_an_update_that_is_its_direction_alone_shows_that_there_is_no_noise() -> None:
    fed = scenario_of().federation
    planned = next(p for p in scenario_of().plan.attacks if p.name == CANARIES)
    params, buffers = fed.initial()
    for client in fed.protocol.canary_clients:
        update = {name: t.double() for name, t in fed.direction(client).items()}
        ((result,),) = (
            one.rows
            for one in Auditor(FederationSource(fed)).audit(
                planned, Wave.stack([Observation(1, client, params, update, buffers)])
            )
        )
        assert result.value is not None and math.isfinite(result.value) and result.value > 1e4


def test_an_estimate_on_paper() -> None:
    """Two canaries, two rounds: the mean of all four times the root of two, with an error of 1 over the root of two."""
    rows = [(1, 8, 1.0), (1, 9, 2.0), (2, 8, 2.0), (2, 9, 3.0)]
    first, second = (canary_estimate(scored(rows[:n]), DELTA) for n in (2, 4))
    assert first is not None and second is not None
    assert first.epsilon == gaussian_epsilon(2 * 1.5, DELTA)
    assert second.epsilon == pytest.approx(gaussian_epsilon(2 * 2 * math.sqrt(2), DELTA))
    assert second.high == pytest.approx(
        gaussian_epsilon(2 * (2 * math.sqrt(2) + 1.959964 / math.sqrt(2)), DELTA), rel=1e-6
    )
    assert (first.releases, second.releases) == (1, 2)
    assert canary_estimate(scored([(1, 8, 1.0)]), DELTA) is None
    negative = canary_estimate(scored([(1, 8, -1.0), (1, 9, -2.0)]), DELTA)
    assert negative is not None and negative.epsilon == 0


def test_no_records_epsilon_is_computed_for_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record's amplified epsilon costs some 40 ms."""
    monkeypatch.setattr("fedgauge.defenses.accounting.sampled_epsilon", lambda *args: pytest.fail("computed"))
    accountant = Accountant.of(scenario_of().federation)
    assert accountant.spent_of_client(7) == accountant.spent(7, accountant.batch_size).client > 0
    reading = RunSnapshot(taped(tmp_path / "run", scenario_of()))
    with reading.now() as at:
        assert _accounted(at, 7) == accountant.spent_of_client(7)


@pytest.mark.parametrize("values", [(1e300, -1e300), (7.0, 7.0), (0.0, 0.0), (math.inf, 1.0), (1e300, 1e300)])
def test_numbers_that_nobody_measured_make_an_estimate_or_none(values: tuple[float, float]) -> None:
    rows = [(round, canary, value) for round in (1, 2) for canary, value in enumerate(values)]
    if (found := canary_estimate(scored(rows), DELTA)) is not None:
        assert 0 <= found.low <= found.epsilon <= found.high


def estimated(low: float, high: float, accounted: float | None) -> str:
    return canary_words(CanaryEstimate(8, 1, (low + high) / 2, low, high), DELTA, accounted)


def test_the_sentence_says_which_side_the_accounted_epsilon_is_on() -> None:
    assert "protects less" in estimated(5, 7, 4)
    assert "which is less" not in estimated(5, 7, 6)
    assert "No epsilon" in estimated(5, 7, None)
    assert "less than" not in estimated(math.inf, math.inf, 2690)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    attacks = [{"use": "idlg", "iterations": 5}, {"use": "membership", "strangers": 100, "held": 2}]
    chosen = scenario(
        clients=7, chain=CHAINS["clipped updates"], canaries={"clients": 4}, attack=attacks,
        audit={"executor": "local", "every": 2, "clients": [0, 1, 5]}, tape={"keep": "attacked"},
    )  # fmt: skip
    made = taped(tmp_path_factory.mktemp("canaries") / "run", chosen)
    serve(made, LocalExecutor())
    return made


def test_attacks_leave_canaries_alone_and_these_are_looked_at_in_every_round(run: Run) -> None:
    with closing(RunSnapshot(run)) as reading, reading.now():
        scores = reading.scores
        told = in_json(Overview(reading))
    looked_at = {
        name: {(int(r), int(c)) for r, c in zip(rows.round, rows.client, strict=True)}
        for name in ("idlg", "membership", CANARIES)
        for rows in [scores.of_attack(name)]
    }
    assert looked_at["idlg"] == looked_at["membership"] == {(1, 0), (1, 1)}  # client 5 is a canary
    assert looked_at[CANARIES] == {
        (round, canary) for round in (1, 2) for canary in (3, 4, 5)
    }  # the last one was refused
    assert told["canaries"].startswith("3 canaries") and "at most 2 times" in told["canaries"]
    assert CANARY not in {figure["metric"] for figure in told["over_rounds"]}
    assert CANARIES not in {row[0] for row in told["summary"]["rows"]}


def test_report_terminal_and_figures_say_it(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    report = write_report(run).read_text()
    assert "<h2>What canaries" in report and "3 canaries sent" in report
    print_summary(run, quiet=False)
    assert "3 canaries sent" in capsys.readouterr().out
    with read_once(run) as reading:
        drawn = {figure.metric: {series.name for series in figure.series} for figure in rounds_figures(reading)}
    assert CANARIES not in drawn["psnr"]


def test_a_deployments_server_reads_them_from_its_record(tmp_path: Path) -> None:
    """It knows no example, and accounts for the noise in the form that deployed clients draw."""
    made = taped(tmp_path / "run", scenario_of())
    with made.ledger() as ledger:
        ledger.set_meta(mode="deployment")
    serve(made, LocalExecutor())
    with closing(RunSnapshot(made)) as reading, reading.now():
        told, chosen = canaries(reading), reading.scenario
        found, accounted = canary_estimate(reading.scores, DELTA), _accounted(reading, 2)
    assert found is not None and (found.canaries, found.releases) == (3, 2)
    assert told.startswith("3 canaries sent")
    deployed, simulated = (
        Accountant.of(chosen.federation, DELTA, secret).spent_of_client(2) for secret in (False, True)
    )
    assert accounted == pytest.approx(deployed, rel=1e-4) and deployed > simulated


def test_where_canaries_make_no_sense_a_scenario_is_refused() -> None:
    check_deployable(scenario_of())
    with pytest.raises(SpecError):
        check_deployable(
            scenario(
                clients=8,
                chain=CHAINS["clipped updates"],
                canaries={"clients": 4},
                secure_sum={"group": 4, "clip": 1.0},
            )
        )
    with pytest.raises(SpecError):
        check_deployable(scenario(chain=CHAINS["clipped updates"], canaries={"clients": 2, "examples": 3}))
    named = [{"use": "idlg", "name": "canaries"}]
    with pytest.raises(SpecError):
        scenario(chain=CHAINS["clipped updates"], canaries={"clients": 2}, attack=named)
