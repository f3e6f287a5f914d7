"""The report of a complete run shows what ledger, tape and data hold, and needs no network."""

import json
import re
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from fedgauge.attacks.plan import AttackPlan, PlannedAttack
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import Run
from fedgauge.server.views.leakage import leakage
from fedgauge.server.views.overview import Overview
from fedgauge.server.views.snapshot import RunSnapshot
from fedgauge.server.views.tables import in_json
from fedgauge.simulations.reports.report import write_comparison, write_report
from tests.simulations.reports.report_pages import BROWSER, HOSTILE, Page, page_of, taped
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


def test_sections_come_in_order_and_say_what_must_be_said(attacked: Run) -> None:
    page = page_of(attacked)
    headings = re.findall(r"<h2>(.*?)</h2>", page.html)
    assert headings == [
        "Accuracy and leakage over rounds",
        "Round by round",
        "Private images and their reconstructions",
        "Who leaks most",
        "Success over thresholds",
        "Batch membership",
        "What each attacker knew",
        "Participation",
        "Replay check",
        "Scenario",
        "Environment",
    ]
    words = page.words
    start = words.index("complete", words.index("complete") + 1)
    order = [words.index(w, start) for w in ("The clients' images", "contains personal data", "Accuracy and leakage")]
    assert order == sorted(order)
    for needed in (
        "4 of 6 updates arrived; client 2 rejected in 2 rounds",
        "ok: cosine 1.0000000",
        "exact to rounding",
        'use = "mnist5k"',
        "60 iterations x 1 restart",
    ):
        assert needed in words
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


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium on the path")
def test_a_browser_draws_it_without_a_complaint(attacked: Run, tmp_path: Path) -> None:
    assert BROWSER is not None
    quiet = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path}/profile",
    ]
    command = [BROWSER, *quiet, "--virtual-time-budget=5000", "--dump-dom", write_report(attacked).resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count('class="js-line"') > 10
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []


def test_a_quickstart_is_shown_whole_below_six_megabytes(tmp_path: Path) -> None:
    attacks = [{"use": name, "iterations": 1} for name in ("inverting_gradients", "dlg")]
    data = {"use": "mnist5k", "batch_size": 4}
    chosen = scenario(rounds=10, clients=5, data=data, attack=attacks)  # the fifth client is refused
    run = taped(tmp_path / "quickstart", chosen, rounds=10)
    serve(run, LocalExecutor())
    page = page_of(run)  # after one iteration images are noise, which compresses worst
    assert len(page.cards) == 10 * 4 * 4
    assert "All 160 examples" in page.words
    assert write_report(run).stat().st_size < 6_000_000


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
