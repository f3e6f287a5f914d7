"""What is said of membership: numbers on paper, chance alone is no finding, and no verdict on what was not tested."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from fedgauge.attacks.membership.limit import power
from fedgauge.attacks.modality.membership import QUESTIONS
from fedgauge.attacks.plan import MEMBERSHIP_LIMIT, AttackPlan, PlannedAttack
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.views.leak_tables import membership_table
from fedgauge.server.views.leakage import leakage, leakage_of_all
from fedgauge.server.views.membership import RATES_SHOWN, membership_results, roc_curves
from fedgauge.server.views.verdict import Verdict, verdict_of
from tests.server.views.test_leakage_and_verdict import Cell, Values, score
from tests.small_runs import LedgerAlone, scores_of, verdict_on

TESTS = (PlannedAttack("membership", {"use": "membership"}), PlannedAttack("over", {"use": "membership_over_rounds"}))
GUESSES = (PlannedAttack("label_frequency", {"use": "membership", "score": "label_frequency"}),)
MATCHING = (
    PlannedAttack("matching", {"use": "inverting_gradients"}),
    PlannedAttack("mean_image", {"use": "mean_image"}),
)
Cells = Mapping[Cell, Values]


def written(path: Path, cells: Cells, attacks: Sequence[PlannedAttack] = (*MATCHING, *TESTS, *GUESSES)) -> Ledger:
    """A ledger of a plan whose jobs are all done, with these rows."""
    ledger = Ledger(path, create=True)
    ledger.add_attacks(AttackPlan(tuple(attacks)), {p.name: "" for p in attacks})
    score(ledger, cells, examples=4, plan=AttackPlan(tuple(attacks)))
    return ledger


def judged(path: Path, cells: Cells, attacks: Sequence[PlannedAttack] = (*MATCHING, *TESTS, *GUESSES)) -> Verdict:
    with written(path, cells, attacks) as ledger:
        return verdict_on(ledger)


NOTHING = {"psnr": [12.0, 12.0]}
IMAGES: Cells = {
    (1, client, name): NOTHING for client in range(3) for name in ("matching", "mean_image", "wrong_client(matching)")
}


def of_members(values: Sequence[Sequence[float]], name: str = "membership") -> Cells:
    """One row of members' values for each client."""
    told = [{"membership": v, "membership_at_1_percent": [float(x > 0.99) for x in v]} for v in values]
    return {(1, client, name): own for client, own in enumerate(told)}


def test_the_numbers_of_a_test_are_means_over_members(tmp_path: Path) -> None:
    found = of_members([[1.0, 0.9], [1.0, 0.7], [1.0, 0.8]])
    guesses = of_members([[0.5, 0.6]] * 3, "label_frequency")
    ledger = written(tmp_path / "l.sqlite", {**IMAGES, **found, **guesses})
    (told,) = membership_results(scores_of(ledger))
    assert told.area == pytest.approx(0.9)
    assert (told.baseline, told.floor) == ("label_frequency", pytest.approx(0.55))
    assert told.hits is not None and (told.hits.count, told.hits.n) == (3, 6)
    assert told.leaks
    row, guess = membership_table(LedgerAlone(ledger)).records
    shown = {"n": 6, "mean": pytest.approx(0.9), "detected_at_1_percent": (3, 6)}
    assert row == row | shown and (guess["test"], guess["kind"]) == ("label_frequency", "baseline")
    assert "'membership'" in told.sentence and "90.0\u00a0%" in told.sentence


def test_members_that_cannot_be_detected_are_counted_beside_those_that_can(tmp_path: Path) -> None:
    """Two of three batches have too few non-members with their labels for a rate of 1 %."""
    cells = {(1, c, "membership"): {"membership": [1.0] * 4} for c in range(2)}
    cells |= {(1, 2, "membership"): {"membership": [1.0] * 4, "membership_at_1_percent": [1.0] * 4}}
    with written(tmp_path / "l.sqlite", cells, TESTS) as ledger:
        (told,) = membership_results(scores_of(ledger))
    assert told.hits is not None and (told.members, told.hits.n) == (12, 4) and "8 others" in told.sentence


def test_chance_leaks_rarely(tmp_path: Path) -> None:
    """Values of members that are strangers are uniform, whatever the test."""
    rng, alarms = np.random.default_rng(0), 0
    for seed in range(40):
        found = of_members(rng.uniform(size=(4, 8)).tolist())
        guesses = of_members(rng.uniform(size=(4, 8)).tolist(), "label_frequency")
        with written(tmp_path / f"{seed}.sqlite", {**found, **guesses}, (*TESTS, *GUESSES)) as ledger:
            alarms += any(told.leaks for told in membership_results(scores_of(ledger)))
    assert alarms <= 3  # of 40 at 2.5 %, with a probability of 98 %


def test_one_client_leaks_if_whole_batches_are_detected(tmp_path: Path) -> None:
    """No interval comes from one client; that strangers fill half of three batches has a probability of 0.02^3, in two ways."""
    cells = {
        (round, 0, "membership"): {"membership": [1.0, 1.0], "membership_at_1_percent": [1.0, 1.0]}
        for round in (1, 2, 3)
    }
    with written(tmp_path / "l.sqlite", cells, TESTS) as ledger:
        (told,) = membership_results(scores_of(ledger))
    assert told.excess_low is None and told.leaks
    assert told.hits_by_luck == pytest.approx(2 * 0.02**3)


@pytest.mark.parametrize(("rounds", "word"), [((1,), "undetermined"), ((1, 2), "leaks")])
def test_one_group_all_of_whose_members_are_detected(tmp_path: Path, rounds: Sequence[int], word: str) -> None:
    """Strangers that resemble each other may all be flagged at once, in one group of a hundred."""
    told = {"membership": [1.0] * 10, "membership_at_1_percent": [1.0] * 10}
    with written(tmp_path / "l.sqlite", {(r, 0, "membership"): told for r in rounds}, TESTS) as ledger:
        reading = LedgerAlone(ledger)
        reading.tables = {**reading.tables, "secure_sum": {"group": 10}}
        (result,) = verdict_of(reading).members
    assert (result.word, "1 group" in result.sentence) == (word, word == "undetermined")


def test_a_lead_at_two_clients_may_be_luck_or_not(tmp_path: Path) -> None:
    """Their interval is wide beyond use; at chance, nothing is hidden in it."""
    words = {}
    for areas in ((0.9, 0.95), (0.4, 0.5)):
        told = [{"membership": [area] * 4, "membership_at_1_percent": [0.0] * 4} for area in areas]
        cells = {(1, client, "membership"): each for client, each in enumerate(told)}
        with written(tmp_path / f"{areas[0]}.sqlite", cells, TESTS) as ledger:
            (result,) = verdict_of(LedgerAlone(ledger)).members
        words[areas] = (result.word, "2 clients are too few" in result.sentence)
    assert words == {(0.9, 0.95): ("undetermined", True), (0.4, 0.5): ("not shown to leak", False)}


def test_membership_known_from_the_weights_is_no_leak_of_the_update(tmp_path: Path) -> None:
    """The loss alone tells the same members: nothing was read off the update."""
    told = {"membership": [1.0, 1.0, 0.3], "membership_at_1_percent": [1.0, 1.0, 0.0]}
    clients = {"one": 1, "four": 4}
    for name, count in clients.items():
        cells = {(1, c, attack): told for c in range(count) for attack in ("membership", "loss")}
        plan = (*TESTS, PlannedAttack("loss", {"use": "membership", "score": "loss"}))
        with written(tmp_path / f"{name}.sqlite", cells, plan) as ledger:
            (found,) = membership_results(scores_of(ledger))
        assert not found.leaks and found.baseline == "loss"
        assert found.word == ("undetermined" if count == 1 else "not shown to leak")


def test_members_that_a_baseline_also_detects_keep_the_batch_size(tmp_path: Path) -> None:
    """Three of four members are told by the loss as well: one of four is not half of the batch."""
    own = {"membership": [1.0] * 4, "membership_at_1_percent": [1.0] * 4}
    loss = {"membership": [1.0] * 3 + [0.4], "membership_at_1_percent": [1.0] * 3 + [0.0]}
    plan = (*TESTS, PlannedAttack("loss", {"use": "membership", "score": "loss"}))
    with written(tmp_path / "l.sqlite", {(1, 0, "membership"): own, (1, 0, "loss"): loss}, plan) as ledger:
        (found,) = membership_results(scores_of(ledger))
    assert found.hits_by_luck == pytest.approx(2 * 0.04), "any of four, and not half"


def test_every_place_takes_the_same_mean_of_the_same_rows(tmp_path: Path) -> None:
    """Pooled over the rounds these rows give 0.7."""
    cells: Cells = {
        (round, client, "over"): {
            "dataset_membership": [value],
            "dataset_membership_at_1_percent": [float(value > 0.8)],
        }
        for round, value in ((1, 0.5), (2, 0.9))
        for client in range(2)
    }
    alone = {(r, c, "membership"): {"membership": [0.5], "dataset_membership": [0.1]} for r in (1, 2) for c in range(2)}
    with written(tmp_path / "l.sqlite", {**cells, **alone}, TESTS) as ledger:
        scores = scores_of(ledger)
        table = {(row["question"], row["test"]): row for row in membership_table(LedgerAlone(ledger)).records}
    for metric, (question, _) in QUESTIONS.items():
        pooled = {leak.attack: leak for leak in leakage(scores, metric) if leak.round is None}
        assert {(q, name) for q, name in table if q == question} == {(question, name) for name in pooled}
        for name, leak in pooled.items():
            row = table[question, name]
            assert (row["n"], row["mean"], row["interval"]) == (leak.n, leak.mean, leak.interval)
    assert table[QUESTIONS["dataset_membership"].asked, "over"]["mean"] == pytest.approx(0.9)
    assert {told.metric: told.area for told in membership_results(scores)}["dataset_membership"] == pytest.approx(0.9)
    (hits,) = leakage_of_all(scores, "dataset_membership_at_1_percent")
    assert (hits.n, hits.mean) == (2, 1.0)


def test_the_curve_of_the_limit_is_the_members_mean_power(tmp_path: Path) -> None:
    mus = [0.5, 1.5]
    cells = {
        **of_members([[0.995, 0.4]]),
        (1, 0, MEMBERSHIP_LIMIT): {
            "membership": [0.638, 0.856],
            "membership_at_1_percent": [power(0.01, mu) for mu in mus],
        },
    }
    plan = (*TESTS, PlannedAttack(MEMBERSHIP_LIMIT, {"use": MEMBERSHIP_LIMIT}))
    with written(tmp_path / "l.sqlite", cells, plan) as ledger:
        curves = roc_curves(scores_of(ledger))
        row = membership_table(LedgerAlone(ledger)).records[-1]
    assert row["detected_at_1_percent"] is None, "a power is no count of members"
    assert curves[MEMBERSHIP_LIMIT] == pytest.approx([np.mean([power(r, mu) for mu in mus]) for r in RATES_SHOWN])
    known = dict(zip(RATES_SHOWN, curves["membership"], strict=True))
    assert known[0.001] is None and known[0.01] == 0.5 and known[0.5] == 0.5 and known[1.0] == 1.0


def test_no_verdict_says_that_nothing_leaks_where_membership_was_not_tested(tmp_path: Path) -> None:
    """The same images come back: only a test of membership that found nothing makes the word "not shown to leak"."""
    rng = np.random.default_rng(1)
    chance = of_members([[0.4, 0.6], [0.7, 0.3], [0.45, 0.55]])
    failed: Cells = {(1, c, "membership"): {"membership": [None]} for c in range(3)}
    words = {}
    plans = {
        "none": (IMAGES, MATCHING),
        "planned, and nothing came of it": ({**IMAGES, **failed}, (*MATCHING, *TESTS)),
        "chance": ({**IMAGES, **chance}, (*MATCHING, *TESTS)),
        "only of the client's data": (
            {**IMAGES, **{(1, c, "over"): {"dataset_membership": [0.4, 0.6]} for c in range(3)}},
            (*MATCHING, TESTS[1]),
        ),
        "members": ({**IMAGES, **of_members([[1.0, 0.995]] * 3)}, (*MATCHING, *TESTS)),
    }
    for name, (cells, plan) in plans.items():
        found = judged(tmp_path / f"{name}.sqlite", cells, plan)
        words[name] = found.word
        assert ("membership was not" in found.sentence) == (name not in ("chance", "members"))
        assert found.reconstruction == "not shown to leak"
    assert words == {
        "none": "undetermined",
        "planned, and nothing came of it": "undetermined",
        "chance": "not shown to leak",
        "only of the client's data": "undetermined",
        "members": "leaks",
    }
    for seed in range(20):  # whatever the images do
        values = rng.normal(12, 2, size=(3, 2)).tolist()
        cells = {**IMAGES, **{(1, c, "matching"): {"psnr": v} for c, v in enumerate(values)}}
        assert judged(tmp_path / f"{seed}.sqlite", cells, MATCHING).word != "not shown to leak"


def test_a_test_of_membership_is_no_failed_reconstruction_and_the_other_way_round(tmp_path: Path) -> None:
    cells: Cells = {(1, 0, "matching"): {"psnr": [None, None]}, (1, 0, "membership"): {"membership": [0.9, 0.8]}}
    with written(tmp_path / "l.sqlite", cells, (*MATCHING, *TESTS)) as ledger:
        scores = scores_of(ledger)
        assert set(scores.of_metric("membership").attack) == {scores.attacks.index("membership")}
        assert set(scores.of_metric("psnr").attack) == {scores.attacks.index("matching")}
