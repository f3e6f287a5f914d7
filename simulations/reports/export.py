"""Export a run's scores for other tools, as one long table or as TensorBoard event files."""

import base64
import csv
import io
import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from fedgauge.client.components import SpecError
from fedgauge.client.files import writing
from fedgauge.server.store import run_files
from fedgauge.server.store.run import Run
from fedgauge.server.views.gallery import Card, Gallery
from fedgauge.server.views.leakage import Leak
from fedgauge.server.views.participation import may_have_sent
from fedgauge.server.views.privacy import Spending
from fedgauge.server.views.reading import Reading, read_once
from fedgauge.server.views.scores import known_metrics
from fedgauge.simulations.reports.sampling import ExampleSample, sample_examples

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

COLUMNS = (
    "run", "round", "client", "attack", "example", "metric", "value", "status", "seconds", "knowledge", "epsilon", "delta",
)  # fmt: skip
TRAINING, GALLERY = "training", "gallery"  # TensorBoard runs besides those of the attacks
FOLDER = "tensorboard"  # in the run's
MARK = "fedgauge.json"  # marks a folder of event files as ours, so that it may be replaced
BATCH, LETTERS = 5000, 16_000_000  # rows of a table, and letters in them, that are held in memory
GAP = 2  # white pixels between the tiles of a picture


def rows(run: Run) -> Iterator[tuple[Any, ...]]:
    """Every score in a stable order, as COLUMNS; example -1 is the whole batch; value None: there was nothing to grade.

    Epsilon is what the client has spent for one record by the end of the round, in the newest round with one that is under way;
    None if there is none or it is unknown here.
    """
    with run.ledger() as ledger:
        spending: Spending | None = None
        with suppress(SpecError):
            replies = ((o["round"], o["client"]) for o in ledger.observations() if may_have_sent(o, ledger.deployed))
            spending = Spending(run.scenario(), ledger, replies)
        for row in ledger.scores():
            epsilon = None if spending is None else spending.record(row["client"], row["round"])
            delta = None if spending is None or epsilon is None else spending.delta
            yield run.name, *(row[c] for c in COLUMNS[1:-2]), epsilon, delta


def write_csv(run: Run, out: TextIO) -> None:
    """Write CSV with a header; an empty value is missing, inf is an exact hit; a terminal gets no control codes."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    if out.isatty():
        writer.writerows([run_files.printable(v) if isinstance(v, str) else v for v in row] for row in rows(run))
    else:
        writer.writerows(rows(run))


def save_csv(run: Run, path: Path) -> None:
    """Write a CSV file."""
    with writing(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        write_csv(run, text)
        text.detach()  # otherwise the wrapper would close the file before it is in place


def write_parquet(run: Run, path: Path | None = None) -> Path:
    """Write one parquet file, scores.parquet in the run's folder if no path is given; returns its path."""
    import pyarrow
    import pyarrow.parquet

    kinds = [pyarrow.string()] + [pyarrow.int64()] * 2 + [pyarrow.string(), pyarrow.int64(), pyarrow.string()]
    kinds += [pyarrow.float64(), pyarrow.string(), pyarrow.float64(), pyarrow.string(), *[pyarrow.float64()] * 2]
    schema = pyarrow.schema(list(zip(COLUMNS, kinds, strict=True)))
    own = run.folder / "scores.parquet"
    with (
        run_files.replacing(own) if path is None else writing(path) as file,
        pyarrow.parquet.ParquetWriter(file, schema) as writer,
    ):
        for some in _batches(rows(run)):
            arrays = [pyarrow.array(c, k) for c, k in zip(zip(*some, strict=True), kinds, strict=True)]
            writer.write_table(pyarrow.table(arrays, schema=schema))
    return path or own


def _batches(found: Iterable[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    """Rows by the thousand, fewer where they repeat long texts: parquet stores a text once, a table in memory once a row."""
    batch: list[tuple[Any, ...]] = []
    letters = 0
    for row in found:
        batch.append(row)
        letters += sum(len(value) for value in row if isinstance(value, str))
        if len(batch) >= BATCH or letters > LETTERS:
            yield batch
            batch, letters = [], 0
    if batch:
        yield batch


# -------------------------------------------------------------------------------------------------------- TensorBoard


def write_tensorboard(run: Run, folder: Path | None = None) -> str:
    """Write a folder of event files, the run's own if none is given; returns a sentence on which examples are pictured.

    Training and each attack, limit and baseline are separate TensorBoard runs, so that equal tags (psnr/mean,
    psnr/worst_case, ...) share a plot; the step is the round. Values are those of `leakage`, in single precision;
    an infinite PSNR is capped, and missing values are left out. A picture is a row: the true image, then each attack's
    reconstruction, white if there is none.

    Raises:
        SpecError: TensorBoard is not installed, or the folder holds other files.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SpecError('TensorBoard is not installed; install it with: pip install "fedgauge[tensorboard]"') from error
    with _replacing_folder(run, folder) as place, read_once(run) as reading:
        clock, gallery = RoundTimes(reading), Gallery(reading)
        with SummaryWriter(place / TRAINING) as writer:
            writer.add_text("scenario", f"```\n{run.scenario_text()}\n```", 0, clock(0))
            _write_rounds(writer, reading, clock)
        leaks = [leak for metric in known_metrics(reading.scores) for leak in reading.leaks(metric)]
        knowledge = {row["name"]: row["knowledge"] for row in reading.attacks}
        for attack in reading.order:
            with SummaryWriter(place / _folder_name(attack)) as writer:
                if attack in knowledge:
                    writer.add_text("knowledge", knowledge[attack], 0, clock(0))
                _write_leakage(writer, [k for k in leaks if k.attack == attack], clock)
        shown = sample_examples(gallery)
        words = _sampled_sentence(shown)
        if shown.shown:
            with SummaryWriter(place / GALLERY) as writer:
                writer.add_text("choice", words, 0, clock(0))
                _write_pictures(writer, shown.cards(gallery), gallery.attacks, clock)
    return words


class RoundTimes:
    """When a round ended, in seconds since 1970, from the time of the scenario's file and the ledger's durations."""

    def __init__(self, reading: Reading) -> None:
        found = run_files.look(reading.run.folder / "scenario.toml")
        self.now = found.st_mtime if found else 0.0
        self.ends: dict[int, float] = {}
        for number, row in sorted(reading.rounds.items()):
            self.now += row["seconds"] or 0.0
            self.ends[number] = self.now

    def __call__(self, round: int) -> float:
        return self.ends.get(round, self.now)  # a round under attack may not have ended yet


def _write_rounds(writer: "SummaryWriter", reading: Reading, clock: RoundTimes) -> None:
    for number, row in sorted(reading.rounds.items()):
        for name in ("accuracy", "loss"):
            _add(writer, f"test/{name}", row[name], number, clock)


def _write_leakage(writer: "SummaryWriter", leaks: Sequence[Leak], clock: RoundTimes) -> None:
    for leak in leaks:
        if leak.round is not None:
            _add(writer, f"{leak.metric}/mean", leak.mean, leak.round, clock)
            _add(writer, f"{leak.metric}/worst_case", leak.worst, leak.round, clock)


def _add(writer: "SummaryWriter", tag: str, value: float | None, round: int, clock: RoundTimes) -> None:
    if value is not None and math.isfinite(value):  # a diverged training has an infinite loss
        writer.add_scalar(tag, value, round, clock(round))


def _write_pictures(
    writer: "SummaryWriter", cards: Mapping[int, Sequence[Card]], attacks: Sequence[str], clock: RoundTimes
) -> None:
    order = " | ".join(["truth", *attacks])
    for round, found in cards.items():
        for name, card in _titles(found):
            if (picture := _side_by_side(card, attacks)) is not None:
                writer.add_image(f"{order}/{name}", picture, round, clock(round), dataformats="HWC")


def _titles(cards: Sequence[Card]) -> Iterator[tuple[str, Card]]:
    """A name for each card, equal for the same kind of card in other rounds, so that TensorBoard's slider joins them."""
    seen: dict[str, int] = {}
    for card in cards:
        seen[card.why] = seen.get(card.why, 0) + 1
        if not card.why:
            yield f"client {card.client}, example {card.example}", card
        else:
            yield f"{card.why} {seen[card.why]}" if card.why == "at random" else card.why, card


def _side_by_side(card: Card, attacks: Sequence[str]) -> NDArray[np.uint8] | None:
    """(H, W', C): the true image and a tile for each attack, with or without an image; None if the truth is not here."""
    if card.truth is None:
        return None
    truth = pixels(card.truth)
    images = {tile.attack: tile.image for tile in card.tiles}
    tiles = [truth]
    for attack in attacks:
        image = images.get(attack)
        tiles += [_white(truth, GAP), pixels(image) if image else _white(truth, truth.shape[1])]
    return np.concatenate(tiles, axis=1)


def _white(like: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    return np.full((like.shape[0], width, like.shape[2]), 255, np.uint8)


def pixels(uri: str) -> NDArray[np.uint8]:
    """The pixels (H, W, C) of a gallery picture, which is a PNG in a data URI."""
    from PIL import Image

    found = np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.split(",", 1)[1]))))
    return found[:, :, None] if found.ndim == 2 else found


def _sampled_sentence(shown: ExampleSample) -> str:
    """A sentence on which examples are pictured."""
    if not shown.shown:
        return "pictures: none, as nothing has been reconstructed yet"
    if shown.whole:
        return f"pictures: all {shown.shown} attacked examples"
    return (
        f"pictures: {shown.shown} examples from {len(shown.keys)} of {len(shown.attacked)} attacked rounds; of each round the"
        " one that leaked most, the one that leaked least, and a random sample"
    )


def _folder_name(attack: str) -> str:
    """A distinct and safe folder name for each attack; names that a plan allows are unchanged."""
    name = f"attack({attack})" if attack in (TRAINING, GALLERY) else attack
    return quote(name, safe="()").replace(".", "%2E")


@contextmanager
def _replacing_folder(run: Run, folder: Path | None) -> Iterator[Path]:
    """Yield a temporary folder, readable for its owner only, that replaces `folder`, or the run's own, at the end."""
    _check_replaceable(folder or run.folder / FOLDER)
    with _in(folder.resolve()) if folder else run_files.new_folder(run.folder, FOLDER) as made:
        (made / MARK).write_text(json.dumps({"run": run.name}))
        yield made


@contextmanager
def _in(folder: Path) -> Iterator[Path]:
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".part-") as scratch:
        made = Path(scratch) / "new"
        made.mkdir(mode=0o700)
        yield made
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        made.rename(folder)


def _check_replaceable(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise SpecError(f"{folder} is not a folder; choose another with --output")
    files = sorted(p.relative_to(folder) for p in folder.rglob("*") if not p.is_dir())
    foreign = [p for p in files if p.name != MARK and ".tfevents." not in p.name]
    if foreign or (files and Path(MARK) not in files):
        found = foreign[0] if foreign else files[0]
        raise SpecError(
            f"{folder} holds files that fedgauge did not export ({found}), so it is not replaced; choose another folder with"
            " --output"
        )
