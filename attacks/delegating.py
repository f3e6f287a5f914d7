"""Attacks that pass their work, or a part of it, to another attack."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fedgauge.attacks.base import Attack
from fedgauge.attacks.plan import ATTACK
from fedgauge.client.components import build


@dataclass(frozen=True)
class DelegatingAttack(Attack):
    """An attack that another one does the work for.

    Args:
        attack: the other one's component table, its name, or the attack itself.
    """

    attack: str | Mapping[str, Any] | Attack = field(default_factory=lambda: {"use": "inverting_gradients"})

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.inner  # so that an unknown attack is an error here

    @cached_property
    def inner(self) -> Attack:
        if isinstance(self.attack, Attack):
            return self.attack
        built: Attack = build({"use": self.attack} if isinstance(self.attack, str) else self.attack, "attack", ATTACK)
        return built

    @property
    def on_cpu(self) -> bool:
        return self.inner.on_cpu

    @property
    def needs_derivative(self) -> bool:
        return self.inner.needs_derivative

    @property
    def trains_first(self) -> bool:
        return self.inner.trains_first
