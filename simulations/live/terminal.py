"""The live display of a run in a terminal: rounds, leakage and jobs as rows, beside the newest best reconstruction."""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import isinf

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text
from torch import Tensor

from fedgauge.attacks.modality.base import MainMetric, Modality
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.server.store.pictures import reconstruction
from fedgauge.server.store.run import Run
from fedgauge.server.views.formatting import in_unit
from fedgauge.server.views.roles import is_attack
from fedgauge.simulations.live import thumbnails
from fedgauge.simulations.live.progress import BestExample, Clock, RunProgress
from fedgauge.simulations.live.view import View

DRAWN_EVERY = 1.0  # seconds between two redraws if only the clock has changed
LABEL, DRAWING, TEXT = 20, 60, 32  # columns of a row: label, drawing at most, text at least
GAP = 3  # columns between rows and thumbnails
LEFT = LABEL + TEXT + 20  # columns that the rows need beside thumbnails
MARKS = {"right": "green", "misplaced": "yellow", "wrong": "dim"}
TILE, CAPTION = len("reconstruction"), 40  # columns at least


@dataclass(frozen=True)
class Glyphs:
    """The characters that a terminal can show.

    Args:
        levels: of a sparkline, from low to high.
        full, empty: the parts of a bar.
        ascii_only: only ASCII.
        blocks: half blocks in colours; else a ramp of characters.
    """

    levels: str = "▁▂▃▄▅▆▇█"
    full: str = "█"
    empty: str = "░"
    ascii_only: bool = False
    blocks: bool = True

    @classmethod
    def of(cls, console: Console) -> "Glyphs":
        """The characters of a terminal."""
        ascii_only = console.options.ascii_only
        blocks = console.color_system in ("256", "truecolor") and not console.no_color and not ascii_only
        return cls(".:-=+*#@", "#", "-", True, False) if ascii_only else cls(blocks=blocks)

    def fit(self, text: str, columns: int, style: str = "") -> Text:
        """Text, never markup nor control codes, in exactly so many columns."""
        shown = "".join(c if c.isprintable() else " " for c in text)
        made = Text(shown.encode("ascii", "replace").decode() if self.ascii_only else shown, style, no_wrap=True)
        made.truncate(columns, overflow="crop" if self.ascii_only else "ellipsis", pad=True)
        return made


def sparkline(
    values: Mapping[int, float], last: int, width: int, low: float, high: float, levels: str = Glyphs.levels
) -> str:
    """A character for each round from 0 to `last`, blank without a value; neighbours are averaged if there are too many."""
    columns = min(last + 1, width)
    values_of: list[list[float]] = [[] for _ in range(columns)]
    for round, value in values.items():
        if 0 <= round <= last:
            values_of[round * columns // (last + 1)].append(value)
    return "".join(_level(sum(c) / len(c), low, high, levels) if c else " " for c in values_of)


def _level(value: float, low: float, high: float, levels: str) -> str:
    if high <= low:  # all values are equal
        return levels[len(levels) // 2]
    return levels[min(len(levels) - 1, max(0, int((value - low) / (high - low) * len(levels))))]


def bar(done: int, total: int, width: int, glyphs: Glyphs) -> str:
    """A bar that is full only when everything is done."""
    filled = min(width, width * done // total) if total else 0
    return glyphs.full * filled + glyphs.empty * (width - filled)


def duration(seconds: float) -> str:
    """1:05, or 2:01:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shown_value(value: float, by: MainMetric) -> str:
    """A value of the run's measure with its unit."""
    return "exact" if isinf(value) else in_unit(value, by)


@dataclass(frozen=True)
class DisplayRow:
    """One line: a label, a drawing and a text, which takes the drawing's room if there is none."""

    label: str
    drawing: str | None
    text: str
    style: str = ""

    def line(self, width: int, drawing: int, glyphs: Glyphs) -> Text:
        """The line in exactly `width` columns."""
        label = glyphs.fit(self.label, LABEL, self.style)
        rest = max(0, width - LABEL - 2)
        if self.drawing is None:
            return Text.assemble(label, "  ", glyphs.fit(self.text, rest, self.style))
        drawn = glyphs.fit(self.drawing, drawing, self.style)
        return Text.assemble(label, "  ", drawn, "  ", glyphs.fit(self.text, max(0, rest - drawing - 2), self.style))


class LiveDisplay(View):
    """The live display; its number of lines depends on the number of attacks only, so that nothing jumps."""

    def __init__(self, run_progress: RunProgress, run: Run, console: Console, clock: Clock = time.monotonic) -> None:
        super().__init__(run_progress)
        self.run = run
        self.console = console
        self._clock = clock
        self._live: Live | None = None
        self._drawn: tuple[float, str] | None = None  # when, and with which note
        self._kept: tuple[object, list[list[Text]]] = (None, [])  # a reconstruction and its thumbnails

    @contextmanager
    def shown(self) -> Iterator[View]:
        self.run_progress.refresh(force=True)
        # drawn by `update` alone: a thread that draws four times a second would take time from the training
        with Live(self, console=self.console, auto_refresh=False, transient=True, vertical_overflow="crop") as live:
            self._live = live
            yield self
        self._live = None

    def update(self) -> None:
        news, now = self.run_progress.refresh(), self._clock()
        stale = self._drawn is None or now - self._drawn[0] >= DRAWN_EVERY or self._drawn[1] != self.note
        if self._live is not None and (news or stale):
            self._drawn = (now, self.note)
            self._live.refresh()

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # two columns stay free for the terminal's own ^C: in a full line it would wrap and move everything below by one
        yield from self.lines(options.max_width - 2, options.size.height - 1, Glyphs.of(console))

    def lines(self, width: int, height: int, glyphs: Glyphs) -> list[Text]:
        """The display in at most `height` lines: thumbnails beside or below the rows if they fit, and as many attacks as fit."""
        art = self._art(glyphs)
        left = width - GAP - (art[0].cell_len if art else 0)
        if art and left >= LEFT and len(art) <= height:
            rows = self._rows(left, height, glyphs)
            blank = Text(" " * left)
            rows += [blank] * (len(art) - len(rows))
            art += [Text()] * (len(rows) - len(art))
            return [Text.assemble(row, " " * GAP, beside) for row, beside in zip(rows, art, strict=True)]
        rows = self._rows(width, height, glyphs)
        return [*rows, *art] if len(rows) + len(art) <= height else rows

    # ------------------------------------------------------------------------------------------------------------ rows

    def _rows(self, width: int, height: int, glyphs: Glyphs) -> list[Text]:
        drawing = max(8, min(DRAWING, width - LABEL - TEXT - 4))
        attacks, references = self._leakage(drawing, glyphs)
        above, below = self._training(drawing, glyphs), [*references, *self._service(drawing, glyphs)]
        room = height - len(above) - len(below)
        if len(attacks) > room:
            shown = max(0, room - 1)
            attacks = [*attacks[:shown], DisplayRow("", None, f"and {len(attacks) - shown} more attacks", "dim")]
        return [row.line(width, drawing, glyphs) for row in [*above, *attacks, *below]][: max(1, height)]

    def _training(self, drawing: int, glyphs: Glyphs) -> list[DisplayRow]:
        s = self.run_progress
        last = s.scenario.protocol.rounds
        curve = s.accuracy
        text = f"{curve[min(curve)]:.1%} first, {curve[max(curve)]:.1%} now" if curve else ""
        rounds = DisplayRow("rounds", bar(s.round, last, drawing, glyphs), f"{s.round} of {last}")
        accuracy = DisplayRow("accuracy", sparkline(curve, last, drawing, 0, 1, glyphs.levels), text, "cyan")
        return [rounds, accuracy] if s.training else [accuracy]

    def _leakage(self, drawing: int, glyphs: Glyphs) -> tuple[list[DisplayRow], list[DisplayRow]]:
        """A row for each attack and one for the best baseline, all on the same scale."""
        s = self.run_progress
        names = [a for a in s.reconstructing if is_attack(a)]
        curves = {a: s.means(a) for a in names} | {"": s.floor()}
        values = [v for curve in curves.values() for v in curve.values()]
        low, high = min(values, default=0.0), max(values, default=0.0)

        def row(key: str, label: str, style: str, worst: float | None = None) -> DisplayRow:
            curve = curves[key]
            text = f"{in_unit(curve[max(curve)], s.measure)} now" if curve else ""
            text += "" if worst is None else f", worst case {shown_value(worst, s.measure)}"
            drawn = sparkline(curve, s.scenario.protocol.rounds, drawing, low, high, glyphs.levels)
            return DisplayRow(label, drawn, text, style)

        attacks = [row(a, a, "yellow", s.worst_case(a)) for a in names]
        return attacks, [row("", "best baseline", "dim")] if names else []

    def _service(self, drawing: int, glyphs: Glyphs) -> list[DisplayRow]:
        s = self.run_progress
        jobs, progress = s.jobs, s.progress
        left, pace, expected = jobs.seconds_left, jobs.pace, jobs.expected
        estimates = [] if left is None else [f"about {duration(left)} left"]
        estimates += [] if pace is None else [f"{60 * pace:.0f} jobs/min"]
        return [
            DisplayRow(
                "jobs",
                bar(expected - jobs.left, expected, drawing, glyphs),
                f"{progress.done}/{expected} done, {progress.failed} failed",
            ),
            DisplayRow(
                "workers",
                bar(s.busy, s.slots, min(s.slots, drawing), glyphs),
                "; ".join(filter(None, (f"{s.busy} of {s.slots} at work, {progress.queued} queued", s.use))),
            ),
            DisplayRow("time", f"{duration(s.elapsed())} elapsed", ", ".join(estimates)),
            DisplayRow("replay check", None, s.replay[1], "yellow" if s.replay[0] == "mismatch" else ""),
            DisplayRow("", None, "; ".join(filter(None, (self.note, s.plan_coverage.settled))), "dim"),
        ]

    # ------------------------------------------------------------------------------------------------------ thumbnails

    def _art(self, glyphs: Glyphs) -> list[Text]:
        """Truth and reconstruction side by side with a caption; the size is the same from the start."""
        if not any(map(is_attack, self.run_progress.reconstructing)):
            return []
        dataset, best = self.run_progress.scenario.federation.shards.dataset, self.run_progress.best
        lines = ["no reconstruction yet", ""] if best is None else caption(*best, self.run_progress.measure)
        if (modality := modality_of(dataset)).shown_as == "text":
            return [*self._sentences(modality, glyphs), *(glyphs.fit(line, CAPTION) for line in lines)]
        _, h, w = dataset.shape
        pixels = thumbnails.size(h, w)
        tile = max(pixels[1], TILE)
        width = max(2 * tile + 2, CAPTION)
        tiles = self._tiles(glyphs) or [[Text()] * thumbnails.lines_of(pixels[0])] * 2
        truth, guess = ([Text(name), *t] for name, t in zip(("truth", "reconstruction"), tiles, strict=True))
        margin = " " * (width - 2 * tile - 2)
        made = [
            Text.assemble(_padded(a, tile), "  ", _padded(b, tile), margin) for a, b in zip(truth, guess, strict=True)
        ]
        return [*made, *(glyphs.fit(line, width) for line in lines)]

    def _sentences(self, modality: Modality, glyphs: Glyphs) -> list[Text]:
        """The truth, and the best reconstruction with its words marked; the size is the same from the start."""
        shown, pair = [Text(), Text()], self._images()
        if pair:
            truth = pair[0] if len(pair) == 2 else None
            known = [] if truth is None else modality.words(truth)
            guess = [glyphs.fit(w, len(w), MARKS[mark]) for w, mark in modality.marked(pair[-1], truth)]
            shown = [Text(" ".join(known)), Text(" ").join(guess)]
        lines = [Text("truth"), shown[0], Text("reconstruction"), shown[1]]
        for line in lines:
            line.truncate(CAPTION, overflow="crop" if glyphs.ascii_only else "ellipsis", pad=True)
        return lines

    def _tiles(self, glyphs: Glyphs) -> list[list[Text]]:
        """Thumbnails of the truth and of the best reconstruction; none if its images are not kept.

        The server of a deployment does not have the truth: its place stays empty.
        """
        key = (self.run_progress.best, glyphs.blocks)
        if self._kept[0] != key:
            draw = thumbnails.half_blocks if glyphs.blocks else thumbnails.gray_ramp
            tiles = [draw(image) for image in self._images()]
            self._kept = (key, tiles if len(tiles) != 1 else [[Text()] * len(tiles[0]), *tiles])
        return self._kept[1]

    def _images(self) -> list[Tensor]:
        if self.run_progress.best is None:
            return []
        attack, round, hit = self.run_progress.best
        found = reconstruction(self.run, round, hit.client, attack)
        if isinstance(found, str) or hit.example >= len(found.get("x", ())):  # somebody else's file may hold less
            return []
        guess = found["x"][hit.example]
        if self.run_progress.ledger.deployed:
            return [guess]
        return [self.run_progress.scenario.federation.batch_at(hit.client, round).x[hit.example], guess]


def caption(attack: str, round: int, hit: BestExample, by: MainMetric) -> list[str]:
    """A reconstruction's caption, on two lines."""
    return [attack, f"round {round}, client {hit.client}, example {hit.example}: {shown_value(hit.value, by)}"]


def _padded(line: Text, columns: int) -> Text:
    made = line.copy()
    made.pad_right(columns - made.cell_len)
    return made
