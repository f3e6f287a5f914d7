"""What a curious server knows of SCAFFOLD's control variates: each client's, from the weights and its updates so far."""

from collections.abc import Callable
from dataclasses import replace

from fedgauge.attacks.base import Observation
from fedgauge.client.local_training import own_move, pull_after
from fedgauge.client.update import Update
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.tape import TapeError


def with_known_pull(seen: Observation, ledger: Ledger, read: Callable[[int, str], Observation]) -> Observation:
    """An observation of a SCAFFOLD client with the pull of its control variates; that of its first round has none.

    Args:
        read: the client's observation of a round, by its digest.

    Raises:
        TapeError: an earlier update of the client is not on the tape, so nobody but the client knows its variate.
    """
    own = {o["round"]: o for o in ledger.observations() if o["client"] == seen.client} if seen.round > 1 else {}
    pull: Update = {}
    before: Observation | None = None
    for round in range(1, seen.round):
        row = own.get(round)
        if row is None or row["status"] != "accepted" or not row["digest"]:
            raise TapeError(
                f"client {seen.client}'s control variate is not known in round {seen.round}, as the tape lacks its update of "
                f"round {round}: it follows from all of a client's updates"
            )
        now = read(round, row["digest"])
        pull, before = _next_pull(before, pull, now), now
    return replace(seen, pull=_next_pull(before, pull, seen))


def _next_pull(before: Observation | None, pull: Update, now: Observation) -> Update:
    return {} if before is None else pull_after(before.params, own_move(before.update, pull), now.params)
