"""Grading by the clients: what was reconstructed of a deployment's clients goes back to them, and comes home as numbers.

One query a client and round, once all its attacks have ended: each may cost the start of a process there, and each answer is a
measurement of private images, of which an owner gives few.
"""

import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fedgauge.attacks.grading.scores import WHOLE_BATCH, ScoreRecord, has_images
from fedgauge.attacks.plan import BASELINES
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_rows import UNGRADED, Ungraded, sanitised
from fedgauge.server.store.run import Run
from fedgauge.server.store.tape import TapeError

STARTED = "flower_run_from_round_"  # in the ledger's meta: Flower's number of the run that trained from that round on
GRACE = 75.0  # seconds for which an attack service may be away, being started again: joining Ray may take a minute
ANSWERING = 60.0  # seconds for which training waits for answers; who is silent is asked again in the end only
NOTHING = "nothing to grade: the attack left no images"
_SUFFIX = re.compile(r"; (graded by the clients|not graded).*", re.DOTALL)


@dataclass(frozen=True)
class GradingReply:
    """What a client says of its questions.

    Args:
        psnr: by question, of each image.
        refused: by question, why there is none.
    """

    precision: float = math.nan
    psnr: Mapping[str, Sequence[float]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    otherwise: str = "it did not answer this question"

    def reason(self, name: str) -> str:
        """Why there is no score; empty where there is one."""
        return "" if name in self.psnr else self.refused.get(name, self.otherwise)


class Grader:
    """Asks the clients of a deployment, and writes what they say into the ledger.

    Args:
        clients: by node id, which client it is.
        timeout: seconds that clients have to answer, and at the end the attack service to be done.
        grace: default GRACE.
    """

    def __init__(
        self,
        run: Run,
        ledger: Ledger,
        grid: Grid,
        clients: Mapping[int, int],
        timeout: float,
        grace: float | None = None,
    ) -> None:
        self.run = run
        self.ledger = ledger
        self.grid = grid
        self.clients = clients
        self.timeout = timeout
        self.grace = GRACE if grace is None else grace
        self._silent: set[int] = (
            set()
        )  # who let a question pass: another wait for each of its rounds would stall everybody
        self.starts = {int(k.removeprefix(STARTED)): v for k, v in ledger.meta().items() if k.startswith(STARTED)}

    def ask(self) -> None:
        """Have the rounds graded whose attacks have all ended; a client that is away is asked again."""
        self._grade([job for job in self.ledger.ungraded() if not job.open], final=False)

    def finish(self) -> None:
        """After the last round: wait for a living attack service, as long as its patience lasts, and have the rest graded."""
        deadline = time.monotonic() + self.timeout
        alive = time.monotonic()
        while self._waiting() and time.monotonic() < deadline:
            if self.run.holder("audit") is not None:
                alive = time.monotonic()
            elif time.monotonic() - alive >= self.grace:
                break
            self.ask()
            time.sleep(min(0.5, self.timeout))
        self._grade(self.ledger.ungraded(), final=True)

    def _waiting(self) -> int:
        progress = self.ledger.progress()
        return progress.queued + progress.leased

    def _grade(self, jobs: Sequence[Ungraded], final: bool) -> None:
        if final:
            self._silent.clear()  # each has one more chance
        for round in sorted({job.round for job in jobs}):
            own = [job for job in jobs if job.round == round]
            guesses = {job.id: self._guess(job) for job in own}
            for job in own:
                if guesses[job.id] is None:
                    self.ledger.grade(job.id, [], NOTHING)
            asked = [(job, x) for job in own if (x := guesses[job.id]) is not None]
            replies = self._replies(round, _questions(asked), self.timeout if final else min(self.timeout, ANSWERING))
            for job, x in asked:
                self._settle(job, len(x), replies, final)
        if jobs:
            self._tell()

    def _guess(self, job: Ungraded) -> Tensor | None:
        try:
            x = self.run.read_reconstruction(job.round, job.client, job.attack).get("x")
        except TapeError:
            return None
        return x if has_images(x) else None

    def _replies(
        self, round: int, questions: Mapping[int, Mapping[str, Tensor]], patience: float
    ) -> dict[int, GradingReply]:
        """What the clients answer that are there, and have let no question pass."""
        there = {self.clients[node]: node for node in self.grid.get_node_ids() if node in self.clients}
        there = {client: node for client, node in there.items() if client not in self._silent}
        messages = [
            _message(round, self._flower_run(round), there[c], asked) for c, asked in questions.items() if c in there
        ]
        sent = {
            there[c]: (c, {name: len(x) for name, x in asked.items()}) for c, asked in questions.items() if c in there
        }
        found: dict[int, GradingReply] = {}
        for answer in self.grid.send_and_receive(messages, timeout=patience) if messages else ():
            if answer.metadata.src_node_id in sent:  # a dead node's error comes from the SuperLink
                client, sizes = sent[answer.metadata.src_node_id]
                found[client] = read(answer, sizes)
        self._silent |= {client for client, _ in sent.values()} - found.keys()
        return found

    def _flower_run(self, round: int) -> str:
        """In which of Flower's runs a round was trained."""
        return self.starts[max(start for start in self.starts if start <= round)]

    def _settle(self, job: Ungraded, size: int, replies: Mapping[int, GradingReply], final: bool) -> None:
        """Write a job's scores, once there are answers on it, or none are to come."""
        attack, other = job.attack, _other(job)
        about = {job.client: attack} | ({} if other is None else {other: f"wrong_client({attack})"})
        if not final and any(client not in replies for client in about):
            return
        rows: list[ScoreRecord] = []
        for client, name in about.items():
            reply = replies.get(client, GradingReply(otherwise="it was not there"))
            values: Iterable[tuple[int, float | None]] = enumerate(reply.psnr.get(name, ()))
            status = job.status
            if reply.reason(name):
                values, status = [(WHOLE_BATCH, None)], UNGRADED
            rows += [ScoreRecord(job.round, client, name, i, "psnr", v, status, job.seconds) for i, v in values]
        reply = replies.get(job.client, GradingReply(otherwise="it was not there"))
        reason = reply.reason(attack)
        words = f"not graded: {reason}" if reason else f"graded to {reply.precision:g} dB"
        self.ledger.grade(job.id, rows, words)

    def _tell(self) -> None:
        """Who graded, on the knowledge cards and of the whole run."""
        found: dict[str, list[Any]] = defaultdict(list)
        for row in self.ledger.graded():
            if row["words"] is not None and row["words"] != NOTHING:
                found[row["attack"]].append(row)
        cards = {row["name"]: row["knowledge"] for row in self.ledger.attacks()}
        self.ledger.set_cards(
            {name: _SUFFIX.sub("", cards[name]) + "; " + grading_summary(rows) for name, rows in found.items()}
        )
        self.ledger.set_meta(
            grading=grading_summary([row for rows in found.values() for row in rows]) if found else "not graded"
        )


def grading_summary(rows: Sequence[Any]) -> str:
    """In a few words who graded some jobs, to which precision, and why the others are not.

    Args:
        rows: as Ledger.graded gives them.
    """
    graded = sorted({row["words"].removeprefix("graded to ") for row in rows if row["words"].startswith("graded")})
    rest = [row for row in rows if row["words"].startswith("not graded")]
    parts = [f"graded by the clients, to {' and '.join(graded)}"] if graded else []
    if rest:
        count, all_of_them = sum(row["jobs"] for row in rest), sum(row["jobs"] for row in rows)
        reasons = sorted({row["words"].partition(": ")[2] for row in rest})
        share = f" ({count} of {all_of_them})" if graded else ""
        more = f", and {len(reasons) - 2} more reasons" if len(reasons) > 2 else ""
        parts.append(f"not graded{share}: {', '.join(reasons[:2])}{more}")
    return "; ".join(parts)


def _other(job: Ungraded) -> int | None:
    """The client that a reconstruction is graded against as a baseline."""
    return None if job.attack in BASELINES else job.other


def _questions(jobs: Sequence[tuple[Ungraded, Tensor]]) -> dict[int, dict[str, Tensor]]:
    """By client; the attacks first, then their floors: an owner may answer fewer."""
    found: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for baselines in (False, True):
        for job, x in jobs:
            if (job.attack in BASELINES) == baselines:
                found[job.client][job.attack] = x
    for job, x in jobs:
        if (other := _other(job)) is not None:
            found[other][f"wrong_client({job.attack})"] = x
    return found


def _message(round: int, run: str, node: int, asked: Mapping[str, Tensor]) -> Message:
    images = ArrayRecord({name: x.float().clamp(0, 1).contiguous() for name, x in asked.items()})
    content = RecordDict({"images": images, "grade": ConfigRecord({"server-round": round, "run": run})})
    return Message(content, dst_node_id=node, message_type="query.grade")


def read(answer: Message, sizes: Mapping[str, int]) -> GradingReply:
    """A client's answer, of which nothing is taken on trust.

    Args:
        sizes: by question, how many images were asked about.
    """
    if answer.has_error():
        return GradingReply(otherwise=sanitised(answer.error.reason) or "it failed")
    records = answer.content
    precision = records.config_records.get("grading", ConfigRecord()).get("precision")
    if not isinstance(precision, float) or not 0 < precision < math.inf or "psnr" not in records.metric_records:
        return GradingReply(otherwise="its answer is malformed")
    told = records.metric_records["psnr"]
    refused = {k: sanitised(v) for k, v in records.config_records.get("refused", ConfigRecord()).items() if k in sizes}
    psnr: dict[str, Sequence[float]] = {}
    for name in sizes.keys() & told.keys():
        if (values := _decibels(told[name], sizes[name])) is not None:
            psnr[name] = values
        else:
            refused[name] = "its answer is malformed"
    return GradingReply(precision, psnr, refused)


def _decibels(value: object, size: int) -> list[float] | None:
    if not isinstance(value, list) or len(value) != size:
        return None
    numbers = [float(v) for v in value if isinstance(v, int | float) and 0 <= v <= 100]
    return numbers if len(numbers) == size else None
