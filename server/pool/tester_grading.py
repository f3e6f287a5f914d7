"""Grading by a tester who owns the data: finished reconstructions against the truth that he hands in, long after the attack."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedgauge.attacks.base import Reconstruction, Status
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.grading.scores import Grader, ScoreRecord, has_images, wrong_client
from fedgauge.attacks.plan import BASELINES, LIMITS
from fedgauge.client.update import Batch
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import Ungraded
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import TapeError
from fedgauge.server.store.tester_truth import TesterTruth, TruthError

EXAMPLE = "example"  # (B,) in a reconstruction's file: the example of the truth that each was paired with; -1: none
_GRADED = re.compile(r"(; (not )?graded[^;]*)+")  # what a card says of its grading


def grade(run: Run, ledger: Ledger, scenario: Scenario, truth: TesterTruth) -> str:
    """Grade every finished reconstruction of which the truth is there, once more if it was graded; returns what was graded.

    Raises:
        TruthError: the truth cannot be read, or is of other examples; nothing is written then.
        RunBusy: an attack service works on this run.
    """
    grader = Auditor(scenario.federation).grader
    nodes = ledger.nodes()
    with run.lock("audit"):
        jobs = ledger.ungraded(again=True)
        found = {
            key: truth.batch(*key, scenario.federation.shards.dataset, nodes)
            for key in dict.fromkeys((j.round, c) for j in jobs for c in (j.client, j.other) if c is not None)
        }
        if jobs and not any(batch is not None for batch in found.values()):
            raise TruthError(_no_truth(truth, jobs, nodes))
        notes = Counter(_grade(run, ledger, grader, job, found) for job in jobs)
        graded = notes.pop("", 0)
        words = f"graded {graded} of {len(jobs)} reconstructions and baselines against the truth of a tester ({truth})"
        if notes:
            words += f"; not graded ({sum(notes.values())} of {len(jobs)}): {', '.join(sorted(notes)[:3])}"
        cards = {
            row["name"]: _GRADED.sub("", row["knowledge"]) for row in ledger.attacks() if row["name"] not in LIMITS
        }
        ledger.set_cards({name: f"{card}; graded against the truth of a tester" for name, card in cards.items()})
        ledger.set_meta(grading=words, truth=truth.to_json())
    return words


def _no_truth(truth: TesterTruth, jobs: list[Ungraded], nodes: Mapping[int, str]) -> str:
    first = jobs[0]
    node = f" (node {nodes[first.client]})" if first.client in nodes else ""
    return f"{truth} has no examples of any attacked update, such as client {first.client}{node} in round {first.round}"


def _grade(
    run: Run, ledger: Ledger, grader: Grader, job: Ungraded, found: Mapping[tuple[int, int], Batch | None]
) -> str:
    """Write one job's scores; returns why there are none, or nothing."""
    try:
        tensors = run.read_reconstruction(job.round, job.client, job.attack)
    except TapeError:
        return "the attack left no file"
    own = found[job.round, job.client]
    if own is None or not len(own.y):
        return f"no truth of client {job.client} in round {job.round}"
    result = Reconstruction(tensors.get("x"), tensors.get("y"), math.nan, 0, job.seconds, _status(job.status))
    example, rows = paired(grader, job.attack, job.round, job.client, result, own)
    other = None if job.other is None or job.attack in BASELINES else found[job.round, job.other]
    if other is not None and job.other is not None and len(other.y):
        name = wrong_client(job.attack)
        rows += paired(grader, name, job.round, job.other, replace(result, y=None), other)[1]
    if example is not None:
        run.write_reconstruction(job.round, job.client, job.attack, {**tensors, EXAMPLE: example})
    ledger.grade(job.id, rows, "graded against the truth of a tester", afresh=True)
    return ""


def _status(status: str) -> Status:
    known: tuple[Status, ...] = ("converged", "out_of_budget", "diverged", "not_applicable")
    return next((s for s in known if s == status), "converged")


def paired(
    grader: Grader, attack: str, round: int, client: int, result: Reconstruction, truth: Batch
) -> tuple[Tensor | None, list[ScoreRecord]]:
    """Grade as many examples as truth and reconstruction both have, paired one to one; rows name the truth's examples.

    If the attacker assumed fewer examples than there were, each reconstruction is graded against the nearest of them that is
    left, and so are the baselines.
    """
    if result.x is None or not has_images(result.x):
        return None, grader.grade(attack, round, client, result, truth)[1]
    n, size = len(truth.y), len(result.x)
    if size < n:
        example = grader.pairing(result.x, truth.x)
        part = Batch(truth.x[example], truth.y[example])
        _, rows = grader.grade(attack, round, client, result, part)
        return example, [replace(r, example=int(example[r.example])) if r.example >= 0 else r for r in rows]
    example = torch.full((size,), -1, dtype=torch.int64)
    example[grader.pairing(truth.x, result.x)] = torch.arange(n)
    return example, grader.grade(attack, round, client, result, truth)[1]
