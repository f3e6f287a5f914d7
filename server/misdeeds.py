"""What a malicious server's run shows, side by side: what it sent, what that won, who noticed, what it cost the federation."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from attacks.metrics import PSNR_CAP
from client.inspection import ALARM, REASON
from server.analysis import Scores, is_attack
from server.ledger import Ledger
from server.scenario import Scenario

Key = tuple[int, int]  # round, client
Row = Any  # of the ledger: by name


def misdeeds(scenario: Scenario, scores: Scores, ledger: Ledger) -> dict[str, str]:
    """By heading, a sentence each; empty where the server is honest."""
    if not scenario.malice:
        return {}
    seen = ledger.observations()
    met = {(o["round"], o["client"]) for o in seen if _meets(scenario, o["round"], o["client"])}
    rounds = sorted({r for r, _ in met})
    sent = f"{'; '.join(map(str, scenario.malice))}: {_many(len(met), 'message')} in {_many(len(rounds), 'round')}"
    return {
        "sent": sent,
        "recovered": _recovered(_best(scores), met, rounds),
        "noticed": _noticed(seen, met),
        "cost": _cost(scenario, ledger, seen, met, rounds),
    }


def _meets(scenario: Scenario, round: int, client: int) -> bool:
    """Whether what the server sees of a client is of other weights: of a secure sum, one member's are enough."""
    members = scenario.protocol.members(client, round) or (client,)
    return any(aimed.aim.meets(round, c) for aimed in scenario.malice for c in members)


def _best(scores: Scores) -> dict[tuple[int, int, int], float]:
    """PSNR by round, client and example, of the attack that came nearest; raw."""
    ours = {i for i, name in enumerate(scores.attacks) if is_attack(name)}
    best: dict[tuple[int, int, int], float] = {}
    if "psnr" not in scores.metrics:
        return best
    rows = (scores.metric == scores.metrics.index("psnr")) & ~(scores.value != scores.value)
    columns = (scores.round, scores.client, scores.example, scores.attack, scores.value)
    for r, client, example, attack, value in zip(*(column[rows].tolist() for column in columns), strict=True):
        if attack in ours:
            best[r, client, example] = max(value, best.get((r, client, example), value))
    return best


def _recovered(best: Mapping[tuple[int, int, int], float], met: set[Key], rounds: Sequence[int]) -> str:
    if not best:
        return "no image has been graded"
    theirs = {k: v for k, v in best.items() if k[:2] in met}
    others = {k: v for k, v in best.items() if k[:2] not in met}
    words = f"of the images behind altered weights {_exact(theirs.values())}"
    if first := min((r for (r, _, _), v in theirs.items() if v > PSNR_CAP), default=None):
        words += f", the first after {_many(rounds.index(first) + 1, 'such round')} (round {first})"
    return f"{words}; of all others {_exact(others.values())}"


def _exact(values: Iterable[float]) -> str:
    found = list(values)
    if not found:
        return "none was graded"
    exact = sum(v > PSNR_CAP for v in found)
    nearest = "" if exact else f"; the best {max(found):.1f} dB"
    return f"{exact} of {len(found)} over {PSNR_CAP:g} dB{nearest}"


def _noticed(seen: Sequence[Row], met: set[Key]) -> str:
    """Alarms among the messages that were altered, and among the others; the suspicions where clients tell them."""
    alarms = {(o["round"], o["client"]) for o in seen if ALARM in o["reason"] or o["reason"].startswith(REASON)}
    honest = {(o["round"], o["client"]) for o in seen} - met
    if not any("suspicion" in o["reason"] or o["reason"].startswith(REASON) for o in seen):
        return (
            "no client's guard has said anything (clients inspect what they are sent where [guard] inspect is not off)"
        )
    words = (
        f"guards alarmed at {len(alarms & met)} of {len(met)} altered messages and {len(alarms & honest)} of {len(honest)} "
        "honest ones"
    )
    scores = [_suspicion(o["reason"]) for o in seen if (o["round"], o["client"]) in met]
    told = [s for s in scores if s is not None]
    return (
        f"{words}; suspicion {min(told):.3g} to {max(told):.3g} at the altered ones (alarm above 1)" if told else words
    )


def _suspicion(reason: str) -> float | None:
    _, found, rest = reason.partition("suspicion ")
    return float(rest.split()[0].rstrip(":;")) if found else None


def _cost(scenario: Scenario, ledger: Ledger, seen: Sequence[Row], met: set[Key], rounds: Sequence[int]) -> str:
    """What became of the updates, and how accuracy went in the rounds in which the server was malicious and in the others."""
    accuracy = {r["round"]: r["accuracy"] for r in ledger.rounds() if r["accuracy"] is not None}
    steps = {r: 100 * (accuracy[r] - accuracy[r - 1]) for r in accuracy if r - 1 in accuracy}
    kept = [aimed.aim.aggregate for aimed in scenario.malice]
    fate = "averaged as all are" if all(kept) else "averaged in part" if any(kept) else "left out of the average"
    words = f"answers to altered weights ({_many(len(met), 'update')} of {len(seen)}) were {fate}"
    both = (("in those rounds", True), ("in the others", False))
    moved = [(which, [step for r, step in steps.items() if (r in rounds) is own]) for which, own in both]
    parts = [f"{mean(part):+.1f} points a round {which}" for which, part in moved if part]
    return f"{words}; test accuracy moved by {', '.join(parts)}" if parts else words


def _many(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
