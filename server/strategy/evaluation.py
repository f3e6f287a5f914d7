"""The clients' evaluation of a round: replies that would spoil all figures are left out by name, and no failure ends a training."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from logging import WARNING

from flwr.app import Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp.strategy import Strategy

from fedgauge.server.store.ledger_types import sanitised
from fedgauge.server.strategy import reply_checks
from fedgauge.server.strategy.strategy_state import StateSnapshot

Form = frozenset[tuple[str, str, int | None]]  # of metrics: their record's name, their own, and of a list the length


def aggregate(
    inner: Strategy,
    round: int,
    replies: Sequence[Message],
    asked: Collection[int] | None,
    clients: Mapping[int, int],
    key: str,
    most: int,
) -> tuple[MetricRecord | None, list[str]]:
    """What a strategy makes of the replies, None if it fails; and sentences on replies that were left out, and on its failure.

    A strategy may take replies of several forms; only where it fails over them are those left out that are unlike most, and
    over which it fails. Its state is put back before each further try, and if it fails altogether.

    Args:
        replies: in the order in which the strategy gets them.
        asked: the nodes that were; None: not known.
        clients: client numbers by node.
        key: of the number of examples among the metrics.
        most: examples that one client may claim.
    """
    kept, notes = list(replies), list[str]()

    def leave_out(reasons: Mapping[int, str]) -> None:
        nonlocal kept
        for node, reason in reasons.items():
            who = f"client {clients[node]}" if node in clients else f"node {node}, which is no client"
            notes.append(f"round {round}: {who} was left out of the evaluation: {sanitised(reason)}")
        kept = [m for m in kept if m.has_error() or m.metadata.src_node_id not in reasons]

    leave_out(_misplaced(kept, asked))
    leave_out(_spoiling(_by_node(kept), key, most))
    metrics, error, odd = _Tries(inner, round, kept).fitting()
    leave_out(odd)
    if error:
        log(WARNING, "fedgauge: the strategy failed over the clients' evaluation", exc_info=error)
        why = sanitised(f"{type(error).__name__}: {error}")
        notes.append(f"round {round}: the strategy failed over the clients' evaluation, which has no figures: {why}")
    for note in notes:
        log(WARNING, "fedgauge: %s", note)
    return metrics, notes


class _Tries:
    """A round's evaluation, tried on parts of its replies; each part as if it were the only one."""

    def __init__(self, inner: Strategy, round: int, replies: Sequence[Message]) -> None:
        self.inner, self.round, self.replies = inner, round, replies
        self.state = StateSnapshot(inner)
        self.contents = _by_node(replies)

    def without(self, left_out: Collection[int]) -> tuple[MetricRecord | None, Exception | None]:
        """What the strategy makes of all replies but those of some nodes, or what it raises."""
        try:
            part = [m for m in self.replies if m.has_error() or m.metadata.src_node_id not in left_out]
            for node, m in ((m.metadata.src_node_id, m) for m in part if not m.has_error()):
                m.content = _with_own_metrics(self.contents[node])  # a strategy may change what it gets
            return self.inner.aggregate_evaluate(self.round, part), None
        except Exception as error:  # a user's strategy may raise anything over what a client says
            self.state.restore()
            return None, error

    def works_without(self, left_out: Collection[int]) -> bool:
        """Whether the strategy takes all replies but those; its state stays as it was."""
        error = self.without(left_out)[1]
        self.state.restore()
        return error is None

    def fitting(self) -> tuple[MetricRecord | None, Exception | None, dict[int, str]]:
        """What comes of as many replies as the strategy takes, and by node, why each of the others is left out."""
        odd: dict[int, str] = {}
        metrics, error = self.without(odd)
        while error and (more := _unlike_most({n: c for n, c in self.contents.items() if n not in odd})):
            odd |= more
            metrics, error = self.without(odd)
        if odd and error is None:
            self.state.restore()
            for node in reply_checks.harmless(list(odd), lambda back: self.works_without(odd.keys() - set(back))):
                del odd[node]
            metrics, error = self.without(odd)
        return metrics, error, odd


def _by_node(replies: Sequence[Message]) -> dict[int, RecordDict]:
    return {m.metadata.src_node_id: m.content for m in replies if not m.has_error()}


def _with_own_metrics(content: RecordDict) -> RecordDict:
    return RecordDict({**content, **{name: MetricRecord(dict(m)) for name, m in content.metric_records.items()}})


def _misplaced(replies: Sequence[Message], asked: Collection[int] | None) -> dict[int, str]:
    """By node, replies that nobody asked for, and several of one node."""
    times = Counter(m.metadata.src_node_id for m in replies if not m.has_error())
    unasked = {node: "it was not asked" for node in times if asked is not None and node not in asked}
    return {node: f"it answered {n} times" for node, n in times.items() if n > 1} | unasked


def _spoiling(contents: Mapping[int, RecordDict], key: str, most: int) -> dict[int, str]:
    """By node, replies with numbers that spoil an average.

    A metric that is not finite in more than half of the replies is how the model is, and nobody's fault.
    """
    reasons: dict[int, str] = {}
    infinite: dict[int, list[str]] = {}
    for node, content in contents.items():
        infinite[node] = []
        for _, name, value in _metrics(content):
            if name == key and (wrong := reply_checks.wrong_weight(value, key, most)):
                reasons[node] = wrong
            elif not reply_checks.is_finite(value):
                infinite[node].append(name)
    return {node: f"its {name[:40]} is not finite" for node, name in reply_checks.rare(infinite).items()} | reasons


def _unlike_most(contents: Mapping[int, RecordDict]) -> dict[int, str]:
    """By node, replies whose metrics have other names, or lists of other lengths, than most; none if no form is the commonest."""
    forms = {node: _form(content) for node, content in contents.items()}
    usual = reply_checks.commonest(list(forms.values()))
    return {
        node: "its metrics have other names, or lists of other lengths, than the other clients'"
        for node, form in forms.items()
        if usual is not None and form != usual
    }


def _form(content: RecordDict) -> Form:
    return frozenset((r, n, len(v) if isinstance(v, list) else None) for r, n, v in _metrics(content))


def _metrics(content: RecordDict) -> Iterator[tuple[str, str, float | list[int] | list[float]]]:
    """Each metric with its record's name and its own."""
    for record, metrics in content.metric_records.items():
        for name, value in metrics.items():
            yield record, name, value
