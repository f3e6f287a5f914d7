"""The overview: verdict, progress, accuracy and leakage over rounds, notices, and threat-model cards."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedgauge.attacks.base import LIMITS, Role
from fedgauge.attacks.grading.knowledge_card import SEPARATOR
from fedgauge.attacks.modality.base import MainMetric
from fedgauge.attacks.plan import describe
from fedgauge.defenses.accounting import PrivacyStatement
from fedgauge.server.store import run_files
from fedgauge.server.views.figures import (
    Figure,
    membership_figure,
    name_of,
    rounds_figures,
    success_figure,
)
from fedgauge.server.views.formatting import decibel, scenario_line
from fedgauge.server.views.gallery import Card, Gallery, Kind, worst_cases
from fedgauge.server.views.leak_tables import membership_table, rounds_table, summary_table
from fedgauge.server.views.notices import Notice, notices
from fedgauge.server.views.outcomes import attacked_on, work_words
from fedgauge.server.views.participation import app_clients_table, participation
from fedgauge.server.views.privacy import canaries, spent_in
from fedgauge.server.views.server_attacks import server_attack_effects
from fedgauge.server.views.snapshot import RunSnapshot
from fedgauge.server.views.strength import Limits, final_accuracy
from fedgauge.server.views.tables import Column, Table
from fedgauge.server.views.verdict import ungraded_reason, verdict_of

REASONS = 40  # the most rows in a table of reasons
WORST = 3  # examples under the verdict


@dataclass(frozen=True)
class RunProgress:
    """State of training and attacks; words: counts of attacks and, while the run works, the time left."""

    round: int
    rounds: int
    accuracy: float | None
    done: int
    failed: int
    expected: int
    words: str


@dataclass(frozen=True)
class KnowledgeCard:
    name: str
    kind: Role
    component: str
    parts: Sequence[str]
    seed: int


@dataclass(frozen=True, eq=False)
class Overview:
    """Content of page and report, except the gallery and the clients' view.

    Args:
        word, sentences: the verdict.
        worst: the best reconstructions.
        ungraded: number of reconstructions without a grade, with its reason in `ungraded_reason`.
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
    by_round: Table
    summary: Table
    reasons: Table
    ungraded: int
    ungraded_reason: str
    membership_table: Table
    canaries: str
    limit: str
    privacy: PrivacyStatement
    cards: Sequence[KnowledgeCard]
    participation: str
    clients: Table
    replay: str
    replay_words: str
    scenario: str
    environment: Any
    attacked_on: str


def overview(reading: RunSnapshot) -> Overview:
    judged, ledger, gallery = verdict_of(reading), reading.ledger, Gallery(reading)
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
        by_round=rounds_table(reading),
        summary=summary_table(reading),
        reasons=_reasons(reading),
        ungraded=reading.scores.left_ungraded,
        ungraded_reason=ungraded_reason(reading),
        membership_table=membership_table(reading),
        canaries=canaries(reading),
        limit=limit(reading),
        privacy=spent_in(reading),
        cards=_cards(reading),
        participation=participation(reading.observations) or ("All updates arrived." if reading.observations else ""),
        clients=app_clients_table(reading.ledger),
        replay=reading.meta.get("replay", ""),
        replay_words=reading.meta.get("replay_detail", ""),
        scenario=run_files.read(reading.run.folder / "scenario.toml").decode(errors="replace"),
        environment=environment(reading),
        attacked_on=attacked_on(ledger),
    )


def progress(reading: RunSnapshot) -> RunProgress:
    jobs, plan = reading.jobs, reading.plan_coverage
    words = work_words(jobs)
    words.insert(1, f"{plan.attacked} of {plan.updates} planned updates attacked")
    tested = max(reading.rounds, default=0), reading.tables["rounds"], final_accuracy(reading.rounds)
    return RunProgress(*tested, jobs.progress.done, jobs.progress.failed, jobs.expected, " · ".join(words))


def limit(reading: RunSnapshot) -> str:
    errors = reading.pooled("mse") if "mse" in reading.metrics else {}
    known = {name for name, leak in errors.items() if leak.role in LIMITS and leak.n}
    drawn = [row for row in reading.attacks if row["name"] in known]
    if not drawn:
        return "No limit on reconstruction is drawn: a limit needs noise of a known density in the chain."
    found = Limits.of(errors)
    values = {
        "an estimate that an attack may pass": found.estimate,
        "no attack gets above": found.bound,
        "the attack of the least error": found.reached,
    }
    limits = [f"{name} {decibel(value)} dB" for name, value in values.items() if value is not None]
    cards = [f"{name_of(row['name'], row['role'])}: {'; '.join(_parts(row))}." for row in drawn]
    return " ".join([f"Limits of the mean squared error, as PSNRs of that mean: {'; '.join(limits)}.", *cards])


def _parts(row: Any) -> list[str]:
    return [*row["agreed"].split(SEPARATOR), *filter(None, (row["training"], row["grading"]))]


def _cards(reading: RunSnapshot) -> list[KnowledgeCard]:
    """Return the threat-model card of each attack; baselines and limits last."""
    planned, cards = reading.ledger.planned(), []
    for row in reading.attacks:
        name = row["name"]
        cards.append(KnowledgeCard(name, row["role"], describe(planned[name].table), _parts(row), row["seed"]))
    return sorted(cards, key=lambda card: card.kind != "attack")


def _reasons(reading: RunSnapshot) -> Table:
    columns = [Column("attack", "attack"), Column("times", "times", "count"), Column("reason", "reason")]
    rows = [(row["attack"], row["jobs"], row["reason"]) for row in reading.ledger.reasons()]
    return Table("Reasons that attacks gave", columns, rows[:REASONS])


def environment(reading: RunSnapshot) -> Any:
    """Return versions and hardware of the run; None if they were not recorded."""
    path = reading.run.folder / "environment.json"
    try:
        return json.loads(run_files.read(path, run_files.MOST_VERSIONS)) if run_files.look(path) else None
    except (OSError, ValueError, RecursionError) as error:
        return f"{path.name} cannot be read: {error}"
