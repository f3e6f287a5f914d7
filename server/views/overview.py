"""The first view: accuracy and leakage over rounds, the verdict, what is missing, who knew what, how far it has come."""

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fedgauge.attacks.grading.image_metrics import LPIPS_PIXELS, PSNR_CAP
from fedgauge.attacks.grading.knowledge_card import NO_DERIVATIVE
from fedgauge.attacks.limits import known_noise
from fedgauge.attacks.plan import describe
from fedgauge.client.components import SpecError
from fedgauge.defenses.accounting import privacy_statement
from fedgauge.server.store.ledger_rows import EMPTY
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views import formatting, server_attacks
from fedgauge.server.views.formatting import LABELS, RATES, percent, rounded
from fedgauge.server.views.intervals import Rate
from fedgauge.server.views.leakage import Leak, as_rate
from fedgauge.server.views.participation import rounds_seen
from fedgauge.server.views.reading import Reading
from fedgauge.server.views.roles import is_attack, is_limit, planned_attacks, role_of
from fedgauge.server.views.scores import OF_TEXT
from fedgauge.server.views.success import THRESHOLDS, count_ungraded, success_curve
from fedgauge.server.views.verdict import ungraded_reason, verdict

REASONS = 40  # rows of a table of reasons
LIMIT = "Bayes limit, Gaussian prior fitted to the auxiliary images"

Notice = tuple[str, str]  # what is missing, and the command that helps, or none


def overview(reading: Reading) -> dict[str, Any]:
    """Everything of the first view, as JSON can say it."""
    return {
        "version": reading.version,
        "name": reading.run.name,
        "facts": formatting.scenario_line(reading.tables),
        "state": reading.state,
        "verdict": _verdict(reading),
        "notices": [{"words": told, "command": command} for told, command in notices(reading)],
        "misdeeds": [{"name": name, "words": told} for name, told in server_attack_effects(reading).items()],
        "training": training(reading),
        "progress": progress(reading),
        **figure(reading),
        "success": success(reading),
        "ungraded": ungraded(reading),
        "thresholds": THRESHOLDS,
        "summary": [_in_short(row) for row in summary(reading)],
        "limit": limit(reading),
        "privacy": privacy(reading),
        "knowledge": knowledge(reading),
        "replay": {"verdict": reading.meta.get("replay"), "words": reading.meta.get("replay_detail", "")},
        "participation": participation(reading),
        "cap": PSNR_CAP,
        "measure": asdict(reading.scores.measure),
        "scenario": (reading.run.folder / "scenario.toml").read_text(),
        "environment": environment(reading),
    }


def _verdict(reading: Reading) -> dict[str, str]:
    found = verdict(reading.scores, reading.ledger)
    return {"word": found.word, "sentence": found.sentence}


# ----------------------------------------------------------------------------------------------------------- progress


def training(reading: Reading) -> dict[str, Any]:
    """How far the training has come."""
    last = reading.rounds[max(reading.rounds)] if reading.rounds else {"round": 0, "accuracy": None}
    return {
        "round": last["round"],
        "rounds": reading.tables["rounds"],
        "accuracy": rounded(last["accuracy"]),
    }


def progress(reading: Reading) -> dict[str, Any]:
    """How the jobs stand, how fast they go, and how long the rest will take."""
    p = reading.progress
    expected = p.total + jobs_to_come(reading)
    pace = reading.ledger.pace() if reading.state in ("training", "attacking") else None
    left = expected - p.done - p.failed
    waited_for = p.queued + p.leased or reading.state != "training"  # else rounds are, of which this pace says nothing
    return {
        "queued": p.queued,
        "leased": p.leased,
        "done": p.done,
        "failed": p.failed,
        "expected": expected,
        "per_minute": rounded(pace),
        "seconds_left": round(60 * left / pace) if pace and waited_for else None,
        "workers": reading.tables.get("audit", {}).get("workers", 1),
    }


def jobs_to_come(reading: Reading) -> int:
    """Jobs that the rounds not yet trained will add, every client taking part; none where nothing trains."""
    if reading.state != "training":
        return 0
    try:
        scenario = reading.scenario
    except SpecError:
        return 0
    return jobs_of_remaining_rounds(scenario, reading.newest) if scenario.audit.curious else 0


def jobs_of_remaining_rounds(scenario: Scenario, done: int) -> int:
    """Jobs that the rounds after `done` will add, every client taking part."""
    plan, protocol = scenario.plan, scenario.protocol
    seen = range(max(1, int(protocol.clients * scenario.strategy.get("fraction_train", 1.0))))
    return sum(len(plan.targets(r, seen)) for r in range(done + 1, protocol.rounds + 1)) * len(plan.attacks)


# ------------------------------------------------------------------------------------------------------------ notices


def notices(reading: Reading) -> list[Notice]:
    """What a reader must know before believing a figure."""
    return [*_training_notices(reading), *_audit_notices(reading), *_flat(reading), *_data(reading)]


def _training_notices(reading: Reading) -> Iterator[Notice]:
    state, planned = reading.meta.get("state", ""), reading.tables["rounds"]
    trained = max(reading.rounds, default=0)
    if reading.state == "training":
        yield f"The run is still training: {trained} of {planned} rounds by now.", ""
    elif reading.state == "failed" and EMPTY in reading.meta:
        yield f"The training failed: {reading.meta[EMPTY]}.", ""
    elif trained < planned:
        how = {"failed": "The training failed", "interrupted": "The training was interrupted"}
        what = f"after {trained} of {planned} rounds" if trained else "before its first round"
        logs = "; see logs/flower.log in the run folder" if state == "failed" else ""
        yield f"{how.get(state, 'The training ended')} {what}{logs}.", ""


def _audit_notices(reading: Reading) -> Iterator[Notice]:
    progress, meta = reading.progress, reading.meta
    again = f"fedgauge audit {shlex.quote(str(reading.run.folder))}"
    waiting = progress.queued + progress.leased
    if not reading.tables.get("audit", {}).get("curious", True):
        yield "The server was not curious ([audit] curious = false): it kept no updates. Set it to true, run again.", ""
    elif waiting and meta.get("replay") == "mismatch":
        yield f"{waiting} of {progress.total} attacks wait: what a replay does not explain is not attacked.", ""
    elif waiting and reading.state in ("training", "attacking"):
        yield f"{waiting} of {progress.total} attacks have not been done yet.", ""
    elif waiting:
        yield f"{waiting} of {progress.total} attacks have not been done yet. Go on with:", again
    elif not progress.total and any(o["digest"] for o in reading.ledger.observations()):
        yield "Updates are on the tape, but no attack is planned for them. Attack them with:", again
    elif not progress.total and reading.sizes:
        yield "No update is on the tape, so there is nothing to attack.", ""
    if progress.failed:
        yield f"{progress.failed} of {progress.total} attacks failed: {'; '.join(reading.ledger.errors()[:3])}", ""
    if meta.get("replay", "ok") != "ok":
        yield f"The replay check did not succeed ({meta['replay']}): {meta.get('replay_detail', '')}", ""


def _flat(reading: Reading) -> Iterator[Notice]:
    flat = [row["name"] for row in reading.attacks if NO_DERIVATIVE in row["knowledge"]]
    if flat:
        yield f"{', '.join(flat)}: {NO_DERIVATIVE}.", ""


def _data(reading: Reading) -> Iterator[Notice]:
    try:
        shape = reading.scenario.federation.shards.dataset.shape
    except SpecError as error:
        yield f"The private examples cannot be shown on this machine: {error}", ""
        return
    perceptual = any(metric.startswith("lpips_") for metric in reading.metrics)
    if reading.metrics and not perceptual and len(shape) == 3 and min(shape[1:]) >= LPIPS_PIXELS:
        yield "LPIPS: unavailable (no backbone weights).", ""


def server_attack_effects(reading: Reading) -> dict[str, str]:
    """What a malicious server sent, won, was noticed for and cost; empty where it is honest."""
    try:
        scenario = reading.scenario
    except SpecError:  # which the notices tell
        return {}
    return server_attacks.server_attack_effects(scenario, reading.scores, reading.ledger)


# ------------------------------------------------------------------------------------------------------------ figures


def figure(reading: Reading) -> dict[str, Any]:
    """Accuracy and leakage over rounds, as plain data that the page's script draws."""
    rounds, order = [reading.rounds[r] for r in sorted(reading.rounds)], reading.order
    accuracy = {"x": [r["round"] for r in rounds], "y": [rounded(r["accuracy"]) for r in rounds]}
    metrics = [
        {"name": m, "label": LABELS.get(m, m), "rate": m in RATES, "series": series(m, reading.leaks(m), order)}
        for m in reading.metrics
    ]
    return {"accuracy": accuracy, "metrics": [m for m in metrics if m["series"]]}


def series(metric: str, leaks: Sequence[Leak], order: Sequence[str]) -> list[dict[str, Any]]:
    """A metric's curve for each attack, limit and baseline."""
    by_attack: dict[str, list[Leak]] = {}
    for leak in leaks:
        if leak.round is not None and leak.mean is not None:
            by_attack.setdefault(leak.attack, []).append(leak)
    return [
        {
            "name": LIMIT if is_limit(attack) else attack,
            "kind": role_of(attack),
            "x": [leak.round for leak in found],
            "mean": [rounded(leak.mean) for leak in found],
            "low": [rounded(formatting.interval_label(leak)[0]) for leak in found],
            "high": [rounded(formatting.interval_label(leak)[1]) for leak in found],
            "best": [rounded(formatting.plotted_value(metric, leak.best)) for leak in found if _has_worst_case(leak)],
            "told": [formatting.point_label(leak) for leak in found],
        }
        for attack in order
        if (found := by_attack.get(attack))
    ]


def _has_worst_case(leak: Leak) -> bool:
    return leak.metric not in RATES and is_attack(leak.attack)


def success(reading: Reading) -> list[dict[str, Any]]:
    """For each attack and baseline, the part of the examples that reach each PSNR."""
    curve = success_curve(reading.scores, reading.ledger) if len(reading.scores) else {}
    return success_series(curve)


def ungraded(reading: Reading) -> dict[str, Any]:
    """How many reconstructions by attacks a deployment's clients did not grade, and why, as they say."""
    return {"count": count_ungraded(reading.scores), "reason": ungraded_reason(reading.ledger)}


def success_series(curve: Mapping[str, Sequence[Rate]]) -> list[dict[str, Any]]:
    """Success curves as the page's script draws them."""
    return [
        {
            "name": attack,
            "kind": role_of(attack),
            "y": [rounded(r.fraction) for r in rates],
            "told": [f"{r.count} of {r.n} ({percent(r.interval[0])} to {percent(r.interval[1])})" for r in rates],
        }
        for attack, rates in curve.items()
    ]


# ------------------------------------------------------------------------------------------------------------- tables


def summary(reading: Reading) -> list[dict[str, Any]]:
    """Each attack, limit and baseline over all rounds: its Leak of the run's measure, rates, and the Leaks of further metrics."""
    pooled = {metric: reading.pooled(metric) for metric in reading.metrics}
    rows = []
    for attack in reading.order:
        found = {m: by_attack[attack] for m, by_attack in pooled.items() if attack in by_attack}
        labels, identified = (
            found.pop("label_accuracy", None),
            found.pop("identified", None),
        )
        rows.append(
            {
                "attack": attack,
                "kind": role_of(attack),
                "psnr": found.pop(reading.scores.measure.metric),
                "others": found,
                "identified": as_rate(identified) if identified and identified.n else None,
                "labels": labels if labels and labels.n else None,
            }
        )
    return rows


def _in_short(row: Mapping[str, Any]) -> dict[str, Any]:
    psnr: Leak = row["psnr"]
    return {
        "attack": row["attack"],
        "kind": row["kind"],
        "n": psnr.n,
        "mean": rounded(psnr.mean),
        "low": rounded(psnr.low),
        "high": rounded(psnr.high),
        "median": rounded(psnr.median),
        "worst": rounded(psnr.best),
        "exact": formatting.is_exact(psnr.best),
        "identified": rate_in_numbers(row["identified"]),
        "labels": rounded(row["labels"].mean) if row["labels"] else None,
        "failed": ", ".join(f"{n} {status}" for status, n in psnr.failed.items()),
        "ungraded": psnr.ungraded,
    }


def rate_in_numbers(rate: Rate | None) -> dict[str, Any] | None:
    """A rate with its interval."""
    if rate is None:
        return None
    return {"count": rate.count, "n": rate.n, "low": rounded(rate.interval[0]), "high": rounded(rate.interval[1])}


def limit(reading: Reading) -> dict[str, Any]:
    """What is said of a limit on all attacks: whether one is drawn, or why not; and what it is a limit of.

    state: drawn, pending, none (no noise: nothing is hidden for good), unknown (randomness without a known density).
    """
    planned = [row for row in reading.attacks if is_limit(row["name"])]
    if planned:
        name = planned[0]["name"]
        drawn = "mse" in reading.metrics and reading.pooled("mse").get(name) is not None
        parts = planned[0]["knowledge"].split("; ")
        return {"state": "drawn" if drawn else "pending", "parts": parts}
    try:
        chain = reading.scenario.federation.chain
    except SpecError:
        return {"state": "unknown", "parts": []}
    if reading.scores.measure == OF_TEXT:  # its limit is not known, unless nothing is hidden
        return {
            "state": "unknown" if chain.update_distribution is None or chain.update_distribution.noisy else "none",
            "parts": [],
        }
    if known_noise(chain) is not None:
        return {"state": "pending", "parts": []}
    bare = chain.update_distribution is not None and not chain.update_distribution.noisy
    return {"state": "none" if bare else "unknown", "parts": []}


def privacy(reading: Reading) -> dict[str, Any]:
    """The epsilons that the clients have spent by now, the most of any; None, and why, where no epsilon holds."""
    return reading.view("privacy", lambda: _privacy(reading))


def _privacy(reading: Reading) -> dict[str, Any]:
    try:
        scenario = reading.scenario
    except SpecError as error:
        return {"epsilon": None, "client": None, "delta": None, "words": f"No epsilon on this machine: {error}."}
    missing = {where for (status, _), places in reading.missed.items() if status == "missing" for where in places}
    replies = [(round, client) for round, client in reading.sizes if (client, round) not in missing]
    seen = rounds_seen(scenario.protocol, replies)
    each, secret = {c: len(rounds) for c, rounds in seen.items()}, not reading.ledger.deployed
    found = privacy_statement(scenario.federation, each, scenario.privacy.delta, secret)
    return {
        "epsilon": rounded(found.record),
        "client": rounded(found.client),
        "delta": found.delta,
        "words": f"Differential privacy{'' if secret else ', as the clients are assumed to defend'}: {found.words}.",
    }


def knowledge(reading: Reading) -> dict[str, Any]:
    """What all attackers knew, and the knowledge card of each attack, real ones first."""
    attacks = reading.attacks
    real = [row["knowledge"].split("; ") for row in attacks if is_attack(row["name"])]
    shared = [part for part in (real[0] if real else []) if all(part in other for other in real)]
    planned = planned_attacks(reading.ledger)
    cards = [
        {
            "name": row["name"],
            "kind": role_of(row["name"]),
            "component": describe(planned[row["name"]].table),
            "parts": row["knowledge"].split("; "),
            "own": [part for part in row["knowledge"].split("; ") if part not in shared],
            "seed": row["seed"],
        }
        for row in attacks
    ]
    return {"shared": shared, "cards": sorted(cards, key=lambda c: c["kind"] != "attack")}


def participation(reading: Reading) -> dict[str, Any]:
    """How replies fared, by status and reason, the commonest first."""
    totals: Counter[str] = Counter()
    for (_, status), count in reading.participation.items():
        totals[status] += count
    reasons = sorted(reading.missed.items(), key=lambda item: -len(item[1]))
    told = [
        {
            "status": status,
            "reason": reason,
            "count": len(where),
            "where": [f"client {client} in round {round}" for client, round in where[:3]],
            "more": max(0, len(where) - 3),
        }
        for (status, reason), where in reasons[:REASONS]
    ]
    counts = {status: totals[status] for status in ("accepted", "rejected", "missing")}
    return {**counts, "reasons": told, "more": max(0, len(reasons) - REASONS)}


def environment(reading: Reading) -> Any:
    """What the run was made with; None where it was not recorded."""
    path = reading.run.folder / "environment.json"
    try:
        return json.loads(path.read_text()) if path.exists() else None
    except (OSError, ValueError) as error:
        return f"{path.name} cannot be read: {error}"
