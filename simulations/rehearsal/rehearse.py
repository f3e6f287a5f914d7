"""`fedgauge app DIR`: run the app in a process of its own, draft its scenario, and prove the draft on an observed update."""

import json
import math
import sys
import time
import tomllib
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from fedgauge.client import components
from fedgauge.client.components import SpecError, users_errors
from fedgauge.client.local_data import read_npz
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch
from fedgauge.server.store import run_files
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.uploads import UploadMismatch, read_observation
from fedgauge.simulations.rehearsal.draft import (
    LIBRARIES,
    Draft,
    Observed,
    Pixels,
    pixels_of,
    truth_of,
    unsuited,
    with_network,
    write_draft,
)
from fedgauge.simulations.rehearsal.flower_app import FlowerApp, Settings
from fedgauge.simulations.rehearsal.train import OBSERVED
from fedgauge.simulations.run.create import prepare_app
from fedgauge.simulations.run.launch import OwnProcess

SLOW = 0.5  # CPU seconds for all attacked updates once; above, only one is attacked: a search computes it hundreds of times
EXACT = 1e-4  # relative error that rounding during training explains
STRANGERS = 3  # clients whose examples stand in for public data, where the app has them
MOST_OBSERVED = 1 << 26  # bytes of observed.json


@dataclass(frozen=True)
class Rehearsal:
    """A recorded app with its drafted scenario.

    Attributes:
        truth: folder with the observed examples of the attacked clients.
        packages: of the app, which the audit must allow.
        proof: how well the draft gives the first observed update.
    """

    run: Run
    draft: Draft
    truth: Path
    packages: tuple[str, ...]
    proof: str


def observe(folder: Path, runs: Path, settings: Settings, clients: int, console: Console) -> tuple[Run, Observed]:
    """Run the app, and return its recording and what was observed.

    Raises:
        SpecError: the app does not run; nothing is left of it then.
    """
    folder = folder.resolve()
    FlowerApp.read(folder, settings)  # refused before a process starts
    run = Run.create(_new_folder(runs, folder.name), "# drafted after the app's training\n")
    plan = {"folder": str(folder), "settings": dict(settings), "clients": clients + STRANGERS}
    try:
        command = ("fedgauge.simulations.rehearsal.train", str(run.folder.absolute()), json.dumps(plan))
        with closing(OwnProcess(run, "app.log", *command, ray=False)) as process, console.status("the app trains"):
            while process.status() is None:
                time.sleep(0.1)
        if process.status() != 0 or run_files.look(run.folder / OBSERVED) is None:
            raise SpecError(process.blame(f"{folder}: the app ended its process"))
        found = json.loads(run_files.read(run.folder / OBSERVED, MOST_OBSERVED))
        if "error" in found:
            raise SpecError(f"{folder}: {found['error']}")
        return run, Observed(**found)
    except BaseException:
        run_files.delete_folder(run.folder)
        raise


def rehearse(run: Run, observed: Observed, folder: Path, clients: int, truth: bool = True) -> Rehearsal:
    """Draft the scenario of an observed app, write the truth of the attacked clients, and compute an update again.

    Args:
        clients: to attack, at most; the examples of all others serve as public data.
        truth: write the observed examples of the attacked clients.
    """
    sys.dont_write_bytecode = True  # the network is built by the app's code, and nothing is written in its folder
    first = next(rounds[0] for rounds in observed.clients.values())
    nodes = observed.nodes
    x, y = _arrays(observed.clients[nodes[0]][0] if nodes else first)
    if (note := unsuited(first, x, y, observed.frameworks)) is not None:
        return Rehearsal(run, Draft(notes=[note]), run.folder, (), "")
    if len(nodes) < 2:
        few = Draft()
        few.note("clients", "one client trained, and none is left to provide public data: raise --clients", True)
        return Rehearsal(run, few, run.folder, (), "")
    attacked = nodes[:-1][:clients]
    public = nodes[len(attacked) :]
    every = [_arrays(facts)[0] for rounds in observed.clients.values() for facts in rounds if "data" in facts]
    pixels = pixels_of([x for x in every if x is not None], first["normalised"])
    files = run.folder.absolute() / "observed"  # the scenario is read from the app's folder
    with run.ledger() as ledger:
        rows = [row for row in ledger.observations() if row["digest"]]
        numbers = {node: client for client, node in ledger.nodes().items()}
    draft = write_draft(observed, attacked, public, pixels, max(row["round"] for row in rows), files)
    draft.add("[audit]", "the attacked clients", clients=sorted(numbers[node] for node in attacked))
    packages = tuple({built["module"].partition(".")[0]: None for built in first["built"]}.keys() - LIBRARIES)
    with components.allowing(packages, [folder.resolve()]), users_errors():
        scenario = with_network(draft, first)
        run_files.write(run.folder / "scenario.toml", draft.text().encode())
        if scenario is None:
            return Rehearsal(run, draft, run.folder, packages, "")
        n = scenario.federation.shards.batch_size
        for node in attacked if truth else ():
            rounds = [row["round"] for row in rows if row["client"] == numbers[node]]
            for round, facts in zip(rounds, observed.clients[node], strict=False):
                _write_truth(run.folder / "truth", node, round, *truth_of(facts, n, pixels))
        proof, seconds = _proof(run, scenario, observed, attacked[0], pixels)
        rounds = sorted({row["round"] for row in rows if row["client"] == numbers[attacked[0]]})
        if seconds * len(attacked) * len(rounds) > SLOW and len(attacked) * len(rounds) > 1:
            _attack_less(draft, numbers[attacked[0]], rounds[0])
            run_files.write(run.folder / "scenario.toml", draft.text().encode())
        return Rehearsal(run, draft, run.folder / "truth", packages, proof)


def _attack_less(draft: Draft, client: int, round: int) -> None:
    """Attack one update instead of all."""
    draft.lines = [line for line in draft.lines if (line.table, line.key) != ("[audit]", "clients")]
    draft.add("[audit]", "updates take long to compute: one is attacked", clients=[client], rounds=[round])
    draft.note(
        "cost",
        f"only client {client}'s update of round {round} is attacked, to save time; for more change rounds and clients of [audit]",
    )


def _proof(run: Run, scenario: Scenario, observed: Observed, node: str, pixels: Pixels) -> tuple[str, float]:
    """Return how well the draft, in the observed order, gives a client's first update, and the CPU seconds it took."""
    facts = observed.clients[node][0]
    tables = tomllib.loads(scenario.to_toml())
    for link in tables["chain"]:
        link.pop("shuffle", None)
    ordered = Scenario.from_tables(tables)
    fed = ordered.federation
    x, y = _arrays(facts)
    assert x is not None and y is not None
    batch = Batch(torch.from_numpy(pixels.of(x)), torch.from_numpy(y))
    with run.ledger() as ledger:
        prepare_app(run, ledger, scenario)
        client = next(c for c, name in ledger.nodes().items() if name == node)
        row = next(o for o in ledger.observations() if o["client"] == client and o["digest"])
        try:
            seen = read_observation(run, ledger, fed, row["round"], client, row["digest"])
        except UploadMismatch as error:
            return str(error), 0.0
        for _ in range(2):  # the first also warms torch up
            fed.load_buffers(seen.buffers)
            started = time.process_time()
            with torch.random.fork_rng(devices=[]):
                update = fed.update_fn()(seen.params, batch, generator("proof"))
            seconds = time.process_time() - started
        fed.load_buffers(seen.buffers)
        wrong = {k: float((update[k] - t).norm()) for k, t in seen.update.items()}
        size, sent = (
            float(torch.cat([t.flatten() for t in part.values()]).norm()) for part in (seen.update, seen.params)
        )
        off = float(np.linalg.norm(list(wrong.values()))) / size if size else math.nan
        where = f"client {client}'s update of round {row['round']}"
        came = run.tape().read(row["round"], client, row["digest"]).update.values()
        step = max((torch.finfo(t.dtype).eps for t in came if t.is_floating_point()), default=0.0)
        if off < EXACT + step * sent / size:  # weights are rounded on their way
            ledger.set_meta(replay="ok", replay_detail=f"{where}: relative error {off:.1e}, from the observed examples")
            exact = f"exact to rounding (relative error {off:.1e})"
            return f"{where}, computed again from the observed examples: {exact}", seconds
        part = max(wrong, key=lambda k: wrong[k])
        return f"{where}, computed again from the observed examples, differs by {off:.1%}, most in {part}", seconds


def _arrays(facts: Mapping[str, Any]) -> tuple[np.ndarray | None, np.ndarray | None]:
    if "data" not in facts:
        return None, None
    arrays = read_npz(Path(facts["data"]))
    return arrays["x"], arrays["y"] if len(arrays["y"]) == len(arrays["x"]) else None


def _write_truth(folder: Path, node: str, round: int, x: torch.Tensor, y: torch.Tensor) -> None:
    folder.mkdir(exist_ok=True, mode=0o700)
    np.savez(folder / f"node-{node}-round-{round}.npz", x=x.numpy(), y=y.numpy())


def _new_folder(runs: Path, name: str) -> Path:
    stem = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-app-{name}"
    return next(f for k in range(1, 10_000) if not (f := runs / (stem if k == 1 else f"{stem}-{k}")).exists())
