"""The overview: verdict, progress, accuracy and leakage over rounds, notices, and what each attacker knew."""

import json
from collections import Counter
from dataclasses import asdict
from typing import Any

from fedgauge.attacks.limits import noise_is_known
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.attacks.plan import ERROR_LIMITS, describe
from fedgauge.server.store import run_files
from fedgauge.server.views import formatting, tables
from fedgauge.server.views.figures import (
    LIMIT_NAMES,
    canaries_figure,
    in_json,
    membership_figure,
    rounds_figures,
    success_figure,
)
from fedgauge.server.views.formatting import decibel, finite, rounded
from fedgauge.server.views.leakage import Leak, as_rate
from fedgauge.server.views.membership import members_sentences
from fedgauge.server.views.notices import notices
from fedgauge.server.views.outcomes import attacked_on, device_use
from fedgauge.server.views.participation import app_clients
from fedgauge.server.views.privacy import canaries, privacy
from fedgauge.server.views.reading import Reading, jobs_of_run
from fedgauge.server.views.roles import is_attack, is_baseline, role_of
from fedgauge.server.views.server_attacks import server_attack_effects
from fedgauge.server.views.strength import Limits, error_in_db, final_accuracy, mean_of
from fedgauge.server.views.verdict import ungraded_reason, verdict_of

REASONS = 40  # the most rows in a table of reasons
LIMIT_STATES = {
    "pending": "The limits of this chain have not been computed yet, or do not apply to this network.",
    "none": "No limit is drawn: without noise in the chain, rounding is the only limit if the chain's Jacobian has full column "
    "rank.",
    "unknown": "No limit is drawn: the density of this chain's randomness is not known in closed form.",
}


def overview(reading: Reading) -> dict[str, Any]:
    """Everything that page and report show of a run beside its pictures and clients, ready for JSON."""
    found, judged = canaries(reading), verdict_of(reading)
    effects = {}
    if (scenario := reading.built) is not None:
        effects = server_attack_effects(scenario, reading.scores, reading.ledger)
    return {
        "version": reading.version,
        "name": reading.run.name,
        "facts": formatting.scenario_line(reading.tables),
        "state": reading.state,
        "verdict": {"word": judged.word, "sentences": judged.sentences},
        "notices": [notice._asdict() for notice in notices(reading)],
        "server_attacks": [{"name": name, "words": sentence} for name, sentence in effects.items()],
        "training": {
            "round": max(reading.rounds, default=0),
            "rounds": reading.tables["rounds"],
            "accuracy": rounded(final_accuracy(reading.rounds)),
        },
        "app_rounds": in_json(app_rounds(reading)),
        "progress": progress(reading),
        "plan": reading.plan_coverage.to_json(),
        "attacked_on": attacked_on(reading.ledger),
        "figures": {
            "rounds": in_json(rounds_figures(reading)),
            "success": in_json(success_figure(reading)),
            "membership": in_json(membership_figure(reading)),
            "canaries": in_json(canaries_figure(reading)),
        },
        "ungraded": {
            "count": reading.scores.left_ungraded,
            "reason": ungraded_reason(reading.ledger),
            "table": in_json(tables.without_truth(reading.scores, reading.ledger)),
        },
        "membership": {
            "words": " ".join(members_sentences(judged.members, reading.ledger)),
            "table": in_json(tables.membership_tests(reading.scores, reading.order)),
        },
        "summary": summary(reading),
        "limit": limit(reading),
        "privacy": privacy(reading),
        "canaries": {"kind": found.kind, "words": found.words, "table": in_json(tables.canaries_by_round(reading))},
        "knowledge": knowledge(reading),
        "replay": {"verdict": reading.meta.get("replay"), "words": reading.meta.get("replay_detail", "")},
        "participation": participation(reading),
        "measure": asdict(reading.scores.measure),
        "scenario": reading.run.scenario_text(),
        "environment": environment(reading),
    }


def app_rounds(reading: Reading) -> tables.Table:
    """What a user's own app returned in each round, a dash for what was not finite; no rows for other runs."""
    rounds = {
        number: {name: value for name, value in told.items() if value is None or _is_number(value)}
        for number, told in reading.returned
    }
    names = list(dict.fromkeys(name for told in rounds.values() for name in told))
    rows = [
        [str(n), *(formatting.number(finite(told.get(name)), None) for name in names)] for n, told in rounds.items()
    ]
    heads = ("round", *names)
    return tables.Table("What clients and server returned in each round", heads, rows if names else [])


def _is_number(value: object) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


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


def summary(reading: Reading) -> list[dict[str, Any]]:
    """Each attack, limit and baseline over all rounds, in the main metric and in the others.

    of_error: its mean squared error as a PSNR, which is all that there is of a limit.
    """
    pooled, rows = {metric: reading.pooled(metric) for metric in reading.metrics}, []
    for attack in reading.order:
        leaks = {m: by_attack[attack] for m, by_attack in pooled.items() if attack in by_attack}
        leak = leaks.get("mse" if attack in ERROR_LIMITS else reading.scores.measure.metric)
        if leak is None or (is_baseline(attack) and not leak.n):
            continue  # it tells members, or is of an attack that gave nothing
        labels, identified, kind = leaks.get("label_accuracy"), leaks.get("identified"), role_of(attack)
        rows.append(
            {
                "attack": attack,
                "kind": kind,
                "n": leak.n,
                **(dict.fromkeys(numbers_of(leak)) if kind == "limit" else numbers_of(leak)),
                "of_error": rounded(error_in_db(leaks.get("mse"))),
                "others": {metric: rounded(other.mean) for metric, other in leaks.items()},
                "identified": rate_in_numbers(identified),
                "labels": rounded(mean_of(labels)),
                "failed": ", ".join(f"{n} {formatting.status_words(status)}" for status, n in leak.failed.items()),
                "ungraded": leak.ungraded,
            }
        )
    return rows


def numbers_of(leak: Leak) -> dict[str, Any]:
    """A Leak's mean with its interval, its median and its worst case."""
    low, high = formatting.interval_label(leak)
    found = {"mean": leak.mean, "low": low, "high": high, "median": leak.median, "worst": leak.best}
    more = {"interval": formatting.interval_words(leak), "exact": formatting.is_exact(leak.best)}
    return {**{key: rounded(value) for key, value in found.items()}, **more}


def rate_in_numbers(leak: Leak | None) -> dict[str, Any] | None:
    """A Leak of a rate with its interval; None if there is none."""
    if leak is None or not leak.n:
        return None
    rate = as_rate(leak)
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
        side = (
            f"{decibel(abs(limits.gap))} dB {'below' if limits.gap >= 0 else 'above'} the estimate"
            if limits.gap
            else ""
        )
        words.append(f"The attack of the least error gets {decibel(limits.reached)} dB{side and f', {side}'}.")
    return " ".join(words)


def knowledge(reading: Reading) -> dict[str, Any]:
    """What all attackers knew, and the knowledge card of each attack; baselines and limits last."""
    real = [row["parts"] for row in reading.attacks if is_attack(row["name"])]
    shared = [part for part in (real[0] if real else []) if all(part in other for other in real)]
    planned = reading.ledger.planned()
    cards = [
        {
            "name": row["name"],
            "kind": role_of(row["name"]),
            "component": describe(planned[row["name"]].table),
            "parts": row["parts"],
            "own": [part for part in row["parts"] if part not in shared],
            "seed": row["seed"],
        }
        for row in reading.attacks
    ]
    return {"shared": shared, "cards": sorted(cards, key=lambda c: c["kind"] != "attack")}


def participation(reading: Reading) -> dict[str, Any]:
    """How many replies were accepted, rejected or missing, the reasons, the commonest first, and the clients of an app."""
    totals: Counter[str] = Counter()
    for (_, status), count in reading.participation.items():
        totals[status] += count
    listed = [
        {
            "status": status,
            "reason": reason,
            "count": len(where),
            "where": formatting.listed([f"client {client} in round {round}" for client, round in where], 3),
        }
        for (status, reason), where in sorted(reading.missed.items(), key=lambda item: -len(item[1]))
    ]
    counts = {status: totals[status] for status in ("accepted", "rejected", "missing")}
    clients = [{"client": c.client, "node": c.node, "examples": c.size} for c in app_clients(reading.ledger)]
    return {**counts, "reasons": listed[:REASONS], "more": max(0, len(listed) - REASONS), "clients": clients}


def environment(reading: Reading) -> Any:
    """Versions and hardware of the run; None if they were not recorded."""
    path = reading.run.folder / "environment.json"
    try:
        return json.loads(run_files.read(path, run_files.MOST_VERSIONS)) if run_files.look(path) else None
    except (OSError, ValueError, RecursionError) as error:
        return f"{path.name} cannot be read: {error}"
