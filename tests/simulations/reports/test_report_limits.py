"""Limits, certificates and epsilon in the report of a run with noise."""

import math
from pathlib import Path
from statistics import NormalDist

import pytest

from fedgauge.attacks.base import LIMITS
from fedgauge.defenses.accounting import privacy_statement
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import Run
from fedgauge.server.views.gate import Threshold, gate_of_run
from fedgauge.server.views.privacy import spent_in
from fedgauge.server.views.snapshot import read_once
from tests.simulations.reports.report_pages import NOISY, page_of, taped
from tests.small_runs import scenario

FEW = [{"use": "inverting_gradients", "iterations": 5, "tune": "off"}]


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A complete run of a chain whose noise has a known density."""
    run = taped(tmp_path_factory.mktemp("runs") / "hidden", scenario(chain=NOISY, attack=FEW))
    serve(run, LocalExecutor())
    return run


def test_a_chain_with_noise_gets_its_limit_next_to_the_attacks(hidden: Run) -> None:
    page = page_of(hidden)
    with hidden.ledger() as ledger:
        rows = [r for r in ledger.scores() if r["attack"] == "bayes_limit"]
        best = ledger.best_so_far()
        attacks = [r["value"] for r in ledger.scores("psnr") if r["attack"] == "inverting_gradients"]
    assert {(r["round"], r["client"], r["metric"]) for r in rows} == {
        (r, c, m) for r in (1, 2) for c in (0, 1) for m in ("mse",)
    }
    assert best == max(attacks), "a limit is no attack's success"
    by_round = {r["round"]: r["value"] for r in rows}
    drawn = {f["metric"]: [s for s in f["series"] if s["role"] in LIMITS] for f in page.rounds}
    series, *further = drawn["mse"]
    assert series["name"] == "bayes_limit (an estimate)"
    assert [s["name"] for s in further] in ([], ["candidate_bound"]), "little noise gives no bound"
    assert dict(zip(series["x"], series["mean"], strict=True)) == {
        k: pytest.approx(v, rel=1e-4) for k, v in by_round.items()
    }
    assert series["worst"] == []
    assert [m for m, found in drawn.items() if found] == ["mse"], "a mean of PSNRs is of another kind"
    with hidden.ledger() as ledger:
        errors = [r["value"] for r in ledger.scores("mse") if r["attack"] == "inverting_gradients"]
    line, reached = (-10 * math.log10(sum(v) / len(v)) for v in (list(by_round.values()), errors))
    shown = {row[0]: row for row in page.rows if row}
    assert f"{line:.1f}" in shown["bayes_limit"] and f"{reached:.1f}" in shown["inverting_gradients"]
    assert all(part in page.words for part in ("200 auxiliary images", "(Ledoit-Wolf shrinkage)", "labels known"))


def test_a_limit_is_neither_judged_nor_shown_as_an_attack(hidden: Run) -> None:
    page = page_of(hidden)
    assert page.tiles("bayes_limit") == []
    assert [row[1] for row in page.rows if row and "bayes_limit" in row[0]] == ["estimate"], "one pooled row"
    assert "bayes_limit" not in page.success
    cards = page.words.split("What each attacker knew")[1].split("Limits and baselines")[0]
    assert "bayes_limit" not in cards


def test_noise_over_clipping_is_certified(hidden: Run) -> None:
    page = page_of(hidden)
    curves = page.success
    found = curves["certified (ReRo), one round"]
    # two examples an update, each moving their mean by 1 / 2: noise 0.2 is 0.4 times that; 8 examples, none ever hit by a guess
    prior = 1.959964**2 / (8 + 1.959964**2)
    certified = NormalDist().cdf(NormalDist().inv_cdf(prior) + 1 / 0.4)
    assert curves["mean_image"]["mean"][-1] == 0
    assert found["mean"][-1] == pytest.approx(certified, rel=1e-3)
    assert found["mean"] == sorted(found["mean"], reverse=True)
    assert all(c >= a for c, a in zip(found["mean"], curves["inverting_gradients"]["mean"], strict=True))


def test_epsilon_is_reported_with_the_figures(hidden: Run) -> None:
    chosen = hidden.scenario()
    expected = privacy_statement(chosen.federation, {0: 2, 1: 2})
    assert f"epsilon {expected.record:.3g} for" in page_of(hidden).words


def test_a_withheld_update_counts_as_its_owner_counts_it(tmp_path: Path) -> None:
    run = taped(tmp_path / "silent", scenario(chain=NOISY))
    for round, alarm, counted in ((3, True, 3), (4, None, 3)):
        with run.ledger() as ledger:
            ledger.record_intake(round, [Participation(0, "missing", "no update", alarm=alarm)])
        with read_once(run) as reading:
            expected = privacy_statement(reading.scenario.federation, {0: counted}).record
            assert spent_in(reading).record == expected


def test_a_gate_compares_the_exact_epsilon_and_not_the_five_digits_shown(hidden: Run) -> None:
    with read_once(hidden) as reading:
        exact = spent_in(reading).record
        assert exact is not None
        for bound, outcome in ((exact, "passed"), (math.nextafter(exact, 0), "failed")):
            (result,) = gate_of_run(reading, [Threshold("epsilon", bound)])
            assert result.outcome == outcome
