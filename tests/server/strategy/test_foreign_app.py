"""Somebody else's Flower app, weights in and weights out, with a tap around the grid of its server."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from flwr.app import Context, RecordDict

from fedgauge.attacks.modality.image_metrics import psnr_of
from fedgauge.client.components import allowing
from fedgauge.server.store.run import Run
from fedgauge.simulations.cli.main import main

APP = Path(__file__).resolve().parents[2] / "foreign"
CONFIG = {"num-server-rounds": 2, "local-epochs": 1, "learning-rate": 0.1, "batch-size": 8, "examples": 64}
CLIENTS = 3


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The app's modules, as Flower would import them from its bundle."""
    monkeypatch.syspath_prepend(str(APP))
    with allowing(["quickstart"]):
        from quickstart import client_app, server_app, task

        parts = {"client": client_app.app, "server": server_app.app, "task": task}
        yield type("App", (), parts)
    for name in [n for n in sys.modules if n.split(".")[0] == "quickstart"]:
        del sys.modules[name]


def write_audit(folder: Path, examples: int = 1, clients: int = CLIENTS) -> Path:
    """What the curious server takes the app's clients to do, in audit.toml beside the run; returns the run's folder."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    np.savez(folder / "public.npz", x=(digits.images[900:] * 15).astype(np.uint8), y=digits.target[900:])
    public = {"use": "npz", "path": str(folder / "public.npz"), "mean": [0.0], "std": [1.0]}
    tables = {
        "rounds": CONFIG["num-server-rounds"],
        "clients": clients,
        "data": {**public, "batch_size": examples, "auxiliary": 100},
        "model": {"use": "quickstart.task:Net"},
        "chain": [{"use": "local_sgd", "rate": CONFIG["learning-rate"]}],
        "attack": [{"use": "analytic"}],
        "audit": {"executor": "local"},
    }
    (folder / "audit.toml").write_text(tomli_w.dumps(tables))
    return folder / "theirs"


def recording(run: Path) -> dict[str, str]:
    """The app's settings by which it is recorded."""
    return {"audit": str(run.parent / "audit.toml"), "record-to": str(run)}


def train(kit: Any, app: Any, **config: Any) -> list[dict[str, torch.Tensor]]:
    """The app's own ServerApp and ClientApp, over Flower's messages; the weights that each round sent."""
    random.seed(0)  # FedAvg samples with the global generator
    grid = kit.MemoryGrid("", CLIENTS, app=app.client)
    for context in grid.contexts.values():
        context.run_config = {**CONFIG, **config}
    app.server(grid, Context(1, 1, {}, RecordDict(), {**CONFIG, "record-to": "", **config}))
    sent = [m for m in grid.sent if m.metadata.message_type == "train"]
    return [dict(m.content.array_records["arrays"].to_torch_state_dict()) for m in sent[::CLIENTS]]


def test_its_clients_digits_are_read_off_their_weights(kit: Any, app: Any, tmp_path: Path) -> None:
    """One example a client and one step: the first layer's gradient holds it, through weights that were rounded."""
    folder = write_audit(tmp_path)
    train(kit, app, **recording(folder), examples=1)
    assert main(["audit", str(folder)]) == 0
    run = Run.open(folder)
    with run.ledger() as ledger:
        assert ledger.progress().failed == 0
        clients = {o["client"] for o in ledger.observations()}
    found = [run.read_reconstruction(1, c, "analytic") for c in clients]
    truth = [app.task.load_data(p, CLIENTS, 1, 1)[0].dataset.tensors for p in range(CLIENTS)]
    best = [max(float(psnr_of(x, f["x"].clamp(0, 1))) for f in found) for x, _ in truth]
    assert min(best) > 60, best
    assert sorted(int(f["y"]) for f in found) == sorted(int(y) for _, y in truth)
