"""What a secure sum resists: how many of a group's clients may side with the server, and how many may drop out.

Of n clients each holds one share of every client's two secrets, and any t shares give a secret. An honest client hands out its
share of one of the two, and only after t clients, itself included, have confirmed to it the survivors and dropouts that it was
told of (Bonawitz et al., CCS 2017, section 6). It confirms once a session.

1. Two different lists need t confirmations each. The c clients beside a lying server may confirm both, the other n - c one. So
   there is one list only, if 2t > n + c; otherwise the server gets both secrets of one client.
2. With one list a survivor gives its seed alone, and a client that dropped out its key alone: the mask of two survivors stays
   secret, and so does the vector of one that dropped out.
3. At least t - c honest survivors confirmed the list, and each of them masks with all survivors, as it knows their shares. Any
   other honest survivor masked with at least t clients, whichever the server showed it: one of those t - c among them, since
   t + (t - c) > n. So the masks connect all honest survivors, and the server learns their sum, of t - c or more, and no part of it.

Two are left at least if c <= t - 2, and this holds for a server that follows the protocol, too: it learns a sum of t or more.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """What a group of n clients with threshold t resists; the server then sees sums of at least two other clients alone.

    Args:
        curious: clients on the side of a server that follows the protocol, and wants to know.
        lying: on the side of one that tells clients different things about who sent shares and who dropped out, but passes on
            their public keys as they are: one that passes on its own instead needs nobody. Below 0: it needs no client's help.
        dropouts: clients that may drop out while there is a sum.
    """

    group: int
    threshold: int
    curious: int
    lying: int
    dropouts: int

    @property
    def words(self) -> str:
        """As one sentence."""
        return (
            f"a secure sum of {self.group} with threshold {self.threshold}: {self.dropouts} may drop out; single updates stay "
            f"hidden from a server that follows the protocol with up to {self.curious} clients on its side, and from one that "
            f"lies about who dropped out with up to {self.lying}; from one that hands on other keys than the clients' they do not"
        )


def tolerance(group: int, threshold: int) -> Tolerance:
    """What n clients with threshold t resist."""
    return Tolerance(group, threshold, threshold - 2, min(2 * threshold - group - 1, threshold - 2), group - threshold)


def promised_colluders(group: int) -> int:
    """How many colluding clients a secure sum resists unless fewer are asked for by name: those below a third of its group."""
    return (group - 1) // 3


def check_threshold(group: int, least: int, colluders: int | None = None) -> None:
    """Refuse a group of fewer than two, and a threshold that does not resist so many colluding clients and a lying server.

    Args:
        colluders: default: those that are promised.
    """
    if group < 2:
        raise ValueError(f"group must be at least 2, got {group}")
    if not group < 2 * least <= 2 * group:
        raise ValueError(f"threshold must be above half of group = {group} and at most all of it, got {least}")
    resisted = tolerance(group, least).lying
    wanted = promised_colluders(group) if colluders is None else colluders
    if not 0 <= wanted <= group - 2:
        raise ValueError(f"colluders must be in 0..{group - 2} (all but two of group = {group}), got {wanted}")
    if resisted < wanted:
        raise ValueError(
            f"threshold = {least} of group = {group} resists {resisted} clients on the side of a server that lies about who "
            f"dropped out, not {wanted}: set threshold = {(group + wanted) // 2 + 1}, or ask for colluders = {resisted}"
        )
