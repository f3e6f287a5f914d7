"""Grading in a deployment: each client compares reconstructions with its own data and returns numbers only.

Each client gets one query per round, once all attacks on the round have ended. A query may start a process there, and each
answer is a measurement of private images, and an owner allows few.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeGuard

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fedgauge.attacks.score_rows import WHOLE_BATCH, ScoreRecord, came_back, wrong_client
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import STARTED, UNGRADED, FinishedJob, sanitised
from fedgauge.server.store.run import Run
from fedgauge.server.store.tape import TapeError

GRACE = 75.0  # seconds that an attack service may be away while it restarts: joining Ray may take a minute
ANSWERING = 60.0  # seconds that training waits for answers; a silent client is asked again only at the end
NOTHING = "nothing to grade: the attack left no images"


@dataclass(frozen=True)
class GradingReply:
    """A client's answer to its questions.

    Args:
        precision: dB, to which it rounds.
        psnr: by question, the PSNR of each image.
        refused: by question, why there is no PSNR.
        otherwise: the reason for questions that are in neither.
    """

    precision: float = math.nan
    psnr: Mapping[str, Sequence[float]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    otherwise: str = "it did not answer this question"

    def reason(self, name: str) -> str:
        """Return why a question has no score; empty if it has one."""
        return "" if name in self.psnr else self.refused.get(name, self.otherwise)


@dataclass(eq=False)
class ClientGrader:
    """Asks a deployment's clients for grades, and writes their answers into the ledger.

    Args:
        clients: client numbers by node id.
        timeout: seconds that clients have to answer, and that the attack service has to finish at the end.
    """

    run: Run
    ledger: Ledger
    grid: Grid
    clients: Mapping[int, int]
    timeout: float
    # clients that left a question unanswered: waiting for them in every round would delay all others
    _silent: set[int] = field(default_factory=set)

    def ask(self) -> None:
        """Ask for the rounds with all attacks ended; a client that is not connected is asked again later."""
        self._grade([job for job in self.ledger.ungraded() if not job.open], final=False)

    def finish(self) -> None:
        """After the last round: wait for a running attack service, at most `timeout` seconds, and ask for the rest."""
        deadline = time.monotonic() + self.timeout
        alive = time.monotonic()
        while self.ledger.progress().waiting and time.monotonic() < deadline:
            if self.run.at_work("audit"):
                alive = time.monotonic()
            elif time.monotonic() - alive >= GRACE:
                break
            self.ask()
            time.sleep(min(0.5, self.timeout))
        self._grade(self.ledger.ungraded(), final=True)

    def _grade(self, jobs: Sequence[FinishedJob], final: bool) -> None:
        if final:
            self._silent.clear()  # each gets one more chance
        for round in sorted({job.round for job in jobs}):
            own = [job for job in jobs if job.round == round]
            guesses = {job.id: self._guess(job) for job in own}
            for job in own:
                if guesses[job.id] is None:
                    self.ledger.grade(job.id, [], NOTHING)
            asked = [(job, x) for job in own if (x := guesses[job.id]) is not None]
            replies = self._replies(round, _questions(asked), self.timeout if final else min(self.timeout, ANSWERING))
            for job, _ in asked:
                self._settle(job, replies, final)
        if jobs:
            self._summarise()

    def _guess(self, job: FinishedJob) -> Tensor | None:
        try:
            x = self.run.read_reconstruction(job.round, job.client, job.attack).get("x")
        except TapeError:
            return None
        return x if came_back(x) else None

    def _replies(
        self, round: int, questions: Mapping[int, Mapping[str, Tensor]], patience: float
    ) -> dict[int, GradingReply]:
        """The answers of the clients that are connected and have left no question unanswered."""
        connected = {self.clients[node]: node for node in self.grid.get_node_ids() if node in self.clients}
        sent = {connected[c]: c for c in questions if c in connected and c not in self._silent}
        messages = [_message(round, self._flower_run(round), node, questions[c]) for node, c in sent.items()]
        answers = list(self.grid.send_and_receive(messages, timeout=patience)) if messages else []
        replies: dict[int, GradingReply] = {}
        for answer in sorted(answers, key=Message.has_error):  # a dead node's error comes from the SuperLink
            client = sent.get(answer.metadata.src_node_id)
            if client is not None and client not in replies:
                replies[client] = read(answer, {name: len(x) for name, x in questions[client].items()})
        self._silent |= set(sent.values()) - replies.keys()
        return replies

    def _flower_run(self, round: int) -> str:
        starts = {int(k.removeprefix(STARTED)): v for k, v in self.ledger.meta().items() if k.startswith(STARTED)}
        return starts[max(start for start in starts if start <= round)]

    def _settle(self, job: FinishedJob, replies: Mapping[int, GradingReply], final: bool) -> None:
        """Write a job's scores once its answers have come, or no more can come."""
        graders = {job.client: job.attack} | ({} if job.other is None else {job.other: wrong_client(job.attack)})
        if not final and not replies.keys() >= graders.keys():
            return
        away = GradingReply(otherwise="it was not connected")
        rows: list[ScoreRecord] = []
        metric = self.ledger.modality.main.metric
        for client, name in graders.items():
            reply = replies.get(client, away)
            values: Iterable[tuple[int, float | None]] = enumerate(reply.psnr.get(name, ()))
            status = job.status
            if reply.reason(name):
                values, status = [(WHOLE_BATCH, None)], UNGRADED
            rows += [ScoreRecord(job.round, client, name, i, metric, v, status, job.seconds) for i, v in values]
        reply = replies.get(job.client, away)
        reason = reply.reason(job.attack)
        self.ledger.grade(job.id, rows, reason, None if reason else reply.precision)

    def _summarise(self) -> None:
        """Write who graded, for each attack and for the whole run."""
        rows = [row for row in self.ledger.graded() if row["reason"] not in (None, NOTHING)]
        of_attack = groupby(rows, key=lambda row: row["attack"])  # they are in the attacks' order
        self.ledger.describe("grading", {name: grading_summary(list(own)) for name, own in of_attack})
        self.ledger.set_meta(grading=grading_summary(rows) or "not graded", ungraded=ungraded_reasons(rows))


def grading_summary(rows: Sequence[Any]) -> str:
    """Return who graded some jobs (rows of `Ledger.graded`), their precision, and why others have no grade, in one phrase."""
    precisions = sorted({f"{row['graded_to']:g} dB" for row in rows if not row["reason"]})
    missing = sum(row["jobs"] for row in rows if row["reason"])
    parts = [f"graded by the clients, to {' and '.join(precisions)}"] if precisions else []
    if missing:
        share = f" ({missing} of {sum(row['jobs'] for row in rows)})" if precisions else ""
        parts.append(f"not graded{share}: {ungraded_reasons(rows)}")
    return "; ".join(parts)


def ungraded_reasons(rows: Sequence[Any]) -> str:
    """The first reasons why some jobs have no grade; empty if all have one."""
    return ", ".join(sorted({row["reason"] for row in rows if row["reason"]})[:2])


def _questions(jobs: Sequence[tuple[FinishedJob, Tensor]]) -> dict[int, dict[str, Tensor]]:
    questions: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for job, x in jobs:
        questions[job.client][job.attack] = x
    for job, x in jobs:
        if job.other is not None:
            questions[job.other][wrong_client(job.attack)] = x
    return questions


def _message(round: int, run: str, node: int, asked: Mapping[str, Tensor]) -> Message:
    images = ArrayRecord({name: x.float().clamp(0, 1).contiguous() for name, x in asked.items()})
    content = RecordDict({"images": images, "grade": ConfigRecord({"server-round": round, "run": run})})
    return Message(content, dst_node_id=node, message_type="query.grade")


def read(answer: Message, sizes: Mapping[str, int]) -> GradingReply:
    """A client's answer, with every value checked.

    Args:
        sizes: by question, how many images it was about.
    """
    if answer.has_error():
        return GradingReply(otherwise=sanitised(answer.error.reason) or "it failed")
    records = answer.content
    precision = records.config_records.get("grading", ConfigRecord()).get("precision")
    if not isinstance(precision, float) or not 0 < precision < math.inf or "psnr" not in records.metric_records:
        return GradingReply(otherwise="its answer is malformed")
    grades = records.metric_records["psnr"]
    said = records.config_records.get("refused", ConfigRecord())
    refused = {k: sanitised(v) or "it gave no reason" for k, v in said.items() if k in sizes}
    psnr = {k: list(map(float, v)) for k, v in grades.items() if k in sizes and _are_decibels(v, sizes[k])}
    malformed = dict.fromkeys(sizes.keys() & grades.keys(), "its answer is malformed")
    return GradingReply(precision, psnr, malformed | refused)


def _are_decibels(values: object, size: int) -> TypeGuard[list[float]]:
    if not isinstance(values, list) or len(values) != size:
        return False
    return all(isinstance(v, int | float) and 0 <= v <= 100 for v in values)
