"""Tables for terminal, page, report and export: typed columns and rows of plain values."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedgauge.attacks.modality.base import Measured
from fedgauge.server.views.formatting import NONE, number, percent, rounded

Cell = str | int | float | tuple[float | None, float | None] | None
Form = Literal["text", "count", "number", "interval", "rate"]


@dataclass(frozen=True)
class Column:
    """Column of a table.

    Args:
        key: name for programs.
        head: heading with the unit.
        form: interval: the two ends; rate: count and total.
        digits: decimals of a number; None: three significant digits.
        fraction: a share of 1, written in percent.
        less: sort small numbers first.
    """

    key: str
    head: str
    form: Form = "text"
    digits: int | None = None
    fraction: bool = False
    less: bool = False

    @classmethod
    def of(cls, by: Measured, key: str, head: str, form: Form = "number") -> "Column":
        digits, named = 0 if by.fraction else by.digits, f"{head} ({by.unit})" if by.unit else head
        return cls(key, named, form, digits, by.fraction, not by.higher_is_better)

    def written(self, cell: Cell) -> str:
        if cell is None or cell == "":
            return NONE
        if isinstance(cell, tuple):
            low, high = cell
            return f"{low:.0f} of {high:.0f}" if self.form == "rate" else f"{self._number(low)} to {self._number(high)}"
        return self._number(float(cell)) if self.form == "number" else str(cell)

    def _number(self, value: float | None) -> str:
        return percent(value, self.digits or 0) if self.fraction else number(value, self.digits)


@dataclass(frozen=True, eq=False)
class Table:
    """Rows of cells in the order of the columns; a column `kind` marks rows of baselines and limits."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    @classmethod
    def of(cls, caption: str, columns: Sequence[Column], rows: Iterable[Sequence[Cell]]) -> "Table":
        """Make a table without empty columns."""
        lines = list(rows)
        used = [i for i in range(len(columns)) if not lines or any(row[i] not in (None, "") for row in lines)]
        return cls(caption, [columns[i] for i in used], [[row[i] for i in used] for row in lines])

    @classmethod
    def texts(cls, caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> "Table":
        return cls(caption, [Column(head, head) for head in heads], rows)

    def only(self, *keys: str) -> "Table":
        places = [i for key in keys for i, column in enumerate(self.columns) if column.key == key]
        return Table(self.caption, [self.columns[i] for i in places], [[row[i] for i in places] for row in self.rows])

    @property
    def records(self) -> list[Mapping[str, Cell]]:
        return [dict(zip((column.key for column in self.columns), row, strict=True)) for row in self.rows]

    @property
    def written(self) -> list[list[str]]:
        return [[c.written(cell) for c, cell in zip(self.columns, row, strict=True)] for row in self.rows]


def in_json(value: Any) -> Any:
    """Convert a view to JSON: infinity becomes text, NaN null."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return number(value) if value in (float("inf"), float("-inf")) else rounded(value)
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(key): in_json(each) for key, each in value.items()}
    if hasattr(value, "__dict__"):
        return in_json(vars(value))
    return [in_json(each) for each in value]
