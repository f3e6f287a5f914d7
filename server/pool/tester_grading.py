"""Grading by a tester who owns the data: finished attacks against the truth that he hands in, long after they ended."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import cast, get_args

from fedgauge.attacks.base import Reconstruction, Status
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.grading.scores import (
    OBJECTIVE,
    Grader,
    ungraded_rows,
    wrong_client,
)
from fedgauge.attacks.plan import LIMITS
from fedgauge.client.components import SpecError
from fedgauge.client.update import Batch
from fedgauge.server.pool.tester_membership import Progress, finished_tests, retest
from fedgauge.server.pool.truth_check import Found, chosen, doubt
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import FinishedJob, Ungraded, comparable
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import TapeError
from fedgauge.server.store.tester_truth import TesterTruth, TruthError
from fedgauge.server.store.uploads import read_observation

CHECKING = 60.0  # seconds after which no further update is checked against its truth
MOST_DOUBTS = 3  # in one sentence
EXAMPLE = "example"  # (B,) in a reconstruction's file: the example of the truth that each was paired with; -1: none
GRADED = "graded against the examples handed in with --truth"
EMPTY_HANDED = ("not_applicable", "diverged")


def grade(
    run: Run,
    ledger: Ledger,
    scenario: Scenario,
    truth: TesterTruth,
    progress: Progress = lambda done, total: None,
    untested: bool = False,
) -> str:
    """Grade every finished reconstruction of which the truth is there, once more if it was graded; returns what was graded.

    Tests of membership are done again, with the truth as the batches.

    Args:
        progress: of the tests of membership.
        untested: only tests of membership that lack a truth.

    Raises:
        TruthError: the truth cannot be read, or is of other examples; nothing is written then.
        RunBusy: an attack service works on this run.
    """
    grader = Auditor(scenario.federation).grader
    nodes = ledger.nodes()
    with run.lock("audit"):
        jobs, tests = comparable(ledger.ungraded(again=True), scenario.protocol), finished_tests(ledger, untested)
        found = {
            key: truth.batch(*key, scenario.federation.shards.dataset, nodes)
            for key in dict.fromkeys(_asked(scenario, [*jobs, *tests]))
        }
        if (jobs or tests) and not any(batch is not None and len(batch.y) for batch in found.values()):
            raise TruthError(f"{truth} has no examples of any attacked update")
        size = scenario.federation.shards.batch_size
        assumed = {job.id: size * len(scenario.protocol.members(job.client, job.round)) for job in jobs}
        notes = Counter(_grade(run, ledger, grader, job, found, assumed[job.id]) for job in jobs)
        graded = notes.pop("", 0)
        every = len(jobs) - notes.pop(None, 0)
        words = f"graded {graded} of {every} reconstructions and baselines against the examples handed in with --truth ({truth})"
        if tests:
            words += (
                f"; {retest(run, ledger, scenario, tests, found, progress)} of {len(tests)} tests of membership done"
            )
        why = ", ".join(sorted(filter(None, notes))[:3])
        if notes:
            words += f"; not graded ({sum(notes.values())} of {every}): {why}"
        ledger.describe("grading", {row["name"]: GRADED for row in ledger.attacks() if row["name"] not in LIMITS})
        doubts = _doubts(run, ledger, scenario, found)
        ledger.set_meta(grading=words, ungraded=why, truth=truth.to_json(), truth_doubts=doubts)
    return words


def regrade(run: Run, ledger: Ledger, scenario: Scenario, progress: Progress = lambda done, total: None) -> None:
    """Grade what has ended since a tester handed in his truth, by that truth; where it cannot be read any more, say so."""
    meta = ledger.meta()
    if "truth" not in meta or not (ledger.ungraded() or finished_tests(ledger, untested=True)):
        return
    truth = TesterTruth.from_json(meta["truth"])
    try:
        grade(run, ledger, scenario, truth.check(), progress, untested=True)
    except (SpecError, OSError) as error:
        why = f"the truth cannot be read any more ({error}): hand it in again with --truth"
        ledger.set_meta(grading=f"what ended since is not graded: {why}", ungraded=why)


def _doubts(run: Run, ledger: Ledger, scenario: Scenario, found: Found) -> str:
    """What speaks against this truth, by the updates that it should give; empty if nothing does."""
    fits, digests = ledger.training_fits is not False, {}
    for o in ledger.observations():
        digests[o["round"], o["client"]] = o["digest"]
    doubts: list[str] = []
    began = time.monotonic()
    try:
        for key in (key for key in chosen(found) if digests.get(key)):
            if time.monotonic() - began > CHECKING:
                break
            seen = read_observation(run, ledger, scenario.federation, *key, digests[key])
            doubts.append(doubt(scenario.federation, seen, found, fits))
    except Exception as error:  # a user's network may raise anything; the grades stand without this check
        doubts.append(f"whether the truth gives the updates was not checked: {type(error).__name__}: {error}")
    return "; ".join([words for words in doubts if words][:MOST_DOUBTS])


def _asked(scenario: Scenario, jobs: Iterable[FinishedJob]) -> Iterator[tuple[int, int]]:
    """The rounds and clients whose examples these jobs need."""
    for job in jobs:
        for client in (job.client, job.other):
            if client is not None:
                yield job.round, client
                yield from ((job.round, member) for member in scenario.protocol.members(client, job.round))


def _grade(
    run: Run, ledger: Ledger, grader: Grader, job: Ungraded, found: Mapping[tuple[int, int], Batch | None], assumed: int
) -> str | None:
    """Write one job's scores, or take those of an earlier truth back; returns why not, None if nothing came back.

    Args:
        assumed: how many examples the attack took the client to have.
    """
    why: str | None = ""
    try:
        tensors = run.read_reconstruction(job.round, job.client, job.attack)
    except TapeError:
        tensors, why = {}, None if job.status in EMPTY_HANDED else "the attack left no file"
    own = found[job.round, job.client]
    status: Status = cast(Status, job.status) if job.status in get_args(Status) else "converged"
    result = Reconstruction.from_tensors(tensors, status, job.seconds)
    if why != "" or own is None or not len(own.y):
        rows = ungraded_rows(job.attack, job.round, job.client, result, assumed, job.other, grader.modality.main.metric)
        ledger.grade(job.id, [row for row in rows if row.metric != OBJECTIVE], None, afresh=True)
        return f"no truth of client {job.client} in round {job.round}" if why == "" else why
    _, rows, example = grader.grade(job.attack, job.round, job.client, result, own)
    other = None if job.other is None else found[job.round, job.other]
    if other is not None and job.other is not None and len(other.y):
        name = wrong_client(job.attack)
        rows += grader.grade(name, job.round, job.other, replace(result, y=None), other)[1]
    if len(example):
        run.write_reconstruction(job.round, job.client, job.attack, {**tensors, EXAMPLE: example})
    ledger.grade(job.id, rows, afresh=True)
    return ""
