"""Draft the scenario of an observed app: each line with its origin, and the problems that it has."""

import json
import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import tomli_w

from fedgauge.attacks.problem import Problem
from fedgauge.client.components import SpecError
from fedgauge.client.data_folder import read_npz
from fedgauge.client.federation import whole_parts
from fedgauge.server.store.run import WEIGHTS
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.rehearsal.examples import Form
from fedgauge.simulations.rehearsal.losses import Target, target_of
from fedgauge.simulations.rehearsal.observer import OF_CLASSES

OPTIMIZERS = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw"}
SETTINGS = {"sgd": ("momentum", "nesterov"), "adam": ("betas", "eps"), "adamw": ("betas", "eps")}
UNSUPPORTED = ("dampening", "amsgrad", "maximize", "centered", "lr_decay", "alpha")
Facts = Mapping[str, Any]  # of one client's training in one round
Steps = Sequence[Mapping[str, Any]]  # of an optimizer
REMEDY = "build the network in the client's training, by a function of the app without arguments"
LIBRARIES = {"torchvision", "timm"}  # whose networks have components of their own
# arguments of their calls that the component gives, or that change no layer
CHOSEN = ("model_name", "num_classes", "in_chans", "weights", "pretrained", "progress")
# a step without torch.optim; its rate is small, so that the fitted one is near already after one try
PLAIN = {"optimizer": "SGD", "groups": [{"lr": 2.0**-10}], "passes": 1, "max_norm": None}


class Refused(Exception):
    """A problem leaves nothing to attack; the draft has it."""


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
    problems: list[Problem] = field(default_factory=list)
    fatal: list[Problem] = field(default_factory=list)  # at most one: it leaves nothing to attack

    def add(self, table: str, origin: str, /, **values: Any) -> None:
        """Add lines to a table, with their origin; they replace earlier ones unless the table is one of a list."""
        if not table.startswith("[["):
            self.lines = [line for line in self.lines if line.table != table or line.key not in values]
        self.lines += [Line(table, key, value, origin) for key, value in values.items()]

    def value(self, table: str, key: str) -> Any:
        """Return a key's value; None if the draft does not have it."""
        return next((line.value for line in self.lines if line[:2] == (table, key)), None)

    def note(self, code: str, why: str, remedy: str = "", where: str = "") -> None:
        """Add a limitation or assumption."""
        self.problems.append(Problem(code, where, why, remedy))

    def refuse(self, code: str, why: str, remedy: str, where: str = "") -> NoReturn:
        """Add a problem that leaves nothing to attack, and raise Refused."""
        self.note(code, why, remedy, where)
        self.fatal.append(self.problems[-1])
        raise Refused(why)

    def scenario(self) -> Scenario:
        """Build the drafted scenario."""
        return Scenario.from_tables(tomllib.loads(self.text()))

    def text(self) -> str:
        """Return the scenario as TOML, each line with its origin, and the problems above."""
        shown = ["# drafted by fedgauge app from what was observed; check it, then: fedgauge audit RUN --retry all"]
        shown += [f"# {problem.code}: {problem}" for problem in self.problems]
        for table in dict.fromkeys(line.table for line in self.lines):
            shown += ["", table] if table and not table.startswith("[[") else [""]
            for line in (line for line in self.lines if line.table == table):
                if table.startswith("[[") and line.key == "use":  # the next table of a list
                    shown += [table] if shown[-1] == "" else ["", table]
                shown.append(f"{_one_line(line.key, line.value):42} # {line.origin}")
        return "\n".join(shown) + "\n"


def _one_line(key: str, value: Any) -> str:
    """Return a key and its value as one line of TOML; a table is written inline, which tomli_w does within lists only."""
    nested = isinstance(value, Mapping | list)
    lines = tomli_w.dumps({key: [[value]] if nested else value}).strip().split("\n")
    text = " ".join(line.strip() for line in lines)
    return text.replace("[ [ ", "", 1).removesuffix(", ], ]") if nested else text


@dataclass(frozen=True)
class Observed:
    """Observations by the app's process: by node, the facts of each round's training."""

    clients: Mapping[str, Sequence[Facts]]
    failed: Sequence[str] = ()
    frameworks: Sequence[str] = ()
    language: Mapping[str, Any] | None = None  # what `save_language` returned
    mods: Sequence[str] = ()  # of the app's clients


def check_attackable(
    draft: Draft, observed: Observed, first: Facts, arrays: Sequence[Mapping[str, np.ndarray]], form: Form | None
) -> tuple[Form, Target | None]:
    """Refuse what no attack fits; return the form and what the loss compares, None if each word is learnt from those before it.

    Args:
        arrays: inputs x and labels y of this training, then of others.
    """
    x, y, network, notes = arrays[0].get("x"), arrays[0].get("y"), first["network"], first["notes"]
    inputs = [each["x"] for each in arrays if "x" in each]
    if network is None and "func" in notes:
        draft.refuse("network", notes["func"], "compute gradients by backward()")
    if network is None and first["steps"]:
        why = "an optimizer of torch made steps, but no module with its parameters was called"
        draft.refuse("network", why, "call the network itself, as net(x), not a method of it or a compiled function")
    if network is None:
        seen = f" ({', '.join(observed.frameworks)} is loaded)" if observed.frameworks else ""
        remedy = "gradients of other frameworks, trees and trainings in other processes cannot be inverted here"
        draft.refuse("network", f"no torch network was trained in this process{seen}", remedy)
    if "unread" in notes:
        draft.refuse("unread", notes["unread"], "record the app by tap, with a scenario of your own")
    if "checkpoint" in notes:
        draft.refuse("checkpoint", "computes layers again in the backward pass", notes["checkpoint"], network)
    if first["outside"] and not (form and form.next_token):
        why = f"is trained with {first['outside']} parameters outside of it"
        if "turns" in notes:
            why = "is one of several networks that are trained by turns, as in a GAN"
        remedy = "attacks need one module that computes the whole forward pass of the trained network: call that module"
        draft.refuse("networks", why, remedy, network)
    if "inputs" in notes or x is None or (form is None and len({each.shape[1:] for each in inputs}) > 1):
        seen = notes.get("inputs", "inputs have different shapes")
        draft.refuse("inputs", seen, "one tensor of images, rows or token ids is needed")
    if not all(np.isfinite(each).all() for each in inputs):
        draft.refuse("inputs", "some inputs are not finite (NaN or infinite)", "fill gaps before the network")
    if form is None:
        words = "token ids are attacked in networks of the package transformers (BERT, GPT-2, Llama and their like)"
        remedy = words if x.ndim <= 2 else "convert inputs to floating point before the network"
        draft.refuse("inputs", f"takes {x.dtype} of shape {x.shape[1:]}", remedy, network)
    if form.language and (kind := (form.language["adapter"] or {}).get("kind")):
        draft.refuse("adapter", f"is adapted by {kind}", "LoRA is attacked here", network)
    if form.next_token:
        return form, None
    if isinstance(target := target_of(first, y), Problem):
        draft.refuse(target.code, target.why, target.remedy, target.where)
    return form, target


def write_draft(
    draft: Draft,
    observed: Observed,
    attacked: Sequence[str],
    public: Sequence[str],
    form: Form,
    target: Target | None,
    files: Path,
    whole: bool,
) -> None:
    """Draft everything but the network.

    Args:
        public: the nodes with examples that serve as public data.
        target: what the loss compares; None: each word is learnt from those before it.
        files: folder for the public examples.
        whole: uploads are weights, so that passes without an optimizer are steps; otherwise their gradients are summed.
    """
    first = observed.clients[attacked[0]][0]
    sizes, x = first["sizes"], arrays_of(first)["x"]
    n, epochs, shuffled = _examples(observed.clients[attacked[0]])
    if first["dp"] is not None and len(set(sizes)) > 1:
        each = max(1, sum(sizes) // len(sizes))
        draft.note("batches", f"Opacus draws batches of {min(sizes)} to {max(sizes)} examples; the draft takes {each}")
        sizes, n, epochs = [each] * len(sizes), each * len(sizes), 1
    elif (different := len(np.unique(x.reshape(len(x), -1), axis=0))) < n:
        draft.note("examples", f"only {different} of a round's {n} inputs differ; each counts as often as it is used")
    draft.add("[data]", form.origin, **form.data)
    of_public = [observed.clients[node][0] for node in public]
    _data(draft, of_public, form, target, files)
    draft.add("[data]", "examples of an attacked client in a round", batch_size=n)
    if target is not None:
        draft.add("[data]", "outputs of the network", classes=target.classes)
    draft.add("[model]", "the network's mode in training", mode=first["mode"])
    _loss(draft, first, target)
    frozen = whole_parts(first["frozen"], first["parameters"])
    frozen = [f"net.{name}" for name in frozen] if form.language else frozen
    if form.language and form.language["adapter"]:
        frozen = []
        draft.add("[[model.adapter]]", "peft's adapter", use="lora", **form.language["adapter"])
    elif frozen:
        draft.add("[[chain]]", "parameters that no optimizer updates", use="freeze", layers=frozen)
        if not form.language:
            draft.add("[model]", "values of frozen parameters", weights=str(files / WEIGHTS))
    if (dp := first["dp"]) is not None:
        draft.add("[[chain]]", "Opacus' optimizer", use="dp_sgd", **dp)
        draft.note("noise", "clients add noise, so the recomputed update differs")
    steps = first["steps"]
    if not steps:
        why = "no optimizer of torch made a step; the draft takes plain SGD, with the first update's rate"
        draft.note("steps", why)
        passes = 1 if whole else len(sizes)
        steps = [PLAIN | {"passes": passes}] * (len(sizes) // passes)
    measured = not form.language and first["steps"] and steps[0]["optimizer"] in OPTIMIZERS
    scale = _scale(draft, first, steps[0]["passes"]) if measured else 1.0
    _training(draft, first, steps, sizes, n, epochs, shuffled, scale)
    if frozen and any(line.key == "weight_decay" for line in draft.lines):
        draft.add("[[chain]]", "nor does weight decay change them", use="freeze", layers=frozen)
    draft.add("[audit]", "attacks that fit, in minutes", effort="quick", executor="local")
    if observed.mods:
        draft.note("mods", f"uploads pass through {', '.join(observed.mods)}, which the draft leaves out")
    if form.language and not form.language["tokenizer"]:
        draft.note("tokenizer", "the app's tokenizer was not found; reports show token ids as words")
    known = {"values"} if form.next_token else set()  # the loss of words reads all but the last output
    for rounds_of in observed.clients.values():
        for facts in rounds_of:
            for code, words in facts["notes"].items():
                if code not in known | {problem.code for problem in draft.problems}:
                    draft.note(code, words)


def _examples(rounds: Sequence[Facts]) -> tuple[int, int, bool]:
    """Return a client's examples of a round, the epochs over them, and whether their order changes.

    An epoch begins with a batch, so that equal examples in a batch are no epochs.
    """
    orders = []
    for facts in rounds:
        rows = ([row.tobytes() for row in array] for array in arrays_of(facts).values())
        orders.append([b"".join(parts) for parts in zip(*rows, strict=True)])
    total, ends = len(orders[0]), {*np.cumsum(rounds[0]["sizes"]).tolist()}
    for epochs in range(len(ends), 0, -1):
        n = total // epochs
        if total % epochs or not ends.issuperset(range(n, total, n)):
            continue
        parts = [order[i : i + n] for order in orders for i in range(0, len(order), n)]
        whole = Counter(parts[0])
        if all(Counter(part) == whole for part in parts[1:epochs]):
            break
    return n, epochs, any(part != parts[0] and Counter(part) == whole for part in parts)


def arrays_of(facts: Facts) -> dict[str, np.ndarray]:
    """Return the inputs x and, if every example has one, the labels y."""
    arrays = read_npz(Path(facts["data"])) if "data" in facts else {}
    return {k: array for k, array in arrays.items() if k == "x" or len(array) == len(arrays["x"])}


def _data(draft: Draft, public: Sequence[Facts], form: Form, target: Target | None, files: Path) -> None:
    arrays = [read_npz(Path(facts["data"])) for facts in public]
    x = np.concatenate([form.stored(each["x"]) for each in arrays])
    y = np.concatenate([each["y"] if target is None else target.labels(each["y"]) for each in arrays])
    kept = np.unique(x.reshape(len(x), -1), axis=0, return_index=True)[1]
    x, y = x[np.sort(kept)], y[np.sort(kept)]
    path = files / "public.npz"
    np.savez(path, x=x, y=y, x_test=x, y_test=y)
    draft.add(
        "[data]", f"examples of {len(public)} clients that are not attacked serve as public data",
        path=str(path), auxiliary=len(x), partition="none",
    )  # fmt: skip


def _loss(draft: Draft, first: Facts, target: Target | None) -> None:
    if target is None:
        draft.add("[loss]", "the network returns logits for each token", use="next_token")
        return
    draft.add("[loss]", f"the loss that clients minimise: {target.name}", **target.loss)
    if others := first["losses"].keys() - {target.name, *OF_CLASSES}:
        remedy = "name a loss of (logits, labels) as [loss] use"
        draft.note("loss", f"clients also compute {', '.join(sorted(others))}, which the draft leaves out", remedy)
    if target.left_out:
        draft.note("loss", f"{target.name} has {', '.join(target.left_out)}, which the draft leaves out")


def _scale(draft: Draft, first: Facts, passes: int) -> float | None:
    """Return what multiplies the mean loss of a step, such as the examples where clients minimise a sum; None if it varies."""
    scales, mu = first["scales"], first["proximal_mu"]
    if not scales:
        return 1.0
    if np.allclose(scales, scales[0], rtol=1e-4):
        if math.isclose(scales[0] * passes, 1, rel_tol=1e-4):
            return 1.0
        if any(options.get("reduction") == "none" for options in first["losses"].values()):
            why = "clients weigh the losses of examples themselves; the draft takes a multiple of their mean"
            draft.note("loss", why, "name a loss of (logits, labels) as [loss] use")
        return float(scales[0] * passes)
    if mu:
        draft.note("loss", "a term is added to the loss; the draft takes FedProx's, with the server's mu")
        return None
    why = "a term is added to the loss, such as a penalty, or batches weigh differently; the draft leaves it out"
    draft.note("loss", why, "name a loss of (logits, labels) as [loss] use")
    return 1.0


def _training(
    draft: Draft, first: Facts, steps: Steps, sizes: list[int], n: int, epochs: int, shuffled: bool, scale: float | None
) -> None:
    """Name the optimizer, its settings and steps.

    Args:
        scale: the multiple of the loss that clients minimise; the settings give equal steps on the loss itself. None: FedProx's
            term is added.
    """
    group, most = steps[0]["groups"][0], max(sizes)
    name = OPTIMIZERS.get(steps[0]["optimizer"])
    if len({json.dumps([g.get("lr"), g.get("weight_decay"), g.get("momentum")]) for g in steps[0]["groups"]}) > 1:
        draft.note("groups", "parameter groups have different settings; the draft takes those of the first")
    if len(kinds := dict.fromkeys(step["optimizer"] for step in steps)) > 1:
        draft.note("optimizer", f"{' and '.join(kinds)} make steps; the draft takes {steps[0]['optimizer']} for all")
    if name is None:
        draft.note("optimizer", f"{steps[0]['optimizer']} is taken for plain SGD")
        name = "sgd"
    elif odd := [key for key in UNSUPPORTED if group.get(key)]:
        draft.note("optimizer", f"{steps[0]['optimizer']} has {', '.join(odd)}, which the draft leaves out")
    values: dict[str, Any] = {"use": "local_training", "rate": float(group["lr"])}
    if scale is None:
        values["proximal_mu"], scale = first["proximal_mu"], 1.0
    if scale != 1:
        draft.note("scale", f"clients minimise {scale:.4g} times the mean loss; the optimizer's settings contain this")
    if name != "sgd":
        values["optimizer"] = name
    defaults = {"momentum": 0, "nesterov": False, "betas": [0.9, 0.999], "eps": 1e-8}
    values |= {k: group[k] for k in SETTINGS[name] if k in group and group[k] != defaults[k]}
    if group.get("weight_decay"):
        values["weight_decay"] = float(group["weight_decay"])
    values |= _schedule(draft, [step["groups"][0]["lr"] for step in steps])
    if scale != 1:
        _rescale(values, scale)
    accumulate = max(1, steps[0]["passes"])
    if accumulate > 1:
        values["accumulate"] = accumulate
    rest = n % most
    if [*sizes] != ([most] * (n // most) + [rest] * (rest > 0)) * epochs:
        draft.note("batches", f"batches have {min(sizes)} to {most} examples; the draft takes {most} and a rest")
    if most < n:
        values["batch_size"] = most
        if shuffled or epochs > 1:
            values["shuffle"] = shuffled
    batches = math.ceil(n / most)
    whole = (len(sizes), len(steps)) == (epochs * batches, epochs * math.ceil(batches / accumulate))
    values |= {"epochs": epochs} if whole else {"steps": len(steps)}
    if steps[0]["max_norm"] is not None:
        values["max_norm"] = steps[0]["max_norm"] / scale
    draft.add("[[chain]]", f"{steps[0]['optimizer']}, {len(steps)} steps of {most} examples", **values)


def _rescale(values: dict[str, Any], scale: float) -> None:
    """Let an optimizer make of the mean loss's gradient what it makes of this multiple."""
    if values.get("optimizer") is None:
        values["rate"] *= scale
    else:
        values["eps"] = values.get("eps", 1e-8) / scale
    if values.get("optimizer") != "adamw" and "weight_decay" in values:
        values["weight_decay"] /= scale


def _schedule(draft: Draft, rates: Sequence[float]) -> dict[str, str | float]:
    """Return the schedule of the rate over a round's steps, or their mean rate."""
    changes = [k for k in range(1, len(rates)) if not math.isclose(rates[k], rates[0])]
    if not changes:
        return {}
    size = changes[0]
    passed = np.arange(len(rates)) // size * size / len(rates)
    for name, factors in {"cosine": (1 + np.cos(np.pi * passed)) / 2, "linear": 1 - passed}.items():
        if np.allclose(rates, rates[0] * factors, rtol=1e-4):
            return {"schedule": name} | ({"step_size": size} if size > 1 else {})
    gamma = rates[size] / rates[0] if rates[0] else math.nan
    if np.allclose(rates, [rates[0] * gamma ** (k // size) for k in range(len(rates))], rtol=1e-4):
        return {"schedule": "step", "step_size": size, "gamma": gamma}
    draft.note("schedule", f"the rate goes from {rates[0]:.3g} to {rates[-1]:.3g}; the draft takes the mean")
    return {"rate": float(np.mean(rates))}


def with_network(draft: Draft, first: Facts, form: Form) -> Scenario:
    """Add the call that builds the observed network; refuse it if none of those seen can be repeated."""
    reasons = []
    for network, origin, left_out in _networks(first, form):
        trial = Draft([*draft.lines])
        trial.add("[model]", origin, **network)
        try:
            scenario = trial.scenario()
        except SpecError as error:
            lacking = f"; no scenario can express {', '.join(left_out)}" if left_out else ""
            reasons.append(f"{error}{lacking}")
            continue
        shapes = {name: list(p.shape) for name, p in scenario.federation.model.named_parameters()}
        if shapes == first["parameters"] or form.language:
            draft.lines = trial.lines
            if left_out:
                why = f"the draft leaves out {', '.join(left_out)} of {network['use']}, which no scenario can express"
                draft.note("arguments", why, REMEDY)
            return scenario
        reasons.append(f"{network['use']} builds another network")
    if reasons and (code := next((key for key in ("data", "loss", "chain") if f"[{key}]" in reasons[0]), "")):
        draft.refuse(code, reasons[0], "")
    why = f" ({reasons[0]})" if reasons else ""
    draft.refuse("network", f"cannot be built again{why}", REMEDY, first["network"])


def _networks(first: Facts, form: Form) -> list[tuple[dict[str, Any], str, list[str]]]:
    """Return the tables of [model] that may build the network, with their origin and the arguments that they lack."""
    if form.language:
        kind = "decoder" if form.next_token else "encoder"
        return [({"use": kind, "folder": form.language["folder"]}, "as saved after the training", [])]
    found = []
    for built in first["built"]:
        arguments = {k: v for k, v in built["arguments"].items() if _in_toml(v)}
        library, call = built["module"].partition(".")[0], f"{built['module']}:{built['name']}"
        name = {"torchvision": built["name"], "timm": arguments.get("model_name")}.get(library)
        network = {"use": call, **arguments} if name is None else {"use": library, "name": name}
        known = arguments if name is None else CHOSEN
        left_out = [k for k in built["arguments"] if k not in known]
        found.append((network, f"the app calls {call}", left_out))
    return sorted(found, key=lambda each: len(each[2]))


def check_reported(draft: Draft, reported: int | None, facts: Facts) -> None:
    """Note batches that a client reports as its number of examples."""
    if reported == len(facts["sizes"]) < sum(facts["sizes"]) and reported != draft.value("[data]", "batch_size"):
        why = f"clients report {reported} examples, which are batches of {sum(facts['sizes'])} examples"
        draft.note("examples", why)


def keep_layers(draft: Draft, layers: Sequence[str], client: int, round: int, files: Path) -> None:
    """Let layers that were trained and not uploaded stay with the clients; the first training began with known values."""
    draft.add("[[chain]]", "layers that are trained and never uploaded", use="private_layers", layers=list(layers))
    draft.add("[model]", "the first client's values of these layers", weights=str(files / WEIGHTS))
    draft.add("[audit]", "the first training", clients=[client], rounds=[round])
    why = f"clients train {', '.join(layers[:3])} and do not upload them"
    remedy = f"only client {client}'s update of round {round} starts from known values and is attacked"
    draft.note("private", why, remedy)


def _in_toml(value: object) -> bool:
    """Check if the draft can have a value as an argument."""
    if isinstance(value, Mapping):
        return all(map(_in_toml, value.values()))
    return all(map(_in_toml, value)) if isinstance(value, list) else isinstance(value, bool | int | float | str)
