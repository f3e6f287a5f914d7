"""The overview: verdict, progress, accuracy and leakage over rounds, notices, and what each attacker knew."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedgauge.attacks.grading.knowledge_card import SEPARATOR
from fedgauge.attacks.limits import noise_is_known
from fedgauge.attacks.modality.base import MainMetric
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.attacks.plan import ERROR_LIMITS, describe
from fedgauge.defenses.accounting import PrivacyStatement
from fedgauge.server.store import run_files
from fedgauge.server.views.figures import (
    LIMIT_NAMES,
    Figure,
    canaries_figure,
    membership_figure,
    rounds_figures,
    success_figure,
)
from fedgauge.server.views.formatting import decibel, finite, listed, many, scenario_line
from fedgauge.server.views.gallery import Card, Gallery, Kind, worst_cases
from fedgauge.server.views.leak_tables import membership_table, rounds_table, summary_table, without_truth
from fedgauge.server.views.membership import members_sentences
from fedgauge.server.views.notices import Notice, notices
from fedgauge.server.views.outcomes import attacked_on, device_use
from fedgauge.server.views.participation import app_clients
from fedgauge.server.views.privacy import canaries, spent_in
from fedgauge.server.views.reading import Reading
from fedgauge.server.views.roles import Role, is_attack, role_of
from fedgauge.server.views.server_attacks import server_attack_effects
from fedgauge.server.views.strength import Limits, final_accuracy
from fedgauge.server.views.tables import Cell, Column, Table
from fedgauge.server.views.verdict import ungraded_reason, verdict_of

REASONS = 40  # the most rows in a table of reasons
WORST = 3  # examples under the verdict


@dataclass(frozen=True)
class RunProgress:
    """How far training and attacks are.

    Args:
        words: how many attacks are done and run, and while the run is at work how fast they are and how long the rest will take.
    """

    round: int
    rounds: int
    accuracy: float | None
    done: int
    failed: int
    expected: int
    words: str


@dataclass(frozen=True)
class KnowledgeCard:
    """What an attacker knew.

    Args:
        own: the parts that not all attackers share.
    """

    name: str
    kind: Role
    component: str
    parts: Sequence[str]
    own: Sequence[str]
    seed: int


@dataclass(frozen=True, eq=False)
class Overview:
    """Everything that page and report show of a run beside its pictures and clients.

    Args:
        kind: how examples are shown.
        word, sentences: the verdict; worst: the examples that came back best.
        ungraded: how many reconstructions nobody graded; ungraded_reason: why.
        limit: the limits on all attacks, or why none is drawn.
        shared: what all attackers knew.
        replay, replay_words: the verdict of the replay check, and why.
        environment: versions and hardware; None if they were not recorded.
    """

    name: str
    facts: str
    kind: Kind
    word: str
    sentences: Sequence[str]
    worst: Sequence[Card]
    notices: Sequence[Notice]
    server_attacks: Mapping[str, str]
    progress: RunProgress
    measure: MainMetric
    over_rounds: Sequence[Figure]
    success: Figure | None
    membership_figure: Figure | None
    canaries_figure: Figure | None
    by_round: Table
    summary: Table
    reasons: Table
    ungraded: int
    ungraded_reason: str
    without_truth: Table
    app_rounds: Table
    membership: str
    membership_table: Table
    canaries: str
    canaries_table: Table
    limit: str
    privacy: PrivacyStatement
    shared: Sequence[str]
    cards: Sequence[KnowledgeCard]
    participation: str
    absences: Table
    clients: Table
    replay: str
    replay_words: str
    scenario: str
    environment: Any
    attacked_on: str


def overview(reading: Reading) -> Overview:
    """The overview of a run as read."""
    judged, shown, ledger, gallery = verdict_of(reading), canaries(reading), reading.ledger, Gallery(reading)
    return Overview(
        name=reading.run.name,
        facts=scenario_line(reading.tables),
        kind=gallery.kind,
        worst=worst_cases(gallery, WORST),
        word=judged.word,
        sentences=judged.sentences,
        notices=notices(reading),
        server_attacks=server_attack_effects(reading),
        progress=progress(reading),
        measure=reading.scores.measure,
        over_rounds=rounds_figures(reading),
        success=success_figure(reading),
        membership_figure=membership_figure(reading),
        canaries_figure=canaries_figure(reading),
        by_round=rounds_table(reading),
        summary=summary_table(reading),
        reasons=_reasons(reading),
        ungraded=reading.scores.left_ungraded,
        ungraded_reason=ungraded_reason(reading),
        without_truth=without_truth(reading),
        app_rounds=app_rounds(reading),
        membership=" ".join(members_sentences(judged.members, ledger)),
        membership_table=membership_table(reading),
        canaries=shown.words,
        canaries_table=shown.table,
        limit=limit(reading),
        privacy=spent_in(reading),
        shared=_shared(reading),
        cards=_cards(reading),
        participation=_participation(reading),
        absences=_absences(reading),
        clients=_app_clients(reading),
        replay=reading.meta.get("replay", ""),
        replay_words=reading.meta.get("replay_detail", ""),
        scenario=reading.run.scenario_text(),
        environment=environment(reading),
        attacked_on=attacked_on(ledger),
    )


def app_rounds(reading: Reading) -> Table:
    """What a user's own app returned in each round; no rows for other runs."""
    rounds = {
        number: {name: value for name, value in told.items() if value is None or _is_number(value)}
        for number, told in reading.returned
    }
    names = list(dict.fromkeys(name for told in rounds.values() for name in told))
    columns = [Column("round", "round", "count"), *(Column(name, name, "number") for name in names)]
    rows: list[list[Cell]] = [[n, *(finite(told.get(name)) for name in names)] for n, told in rounds.items()]
    return Table("What clients and server returned in each round", columns, rows if names else [])


def _is_number(value: object) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def progress(reading: Reading) -> RunProgress:
    """How many jobs have ended, how fast they go, and how long the rest will take."""
    jobs, plan, of = reading.jobs, reading.plan_coverage, reading.jobs.progress
    words = [jobs.words, f"{plan.attacked} of {plan.updates} planned updates attacked"]
    words += [f"{n} {what}" for n, what in ((of.leased, "running"), (of.queued, "waiting")) if n]
    if reading.state in ("training", "attacking"):
        workers = sum(use.workers for use in reading.devices) or reading.tables.get("audit", {}).get("workers", 1)
        words += filter(None, (many(workers, "worker"), device_use(reading.devices)))
        words += [f"{60 * jobs.pace:.0f} attacks a minute"] if jobs.pace else []
        words += [] if jobs.seconds_left is None else [f"about {jobs.seconds_left / 60:.1f} min left"]
    tested = max(reading.rounds, default=0), reading.tables["rounds"], final_accuracy(reading.rounds)
    return RunProgress(*tested, of.done, of.failed, jobs.expected, " · ".join(words))


def limit(reading: Reading) -> str:
    """The limits on all attacks and what their knowledge cards say, or why none is drawn."""
    planned = [row for row in reading.attacks if row["name"] in ERROR_LIMITS]
    errors = reading.pooled("mse") if "mse" in reading.metrics else {}
    drawn = [row for row in planned if row["name"] in errors and errors[row["name"]].n]
    if not drawn:
        return _without_limit(reading, bool(planned))
    found = Limits.of(errors)
    values = {
        "a Gaussian prior of each class, labels known (an estimate that an attack may pass)": found.estimate,
        "no attack gets above": found.bound,
        "the attack of the least error": found.reached,
    }
    told = [f"{name} {decibel(value)} dB" for name, value in values.items() if value is not None]
    cards = [f"{LIMIT_NAMES[row['name']]}: {'; '.join(_parts(row))}." for row in drawn]
    return " ".join([f"Limits of the mean squared error, as PSNRs of that mean: {'; '.join(told)}.", *cards])


def _without_limit(reading: Reading, planned: bool) -> str:
    """Why a run has no limit."""
    density = None
    if not planned and (scenario := reading.built) is not None:
        federation = scenario.federation
        planned = bool(modality_of(federation.shards.dataset).limits) and noise_is_known(federation)
        density = federation.chain.update_distribution
    if planned:
        return "The limits of this chain have not been computed yet, or do not apply to this network."
    if density is not None and not density.noisy:
        return "No limit is drawn: without noise in the chain, rounding is the only limit."
    return "No limit is drawn: the density of this chain's randomness is not known in closed form."


def _parts(row: Any) -> list[str]:
    """An attack's card in parts: what was agreed, then what was found, whose sentences may hold any words."""
    return [*row["agreed"].split(SEPARATOR), *filter(None, (row["training"], row["grading"]))]


def _shared(reading: Reading) -> list[str]:
    """What all attackers knew."""
    real = [_parts(row) for row in reading.attacks if is_attack(row["name"])]
    return [part for part in (real[0] if real else []) if all(part in other for other in real)]


def _cards(reading: Reading) -> list[KnowledgeCard]:
    """The knowledge card of each attack; baselines and limits last."""
    shared, planned, cards = _shared(reading), reading.ledger.planned(), []
    for row in reading.attacks:
        parts, name = _parts(row), row["name"]
        own = [part for part in parts if part not in shared]
        cards.append(KnowledgeCard(name, role_of(name), describe(planned[name].table), parts, own, row["seed"]))
    return sorted(cards, key=lambda card: card.kind != "attack")


def _reasons(reading: Reading) -> Table:
    """Why attacks gave nothing."""
    columns = [Column("attack", "attack"), Column("times", "times", "count"), Column("reason", "reason")]
    rows = [(row["attack"], row["jobs"], row["reason"]) for row in reading.ledger.reasons()]
    return Table("Reasons that attacks gave", columns, rows[:REASONS])


def _participation(reading: Reading) -> str:
    """How many replies came, in a sentence; empty before the first."""
    totals = Counter(o["status"] for o in reading.observations)
    counts = [f"{totals[status]} {status}" for status in ("accepted", "rejected", "missing")]
    rounds = len({o["round"] for o in reading.observations})
    return f"Updates in {rounds} round{'s' if rounds != 1 else ''}: {', '.join(counts)}." if rounds else ""


def _absences(reading: Reading) -> Table:
    """Why replies were not accepted, the commonest first."""
    missed: dict[tuple[str, str], list[str]] = {}
    for o in reading.observations:
        if o["status"] != "accepted":
            where = f"client {o['client']} in round {o['round']}"
            missed.setdefault((o["status"], o["reason"]), []).append(where)
    columns = [
        Column("status", "status"),
        Column("times", "times", "count"),
        Column("where", "where"),
        Column("reason", "reason"),
    ]
    common = sorted(missed.items(), key=lambda item: -len(item[1]))[:REASONS]
    rows = [(status, len(where), listed(where, 3), reason) for (status, reason), where in common]
    return Table("Why replies were not accepted", columns, rows)


def _app_clients(reading: Reading) -> Table:
    """The clients of a user's own app."""
    columns = [
        Column("client", "client", "count"),
        Column("node", "Flower's node"),
        Column("size", "examples reported"),
    ]
    rows = [(c.client, c.node, c.size) for c in app_clients(reading.ledger)]
    return Table("Clients, numbered as Flower's nodes came, not by partition", columns, rows)


def environment(reading: Reading) -> Any:
    """Versions and hardware of the run; None if they were not recorded."""
    path = reading.run.folder / "environment.json"
    try:
        return json.loads(run_files.read(path, run_files.MOST_VERSIONS)) if run_files.look(path) else None
    except (OSError, ValueError, RecursionError) as error:
        return f"{path.name} cannot be read: {error}"
