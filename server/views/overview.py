"""The overview: verdict, progress, accuracy and leakage over rounds, notices, and threat-model cards."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedgauge.attacks.base import Role
from fedgauge.attacks.grading.knowledge_card import SEPARATOR
from fedgauge.attacks.plan import describe
from fedgauge.server.store import run_files
from fedgauge.server.views.figures import membership_figure, rounds_figures, success_figure
from fedgauge.server.views.formatting import scenario_line
from fedgauge.server.views.gallery import Gallery, worst_cases
from fedgauge.server.views.leak_tables import membership_table, rounds_table, summary_table
from fedgauge.server.views.notices import notices
from fedgauge.server.views.outcomes import attacked_on
from fedgauge.server.views.participation import app_clients_table, participation
from fedgauge.server.views.privacy import canaries, spent_in
from fedgauge.server.views.server_attacks import server_attack_effects
from fedgauge.server.views.snapshot import RunSnapshot
from fedgauge.server.views.strength import final_accuracy
from fedgauge.server.views.tables import Column, Table
from fedgauge.server.views.verdict import ungraded_reason, verdict_of

REASONS = 40  # the most rows in a table of reasons
WORST = 3  # examples under the verdict


class RunProgress:
    """State of training and attacks; words: counts of attacks and, while the run works, the time left."""

    def __init__(self, reading: RunSnapshot) -> None:
        jobs, plan = reading.jobs, reading.plan_coverage
        self.round, self.rounds = max(reading.rounds, default=0), reading.tables["rounds"]
        self.accuracy, self.utility = final_accuracy(reading.rounds), reading.scores.label_kind.utility
        self.done, self.failed, self.expected = jobs.done, jobs.failed, jobs.expected
        attacked = f"{plan.attacked} of {plan.updates} planned updates attacked"
        self.words = " · ".join([jobs.words, attacked, *jobs.work[1:]])


class KnowledgeCard(NamedTuple):
    name: str
    kind: Role
    component: str
    parts: Sequence[str]
    seed: int


class Overview:
    """Content of page and report, except the gallery and the clients' view."""

    def __init__(self, reading: RunSnapshot) -> None:
        judged, gallery = verdict_of(reading), Gallery(reading)
        self.name, self.facts, self.kind = reading.run.name, scenario_line(reading.tables), gallery.kind
        self.word, self.sentences = judged.word, judged.sentences
        self.worst = worst_cases(gallery, WORST)
        self.notices = notices(reading)
        self.server_attacks = server_attack_effects(reading)
        self.progress = RunProgress(reading)
        self.measure = reading.scores.measure
        self.over_rounds = rounds_figures(reading)
        self.success = success_figure(reading)
        self.membership_figure = membership_figure(reading)
        self.by_round = rounds_table(reading)
        self.summary = summary_table(reading)
        self.reasons = _reasons(reading)
        self.ungraded, self.ungraded_reason = reading.scores.left_ungraded, ungraded_reason(reading)
        self.membership_table = membership_table(reading)
        self.canaries = canaries(reading)
        self.privacy = spent_in(reading)
        self.cards = _cards(reading)
        everybody = "All updates arrived." if reading.observations else ""
        self.participation = participation(reading.observations) or everybody
        self.clients = app_clients_table(reading.ledger)
        self.replay, self.replay_words = (reading.meta.get(key, "") for key in ("replay", "replay_detail"))
        self.scenario = run_files.read(reading.run.folder / "scenario.toml").decode(errors="replace")
        self.environment = environment(reading)
        self.attacked_on = attacked_on(reading.ledger)


def _parts(row: Any) -> list[str]:
    return [*row["agreed"].split(SEPARATOR), *filter(None, (row["training"], row["grading"]))]


def _cards(reading: RunSnapshot) -> list[KnowledgeCard]:
    tables = {name: planned.table for name, planned in reading.ledger.planned().items()}
    rows = sorted(reading.attacks, key=lambda row: bool(row["role"] != "attack"))
    return [KnowledgeCard(r["name"], r["role"], describe(tables[r["name"]]), _parts(r), r["seed"]) for r in rows]


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
