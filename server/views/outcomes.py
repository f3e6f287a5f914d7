"""How a run's attacks ran and ended, in words: on which devices, what failed, that none applies, that there was nothing."""

from collections.abc import Collection, Sequence
from typing import Any

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import DeviceUse, sanitised
from fedgauge.server.views.participation import participation
from fedgauge.server.views.roles import is_attack

PRECISIONS = {"ieee": "float32 (IEEE)", "tf32": "TF32 products"}
MOST_DEVICES = 8  # devices in a sentence
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
    statuses = {row["status"] for row in _outcomes(ledger, attacks) if is_attack(row["attack"])}
    if statuses != {"not_applicable"} or ledger.progress().waiting:
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


def attacked_on(ledger: Ledger) -> str:
    """Where the attacks ran and how they were computed; empty before the first, and of an older fedgauge.

    attacked on cuda:0 and cuda:1 NVIDIA H100, float32 (IEEE)
    """
    kinds: dict[str, list[str]] = {}
    for row in ledger.numerics():
        parts = [row["name"], PRECISIONS.get(row["precision"], row["precision"])]
        parts += [] if row["deterministic"] else ["operators whose last bits may change"]
        kinds.setdefault(sanitised(", ".join(parts)), []).append(sanitised(row["device"]))
    each = [f"{' and '.join(dict.fromkeys(devices))} {kind}" for kind, devices in kinds.items()]
    more = [f"{len(each) - MOST_DEVICES} more kinds"] if len(each) > MOST_DEVICES else []
    return "attacked on " + "; ".join([*each[:MOST_DEVICES], *more]) if each else ""


def device_use(devices: Sequence[DeviceUse]) -> str:
    """Which devices work, the share of the time in which they did, and their finished waves; empty if there is the CPU alone.

    cuda:0 at work (93%), 12 waves; cuda:1 idle (90%), 11 waves
    """
    if all(of.device == "cpu" for of in devices):
        return ""
    more = [f"{len(devices) - MOST_DEVICES} more"] if len(devices) > MOST_DEVICES else []
    return "; ".join(
        [*(f"{of.device} {_state(of)} ({of.share:.0%}), {of.waves} waves" for of in devices[:MOST_DEVICES]), *more]
    )


def device_shares(devices: Sequence[DeviceUse]) -> str:
    """The same in few letters: cuda:0 93%, cuda:1 90%."""
    if all(of.device == "cpu" for of in devices):
        return ""
    return ", ".join(f"{of.device} {of.share:.0%}" for of in devices[:MOST_DEVICES])


def _state(of: DeviceUse) -> str:
    if of.busy in (0, of.workers):
        return "at work" if of.busy else "idle"
    return f"{of.busy} of {of.workers} at work"


def _outcomes(ledger: Ledger, attacks: Collection[str] | None) -> list[dict[str, Any]]:
    return [dict(row) for row in ledger.outcomes() if attacks is None or row["attack"] in attacks]
