"""Three Flower apps as their authors wrote them, each with two lines of fedgauge's: trained, audited, shown and graded."""

import importlib
import re
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import FedAvg
from torch.nn import functional as F

from fedgauge.client.components import allowing
from fedgauge.server.store.run import Run
from fedgauge.server.store.tape_source import TapeSource, UploadMismatch
from fedgauge.server.tap import tap
from fedgauge.server.views import overview
from fedgauge.server.views.gallery import Gallery
from fedgauge.server.views.snapshot import RunSnapshot
from fedgauge.server.views.tables import in_json
from fedgauge.simulations.cli.main import main

APPS = Path(__file__).resolve().parents[2] / "foreign"
CLIENTS = 3


@dataclass(frozen=True)
class ForeignApp:
    """An app, its own settings, and what an auditor takes its clients to do."""

    name: str
    model: str
    config: dict[str, Any]
    side: int = 8
    colours: int = 1
    mean: float = 0.0
    std: float = 1.0
    mode: str = "eval"
    chain: dict[str, Any] = field(default_factory=lambda: {"use": "local_sgd", "rate": 0.1})

    def pictures(self) -> tuple[np.ndarray, np.ndarray]:
        """All digits as the app feeds them, (N, C, H, W) uint8."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        x = F.interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, scale_factor=self.side // 8)
        x = x.expand(-1, self.colours, -1, -1)
        return (x * 255).round().byte().numpy(), digits.target

    def write_audit(self, folder: Path) -> Path:
        x, y = self.pictures()
        np.savez(folder / "public.npz", x=x[900:], y=y[900:])
        statistics = {"mean": [self.mean] * self.colours, "std": [self.std] * self.colours, "layout": "NCHW"}
        public = {"use": "npz", "path": str(folder / "public.npz"), **statistics}
        tables = {
            "rounds": 9,  # the app trains fewer: what it does decides
            "clients": CLIENTS,
            "data": {**public, "batch_size": self.config["examples"], "auxiliary": 100},
            "model": {"use": self.model, "mode": self.mode},
            "chain": [self.chain],
            "attack": [{"use": "inverting_gradients", "iterations": 3}],
            "audit": {"executor": "local"},
        }
        (folder / "audit.toml").write_text(tomli_w.dumps(tables))
        return folder / "audit.toml"

    def rows_of(self, partition: int) -> list[int]:
        """The digits that a partition trains on."""
        n = self.config["examples"]
        if self.name == "ragged_adam":
            return list(range(partition * n, (partition + 1) * n))
        return list(range(partition, 1797, CLIENTS))[:n]


QUICKSTART = ForeignApp(
    "torch_quickstart",
    "torch_quickstart.task:Net",
    {"num-server-rounds": 2, "local-epochs": 2, "learning-rate": 0.05, "batch-size": 2, "examples": 2, "fraction-train": 1.0},
    side=32, colours=3, mean=0.5, std=0.5, chain={"use": "local_sgd", "rate": 0.05, "steps": 2},
)  # fmt: skip
HALF = ForeignApp(
    "half_batchnorm",
    "half_batchnorm.task:ConvNet",
    {"num-server-rounds": 2, "learning-rate": 0.1, "batch-size": 4, "examples": 4},
    mode="train",
)
ADAM = ForeignApp(
    "ragged_adam",
    "ragged_adam.task:build_model",
    {"num-server-rounds": 2, "batch-size": 2, "examples": 5},
    chain={"use": "local_training", "optimizer": "adam", "rate": 0.001, "batch_size": 2, "shuffle": True},
)


@pytest.fixture(
    params=[
        pytest.param(app, id=app.name, marks=[pytest.mark.full] * (app is QUICKSTART))
        for app in (QUICKSTART, HALF, ADAM)
    ]
)
def app(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForeignApp]:
    chosen: ForeignApp = request.param
    monkeypatch.syspath_prepend(str(APPS))
    monkeypatch.setenv("FEDGAUGE_ALLOW", chosen.name)
    monkeypatch.chdir(APPS)
    with allowing([chosen.name], [APPS]):
        yield chosen
    for name in [n for n in sys.modules if n.split(".")[0] == chosen.name]:
        del sys.modules[name]


def train(kit: Any, app: ForeignApp, folder: Path, **config: Any) -> tuple[Run, Any]:
    """The app's own ServerApp and ClientApp over Flower's messages; the run that it left, and the nodes."""
    parts = {kind: importlib.import_module(f"{app.name}.{kind}_app").app for kind in ("client", "server")}
    grid = kit.MemoryGrid("", CLIENTS, app=parts["client"])
    settings = {**app.config, "audit": str(app.write_audit(folder)), "record-to": str(folder / "theirs"), **config}
    for context in grid.contexts.values():
        context.run_config = settings
    torch.manual_seed(0)
    parts["server"](grid, Context(1, 1, {}, RecordDict(), settings))
    run = Run.open(folder / "theirs")
    while run.at_work("training"):  # the recorder ends in a thread of its own
        time.sleep(0.01)
    return run, grid


def grid_clients(run: Run) -> dict[str, int]:
    """Clients by Flower's node ids, as the run has noted them."""
    with run.ledger() as ledger:
        return {node: client for client, node in ledger.nodes().items()}


def node_table(run: Run) -> str:
    """The report's section on who took part."""
    return (run.folder / "report.html").read_text().partition("<h2>Participation</h2>")[2].partition("<h2>")[0]


def write_truth(app: ForeignApp, grid: Any, folder: Path) -> Path:
    """What each client trained on, as a tester writes it down: by Flower's node id."""
    x, y = app.pictures()
    folder.mkdir()
    for node, partition in grid.nodes.items():
        rows = app.rows_of(partition)
        np.savez(folder / f"node-{node}.npz", x=x[rows], y=y[rows])
    return folder


def test_an_app_is_trained_audited_shown_and_graded(
    kit: Any, app: ForeignApp, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, grid = train(kit, app, tmp_path)
    with run.ledger() as ledger:
        rounds, seen, meta = ledger.rounds(), ledger.observations(), ledger.meta()
    assert (meta["state"], meta["rounds"]) == ("trained", "2")
    assert [row["round"] for row in rounds if row["round"]] == [1, 2], "as many as the app trained"
    assert all(row["seconds"] > 0 for row in rounds)
    assert [(o["round"], o["client"], o["status"]) for o in seen] == [
        (r, c, "accepted") for r in (1, 2) for c in range(3)
    ]
    assert (rounds[-1]["accuracy"] is None) == (app.name == "half_batchnorm"), "which evaluates nothing"

    assert main(["audit", str(run.folder)]) == 0
    told = capsys.readouterr().out
    assert re.search(r"2 +[\d.\u00a0%–]* *inverting_gradients +3 *\n", told), told
    assert "--truth" in told and "not applicable" not in told
    (node,) = [node for node, client in grid_clients(run).items() if client == 0]
    assert node in node_table(run)
    report = (run.folder / "report.html").read_text()
    for lie in (
        "no attack has been done",
        "before its first round",
        "Nothing has been reconstructed",
        "has given a score",
    ):
        assert lie not in told + report.partition("<script>")[0]
    assert "without a grade" in report
    with closing(RunSnapshot(run)) as reading, reading.now():
        assert reading.state == "complete"
        shown, page = in_json(Gallery(reading).page()), overview.Overview(reading)
    assert page.progress.rounds == page.progress.round == 2
    assert page.word == "undetermined" and "compared" in page.sentences[0]
    assert shown["total"] == 2 * 3 * app.config["examples"]
    assert all(tile["image"] and tile["note"] == "not graded" for card in shown["cards"] for tile in card["tiles"])

    taped = {p: p.stat().st_mtime_ns for p in (run.folder / "tape").iterdir()}
    with run.ledger() as ledger:
        cards = {row["name"]: row["knowledge"] for row in ledger.attacks()}
    truth = write_truth(app, grid, tmp_path / "truth")
    assert main(["audit", str(run.folder), "--truth", str(truth)]) == 0
    told = capsys.readouterr().out
    assert "graded 24 of 24" in told and "baseline PSNR" in told
    with run.ledger() as ledger:
        before, cards = cards, {row["name"]: row["knowledge"] for row in ledger.attacks()}
    told_of_grading = "; graded against the given examples"
    assert {name: card.replace(told_of_grading, "") for name, card in cards.items()} == {
        name: card.replace("; not graded", "") for name, card in before.items()
    }, "the rest of a card stays"
    assert all(told_of_grading in card for card in cards.values())
    assert taped == {p: p.stat().st_mtime_ns for p in (run.folder / "tape").iterdir()}
    with closing(RunSnapshot(run)) as reading, reading.now():
        graded = {
            (leak.attack, leak.metric): leak
            for m in reading.metrics
            for leak in reading.leakage(m)
            if leak.round is None
        }
        shown = in_json(Gallery(reading).page())
    n = 2 * 3 * app.config["examples"]
    attacks = (
        "inverting_gradients",
        "mean_image",
        "class_mean_image",
        "random_image",
        "wrong_client(inverting_gradients)",
    )
    assert {name: graded[name, "psnr"].n for name in attacks} == dict.fromkeys(attacks, n)
    assert all(card["truth"] and card["label"] is not None for card in shown["cards"]), "the truth beside the attacks"


# ---------------------------------------------------------------------------------------------- what apps do besides


def mounted(kit: Any, app: ForeignApp) -> tuple[Any, dict[str, torch.Tensor]]:
    """The app's clients in memory, and its first weights."""
    grid = kit.MemoryGrid("", CLIENTS, app=importlib.import_module(f"{app.name}.client_app").app)
    for context in grid.contexts.values():
        context.run_config = app.config
    torch.manual_seed(0)
    return grid, importlib.import_module(f"{app.name}.task").ConvNet().state_dict()


only_half = pytest.mark.parametrize("app", [HALF], indirect=True, ids=["half_batchnorm"])


@only_half
def test_a_reply_with_fewer_arrays_is_recorded_and_its_audit_asks_what_is_frozen(
    kit: Any, app: ForeignApp, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid, state = mounted(kit, app)
    single = {k: t.float() if t.is_floating_point() else t for k, t in state.items()}

    def kept(round: int, replies: list[Message]) -> list[Message]:
        for m in replies:
            m.content["arrays"] = ArrayRecord(
                {k: t for k, t in m.content["arrays"].to_torch_state_dict().items() if "features" not in k}
            )
        return replies

    grid.tamper = kept
    tapped = tap(grid, app.write_audit(tmp_path), tmp_path / "theirs")
    result = FedAvg(fraction_evaluate=0.0).start(tapped, ArrayRecord(single), 1)
    tapped._fedgauge_recorder.close()
    assert set(result.arrays.keys()) == {"classifier.weight", "classifier.bias"}
    run = Run.open(tmp_path / "theirs")
    with run.ledger() as ledger:
        first = ledger.observations()[0]
        assert (first["status"], first["reason"]) == ("accepted", "")
        assert len(run.tape().read(1, first["client"], first["digest"]).update) == 2
        source = TapeSource(run.scenario().federation, run=run, ledger=ledger)
        with pytest.raises(UploadMismatch):
            source.observation(1, first["client"], first["digest"])
    assert main(["audit", str(run.folder)]) == 1
    assert "freeze" in "".join(capsys.readouterr())


@pytest.mark.parametrize("app", [ADAM], indirect=True, ids=["ragged_adam"])
def test_different_batch_sizes_and_inapplicable_attacks_are_reported_once(
    kit: Any, app: ForeignApp, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, grid = train(kit, app, tmp_path, **{"num-server-rounds": 1})
    scenario = run.folder / "scenario.toml"
    tables = tomllib.loads(scenario.read_text())
    tables["data"]["batch_size"] = 4
    tables["attack"].append({"use": "analytic"})
    scenario.write_text(tomli_w.dumps(tables))
    assert main(["audit", str(run.folder), "--log", "quiet"]) == 0
    capsys.readouterr()
    assert main(["audit", str(run.folder)]) == 0
    told = capsys.readouterr().out
    words = "assumes 4 examples a round for each client (batch_size under [data]), but client 0 reports 5"
    assert told.count(words) == 1 and told.count("analytic") == 2, "one row of a table, one reason"
    assert words in (run.folder / "report.html").read_text()
