"""Outcome of a run's attacks in words: devices, failures, and inapplicable attacks."""

from collections.abc import Collection

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import sanitised
from fedgauge.server.views.formatting import listed
from fedgauge.server.views.participation import participation

MOST_DEVICES = 8  # devices in a sentence
MOST_REASONS = 10  # distinct reasons in one sentence


def failure(ledger: Ledger, attacks: Collection[str] | None = None) -> str:
    """Count the failed attacks with their reasons; empty if none failed."""
    chosen = [row for row in ledger.outcomes() if attacks is None or row["attack"] in attacks]
    failed = {row["attack"]: row["jobs"] for row in chosen if row["status"] == "failed"}
    if not failed:
        return ""
    rows = [row for row in ledger.reasons("failed") if row["attack"] in failed]
    reasons = [f"{row['attack']} ({row['jobs']} x): {row['reason']}" for row in rows]
    total = sum(row["jobs"] for row in chosen)
    return f"{sum(failed.values())} of {total} attacks failed: {listed(reasons, MOST_REASONS)}"


def inapplicable(ledger: Ledger, attacks: Collection[str] | None = None) -> str:
    """Say that no attack applies to any update; empty if one does, or if some have not ended."""
    real = [row for row in ledger.outcomes() if row["role"] == "attack"]
    statuses = {row["status"] for row in real if attacks is None or row["attack"] in attacks}
    if statuses != {"not_applicable"} or ledger.progress().waiting:
        return ""
    return "no attack of this plan applies to these updates, so their leakage is unknown"


def none_accepted(ledger: Ledger, ended: bool = False) -> str:
    """Say that no client gave an update, with the reasons; empty if one did, or one may still (`ended`: none will)."""
    observations = ledger.observations()
    if any(o["status"] == "accepted" for o in observations) or not (observations or ended):
        return ""
    return f"no round got an update: {participation(observations) or 'no client answered'}"


def attacked_on(ledger: Ledger) -> str:
    """Name the devices and precision of the attacks, such as "attacked on cuda:0 NVIDIA H100, float32 (IEEE)"."""
    each = list(map(sanitised, ledger.devices()))
    return f"attacked on {listed(each, MOST_DEVICES)}" if each else ""
