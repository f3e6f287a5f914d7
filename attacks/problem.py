"""A problem as a value: what does not work, why, and what to change."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """A fault and its remedy; as text it is one sentence.

    Args:
        code: a short name by which programs and tests know it.
        where: the layer, parameter or part with the fault; empty: the whole.
        why: what is wrong with it.
        remedy: what to change; empty: nothing is known.

    Example:
        >>> str(Problem("no_bias", "layer 'fc'", "has no bias", "add one"))
        "layer 'fc' has no bias: add one"
    """

    code: str
    where: str
    why: str
    remedy: str = ""

    def __str__(self) -> str:
        sentence = f"{self.where} {self.why}" if self.where else self.why
        return f"{sentence}: {self.remedy}" if self.remedy else sentence


class Unattackable(ValueError):
    """A model or its updates cannot be attacked, for the reason in `problem`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def refuse(problem: Problem | None) -> None:
    if problem is not None:
        raise Unattackable(problem)
