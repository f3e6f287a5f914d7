"""Aggregation with its result checked: replies that make it unusable are left out, and if that does not help the round is undone.

The strategy's state is put back before each new attempt, so that nothing of what was left out remains in moments or momenta.
State that is not finite counts only where the updates make it so: a strategy may keep an infinity of its own, such as each
reply's distance to itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from fedgauge.server.strategy.strategy_state import StateSnapshot, not_finite

MOST_NAMES = 3  # of arrays, in a sentence
Usable = Callable[[Params, Mapping[str, Tensor]], str]


@dataclass(frozen=True, eq=False)
class Aggregate:
    """What a strategy made of some replies.

    Args:
        arrays: the next weights; None: those of before stay.
        fault: why the next round could not begin with it; empty if it could.
        state: what of the strategy's state the updates have made infinite or no number.
    """

    arrays: ArrayRecord | None
    metrics: MetricRecord | None
    buffers: dict[str, Tensor]
    fault: str
    state: frozenset[str] = frozenset()

    @property
    def flaw(self) -> str:
        """Why the replies should be others; empty if there is no reason."""
        return self.fault or ("the strategy's state is not finite" if self.state else "")


@dataclass(frozen=True, eq=False)
class Aggregation:
    """One round's aggregation.

    Args:
        params, buffers: what was sent.
        usable: why the model cannot be trained with some weights and buffers; empty if it can.
        counts: whether the strategy averages a client's reply in a round, and so its buffers.
        forgiven: what of the strategy's state may be infinite or no number; a round adds to it.
    """

    inner: Strategy
    round: int
    params: Params
    buffers: Mapping[str, Tensor]
    usable: Usable
    counts: Callable[[int, int], bool]
    forgiven: set[str] = field(default_factory=set)

    def of(
        self, passed: Sequence[tuple[AcceptedReply, Message]]
    ) -> tuple[Aggregate, dict[int, Participation], list[str]]:
        """What comes of a round; by position, the replies that were left out for that; and sentences on the round."""
        replies = [reply for reply, _ in passed]
        contents = [message.content for _, message in passed]
        state = StateSnapshot(self.inner)

        def aggregate(
            kept: Sequence[int], said: Sequence[RecordDict]
        ) -> tuple[ArrayRecord | None, MetricRecord | None]:
            metrics = reply_checks.shared([_metrics(said[i]) for i in kept])
            for i, own in zip(kept, metrics, strict=True):
                passed[i][1].content = _with_metrics(said[i], own)  # anew, as a strategy may change what it gets
            with np.errstate(over="ignore", invalid="ignore"):  # looked for below
                return self.inner.aggregate_train(self.round, [passed[i][1] for i in kept])

        def attempt(kept: Sequence[int]) -> Aggregate:
            arrays, aggregated = aggregate(kept, contents)
            buffers = self._averaged_buffers([replies[i] for i in kept])
            arrays, weights = self._as_sent(arrays)
            fault = "" if arrays is None else self._fault(weights, buffers)
            return Aggregate(arrays, aggregated, buffers, fault, frozenset(not_finite(self.inner) - self.forgiven))

        def sound(kept: Sequence[int]) -> bool:
            state.restore()
            return not attempt(kept).flaw

        clients, everybody = [reply.client for reply in replies], range(len(passed))
        try:
            result = attempt(everybody)
        except Exception:  # over replies that do not fit together, perhaps: without some it may be tried again
            state.restore()
            raise
        if result.state:  # is it so, too, if nobody has trained?
            state.restore()
            aggregate(everybody, [self._untrained(content) for content in contents])
            self.forgiven.update(not_finite(self.inner))
            state.restore()
            result = attempt(everybody)
        if not result.flaw:
            return result, {}, []
        sizes = [round_checks.norm(reply.update) + round_checks.norm(reply.moved(self.buffers)) for reply in replies]
        left_out = round_checks.spoilers(sizes, sound)
        state.restore()
        if not left_out and not result.fault and len(passed) > 1:
            self.forgiven.update(result.state)
            named = ", ".join(sorted(result.state)[:MOST_NAMES])
            note = f"round {self.round}: the strategy's state ({named}) is not finite whoever is left out; the training goes on"
            log(WARNING, "fedgauge: %s", note)
            return attempt(everybody), {}, [note]
        if left_out:
            named = ", ".join(str(clients[i]) for i in left_out)
            what = f"with the updates of clients {named}, which were left out"
            kept = [i for i in range(len(passed)) if i not in left_out]
            charge = f"left out, as with its update {result.flaw}"
            result_of_rest = attempt(kept)
        else:
            what = "whoever is left out, so the round was undone, and the next one begins with the same weights"
            result_of_rest, charge = Aggregate(None, None, dict(self.buffers), result.flaw), ""
        note = f"round {self.round}: {result.flaw} {what}"
        log(WARNING, "fedgauge: %s", note)
        return result_of_rest, {i: Participation(clients[i], "rejected", charge) for i in left_out}, [note]

    def _fault(self, weights: Params, buffers: Mapping[str, Tensor]) -> str:
        """Why no round can begin with what was aggregated; empty if one can."""
        for name, t in (*weights.items(), *buffers.items()):
            if not torch.isfinite(t).all():
                return f"the next {name} is not finite"
        fault = self.usable(weights, buffers)
        # a model that could not be trained before is not these updates' doing
        return "" if fault and self.usable(self.params, self.buffers) else fault

    def _averaged_buffers(self, accepted: Sequence[AcceptedReply]) -> dict[str, Tensor]:
        returned = [a for a in accepted if a.buffers and self.counts(self.round, a.client)]
        if not returned:
            return dict(self.buffers)
        total = sum(a.examples for a in returned)
        return {k: torch.stack([a.buffers[k] * (a.examples / total) for a in returned]).sum(0) for k in self.buffers}

    def _as_sent(self, arrays: ArrayRecord | None) -> tuple[ArrayRecord | None, Params]:
        """The aggregate in the dtypes that were sent, as FedAdam returns float64 under NumPy 2; and its tensors."""
        if arrays is None:
            return None, {}
        aggregated = arrays.to_torch_state_dict()
        weights = {k: aggregated[k].to(t.dtype) for k, t in self.params.items() if k in aggregated}
        same = list(weights) == list(aggregated) and all(weights[k] is t for k, t in aggregated.items())
        return arrays if same else ArrayRecord(weights), weights

    def _untrained(self, content: RecordDict) -> RecordDict:
        """A reply's content with the weights that were sent."""
        sent = {
            name: ArrayRecord({k: self.params[k] for k in record if k in self.params})
            for name, record in content.array_records.items()
        }
        return RecordDict({**content, **sent})


def _metrics(content: RecordDict) -> MetricRecord:
    """The only MetricRecord of a checked reply."""
    return next(iter(content.metric_records.values()))


def _with_metrics(content: RecordDict, metrics: MetricRecord) -> RecordDict:
    """A reply's content with other metrics, and arrays in records of its own."""
    records = {name: ArrayRecord(dict(record)) for name, record in content.array_records.items()}
    return RecordDict({**content, **records, next(iter(content.metric_records)): metrics})
