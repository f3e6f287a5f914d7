"""Tolerance of a secure sum: the numbers of colluding clients and of dropouts that it resists.

Of n clients each holds one share of every client's two secrets, and any t shares give a secret. An honest client hands out its
share of one of the two, and only after t clients, itself included, have confirmed its list of survivors and dropouts
(Bonawitz et al., CCS 2017, section 6). It confirms once a session.

1. Two different lists need t confirmations each. The c colluding clients may confirm both, the other n - c one. So
   there is one list only, if 2t > n + c; otherwise the server gets both secrets of one client.
2. With one list the server gets only a survivor's seed, and only a dropout's key. The mask of two survivors stays secret, and
   so does the vector of a dropout.
3. At least t - c honest survivors confirmed the list, and each of them masks with all survivors, as it knows their shares. Any
   other honest survivor masked with at least t clients, whichever the server showed it: one of those t - c among them, since
   t + (t - c) > n. So the masks connect all honest survivors, and the server learns their sum, of t - c or more, and no part of it.

At least two remain if c <= t - 2. The same holds for a server that follows the protocol: it learns a sum of t or more.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """Tolerance of a group; within it, the server sees only sums of at least two other clients."""

    group: int
    threshold: int
    curious: int  # clients that may help a server that follows the protocol
    lying: int  # clients that may help one that falsifies lists of dropouts but no keys; below 0: none is needed
    dropouts: int  # clients that may drop out while there is a sum

    @property
    def words(self) -> str:
        return (
            f"a secure sum of {self.group} with threshold {self.threshold}: {self.dropouts} may drop out; single updates stay "
            f"hidden from an honest server that up to {self.curious} clients help, and from one that falsifies the list of "
            f"dropouts with the help of up to {self.lying}; they are not hidden from a server that forges keys"
        )


def tolerance(group: int, threshold: int) -> Tolerance:
    """Return the tolerance of n clients with threshold t."""
    return Tolerance(group, threshold, threshold - 2, min(2 * threshold - group - 1, threshold - 2), group - threshold)


def check_threshold(group: int, least: int, colluders: int | None = None) -> None:
    """Refuse a threshold that does not resist so many colluding clients and a lying server.

    Args:
        colluders: default: all below a third of the group.

    Raises:
        ValueError: a number is out of its range, or the threshold resists too few colluders.
    """
    if not group < 2 * least <= 2 * group:
        raise ValueError(f"threshold must be above half of group = {group} and at most all of it, got {least}")
    resisted = tolerance(group, least).lying
    wanted = (group - 1) // 3 if colluders is None else colluders
    if not 0 <= wanted <= group - 2:
        raise ValueError(f"colluders must be in 0..{group - 2} (all but two of group = {group}), got {wanted}")
    if resisted < wanted:
        needed = (group + wanted) // 2 + 1
        raise ValueError(f"threshold = {least} resists {resisted} colluders, not {wanted}: set threshold = {needed}")
