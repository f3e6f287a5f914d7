"""The page's server: its numbers are the ledger's, it opens nothing outside its folder, and it never stands in a writer's way."""

import asyncio
import base64
import io
import itertools
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from starlette.applications import Starlette

import fedgauge.server.views.gallery
from fedgauge.attacks.grading.scores import ScoreRecord
from fedgauge.attacks.plan import AttackPlan, PlannedAttack
from fedgauge.defenses.accounting import spent
from fedgauge.server.dashboard import DRAWING, STATIC
from fedgauge.server.dashboard.events import EventStream
from fedgauge.server.dashboard.runs import RunCatalog
from fedgauge.server.dashboard.web import make_app
from fedgauge.server.store.ledger_rows import Participation
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.clients import clients
from fedgauge.server.views.compare import compare, differences
from fedgauge.server.views.leakage import leakage
from fedgauge.server.views.overview import progress
from fedgauge.server.views.reading import Reading
from fedgauge.server.views.scores import Scores
from fedgauge.server.views.verdict import verdict
from fedgauge.simulations.cli.main import main

Get = Callable[..., Any]


@pytest.fixture
def folder(attacked_run: Run, tmp_path: Path) -> Path:
    """A folder with one complete run, to be added to and damaged."""
    shutil.copytree(attacked_run.folder, tmp_path / "runs" / "complete")
    return tmp_path / "runs"


@pytest.fixture
def get(folder: Path) -> Iterator[Get]:
    """Asks the page's server over the folder."""
    with Http(make_app(folder), base_url="http://localhost") as http:

        def ask(address: str, status: int = 200) -> Any:
            answer = http.get(address, follow_redirects=False)
            assert answer.status_code == status, answer.text
            return answer.json(parse_constant=no_json) if "json" in answer.headers["content-type"] else answer.text

        yield ask


class Http:
    """A browser without a network: it keeps cookies, and sees every answer of the app."""

    def __init__(self, app: Starlette, base_url: str) -> None:
        self.app, self.base_url, self.cookies = app, base_url, httpx.Cookies()

    def __enter__(self) -> "Http":
        return self

    def __exit__(self, *_: object) -> None:
        self.app.state.event_stream.stop()

    def get(self, address: str, **options: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url=self.base_url, cookies=self.cookies) as client:
                answer = await client.get(address, **options)
                self.cookies = client.cookies
                return answer

        return asyncio.run(ask())


def no_json(token: str) -> None:
    raise AssertionError(f"{token} is no JSON")


def pixels(source: str) -> np.ndarray:
    kind, data = source.split(",", 1)
    assert kind == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


# ------------------------------------------------------------------------------------------------------------ numbers


def test_the_overview_is_what_the_ledger_says(get: Get, attacked_run: Run) -> None:
    page = get("/api/runs/complete/overview")
    with attacked_run.ledger() as ledger:
        scores = Scores.read(ledger)
        told = {m: leakage(scores, m) for m in ("psnr", "ssim", "identified")}
        assert page["verdict"]["sentence"] == verdict(scores, ledger).sentence
    shown = {m["name"]: {s["name"]: s for s in m["series"]} for m in page["metrics"]}
    for metric, leaks in told.items():
        for leak in leaks:
            if leak.round is not None and leak.mean is not None:
                series = shown[metric][leak.attack]
                assert series["mean"][series["x"].index(leak.round)] == pytest.approx(leak.mean, rel=1e-4)
    assert page["accuracy"] == {"x": [0, 1, 2], "y": [0.1, 0.2, 0.3]}
    assert page["progress"] | {"done": 16} == page["progress"], "two rounds, two clients, two attacks, two baselines"
    assert page["participation"]["rejected"] == 2
    assert {row["attack"]: row["n"] for row in page["summary"]}["inverting_gradients"] == 8


def test_a_run_of_the_predecessor_is_listed_with_the_reason_and_hides_no_other(
    get: Get, folder: Path, write_former_run: Callable[[Path], Path]
) -> None:
    write_former_run(folder / "former")
    runs = {run["id"]: run for run in get("/api/runs")["runs"]}
    assert "error" not in runs["complete"]
    assert "is a run of fedleak" in runs["former"]["error"]
    assert "fedleak" in get("/api/runs/former/overview", 503)["error"]
    assert get("/api/runs/complete/overview")["name"] == "complete"


def test_no_end_is_foretold_while_the_attacks_wait_for_rounds(attacked_run: Run, tmp_path: Path) -> None:
    shutil.copytree(attacked_run.folder, tmp_path / "run")
    run = Run.open(tmp_path / "run")
    with run.lock("training"), closing(Reading(run)) as reading:
        with reading.now():
            found = progress(reading)
            assert found["per_minute"] is not None and (found["queued"], found["leased"]) == (0, 0)
            assert found["seconds_left"] is None
        with run.ledger() as ledger:  # a round's jobs have come
            plan = reading.scenario.plan
            ledger.record_intake(3, [Participation(0, "accepted", "", 2, "digest")], plan)
        with reading.now():
            assert progress(reading)["seconds_left"] is not None


def test_every_gallery_card_is_the_truth_beside_the_reconstruction(get: Get, attacked_run: Run) -> None:
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
        assert card["tiles"][1] | {"image": None, "psnr": None, "note": "not_applicable"} == card["tiles"][1]
    strengths = [card["tiles"][0]["psnr"] for card in page["cards"]]
    assert strengths == sorted(strengths, reverse=True), "the worst leak first"


def test_filters_and_pages_show_each_example_once(get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {(c["round"], c["client"], c["example"]): c for c in get("/api/runs/complete/gallery?round=all")["cards"]}
    monkeypatch.setattr(fedgauge.server.views.gallery, "PAGE", (3, 3))
    seen = [get(f"/api/runs/complete/gallery?round=all&sort=client&offset={o}")["cards"] for o in (0, 3, 6)]
    order = [(c["client"], c["round"], c["example"]) for c in itertools.chain(*seen)]
    assert order == sorted((c, r, e) for r, c, e in whole)
    by_label = [get(f"/api/runs/complete/gallery?round=all&label={y}")["total"] for y in range(10)]
    assert by_label == [sum(card["label"] == y for card in whole.values()) for y in range(10)]
    one = get("/api/runs/complete/gallery?round=2&client=1")
    assert {(c["round"], c["client"]) for c in one["cards"]} == {(2, 1)}
    assert get("/api/runs/complete/gallery")["round"] == 2, "the latest where none is asked for"


def test_an_image_is_followed_through_the_rounds(
    make_scenario: Callable[..., Scenario], make_taped: Callable[..., Run], tmp_path: Path
) -> None:
    """A shard of two images in batches of one: each comes back in some of the rounds, and in no other."""
    data = {"use": "mnist5k", "batch_size": 1, "auxiliary": 3992}
    run = make_taped(tmp_path / "runs" / "small", make_scenario(data=data, clients=4, rounds=4), rounds=4)
    score_all(run)
    federation = run.scenario().federation
    with Http(make_app(run.folder), base_url="http://localhost") as http:
        rows = {r: int(federation.shards.rows_at(0, r)[0]) for r in range(1, 5)}
        for image in set(rows.values()):
            page = http.get(f"/api/runs/small/image/{image}?client=0").json()
            own = [r for r, row in rows.items() if row == image]
            assert [c["round"] for c in page["rounds"]] == own
            assert sorted(c["round"] for c in page["others"]) == sorted(set(rows) - set(own))
            assert page["label"] == int(federation.shards.dataset.y[image])
        assert http.get("/api/runs/small/image/1?client=99").status_code == 404


def score_all(run: Run, psnr: float = 20.0) -> None:
    """End every job with a score, without attacking."""
    with run.ledger() as ledger:
        while (lease := ledger.lease()) is not None:
            rows = {
                c: [ScoreRecord(lease.round, c, lease.attack.name, 0, "psnr", psnr + c, "converged", 0.1)]
                for c in lease.clients
            }
            ledger.finish(lease, rows)


def test_a_clients_labels_are_counted(get: Get, attacked_run: Run) -> None:
    page = get("/api/runs/complete/clients/1")
    federation = attacked_run.scenario().federation
    y = torch.cat([federation.batch_at(1, r).y for r in (1, 2)])
    assert page["true"] == torch.bincount(y, minlength=10).tolist()
    kept = [attacked_run.read_reconstruction(r, 1, "inverting_gradients")["y"] for r in (1, 2)]
    assert page["restored"] == [
        {
            "attack": "inverting_gradients",
            "counts": torch.bincount(torch.cat(kept), minlength=10).tolist(),
            "given": False,
        }
    ]
    assert [r["reason"] for r in get("/api/runs/complete/clients/2")["reasons"]] == ["refused"] * 2


def test_the_heat_map_holds_the_worst_case_of_each_cell(get: Get, attacked_run: Run) -> None:
    for metric, worst in (("psnr", max), ("mse", min)):
        page = get(f"/api/runs/complete/clients?metric={metric}")
        with attacked_run.ledger() as ledger:
            rows = [r for r in ledger.scores(metric) if r["attack"] == "inverting_gradients" and r["value"] is not None]
        assert page["clients"] == [0, 1, 2]
        for i, client in enumerate(page["clients"]):
            for j, round in enumerate(page["rounds"]):
                values = [r["value"] for r in rows if (r["client"], r["round"]) == (client, round)]
                assert page["z"][i][j] == (pytest.approx(worst(values), rel=1e-4) if values else None)
        leaks = [row["worst"] for row in page["table"] if row["worst"] is not None]
        assert leaks == sorted(leaks, reverse=metric == "psnr")
        assert page["table"][-1]["client"] == 2, "of whom nothing is known, last"


def test_runs_are_compared_with_the_front_that_none_beats(
    folder: Path, get: Get, make_scenario: Callable[..., Scenario], make_taped: Callable[..., Run]
) -> None:
    """Accuracy and leakage on paper: (.3, 20), (.3, 25), (.2, 10): the second leaks more for the same accuracy."""
    for name, leak, rounds in (("a", 20.0, 2), ("b", 25.0, 2), ("c", 10.0, 1)):
        score_all(make_taped(folder / name, make_scenario(rounds=rounds), rounds=rounds), leak)
    page = get("/api/compare?runs=a,b,c")
    front = {(p["run"], p["attack"]) for p in page["points"] if p["pareto"]}
    assert {run for run, _ in front} == {"a", "c"}
    assert len(front) == 2, "each run stands with its strongest attack"
    assert [(p["run"], p["mean"]) for p in page["points"] if p["strongest"]] == [("a", 20.5), ("b", 25.5), ("c", 10.5)]
    assert page["differences"] == [{"key": "rounds", "values": ["2", "2", "1"]}]
    assert page["matrix"]["columns"] == ["inverting_gradients", "analytic"]
    assert page["matrix"]["mean"][0] == [20.5, 20.5]
    assert page["matrix"]["baseline"] == [20.5, 25.5, 10.5]


def test_epsilon_stands_beside_every_point(
    folder: Path, get: Get, make_scenario: Callable[..., Scenario], make_taped: Callable[..., Run]
) -> None:
    """Of the rounds that the server saw: a refused reply was seen, a missing one was not."""
    local = {"use": "local_sgd", "rate": 0.1}
    dp = {"use": "dp_sgd", "max_norm": 1.0, "noise_multiplier": 2.0}
    chosen = make_scenario(chain=[dp, local], privacy={"delta": 1e-4})
    run = make_taped(folder / "private", chosen)
    score_all(run, 20.0)
    score_all(make_taped(folder / "signed", make_scenario(chain=[local, {"use": "sign"}])), 20.0)
    expected = spent(chosen.federation, {0: 2, 1: 2, 2: 2}, 1e-4)
    told = get("/api/runs/private/overview")["privacy"]
    assert told["epsilon"] == pytest.approx(expected.record, rel=1e-4)
    assert told["client"] == pytest.approx(expected.client, rel=1e-4)
    assert told["delta"] == 1e-4
    assert "for one record replaced" in told["words"]
    assert get("/api/runs/signed/overview")["privacy"] == {
        "epsilon": None,
        "client": None,
        "delta": 1e-5,
        "words": "Differential privacy: sign compression gives no epsilon: it is deterministic.",
    }
    page = get("/api/compare?runs=private,signed")
    points = page["points"]
    assert [run["epsilon"] for run in page["runs"]] == [told["epsilon"], None]
    assert {(p["run"], p["epsilon"]) for p in points} == {("private", told["epsilon"]), ("signed", None)}
    with run.ledger() as ledger:
        ledger.record_intake(
            3, [Participation(0, "missing"), Participation(1, "rejected", "a NaN"), Participation(2, "missing")]
        )
        ledger.record_round(3, 0.4, 2.0, 1.0, 0.01)
    later = spent(chosen.federation, {0: 2, 1: 3, 2: 2}, 1e-4)
    assert later.record > expected.record
    assert get("/api/runs/private/overview")["privacy"]["epsilon"] == pytest.approx(later.record, rel=1e-4)


def test_runs_that_share_a_name_are_told_apart(attacked_run: Run, tmp_path: Path) -> None:
    shutil.copytree(attacked_run.folder, tmp_path / "complete")
    readings = [Reading(attacked_run), Reading(Run(tmp_path / "complete"))]
    for reading in readings:
        with reading.now():
            pass
    page = compare(readings, "psnr")
    assert [run["id"] for run in page["runs"]] == page["matrix"]["rows"] == ["complete", "complete-2"]
    assert sorted({row["run"] for row in page["table"]}) == ["complete", "complete-2"]
    assert len(page["table"]) == len(page["points"])


def test_the_worst_of_all_attacks_counts_an_example_once(
    make_scenario: Callable[..., Scenario], make_taped: Callable[..., Run], tmp_path: Path
) -> None:
    run = make_taped(tmp_path / "two", make_scenario())
    with run.ledger() as ledger:
        while (lease := ledger.lease()) is not None:
            psnr, hit = (30.0, 1.0) if lease.attack.name == "analytic" else (10.0, 0.0)
            values = {"psnr": psnr, "identified": hit, "label_accuracy": hit}
            ledger.finish(
                lease,
                {
                    c: [ScoreRecord(lease.round, c, lease.attack.name, 0, m, v, "", 0.1) for m, v in values.items()]
                    for c in lease.clients
                },
            )
    with closing(Reading(run)) as reading, reading.now():
        (row, *_) = clients(reading, "psnr", None)["table"]
        assert (row["n"], row["mean"], row["identified"]) == (2, 30.0, {"count": 2, "n": 2}), (
            "two rounds, an example each"
        )
        (row, *_) = clients(reading, "psnr", "inverting_gradients")["table"]
        assert (row["n"], row["mean"], row["identified"]) == (2, 10.0, {"count": 0, "n": 2})


def test_differences_name_each_setting_by_its_place() -> None:
    one = {"rounds": 3, "chain": [{"use": "clip", "max_norm": 1.0}, {"use": "sgd"}], "data": {"use": "mnist"}}
    other = {
        "rounds": 3,
        "chain": [{"use": "clip", "max_norm": 2.0}, {"use": "sgd"}],
        "data": {"use": "mnist", "alpha": 1},
    }
    rows, same = differences([one, other])
    assert rows == [{"key": "chain.0.max_norm", "values": ["1.0", "2.0"]}, {"key": "data.alpha", "values": ["–", "1"]}]
    assert same == 4


# ---------------------------------------------------------------------------------------------------------- a live run


def test_what_is_read_in_pieces_is_what_is_read_at_once(
    make_scenario: Callable[..., Scenario], make_taped: Callable[..., Run], tmp_path: Path
) -> None:
    run = make_taped(tmp_path / "live", make_scenario())
    reading = Reading(run)
    with run.ledger() as ledger:
        while (lease := ledger.lease()) is not None:
            rows = {
                c: [ScoreRecord(lease.round, c, lease.attack.name, 0, "psnr", 9.0 + c, "", 0.1)] for c in lease.clients
            }
            with reading.now():
                before = reading.version
                reading.leaks("psnr")
            ledger.finish(lease, rows)
            with reading.now():
                assert reading.version != before
                assert reading.leaks("psnr") == leakage(Scores.read(ledger), "psnr")
    reading.close()


def test_a_change_is_told_to_who_listens(folder: Path) -> None:
    with served(folder) as address, httpx.Client(base_url=address, timeout=20) as http:
        with http.stream("GET", "/api/events?run=complete") as stream:
            lines = stream.iter_lines()
            first = next(line for line in lines if line.startswith("id: "))
            with Run(folder / "complete").ledger() as ledger:
                ledger.record_round(3, 0.5, 1.0, 1.0, 0.0)
            second = next(line for line in lines if line.startswith("id: "))
        assert first != second


def test_a_listener_is_not_told_again_what_it_knows(folder: Path) -> None:
    class Written(EventStream):
        """The next round is written when the version that the listener has was looked up."""

        versions: tuple[str, ...] = ()

        def _version(self, name: str | None) -> str:
            self.versions = (*self.versions, super()._version(name))
            if len(self.versions) == 1:
                with Run(folder / "complete").ledger() as ledger:
                    ledger.record_round(3, 0.6, 1.0, 1.0, 0.0)
            return self.versions[-1]

    async def listen(last: str | None) -> tuple[str, tuple[str, ...]]:
        stream = Written(RunCatalog(folder))
        told = stream.events("complete", last)
        assert (await anext(told)).startswith("retry:")
        event = await anext(told)
        await told.aclose()  # type: ignore[attr-defined]  # it is a generator
        return event, stream.versions

    known = EventStream(RunCatalog(folder))._version("complete")
    event, versions = asyncio.run(listen(known))
    assert versions[0] == known != versions[-1]
    assert event.startswith(f"id: {versions[-1]}\n"), "and not the version that it has"


@pytest.mark.slow
def test_twenty_pages_hinder_no_writer_and_no_page(folder: Path) -> None:
    """Pages stay open and read all the time while a run writes as fast as it can: no row is lost, each page sees the end."""
    plan = AttackPlan((PlannedAttack("dlg", {"use": "dlg"}),), wave=4)
    rounds, clients = 40, 8
    seen, told, errors, listening = [(0, 0)] * 20, [0] * 20, [], threading.Barrier(21, timeout=60)
    with served(folder) as address, Run(folder / "complete").ledger() as ledger:

        def look(i: int) -> None:
            """As the page's script does: listen, and ask again when something has changed."""
            try:
                with httpx.Client(base_url=address, timeout=60) as http:
                    http.get("/run/complete").raise_for_status()
                    with http.stream("GET", "/api/events?run=complete") as stream:
                        for line in stream.iter_lines():
                            if line.startswith("id: "):
                                found = http.get("/api/runs/complete/overview").raise_for_status().json()
                                told[i] += 1
                                if told[i] == 1:
                                    listening.wait()  # all are open before the first row is written
                                seen[i] = (found["training"]["round"], found["progress"]["done"])
                            if seen[i] == (rounds, 16 + (rounds - 2) * clients):
                                return
            except Exception as error:  # reported by the main thread
                errors.append(error)

        pages = [threading.Thread(target=look, args=(i,)) for i in range(20)]
        for page in pages:
            page.start()
        listening.wait()
        ledger.add_attacks(plan, {"dlg": "card"})
        before = sum(1 for _ in ledger.scores())
        for r in range(3, rounds + 1):
            ledger.record_intake(
                r, [Participation(c, "accepted", "", 1, f"digest {r} {c}") for c in range(clients)], plan
            )
            ledger.record_round(r, 0.5, 1.0, 1.0, 0.0)
            while (lease := ledger.lease()) is not None:
                ledger.finish(lease, {c: [ScoreRecord(r, c, "dlg", 0, "psnr", 20.0, "", 0.1)] for c in lease.clients})
        for page in pages:
            page.join(timeout=120)
        assert errors == []
        assert seen == [(rounds, 16 + (rounds - 2) * clients)] * 20
        assert min(told) >= 2, "each saw it come"
        assert sum(1 for _ in ledger.scores()) - before == (rounds - 2) * clients
        with httpx.Client(base_url=address, timeout=60) as http:
            summary = http.get("/api/runs/complete/overview").json()["summary"]
        assert {row["attack"]: row["n"] for row in summary}["dlg"] == (rounds - 2) * clients


class served:
    """The page's server as users start it, in a process of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.command = [
            sys.executable,
            "-m",
            "fedgauge.simulations.cli.main",
            "watch",
            str(folder),
            "--port",
            str(free_port()),
            *options,
        ]

    def __enter__(self) -> str:
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        address = self.process.stdout.readline().strip()
        assert address, self.process.stderr.read() if self.process.stderr else ""
        return address

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port: int = opened.getsockname()[1]
        return port


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("name", ["nope", "..", "%2e%2e", "..%2f..%2fetc", "complete%2f..", ".hidden", "link", "a%00b"])
def test_nothing_outside_the_folder_is_a_run(folder: Path, get: Get, name: str, attacked_run: Run) -> None:
    (folder / "link").symlink_to(attacked_run.folder)
    shutil.copytree(folder / "complete", folder / ".hidden")
    for address in (f"/api/runs/{name}/overview", f"/api/runs/{name}/gallery", f"/run/{name}/gallery"):
        get(address, 404)
    assert [run["id"] for run in get("/api/runs")["runs"]] == ["complete"]


def test_a_reconstruction_behind_a_link_is_not_shown(folder: Path, get: Get, tmp_path: Path) -> None:
    run = Run(folder / "complete")
    path = run.reconstruction(1, 0, "inverting_gradients")
    path.rename(tmp_path / "elsewhere.safetensors")
    path.symlink_to(tmp_path / "elsewhere.safetensors")
    tiles = get("/api/runs/complete/gallery?round=1&client=0")["cards"][0]["tiles"]
    assert tiles[0]["image"] is None
    assert tiles[0]["note"].startswith("file damaged")


def test_a_ledger_cannot_name_a_file_elsewhere(folder: Path, get: Get, tmp_path: Path) -> None:
    """A ledger that somebody sent may call an attack what he likes."""
    with sqlite3.connect(folder / "complete" / "ledger.sqlite") as db:
        db.execute("UPDATE attacks SET name = '/../../../x' WHERE name = 'inverting_gradients'")
        db.execute("UPDATE scores SET attack = '/../../../x' WHERE attack = 'inverting_gradients'")
    found = Run(folder / "complete").reconstruction(1, 0, "/../../../x")
    assert found.resolve().parent != (folder / "complete" / "reconstructions").resolve()
    shutil.copy(Run(folder / "complete").reconstruction(1, 0, "inverting_gradients"), tmp_path / "x.safetensors")
    notes = [t["note"] for c in get("/api/runs/complete/gallery?round=1")["cards"] for t in c["tiles"]]
    assert [n for n in notes if n.startswith("file damaged")] == notes[::2]


@pytest.mark.parametrize(("query", "words"), [
    ("gallery?sort=worst", "sort must be one of leak, hidden, client, got 'worst'"),
    ("gallery?round=one", "round must be a whole number, got 'one'"),
    ("gallery?client=-1", "client must be between 0 and"),
    ("gallery?attack=dlg", "attack must be one of inverting_gradients, analytic, got 'dlg'"),
    ("gallery?colour=red", "unknown parameter 'colour'"),
    ("clients?metric=loss", "metric must be one of psnr, ssim"),
    ("gallery?round=9", "there is no round 9 in this gallery"),
    ("gallery?client=9", "there is no client 9 in this gallery"),
    ("image/3", "client is missing"),
    ("trace?round=1&client=0&example=0", "attack is missing"),
])  # fmt: skip
def test_a_query_that_cannot_be_is_refused_in_words(get: Get, query: str, words: str) -> None:
    assert words in get(f"/api/runs/complete/{query}", 400)["error"]


def test_what_is_not_there_is_said(get: Get) -> None:
    address = "/api/runs/complete/trace?round=1&client=0&example=0&attack=inverting_gradients"
    assert "set trace = 12 in the [[attack]] table" in get(address, 404)["error"]
    assert get("/api/runs/complete/clients/9", 404)["error"] == "there is no client 9 in this run"
    assert "at most 24 runs" in get("/api/compare?runs=" + ",".join(map(str, range(30))), 400)["error"]


def test_damaged_foreign_locked_and_newer_ledgers_are_named(folder: Path, get: Get) -> None:
    for name in ("foreign", "damaged", "newer", "locked"):
        shutil.copytree(folder / "complete", folder / name)
    foreign, damaged, newer, locked = (folder / n / "ledger.sqlite" for n in ("foreign", "damaged", "newer", "locked"))
    foreign.unlink()
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE theirs (x)")
    damaged.write_bytes(b"no database at all, but long enough to look at" * 100)
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version = 99")
    holder = sqlite3.connect(locked)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    told = {name: get(f"/api/runs/{name}/overview", 503)["error"] for name in ("foreign", "damaged", "newer", "locked")}
    assert "not a fedgauge ledger" in told["foreign"]
    assert "file is not a database" in told["damaged"]
    assert "update fedgauge" in told["newer"]
    assert "database is locked" in told["locked"]
    listed = {run["id"]: run.get("error", "") for run in get("/api/runs")["runs"]}
    assert listed == told | {"complete": ""}, "one that cannot be read hides no other"
    holder.close()
    assert get("/api/runs/locked/overview")["state"] == "complete", "and it is read once it can be"


def test_a_run_that_is_replaced_is_read_anew_and_one_that_is_gone_is_gone(folder: Path, get: Get) -> None:
    assert get("/api/runs/complete/overview")["training"]["round"] == 2
    (folder / "complete").rename(folder / "other")
    get("/api/runs/complete/overview", 404)
    shutil.copytree(folder / "other", folder / "complete")
    with Run(folder / "complete").ledger() as ledger:
        ledger.record_round(7, 0.9, 1.0, 1.0, 0.0)
    assert get("/api/runs/complete/overview")["training"]["round"] == 7


def test_a_scenario_that_lacks_a_key_hides_no_other_run(folder: Path, get: Get) -> None:
    shutil.copytree(folder / "complete", folder / "broken")
    (folder / "broken" / "scenario.toml").write_text("seed = 1")
    told = "is no scenario: it lacks rounds, clients, data, model, chain"
    assert told in get("/api/runs/broken/overview", 503)["error"]
    assert [told in run.get("error", "") for run in get("/api/runs")["runs"]] == [False, True]
    with served(folder) as address, httpx.stream("GET", f"{address}api/events", timeout=20) as stream:
        assert next(line for line in stream.iter_lines() if line.startswith("id: "))
    (folder / "complete" / "environment.json").write_text("{")
    assert "environment.json cannot be read" in get("/api/runs/complete/overview")["environment"]


def test_a_run_whose_data_is_not_here_shows_its_numbers(folder: Path, get: Get) -> None:
    scenario = folder / "complete" / "scenario.toml"
    scenario.write_text(scenario.read_text().replace("mnist5k", "gone"))
    page = get("/api/runs/complete/overview")
    assert page["summary"][0]["n"] == 8
    assert any("cannot be shown on this machine" in n["words"] for n in page["notices"])
    card = get("/api/runs/complete/gallery?round=1")["cards"][0]
    assert (card["truth"], card["label"], card["image"]) == (None, None, None)
    assert card["tiles"][0]["image"] is not None


def test_reading_changes_nothing(folder: Path, get: Get) -> None:
    before = (folder / "complete" / "ledger.sqlite").read_bytes()
    for address in ("overview", "gallery?round=all", "clients", "clients/0"):
        get(f"/api/runs/complete/{address}")
    get("/api/compare")
    assert (folder / "complete" / "ledger.sqlite").read_bytes() == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_run_in_a_folder_that_cannot_be_written_is_read(folder: Path, get: Get) -> None:
    (folder / "complete").chmod(0o500)
    try:
        assert get("/api/runs/complete/overview")["training"]["round"] == 2
    finally:
        (folder / "complete").chmod(0o700)


# -------------------------------------------------------------------------------------------------------------- guards


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]:8765"])
def test_this_machine_is_answered_by_each_of_its_names(folder: Path, host: str) -> None:
    with Http(make_app(folder), base_url=f"http://{host}") as http:
        assert http.get("/api/runs").status_code == 200


def test_without_the_token_nothing_is_answered(folder: Path) -> None:
    with Http(make_app(folder, "secret"), base_url="http://server:8765") as http:
        routes = [
            "/",
            "/api/runs",
            "/api/runs/complete/overview",
            "/api/events",
            "/static/page.js",
            "/plotly.js",
            "/healthz",
        ]
        for address in routes:
            answer = http.get(address)
            assert answer.status_code == 401, address
            assert "open the address that `fedgauge watch` printed" in answer.text
        assert http.get("/?token=wrong").status_code == 401
        assert http.get("/api/runs", headers={"Authorization": "Bearer secret"}).status_code == 200
        first = http.get("/run/complete?metric=ssim&token=secret", follow_redirects=False)
        assert (first.status_code, first.headers["location"]) == (303, "/run/complete?metric=ssim")
        assert "httponly" in first.headers["set-cookie"].lower()
        assert http.get("/api/runs").status_code == 200, "the cookie lets in from then on"


def test_a_name_that_leads_here_from_elsewhere_is_refused(folder: Path) -> None:
    with Http(make_app(folder), base_url="http://evil.example") as http:
        assert http.get("/api/runs").status_code == 400


def test_every_answer_forbids_what_the_page_does_not_need(folder: Path) -> None:
    with Http(make_app(folder), base_url="http://localhost") as http:
        for address in ("/", "/api/runs", "/api/runs/nope/overview", "/static/style.css"):
            headers = http.get(address).headers
            assert "default-src 'none'; script-src 'self';" in headers["content-security-policy"]
            assert headers["cache-control"] == "no-store"


def test_the_page_loads_every_script_and_reports_get_those_that_draw(get: Get) -> None:
    loaded = re.findall(r'src="/static/([^"]*)" defer', get("/"))
    assert loaded == [*DRAWING, "views.js", "page.js"]
    assert sorted(loaded) == sorted(path.name for path in STATIC.glob("*.js"))


def test_the_page_itself_is_served_at_every_address_of_a_view(get: Get) -> None:
    page = get("/")
    assert "<script" in page
    for address in (
        "/compare",
        "/run/complete",
        "/run/complete/gallery",
        "/run/complete/clients",
        "/run/complete/image/3",
    ):
        assert get(address) == page


# -------------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize("token", ["a+b c#d&e", "pä;ß", "plain"])
def test_any_token_may_be_chosen(folder: Path, token: str) -> None:
    with served(folder, "--token", token) as address:
        assert httpx.get(address, follow_redirects=True).status_code == 200


def test_showing_a_run_downloads_nothing(
    folder: Path, get: Get, no_local_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("somebody asks the network")

    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", refuse)
    monkeypatch.setattr("torchvision.datasets.mnist.download_and_extract_archive", refuse)
    scenario = folder / "complete" / "scenario.toml"
    scenario.write_text(scenario.read_text().replace("mnist5k", "fashion_mnist"))
    told = [n["words"] for n in get("/api/runs/complete/overview")["notices"]]
    assert any("cannot be shown on this machine" in words for words in told)


def test_an_empty_token_opens_nothing_to_other_hosts(folder: Path) -> None:
    """As `--token "$UNSET"` gives it."""
    with served(folder, "--host", "0.0.0.0", "--token", "") as address:
        assert "?token=" in address and not address.endswith("=")
        port = address.split(":")[2].split("/")[0]
        assert httpx.get(f"http://127.0.0.1:{port}/api/runs").status_code == 401


def test_watch_tells_the_address_and_ends_on_request(folder: Path) -> None:
    with served(folder, "--host", "127.0.0.1", "--token", "abc") as address:
        assert address.endswith("/?token=abc")
        assert httpx.get(address, follow_redirects=False).status_code == 303
        with httpx.stream("GET", address.replace("/?", "/api/events?"), follow_redirects=True) as stream:
            assert stream.status_code == 200, "and an open stream does not hold up the end"


@pytest.mark.parametrize(("options", "words"), [
    (["nowhere"], "nowhere is not a folder: name a run, or the folder in which runs are kept"),
    ([".", "--port", "{taken}"], "choose another --port"),
    ([".", "--port", "99999"], "expected a number from 0 to 65535, got '99999'"),
    ([".", "--host", "203.0.113.1"], "choose another --host"),
])  # fmt: skip
def test_watch_says_what_cannot_be(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        filled = [o.format(taken=taken.getsockname()[1]) for o in options]
        try:
            status: object = main(["watch", *filled])
        except SystemExit as refused:  # by argparse
            status = refused.code
    assert status == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
