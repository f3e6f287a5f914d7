"""The result of one check of the doctor, and how a check is carried out."""

from collections.abc import Callable
from dataclasses import dataclass

from fedgauge.client.components import SpecError
from fedgauge.client.deployment.terms import RequestRefused
from fedgauge.simulations.checks.remedies import remedy, sentence


@dataclass(frozen=True)
class CheckResult:
    """One check: whether it works (None: not checked), whether fedgauge needs it, and a sentence."""

    name: str
    works: bool | None
    needed: bool
    message: str


class CheckFailed(Exception):
    """What is wrong, and what to change."""


def attempt(name: str, check: Callable[[], str], needed: bool = True) -> CheckResult:
    """Carry out a check that returns a sentence, or raises one; a user's own code may raise anything."""
    try:
        return CheckResult(name, True, needed, check())
    except (CheckFailed, SpecError, RequestRefused) as error:
        return CheckResult(name, False, needed, str(error))
    except Exception as error:  # the failure is what the user asked to see
        change = remedy(error, "")
        return CheckResult(name, False, needed, sentence(error) + (f": {change}" if change else ""))
