"""What is said of a run: numbers on paper and from scipy, failures counted, and verdicts that chance alone does not earn."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgauge.attacks.base import Role
from fedgauge.attacks.modality.rows import RowModality
from fedgauge.attacks.plan import AttackPlan, PlannedAttack
from fedgauge.attacks.score_rows import WHOLE_BATCH, ScoreRecord
from fedgauge.client.label_kinds import SCORED
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import UNGRADED, Participation
from fedgauge.server.views.gallery import Gallery
from fedgauge.server.views.intervals import Rate
from fedgauge.server.views.leak_tables import rounds_table, summary_table
from fedgauge.server.views.leakage import Leak, leakage
from fedgauge.server.views.scores import Scores
from fedgauge.server.views.strength import paired
from fedgauge.server.views.success import THRESHOLDS, success_curve
from fedgauge.server.views.verdict import Verdict, excesses, restored_labels, verdict_of
from tests.small_runs import LedgerAlone, scores_of, verdict_on

PLAN = AttackPlan(
    (
        PlannedAttack("matching", {"use": "inverting_gradients"}),
        PlannedAttack("mean_image", {"use": "mean_image"}),
        PlannedAttack("random_image", {"use": "random_image"}),
    )
)
ROLES: dict[str, Role] = {planned.name: planned.role for planned in PLAN.attacks}
Cell = tuple[int, int, str]  # (round, client, attack)
Values = Mapping[str, Sequence[float | None]]  # by metric, one value an example; label_accuracy: one for the batch


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite", create=True) as opened:
        opened.set_meta(main_metric="psnr")
        opened.add_attacks(PLAN, {p.name: f"card of {p.name}" for p in PLAN.attacks})
        yield opened


def score(
    ledger: Ledger,
    cells: Mapping[Cell, Values | None],
    examples: int = 2,
    status: str = "diverged",
    plan: AttackPlan = PLAN,
) -> None:
    """Write scores as the pool does; None for a cell whose worker died, `status` where a value is missing."""
    for round in sorted({r for r, _, _ in cells}):
        clients = sorted({c for r, c, _ in cells if r == round})
        ledger.record_intake(
            round, [Participation(c, "accepted", "", examples, f"digest {round} {c}") for c in clients], plan
        )
    while (lease := ledger.lease()) is not None:
        for client in lease.clients:
            alone, found = lease.of([client]), cells.get((lease.round, client, lease.attack.name), {})
            if found is None:
                ledger.fail(alone, "WorkerCrashed: gone")
                continue
            names = {lease.attack.name: found}
            names[f"wrong_client({lease.attack.name})"] = (
                cells.get((lease.round, client, f"wrong_client({lease.attack.name})"), {}) or {}
            )
            rows = [
                ScoreRecord(
                    lease.round,
                    client,
                    name,
                    WHOLE_BATCH if metric in SCORED else example,
                    metric,
                    value,
                    "converged" if value is not None else status,
                    0.1,
                )
                for name, by_metric in names.items()
                for metric, values in by_metric.items()
                for example, value in enumerate(values)
            ]
            ledger.finish(alone, {client: rows})


def leaks(ledger: Ledger, metric: str) -> list[Leak]:
    return leakage(scores_of(ledger), metric)


def table_of(ledger: Ledger) -> list[Mapping[str, Any]]:
    return rounds_table(LedgerAlone(ledger)).records


def curve_of(ledger: Ledger) -> dict[str, list[Rate]]:
    return success_curve(LedgerAlone(ledger))


def one(found: Sequence[Leak], attack: str, round: int | None) -> Leak:
    (leak,) = [k for k in found if (k.attack, k.round) == (attack, round)]
    return leak


GOOD: Values = {"psnr": [20.0, 22.0], "mse": [0.01, 0.02], "label_accuracy": [1.0]}
MIXED: Values = {"mse": [0.3, 0.001], "psnr": [5.2, 30.0], "ssim": [0.1, 0.9]}
NOTHING: Values = {"psnr": [None, None], "mse": [None, None]}


@pytest.mark.parametrize(
    ("first", "second", "metric", "expected"),
    [
        # an exact hit is capped in the mean alone
        ({"psnr": [np.inf, 20.0]}, {"psnr": [70.0, 10.0]}, "psnr", (37.5, 45.0, np.inf, 4, {}, 2)),
        # what gave no value is counted, and in no mean
        ({"psnr": [None, 20.0]}, NOTHING, "psnr", (20.0, 20.0, 20.0, 1, {"diverged": 3}, 1)),
        # a dead worker fails for every metric, in as many examples as came back of the other client
        (GOOD, None, "psnr", (21.0, 21.0, 22.0, 2, {"failed": 2}, 1)),
        (GOOD, None, "mse", (0.015, 0.015, 0.01, 2, {"failed": 2}, 1)),
        (GOOD, None, "label_accuracy", (1.0, 1.0, 1.0, 1, {"failed": 1}, 1)),
        # an attack that restored nothing restored no label
        (GOOD, NOTHING, "label_accuracy", (1.0, 1.0, 1.0, 1, {"diverged": 1}, 1)),
        # the best is the value that leaks most
        (MIXED, MIXED, "mse", (0.1505, 0.1505, 0.001, 4, {}, 2)),
        (MIXED, MIXED, "ssim", (0.5, 0.5, 0.9, 4, {}, 2)),
    ],
)
def test_a_leak_by_hand(
    ledger: Ledger, first: Values, second: Values | None, metric: str, expected: tuple[object, ...]
) -> None:
    guess: Values = {"psnr": [12.0, 12.0]}
    score(ledger, {(1, 0, "matching"): first, (1, 1, "matching"): second, (1, 0, "mean_image"): guess})
    leak = one(leaks(ledger, metric), "matching", 1)
    found = (leak.mean, leak.median, leak.best, leak.n, leak.failed, leak.clusters)
    assert found == tuple(pytest.approx(v) if isinstance(v, float) else v for v in expected)
    assert (leak.low is None) == (leak.clusters == 1), "one client says nothing on how clients differ"
    guesses = [k for k in leaks(ledger, metric) if k.attack == "mean_image"]
    assert bool(guesses) == (metric == "psnr"), "a guess that claims no labels did not fail at them"


@given(st.permutations(range(3)), st.permutations(range(3)))
def test_the_order_in_which_a_reconstruction_lists_its_images_changes_no_verdict(
    one: Sequence[int], other: Sequence[int]
) -> None:
    """Clients grade in that order. An attack as good as its baseline once exposed half of the examples by it."""
    values = [30.0, 10.0, 20.0]

    def found(*orders: Sequence[int]) -> Scores:
        rows = [
            (1, c, name, i, "psnr", "converged", values[k])
            for name, o in zip(("matching", "mean_image"), orders, strict=True)
            for c in range(4)
            for i, k in enumerate(o)
        ]
        return Scores.of(rows, unordered=True, roles=ROLES)

    (excess,) = excesses(found(one, other))
    assert (excess.exposed, excess.leaks, excess.mean) == (0, False, pytest.approx(0))
    assert sorted(found(one, other).leakiest("psnr").value) == sorted(values * 4)
    ordered = replace(found((0, 1, 2), (1, 0, 2)), unordered=False)
    assert excesses(ordered)[0].exposed == 4, "where the order is known, an example that no guess reaches counts"


@pytest.mark.parametrize("columns", [13, 4, 2])
def test_rows_that_chance_fills_in_are_rarely_exposed(columns: int) -> None:
    """128 rows, of which an attack and its baselines get each cell right with the same probability."""

    def exposed(right: np.ndarray) -> int:
        named = zip(("matching", "mean_image", "random_image", "wrong_client(matching)"), right, strict=True)
        scored = [
            (1, c, name, i, "cells", "converged", value)
            for name, clients in named
            for c, rows in enumerate(clients)
            for i, value in enumerate(rows * 100 / columns)
        ]
        return excesses(Scores.of(scored, roles=ROLES, modality=RowModality))[0].exposed

    drawn = [np.random.default_rng(seed).binomial(columns, 0.45, (4, 2, 64)) for seed in range(20)]
    assert sum(exposed(right) > 0 for right in drawn) <= 2
    drawn[0][0] = columns
    assert exposed(drawn[0]) > 32, "an attack that reads each row"


@pytest.mark.parametrize(("attack", "lost"), [("matching", 8), ("bayes_limit", 1)])
def test_a_lost_batch_is_all_of_its_examples_and_a_lost_limit_the_one_number_that_it_is(attack: str, lost: int) -> None:
    rows = [(1, 0, attack, -1, "mse", "not_applicable", None)]
    scores = Scores.of(rows, size_of=lambda round, client: 8, roles={**ROLES, "bayes_limit": "estimate"})
    assert scores.counts("mse").tolist() == [lost]


def test_rounds_are_pooled_by_example_and_clusters_are_clients(ledger: Ledger) -> None:
    cells: dict[Cell, Values | None] = {
        (r, c, "matching"): {"psnr": [10.0 * c + r, 10.0 * c + r]} for r in (1, 2, 3) for c in (1, 2)
    }
    score(ledger, cells)
    found = leaks(ledger, "psnr")
    assert [(k.round, k.mean) for k in found if k.attack == "matching"] == [(1, 16), (2, 17), (3, 18), (None, 17)]
    pooled = one(found, "matching", None)
    assert (pooled.n, pooled.clusters) == (12, 2)
    assert (pooled.low, pooled.high) == pytest.approx((17 - 12.7062 * 5, 17 + 12.7062 * 5), abs=1e-3)


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 2), st.sampled_from("ab"), st.sampled_from("xy")), unique=True
    ),
    st.randoms(),
)
def test_scores_are_in_one_order(keys: list[tuple[int, int, str, str]], shuffled: Random) -> None:
    rows = [(r, c, a, 0, m, "converged", float(i)) for i, (r, c, a, m) in enumerate(keys)]
    whole = Scores.of(rows)
    shuffled.shuffle(rows)
    for field in fields(Scores):
        assert np.array_equal(getattr(whole, field.name), getattr(Scores.of(rows), field.name)), field.name
    assert [whole.attacks[a] for a in whole.attack] == [a for _, _, a, _ in sorted(keys)]


def test_no_interval_exceeds_the_cap_of_a_mean(ledger: Ledger) -> None:
    score(ledger, {(1, 0, "matching"): {"psnr": [60.0, 60.0]}, (1, 1, "matching"): {"psnr": [20.0, 20.0]}})
    pooled = one(leaks(ledger, "psnr"), "matching", None)
    assert pooled.mean == 40.0 and pooled.interval is not None and pooled.interval[1] == 60.0


# ------------------------------------------------------------------------------------------------------------- tables


def test_the_round_table_by_hand(ledger: Ledger) -> None:
    for round, accuracy in ((0, 0.1), (1, 0.3), (2, 0.5)):
        ledger.record_round(round, accuracy, 2.0, 1.0)
    cells: dict[Cell, Values | None] = {}
    for client in (0, 1):
        cells[2, client, "matching"] = {
            "psnr": [20.0, 30.0],
            "identified": [1.0, 0.0],
            "label_accuracy": [0.5 + client / 2],
        }
        cells[2, client, "wrong_client(matching)"] = {"psnr": [9.0, 9.0]}
        cells[2, client, "mean_image"] = {"psnr": [11.0, 13.0]}
        cells[2, client, "random_image"] = {"psnr": [8.0, 10.0]}
    score(ledger, cells)
    (line,) = table_of(ledger)
    told = {"round": 2, "accuracy": 0.5, "before": 0.3, "attack": "matching", "mean": 25.0, "worst": 30.0, "n": 4}
    assert line == line | told | {"baseline": 12.0, "guess": "mean_image", "labels": 0.75, "identified": (2, 4)}


def test_the_success_curve_counts_every_example_that_was_attacked(ledger: Ledger) -> None:
    score(
        ledger,
        {
            (1, 0, "matching"): {"psnr": [np.inf, 25.0, 9.0]},
            (1, 1, "matching"): {"psnr": [None, None, None]},
            (1, 2, "matching"): None,
        },
        examples=3,
    )
    curve = dict(zip(THRESHOLDS, curve_of(ledger)["matching"], strict=True))
    assert (curve[10], curve[25], curve[26], curve[60]) == (Rate(2, 9), Rate(2, 9), Rate(1, 9), Rate(1, 9))


def ungraded(attack: str, clients: Sequence[int]) -> dict[Cell, Values | None]:
    """What a grader writes of clients whose owners do not allow it, beside the attacker's own objective."""
    return {(1, c, attack): {"objective": [0.1]} for c in clients}


def refuse(ledger: Ledger, clients: Sequence[int]) -> None:
    for job in ledger.ungraded():
        if job.client in clients:
            rows = [ScoreRecord(job.round, job.client, job.attack, WHOLE_BATCH, "psnr", None, UNGRADED, 0.1)]
            ledger.grade(job.id, rows, "the owner does not allow it")


def test_ungraded_reconstructions_count_on_neither_side(ledger: Ledger) -> None:
    """Two owners of three refuse; the third's images all come back: that is all of one, not a third of three."""
    score(ledger, {(1, 0, "matching"): {"psnr": [40.0]}, **ungraded("matching", (1, 2))}, examples=1)
    refuse(ledger, (1, 2))
    assert set(curve_of(ledger)) == {"matching"}
    curve = dict(zip(THRESHOLDS, curve_of(ledger)["matching"], strict=True))
    assert (curve[20], curve[40], curve[41]) == (Rate(1, 1), Rate(1, 1), Rate(0, 1))
    leak = one(leaks(ledger, "psnr"), "matching", 1)
    assert (leak.n, leak.failed, leak.ungraded, leak.mean) == (1, {}, 2, 40.0)
    assert scores_of(ledger).left_ungraded == 2


def test_without_grades_there_is_no_success_curve(ledger: Ledger) -> None:
    cells = ungraded("matching", (0, 1)) | ungraded("mean_image", (0, 1))
    score(ledger, cells | {(1, 2, "matching"): {"psnr": [None]}}, examples=1, status="not_applicable")
    refuse(ledger, (0, 1))
    ledger.set_meta(ungraded="the owner does not allow it")
    assert curve_of(ledger) == {}
    said = verdict_on(ledger)
    assert said.word == "undetermined"
    for part in ("2 x not graded", "(the owner does not allow it)", "1 x not applicable"):
        assert part in said.sentence


# ------------------------------------------------------------------------------------------------------------ verdict


def drawn(
    seed: int, gain: float, clients: int = 12, examples: int = 4, chance: float = 0.002
) -> dict[Cell, Values | None]:
    """Scores of an attack and its baselines from one normal distribution, the attack's shifted by `gain` dB."""
    rng = np.random.default_rng(seed)
    cells: dict[Cell, Values | None] = {}
    for client in range(clients):
        for name in ("matching", "wrong_client(matching)", "mean_image", "random_image"):
            shift = gain if name == "matching" else 0.0
            psnr = (rng.normal(12, 2, examples) + shift).tolist()
            cells[1, client, name] = {
                "psnr": psnr,
                "identified": (rng.random(examples) < chance).astype(float).tolist(),
            }
    return cells


def judged(folder: Path, cells: Mapping[Cell, Values | None], **meta: str) -> Verdict:
    with Ledger(folder / f"{len(list(folder.iterdir()))}.sqlite", create=True) as ledger:
        ledger.add_attacks(PLAN, {p.name: "" for p in PLAN.attacks})
        if meta:
            ledger.set_meta(**meta)
        score(ledger, cells, examples=4)
        return verdict_on(ledger)


@pytest.mark.parametrize(("clients", "gain"), [(12, 3.0), (2, 28.0)])
def test_chance_leaks_rarely_and_a_gain_always(tmp_path: Path, clients: int, gain: float) -> None:
    alarms = [judged(tmp_path, drawn(seed, 0.0, clients)).word == "leaks" for seed in range(25)]
    assert sum(alarms) <= 1
    found = [judged(tmp_path, drawn(seed, gain, clients, chance=1.0)) for seed in range(25)]
    assert {verdict.word for verdict in found} == {"leaks"}


@pytest.mark.parametrize(("gains", "word"), [((6.0, 9.0), "undetermined"), ((-1.0, -4.0), "not shown to leak")])
def test_two_clients_whose_attack_is_ahead_decide_nothing(tmp_path: Path, gains: Sequence[float], word: str) -> None:
    cells = {
        (1, client, name): {"psnr": [12.0 + gain * (name == "matching")] * 4, "identified": [0.0] * 4}
        for client, gain in enumerate(gains)
        for name in ROLES
    }
    assert judged(tmp_path, cells).reconstruction == word


def test_of_many_attacks_the_best_must_be_rarer_by_luck(tmp_path: Path) -> None:
    """A gain that one attack alone would hardly reach by luck is nothing in the best of ten."""
    # t = 0.72 / (1.044 / sqrt(12)) = 2.4: beyond 2.2 for one, below 3.5 for ten
    gains = np.array([1.0, -1.0] * 6) + 0.72
    blind = [f"blind{k}" for k in range(9)]
    attacks = [PlannedAttack(name, {"use": "inverting_gradients"}) for name in blind]
    plan = AttackPlan((*PLAN.attacks, *attacks))

    def with_others(others: Sequence[str]) -> Verdict:
        cells: dict[Cell, Values | None] = {
            (1, client, name): {"psnr": [12.0 + shift] * 4}
            for client, gain in enumerate(gains)
            for name, shift in {"matching": float(gain), "mean_image": 0.0, **dict.fromkeys(others, -1.0)}.items()
        }
        with Ledger(tmp_path / f"{len(others)}.sqlite", create=True) as ledger:
            ledger.add_attacks(plan, {p.name: "" for p in plan.attacks})
            score(ledger, cells, examples=4, plan=plan)
            return verdict_on(ledger)

    alone, best = with_others([]), with_others(blind)
    assert (alone.reconstruction, best.reconstruction) == ("leaks", "not shown to leak")
    assert alone.strongest is not None and best.strongest is not None
    assert best.strongest.attack == "matching" and (alone.strongest.attacks, best.strongest.attacks) == (1, 10)


@pytest.mark.parametrize(
    ("own", "identified", "named"),
    [
        ({"matching": 1.0, "second": 2.0}, 0.0, "matching"),  # though it beats its guess by less
        ({"matching": 0.0, "second": 1.0}, 0.0, "second"),
        ({"matching": 0.0, "second": 1.0}, 1.0, "second"),  # of the first, images are only identified
        ({"matching": 0.0, "second": 0.0}, 0.0, "matching"),
    ],
)
def test_the_strongest_attack_is_the_same_everywhere(
    tmp_path: Path, own: Mapping[str, float], identified: float, named: str
) -> None:
    """Somebody else's images guess a lot of what the first brings back, and little of what the second does."""
    plan = AttackPlan((*PLAN.attacks, PlannedAttack("second", {"use": "inverting_gradients"})))
    guesses = {"matching": 18.0, "second": 12.0}
    cells: dict[Cell, Values | None] = {}
    for client, noise in enumerate([-0.1, 0.1] * 6):
        cells[1, client, "mean_image"] = {"psnr": [10.0]}
        for attack, guess in guesses.items():
            cells[1, client, f"wrong_client({attack})"] = {"psnr": [guess], "identified": [0.0]}
            hit = identified if attack == "matching" else 0.0
            cells[1, client, attack] = {"psnr": [guess + own[attack] + noise], "identified": [hit]}
    with Ledger(tmp_path / "ledger.sqlite", create=True) as ledger:
        ledger.add_attacks(plan, {p.name: "" for p in plan.attacks})
        score(ledger, cells, examples=1, plan=plan)
        strongest = verdict_on(ledger).strongest
    assert strongest is not None and strongest.attack == named


def quiet(clients: int = 12, examples: int = 4, **own: Values) -> dict[Cell, Values | None]:
    """Images no better than a guess, of which some clients' scores are others (`c3`: those of client 3)."""
    cells = drawn(0, gain=-3.0, clients=clients, examples=examples, chance=0.0)
    return cells | {(1, int(client[1:]), "matching"): values for client, values in own.items()}


ALL: Values = {"psnr": [9.0] * 4, "identified": [1.0] * 4}
NEAR: Values = {"psnr": [45.0, 9.0, 9.0, 9.0], "identified": [1.0, 0.0, 0.0, 0.0]}
HALF: Values = {"psnr": [9.0] * 4, "identified": [1.0, 1.0, 0.0, 0.0]}
TWENTY: Values = {"psnr": [9.0] * 20, "identified": [1.0] * 20}
GUESSED: Values = {"psnr": [12.0] * 4, "identified": [1.0] * 4}
OTHERS: dict[Cell, Values | None] = {(1, c, "wrong_client(matching)"): HALF for c in range(3)}  # of few public examples


@pytest.mark.parametrize(
    ("cells", "word", "exposed"),
    [
        pytest.param(quiet(), "not shown to leak", 0, id="nothing comes back"),
        pytest.param(quiet(c3=NEAR), "leaks", 1, id="a single image, which the mean hides"),
        pytest.param(quiet(**{f"c{c}": HALF for c in range(12)}), "leaks", 0, id="more than any baseline identifies"),
        pytest.param(quiet(3, 20, c0=TWENTY), "leaks", 0, id="those of one client of three"),
        pytest.param(quiet(1, c0=ALL), "leaks", 0, id="those of the only client"),
        pytest.param(quiet(2, 20, c0=TWENTY), "leaks", 0, id="those of one client of two"),
        pytest.param(
            quiet(3, c0=ALL, c1=HALF, c2=HALF) | OTHERS, "not shown to leak", 0, id="hardly more than another client's"
        ),
        pytest.param(quiet(3, c0=ALL, c1=ALL, c2=ALL) | OTHERS, "leaks", 0, id="more than another client's"),
        pytest.param(
            quiet(1, c0=ALL) | {(1, 0, "wrong_client(matching)"): None},
            "undetermined",
            0,
            id="nobody says how many by chance",
        ),
        # who identifies them without the update proves that luck does
        pytest.param(quiet(1, c0=ALL) | {(1, 0, "mean_image"): GUESSED}, "undetermined", 0, id="a guess does, too"),
        pytest.param(
            quiet(1, c0=ALL) | {(1, 0, "wrong_client(matching)"): GUESSED}, "undetermined", 0, id="so do others'"
        ),
    ],
)
def test_images_that_are_identified_beyond_luck_are_a_leak_whatever_the_mean(
    tmp_path: Path, cells: Mapping[Cell, Values | None], word: str, exposed: int
) -> None:
    verdict = judged(tmp_path, cells)
    assert verdict.strongest is not None and verdict.strongest.mean < 0
    assert (verdict.reconstruction, verdict.strongest.exposed) == (word, exposed)
    assert ("1 of them" in verdict.sentence) == (exposed == 1)
    assert ("95 % interval" in verdict.sentence) == (verdict.strongest.clusters > 2)


@pytest.mark.parametrize(("hits", "word"), [(16, "not shown to leak"), (100, "leaks")])
def test_what_labels_alone_identify_is_no_leak_of_images(tmp_path: Path, hits: int, word: str) -> None:
    """Noisy class means identified 15 of 288 digits of MNIST, and 1 of a client's with other classes."""
    own = {
        f"c{c}": {"psnr": [9.0] * 72, "identified": [1.0] * (hits // 4) + [0.0] * (72 - hits // 4)} for c in range(4)
    }
    assert judged(tmp_path, quiet(4, 72, **own)).reconstruction == word


def labelled(clients: int, accuracy: Sequence[float]) -> dict[Cell, Values | None]:
    """Images no better than a guess, beside a label accuracy for each client's batch."""
    cells = quiet(clients)
    for client, value in zip(range(clients), accuracy, strict=True):
        cells[1, client, "matching"] = {**(cells[1, client, "matching"] or {}), "label_accuracy": [value]}
    return cells


def test_labels_that_are_read_off_are_a_leak_whatever_the_images(tmp_path: Path) -> None:
    found = judged(tmp_path, labelled(12, [1.0] * 12))
    assert found.word == "leaks"
    guess = "of the labels are restored by matching (a guess without the update: 81\u00a0%)"
    assert f"labels leak: 100\u00a0% {guess}." in found.sentence
    lucky = judged(tmp_path, labelled(12, [0.75, 0.75, 1.0] * 4))  # two classes, four examples: 81 % without the update
    assert lucky.reconstruction == "not shown to leak"
    assert f"83\u00a0% {guess}" in lucky.sentence


@pytest.mark.parametrize(
    ("metric", "restored", "guessed", "leak"),
    [
        ("label_f1", [1.0, 0.9], [0.3, 0.5], True),
        ("label_f1", [0.4, 0.3], [0.3, 0.5], False),
        ("label_error", [0.0, 0.01], [1.0, 0.4], True),
        ("label_error", [1.0, 1.2], [1.0, 0.4], False),
    ],
)
def test_findings_and_numbers_leak_where_a_guess_from_public_labels_is_worse(
    tmp_path: Path, metric: str, restored: list[float], guessed: list[float], leak: bool
) -> None:
    cells = quiet(12)
    for client in range(12):
        for name, values in (("matching", restored), ("mean_image", guessed)):
            at = 1, client, name
            cells[at] = {**(cells[at] or {}), metric: [values[client % 2]]}
    with Ledger(tmp_path / "ledger.sqlite", create=True) as ledger:
        ledger.set_meta(label_metric=metric)
        ledger.add_attacks(PLAN, {p.name: "" for p in PLAN.attacks})
        score(ledger, cells, examples=4)
        reading = LedgerAlone(ledger)
        assert verdict_of(reading).reconstruction == ("leaks" if leak else "not shown to leak")
        rows = {row["attack"]: row for row in summary_table(reading).records}
        assert rows["matching"]["labels"] == pytest.approx(sum(restored) / 2)
        assert rows["mean_image"]["labels"] == pytest.approx(sum(guessed) / 2)
        labels = restored_labels(reading)
        assert labels is not None and (labels.attack, labels.leaks) == ("matching", leak)
        assert (labels.score, labels.guess) == pytest.approx((sum(restored) / 2, sum(guessed) / 2))


def test_only_examples_that_beat_every_baseline_are_shown_as_worst_cases(ledger: Ledger) -> None:
    cells: dict[Cell, Values | None] = {
        (1, 0, "matching"): {"psnr": [30.0, 12.0]},
        (1, 0, "mean_image"): {"psnr": [11.0, 14.0]},
        (1, 0, "random_image"): {"psnr": [13.0, 8.0]},
    }
    score(ledger, cells)
    gallery = Gallery(LedgerAlone(ledger))
    assert gallery.leaked() == {(1, 0, 0): 30.0} and len(gallery.attacked()) == 2


def test_how_well_labels_are_guessed_depends_on_how_common_the_classes_are(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite", create=True) as ledger:
        ledger.add_attacks(PLAN, {p.name: "" for p in PLAN.attacks})
        score(ledger, labelled(12, [0.75] * 12), examples=4)
        assert verdict_on(ledger).reconstruction == "not shown to leak"
        assert verdict_on(ledger, [0.1] * 10).word == "leaks"
        assert verdict_on(ledger, [0.9, 0.1]).reconstruction == "not shown to leak"


def test_labels_leak_even_if_the_images_are_undetermined(tmp_path: Path) -> None:
    cells: dict[Cell, Values | None] = {
        (1, c, "matching"): {"psnr": [None] * 4, "label_accuracy": [1.0]} for c in range(12)
    }
    found = judged(tmp_path, cells)
    assert found.word == "leaks"
    assert "labels leak" in found.sentence and "said about reconstruction" in found.sentence
    assert judged(tmp_path, labelled(12, [1.0] * 12), replay="mismatch").word == "leaks"


@pytest.mark.parametrize(
    ("attacks", "meta", "why"),
    [
        ((), {}, "no attack that reconstructs"),
        (PLAN.attacks, {}, "no attack has been done"),
        (PLAN.attacks, {"replay": "mismatch"}, "replay"),
        (PLAN.attacks[1:], {}, "no attack that reconstructs"),
    ],
)
def test_a_run_without_scores_is_undetermined(
    tmp_path: Path, attacks: tuple[PlannedAttack, ...], meta: dict[str, str], why: str
) -> None:
    with Ledger(tmp_path / "ledger.sqlite", create=True) as ledger:
        ledger.add_attacks(AttackPlan(attacks), {p.name: "" for p in attacks})
        ledger.set_meta(**meta)
        assert verdict_on(ledger).word == "undetermined" and why in verdict_on(ledger).sentence
        assert (leaks(ledger, "psnr"), table_of(ledger), curve_of(ledger)) == ([], [], {})


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({(1, 0, "matching"): {"psnr": [None] * 4}, (1, 0, "mean_image"): {"psnr": [12.0] * 4}}, "4 x diverged"),
        ({(1, 0, "matching"): {"psnr": [40.0] * 4}}, "no attack is compared"),
    ],
)
def test_attacks_without_a_comparison_are_undetermined(
    tmp_path: Path, cells: Mapping[Cell, Values | None], why: str
) -> None:
    verdict = judged(tmp_path, cells)
    assert verdict.word == "undetermined" and why in verdict.sentence


def test_an_unfinished_audit_says_so_far(ledger: Ledger) -> None:
    score(ledger, drawn(0, gain=3.0))
    assert "36 of 39" not in verdict_on(ledger).sentence
    ledger.record_intake(2, [Participation(0, "accepted", "", 4, "digest")], PLAN)
    assert "(36 of 39 " in verdict_on(ledger).sentence


def test_pairs_are_of_the_same_example(ledger: Ledger) -> None:
    """The excess is a mean of differences: examples that one side lacks do not count."""
    score(
        ledger,
        {
            (1, 0, "matching"): {"psnr": [20.0, 99.0]},
            (1, 0, "mean_image"): {"psnr": [15.0, None]},
            (1, 1, "mean_image"): {"psnr": [50.0, 50.0]},
        },
    )
    (excess,) = excesses(scores_of(ledger))
    assert (excess.mean, excess.reached, excess.floor, excess.baseline) == (5.0, 20.0, 15.0, "mean_image")


# -------------------------------------------------------------------------------------------------------------- limits


def test_a_limit_above_every_attack_changes_no_verdict(tmp_path: Path) -> None:
    plan = AttackPlan((*PLAN.attacks, PlannedAttack("bayes_limit", {"use": "bayes_limit"})))
    cells: dict[Cell, Values | None] = {}
    for c in range(4):
        cells[1, c, "matching"] = {"psnr": [12.0 + 0.1 * c], "mse": [0.06]}
        cells[1, c, "mean_image"] = {"psnr": [12.1], "mse": [0.06]}
        cells[1, c, "bayes_limit"] = {"psnr": [40.0], "mse": [1e-4]}
    with Ledger(tmp_path / "with.sqlite", create=True) as ledger:
        ledger.add_attacks(plan, {p.name: "card" for p in plan.attacks})
        score(ledger, cells, examples=1, plan=plan)
        assert verdict_on(ledger).reconstruction == "not shown to leak"
        assert [line["attack"] for line in table_of(ledger)] == ["matching"]
        assert "bayes_limit" not in curve_of(ledger)
        assert one(leaks(ledger, "mse"), "bayes_limit", 1).mean == 1e-4
        assert LedgerAlone(ledger).order == ["matching", "bayes_limit", "mean_image"]


def test_where_a_lower_value_leaks_more_a_smaller_error_is_the_gain() -> None:
    rows = [(1, 0, name, 0, "mse", "converged", error) for name, error in (("matching", 0.1), ("mean_image", 0.3))]
    gain = paired(Scores.of(rows, roles=ROLES), "matching")
    assert gain is not None and gain.differences == pytest.approx([0.2]) and gain.floor == pytest.approx([0.3])


def test_only_an_attack_has_a_worst_case_and_no_rate_has_one() -> None:
    """The figures, the page and the event files ask this one."""
    leaks = [
        leak
        for metric in ("psnr", "identified")
        for name in ("matching", "mean_image")
        for leak in leakage(Scores.of([(1, 0, name, 0, metric, "converged", 1.0)], roles=ROLES), metric)
    ]
    assert {(k.metric, k.attack): k.worst for k in leaks} == {
        ("psnr", "matching"): 1.0, ("psnr", "mean_image"): None,
        ("identified", "matching"): None, ("identified", "mean_image"): None,
    }  # fmt: skip


def test_shares_of_a_foreign_ledger_are_bounded_when_they_are_read() -> None:
    values = {"identified": 7.0, "membership": -2.0, "cells": 300.0, "label_accuracy": float("nan"), "psnr": 300.0}
    rows = Scores.of([(1, 0, "dlg", 0, metric, "converged", value) for metric, value in values.items()])
    found = dict(zip([rows.metrics[i] for i in rows.metric], rows.value.tolist(), strict=True))
    assert {m: v for m, v in found.items() if m != "label_accuracy"} == {
        "identified": 1.0, "membership": 0.0, "cells": 100.0, "psnr": 300.0
    }  # fmt: skip
    assert np.isnan(found["label_accuracy"])
    assert len(Scores.of([])) == 0
