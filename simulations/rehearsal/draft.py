"""Draft the scenario of an observed app: each line with where it comes from, and notes on what it cannot express."""

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomli_w
import torch

from fedgauge.client.components import SpecError
from fedgauge.client.local_data import read_npz
from fedgauge.server.store.run import WEIGHTS
from fedgauge.server.store.scenario import Scenario

OPTIMIZERS = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw"}
SETTINGS = {"sgd": ("momentum", "nesterov"), "adam": ("betas", "eps"), "adamw": ("betas", "eps")}
UNSUPPORTED = ("dampening", "amsgrad", "maximize", "centered", "lr_decay", "alpha")
LIBRARIES = {"torchvision", "timm"}  # whose networks have components of their own
AT_LEAST = 200  # public examples, repeated where the observed ones are fewer: shards want more than they use
BY_HAND = "write the scenario of a text model by hand, docs/text.md says how"
KINDS = {
    "int": f"whole numbers, as token ids: {BY_HAND}",
    "rows": "vectors of numbers: a table's rows are audited with a scenario of their own, docs/tables.md says how",
    "other": "inputs of this form have no attack here yet",
}


class Note(NamedTuple):
    """A limitation or assumption of the draft; fatal: nothing can be attacked without it."""

    code: str
    words: str
    fatal: bool = False


class Line(NamedTuple):
    """One line of the draft, and where it comes from."""

    table: str
    key: str
    value: Any
    origin: str


@dataclass
class Draft:
    """A scenario in the making."""

    lines: list[Line] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def add(self, table: str, origin: str, **values: Any) -> None:
        """Add lines to a table, with their origin."""
        self.lines += [Line(table, key, value, origin) for key, value in values.items()]

    def note(self, code: str, words: str, fatal: bool = False) -> None:
        """Add a note."""
        self.notes.append(Note(code, " ".join(words.split()), fatal))

    @property
    def fatal(self) -> list[Note]:
        """Return the notes that leave nothing to attack."""
        return [note for note in self.notes if note.fatal]

    def text(self) -> str:
        """Return the scenario as TOML, each line with its origin, and the notes above."""
        shown = ["# drafted by fedgauge app from what was observed; check it, then: fedgauge audit RUN --retry all"]
        shown += [f"# {note.code}: {note.words}" for note in self.notes]
        for table in dict.fromkeys(line.table for line in self.lines):
            shown += ["", table] if table and not table.startswith("[[") else [""]
            for line in (line for line in self.lines if line.table == table):
                if table.startswith("[[") and line.key == "use":  # the next table of a list
                    shown += [table] if shown[-1] == "" else ["", table]
                value = tomli_w.dumps({line.key: line.value}).strip()
                shown.append(f"{' '.join(value.split()):42} # {line.origin}")
        return "\n".join(shown) + "\n"


@dataclass(frozen=True)
class Observed:
    """Observations by the app's process: by node, the facts of each round's training."""

    clients: Mapping[str, Sequence[Mapping[str, Any]]]
    failed: Sequence[str] = ()
    frameworks: Sequence[str] = ()

    @property
    def nodes(self) -> list[str]:
        """Return the nodes with inputs and labels, in order."""
        return [node for node, rounds in self.clients.items() if rounds and "data" in rounds[0]]


@dataclass(frozen=True)
class Pixels:
    """Conversion of observed inputs to pixels in [0, 1]: pixel = input * std + mean."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    origin: str

    def of(self, x: np.ndarray) -> np.ndarray:
        """Return pixels in [0, 1] (N, C, H, W)."""
        shape = (1, -1, 1, 1)
        mean, std = np.array(self.mean).reshape(shape), np.array(self.std).reshape(shape)
        return np.asarray((x.astype(np.float64) * std + mean).clip(0, 1), np.float32)


def pixels_of(arrays: Sequence[np.ndarray], normalised: Sequence[Sequence[float]] | None) -> Pixels:
    """Return the normalisation of images: that of the app's Normalize, else the range of all observed values."""
    low, high = min(float(x.min()) for x in arrays), max(float(x.max()) for x in arrays)
    channels = arrays[0].shape[1]
    if normalised is not None:
        mean, std = (tuple(list(v) * channels if len(v) == 1 else v) for v in normalised)
        if len(mean) == channels and min(low * s + m for m, s in zip(mean, std, strict=True)) > -0.01:
            return Pixels(mean, std, "torchvision's Normalize, as the app calls it")
    if low >= 0 and high <= 1:
        return Pixels((0.0,) * channels, (1.0,) * channels, "inputs are in [0, 1]")
    scale = high - low or 1.0
    return Pixels((-low / scale,) * channels, (1 / scale,) * channels, f"inputs are in [{low:.4g}, {high:.4g}]")


def unsuited(
    first: Mapping[str, Any], x: np.ndarray | None, y: np.ndarray | None, frameworks: Sequence[str]
) -> Note | None:
    """Return why no attack fits what was observed, or None."""
    if first["network"] is None:
        seen = f" ({', '.join(frameworks)} is loaded)" if frameworks else ""
        return Note(
            "network",
            f"no torch network was trained in this process{seen}: gradients of other frameworks, trees and trainings in other "
            "processes cannot be inverted here",
            True,
        )
    if not first["steps"]:
        words = (
            f"{first['network']} computed gradients, but no optimizer made a step: let clients step with torch.optim"
        )
        return Note("steps", words, True)
    if "inputs" in first["notes"] or x is None:
        seen = first["notes"].get("inputs", "inputs have different shapes")
        return Note("inputs", f"{seen}: {BY_HAND if 'input_ids' in seen else 'one image tensor is needed'}", True)
    if x.ndim != 4 or not np.issubdtype(x.dtype, np.floating) or x.shape[1] not in (1, 3):
        kind = "int" if np.issubdtype(x.dtype, np.integer) else "rows" if x.ndim == 2 else "other"
        return Note("inputs", f"the network takes {x.dtype} of shape {x.shape[1:]}: {KINDS[kind]}", True)
    if y is None or y.ndim != 1 or not np.issubdtype(y.dtype, np.integer) or y.min(initial=0) < 0:
        form = "no labels were seen" if y is None else f"labels are {y.dtype} of shape {y.shape[1:]}"
        return Note("labels", f"{form}: attacks here need one class for each example", True)
    if len(first["output"]) != 2:
        return Note("output", f"the network returns {tuple(first['output'])}, not one logit for each class", True)
    return None


def write_draft(
    observed: Observed, attacked: Sequence[str], public: Sequence[str], pixels: Pixels, rounds: int, files: Path
) -> Draft:
    """Draft everything but the network.

    Args:
        attacked: the attacked nodes.
        public: the nodes with examples that serve as public data.
        files: folder for the public examples.
    """
    draft, first = Draft(), observed.clients[attacked[0]][0]
    n, epochs, reordered = _examples(observed.clients[attacked[0]])
    draft.add("", "as recorded", rounds=rounds, clients=len(observed.clients))
    _data(draft, [observed.clients[node][0] for node in public], n, pixels, files, len(observed.clients))
    draft.add("[data]", f"examples of client {int(attacked[0]) - 1} in a round", batch_size=n)
    draft.add("[data]", pixels.origin, mean=list(pixels.mean), std=list(pixels.std))
    draft.add("[data]", "outputs of the network", classes=first["output"][1])
    draft.add("[model]", "the network's mode in training", mode=first["mode"])
    _loss(draft, first["losses"])
    if first["frozen"]:
        draft.add("[[chain]]", "parameters that no optimizer updates", use="freeze", layers=first["frozen"])
        draft.add("[model]", "values of frozen parameters", weights=str(files.parent / WEIGHTS))
    if (dp := first["dp"]) is not None:
        settings = {key: dp[key] for key in ("max_norm", "noise_multiplier")}
        draft.add("[[chain]]", "Opacus' optimizer", use="dp_sgd", **settings)
        draft.note("noise", "clients add noise, so the first update is not computed again")
    _training(draft, first, n, epochs, reordered)
    draft.add("[audit]", "attacks that fit, in minutes", effort="quick", executor="local")
    for rounds_of in observed.clients.values():
        for facts in rounds_of:
            for code, words in facts["notes"].items():
                if code not in {note.code for note in draft.notes}:
                    draft.note(code, words)
    return draft


def _examples(rounds: Sequence[Mapping[str, Any]]) -> tuple[int, int, bool]:
    """Return a client's examples of a round, the passes over them, and whether their order changes."""
    orders = [[row.tobytes() for row in read_npz(Path(facts["data"]))["x"]] for facts in rounds]
    total, unique = len(orders[0]), len(set(orders[0]))
    epochs = total // unique if total % unique == 0 else 1
    n = total // epochs
    parts = [order[i : i + n] for order in orders for i in range(0, len(order), n)]
    if any(set(part) != set(parts[0]) for part in parts[:epochs]):
        n, epochs = total, 1  # repeats are not epochs
    reordered = any(part != parts[0] and set(part) == set(parts[0]) for part in parts)
    return n, epochs, reordered


def _data(draft: Draft, public: Sequence[Mapping[str, Any]], n: int, pixels: Pixels, files: Path, clients: int) -> None:
    """Write the public examples, repeated as often as the shards need, and name them."""
    arrays = [read_npz(Path(facts["data"])) for facts in public]
    x = np.concatenate([np.round(255 * pixels.of(each["x"])).astype(np.uint8) for each in arrays])
    y = np.concatenate([each["y"] for each in arrays])
    kept = np.unique(x.reshape(len(x), -1), axis=0, return_index=True)[1]
    x, y = x[np.sort(kept)], y[np.sort(kept)]
    auxiliary = max(AT_LEAST, len(x))
    copies = math.ceil((auxiliary + clients * n) / len(x))
    path = files / "public.npz"
    np.savez(path, x=np.tile(x, (copies, 1, 1, 1)), y=np.tile(y, copies), x_test=x, y_test=y)
    draft.add(
        "[data]", f"examples of {len(public)} clients that are not attacked serve as public data",
        use="npz", path=str(path), auxiliary=len(x) * copies - clients * n,
    )  # fmt: skip


def _loss(draft: Draft, losses: Mapping[str, Mapping[str, Any]]) -> None:
    """Name the loss, or say what is assumed in its place."""
    options = {**losses.get("nll_loss", {}), **losses.get("cross_entropy", {})}
    if not losses.keys() & {"cross_entropy", "nll_loss"}:
        seen = ", ".join(losses) or "none of torch's losses"
        draft.note("loss", f"clients minimise {seen}; name a loss of (logits, labels) as [loss] use", True)
        return
    if len(losses) > 1:
        draft.note(
            "loss", f"clients also compute {', '.join(k for k in losses if k not in ('cross_entropy', 'nll_loss'))}"
        )
    if options.get("weight") is not None:
        draft.note("loss", "classes are weighted; the draft takes equal weights, which are the same for one example")
    if options.get("reduction", "mean") != "mean":
        draft.note("loss", f"the loss is a {options['reduction']}; the draft takes the mean")
    if smoothing := options.get("label_smoothing"):
        draft.add("[loss]", "cross_entropy's arguments", use="cross_entropy", label_smoothing=smoothing)


def _training(draft: Draft, first: Mapping[str, Any], n: int, epochs: int, reordered: bool) -> None:
    """Name the optimizer, its settings and steps."""
    steps, sizes = first["steps"], first["sizes"]
    group = steps[0]["groups"][0]
    name = OPTIMIZERS.get(steps[0]["optimizer"])
    if name is None:
        draft.note("optimizer", f"{steps[0]['optimizer']} is taken for plain SGD")
        name = "sgd"
    if len({json.dumps([g.get("lr"), g.get("weight_decay"), g.get("momentum")]) for g in steps[0]["groups"]}) > 1:
        draft.note("groups", "parameter groups have different settings; the draft takes those of the first")
    if odd := [key for key in UNSUPPORTED if group.get(key)]:
        draft.note("optimizer", f"{steps[0]['optimizer']} has {', '.join(odd)}, which the draft leaves out")
    values: dict[str, Any] = {"use": "local_training", "rate": float(group["lr"])}
    if name != "sgd":
        values["optimizer"] = name
    defaults = {"momentum": 0, "nesterov": False, "betas": [0.9, 0.999], "eps": 1e-8}
    values |= {k: group[k] for k in SETTINGS[name] if k in group and group[k] != defaults[k]}
    if group.get("weight_decay"):
        values["weight_decay"] = float(group["weight_decay"])
    accumulate = steps[0]["passes"]
    if accumulate > 1:
        values["accumulate"] = accumulate
    if max(sizes) < n:
        values["batch_size"] = max(sizes)
        if reordered or epochs > 1:
            values["shuffle"] = reordered
    whole = len(sizes) == epochs * math.ceil(n / max(sizes)) and len(steps) == epochs * math.ceil(
        math.ceil(n / max(sizes)) / accumulate
    )
    values |= {"epochs": epochs} if whole else {"steps": len(steps)}
    if steps[0]["max_norm"] is not None:
        values["max_norm"] = steps[0]["max_norm"]
    values |= _schedule(draft, [step["groups"][0]["lr"] for step in steps])
    draft.add("[[chain]]", f"{steps[0]['optimizer']}, {len(steps)} steps of {max(sizes)} examples", **values)


def _schedule(draft: Draft, rates: Sequence[float]) -> dict[str, Any]:
    """Return the schedule of the rate over a round's steps."""
    if all(math.isclose(rate, rates[0]) for rate in rates):
        return {}
    cosine = [rates[0] * (1 + math.cos(math.pi * k / len(rates))) / 2 for k in range(len(rates))]
    if np.allclose(rates, cosine, rtol=1e-4):
        return {"schedule": "cosine"}
    size = next(k for k, rate in enumerate(rates) if not math.isclose(rate, rates[0]))
    gamma = rates[size] / rates[0]
    if np.allclose(rates, [rates[0] * gamma ** (k // size) for k in range(len(rates))], rtol=1e-4):
        return {"schedule": "step", "step_size": size, "gamma": gamma}
    draft.note("schedule", f"the rate goes from {rates[0]:.3g} to {rates[-1]:.3g}; the draft takes the first")
    return {}


def with_network(draft: Draft, first: Mapping[str, Any]) -> Scenario | None:
    """Add the call that builds the observed network; None, with a note, if none of those seen can be repeated."""
    reasons = []
    for built in first["built"]:
        arguments = {k: v for k, v in built["arguments"].items() if _in_toml(v)}
        trial = Draft([*draft.lines])
        library, call = built["module"].partition(".")[0], f"{built['module']}:{built['name']}"
        name = {"torchvision": built["name"], "timm": arguments.get("model_name")}.get(library)
        network = {"use": call, **arguments} if name is None else {"use": library, "name": name}
        trial.add("[model]", f"the app calls {call}", **network)
        try:
            scenario = Scenario.from_tables(tomllib.loads(trial.text()))
        except SpecError as error:
            reasons.append(str(error))
            continue
        shapes = {name: list(p.shape) for name, p in scenario.federation.model.named_parameters()}
        if shapes == first["parameters"]:
            draft.lines = trial.lines
            return scenario
        reasons.append(f"{call} builds another network")
    why = f" ({reasons[0]})" if reasons else ""
    draft.note(
        "network",
        f"{first['network']} cannot be built again{why}: let a function of the app without arguments return it",
        True,
    )
    return None


def _in_toml(value: object) -> bool:
    return isinstance(value, bool | int | float | str) or (isinstance(value, list) and all(map(_in_toml, value)))


def truth_of(facts: Mapping[str, Any], n: int, pixels: Pixels) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a round's examples of a client as pixels in [0, 1], and their labels: those of the first epoch."""
    arrays = read_npz(Path(facts["data"]))
    return torch.from_numpy(pixels.of(arrays["x"][:n])), torch.from_numpy(arrays["y"][:n])
