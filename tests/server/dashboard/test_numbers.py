"""The page's numbers are the ledger's."""

import itertools
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedgauge.server.dashboard.web
import fedgauge.server.views.gallery
from fedgauge.client.inspection.policy import REASON
from fedgauge.defenses.accounting import privacy_statement
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario, expected_jobs
from fedgauge.server.views.leakage import leakage
from fedgauge.server.views.snapshot import RunSnapshot
from fedgauge.server.views.verdict import verdict_of
from tests.server.dashboard.pages import Get, pixels, score_all
from tests.small_runs import scores_of


def records(table: dict[str, Any]) -> list[dict[str, Any]]:
    """A table's rows by their columns' keys."""
    return [dict(zip((column["key"] for column in table["columns"]), row, strict=True)) for row in table["rows"]]


def test_the_overview_is_what_the_ledger_says(get: Get, attacked_run: Run) -> None:
    page = get("/api/runs/complete/overview")
    with attacked_run.ledger() as ledger:
        scores = scores_of(ledger)
        told = {m: leakage(scores, m) for m in ("psnr", "ssim", "identified")}
    with closing(RunSnapshot(attacked_run)) as reading, reading.now():
        assert tuple(page["sentences"]) == verdict_of(reading).sentences
    shown = {f["metric"]: {s["name"]: s for s in f["series"]} for f in page["over_rounds"]}
    for metric, leaks in told.items():
        for leak in leaks:
            if leak.round is not None and leak.mean is not None:
                series = shown[metric][leak.attack]
                assert series["mean"][series["x"].index(leak.round)] == pytest.approx(leak.mean, rel=1e-4)
    accuracy = shown["psnr"]["test accuracy (right)"]
    assert (accuracy["x"], accuracy["mean"]) == ([0, 1, 2], [0.1, 0.2, 0.3])
    assert page["progress"] | {"done": 20} == page["progress"], "two rounds, two clients, two attacks, three baselines"
    assert "client 2 rejected" in page["participation"]
    assert {row["attack"]: row["n"] for row in records(page["summary"])}["inverting_gradients"] == 8


def test_the_overview_names_the_devices_of_the_attacks(get: Get) -> None:
    page = get("/api/runs/complete/overview")
    assert page["attacked_on"].startswith("attacked on cpu ") and page["attacked_on"].endswith(
        f"torch {torch.__version__}"
    )


def test_every_gallery_card_has_truth_and_reconstruction(get: Get, attacked_run: Run) -> None:
    page = get("/api/runs/complete/gallery?round=all")
    assert (page["total"], page["rounds"], page["clients"]) == (8, [1, 2], [0, 1])
    federation = attacked_run.scenario().federation
    for card in page["cards"]:
        batch = federation.batch_at(card["client"], card["round"])
        x = (batch.x[card["example"], 0] * 255).round().byte().numpy()
        assert np.array_equal(pixels(card["truth"]), x)
        assert card["label"] == int(batch.y[card["example"]])
        tile = card["tiles"][0]
        found = attacked_run.read_reconstruction(card["round"], card["client"], "inverting_gradients")
        image = (found["x"][card["example"], 0].clamp(0, 1) * 255).round().byte().numpy()
        assert np.array_equal(pixels(tile["image"]), image)
        mark = "✓" if found["y"][card["example"]] == card["label"] else "✗"
        assert tile["label"] == f"label {int(found['y'][card['example']])} {mark}"
        assert card["tiles"][1] | {"image": None, "value": None, "note": "not applicable"} == card["tiles"][1]
    strengths = [card["tiles"][0]["value"] for card in page["cards"]]
    assert strengths == sorted(strengths, reverse=True), "the worst leak first"


def test_filters_and_pages_show_each_example_once(get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {(c["round"], c["client"], c["example"]): c for c in get("/api/runs/complete/gallery?round=all")["cards"]}
    monkeypatch.setattr(fedgauge.server.views.gallery, "PAGE", 3)
    seen = [get(f"/api/runs/complete/gallery?round=all&offset={o}")["cards"] for o in (0, 3, 6)]
    paged = [(c["round"], c["client"], c["example"]) for c in itertools.chain(*seen)]
    assert sorted(paged) == sorted(whole)
    one = get("/api/runs/complete/gallery?round=2&client=1")
    assert {(c["round"], c["client"]) for c in one["cards"]} == {(2, 1)}
    assert get("/api/runs/complete/gallery")["round"] == 2, "the latest where none is asked for"


def test_runs_are_compared(
    folder: Path, get: Get, make_scenario: Callable[..., Scenario], make_taped: Callable[..., Run]
) -> None:
    for name, leak, rounds in (("a", 20.0, 2), ("b", 25.0, 2), ("c", 10.0, 1)):
        score_all(make_taped(folder / name, make_scenario(rounds=rounds), rounds=rounds), leak)
    page = get("/api/compare?runs=a,b,c")
    strongest = {s["label"]: s["mean"] for s in page["utility"]["series"] if s["label"]}
    assert strongest == {"1": [20.5], "2": [25.5], "3": [10.5]}
    assert page["differences"]["rows"] == [["rounds", "2", "2", "1"]]
    floors = {row["run"]: row["floor"] for row in records(page["points"]) if row["attack"] == "inverting_gradients"}
    assert floors == {"a": 20.5, "b": 25.5, "c": 10.5}


def test_every_point_has_its_epsilon(
    folder: Path, get: Get, make_scenario: Callable[..., Scenario], make_taped: Callable[..., Run]
) -> None:
    """Of the rounds that the server saw: a refused reply was seen, and that one was withheld; a missing one was not."""
    local = {"use": "local_sgd", "rate": 0.1}
    dp = {"use": "dp_sgd", "max_norm": 1.0, "noise_multiplier": 2.0}
    chosen = make_scenario(chain=[dp, local], privacy={"delta": 1e-4})
    run = make_taped(folder / "private", chosen)
    score_all(run, 20.0)
    score_all(make_taped(folder / "signed", make_scenario(chain=[local, {"use": "sign"}])), 20.0)
    expected = privacy_statement(chosen.federation, {0: 2, 1: 2, 2: 2}, 1e-4)
    told = get("/api/runs/private/overview")["privacy"]
    assert told["record"] == pytest.approx(expected.record, rel=1e-4)
    assert told["client"] == pytest.approx(expected.client, rel=1e-4)
    assert told["delta"] == 1e-4
    assert "one record replaced" in told["words"]
    signed = get("/api/runs/signed/overview")["privacy"]
    assert (signed["record"], signed["client"], signed["delta"]) == (None, None, 1e-5)
    assert "no epsilon" in signed["words"]
    page = get("/api/compare?runs=private,signed")
    points = records(page["points"])
    assert {(p["run"], p["epsilon"]) for p in points} == {("private", told["record"]), ("signed", None)}
    with run.ledger() as ledger:
        ledger.record_intake(
            3, [Participation(0, "missing"), Participation(1, "rejected", "a NaN"), Participation(2, "missing")]
        )
        ledger.record_round(3, 0.4, 2.0, 1.0)
    later = privacy_statement(chosen.federation, {0: 2, 1: 3, 2: 2}, 1e-4)
    assert later.record > expected.record
    assert get("/api/runs/private/overview")["privacy"]["record"] == pytest.approx(later.record, rel=1e-4)
    with run.ledger() as ledger:
        ledger.record_intake(4, [Participation(1, "missing", f"{REASON}: its rows", alarm=True)])
        ledger.record_round(4, 0.4, 2.0, 1.0)
    silent = privacy_statement(chosen.federation, {1: 4}, 1e-4)
    assert get("/api/runs/private/overview")["privacy"]["record"] == pytest.approx(silent.record, rel=1e-4)


@pytest.mark.parametrize(
    ("audit", "more"),
    [
        ({}, {}),
        ({"every": 3}, {}),
        ({"rounds": [2, 5, 6], "clients": [1, 2]}, {}),
        ({}, {"clients": 4, "secure_sum": {"group": 2}}),
    ],
    ids=str,
)
def test_the_jobs_of_the_rounds_to_come_are_those_of_each(
    make_scenario: Callable[..., Scenario], audit: dict[str, Any], more: dict[str, Any]
) -> None:
    chosen = make_scenario(rounds=9, audit={"executor": "local", **audit}, **more)
    plan, seen = chosen.plan, [group[0] for group in chosen.protocol.groups]
    each = sum(len(plan.targets(r, seen, planned)) for r in range(3, 10) for planned in plan.attacks)
    assert expected_jobs(chosen, 2) == each > 0
    assert expected_jobs(chosen, 9) == 0
    assert expected_jobs(chosen, 2, 2000) >= each
