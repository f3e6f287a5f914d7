"""Figures for papers: each plot of a run as PNG and SVG, one column wide, the same bytes for the same ledger."""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, MaxNLocator, MultipleLocator, PercentFormatter
from numpy.typing import NDArray

from fedgauge.attacks.grading.image_metrics import HIGHER_IS_BETTER
from fedgauge.client.components import SpecError
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.tape import write_bytes
from fedgauge.server.views.compare import distinct
from fedgauge.server.views.formatting import LABELS, RATES
from fedgauge.server.views.gallery import Card, Gallery
from fedgauge.server.views.intervals import Rate
from fedgauge.server.views.leakage import Leak, as_rate, leakage
from fedgauge.server.views.overview import LIMIT
from fedgauge.server.views.reading import Reading
from fedgauge.server.views.roles import Role, attack_order, is_attack, is_baseline, is_limit, role_of
from fedgauge.server.views.scores import OF_TEXT, Scores, capped, known_metrics
from fedgauge.server.views.success import THRESHOLDS, success_curve
from fedgauge.simulations.reports.certificates import GaussianMechanism, certified, gaussian_mechanism
from fedgauge.simulations.reports.export import pixels
from fedgauge.simulations.reports.sampling import sample_examples

WIDTH = 3.3  # inches: a column of most two-column papers
TALL = 2.1  # inches: axes with their labels, without the legend
LINE = 0.15  # inches: of one line of text
ROOM = 6  # examples in the strip
LETTER = 0.0505  # inches: of one letter of 6 points in a fixed width
PARTS = (*RATES, "label_accuracy")  # metrics that are parts of a whole
PERCENT = (-0.02, 1.03)
CELLS = 2000  # from which on a heat map is pixels in an SVG too
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito's, in the report's order
MARKERS = ("o", "s", "D", "^", "P", "*", "v")  # one more than colours: the seventh attack looks like none before it
DASHES: tuple[Any, ...] = ("--", "-.", (0, (1.5, 3)), (0, (6, 1.5)), (0, (4, 1.5, 1, 1.5, 1, 1.5)))
INK, MUTED, GRID, PURPLE = "#1b1f24", "#59636e", "#d5dae0", "#6a3d9a"
LONG_DASH = (0, (9, 3))
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with Matplotlib: the same letters everywhere
    "font.size": 7.5,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.titlesize": 7.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "hatch.color": GRID,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "legend.columnspacing": 1.2,
    "legend.labelspacing": 0.35,
    "text.parse_math": False,  # a dollar in a name is no formula
    "savefig.dpi": 300,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "fedgauge",  # else ids are drawn anew in each file
}


@dataclass(frozen=True, eq=False)
class PaperFigure:
    """A figure, its file's name without ending, and what the file says of itself."""

    name: str
    figure: Figure
    about: str


@dataclass(frozen=True)
class LineStyle:
    """How a name in the scores is drawn."""

    color: str
    dash: Any
    marker: str
    width: float

    @property
    def line(self) -> dict[str, Any]:
        """The arguments of a line."""
        return {"color": self.color, "linestyle": self.dash, "linewidth": self.width}


def write_figures(runs: Sequence[Run], folder: Path) -> tuple[list[Path], list[str]]:
    """Every figure of some runs, and of how they compare, each file written atomically and for its owner only.

    Returns the paths, and what is not drawn, in sentences. One run's files lie in the folder itself, several runs' in a
    folder each.
    """
    subjects = [_RunFigures.read(run) for run in dict.fromkeys(Run(run.folder.resolve()) for run in runs)]
    places = [folder] if len(subjects) == 1 else [folder / name for name in distinct(s.run.name for s in subjects)]
    paths, missing = [], []
    with matplotlib.rc_context():  # what is changed inside is undone at its end
        matplotlib.rcdefaults()  # a user's own style would change the bytes
        matplotlib.rcParams.update(STYLE)
        for subject, place in zip(subjects, places, strict=True):
            if not len(subject.scores):
                missing.append(f"{subject.run.name}: no attack has given a score yet, so there is nothing to draw")
            for drawing in _drawings(subject):
                paths += _save(drawing, place)
        if len(subjects) > 1:
            drawings = _comparison(subjects)
            for drawing in drawings:
                paths += _save(drawing, folder)
            if not drawings:
                missing.append("runs are compared where both accuracy and leakage are known, of two runs at least")
    return paths, missing


def _save(drawing: PaperFigure, folder: Path) -> list[Path]:
    paths = []
    # no date and no program: equal ledgers give equal bytes
    told = {"Title": drawing.name, "Description": drawing.about}
    for kind, silent in (("png", {"Software": None}), ("svg", {"Date": None})):
        data = io.BytesIO()
        drawing.figure.savefig(data, format=kind, metadata={**told, **silent})
        drawing.figure.set_layout_engine("none")  # laid out once: it is the half of the work
        paths.append(folder / f"{drawing.name}.{kind}")
        write_bytes(paths[-1], data.getvalue())
    return paths


# ------------------------------------------------------------------------------------------------------- what is drawn


@dataclass(frozen=True, eq=False)
class _RunFigures:
    """One run as far as figures show it."""

    run: Run
    scores: Scores
    order: Sequence[str]
    line_styles: Mapping[str, LineStyle]
    leaks: Mapping[str, Sequence[Leak]]  # by metric
    curve: Mapping[str, Sequence[Rate]]
    accuracy: Mapping[int, float]
    certified: Sequence[float] | None
    cards: Sequence[Card] = field(repr=False)
    knowledge: str

    @classmethod
    def read(cls, run: Run) -> "_RunFigures":
        with run.ledger() as ledger:
            scores = Scores.read(ledger)
            planned = [row["name"] for row in ledger.attacks()]
            order = attack_order(ledger, {*scores.attacks, *planned})
            curve = success_curve(scores, ledger) if len(scores) else {}
            mechanism = _mechanism(run)
            return cls(
                run=run,
                scores=scores,
                order=order,
                line_styles=line_styles(order),
                leaks={m: leakage(scores, m) for m in known_metrics(scores)},
                curve=curve,
                accuracy={r["round"]: r["accuracy"] for r in ledger.rounds() if r["accuracy"] is not None},
                certified=certified(curve, mechanism) if mechanism and curve else None,
                cards=_strip(run),
                knowledge=_knowledge(ledger),
            )

    @property
    def attacks(self) -> list[str]:
        """The real ones, in the plan's order."""
        return [a for a in self.order if is_attack(a)]


def _mechanism(run: Run) -> GaussianMechanism | None:
    """Of the run's chain; None where its data is not on this machine."""
    try:
        federation = run.scenario().federation
    except SpecError:
        return None
    return gaussian_mechanism(federation.chain, federation.shards.batch_size, federation.model)


def _strip(run: Run) -> list[Card]:
    """The cards of the strip of pictures or sentences: those whose truth is on this machine."""
    with closing(Reading(run)) as reading, reading.now():
        gallery = Gallery(reading)
        found = sample_examples(gallery, ROOM).cards(gallery)
    return [
        card for cards in found.values() for card in cards if card.truth is not None or card.truth_words is not None
    ]


def _knowledge(ledger: Ledger) -> str:
    """What each attacker knew, which a figure must not be parted from."""
    real = [row for row in ledger.attacks() if not is_baseline(row["name"])]
    return ". ".join(f"{row['name']}: {row['knowledge']}" for row in real)


def line_styles(order: Sequence[str]) -> dict[str, LineStyle]:
    """Attacks in colours with a marker each, baselines grey and dashed, limits purple in long dashes."""
    found, attacks, baselines = {}, count(), count()
    for name in order:
        match role_of(name):
            case "attack":
                i = next(attacks)
                found[name] = LineStyle(COLOURS[i % len(COLOURS)], "-", MARKERS[i % len(MARKERS)], 1.3)
            case "limit":
                found[name] = LineStyle(PURPLE, LONG_DASH, "_", 1.3)
            case "baseline":
                found[name] = LineStyle(MUTED, DASHES[next(baselines) % len(DASHES)], "_", 0.9)
    return found


def _drawings(subject: _RunFigures) -> Iterator[PaperFigure]:
    about = f"{subject.run.name}. {subject.knowledge}"
    for metric, leaks in subject.leaks.items():
        yield PaperFigure(f"leakage-{metric}", _leakage(subject, metric, leaks), about)
    if subject.curve:
        yield PaperFigure("success", _success(subject), about)
    worst, measure = worst_psnr(subject.scores), subject.scores.measure
    if worst:
        yield PaperFigure("clients", _clients(worst, f"worst {measure.name} ({measure.unit})"), about)
    if subject.cards:
        yield PaperFigure("gallery", _gallery(subject), about)


# ----------------------------------------------------------------------------------------------- leakage over rounds


@dataclass(frozen=True)
class LeakPoint:
    """What is drawn of a Leak: its mean, an attack's worst case (an exact hit at the cap; a rate has none), 95 % interval."""

    attack: str
    round: int  # 0: all of them
    mean: float
    worst: float | None
    band: tuple[float, float] | None
    clusters: int

    @property
    def kind(self) -> Role:
        """What the attack is."""
        return role_of(self.attack)


def _spots(leaks: Sequence[Leak]) -> list[LeakPoint]:
    """Of the Leaks that have a value."""
    return [
        LeakPoint(k.attack, k.round or 0, k.mean, _worst(k), _band(k), k.clusters) for k in leaks if k.mean is not None
    ]


def _worst(leak: Leak) -> float | None:
    if leak.best is None or leak.metric in RATES or not is_attack(leak.attack):
        return None
    return float(capped(leak.metric, np.array(leak.best)))


def _band(leak: Leak) -> tuple[float, float] | None:
    if leak.metric in RATES:
        return as_rate(leak).interval
    return None if leak.low is None or leak.high is None else (leak.low, leak.high)


def _leakage(subject: _RunFigures, metric: str, leaks: Sequence[Leak]) -> Figure:
    spots = _spots([leak for leak in leaks if leak.round is not None])
    by_attack = {a: own for a in subject.order if (own := [s for s in spots if s.attack == a])}
    attacks = [a for a in by_attack if is_attack(a)]
    figure, axes = _canvas()
    last = max(1, *subject.accuracy, *(spot.round for spot in spots))
    handles: list[Artist] = []
    for attack, found in by_attack.items():
        look = subject.line_styles[attack]
        if len(found) > 1:
            handles.append(_over_rounds(axes, found, look))
        elif attack in attacks:  # beside each other: error bars would hide one another
            shift = 0.03 * last * (attacks.index(attack) - (len(attacks) - 1) / 2)
            handles.append(_beside(axes, found[0], look, shift))
        else:
            handles.append(_level(axes, found[0], look, 0.15 * last))
    if any(spot.worst is not None for spot in spots):
        handles.append(Line2D([], [], color=INK, ls=":", marker="o", mfc="none", lw=1, label="worst case"))
    handles += _interval(metric, [s for s in spots if s.attack in attacks], Patch(color=INK, alpha=0.2, lw=0))
    if subject.accuracy:
        handles += _accuracy(axes, subject.accuracy)
    wide = 1.18 if any(len(found) == 1 for found in by_attack.values()) else 1.03
    axes.set(xlim=(-0.03 * last, wide * last), xlabel="round", ylabel=LABELS.get(metric, metric))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if metric in PARTS:
        _percent(axes.yaxis)
        axes.set_ylim(PERCENT)
    else:
        values = [value for s in spots for value in (s.mean, s.worst) if value is not None]
        axes.set_ylim(_window(metric, values, axes.get_ylim()))
    _legend(figure, handles)
    return figure


def _over_rounds(axes: Axes, spots: Sequence[LeakPoint], look: LineStyle) -> Artist:
    """Means of one name; an attack's with their 95 % band, and its worst case dotted."""
    attack, often = spots[0].kind == "attack", max(1, len(spots) // 10)
    bands = [(spot.round, spot.band) for spot in spots if spot.band]
    if attack and len(bands) > 1:
        rounds, low, high = [r for r, _ in bands], [b[0] for _, b in bands], [b[1] for _, b in bands]
        axes.fill_between(rounds, low, high, color=look.color, alpha=0.2, linewidth=0)
    if worst := [(spot.round, spot.worst) for spot in spots if spot.worst is not None]:
        x, y = [r for r, _ in worst], [w for _, w in worst]
        axes.plot(x, y, color=look.color, ls=":", lw=1, marker=look.marker, mfc="none", mew=0.7, markevery=often)
    (line,) = axes.plot(
        [s.round for s in spots], [s.mean for s in spots], **look.line, marker=look.marker if attack else "",
        markevery=often, label=_named(spots[0].attack), zorder=3 if attack else 2.5,
    )  # fmt: skip
    return line


def _beside(axes: Axes, spot: LeakPoint, look: LineStyle, shift: float) -> Artist:
    """The mean of one attack in its only round, with its 95 % interval and its worst case."""
    point: dict[str, Any] = {"color": look.color, "ls": "", "marker": look.marker}
    x = spot.round + shift
    if spot.band:
        axes.vlines(x, *spot.band, color=look.color, linewidth=2.5, alpha=0.3)
    (line,) = axes.plot([x], [spot.mean], **point, label=_named(spot.attack), zorder=3)
    if spot.worst is not None:
        axes.plot([x], [spot.worst], **point, mfc="none", mew=0.7)
    return line


def _level(axes: Axes, spot: LeakPoint, look: LineStyle, half: float) -> Artist:
    """The mean of a baseline or a limit in its only round, as a piece of a line: its dashes name it."""
    x = [spot.round - half, spot.round + half]
    (line,) = axes.plot(x, [spot.mean] * 2, **look.line, label=_named(spot.attack))
    return line


def _interval(metric: str, spots: Sequence[LeakPoint], sample: Artist) -> list[Artist]:
    """The interval's entry in a legend, with what it stands on where that is little."""
    clusters = [spot.clusters for spot in spots if spot.band]
    if not clusters:
        return []
    few = f" ({min(clusters)} clients)" if len({*clusters}) == 1 else f" ({min(clusters)} to {max(clusters)} clients)"
    sample.set_label("95 % interval" + (" (Wilson)" if metric in RATES else few if min(clusters) < 10 else ""))
    return [sample]


def _window(metric: str, values: Sequence[float], whole: tuple[float, float]) -> tuple[float, float]:
    """An axis that shows the values, and of their intervals what leaves the values readable: two clients' are vast."""
    low, high = min(values), max(values)
    room = 0.5 * max(high - low, 1e-3 * max(abs(low), abs(high)), 1e-9)
    low, high = max(whole[0], low - room), min(whole[1], high + room)
    return low if HIGHER_IS_BETTER[metric] else max(low, -0.03 * high), high  # no error lies below 0


def _accuracy(axes: Axes, accuracy: Mapping[int, float]) -> list[Artist]:
    right = axes.twinx()
    right.grid(False)
    handles = right.plot(
        list(accuracy), list(accuracy.values()), color=INK, lw=0.9, marker="" if len(accuracy) > 1 else ".",
        label="test accuracy (right)",
    )  # fmt: skip
    right.set(ylabel="test accuracy", ylim=PERCENT)
    _percent(right.yaxis)
    axes.set_zorder(right.get_zorder() + 1)  # leakage lies over it
    axes.patch.set_visible(False)
    return [*handles]


# ---------------------------------------------------------------------------------------------------- success, clients


def _success(subject: _RunFigures) -> Figure:
    figure, axes = _canvas()
    handles: list[Artist] = []
    for attack, rates in subject.curve.items():
        look = subject.line_styles[attack]
        part = [rate.fraction or 0.0 for rate in rates]
        if is_attack(attack):
            low, high = zip(*(rate.interval for rate in rates), strict=True)
            axes.fill_between(THRESHOLDS, low, high, color=look.color, alpha=0.15, linewidth=0)
        handles += axes.plot(
            THRESHOLDS, part, **look.line, marker=look.marker if is_attack(attack) else "",
            markevery=10, label=_named(attack),
        )  # fmt: skip
    if subject.certified:
        handles += axes.plot(
            THRESHOLDS, subject.certified, color=PURPLE, ls=LONG_DASH, label="certified (ReRo), one round"
        )
    axes.set(xlim=(THRESHOLDS[0], THRESHOLDS[-1]), xlabel="PSNR of at least (dB)")
    axes.set(ylabel="part of the examples", ylim=PERCENT)
    _percent(axes.yaxis)
    _legend(figure, handles)
    return figure


def worst_psnr(scores: Scores) -> dict[tuple[int, int], float]:
    """For each (client, round) that was attacked, the highest PSNR of any real attack, capped; NaN: none gave an image.

    Of text, the highest ROUGE-1.
    """
    psnr = scores.of_metric(scores.measure.metric)
    real = np.array([is_attack(a) for a in psnr.attacks], dtype=bool)
    psnr = psnr.where(real[psnr.attack]) if len(psnr) else psnr
    found: dict[tuple[int, int], float] = {}
    values = capped(scores.measure.metric, psnr.value)
    for client, round, value in zip(psnr.client.tolist(), psnr.round.tolist(), values.tolist(), strict=True):
        found[client, round] = float(np.fmax(found.get((client, round), np.nan), value))
    return found


def _clients(worst: Mapping[tuple[int, int], float], label: str = "worst PSNR (dB)") -> Figure:
    clients, rounds = (sorted({key[i] for key in worst}) for i in (0, 1))
    table = np.full((len(clients), len(rounds)), np.nan)
    for (client, round), value in worst.items():
        table[clients.index(client), rounds.index(round)] = value
    figure, axes = _canvas(height=min(6.0, max(1.75, 0.8 + 0.17 * len(clients))))
    axes.grid(False)
    axes.set_facecolor("white")
    axes.patch.set(hatch="////", edgecolor=MUTED)  # where nothing was graded
    shown = np.ma.masked_invalid(table)
    mesh = axes.pcolormesh(shown, cmap="cividis", rasterized=table.size > CELLS, edgecolors="none")
    if len(rounds) <= 10 and len(clients) <= 30:
        _write_values(axes, table, mesh)
    figure.colorbar(mesh, ax=axes, label=label, pad=0.02)
    axes.invert_yaxis()
    _name_cells(axes.xaxis, rounds, 10)
    _name_cells(axes.yaxis, clients, 16)
    axes.set(xlabel="attacked round", ylabel="client")
    return figure


def _write_values(axes: Axes, table: NDArray[np.float64], mesh: Any) -> None:
    for (row, column), value in np.ndenumerate(table):
        if not np.isnan(value):
            red, green, blue, _ = mesh.to_rgba(value)
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
            axes.text(
                column + 0.5, row + 0.5, f"{value:.0f}", ha="center", va="center", size=7,
                color="white" if dark else INK,
            )  # fmt: skip


def _name_cells(axis: Axis, names: Sequence[int], most: int) -> None:
    """The numbers of some cells, evenly spaced, at their middle."""
    places = np.unique(np.linspace(0, len(names) - 1, min(most, len(names))).round().astype(int))
    axis.set_major_locator(FixedLocator((places + 0.5).tolist()))
    axis.set_ticklabels([str(names[i]) for i in places])
    axis.set_tick_params(length=0)


# ------------------------------------------------------------------------------------------------------------ gallery


def _sentences(subject: _RunFigures) -> Figure:
    """The truth over what each attack made of it, its words marked: right, misplaced (underlined) or wrong (grey)."""
    lines: list[tuple[str, Sequence[tuple[str, str]]]] = []
    for card in subject.cards[:ROOM]:
        lines.append((f"client {card.client}, round {card.round}", [(w, "right") for w in card.truth_words or ()]))
        lines += [(f"{tile.attack}: {tile.note}", tile.words or ()) for tile in card.tiles]
    figure = Figure((WIDTH, (2 * len(lines) + 1) * LINE))
    for i, (name, words) in enumerate(lines):
        top = (2 * i + 0.5) * LINE
        _text(figure, 0.05, top, name, ha="left", va="top", size=5, color=MUTED)
        left = 0.05
        for word, mark in words:
            if left + len(word) * LETTER > WIDTH:
                _text(figure, WIDTH - 0.05, top + 0.8 * LINE, "…", ha="right", va="top")
                break
            color = MUTED if mark == "wrong" else INK
            _text(figure, left, top + 0.8 * LINE, word, ha="left", va="top", family="monospace", size=6, color=color)
            if mark == "misplaced":
                _text(figure, left, top + 0.95 * LINE, "_" * len(word), ha="left", va="top", family="monospace", size=6)
            left += (len(word) + 1) * LETTER
    return figure


def _gallery(subject: _RunFigures) -> Figure:
    """The truth over each attack's reconstruction, the PSNR below."""
    if subject.scores.measure == OF_TEXT:
        return _sentences(subject)
    cards, attacks = subject.cards[:ROOM], subject.attacks
    truths = [pixels(card.truth) for card in cards if card.truth is not None]
    tile = WIDTH / ROOM
    height, width, _ = truths[0].shape
    tall = 0.92 * tile * height / width
    head = (2.2 + 2 * any(card.why for card in cards)) * LINE
    row = tall + 2.3 * LINE
    figure = Figure((max(1.5, tile * len(cards)), head + row * (1 + len(attacks))))
    for i, card in enumerate(cards):
        notes = [f"round {card.round}", f"client {card.client}", *card.why.replace(" ", "\n").splitlines()]
        _text(figure, (i + 0.5) * tile, head - 0.3 * LINE, "\n".join(notes), ha="center", va="bottom")
        tiles = {t.attack: t for t in card.tiles}
        _picture(figure, i * tile, head + LINE, tile, tall, truths[i], f"label {card.label}")
        for k, attack in enumerate(attacks, 1):
            found = tiles.get(attack)
            image: NDArray[np.uint8] | str = "no\nimage" if found else "not\nattacked"
            note = ""
            if found and found.image:
                image, note = pixels(found.image), found.note.removesuffix(" dB")
            _picture(figure, i * tile, head + LINE + k * row, tile, tall, image, note)
    for k, name in enumerate(["truth", *(f"{a}, PSNR (dB)" for a in attacks)]):
        _text(figure, 0.04 * tile, head + k * row + 0.9 * LINE, name, ha="left", va="bottom", weight="bold")
    return figure


def _picture(
    figure: Figure, left: float, top: float, width: float, height: float, image: NDArray[np.uint8] | str, note: str
) -> None:
    """One tile with a note below it; lengths in inches from the figure's upper left corner."""
    across, down = figure.get_size_inches()
    place = ((left + 0.04 * width) / across, 1 - (top + height) / down, 0.92 * width / across, height / down)
    axes = figure.add_axes(place, xticks=[], yticks=[])
    axes.grid(False)
    if isinstance(image, str):
        axes.text(0.5, 0.5, image, ha="center", va="center", size=7, color=MUTED, transform=axes.transAxes)
    else:
        gray = image.shape[2] == 1
        axes.imshow(image[:, :, 0] if gray else image, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    _text(figure, left + width / 2, top + height + 0.1 * LINE, note, ha="center", va="top")


def _text(figure: Figure, x: float, y: float, words: str, **how: Any) -> None:
    across, down = figure.get_size_inches()
    figure.text(x / across, 1 - y / down, words, **{"size": 7, **how})


# --------------------------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class TradeoffPoint:
    """One attack on one run: its leakage over all rounds, and the accuracy that the run ended with."""

    run: int
    accuracy: float
    spot: LeakPoint

    @property
    def leakage(self) -> float:
        """The mean."""
        return self.spot.mean


def strongest(points: Sequence[TradeoffPoint], higher_leaks: bool) -> list[TradeoffPoint]:
    """One point a run: what it leaks is what its strongest attack shows."""
    sign = 1 if higher_leaks else -1
    found: dict[int, TradeoffPoint] = {}
    for point in points:
        if point.run not in found or sign * point.leakage > sign * found[point.run].leakage:
            found[point.run] = point
    return list(found.values())


def pareto(points: Sequence[TradeoffPoint], higher_leaks: bool) -> list[TradeoffPoint]:
    """The runs that none beats in accuracy and leakage at once, by accuracy."""
    sign = 1 if higher_leaks else -1
    front: list[TradeoffPoint] = []
    for point in sorted(strongest(points, higher_leaks), key=lambda p: (-p.accuracy, sign * p.leakage)):
        if not front or sign * point.leakage < sign * front[-1].leakage:
            front.append(point)
    return front[::-1]


def _comparison(subjects: Sequence[_RunFigures]) -> list[PaperFigure]:
    metrics = [m for m in HIGHER_IS_BETTER if sum(m in s.leaks for s in subjects) > 1]
    about = ". ".join(f"{i}: {s.run.name}. {s.knowledge}" for i, s in enumerate(subjects, 1))
    drawings = []
    for metric in metrics:
        points = _points(subjects, metric)
        if len({p.run for p in points}) > 1:
            drawings.append(PaperFigure(f"utility-{metric}", _utility(subjects, metric, points), about))
    return drawings


def _points(subjects: Sequence[_RunFigures], metric: str) -> list[TradeoffPoint]:
    return [
        TradeoffPoint(run, subject.accuracy[max(subject.accuracy)], spot)
        for run, subject in enumerate(subjects)
        if subject.accuracy
        for spot in _pooled(subject, metric)
        if spot.kind == "attack"
    ]


def _pooled(subject: _RunFigures, metric: str) -> list[LeakPoint]:
    return _spots([leak for leak in subject.leaks.get(metric, ()) if leak.round is None])


def _utility(subjects: Sequence[_RunFigures], metric: str, points: Sequence[TradeoffPoint]) -> Figure:
    """Accuracy at the end against leakage; the grey mark is the run's best baseline, what exceeds it is leakage.

    Colours are runs and markers attacks; a run's number stands at its strongest attack.
    """
    figure, axes = _canvas()
    higher = HIGHER_IS_BETTER[metric]
    handles: list[Artist] = []
    planned = dict.fromkeys(attack for subject in subjects for attack in subject.attacks)
    markers = {a: MARKERS[i % len(MARKERS)] for i, a in enumerate(planned) if any(p.spot.attack == a for p in points)}
    colours = {run: COLOURS[run % len(COLOURS)] for run in sorted({p.run for p in points})}
    for point in points:
        if point.spot.band:
            axes.hlines(point.accuracy, *point.spot.band, color=colours[point.run], linewidth=2.5, alpha=0.25)
        axes.plot(
            [point.leakage],
            [point.accuracy],
            color=colours[point.run],
            marker=markers[point.spot.attack],
            ls="",
            ms=4.5,
        )
    handles += [
        Line2D([], [], color=INK, marker=m, mfc="none", ls="", ms=4.5, label=_named(a)) for a, m in markers.items()
    ]
    handles += _interval(metric, [p.spot for p in points], Line2D([], [], color=INK, lw=2.5, alpha=0.25))
    by_run = {p.run: p.accuracy for p in points}
    floors = [(f, a) for run, a in by_run.items() if (f := _floor(subjects[run], metric)) is not None]
    if floors:
        handles += axes.plot(*zip(*floors, strict=True), color=MUTED, marker="|", ls="", ms=7, label="best baseline")
    front = pareto(points, higher)
    handles += axes.plot(
        [p.leakage for p in front], [p.accuracy for p in front], color=INK, lw=0.8, drawstyle="steps-post", zorder=1,
        label="Pareto front (strongest attacks)",
    )  # fmt: skip
    for point in strongest(points, higher):
        place = (point.leakage, point.accuracy)
        axes.annotate(str(point.run + 1), place, xytext=(3, 3), textcoords="offset points", size=7)
    axes.margins(0.1)
    axes.set(xlabel=LABELS.get(metric, metric), ylabel="test accuracy at the end")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if metric in PARTS:
        _percent(axes.xaxis)
        axes.set_xlim(-0.04, 1.06)
    else:
        values = [*(p.leakage for p in points), *(floor for floor, _ in floors)]
        axes.set_xlim(_window(metric, values, axes.get_xlim()))
    for run, colour in colours.items():
        handles.append(Patch(color=colour, label=f"{run + 1}  {subjects[run].run.name}"))
    _legend(figure, handles)
    return figure


def _floor(subject: _RunFigures, metric: str) -> float | None:
    """The mean of the baseline that guesses best."""
    means = [spot.mean for spot in _pooled(subject, metric) if spot.kind == "baseline"]
    return (max(means) if HIGHER_IS_BETTER[metric] else min(means)) if means else None


# ------------------------------------------------------------------------------------------------------------- common


def _canvas(height: float = TALL) -> tuple[Figure, Axes]:
    figure = Figure((WIDTH, height), layout=ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02))
    return figure, figure.subplots()


def _named(attack: str) -> str:
    return LIMIT.replace(" to the ", "\nto the ") if is_limit(attack) else attack


def _percent(axis: Axis) -> None:
    axis.set_major_locator(MultipleLocator(0.25))
    axis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _legend(figure: Figure, handles: Sequence[Artist]) -> None:
    """Below the axes, in as many columns as the longest name leaves room for; the figure grows by it."""
    labels = [str(handle.get_label()) for handle in handles]
    longest = max(len(line) for label in labels for line in label.split("\n"))
    columns = max(1, min(3, int(WIDTH / (0.45 + 0.058 * longest))))
    per_column = -(-len(labels) // columns)
    lines = max(
        sum(label.count("\n") + 1 for label in labels[i : i + per_column]) for i in range(0, len(labels), per_column)
    )
    figure.set_size_inches(WIDTH, figure.get_size_inches()[1] + lines * LINE)
    figure.legend(handles=[*handles], loc="outside lower left", ncols=columns)
