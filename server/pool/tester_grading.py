"""A tester who owns the data: finished attacks are graded by the truth that he hands in, and tests of membership done again."""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import groupby
from typing import cast, get_args

import torch
from torch import Tensor

from fedgauge.attacks.base import LIMITS, ClientState, Reconstruction, Status, Wave
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.grading.scores import Grader, ungraded_rows
from fedgauge.attacks.modality.membership import MEMBER
from fedgauge.attacks.score_rows import OBJECTIVE, WHOLE_BATCH, ScoreRecord, wrong_client
from fedgauge.attacks.source import FederationSource
from fedgauge.client.components import SpecError
from fedgauge.client.data.batches import Shards, batch_of
from fedgauge.client.data.dataset import Dataset
from fedgauge.client.federation import Federation
from fedgauge.client.update import Batch
from fedgauge.server.pool.assumed_training import MOST_UPDATES, doubt, unchecked
from fedgauge.server.pool.executors import last_line
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import FinishedJob
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import TapeError, by_weights
from fedgauge.server.store.tape_source import TapeSource, UploadMismatch
from fedgauge.server.store.tester_truth import TesterTruth

Found = Mapping[tuple[int, int], Batch]  # the truth by (round, client), as far as there is any
CHECKING = 60.0  # seconds after which no further update is checked against its truth
MOST_DOUBTS = 3  # in one sentence
EXAMPLE = "example"  # (B,) in a reconstruction's file: the example of the truth that each was paired with; -1: none
GRADED = "graded against the given examples"
EMPTY_HANDED = ("not_applicable", "diverged")


def grade(run: Run, ledger: Ledger, scenario: Scenario, truth: TesterTruth) -> str:
    """Grade every finished reconstruction with available truth; regrade if needed; return the graded ones.

    Tests of membership are done again, with the truth as the batches.

    Raises:
        SpecError: the truth cannot be read, or is of other examples; nothing is written then.
        RunBusy: an attack service works on this run.
    """
    source, nodes = TapeSource(scenario.federation, run=run, ledger=ledger), ledger.nodes()
    grader = Auditor(source).grader
    with run.lock("audit"):
        jobs, tests = ledger.ungraded(again=True), ledger.finished_tests()
        data, asked = scenario.federation.shards.dataset, set(_asked(scenario, [*jobs, *tests]))
        read = ((key, truth.batch(*key, data, nodes)) for key in sorted(asked))
        found = {key: batch for key, batch in read if batch is not None and len(batch.y)}
        if (jobs or tests) and not found:
            raise SpecError(f"{truth.folder} has no examples of any attacked update")
        size = scenario.federation.shards.batch_size
        assumed = {job.id: size * len(scenario.protocol.group(job.client)) for job in jobs}
        notes = Counter(_grade(run, ledger, grader, job, found, assumed[job.id]) for job in jobs)
        graded = notes.pop("", 0)
        every = len(jobs) - notes.pop(None, 0)
        of_all = f"{graded} of {every} reconstructions and baselines"
        words = f"graded {of_all} against the examples in {truth.folder}"
        if tests:
            done = retest(source, scenario, tests, found)
            words += f"; {done} of {len(tests)} tests of membership done"
        why = ", ".join(sorted(filter(None, notes))[:3])
        if notes:
            words += f"; not graded ({sum(notes.values())} of {every}): {why}"
        ledger.describe("grading", {r["name"]: GRADED for r in ledger.attacks() if r["role"] not in LIMITS})
        if blind := unchecked(source.federation):
            words += f"; whether the examples give the updates was not checked: {blind}"
        # what fedgauge saw an app train on, by a chain as it drafted it: only the order is unknown
        drafted = ledger.meta().get("drafted_chain") == repr(scenario.tables.get("chain"))
        seen = drafted and truth.folder == run.folder.absolute() / "truth"
        doubts = "" if seen else _doubts(source, found)
        ledger.set_meta(grading=words, ungraded=why, truth=str(truth.folder), truth_doubts=doubts)
    return words


def regrade(run: Run, ledger: Ledger, scenario: Scenario) -> None:
    """Grade what has ended since the truth was given; where it cannot be read any more, say so."""
    meta = ledger.meta()
    if "truth" not in meta or not (ledger.ungraded() or any(test.blind for test in ledger.finished_tests())):
        return
    try:
        grade(run, ledger, scenario, TesterTruth.named(meta["truth"]))
    except (SpecError, OSError) as error:
        why = f"the truth cannot be read any more ({error}): hand it in again with --truth"
        ledger.set_meta(grading=f"what ended since is not graded: {why}", ungraded=why)


def _doubts(source: TapeSource, found: Found) -> str:
    """Return evidence against this truth from the updates that it should give; empty if there is none."""
    if source.ledger.training_fits is False:
        return ""
    taped = [one for one in source.taped() if one[:2] in found]
    doubts, began = list[str](), time.monotonic()
    try:
        for round, client, digest in taped[:: max(1, len(taped) // MOST_UPDATES)]:
            if time.monotonic() - began > CHECKING:
                break
            doubts.append(doubt(source.federation, source.observation(round, client, digest), found[round, client]))
    except Exception as error:  # a user's network may raise anything; the grades stand without this check
        doubts.append(f"whether the truth gives the updates was not checked: {type(error).__name__}: {error}")
    words = "; ".join([each for each in doubts if each][:MOST_DOUBTS])
    why = "it may be another client's, another round's or of another scale, or clients do not train as [[chain]] says"
    return f"{words}: {why}" if words else ""


def _asked(scenario: Scenario, jobs: Iterable[FinishedJob]) -> Iterator[tuple[int, int]]:
    for job in jobs:
        for client in (job.client, job.other):
            if client is not None:
                yield job.round, client
                yield from ((job.round, member) for member in scenario.protocol.group(client))


def _grade(run: Run, ledger: Ledger, grader: Grader, job: FinishedJob, found: Found, assumed: int) -> str | None:
    """Write one job's scores, or remove those of an earlier truth; return why not, or None without a reconstruction.

    Args:
        assumed: how many examples the attack took the client to have.
    """
    why: str | None = ""
    try:
        tensors = run.read_reconstruction(job.round, job.client, job.attack)
    except TapeError:
        tensors, why = {}, None if job.status in EMPTY_HANDED else "the attack left no file"
    own = found.get((job.round, job.client))
    status: Status = cast(Status, job.status) if job.status in get_args(Status) else "converged"
    result = Reconstruction.from_tensors(tensors, status, job.seconds)
    if why != "" or own is None:
        rows = ungraded_rows(job.attack, job.round, job.client, result, assumed, job.other, grader.modality.main.metric)
        ledger.grade(job.id, [row for row in rows if row.metric != OBJECTIVE], None, afresh=True)
        return f"no truth of client {job.client} in round {job.round}" if why == "" else why
    _, rows, example = grader.grade(job.attack, job.round, job.client, result, own)
    if job.other is not None and (other := found.get((job.round, job.other))) is not None:
        name = wrong_client(job.attack)
        rows += grader.grade(name, job.round, job.other, replace(result, y=None), other)[1]
    if len(example):
        run.write_reconstruction(job.round, job.client, job.attack, {**tensors, EXAMPLE: example})
    ledger.grade(job.id, rows, afresh=True)
    return ""


# --------------------------------------------------------------------------------------------------- who was in a batch


@dataclass(frozen=True, eq=False)
class _HandedIn(Shards):
    """Shards with a tester's batches."""

    drawn: Mapping[tuple[int, int], Tensor] = field(default_factory=dict)  # training examples, by (round, client)

    def rows_at(self, client: int, round: int) -> Tensor:
        return self.drawn[round, client]


def with_examples(fed: Federation, found: Found) -> Federation:
    """Return a federation with these examples at its clients, each once, and no longer among public examples or strangers."""
    data, public = fed.shards.dataset, fed.shards.auxiliary_batch()
    names, firsts, drawn = dict[bytes, int](), list[tuple[Tensor, Tensor]](), dict[tuple[int, int], Tensor]()
    for key, (x, y) in sorted(found.items()):
        for name, *example in zip(_names(x), x, y, strict=True):
            if name not in names:
                names[name] = len(names)
                firsts.append((example[0], example[1]))
        drawn[key] = torch.tensor([names[name] for name in _names(x)], dtype=torch.int64).unique()
    kept = _others(public.x, names)
    tested = _others(batch_of(data.x_test, data.y_test, torch.arange(len(data.y_test))).x, names)
    joined: Dataset = replace(
        data,
        x=torch.cat([torch.stack([x for x, _ in firsts]), public.x[kept]]),
        y=torch.cat([torch.stack([y for _, y in firsts]), public.y[kept]]),
        x_test=data.x_test[tested],
        y_test=data.y_test[tested],
    )
    own: dict[int, list[Tensor]] = {}
    for (_, client), rows in drawn.items():
        own.setdefault(client, []).append(rows)
    # most are nobody's: a ledger from elsewhere may number its clients up to 2^21
    held = [torch.zeros(0, dtype=torch.int64)] * max(fed.protocol.clients, *(client + 1 for client in own))
    for client, parts in own.items():
        held[client] = torch.cat(parts).unique()
    auxiliary = torch.arange(len(firsts), len(firsts) + len(kept))
    shards = _HandedIn(joined, tuple(held), auxiliary, fed.shards.batch_size, fed.shards.seed, drawn=drawn)
    return fed.having(shards=shards)


def _names(x: Tensor) -> list[bytes]:
    """A name of each example; pixels count as bytes, since files may round them otherwise."""
    rows = (x * 255).round().to(torch.uint8) if x.is_floating_point() else x
    return [blake2b(row.contiguous().numpy().tobytes(), digest_size=16).digest() for row in rows]


def _others(x: Tensor, names: Collection[bytes]) -> Tensor:
    return torch.tensor([i for i, name in enumerate(_names(x)) if name not in names], dtype=torch.int64)


def retest(source: TapeSource, scenario: Scenario, tests: Sequence[FinishedJob], found: Found) -> int:
    """Repeat finished membership tests with these examples as the batches.

    Args:
        tests: whole tests, ordered by test, round and client, since tests over rounds build on earlier rounds.

    Returns:
        How many gave a number.
    """
    ledger, fed = source.ledger, with_examples(source.federation, found)
    planned, memories = ledger.planned(), dict[str, dict[int, ClientState]]()
    auditor = Auditor(FederationSource(fed), scenario.plan.seed)
    done = 0

    def missing(client: int, round: int) -> list[int]:
        return [m for m in fed.protocol.group(client) if (round, m) not in found]

    for (name, round), group in groupby(tests, key=lambda test: (test.attack, test.round)):
        here = []
        for test in group:
            if not test.digest and not test.blind:
                continue  # done before its update was deleted
            without = missing(test.client, round)
            why = f"no truth of client {without[0]} in round {round}" if without else ""
            try:
                seen = source.observation(round, test.client, test.digest) if test.digest and not why else None
            except (TapeError, UploadMismatch) as error:
                seen, why = None, str(error)
            if seen is not None:
                here.append((test, seen))
                continue
            none = ScoreRecord(round, test.client, name, WHOLE_BATCH, MEMBER, None, "not_applicable", 0.0)
            ledger.retest(test.id, [none], why or "its update is no longer recorded")
        alike, most = by_weights(here, lambda pair: pair[0].digest), scenario.plan.wave
        remembered = memories.setdefault(name, {})
        waves = [same[i : i + most] for same in alike for i in range(0, len(same), most)]
        for part in waves:
            others = {t.client: t.other for t, _ in part if t.other is not None and not missing(t.other, round)}
            try:
                wave = Wave.stack([observation for _, observation in part])
                results = auditor.audit(planned[name], wave, others, remembered)
            except Exception as error:  # a user's test may raise anything
                if len(part) > 1:
                    waves += [[pair] for pair in part]
                    continue
                test = part[0][0]
                none = ScoreRecord(round, test.client, name, WHOLE_BATCH, MEMBER, None, "failed", 0.0)
                ledger.retest(test.id, [none], f"{type(error).__name__}: {last_line(error)}")
                continue
            for (test, _), result in zip(part, results, strict=True):
                ledger.retest(test.id, result.rows, result.reconstruction.reason)
                done += result.reconstruction.status == "converged"
                if result.memory is not None:
                    remembered[test.client] = result.memory
    return done
