"""The report of a complete run shows what ledger, tape and data hold, and needs no network."""

import json
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from fedgauge.attacks.plan import AttackPlan, PlannedAttack
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import Run
from fedgauge.server.views.leakage import leakage
from fedgauge.server.views.overview import Overview
from fedgauge.server.views.snapshot import RunSnapshot
from fedgauge.server.views.tables import in_json
from fedgauge.simulations.reports.report import write_comparison, write_report
from tests.simulations.reports.report_pages import HOSTILE, Page, page_of
from tests.small_runs import scenario, scores_of


def test_the_file_is_the_owners_alone_and_equal_runs_give_equal_reports(attacked: Run) -> None:
    path = write_report(attacked)
    assert path == attacked.folder / "report.html"
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    assert write_report(attacked).read_bytes() == before
    assert not list(attacked.folder.glob(".part-*"))


def test_it_asks_nothing_of_a_network(attacked: Run) -> None:
    page = page_of(attacked)
    assert all(link.startswith(("data:", "#")) for link in page.links)
    assert "default-src 'none'" in page.policy
    assert "connect-src" not in page.policy
    assert "http" not in page.policy
    styles = "".join(re.findall(r"<style>(.*?)</style>", page.html, re.DOTALL))
    assert styles
    assert "url(" not in styles
    assert "@import" not in styles
    # Plotly's tool bar would offer to send the figure's data to its makers
    assert "showSendToCloud: false" in page.scripts[-1]
    assert len(page.scripts) == 2


def test_captions_and_table_hold_the_ledgers_numbers(attacked: Run) -> None:
    page = page_of(attacked)
    with attacked.ledger() as ledger:
        rows = [r for r in ledger.scores("psnr") if r["attack"] == "inverting_gradients"]
        found = leakage(scores_of(ledger), "psnr")
    tiles = page.tiles("inverting_gradients")
    assert [float(tile["note"].removesuffix(" dB")) for tile in tiles] == pytest.approx(
        [r["value"] for r in rows], abs=0.051
    )
    mean = {k.round: k.mean for k in found if k.attack == "inverting_gradients"}
    cells = [row for row in page.rows if row[3:4] == ["inverting_gradients"]]
    assert [row[:3] for row in cells] == [["1", "10.0\xa0%", "20.0\xa0%"], ["2", "20.0\xa0%", "30.0\xa0%"]]
    assert [float(row[4]) for row in cells] == pytest.approx([mean[1], mean[2]], abs=0.051)
    assert any(row[0] == "analytic" and "8 x not applicable" in row for row in page.rows)
    with closing(RunSnapshot(attacked)) as reading, reading.now():
        drawn = in_json(Overview(reading))["over_rounds"]
    assert page.rounds == json.loads(json.dumps(drawn)), "the figures are those of the page"


def test_a_report_warns_of_personal_data_and_never_says_safe(attacked: Run) -> None:
    words = page_of(attacked).words
    assert "contains personal data" in words and "4 of 6 updates arrived; client 2 rejected in 2 rounds" in words
    assert "safe" not in words.replace("safetensors", "")


def test_foreign_text_is_never_markup(tmp_path: Path) -> None:
    chosen = scenario(attack=[])
    run = Run.create(tmp_path / "a<i>run", chosen)
    hostile = PlannedAttack("<img src=x onerror=alert(1)>", {"use": "analytic"})
    plan = AttackPlan((hostile, *chosen.plan.attacks))
    (run.folder / "environment.json").write_text(json.dumps({"packages": {HOSTILE: HOSTILE}, "cuda": None}))
    with run.ledger() as ledger:
        ledger.add_attacks(plan, {p.name: f"honest; {HOSTILE}" for p in plan.attacks})
        spec = replace(hostile, table={"use": "analytic", "x": HOSTILE}).to_json()
        ledger._db.execute("UPDATE attacks SET planned = ? WHERE name = ?", (spec, hostile.name))
        ledger.record_intake(
            1, [Participation(0, "accepted", "", 2, "digest"), Participation(1, "rejected", HOSTILE)], plan
        )
        ledger.set_meta(replay="mismatch", replay_detail=HOSTILE)
        while (lease := ledger.lease()) is not None:
            ledger.fail(lease, HOSTILE)
    page = page_of(run)
    assert len(page.scripts) == 2
    assert "<b>" not in page.html.replace(page.scripts[0], "").replace(page.scripts[1], "")
    assert not [link for link in page.links if not link.startswith(("data:", "#"))]
    assert page.words.count(HOSTILE) >= 5
    assert "<" not in re.findall(r"^const data = .*$", page.scripts[1], re.MULTILINE)[0]
    assert "<img src=x onerror=alert(1)>" in page.success, "as text, which the page's script sets as text"


def test_a_large_gallery_is_a_choice_that_says_so(attacked: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedgauge.server.views.gallery.BYTES", 1)
    page = page_of(attacked)
    assert "3 of 8 examples" in page.words
    with attacked.ledger() as ledger:
        rows = [r for r in ledger.scores("psnr") if r["attack"] == "inverting_gradients"]
    worst = max(rows, key=lambda r: r["value"])
    places = [[card[key] for key in ("client", "round", "example")] for card in page.cards]
    assert [worst[key] for key in ("client", "round", "example")] in places


def test_a_comparison_holds_every_run_and_metric(attacked: Run, copied: Run, tmp_path: Path) -> None:
    page = Page(write_comparison([attacked, copied], tmp_path / "c.html").read_text())
    data = {found["metric"]: found for found in page.data}
    assert list(data) == ["psnr", "ssim", "mse", "identified", "label_accuracy"]
    with attacked.ledger() as ledger:
        pooled = {k.attack: k for k in leakage(scores_of(ledger), "ssim") if k.round is None}
    points = {tuple(row[:2]): row[3] for row in data["ssim"]["points"]["rows"]}
    for name in (attacked.name, copied.name):
        assert points[name, "inverting_gradients"] == pytest.approx(pooled["inverting_gradients"].mean, rel=1e-4)
    assert "default-src 'none'" in page.policy
    assert all(link.startswith(("data:", "#")) for link in page.links)
