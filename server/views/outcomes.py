"""How a run's attacks ran and ended, in words: on which devices, what failed, that none applies, that there was nothing."""

from collections.abc import Collection, Sequence

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import DeviceUse, sanitised
from fedgauge.server.views.formatting import listed
from fedgauge.server.views.participation import participation
from fedgauge.server.views.roles import is_attack

PRECISIONS = {"ieee": "float32 (IEEE)", "tf32": "TF32 products"}
MOST_DEVICES = 8  # devices in a sentence
MOST_REASONS = 10  # distinct reasons in one sentence: some contain a number, and so differ from job to job


def failure(ledger: Ledger, attacks: Collection[str] | None = None) -> str:
    """How many attacks failed, and the distinct reasons; empty if none did."""
    chosen = [row for row in ledger.outcomes() if attacks is None or row["attack"] in attacks]
    counts = {(row["attack"], row["status"]): row["jobs"] for row in chosen}
    failed = {attack: jobs for (attack, status), jobs in counts.items() if status == "failed"}
    if not failed:
        return ""
    reasons = [row for row in ledger.reasons("failed") if row["attack"] in failed]
    told = [f"{row['attack']} ({row['jobs']} x): {row['reason']}" for row in reasons]
    return f"{sum(failed.values())} of {sum(counts.values())} attacks failed: {listed(told, MOST_REASONS)}"


def inapplicable(ledger: Ledger, attacks: Collection[str] | None = None) -> str:
    """That no attack applies to any update, with the reasons; empty if one does, or if some have not ended."""
    real = [row for row in ledger.outcomes() if is_attack(row["attack"])]
    statuses = {row["status"] for row in real if attacks is None or row["attack"] in attacks}
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
    return f"attacked on {listed(each, MOST_DEVICES)}" if each else ""


def device_use(devices: Sequence[DeviceUse]) -> str:
    """Which devices work, the share of the time in which they did, and their finished waves; empty if there is the CPU alone.

    cuda:0 at work (93%), 12 waves; cuda:1 idle (90%), 11 waves
    """
    if all(of.device == "cpu" for of in devices):
        return ""
    return listed([f"{of.device} {_state(of)} ({of.share:.0%}), {of.waves} waves" for of in devices], MOST_DEVICES)


def _state(of: DeviceUse) -> str:
    if of.busy in (0, of.workers):
        return "at work" if of.busy else "idle"
    return f"{of.busy} of {of.workers} at work"
