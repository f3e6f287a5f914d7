"""The process that runs the app: `python -m fedgauge.simulations.rehearsal.train RUN PLAN`, with the plan as JSON.

It writes into the run's folder what the tap records, and next to it `observed.json` with the facts of each client's training and
the inputs and labels of each pass.
"""

import inspect
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fedgauge.server.store import run_files
from fedgauge.server.store.run import WEIGHTS, Run
from fedgauge.server.tap import tapped
from fedgauge.server.tap_recorder import AppRecorder
from fedgauge.simulations.rehearsal.flower_app import AppGrid, FlowerApp, blamed, mirror
from fedgauge.simulations.rehearsal.language import save_language
from fedgauge.simulations.rehearsal.observer import Built, Observer, Training, unwrapped
from fedgauge.simulations.run.in_memory import flower

OBSERVED = "observed.json"
FRAMEWORKS = ("sklearn", "xgboost", "catboost", "lightgbm", "tensorflow", "jax", "mlx")


def observe(run: Run, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Run the app, and return what was observed, or the error that kept it from training."""
    folder, sys.dont_write_bytecode = Path.cwd(), True
    mirror(Path(plan["folder"]), folder)
    app = FlowerApp.read(folder, plan["settings"])
    observer = Observer()
    sys.argv = [str(folder)]
    try:
        server, client = app.part(app.server), app.part(app.client)
    except BaseException as error:
        return {"error": f"the app cannot be imported: {blamed(error, folder)}"}
    grid = AppGrid(app, client, plan["clients"], observer)
    recorder = AppRecorder(run, {}, Path(plan["folder"]), ())
    try:
        with flower():
            server(tapped(grid, recorder), Context(1, 0, {}, RecordDict(), dict(app.config)))
        recorder.close()
    except BaseException as error:
        recorder.close("failed")
        return {"error": f"the app ended: {blamed(error, folder)}"}
    if not grid.trained:
        return {"error": (grid.failed or ["the app asked no client to train"])[0]}
    language = save_language([seen for rounds in grid.trained.values() for seen in rounds], run.folder / "language")
    clients: dict[int, list[dict[str, Any]]] = {}
    for node, rounds in grid.trained.items():
        # without messages that ask for statistics or only measure, and rounds that a client skips
        called = [k for k, seen in enumerate(rounds) if seen.network is not None] or range(len(rounds))
        steps = [k for k in called if rounds[k].used] or called
        clients[node] = [
            _facts(rounds[k], f"node-{node}-{k + 1}.npz", language, run.folder / "observed")
            | {"upload": sum(seen.uploads for seen in rounds[:k])}
            for k in steps
        ]
    frameworks = [name for name in FRAMEWORKS if name in sys.modules]
    own = {"failed": grid.failed, "frameworks": frameworks, "language": language, "mods": _mods(client)}
    return {"clients": clients, **own}


def _mods(client: Any) -> list[str]:
    """Return the names of the mods that train messages pass, those of the app and of its functions."""
    functions = getattr(client, "_registered_funcs", {}).items()  # Flower has no public name for them
    calls = [getattr(client, "_call", None), *(call for kind, call in functions if kind.startswith("train"))]
    names: dict[str, None] = {}
    for call in calls:
        while inspect.isfunction(call) and {"_mod", "_ffn"} <= {*call.__code__.co_freevars}:
            around = inspect.getclosurevars(call).nonlocals
            mod, call = around["_mod"], around["_ffn"]
            names[getattr(mod, "__name__", type(mod).__name__)] = None
    return list(names)


def _facts(seen: Training, name: str, language: Mapping[str, Any] | None, folder: Path) -> dict[str, Any]:
    """Return the facts of a training as JSON; inputs and labels in a separate file, sentences padded."""
    network = None if seen.network is None else unwrapped(seen.network)
    kept = ("output", "losses", "scales", "proximal_mu", "normalised", "dp", "notes")
    facts: dict[str, Any] = {key: getattr(seen, key) for key in kept} | {
        "network": None if network is None else type(network).__name__,
        "outside": 0,
        "reconstructs": False,
        "steps": [asdict(step) for step in seen.steps],
        "built": [vars(built) | {"arguments": _given(built)} for built in seen.built],
        "sizes": [len(x) for x in seen.x],
    }
    if network is not None:
        facts["parameters"] = {name: list(p.shape) for name, p in network.named_parameters()}
        trains = {id(p) for p in network.parameters() if p.requires_grad}
        if seen.steps:
            facts["outside"] = len(seen.trained - {id(p) for p in network.parameters()})
            trains &= seen.trained
        facts["frozen"] = [name for name, p in network.named_parameters() if id(p) not in trains]
        if seen.start and language is None:  # of some layers the values may never travel
            folder.mkdir(exist_ok=True, mode=0o700)
            run_files.write(folder / WEIGHTS, save(seen.start))
        norms = {seen.modes[name] for name, m in network.named_modules() if isinstance(m, _BatchNorm)}
        drops = "dropout" in seen.notes and True not in norms and language is None  # which eval mode leaves out
        facts["mode"] = "train" if seen.modes[""] and norms != {False} and not drops else "eval"
    labels = [y for y in seen.y if y is not None]
    if language is not None and seen.x:
        seen.x = [F.pad(x, (0, language["length"] - x.shape[1]), value=language["pad"]) for x in seen.x]
        if language["next_token"]:  # the words themselves are learnt
            labels = [x[:, 0] for x in seen.x]
    if seen.x and _alike(seen.x):
        y = torch.cat(labels) if len(labels) == len(seen.x) and _alike(labels) else torch.zeros(0)
        x = torch.cat(seen.x)
        facts["reconstructs"] = y.numel() == x.numel() and torch.equal(y.flatten(), x.flatten())
        folder.mkdir(exist_ok=True, mode=0o700)
        np.savez(folder / name, x=_array(x), y=_array(y))
        facts["data"] = str(folder / name)
    return facts


def _array(values: Tensor) -> np.ndarray:
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy(force=True)  # NumPy has no bfloat16


def _alike(tensors: list[Tensor]) -> bool:
    return len({(t.shape[1:], t.dtype) for t in tensors if t.dim()}) == 1 and all(t.dim() for t in tensors)


def _given(built: Built) -> dict[str, Any]:
    """Return the arguments of a call that differ from its defaults."""
    call: Any = getattr(sys.modules.get(built.module), built.name, None)
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):  # it has a signature of its own, or its name is another object's
        return built.arguments
    return {k: v for k, v in built.arguments.items() if k not in parameters or v is not parameters[k].default}


def _written(value: object) -> object:
    """Return an object as JSON has it: the fields of settings as a table; None if a scenario cannot have it."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path | torch.device):
        return str(value)
    with suppress(Exception):  # of the app's own classes
        if isinstance(value, Mapping):
            return dict(value)
        if is_dataclass(value) and not isinstance(value, type):
            return {each.name: getattr(value, each.name) for each in fields(value) if _is_told(each, value)}
    return None


def _is_told(each: "Field[Any]", settings: object) -> bool:
    """Check if a field is simple, or has another value than its default; an object that each instance makes has none."""
    value = getattr(settings, each.name)
    simple = isinstance(value, bool | int | float | str | list | tuple)
    return simple or (value is not each.default and each.default_factory is MISSING)


if __name__ == "__main__":
    opened = Run.open(Path(sys.argv[1]))
    found = observe(opened, json.loads(sys.argv[2]))
    run_files.write(opened.folder / OBSERVED, json.dumps(found, default=_written).encode())
