"""The result of one check of the doctor, and how a check is carried out."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from fedgauge.client.components import MEND, SpecError, own_line
from fedgauge.client.deployment.terms import RequestRefused
from fedgauge.simulations.checks.remedies import remedy, sentence


@dataclass(frozen=True)
class CheckResult:
    """One check and a sentence.

    Args:
        works: None: not checked.
        needed: whether fedgauge needs it, to train, to replay an update or for a planned attack.
        stops: whether nothing is trained where it does not work.
    """

    name: str
    works: bool | None
    needed: bool
    message: str
    stops: bool = False


class CheckFailed(Exception):
    """What is wrong, and what to change."""


def require(holds: object, words: str) -> None:
    """Raise CheckFailed with these words unless something holds."""
    if not holds:
        raise CheckFailed(words)


def attempt(name: str, check: Callable[[], str], needed: bool = True, stops: bool = False) -> CheckResult:
    """Carry out a check that returns a sentence, or raises one; a user's own code may raise anything."""
    try:
        return CheckResult(name, True, needed, check(), stops)
    except Exception as error:  # the failure is what the user asked to see
        return CheckResult(name, False, needed, explain(error), stops)


def attempt_all(name: str, checks: Iterable[CheckResult]) -> Iterator[CheckResult]:
    """Pass on the results of several checks; an exception on the way becomes the last result, under this name."""
    try:
        yield from checks
    except Exception as error:  # a check calls a user's own code, which may raise anything
        yield CheckResult(name, False, True, explain(error), stops=True)


def explain(error: Exception) -> str:
    """What is wrong and what to change, of an exception of a check or of a user's code."""
    if isinstance(error, CheckFailed | SpecError | RequestRefused):
        return str(error)
    change = remedy(error, MEND if own_line(error) else "")
    return sentence(error) + (f": {change}" if change else "")
