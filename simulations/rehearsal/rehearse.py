"""`fedgauge app DIR`: run the app in a process of its own, draft its scenario, and prove the draft on an observed update."""

import json
import math
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from fedgauge.attacks.base import Observation
from fedgauge.attacks.effort import ITERATIONS, attacks_by_effort
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.client import components
from fedgauge.client.components import SpecError, users_errors
from fedgauge.client.data.corpora import targets
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, Update
from fedgauge.server.store import run_files
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape_source import TapeSource, UploadMismatch, names_of, replies_of
from fedgauge.server.views.formatting import many
from fedgauge.simulations.rehearsal.draft import (
    LIBRARIES,
    Draft,
    Facts,
    Observed,
    Refused,
    arrays_of,
    check_attackable,
    check_reported,
    keep_layers,
    with_network,
    write_draft,
)
from fedgauge.simulations.rehearsal.examples import Form, form_of
from fedgauge.simulations.rehearsal.flower_app import FlowerApp, Settings, importing
from fedgauge.simulations.rehearsal.losses import Target
from fedgauge.simulations.rehearsal.train import OBSERVED
from fedgauge.simulations.run.create import free_folder, prepare_app
from fedgauge.simulations.run.launch import OwnProcess

SEVERAL = 0.03  # CPU seconds for all attacked updates once; above, fewer are attacked: a search computes each hundreds of times
CONTROLLED = 2  # clients, of which the other is the control of each: how much is right by chance
SLOW = 0.1  # for a single update, above which a search has fewer iterations
LEAST = 10  # iterations of a search
CLOSE = 0.04  # relative error up to which a draft that is known to be inexact still describes the training
EXACT = 1e-4  # relative error that rounding during training explains
STRANGERS = 3  # clients whose examples stand in for public data, where the app has them
ROUNDING = 1e-6  # relative difference of a fitted rate
AMPLIFIED = 2  # times what the last bits of the examples change, as where rounding decides on which side of a ReLU's kink one is
NUDGES = 8  # changes of these bits that are tried: only some of them cross a decisive kink
LAST_BITS = 2.0**-21  # their relative size, that of a layer's rounding
# codes of the problems with which a draft computes another update
INEXACT = (
    *("arguments", "optimizer", "loss", "groups", "schedule", "clipping", "dropout", "autocast", "batches", "noise"),
    *("mods", "turns", "large"),
)
MOST_TRIES = 8  # to fit a rate
PATIENCE = 30  # seconds until the app's last line is printed, and again each time that this doubles
MOST_OBSERVED = 1 << 26  # bytes of observed.json
Kind = tuple[Form, Target | None]  # of examples and their labels
Recorded = tuple[Any, Facts]  # the ledger's row of an upload, and the training before it


@dataclass(frozen=True)
class Rehearsal:
    """A recorded app with its drafted scenario."""

    run: Run
    draft: Draft
    truth: Path  # folder with the observed examples of the attacked clients
    packages: tuple[str, ...]  # of the app, which the audit must allow
    proof: str  # how well the draft gives the first observed update


def observe(folder: Path, runs: Path, settings: Settings, clients: int, console: Console) -> tuple[Run, Observed]:
    """Run the app, and return its recording and what was observed.

    Raises:
        SpecError: the app does not run; its run folder is deleted.
    """
    folder = folder.resolve()
    FlowerApp.read(folder, settings)  # refused before a process starts
    run = Run.create(free_folder(f"app-{folder.name}", runs), "# drafted after the app's training\n")
    plan = {"folder": str(folder), "settings": dict(settings), "clients": clients + STRANGERS}
    try:
        command = ("fedgauge.simulations.rehearsal.train", str(run.folder.absolute()), json.dumps(plan))
        process = OwnProcess(run, "app.log", *command, ray=False)
        began, patience = time.monotonic(), PATIENCE
        with closing(process), console.status("the app trains") as shown:
            while process.status() is None:
                shown.update(Text(f"the app trains: {process.last_line()}", no_wrap=True, overflow="ellipsis"))
                if time.monotonic() - began > patience:
                    last = process.last_line() or "none yet"
                    console.print(f"the app still runs after {patience} s; its last line: {last}")
                    patience *= 2
                time.sleep(0.1)
        if process.status() != 0 or run_files.look(run.folder / OBSERVED) is None:
            raise SpecError(process.blame(f"{folder}: the app ended its process"))
        text = run_files.read(run.folder / OBSERVED, MOST_OBSERVED).decode()
        found = json.loads(text.replace(str(process.scratch), str(folder)))  # it ran in a copy of the folder
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
    draft = Draft()
    try:
        found = _rehearsed(draft, run, observed, folder, clients, truth)
    except Refused:
        found = Rehearsal(run, draft, run.folder, (), "")
    if draft.lines:
        run_files.write(run.folder / "scenario.toml", draft.text().encode())
    return found


def _rehearsed(draft: Draft, run: Run, observed: Observed, folder: Path, clients: int, truth: bool) -> Rehearsal:
    nodes = [node for node, rounds in observed.clients.items() if "data" in rounds[0]]
    first = observed.clients[nodes[0]][0] if nodes else next(rounds[0] for rounds in observed.clients.values())
    arrays = [arrays_of(facts) for rounds in ([first], *observed.clients.values()) for facts in rounds]
    inputs = [each["x"] for each in arrays if "x" in each]
    form = form_of(inputs, first["normalised"], observed.language, first["output"]) if inputs else None
    form, target = check_attackable(draft, observed, first, arrays, form)
    if len(nodes) < 2:
        draft.refuse("clients", "one client trained, and none is left to provide public data", "raise --clients")
    sizes = {node: sum(observed.clients[node][0]["sizes"]) for node in nodes}
    alike = nodes[:-1] if first["dp"] else [node for node in nodes[:-1] if sizes[node] == sizes[nodes[0]]]
    attacked = alike[:clients]  # a scenario has one size; Opacus draws it
    if len(attacked) < min(clients, len(nodes) - 1):
        counts = ", ".join(map(str, sizes.values()))
        why = f"clients train on {counts} examples a round; only those with {sizes[nodes[0]]} are attacked"
        draft.note("sizes", why)
    files = run.folder.absolute() / "observed"  # the scenario is read from the app's folder
    with run.ledger() as ledger:
        numbers = {node: client for client, node in ledger.nodes().items()}
        uploads = {
            node: own
            for node in attacked
            if node in numbers  # of messages with arrays
            and (own := uploads_of(ledger, numbers[node], observed.clients[node], first["parameters"]))
        }
        recorded = [row for row in ledger.observations() if row["digest"]]
        whole = replies_of(run, ledger) == "weights"
        if "large" not in first["notes"]:  # otherwise some were not kept
            ledger.set_meta(examples="observed")
    if not uploads:
        mods = ", ".join(observed.mods)
        why = "the attacked clients' replies carry no arrays that can be read" + (f" after {mods}" if mods else "")
        draft.refuse("uploads", why, f"audit the app without {mods}" if mods else "let them upload weights")
    shared = set.intersection(*({row["round"] for row, _ in own} for own in uploads.values()))
    attacked = [*uploads] if shared else [*uploads][:1]
    first = uploads[attacked[0]][0][1]
    public = [node for node in nodes if node not in attacked]
    draft.add("", "as recorded", rounds=max(row["round"] for row in recorded), clients=len(observed.clients))
    write_draft(draft, observed, attacked, public, form, target, files, whole)
    draft.add("[audit]", "the attacked clients", clients=sorted(numbers[node] for node in attacked))
    shared = shared or {row["round"] for row, _ in uploads[attacked[0]]}
    if any(facts["parameters"] != first["parameters"] for node in attacked for facts in observed.clients[node]):
        draft.note("rounds", "clients also train another network in some rounds, which are not attacked")
    if shared < {row["round"] for row in recorded if row["client"] in {numbers[node] for node in attacked}}:
        draft.add("[audit]", "rounds in which the attacked clients train", rounds=sorted(shared))
    built = () if form.language else first["built"]
    packages = tuple({call["module"].partition(".")[0]: None for call in built}.keys() - LIBRARIES)
    packages += ("torch",) if target and ":" in target.loss.get("use", "") else ()  # whose losses are called by name
    with components.allowing(packages, importing(folder.resolve())), users_errors():
        scenario = with_network(draft, first, form)
        client, own = numbers[attacked[0]], uploads[attacked[0]]
        row = own[0][0]
        began, came = row["round"], run.tape().read(row["round"], client, row["digest"])
        try:
            check_reported(draft, row["examples"], first)
            if kept := _never_sent(scenario, first, came):
                keep_layers(draft, kept, client, began, files)
                scenario = draft.scenario()
            trained = {client: own[:1]} if kept else {numbers[node]: uploads[node] for node in attacked}
            proof, seconds, unlike = _proof(run, draft, scenario, trained, (form, target))
        except (UploadMismatch, RuntimeError) as error:  # torch raises the latter, such as for a scripted network
            draft.refuse("uploads" if isinstance(error, UploadMismatch) else "network", str(error), "")
        attacked = [node for node in attacked if numbers[node] not in unlike]
        truths = run.folder / "truth"
        if truth:
            truths.mkdir(mode=0o700)
        for node in attacked if truth else ():
            for row, facts in uploads[node]:
                x, y = (part[: scenario.federation.shards.batch_size] for part in _examples(facts, form, target))
                np.savez(truths / f"node-{node}-round-{row['round']}.npz", x=x, y=y)
        fit = int(SEVERAL / max(seconds, 1e-9))  # updates
        if fit < len(attacked) * len(own) and len(draft.value("[audit]", "rounds") or ()) != 1:
            some = sorted(numbers[node] for node in attacked)[: max(CONTROLLED, fit)]
            draft.add("[audit]", "updates take long to compute", clients=some, rounds=[began])
            why = f"only round {began} of {many(len(some), 'client')} is attacked"
            draft.note("cost", why, "change [audit] to attack more")
        if seconds > SLOW:
            fewer = max(LEAST, round(ITERATIONS["quick"] * SLOW / seconds))
            draft.lines = [line for line in draft.lines if line[:2] != ("[audit]", "effort")]
            for table in attacks_by_effort("quick", scenario.federation):
                cut = {"iterations": fewer} if "iterations" in table else {}
                draft.add("[[attack]]", 'the attacks of effort = "quick"', **{**table, **cut})
            remedy = 'to search longer, set effort = "quick" and remove [[attack]]'
            draft.note("cost", f"searches have {fewer} iterations", remedy)
        with run.ledger() as ledger:
            ledger.set_meta(drafted_chain=repr(tomllib.loads(draft.text())["chain"]))
        return Rehearsal(run, draft, truths, packages, proof)


def uploads_of(
    ledger: Ledger, client: int, trained: Sequence[Facts], parameters: Mapping[str, Sequence[int]]
) -> list[Recorded]:
    """Return a client's recorded trainings of the network with these parameters; of rounds that it skipped there are other rows."""
    rows = [row for row in ledger.observations() if row["client"] == client and row["status"] == "accepted"]
    found = [(rows[facts["upload"]], facts) for facts in trained if facts["upload"] < len(rows)]
    return [(row, facts) for row, facts in found if row["digest"] and facts["parameters"] == parameters]


def _never_sent(scenario: Scenario, first: Facts, came: Observation) -> list[str]:
    """Return the parameters that were trained and are not in an upload; empty also if the upload has none of the network."""
    model = scenario.federation.model
    names, own = set(names_of(came.update, model).values()), [name for name, _ in model.named_parameters()]
    return [name for name in own if name not in names and name not in first["frozen"]] if names & set(own) else []


def _proof(
    run: Run, draft: Draft, scenario: Scenario, trained: Mapping[int, Sequence[Recorded]], kind: Kind
) -> tuple[str, float, set[int]]:
    """Return how well the draft, in the observed order, gives a client's first update, and the CPU seconds it took.

    Also return the clients that train otherwise and are not attacked. Uploads may be gradients, a rate that was not observed and
    the bound of clipping are fitted: all are written into the draft, and also if the draft gives the first update and not the
    last, so that only the first round is attacked.

    Args:
        trained: recorded trainings of the attacked clients; the first one's rate is fitted.

    Raises:
        UploadMismatch: the upload is not the network's.
    """
    (client, ((row, facts), *later)), *others = trained.items()
    with run.ledger() as ledger:
        for _ in range(MOST_TRIES):
            replies = prepare_app(run, ledger, scenario)
            source = TapeSource(scenario.federation, run=run, ledger=ledger)
            seen = source.observation(row["round"], client, row["digest"])
            update, seconds = _computed(scenario, seen, facts, kind)
            along, length, size = _dot(update, seen.update), _dot(update, update), _dot(seen.update, seen.update)
            shorter = (1 - EXACT**2) * length * size < along**2 < (1 - EXACT) ** 2 * length**2 and along > 0
            if replies == "updates" and along < 0:
                draft.add("[tape]", "uploads point against the steps of the training", replies="gradients")
            elif not facts["steps"] and along > 0 and abs(along / length - 1) > ROUNDING:
                fitted = [line for line in draft.lines if line[:2] == ("[[chain]]", "rate")]
                for line in fitted:
                    draft.lines[draft.lines.index(line)] = line._replace(value=line.value * along / length)
            elif shorter:
                origin = "uploads are the update times a number below 1, which a clip does"
                draft.add("[[chain]]", origin, use="clip", max_norm=math.sqrt(size))
            else:
                break
            scenario = draft.scenario()
        where = f"client {client}'s update of round {row['round']}"
        came = run.tape().read(row["round"], client, row["digest"]).update.values()
        step = max((torch.finfo(t.dtype).eps for t in came if t.is_floating_point()), default=0.0)
        off, part, exact = _compared(update, scenario, seen, facts, kind, step)
        left_out = [problem.code for problem in draft.problems if problem.code in INEXACT]
        if not exact or (left_out and off >= EXACT):
            words = f"{where}, computed again from the observed examples, differs by {off:.2%}, most in {part}"
            if left_out:
                words += f"; the draft is not exact in: {', '.join(left_out)}"
            else:
                words += "; the app may add noise (name it in [[chain]]) or a term to the loss, average weights or change gradients"
            if not left_out or (off > CLOSE and not {"noise", "autocast"} & {*left_out}):
                ledger.set_meta(training=words, training_fits="False")
            return words, seconds, set()

        def fits(row: Any, facts: Facts) -> bool:
            seen = source.observation(row["round"], row["client"], row["digest"])
            return _compared(_computed(scenario, seen, facts, kind)[0], scenario, seen, facts, kind, step)[2]

        # what was left out made no difference
        draft.problems = [problem for problem in draft.problems if problem.code not in ("arguments", "mods")]
        ledger.set_meta(replay="ok", replay_detail=f"{where}: relative error {off:.1e}, from the observed examples")
        if later and (later[-1][1]["sizes"] != facts["sizes"] or not fits(*later[-1])):
            draft.add("[audit]", "later rounds train otherwise", rounds=[row["round"]])
            why = "later rounds train otherwise (SCAFFOLD's correction, another rate, other examples)"
            remedy = "describe them in [[chain]], then change [audit] to attack more"
            draft.note("rounds", f"{why}; only round {row['round']} is attacked", remedy)
        rounded = f"differs by {off:.2%}, which rounding explains"
        exactly = f"exact to rounding (relative error {off:.1e})" if off < EXACT else rounded
        unlike = {each for each, of_client in others if not fits(*of_client[0])}
        if unlike:
            draft.add("[audit]", "the others train otherwise", clients=sorted(trained.keys() - unlike))
            why = "train otherwise (another rate, optimizer, loss or scale) and are not attacked"
            names = ", ".join(map(str, sorted(unlike)))
            draft.note("clients", f"{len(unlike)} of {len(trained)} clients ({names}) {why}")
        return f"{where}, computed again from the observed examples: {exactly}", seconds, unlike


def _compared(
    update: Update, scenario: Scenario, seen: Observation, facts: Facts, kind: Kind, step: float
) -> tuple[float, str, bool]:
    """Return a computed update's relative error, the parameter that differs most, and whether rounding explains it.

    Args:
        step: relative precision of the upload.
    """
    size = math.sqrt(_dot(seen.update, seen.update))
    wrong = {k: float((update[k] - t).norm()) for k, t in seen.update.items()}
    off = float(np.linalg.norm(list(wrong.values()))) / size if size else math.nan
    exact = bool(size) and off < EXACT + step * math.sqrt(_dot(seen.params, seen.params)) / size
    if size and not exact and off < 1 and not kind[0].language:
        nudged = (_computed(scenario, seen, facts, kind, nudge)[0] for nudge in range(1, NUDGES + 1))
        away = ({k: other[k] - t for k, t in update.items()} for other in nudged)
        exact = any(off < AMPLIFIED * math.sqrt(_dot(change, change)) / size for change in away)
    return off, max(wrong, key=lambda k: wrong[k]), exact


def _computed(scenario: Scenario, seen: Observation, facts: Facts, kind: Kind, nudge: int = 0) -> tuple[Update, float]:
    """Return the update that the scenario gives for observed examples in their order, and the CPU seconds it took.

    Args:
        nudge: number of a random change of the examples' last bits; 0: none.
    """
    x, y = map(torch.from_numpy, _examples(facts, *kind))
    if nudge:
        x = x * (1 - LAST_BITS * torch.rand(x.shape, generator=generator("nudge", nudge)))
    batch = Batch(modality_of(scenario.federation.shards.dataset).arranged(x), y)
    tables = tomllib.loads(scenario.to_toml())
    for link in tables["chain"]:
        link.pop("shuffle", None)
    fed, started = Scenario.from_tables(tables).federation, 0.0
    for _ in range(1 if nudge else 2):  # the first also warms torch up
        fed.load_buffers(seen.buffers)
        started = time.process_time()
        with torch.random.fork_rng(devices=[]):
            update = fed.update_fn()(seen.params, batch, generator("proof"))
    return update, time.process_time() - started


def _dot(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return sum(float((t.double() * other[k].double()).sum()) for k, t in one.items())


def _examples(facts: Facts, form: Form, target: Target | None) -> tuple[np.ndarray, np.ndarray]:
    """Return a client's examples of a round with their labels, as the scenario has them."""
    arrays = arrays_of(facts)
    x = form.examples(arrays["x"])
    if target is not None:
        return x, target.labels(arrays["y"])
    pad = form.language["pad"] if form.language else 0
    return x, targets(torch.from_numpy(x), pad).numpy()
