"""Role of a name in the scores: an attack, a limit on all attacks, or a baseline that does not read the update."""

from collections.abc import Collection
from typing import Literal

from fedgauge.attacks.modality.registry import BASELINES
from fedgauge.attacks.plan import LIMITS
from fedgauge.attacks.score_rows import attack_of, wrong_client
from fedgauge.server.store.ledger import Ledger

Role = Literal["attack", "limit", "baseline"]


def is_baseline(attack: str) -> bool:
    """Check for a guess that does not read the update it is graded against."""
    return attack in BASELINES or attack_of(attack) != attack


def is_limit(attack: str) -> bool:
    """Check for a bound on every attack."""
    return attack in LIMITS


def is_attack(attack: str) -> bool:
    """Check for an attack on the update.

    Example:
        >>> is_attack("dlg"), is_attack("mean_image"), is_attack("wrong_client(dlg)")
        (True, False, False)
    """
    return role_of(attack) == "attack"


def role_of(attack: str) -> Role:
    """Return the role of a name in the scores."""
    if is_limit(attack):
        return "limit"
    return "baseline" if is_baseline(attack) else "attack"


def attack_order(ledger: Ledger, names: Collection[str]) -> list[str]:
    """Sort the names in the scores: attacks in the plan's order, then limits, then baselines."""
    planned = [row["name"] for row in ledger.attacks()]
    rank = {name: i for i, name in enumerate(planned)} | {wrong_client(n): i for i, n in enumerate(planned)}
    return sorted(names, key=lambda a: (is_baseline(a), is_limit(a), a not in BASELINES, rank.get(a, len(rank)), a))
