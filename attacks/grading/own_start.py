"""Layers that a client does not start from the weights that it was sent: a head of its own, private layers.

Such a client puts its own last values over a layer before it trains. Its reply minus what it was sent is then no gradient
step, but its reply minus its own last reply is. Two traces of a gradient decide which, without the client's data:

- Entries without a gradient (a unit that no example activates, a layer that is not trained) stay exactly where they were.
- A fully connected layer's update has a rank of at most one for each example of each step.

Neither decides for a convolution or a normalisation whose every entry moves, nor after more examples than the layer has rows:
then the two differences look alike, as both are sums of gradients of several clients. The first round shows nothing either.
"""

from collections import defaultdict

from torch import Tensor

from fedgauge.attacks.base import Observation
from fedgauge.attacks.grading.update_measures import MOST_ENTRIES, rank_of, rounding_of

FEWEST, SHARE = 16, 0.02  # entries, and their share, that must have stayed where they were
TIMES = 4  # as many of them as with the other start: rounding leaves some in place by chance
RANKS = 1.5  # times the rank that the other start gives


def own_start(seen: Observation, before: Observation) -> tuple[set[str], set[str]]:
    """Return the parameters that the client started from its own last reply, and those of which this is not decided.

    Args:
        before: the client's last reply before this one.
    """
    layers = defaultdict[str, list[str]](list)
    for name in seen.update:
        if name in before.update:
            layers[name.rpartition(".")[0]].append(name)
    own, undecided, rounding = set[str](), set[str](), rounding_of(seen)
    for names in layers.values():
        votes = [vote for k in names if (vote := _vote(seen, before, k, rounding)) is not None]
        if sum(votes) > 0:
            own.update(names)
        elif votes and not sum(votes):
            undecided.update(names)
    return own, undecided


def last_reply(before: Observation, name: str) -> Tensor:
    """Return the weights with which a reply ended."""
    return before.params[name] + before.update[name]


def _vote(seen: Observation, before: Observation, name: str, rounding: float) -> int | None:
    """1: the parameter starts from the client's own last reply, -1: from what was sent, 0: from either; None: both are one."""
    sent, last, moved = seen.params[name], last_reply(before, name), seen.update[name]
    room = 4 * rounding * sent.abs().maximum(last.abs())
    apart = (last - sent).abs() > 2 * room
    if not apart.any():
        return None
    own = sent + moved - last
    still, still_own = (int((apart & (t.abs() <= room)).sum()) for t in (moved, own))
    fewest = max(FEWEST, SHARE * int(apart.sum()))
    if max(still, still_own) >= min(fewest, sent.numel()):
        if still_own >= TIMES * still:
            return 1
        if still >= TIMES * still_own:
            return -1
    if sent.dim() != 2 or sent.numel() > MOST_ENTRIES:
        return 0
    rank, rank_own = (rank_of(t, sent, rounding) for t in (moved, own))
    return int(rank > RANKS * rank_own) - int(rank_own > RANKS * rank)
