"""Exit statuses of the commands that train and attack."""

from collections.abc import Collection

from fedgauge.server.store.run import Run
from fedgauge.server.views.outcomes import failure, inapplicable, none_accepted

FAILED, MISTAKE, INAPPLICABLE, INTERRUPTED = 1, 2, 3, 130  # 130: asked to stop, by the shells' convention


def exit_status(run: Run, attacks: Collection[str] | None = None, force: bool = False) -> int:
    """0 if everything was carried out, 1 if something failed, 3 if no attack applies.

    Args:
        attacks: judge these alone; default: all.
        force: whether the attacks were carried out although the replay check failed.
    """
    with run.ledger() as ledger:
        if ledger.meta().get("replay") == "mismatch" and not force:
            return FAILED
        if failure(ledger, attacks) or none_accepted(ledger):
            return FAILED
        return INAPPLICABLE if inapplicable(ledger, attacks) else 0
