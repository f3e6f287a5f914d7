"""Exit statuses of the commands that train and attack."""

from collections.abc import Collection

from fedgauge.server.store.run import Run
from fedgauge.server.views.outcomes import failure, inapplicable, none_accepted
from fedgauge.server.views.snapshot import read_once

FAILED, MISTAKE, INAPPLICABLE, INCOMPLETE = 1, 2, 3, 4
INTERRUPTED = 130  # asked to stop, by the shells' convention


def exit_status(run: Run, attacks: Collection[str] | None = None, force: bool = False) -> int:
    """0 if everything was carried out, 1 if something failed, 3 if no attack applies, 4 if planned updates were never attacked.

    Args:
        attacks: judge only these; default: the whole plan.
        force: whether the attacks were carried out although the replay check failed.
    """
    with read_once(run) as reading:
        ledger = reading.ledger
        if reading.meta.get("replay") == "mismatch" and not force:
            return FAILED
        if failure(ledger, attacks) or none_accepted(ledger):
            return FAILED
        if inapplicable(ledger, attacks):
            return INAPPLICABLE
        return INCOMPLETE if attacks is None and reading.plan_coverage.words else 0
