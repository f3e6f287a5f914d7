"""The overview: verdict, progress, accuracy and leakage over rounds, notices, and what each attacker knew."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeGuard

from fedgauge.attacks.limits import noise_is_known
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.attacks.plan import ERROR_LIMITS, describe
from fedgauge.server.store import run_files
from fedgauge.server.views import formatting, server_attacks, tables
from fedgauge.server.views.figures import (
    LIMIT_NAMES,
    canaries_figure,
    in_json,
    membership_figure,
    rounds_figures,
    success_figure,
)
from fedgauge.server.views.formatting import decibel, finite, rounded
from fedgauge.server.views.intervals import Rate
from fedgauge.server.views.leakage import Leak, as_rate
from fedgauge.server.views.membership import members_sentences
from fedgauge.server.views.notices import notices
from fedgauge.server.views.outcomes import attacked_on, device_use
from fedgauge.server.views.participation import app_clients
from fedgauge.server.views.privacy import canaries, privacy
from fedgauge.server.views.reading import Reading, jobs_of_run
from fedgauge.server.views.roles import is_attack, is_baseline, planned_attacks, role_of
from fedgauge.server.views.strength import Limits, error_in_db, final_accuracy
from fedgauge.server.views.success import count_ungraded, ungraded_table
from fedgauge.server.views.verdict import ungraded_reason, verdict_of

REASONS = 40  # the most rows in a table of reasons
LIMIT_STATES = {
    "pending": "The limits of this chain have not been computed yet, or do not apply to this network.",
    "none": "No limit is drawn: without noise in the chain, rounding is the only limit if the chain's Jacobian has full column "
    "rank.",
    "unknown": "No limit is drawn: the density of this chain's randomness is not known in closed form.",
}


def overview(reading: Reading) -> dict[str, Any]:
    """Everything that the overview shows, ready for JSON."""
    return {
        "version": reading.version,
        "name": reading.run.name,
        "facts": formatting.scenario_line(reading.tables),
        "state": reading.state,
        "verdict": _verdict(reading),
        "notices": [{"words": notice, "command": command} for notice, command in notices(reading)],
        "server_attacks": [
            {"name": name, "words": sentence} for name, sentence in server_attack_effects(reading).items()
        ],
        "training": training(reading),
        "app_rounds": in_json(app_rounds(reading)),
        "progress": progress(reading),
        "plan": reading.plan_coverage.to_json(),
        "attacked_on": attacked_on(reading.ledger),
        "figures": figures(reading),
        "ungraded": ungraded(reading),
        "membership": membership(reading),
        "summary": [_in_short(row) for row in summary(reading)],
        "limit": limit(reading),
        "privacy": privacy(reading),
        "canaries": canary_results(reading),
        "knowledge": knowledge(reading),
        "replay": {"verdict": reading.meta.get("replay"), "words": reading.meta.get("replay_detail", "")},
        "participation": participation(reading),
        "measure": asdict(reading.scores.measure),
        "scenario": reading.run.scenario_text(),
        "environment": environment(reading),
    }


def _verdict(reading: Reading) -> dict[str, Any]:
    judged = verdict_of(reading)
    return {"word": judged.word, "sentences": judged.sentences}


# ----------------------------------------------------------------------------------------------------------- progress


def training(reading: Reading) -> dict[str, Any]:
    """How far the training has come."""
    return {
        "round": max(reading.rounds, default=0),
        "rounds": reading.tables["rounds"],
        "accuracy": rounded(final_accuracy(reading.rounds)),
    }


def app_rounds(reading: Reading) -> tables.Table:
    """What a user's own app returned in each round, a dash for what was not finite; no rows for other runs."""
    rows = [
        (round, {k: finite(v) for k, v in told.items() if v is None or _is_number(v)})
        for round, told in reading.returned
    ]
    return tables.app_rounds(rows if any(metrics for _, metrics in rows) else [])


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def progress(reading: Reading) -> dict[str, Any]:
    """How many jobs are in each state, how fast they go, and how long the rest will take."""
    jobs, live = jobs_of_run(reading), reading.state in ("training", "attacking")
    left, devices = jobs.seconds_left, reading.devices
    return {
        **vars(jobs.progress),
        "expected": jobs.expected,
        "words": jobs.words,
        "per_minute": rounded(60 * jobs.pace) if live and jobs.pace else None,
        "seconds_left": round(left) if live and left is not None else None,
        "workers": sum(of.workers for of in devices) or reading.tables.get("audit", {}).get("workers", 1),
        "devices": device_use(devices),
    }


def server_attack_effects(reading: Reading) -> dict[str, str]:
    """What a malicious server sent and recovered, who noticed, and what it cost; empty if it is honest."""
    if (scenario := reading.built) is None:
        return {}
    return server_attacks.server_attack_effects(scenario, reading.scores, reading.ledger)


def figures(reading: Reading, certified: Sequence[float] | None = None) -> dict[str, Any]:
    """The run's figures but the heat map of clients, for the page's scripts.

    Args:
        certified: upper bounds on success at THRESHOLDS.
    """
    return {
        "rounds": in_json(rounds_figures(reading)),
        "success": in_json(success_figure(reading, certified)),
        "membership": in_json(membership_figure(reading)),
        "canaries": in_json(canaries_figure(reading)),
    }


def membership(reading: Reading) -> dict[str, Any]:
    """Who was in a batch: a sentence for each question, and every test's numbers."""
    words = " ".join(members_sentences(verdict_of(reading).members, reading.ledger))
    return {"words": words, "table": in_json(tables.membership_tests(reading))}


def canary_results(reading: Reading) -> dict[str, Any]:
    """What canaries show, in words and in numbers."""
    found = canaries(reading)
    return {"kind": found["kind"], "words": found["words"], "table": in_json(tables.canaries_by_round(reading))}


def ungraded(reading: Reading) -> dict[str, Any]:
    """How many reconstructions nobody graded, why, and what there is without a truth."""
    return {
        "count": count_ungraded(reading.scores),
        "reason": ungraded_reason(reading.ledger),
        "table": in_json(tables.without_truth(ungraded_table(reading.scores, reading.ledger))),
    }


# ------------------------------------------------------------------------------------------------------------- tables


def summary(reading: Reading) -> list[dict[str, Any]]:
    """Each attack, limit and baseline over all rounds: its Leak in the main metric, rates, and its Leaks in other metrics.

    A limit's Leak is of the mean squared error; of_error: that of all, as a PSNR.
    """
    pooled = {metric: reading.pooled(metric) for metric in reading.metrics}
    rows = []
    for attack in reading.order:
        leaks = {m: by_attack[attack] for m, by_attack in pooled.items() if attack in by_attack}
        errors = leaks.get("mse")
        leak = errors if attack in ERROR_LIMITS else leaks.pop(reading.scores.measure.metric, None)
        if leak is None:
            continue  # it tells members
        if is_baseline(attack) and not leak.n:
            continue  # of an attack that gave nothing
        labels, identified = leaks.pop("label_accuracy", None), leaks.pop("identified", None)
        rows.append(
            {
                "attack": attack,
                "kind": role_of(attack),
                "leak": leak,
                "of_error": error_in_db(errors),
                "others": leaks,
                "identified": as_rate(identified) if identified and identified.n else None,
                "labels": labels if labels and labels.n else None,
            }
        )
    return rows


def _in_short(row: Mapping[str, Any]) -> dict[str, Any]:
    leak: Leak = row["leak"]
    return {
        "attack": row["attack"],
        "kind": row["kind"],
        "n": leak.n,
        **(dict.fromkeys(("mean", "low", "high", "median", "worst")) if row["kind"] == "limit" else numbers_of(leak)),
        "exact": formatting.is_exact(leak.best),
        "of_error": rounded(row["of_error"]),
        "identified": rate_in_numbers(row["identified"]),
        "labels": rounded(row["labels"].mean) if row["labels"] else None,
        "failed": ", ".join(f"{n} {formatting.status_words(status)}" for status, n in leak.failed.items()),
        "ungraded": leak.ungraded,
    }


def numbers_of(leak: Leak) -> dict[str, float | None]:
    """A Leak's mean with its interval, its median and its worst case."""
    low, high = formatting.interval_label(leak)
    found = {"mean": leak.mean, "low": low, "high": high, "median": leak.median, "worst": leak.best}
    return {key: rounded(value) for key, value in found.items()}


def rate_in_numbers(rate: Rate | None) -> dict[str, Any] | None:
    """A rate with its interval."""
    if rate is None:
        return None
    return {"count": rate.count, "n": rate.n, "low": rounded(rate.interval[0]), "high": rounded(rate.interval[1])}


def limit(reading: Reading) -> dict[str, Any]:
    """The limits on all attacks: whether they are drawn, or why not, and what the knowledge cards say.

    state: drawn, pending, none (without noise nothing is hidden for good), unknown (the randomness has no known density).
    """
    planned = [row for row in reading.attacks if row["name"] in ERROR_LIMITS]
    errors = reading.pooled("mse") if "mse" in reading.metrics else {}
    drawn = [row for row in planned if row["name"] in errors and errors[row["name"]].n]
    if drawn:
        cards = [f"{LIMIT_NAMES[row['name']]}: {'; '.join(row['parts'])}." for row in drawn]
        return {"state": "drawn", "words": f"{_limits_words(Limits.of(errors))} {' '.join(cards)}"}
    state = "pending" if planned else _without_limit(reading)
    return {"state": state, "words": LIMIT_STATES[state]}


def _without_limit(reading: Reading) -> str:
    """Why a plan has no limit."""
    if (scenario := reading.built) is None:
        return "unknown"
    fed = scenario.federation
    if modality_of(fed.shards.dataset).limits and noise_is_known(fed):
        return "pending"
    density = fed.chain.update_distribution
    return "unknown" if density is None or density.noisy else "none"


def _limits_words(limits: Limits) -> str:
    words = [
        "Limits are of the mean squared error, and drawn under it. Here they and the attacks are PSNRs of that mean, "
        "which lie below means of PSNRs."
    ]
    if limits.estimate is not None:
        words.append(
            f"Who knows the labels would get {decibel(limits.estimate)} dB if the images of a class were Gaussian. That is an "
            "estimate: images are not Gaussian, and at kinks of the network (ReLU, max-pooling) an update reveals more, so an "
            "attack may pass it."
        )
    if limits.bound is not None:
        words.append(f"No attack gets above {decibel(limits.bound)} dB on average, whatever the images are.")
    if limits.reached is not None:
        side = "below" if limits.gap is None or limits.gap >= 0 else "above"
        apart = "" if limits.gap is None else f", {decibel(abs(limits.gap))} dB {side} the estimate"
        words.append(f"The attack of the least error gets {decibel(limits.reached)} dB{apart}.")
    return " ".join(words)


def knowledge(reading: Reading) -> dict[str, Any]:
    """What all attackers knew, and the knowledge card of each attack; baselines and limits last."""
    attacks = reading.attacks
    real = [row["parts"] for row in attacks if is_attack(row["name"])]
    shared = [part for part in (real[0] if real else []) if all(part in other for other in real)]
    planned = planned_attacks(reading.ledger)
    cards = [
        {
            "name": row["name"],
            "kind": role_of(row["name"]),
            "component": describe(planned[row["name"]].table),
            "parts": row["parts"],
            "own": [part for part in row["parts"] if part not in shared],
            "seed": row["seed"],
        }
        for row in attacks
    ]
    return {"shared": shared, "cards": sorted(cards, key=lambda c: c["kind"] != "attack")}


def participation(reading: Reading) -> dict[str, Any]:
    """How many replies were accepted, rejected or missing, the reasons, the commonest first, and the clients of an app."""
    totals: Counter[str] = Counter()
    for (_, status), count in reading.participation.items():
        totals[status] += count
    reasons = sorted(reading.missed.items(), key=lambda item: -len(item[1]))
    listed = [
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
    clients = [{"client": c.client, "node": c.node, "examples": c.size} for c in app_clients(reading.ledger)]
    return {**counts, "reasons": listed, "more": max(0, len(reasons) - REASONS), "clients": clients}


def environment(reading: Reading) -> Any:
    """Versions and hardware of the run; None if they were not recorded."""
    path = reading.run.folder / "environment.json"
    try:
        return json.loads(run_files.read(path, run_files.MOST_VERSIONS)) if run_files.look(path) else None
    except (OSError, ValueError, RecursionError) as error:
        return f"{path.name} cannot be read: {error}"
