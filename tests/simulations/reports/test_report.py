"""The report: what it shows is what the ledger, the tape and the data say; it asks nothing of a network, in any state of a run."""

import base64
import csv
import io
import json
import math
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedgauge.attacks.grading.knowledge_card import NO_DERIVATIVE, knowledge_card
from fedgauge.attacks.plan import AttackPlan, PlannedAttack
from fedgauge.client.federation import Federation
from fedgauge.defenses.accounting import spent
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.ledger_rows import Participation
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views import notices
from fedgauge.server.views.formatting import number
from fedgauge.server.views.leakage import leakage
from fedgauge.server.views.png import SMALL, png
from fedgauge.server.views.scores import Scores
from fedgauge.simulations.reports.export import write_csv
from fedgauge.simulations.reports.report import write_comparison, write_report
from fedgauge.simulations.reports.sampling import sample_keys

HOSTILE = "<script>alert('reason')</script> & <b>bold</b>"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def scenario(**changes: Any) -> Scenario:
    tables: dict[str, Any] = {
        "seed": 1,
        "rounds": 2,
        "clients": 3,
        "data": {"use": "mnist5k", "batch_size": 2, "auxiliary": 200},
        "model": {"use": "mlp", "hidden": [32]},
        "chain": [{"use": "local_sgd", "rate": 0.1}],
        "attack": [
            {"use": "inverting_gradients", "iterations": 60},
            {"use": "analytic"},  # does not apply to two examples an update
        ],
        "audit": {"executor": "local"},
    }
    return Scenario.from_tables(tables | changes)


def taped(folder: Path, chosen: Scenario, rounds: int = 2) -> Run:
    """A run as training leaves it: real updates on the tape, the last client's replies refused, jobs queued."""
    run, federation = Run.create(folder, chosen), Federation(chosen.protocol)
    params, buffers = federation.initial()
    tape, clients = run.tape(), range(chosen.protocol.clients - 1)
    with run.ledger() as ledger:
        ledger.add_attacks(chosen.plan, {p.name: knowledge_card(federation, p) for p in chosen.plan.attacks})
        ledger.record_round(0, 0.1, 2.3, 0.1, 0.0)
        for r in range(1, rounds + 1):
            tape.write_round(r, params, buffers)
            digests = {c: tape.write_update(r, c, federation.client_update(params, buffers, c, r)) for c in clients}
            seen = [Participation(c, "accepted", "", federation.shards.batch_size, d) for c, d in digests.items()]
            ledger.record_intake(r, [*seen, Participation(len(clients), "rejected", HOSTILE)], chosen.plan)
            ledger.record_round(r, 0.1 + 0.1 * r, 2.0, 1.0, 0.01)
        ledger.set_meta(state="trained")
    return run


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A complete run: really attacked, with the replay check done."""
    run = taped(tmp_path_factory.mktemp("runs") / "complete", scenario())
    serve(run, LocalExecutor())
    return run


@pytest.fixture
def copied(attacked: Run, tmp_path: Path) -> Run:
    """The complete run, to be damaged."""
    shutil.copytree(attacked.folder, tmp_path / "copied")
    return Run.open(tmp_path / "copied")


@dataclass
class Page(HTMLParser):
    """What a browser would find: text outside scripts, links to elsewhere, scripts, table rows, and what is to be drawn."""

    html: str
    text: str = ""
    links: list[str] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    policy: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[str] = []
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag not in ("meta", "img", "br", "wbr"):
            self._open.append(tag)
        self.links += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "action", "data", "poster")]
        if tag == "meta" and given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""
        if tag == "script":
            self.scripts.append("")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "script" in self._open:
            self.scripts[-1] += data
        elif "style" not in self._open:
            self.text += data
            if self._open and "td" in self._open:
                self.rows[-1][-1] += data

    @property
    def words(self) -> str:
        return " ".join(self.text.split())

    @cached_property
    def data(self) -> Any:
        """What the page's script draws; refuses NaN and Infinity, which are no JSON."""

        def refuse(token: str) -> None:
            raise AssertionError(f"{token} in the page's data")

        found = re.search(r"^const data = (.*);$", self.scripts[-1], re.MULTILINE)
        assert found is not None
        return json.loads(found[1], parse_constant=refuse)

    @property
    def cards(self) -> list[Any]:
        """Of the gallery."""
        cards: list[Any] = self.data["gallery"]["cards"]
        return cards

    def tiles(self, attack: str) -> list[Any]:
        """An attack's pictures, in the order of the cards."""
        return [tile for card in self.cards for tile in card["tiles"] if tile["attack"] == attack]

    def metric(self, name: str) -> dict[str, Any]:
        """The figure's series of a metric, by name."""
        (found,) = [m for m in self.data["overview"]["metrics"] if m["name"] == name]
        return {series["name"]: series for series in found["series"]}

    @property
    def success(self) -> dict[str, Any]:
        """The success curves, by name."""
        return {series["name"]: series for series in self.data["overview"]["success"]}


def page_of(run: Run) -> Page:
    return Page(write_report(run).read_text())


def pixels(source: str) -> np.ndarray:
    kind, data = source.split(",", 1)
    assert kind == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def as_bytes(x: torch.Tensor) -> np.ndarray:
    return (x[0].clamp(0, 1) * 255).round().byte().numpy()


# --------------------------------------------------------------------------------------------------------- a full run


def test_the_file_is_the_owners_alone_and_equal_runs_give_equal_reports(attacked: Run) -> None:
    path = write_report(attacked)
    assert path == attacked.folder / "report.html"
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    assert write_report(attacked).read_bytes() == before
    assert not list(attacked.folder.glob(".part-*"))


def test_it_asks_nothing_of_a_network(attacked: Run) -> None:
    page = page_of(attacked)
    assert page.links
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


def test_pictures_are_the_private_images_and_what_came_back(attacked: Run) -> None:
    page, federation = page_of(attacked), Federation(attacked.scenario().protocol)
    places = [(r, c, e) for r in (1, 2) for c in (0, 1) for e in (0, 1)]
    assert [(shown["round"], shown["client"], shown["example"]) for shown in page.cards] == places
    for (round, client, example), shown in zip(places, page.cards, strict=True):
        truth = federation.batch_at(client, round)
        found = attacked.read_reconstruction(round, client, "inverting_gradients")
        matched, failed = shown["tiles"]
        np.testing.assert_array_equal(pixels(shown["truth"]), as_bytes(truth.x[example]))
        np.testing.assert_array_equal(pixels(matched["image"]), as_bytes(found["x"][example]))
        assert shown["label"] == int(truth.y[example])
        right = "✓" if found["y"][example] == truth.y[example] else "✗"
        assert matched["label"] == f"label {int(found['y'][example])} {right}"
        assert (failed["image"], failed["note"]) == (None, "not_applicable")


def test_captions_and_table_hold_the_ledgers_numbers(attacked: Run) -> None:
    page = page_of(attacked)
    with attacked.ledger() as ledger:
        rows = [r for r in ledger.scores("psnr") if r["attack"] == "inverting_gradients"]
        found = leakage(Scores.read(ledger), "psnr")
    tiles = page.tiles("inverting_gradients")
    assert [float(tile["note"].removesuffix(" dB")) for tile in tiles] == pytest.approx(
        [r["value"] for r in rows], abs=0.051
    )
    mean = {k.round: k.mean for k in found if k.attack == "inverting_gradients"}
    cells = [row for row in page.rows if len(row) == 9 and row[2] == "inverting_gradients"]
    assert [(int(row[0]), row[1]) for row in cells] == [(1, "10\xa0% → 20\xa0%"), (2, "20\xa0% → 30\xa0%")]
    assert [float(row[3]) for row in cells] == pytest.approx([mean[1], mean[2]], abs=0.051)
    assert all("2 clients" in row[4] for row in cells), "few clusters stand beside the interval"
    assert any(row[0].startswith("analytic") and "4 not_applicable" in row[0] for row in page.rows)


def test_the_figures_data_is_the_analysis(attacked: Run) -> None:
    page = page_of(attacked)
    figure = page.data["overview"]
    assert figure["accuracy"] == {"x": [0, 1, 2], "y": [0.1, 0.2, 0.3]}
    assert [m["name"] for m in figure["metrics"]] == ["psnr", "ssim", "mse", "identified", "label_accuracy"]
    with attacked.ledger() as ledger:
        for metric in figure["metrics"]:
            leaks = {(k.attack, k.round): k for k in leakage(Scores.read(ledger), metric["name"]) if k.mean is not None}
            drawn = {(s["name"], r): v for s in metric["series"] for r, v in zip(s["x"], s["mean"], strict=True)}
            assert drawn.keys() == {key for key in leaks if key[1] is not None}
            assert drawn == {key: pytest.approx(leaks[key].mean, rel=1e-4) for key in drawn}
    baselines = {s["name"] for s in figure["metrics"][0]["series"] if s["kind"] == "baseline"}
    assert baselines == {"mean_image", "random_image", "wrong_client(inverting_gradients)"}
    curve = page.success["inverting_gradients"]["y"]
    assert all(a >= b for a, b in zip(curve, curve[1:], strict=False))
    assert page.success["analytic"]["y"] == [0] * 51


def test_the_heat_map_holds_each_clients_worst_case(attacked: Run) -> None:
    heat = page_of(attacked).data["clients"]
    with attacked.ledger() as ledger:
        rows = [r for r in ledger.scores("psnr") if r["attack"] == "inverting_gradients"]
    worst = {
        c: max(r["value"] for r in rows if (r["client"], r["round"]) == c) for c in ((0, 1), (0, 2), (1, 1), (1, 2))
    }
    assert (heat["clients"], heat["rounds"]) == ([0, 1, 2], [1, 2])
    assert heat["z"][:2] == [[pytest.approx(worst[c, r], rel=1e-4) for r in (1, 2)] for c in (0, 1)]
    assert heat["z"][2] == [None, None], "the client whose replies were refused was not attacked"


def test_sections_come_in_order_and_say_what_must_be_said(attacked: Run) -> None:
    page = page_of(attacked)
    headings = re.findall(r"<h2>(.*?)</h2>", page.html)
    assert headings == [
        "Accuracy and leakage over rounds",
        "Round by round",
        "Private images and their reconstructions",
        "Who leaks most",
        "Success over thresholds",
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
        "4 updates accepted, 2 rejected, 0 missing",
        "ok: cosine 1.0000000",
        "exact to rounding",
        'use = "mnist5k"',
        "60 iterations x 1 restart",
    ):
        assert needed in words
    assert words.count("What the attackers knew and spent: honest server; labels restored; chain known") == 1
    assert page.links.count("#knowledge") == 3, "the other figures and tables link to it"
    assert page.html.count('id="knowledge"') == 1
    assert "LPIPS" not in words, "there is none of 28 pixels, with weights or without"
    assert "safe" not in words.replace("safetensors", "")


# -------------------------------------------------------------------------------------------------------------- limits

NOISY = [
    {"use": "clip", "max_norm": 1.0, "each": True},
    {"use": "gaussian", "sigma": 0.2},
    {"use": "local_sgd", "rate": 0.1},
]


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A complete run of a chain whose noise has a known density."""
    run = taped(tmp_path_factory.mktemp("runs") / "hidden", scenario(chain=NOISY))
    serve(run, LocalExecutor())
    return run


def test_a_chain_with_noise_gets_its_limit_beside_the_attacks(hidden: Run) -> None:
    page = page_of(hidden)
    with hidden.ledger() as ledger:
        rows = [r for r in ledger.scores() if r["attack"] == "bayes_limit"]
        best, _ = ledger.so_far("psnr", 60.0)
        attacks = [r["value"] for r in ledger.scores("psnr") if r["attack"] == "inverting_gradients"]
    assert {(r["round"], r["client"], r["metric"]) for r in rows} == {
        (r, c, m) for r in (1, 2) for c in (0, 1) for m in ("mse", "psnr")
    }
    assert best == max(attacks), "a limit is no attack's success"
    by_round = {r["round"]: r["value"] for r in rows if r["metric"] == "psnr"}
    drawn = {m["name"]: [s for s in m["series"] if s["kind"] == "limit"] for m in page.data["overview"]["metrics"]}
    (series,) = drawn["psnr"]
    assert series["name"] == "Bayes limit, Gaussian prior fitted to the auxiliary images"
    assert dict(zip(series["x"], series["mean"], strict=True)) == {
        k: pytest.approx(v, rel=1e-4) for k, v in by_round.items()
    }
    assert series["best"] == []
    assert [m for m, found in drawn.items() if found] == ["psnr", "mse"]
    assert "Bayes limit under a Gaussian prior fitted to the auxiliary images" in page.words
    assert "On photographs a learned attack may cross it" in page.words
    assert "Gaussian prior fitted to 200 auxiliary images (Ledoit-Wolf shrinkage); labels known" in page.words
    assert "No limit is drawn" not in page.words


def test_a_limit_is_neither_judged_nor_shown_as_an_attack(hidden: Run) -> None:
    page = page_of(hidden)
    assert page.tiles("bayes_limit") == []
    assert "bayes_limit" not in page.words.split("Round by round")[0]
    assert [row[0] for row in page.rows if row and "bayes_limit" in row[0]] == ["bayes_limitlimit"], "one pooled row"
    assert "bayes_limit" not in page.success
    cards = page.words.split("What each attacker knew")[1].split("Participation")[0]
    assert "bayes_limit" not in cards
    shared = page.words.split("What the attackers knew and spent: ")[1]
    assert shared.startswith("honest server; labels restored"), "what the attackers share is not the limit's card"


def test_noise_over_clipping_is_certified(hidden: Run) -> None:
    page = page_of(hidden)
    curves = page.success
    found = curves["certified (ReRo), one round"]
    # two examples an update, each moving their mean by 1 / 2: noise 0.2 is 0.4 times that; 8 examples, none ever hit by a guess
    prior = 1.959964**2 / (8 + 1.959964**2)
    certified = NormalDist().cdf(NormalDist().inv_cdf(prior) + 1 / 0.4)
    assert curves["mean_image"]["y"][-1] == 0
    assert found["y"][-1] == pytest.approx(certified, rel=1e-3)
    assert found["y"] == sorted(found["y"], reverse=True)
    assert all(c >= a for c, a in zip(found["y"], curves["inverting_gradients"]["y"], strict=True))
    assert "normal noise of 0.400 times the largest effect" in page.words
    assert "ReRo" not in page_of_words_without_noise(page)


def test_epsilon_is_told_with_the_figures(hidden: Run) -> None:
    chosen = hidden.scenario()
    expected = spent(chosen.federation, {0: 2, 1: 2})
    assert f"Differential privacy: epsilon {expected.record:.3g} for one record replaced" in page_of(hidden).words
    rows = list(csv.DictReader(io.StringIO(exported(hidden))))
    by_round = {int(r["round"]): float(r["epsilon"]) for r in rows}
    assert by_round[2] == pytest.approx(expected.record)
    assert by_round[1] == pytest.approx(spent(chosen.federation, {0: 1, 1: 1}).record)
    assert {float(r["delta"]) for r in rows} == {1e-5}


def exported(run: Run) -> str:
    out = io.StringIO()
    write_csv(run, out)
    return out.getvalue()


def page_of_words_without_noise(page: Page) -> str:
    """All but the certificate's own sentence and curve."""
    return re.sub(r"Certified \(reconstruction robustness, ReRo\).*?in each\.", "", page.words)


def test_the_replay_of_a_noisy_chain_is_exact(hidden: Run) -> None:
    with hidden.ledger() as ledger:
        assert ledger.meta()["replay"] == "ok", "the tape gives names back in the order in which noise was drawn"


@pytest.mark.parametrize(("chain", "words"), [
    (NOISY[::2], "without noise in the chain, rounding is the only limit"),
    ([NOISY[1], NOISY[2], {"use": "prune", "keep": 0.5}], "not known in closed form"),
    (NOISY, "has not been computed yet, or does not apply to this network"),
])  # fmt: skip
def test_without_a_limit_it_says_why(chain: list[dict[str, Any]], words: str, tmp_path: Path) -> None:
    page = page_of(taped(tmp_path / "run", scenario(chain=chain, attack=[]), rounds=1))
    assert words in page.words
    assert not [s for m in page.data["overview"]["metrics"] for s in m["series"] if s["kind"] == "limit"]
    assert "Certified" not in page.words


@pytest.mark.parametrize(("chain", "planned"), [
    (NOISY, ["bayes_limit"]),
    (NOISY[1:], ["bayes_limit"]),
    (NOISY[::2], []),
    ([{**NOISY[1], "each": True}, NOISY[2]], []),
])  # fmt: skip
def test_the_plan_has_a_limit_where_the_chain_has(chain: list[dict[str, Any]], planned: list[str]) -> None:
    assert [p.name for p in scenario(chain=chain, attack=[]).plan.attacks] == ["mean_image", "random_image", *planned]


def test_what_others_wrote_is_text_not_markup(tmp_path: Path) -> None:
    chosen = scenario(attack=[])
    run = Run.create(tmp_path / "a<i>run", chosen)
    hostile = PlannedAttack("<img src=x onerror=alert(1)>", {"use": "mean_image", "x": HOSTILE})
    plan = AttackPlan((hostile, *chosen.plan.attacks))
    (run.folder / "environment.json").write_text(json.dumps({"packages": {HOSTILE: HOSTILE}, "cuda": None}))
    with run.ledger() as ledger:
        ledger.add_attacks(plan, {p.name: f"honest; {HOSTILE}" for p in plan.attacks})
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
@pytest.mark.parametrize("state", ["complete", "empty"])
def test_a_browser_draws_it_without_a_complaint(attacked: Run, tmp_path: Path, state: str) -> None:
    run = attacked if state == "complete" else Run.create(tmp_path / "empty", scenario())
    assert BROWSER is not None
    quiet = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path}/profile",
    ]
    command = [BROWSER, *quiet, "--virtual-time-budget=5000", "--dump-dom", write_report(run).resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    lines = done.stdout.count('class="js-line"')
    assert lines > 10 if state == "complete" else lines == 0


# ----------------------------------------------------------------------------------------------------- other states


def test_a_run_without_rounds(tmp_path: Path) -> None:
    page = page_of(Run.create(tmp_path / "empty", scenario()))
    assert "before its first round" in page.words
    assert "No round has been recorded yet" in page.words
    assert "no attack was planned" in page.words
    assert page.cards == []
    assert page.data["overview"]["accuracy"] == {"x": [], "y": []}
    assert page.data["overview"]["metrics"] == []


def test_a_run_not_attacked_yet_names_the_command(tmp_path: Path) -> None:
    run = taped(tmp_path / "waiting", scenario())
    page = page_of(run)
    assert f"16 of 16 attacks have not been done yet. Continue with: fedgauge audit {run.folder}" in page.words
    assert "no attack has been done" in page.words
    assert page.data["overview"]["accuracy"]["x"] == [0, 1, 2]
    assert "Not done yet: it runs before the first attack." in page.words


def test_an_interrupted_run_shows_what_there_is(tmp_path: Path) -> None:
    run = taped(tmp_path / "stopped", scenario(rounds=5))
    with run.ledger() as ledger:
        ledger.set_meta(state="interrupted")
    calls = iter(range(100))
    serve(run, LocalExecutor(), stop=lambda: next(calls) >= 3)
    with run.ledger() as ledger:
        progress = ledger.progress()
        assert 0 < progress.done < progress.total
    page = page_of(run)
    assert "The training was interrupted after 2 of 5 rounds" in page.words
    assert f"{progress.queued} of {progress.total} attacks have not been done yet" in page.words
    assert [tile for tile in page.tiles("inverting_gradients") if tile["image"]]


def test_a_server_that_was_not_curious(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "blind", scenario(audit={"curious": False}))
    with run.ledger() as ledger:
        ledger.record_round(0, 0.1, 2.3, 0.0, 0.0)
        ledger.record_intake(1, [Participation(0, "accepted", "", 2), Participation(1, "missing", "no reply")], None)
        ledger.record_round(1, 0.2, 2.0, 1.0, 0.0)
    page = page_of(run)
    assert "The server was not curious" in page.words
    assert "fedgauge audit" not in page.words, "there is nothing on the tape to audit"
    assert "1 updates accepted, 0 rejected, 1 missing" in page.words


def test_a_failed_attack_is_told_with_its_error(tmp_path: Path) -> None:
    run = taped(tmp_path / "damaged", scenario())
    damaged = sorted((run.folder / "tape").glob("round-00002-client-*"))[0]
    damaged.write_bytes(damaged.read_bytes()[:100])
    serve(run, LocalExecutor())
    page = page_of(run)
    with run.ledger() as ledger:
        assert ledger.progress().failed > 0
        assert all(" ".join(error.split()) in page.words for error in ledger.errors())
    assert any(tile["note"] == "failed" for tile in page.tiles("inverting_gradients"))


def test_a_reconstruction_that_is_gone_or_damaged_is_said_to_be(copied: Run) -> None:
    copied.reconstruction(1, 0, "inverting_gradients").unlink()
    copied.reconstruction(2, 1, "inverting_gradients").write_bytes(b"damaged")
    notes = [tile["note"] for tile in page_of(copied).tiles("inverting_gradients") if tile["image"] is None]
    assert len(notes) == 4
    assert all("file missing" in n and " dB" in n for n in notes[:2])
    assert all("file damaged" in n and " dB" in n for n in notes[2:])


def test_a_failed_replay_check_is_told_at_the_top(copied: Run) -> None:
    with copied.ledger() as ledger:
        ledger.set_meta(replay="mismatch", replay_detail="cosine 0.5: the learning rate differs")
    words = page_of(copied).words
    assert words.index("the learning rate differs") < words.index("Accuracy and leakage over rounds")


def test_a_run_that_was_not_attacked_for_its_replay_says_so(tmp_path: Path) -> None:
    run = taped(tmp_path / "differs", scenario())
    with run.ledger() as ledger:
        ledger.set_meta(replay="mismatch", replay_detail="cosine 0.5: the learning rate differs")
    words = page_of(run).words
    assert "16 of 16 attacks wait, because the replay check failed." in words
    assert "the replay check failed, so no attack was run" in words


def test_what_attacks_said_of_themselves_stands_under_the_results(attacked: Run) -> None:
    page = page_of(attacked)
    with attacked.ledger() as ledger:
        (told,) = ledger.reasons()
    assert [row for row in page.rows if row[0] == "analytic" and len(row) == 3] == [["analytic", "4", told["reason"]]]
    start = page.words.index("Reasons that attacks gave")
    assert page.words.index("All rounds together") < start < page.words.index("Private images and their reconstruc")


def test_a_budget_is_told_once_and_in_one_form(tmp_path: Path) -> None:
    attack = {"use": "inverting_gradients", "iterations": 1500, "seconds": 9}
    page = page_of(taped(tmp_path / "long", scenario(attack=[attack]), rounds=1))
    (told,) = [a for a in page.html.split("<script>")[0].split("<article") if "<h3>inverting_gradients</h3>" in a]
    assert told.count("1,500 iterations x 1 restart, at most 9 s a wave") == 1
    assert "1500 iterations" not in page.words
    baselines = page.words.split("Baselines, which do not read")[1].split("wrong_client(ATTACK)")[0]
    assert baselines.count("200 auxiliary images of the same distribution and nothing else") == 2
    assert "labels" not in baselines and "chain" not in baselines


def test_a_chain_without_a_derivative_is_a_warning(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "flat", scenario())
    with run.ledger() as ledger:
        ledger.add_attacks(
            scenario().plan,
            {p.name: f"a; {NO_DERIVATIVE}" for p in scenario().plan.attacks[:1]}
            | {p.name: "a" for p in scenario().plan.attacks[1:]},
        )
    words = page_of(run).words
    assert words.index(f"inverting_gradients: {NO_DERIVATIVE}.") < words.index("Accuracy and leakage over rounds")


@pytest.mark.parametrize(("pixels", "told"), [((3, 32, 32), True), ((1, 28, 28), False)])
def test_a_missing_lpips_is_told_where_it_has_a_meaning(pixels: tuple[int, int, int], told: bool) -> None:
    """Of the two things that the notice depends on."""
    shards = SimpleNamespace(dataset=SimpleNamespace(shape=pixels))
    reading = SimpleNamespace(metrics=["psnr"], scenario=SimpleNamespace(federation=SimpleNamespace(shards=shards)))
    assert [words for words, _ in notices._data(reading)] == ["LPIPS: unavailable (no backbone weights)."] * told  # type: ignore[arg-type]
    reading.metrics.append("lpips_alex")
    assert list(notices._data(reading)) == []  # type: ignore[arg-type]


def test_given_labels_are_not_shown_as_restored(tmp_path: Path) -> None:
    attack = {"use": "inverting_gradients", "iterations": 2, "labels": "given"}
    run = taped(tmp_path / "given", scenario(attack=[attack]), rounds=1)
    serve(run, LocalExecutor())
    page = page_of(run)
    labels = [tile["label"] for tile in page.tiles("inverting_gradients")]
    assert len(labels) == 4
    assert all("given" in label and "✓" not in label for label in labels)
    assert "labels are restored" not in page.words


def test_a_quickstart_is_shown_whole_below_six_megabytes(tmp_path: Path) -> None:
    attacks = [{"use": name, "iterations": 1} for name in ("inverting_gradients", "dlg")]
    data = {"use": "mnist5k", "batch_size": 4}
    chosen = scenario(rounds=10, clients=5, data=data, attack=attacks)  # the fifth client is refused
    run = taped(tmp_path / "quickstart", chosen, rounds=10)
    serve(run, LocalExecutor())
    page = page_of(run)  # after one iteration images are noise, which compresses worst
    assert len(page.cards) == 10 * 4 * 4
    assert "All 160 examples that were attacked" in page.words
    assert write_report(run).stat().st_size < 6_000_000


def test_a_large_gallery_is_a_choice_that_says_so(attacked: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedgauge.simulations.reports.sampling.BYTES", 1)
    page = page_of(attacked)
    assert "A selection: 3 of 4 examples, of 1 of 2 attacked rounds" in page.words
    with attacked.ledger() as ledger:
        rows = [r for r in ledger.scores("psnr") if r["attack"] == "inverting_gradients"]
    worst = max(rows, key=lambda r: r["value"])
    (most,) = [card for card in page.cards if card["why"] == "leaked most"]
    assert [most[key] for key in ("client", "round", "example")] == [
        worst[key] for key in ("client", "round", "example")
    ]


# --------------------------------------------------------------------------------------------------------- the choice

STRENGTHS = st.dictionaries(
    st.integers(1, 60),
    st.dictionaries(
        st.tuples(st.integers(0, 5), st.integers(0, 3)), st.floats(0, 100) | st.just(math.nan), min_size=1, max_size=24
    ),
    min_size=1,
    max_size=20,
)


@given(STRENGTHS, st.integers(1, 60))
def test_the_choice_keeps_to_its_room_and_hides_no_extreme(
    strengths: Mapping[int, Mapping[tuple[int, int], float]], room: int
) -> None:
    chosen = sample_keys(strengths, room)
    assert chosen == sample_keys(strengths, room)
    shown = sum(map(len, chosen.values()))
    if sum(map(len, strengths.values())) <= room:
        assert {r: list(keys) for r, keys in chosen.items()} == {r: list(keys) for r, keys in strengths.items()}
        return
    assert 0 < shown <= max(3, room)
    for round, keys in chosen.items():
        graded = {k: v for k, v in strengths[round].items() if not math.isnan(v)}
        assert set(keys) <= set(strengths[round])
        if graded:
            most = [k for k, why in keys.items() if why == "leaked most"]
            assert graded[most[0]] == max(graded.values())
            least = [k for k, why in keys.items() if why == "leaked least"] or most
            assert graded[least[0]] == min(graded.values())
    everything = [v for keys in strengths.values() for v in keys.values() if not math.isnan(v)]
    if everything:
        assert max(everything) in [v for r in chosen for v in strengths[r].values()]


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_holds_the_pixels(channels: int) -> None:
    x = torch.rand(channels, 5, 7, generator=torch.Generator().manual_seed(0))
    expected = (x * 255).round().byte().permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(pixels(png(x)).reshape(5, 7, channels), expected)
    assert pixels(png(torch.tensor([[[-1.0, 2.0]]]))).tolist() == [[0, 255]]


def test_a_large_picture_is_made_small_by_averaging() -> None:
    x = torch.rand(3, 200, 100, generator=torch.Generator().manual_seed(0))
    small = pixels(png(x, SMALL))
    assert small.shape == (67, 34, 3)  # by three, as 200 / 96 is above 2
    assert int(small[0, 0, 0]) == round(float(x[0, :3, :3].mean()) * 255)


def test_a_comparison_holds_every_run_and_metric(attacked: Run, copied: Run, tmp_path: Path) -> None:
    page = Page(write_comparison([attacked, copied], tmp_path / "c.html").read_text())
    data = {found["metric"]: found for found in page.data}
    assert list(data) == ["psnr", "ssim", "mse", "identified", "label_accuracy"]
    with attacked.ledger() as ledger:
        pooled = {k.attack: k for k in leakage(Scores.read(ledger), "ssim") if k.round is None}
    points = {(p["run"], p["attack"]): p["mean"] for p in data["ssim"]["points"]}
    for name in (attacked.name, copied.name):
        assert points[name, "inverting_gradients"] == pytest.approx(pooled["inverting_gradients"].mean, rel=1e-4)
    assert "default-src 'none'" in page.policy
    assert all(link.startswith(("data:", "#")) for link in page.links)


def test_numbers_in_words() -> None:
    assert [number(v, 1) for v in (None, math.nan, math.inf, -math.inf, 12.345)] == ["–", "–", "∞", "−∞", "12.3"]
