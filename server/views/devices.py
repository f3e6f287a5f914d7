"""On which devices a run was attacked, how these computed, and how busy they are."""

from collections.abc import Sequence

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import DeviceUse, sanitised

PRECISIONS = {"ieee": "float32 (IEEE)", "tf32": "TF32 products"}
MOST = 8  # devices in a sentence


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
    more = [f"{len(each) - MOST} more kinds"] if len(each) > MOST else []
    return "attacked on " + "; ".join([*each[:MOST], *more]) if each else ""


def device_use(devices: Sequence[DeviceUse]) -> str:
    """Which devices work, the share of the time in which they did, and their finished waves; empty if there is the CPU alone.

    cuda:0 at work (93%), 12 waves; cuda:1 idle (90%), 11 waves
    """
    if all(of.device == "cpu" for of in devices):
        return ""
    more = [f"{len(devices) - MOST} more"] if len(devices) > MOST else []
    return "; ".join(
        [*(f"{of.device} {_state(of)} ({of.share:.0%}), {of.waves} waves" for of in devices[:MOST]), *more]
    )


def device_shares(devices: Sequence[DeviceUse]) -> str:
    """The same in few letters: cuda:0 93%, cuda:1 90%."""
    if all(of.device == "cpu" for of in devices):
        return ""
    return ", ".join(f"{of.device} {of.share:.0%}" for of in devices[:MOST])


def _state(of: DeviceUse) -> str:
    if of.busy in (0, of.workers):
        return "at work" if of.busy else "idle"
    return f"{of.busy} of {of.workers} at work"
