"""Who was in a batch, told with the examples that a tester hands in: without them nobody knows who the members are."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import groupby

import torch
from torch import Tensor

from fedgauge.attacks.base import ClientState, Observation, Wave
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.grading.scores import WHOLE_BATCH, ScoreRecord
from fedgauge.attacks.modality.membership import MEMBER
from fedgauge.attacks.plan import MEMBERSHIP_LIMIT, PlannedAttack
from fedgauge.client.data.images import Dataset, Shards, batch_of
from fedgauge.client.federation import Federation
from fedgauge.server.pool.truth_check import Found
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import FinishedTest
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import TapeError, by_weights
from fedgauge.server.store.uploads import UploadMismatch, read_observation

Progress = Callable[[int, int], None]  # (updates done, updates in all)


@dataclass(frozen=True, eq=False)
class _HandedIn(Shards):
    """Shards whose batches are those of a tester.

    Args:
        drawn: rows of the training examples, by (round, client).
    """

    drawn: Mapping[tuple[int, int], Tensor] = field(default_factory=dict)

    def rows_at(self, client: int, round: int) -> Tensor:
        return self.drawn[round, client]


def finished_tests(ledger: Ledger, untested: bool = False) -> list[FinishedTest]:
    """The finished tests of membership, and those of their limit.

    Args:
        untested: only of tests of which some have never had examples to tell members by.
    """
    names = [name for name, planned in ledger.planned().items() if _needs_members(planned)]
    tests = ledger.finished_tests(names)
    without = {test.attack for test in tests if test.blind}
    return [test for test in tests if test.attack in without] if untested else tests


def _needs_members(planned: PlannedAttack) -> bool:
    return planned.tells_members or planned.name == MEMBERSHIP_LIMIT


def with_examples(fed: Federation, found: Found) -> Federation:
    """A federation whose clients hold these examples, each once; none of them is a public example or a stranger any more."""
    data, public = fed.shards.dataset, fed.shards.auxiliary_batch()
    there = {key: batch for key, batch in sorted(found.items()) if batch is not None and len(batch.y)}
    names, firsts, drawn = dict[bytes, int](), list[tuple[Tensor, Tensor]](), dict[tuple[int, int], Tensor]()
    for key, (x, y) in there.items():
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
    """Which of these examples have none of the names."""
    return torch.tensor([i for i, name in enumerate(_names(x)) if name not in names], dtype=torch.int64)


def retest(
    run: Run, ledger: Ledger, scenario: Scenario, tests: Sequence[FinishedTest], found: Found, progress: Progress
) -> int:
    """Do finished tests of membership again, with these examples as the batches; returns how many gave numbers.

    Args:
        tests: whole tests, ordered by test, round and client, as tests over rounds build on the rounds before.
    """
    planned, memories = ledger.planned(), dict[str, dict[int, ClientState]]()
    auditor = Auditor(with_examples(scenario.federation, found), scenario.plan.seed)
    told = done = 0
    for (name, round), group in groupby(tests, key=lambda test: (test.attack, test.round)):
        seen = [(test, *_seen(run, ledger, scenario, test, found)) for test in group]
        for test, observation, why in seen:
            if observation is None:
                ledger.retest(test.id, [_nothing(test)], why)
        here = [(test, observation) for test, observation, _ in seen if observation is not None]
        alike, most = by_weights(here, lambda pair: pair[0].digest), scenario.plan.wave
        for part in (same[i : i + most] for same in alike for i in range(0, len(same), most)):
            remembered = memories.setdefault(name, {})
            others = {
                t.client: t.other for t, _ in part if t.other is not None and _has(auditor.federation, t.other, round)
            }
            wave = Wave.stack([observation for _, observation in part])
            for (test, _), result in zip(
                part, auditor.audit(planned[name], wave, others, memories=remembered), strict=True
            ):
                ledger.retest(test.id, result.rows, result.reconstruction.reason)
                told += result.reconstruction.status == "converged"
                if result.memory is not None:
                    remembered[test.client] = result.memory
        done += len(seen)
        progress(done, len(tests))
    return told


def _seen(
    run: Run, ledger: Ledger, scenario: Scenario, test: FinishedTest, found: Found
) -> tuple[Observation | None, str]:
    """The observation that a test is about, or why it cannot be done."""
    for member in scenario.protocol.members(test.client, test.round):
        batch = found.get((test.round, member))
        if batch is None or not len(batch.y):
            return None, f"no truth of client {member} in round {test.round}"
    if test.digest is None:
        return None, "its update is no longer on the tape"
    try:
        return read_observation(run, ledger, scenario.federation, test.round, test.client, test.digest), ""
    except (TapeError, UploadMismatch) as error:
        return None, str(error)


def _has(fed: Federation, client: int, round: int) -> bool:
    shards = fed.shards
    assert isinstance(shards, _HandedIn)
    return all((round, member) in shards.drawn for member in fed.protocol.members(client, round))


def _nothing(test: FinishedTest) -> ScoreRecord:
    return ScoreRecord(test.round, test.client, test.attack, WHOLE_BATCH, MEMBER, None, "not_applicable", 0.0)
