"""What a ledger's rows may hold: SQLite stores any value in any column, and a ledger may come from anybody."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

MOST = 2**21 - 1  # rounds, clients, examples: the columns that `Scores` packs into one number
_LONGEST = 1 << 20  # letters of a text
_LONG = 16 << 20  # of a fact about a run: an app of a user's own may have 10^5 nodes
_SHORT = 300  # letters of a name, state or digest
_SECONDS = 1e12  # since 1970, or of work; a clock may go backwards

Fits = Callable[[object], bool]


def whole(least: int = 0, most: int = MOST) -> Fits:
    """Whether a value is a whole number within bounds."""
    return lambda value: type(value) is int and least <= value <= most


def text(longest: int = _LONGEST) -> Fits:
    """Whether a value is a text, not too long."""
    return lambda value: type(value) is str and len(value) <= longest


def number(value: object) -> bool:
    """Whether a value is a number; infinity is one (SQLite has no NaN)."""
    return type(value) in (float, int)


def _seconds(value: object) -> bool:
    return type(value) in (float, int) and -_SECONDS <= value <= _SECONDS  # type: ignore[operator]  # the type was just asked


def _share(value: object) -> bool:
    return type(value) in (float, int) and 0 <= value <= 1  # type: ignore[operator]  # the type was just asked


def or_null(fits: Fits) -> Fits:
    """Whether a value is missing or fits."""
    return lambda value: value is None or fits(value)


_COUNT, _ID, _NAME = whole(0, 2**53), whole(-(2**63), 2**63), text(_SHORT)
# by the names that the queries give their columns
COLUMNS: dict[str, tuple[Fits, str]] = {
    **dict.fromkeys(("round", "client"), (whole(), f"a whole number up to {MOST}")),
    **dict.fromkeys(("other", "at_round", "of_client"), (or_null(whole()), f"a whole number up to {MOST}, or nothing")),
    "examples": (or_null(_COUNT), "a number from 0 on, or nothing"),
    "example": (whole(-1), f"a whole number up to {MOST}, or -1"),
    **dict.fromkeys(("jobs", "waves", "n", "attempts", "workers", "busy"), (_COUNT, "a number from 0 on")),
    **dict.fromkeys(("latest",), (or_null(_COUNT), "a number from 0 on, or nothing")),
    **dict.fromkeys(("open", "remembers", "deterministic", "flat"), (whole(0, 1), "0 or 1")),
    **dict.fromkeys(("alarm", "silent"), (or_null(whole(0, 1)), "0 or 1, or nothing")),
    **dict.fromkeys(("id", "attack_id", "wave", "seed"), (_ID, "a whole number")),
    **dict.fromkeys(
        ("value", "accuracy", "loss", "best", "mean", "suspicion", "graded_to"), (or_null(number), "a number, or nothing")
    ),
    **dict.fromkeys(("seconds", "intercept_seconds", "span"), (or_null(_seconds), "a number of seconds, or nothing")),
    **dict.fromkeys(("name", "attack", "status", "state", "metric", "key"), (_NAME, f"a text of at most {_SHORT} letters")),
    **dict.fromkeys(("device", "precision", "torch", "driver", "code", "words"), (_NAME, f"a text of at most {_SHORT} letters")),
    "share": (_share, "a number from 0 to 1"),
    **dict.fromkeys(("digest", "memory"), (or_null(_NAME), f"a text of at most {_SHORT} letters, or nothing")),
    **dict.fromkeys(("planned", "knowledge"), (text(), f"a text of at most {_LONGEST} letters")),
    "fact": (text(_LONG), f"a text of at most {_LONG} letters"),
    **dict.fromkeys(
        ("reason", "error", "metrics", "training", "grading"),
        (or_null(text()), f"a text of at most {_LONGEST} letters, or nothing"),
    ),
}  # fmt: skip


class WrongValue(ValueError):
    """A row holds what no ledger holds; the message names the column and the value."""


def columns(names: Iterable[str]) -> list[tuple[int, str, Fits]]:
    """Place, name and check of each column that has one; other names are a query's own business."""
    return [(at, name, COLUMNS[name][0]) for at, name in enumerate(names) if name in COLUMNS]


def check(columns: Iterable[tuple[int, str, Fits]], row: Sequence[Any]) -> None:
    """Raise WrongValue for the first value that does not fit its column."""
    for at, name, fits in columns:
        if not fits(row[at]):
            raise WrongValue(f"expected {COLUMNS[name][1]} as its {name}, got {row[at]!r:.60}")
