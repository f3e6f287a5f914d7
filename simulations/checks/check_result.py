"""Carry out a check, and turn exceptions into problems with remedies."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from fedgauge.attacks.problem import Problem, Unattackable
from fedgauge.client.components import MEND, SpecError, own_line
from fedgauge.client.deployment.server_terms import RequestRefused

LONGEST = 120  # characters of an exception's own words; torch explains itself at length
TENSORS_ONLY = "compute with tensors: a number taken out of one (float(), .item(), `if`) cannot be differentiated"
GENERATOR = (
    "draw with the generator that is handed over (torch.randn(..., generator=rng)), and declare in `mean` what remains without "
    "the noise (often the identity) and in `update_distribution` how it is distributed"
)
_REMEDIES = (  # parts of torch's and Python's messages, the first that occurs decides
    (("cannot pickle", "support the deepcopy protocol"), "keep what cannot be copied out of the module's attributes"),
    ((".item()", "data-dependent", "Boolean value", "call numpy()", "calling .numpy()", "aten::_local_scalar"), TENSORS_ONLY),
    (("random operation",), GENERATOR),
    (("setup_context", "generate_vmap_rule"), "give its autograd Function a setup_context and generate_vmap_rule = True"),
    (("mutate a captured", "in-place", "inplace"), "let it build new tensors in place of changing the ones that it is given"),
    (("Expected more than 1 value per channel",), 'set [model] mode = "eval", or a [data] batch_size of at least 2'),
    (("derivative for", "double backward", "is not implemented"), "use another layer, or attacks that do not descend"),
    (("out of memory", "can't allocate memory"), "take a smaller network, batch or wave"),
)  # fmt: skip
Found = str | Problem  # a check's result; text if it works


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    name: str
    works: bool | None  # None: not checked
    needed: bool  # to train, to replay an update or for a planned attack
    found: Found
    stops: bool = False  # nothing is trained if it does not work

    @property
    def message(self) -> str:
        return str(self.found)

    @property
    def code(self) -> str:
        return self.found.code if isinstance(self.found, Problem) else ""


def attempt(name: str, check: Callable[[], Found], needed: bool = True, stops: bool = False) -> CheckResult:
    """Carry out a check of a user's code, which may raise anything."""
    try:
        found = check()
    except Exception as error:  # the failure is what the user asked to see
        found = problem_of(error)
    return CheckResult(name, not isinstance(found, Problem), needed, found, stops)


def attempt_all(name: str, checks: Iterable[CheckResult]) -> Iterator[CheckResult]:
    """Pass on the results of several checks; turn an exception into the last result, under this name."""
    try:
        yield from checks
    except Exception as error:  # a check calls a user's own code, which may raise anything
        yield CheckResult(name, False, True, problem_of(error), stops=True)


def problem_of(error: Exception, code: str = "error", otherwise: str = "") -> Problem:
    """Turn an exception of a check or of a user's code into a problem, with this remedy if no other is known."""
    if isinstance(error, Unattackable):
        return error.problem
    if isinstance(error, SpecError | RequestRefused):
        return Problem(code, "", str(error))
    return Problem(code, "", sentence(error), remedy(error, otherwise or (MEND if own_line(error) else "")))


def remedy(error: BaseException, otherwise: str = "") -> str:
    """Return what to change after this exception."""
    text = str(error)
    return next((words for parts, words in _REMEDIES if any(part in text for part in parts)), otherwise)


def sentence(error: BaseException) -> str:
    """Shorten an exception to one line, with the line of a user's code that raised it."""
    words = " ".join(str(error).split())
    short = words if len(words) <= LONGEST else words[:LONGEST].rsplit(" ", 1)[0] + " ..."
    return (f"{type(error).__name__}: {short}" if short else type(error).__name__) + own_line(error)
