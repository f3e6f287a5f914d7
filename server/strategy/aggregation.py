"""Aggregation with its result checked: replies that make it unusable are left out, and if that does not help the round is undone.

The strategy's state is put back before each new attempt, so that nothing of what was left out remains in moments or momenta.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedgauge.client.update import Params
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.strategy import reply_checks, round_checks
from fedgauge.server.strategy.reply_checks import AcceptedReply
from fedgauge.server.strategy.strategy_state import StateSnapshot, count_not_finite

Usable = Callable[[Params, Mapping[str, Tensor]], str]


@dataclass(frozen=True, eq=False)
class Aggregate:
    """What a strategy made of some replies.

    Args:
        arrays: the next weights; None: those of before stay.
        fault: why the next round could not begin with it; empty if it could.
    """

    arrays: ArrayRecord | None
    metrics: MetricRecord | None
    buffers: dict[str, Tensor]
    fault: str


@dataclass(frozen=True, eq=False)
class Aggregation:
    """One round's aggregation.

    Args:
        params, buffers: what was sent.
        usable: why the model cannot be trained with some weights and buffers; empty if it can.
        counts: whether the strategy averages a client's reply in a round, and so its buffers.
    """

    inner: Strategy
    round: int
    params: Params
    buffers: Mapping[str, Tensor]
    usable: Usable
    counts: Callable[[int, int], bool]

    def of(
        self, passed: Sequence[tuple[AcceptedReply, Message]]
    ) -> tuple[Aggregate, dict[int, Participation], list[str]]:
        """What comes of a round; by position, the replies that were left out for that; and sentences on the round."""
        replies = [reply for reply, _ in passed]
        contents = [message.content for _, message in passed]
        state, was = StateSnapshot(self.inner), count_not_finite(self.inner)

        def attempt(kept: Sequence[int]) -> Aggregate:
            metrics = reply_checks.shared([_metrics(contents[i]) for i in kept])
            for i, own in zip(kept, metrics, strict=True):
                passed[i][1].content = _with_metrics(contents[i], own)  # anew, as a strategy may change what it gets
            with np.errstate(over="ignore", invalid="ignore"):  # looked for below
                arrays, aggregated = self.inner.aggregate_train(self.round, [passed[i][1] for i in kept])
                arrays = self._as_sent(arrays)
            buffers = self._averaged_buffers([replies[i] for i in kept])
            return Aggregate(arrays, aggregated, buffers, self._fault(arrays, buffers, was))

        def sound(kept: Sequence[int]) -> bool:
            state.restore()
            return not attempt(kept).fault

        clients, examples = [reply.client for reply in replies], [reply.examples for reply in replies]
        share = round_checks.large_share(clients, examples)
        notes = [f"round {self.round}: {share}"] if share else []
        result = attempt(range(len(passed)))
        if not result.fault:
            return result, {}, notes
        sizes = [round_checks.norm(reply.update) + round_checks.norm(reply.moved(self.buffers)) for reply in replies]
        left_out = round_checks.spoilers(sizes, sound)
        state.restore()
        if left_out:
            named = ", ".join(str(clients[i]) for i in left_out)
            what = f"with the updates of clients {named}, which were left out"
            kept = [i for i in range(len(passed)) if i not in left_out]
            charge = f"left out, as with its update {result.fault}"
            result_of_rest = attempt(kept)
        else:
            what = "whoever is left out, so the round was undone, and the next one begins with the same weights"
            result_of_rest, charge = Aggregate(None, None, dict(self.buffers), result.fault), ""
        notes.append(f"round {self.round}: {result.fault} {what}")
        log(WARNING, "fedgauge: %s", notes[-1])
        return result_of_rest, {i: Participation(clients[i], "rejected", charge) for i in left_out}, notes

    def _fault(self, arrays: ArrayRecord | None, buffers: Mapping[str, Tensor], was: int) -> str:
        """Why no round can begin with what was aggregated; empty if one can.

        Args:
            was: entries of the strategy's state that were not finite before.
        """
        if arrays is None:
            return ""
        weights: Params = dict(arrays.to_torch_state_dict())
        for name, t in (*weights.items(), *buffers.items()):
            if not torch.isfinite(t).all():
                return f"the next {name} is not finite"
        if count_not_finite(self.inner) > was:
            return "the strategy's state is not finite"
        fault = self.usable(weights, buffers)
        # a model that could not be trained before is not these updates' doing
        return "" if fault and self.usable(self.params, self.buffers) else fault

    def _averaged_buffers(self, accepted: Sequence[AcceptedReply]) -> dict[str, Tensor]:
        returned = [a for a in accepted if a.buffers and self.counts(self.round, a.client)]
        if not returned:
            return dict(self.buffers)
        total = sum(a.examples for a in returned)
        return {k: torch.stack([a.buffers[k] * (a.examples / total) for a in returned]).sum(0) for k in self.buffers}

    def _as_sent(self, arrays: ArrayRecord | None) -> ArrayRecord | None:
        """The aggregate in the dtypes that were sent, as FedAdam returns float64 under NumPy 2."""
        if arrays is None:
            return None
        aggregated = arrays.to_torch_state_dict()
        return ArrayRecord({k: aggregated[k].to(t.dtype) for k, t in self.params.items() if k in aggregated})


def _metrics(content: RecordDict) -> MetricRecord:
    """The only MetricRecord of a checked reply."""
    return next(iter(content.metric_records.values()))


def _with_metrics(content: RecordDict, metrics: MetricRecord) -> RecordDict:
    """A reply's content with other metrics, and arrays in records of its own."""
    records = {name: ArrayRecord(dict(record)) for name, record in content.array_records.items()}
    return RecordDict({**content, **records, next(iter(content.metric_records)): metrics})
