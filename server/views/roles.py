"""What a name in the scores is: an attack, a limit on all attacks, or a baseline that does not read the update."""

from collections.abc import Collection
from typing import Literal

from fedgauge.attacks.modality.registry import BASELINES
from fedgauge.attacks.plan import LIMITS
from fedgauge.attacks.score_rows import attack_of, wrong_client
from fedgauge.server.store.ledger import Ledger

Role = Literal["attack", "limit", "baseline"]


def is_baseline(attack: str) -> bool:
    """Whether a name in the scores is a guess that does not read the update it is graded against."""
    return attack in BASELINES or attack_of(attack) != attack


def is_limit(attack: str) -> bool:
    """Whether a name in the scores is a bound on every attack."""
    return attack in LIMITS


def is_attack(attack: str) -> bool:
    """Whether a name in the scores is an attack on the update: neither a baseline nor a limit."""
    return role_of(attack) == "attack"


def role_of(attack: str) -> Role:
    """What a name in the scores is."""
    if is_limit(attack):
        return "limit"
    return "baseline" if is_baseline(attack) else "attack"


def attack_order(ledger: Ledger, names: Collection[str]) -> list[str]:
    """The names in the scores, sorted: attacks in the plan's order, then limits, then baselines."""
    planned = [row["name"] for row in ledger.attacks()]
    rank = {name: i for i, name in enumerate(planned)} | {wrong_client(n): i for i, n in enumerate(planned)}
    return sorted(names, key=lambda a: (is_baseline(a), is_limit(a), a not in BASELINES, rank.get(a, len(rank)), a))
