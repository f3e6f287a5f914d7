"""Tables as data: each is built once, and the page, the report and the terminal print it."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedgauge.server.views.formatting import number, percent
from fedgauge.server.views.membership import MembershipRow, membership_table
from fedgauge.server.views.privacy import canaries
from fedgauge.server.views.reading import Reading
from fedgauge.server.views.success import UngradedAttack


@dataclass(frozen=True)
class Table:
    """A table of text; its last column may hold more than a few words."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def membership_tests(reading: Reading) -> Table:
    """Every test, baseline and limit of membership."""
    heads = ("question", "test", "members", "pairs in which the member scores higher", "95 % interval",
             "detected at 1 % false positives", "at 0.1 %")  # fmt: skip
    rows = membership_table(reading.scores, reading.order)
    return Table("Tests of membership", heads, [_membership_cells(row) for row in rows])


def _membership_cells(row: MembershipRow) -> list[str]:
    name = row.name if row.kind == "attack" else f"{row.name} ({row.kind})"
    interval = "–" if row.low is None or row.high is None else f"{percent(row.low)} to {percent(row.high)}"
    detected = [
        f"{row.told[rate].count} of {row.told[rate].n}" if rate in row.told else percent(row.shares.get(rate))
        for rate in (0.01, 0.001)
    ]
    return [row.question, name, str(row.n), percent(row.area), interval, *detected]


def canaries_by_round(reading: Reading) -> Table:
    """What canaries show, by round."""
    found, interval = canaries(reading), "95 % interval"

    def cells(row: dict[str, float | None], *keys: str) -> list[str]:
        return [number(row[key], None) for key in keys]

    def between(row: dict[str, float | None], low: str, high: str) -> str:
        return f"{number(row[low], None)} to {number(row[high], None)}"

    if found["kind"] == "examples":
        heads = (
            "round",
            "canaries",
            "surest guesses right",
            "epsilon at least",
            "at least, if all were right",
            "accounted",
        )
        rows = [
            [
                str(r["round"]),
                str(r["canaries"]),
                f"{r['right']} of {r['guesses']}",
                *cells(r, "epsilon", "most", "accounted"),
            ]
            for r in found["rows"]
        ]
        return Table("Canaries", heads, rows)
    heads = ("round", "epsilon seen", interval, "with the spread measured", interval, "accounted")
    rows = [
        [
            str(r["round"]), *cells(r, "epsilon"), between(r, "low", "high"),
            *cells(r, "measured"), between(r, "measured_low", "measured_high"), *cells(r, "accounted"),
        ]
        for r in found["rows"]
    ]  # fmt: skip
    return Table("Canaries", heads, rows)


def without_truth(rows: Sequence[UngradedAttack]) -> Table:
    """Attacks of which nothing could be graded."""
    heads = ("round", "accuracy", "attack", "came back", "median objective", "lowest", "ended")
    return Table(
        "Attacks without a truth",
        heads,
        [
            [
                str(r.round), percent(r.accuracy, 1), r.attack, str(r.reconstructions),
                number(r.objective, None), number(r.lowest, None), r.statuses,
            ]
            for r in rows
        ],
    )  # fmt: skip


def app_rounds(rows: Sequence[tuple[int, dict[str, float | None]]]) -> Table:
    """What a user's own app returned in each round."""
    names = list(dict.fromkeys(name for _, metrics in rows for name in metrics))
    cells = [[str(round), *(number(metrics.get(name), None) for name in names)] for round, metrics in rows]
    return Table("What clients and server returned in each round", ("round", *names), cells)
