"""How a run's attacks ended, in words: what failed, that none applies, that there was nothing to attack."""

from collections.abc import Collection
from typing import Any

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.views.participation import participation
from fedgauge.server.views.roles import is_attack

MOST_REASONS = 10  # distinct reasons in one sentence: some contain a number, and so differ from job to job


def failure(ledger: Ledger, attacks: Collection[str] | None = None) -> str:
    """How many attacks failed, and the distinct reasons; empty if none did."""
    counts = {(row["attack"], row["status"]): row["jobs"] for row in _outcomes(ledger, attacks)}
    failed = {attack: jobs for (attack, status), jobs in counts.items() if status == "failed"}
    if not failed:
        return ""
    reasons = [row for row in ledger.reasons("failed") if row["attack"] in failed]
    told = [f"{row['attack']} ({row['jobs']} x): {row['reason']}" for row in reasons[:MOST_REASONS]]
    more = [f"{len(reasons) - MOST_REASONS} more reasons"] if len(reasons) > MOST_REASONS else []
    real = {key: jobs for key, jobs in counts.items() if is_attack(key[0])}
    every = bool(real) and all(status == "failed" for _, status in real)
    how_many = "every attack failed" if every else f"{sum(failed.values())} of {sum(counts.values())} attacks failed"
    return f"{how_many}: {'; '.join([*told, *more])}"


def inapplicable(ledger: Ledger, attacks: Collection[str] | None = None) -> str:
    """That no attack applies to any update, with the reasons; empty if one does, or if some have not ended."""
    progress = ledger.progress()
    statuses = {row["status"] for row in _outcomes(ledger, attacks) if is_attack(row["attack"])}
    if statuses != {"not_applicable"} or progress.queued + progress.leased:
        return ""
    return "no attack of this plan applies to these updates, so nothing is known of what they leak"


def none_accepted(ledger: Ledger, ended: bool = False) -> str:
    """That no client gave an update in any round, and why; empty if one did.

    Args:
        ended: the training is over: a run without any round had no client, either. Otherwise it has not come to a round yet.
    """
    observations = ledger.observations()
    if any(o["status"] == "accepted" for o in observations) or not (observations or ended):
        return ""
    return f"no round got an update: {participation(observations) or 'no client answered'}"


def _outcomes(ledger: Ledger, attacks: Collection[str] | None) -> list[dict[str, Any]]:
    return [dict(row) for row in ledger.outcomes() if attacks is None or row["attack"] in attacks]
