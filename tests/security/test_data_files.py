"""Data that a scenario names, which may be anybody's: what is no file, or has no end, is a sentence and nobody waits for it."""

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from fedgauge.client.data import corpora, images
from fedgauge.client.data.corpora import csv
from fedgauge.client.data.own_images import hugging_face, image_folder, npz
from fedgauge.client.files import MOST_ARCHIVE, MOST_PICTURE, MOST_TABLE, MOST_WORDS, open_data, read_file
from fedgauge.client.local_data import read_npz
from fedgauge.client.models.tokenizer import load_tokenizer
from fedgauge.server.dashboard import web
from fedgauge.server.dashboard.web import make_app
from fedgauge.server.store import run_files, tester_truth
from fedgauge.server.store.run import Run
from tests.server.dashboard.pages import Http


def _sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


ENDLESS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to a pipe": lambda path: (os.mkfifo(path.with_name("elsewhere")), path.symlink_to("elsewhere"))[0],
    "terabyte": lambda path: _sparse(path, 1 << 40),
}


def _picture(path: Path) -> Path:
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(path)
    return path


def _pictures(folder: Path, bad: Callable[[Path], None]) -> None:
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        _picture(folder / name / "1.png")
    bad(folder / "a" / "2.png")
    image_folder(folder, 8)


def _stored(name: str) -> Callable[[Path, Callable[[Path], None]], None]:
    def read(folder: Path, bad: Callable[[Path], None]) -> None:
        folder = _saved(folder)
        (folder / name).unlink()
        bad(folder / name)
        hugging_face(folder)

    return read


def _saved(folder: Path) -> Path:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    png = _picture(folder / "made.png").read_bytes()
    rows = {"image": [{"bytes": png, "path": None}] * 4, "label": [0, 1, 0, 1]}
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows, features)}).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def _alone(name: str, read: Callable[[Path], Any]) -> Callable[[Path, Callable[[Path], None]], None]:
    def make(folder: Path, bad: Callable[[Path], None]) -> None:
        bad(folder / name)
        read(folder / name)

    return make


def _tokenizer(folder: Path, bad: Callable[[Path], None]) -> None:
    bad(folder / "tokenizer.json")
    load_tokenizer(folder)


def _truth(folder: Path) -> None:
    x, y = torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.arange(2)
    tester_truth.TesterTruth(folder).batch(1, 0, images.Dataset("few", x, y, x, y, 2, (0.5,), (0.5,)), {})


LOADERS: dict[str, Callable[[Path, Callable[[Path], None]], None]] = {
    "csv": _alone("own.csv", csv),
    "npz": _alone("own.npz", npz),
    "image_folder": _pictures,
    "hugging_face, parts": _stored("dataset_dict.json"),
    "hugging_face, state": _stored("train/state.json"),
    "hugging_face, facts": _stored("train/dataset_info.json"),
    "hugging_face, rows": _stored("train/data-00000-of-00001.arrow"),
    "tokenizer": _tokenizer,
    "lines of a corpus": _alone("train.tsv", lambda path: corpora._table(path, ("sentence", "label"))),
    "idx": _alone("train-images-idx3-ubyte.gz", lambda path: images._read_idx(path.parent, "train", 3)),
    "cifar": _alone("cifar10-train-1.npz", images._read_npz),
}


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("loader", LOADERS)
def test_no_loader_waits_for_or_swallows_what_has_no_end(loader: str, kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no file|has 1099511627776 bytes, and no such file has more than") as error:
        LOADERS[loader](tmp_path, ENDLESS[kind])
    assert str(tmp_path) in str(error.value)


def test_a_dataset_on_disk_leads_to_no_device(tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    state = folder / "train" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "_data_files": [{"filename": "/dev/zero"}]}))
    with pytest.raises(ValueError, match="/dev/zero is no file"):
        hugging_face(folder)


def test_a_users_links_to_data_are_followed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "linked" / name).mkdir(parents=True)
        for i in range(2):
            (tmp_path / "linked" / name / f"{i}.png").symlink_to(_picture(tmp_path / f"{name}{i}.png"))
    (tmp_path / "again").symlink_to("linked")
    assert image_folder(tmp_path / "again", 8, std=[1.0, 1.0, 1.0]).x.shape == (3, 3, 8, 8)


def test_a_file_beyond_its_limit_is_refused(tmp_path: Path) -> None:
    for most in (MOST_TABLE, MOST_ARCHIVE, MOST_PICTURE, MOST_WORDS):
        _sparse(tmp_path / "file", most)
        open_data(tmp_path / "file", most).close()
        _sparse(tmp_path / "file", most + 1)
        with pytest.raises(OSError, match=f"has {most + 1} bytes, and no such file has more than {most}$"):
            open_data(tmp_path / "file", most)


def test_a_line_without_an_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("text,label\n" + "x" * (1 << 22))
    with pytest.raises(ValueError, match=r"own\.csv is not a CSV file"):
        csv(tmp_path / "own.csv")


def test_an_archive_that_unpacks_to_more_than_any_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedgauge.client.local_data.MOST_ARCHIVE", 1 << 20)
    np.savez_compressed(tmp_path / "client-0.npz", x=np.zeros((1 << 21,), np.uint8), y=np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="its arrays have 2097[0-9]* bytes, and no such file has more"):
        read_npz(tmp_path / "client-0.npz")
    with pytest.raises(tester_truth.TruthError, match="cannot be read as the truth: its arrays have"):
        _truth(tmp_path)


def test_an_archive_that_numpy_did_not_pack_is_refused(tmp_path: Path) -> None:
    """Python unpacks bzip2 and LZMA without a limit."""
    array = io.BytesIO()
    np.save(array, np.zeros(9))
    for packing in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(tmp_path / "own.npz", "w", packing) as packed:
            packed.writestr("x.npy", array.getvalue())
        with pytest.raises(ValueError, match=r"own\.npz is not .*: it is packed in another way than NumPy's"):
            npz(tmp_path / "own.npz")


def test_a_device_is_not_even_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "open", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(OSError, match="/dev/zero is no file"):
        read_file(Path("/dev/zero"), 10)


# ------------------------------------------------------------------------------------------------- data in a run's folder


@pytest.fixture
def theirs(attacked_run: Run, tmp_path: Path) -> Run:
    """A run whose scenario names pictures in its own folder."""
    return Run(Path(shutil.copytree(attacked_run.folder, tmp_path / "runs" / "theirs")))


def _names(run: Run, data: Path) -> None:
    for name in ("a", "b"):
        (data / name).mkdir(parents=True)
        for i in range(3):
            _picture(data / name / f"{i}.png")
    path, table = run.folder / "scenario.toml", f'use = "image_folder"\npath = "{data}"\nsize = 28\ngrey = true\n'
    path.write_text(path.read_text().replace('use = "mnist5k"\n', table))
    assert table in path.read_text()


@pytest.mark.parametrize("kind", ["pipe", "link to a device"])
def test_the_page_and_the_list_answer_whatever_data_a_run_names(theirs: Run, attacked_run: Run, kind: str) -> None:
    data = theirs.folder / "d"
    _names(theirs, data)
    ENDLESS[kind](data / "a" / "9.png")
    shutil.copytree(attacked_run.folder, theirs.folder.parent / "good")
    with Http(make_app(theirs.folder.parent), base_url="http://localhost") as http:
        lines = {line["id"]: line for line in http.get("/api/runs").json()["runs"]}
        assert set(lines) == {"theirs", "good"} and "error" not in lines["good"]
        for part in ("overview", "gallery", "clients"):
            assert http.get(f"/api/runs/theirs/{part}").status_code < 500


def test_the_list_waits_for_no_runs_data(theirs: Run, attacked_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(attacked_run.folder, theirs.folder.parent / "good")
    released, read = Event(), Run.scenario

    def slow(run: Run) -> Any:
        assert run.name == "good" or released.wait(60)
        return read(run)

    monkeypatch.setattr(Run, "scenario", slow)
    monkeypatch.setattr(web, "PATIENCE", 0.2)
    with Http(make_app(theirs.folder.parent), base_url="http://localhost") as http:

        def listed() -> dict[str, Any]:
            return {line["id"]: line for line in http.get("/api/runs").json()["runs"]}

        lines = listed()
        assert lines["theirs"]["verdict"] is None and lines["good"]["state"] and not released.is_set()
        released.set()
        for _ in range(300):
            lines = listed()
            if all(line["verdict"] for line in lines.values()):
                break
            sleep(0.1)
        assert lines["theirs"]["verdict"] == lines["good"]["verdict"]


@pytest.mark.parametrize(
    ("name", "make", "kind"),
    [
        (".part-x", lambda path: path.symlink_to("/etc/passwd"), "a link"),
        (".part-x", os.mkfifo, "a pipe"),
        ("tape/.part-x", lambda path: path.symlink_to("/etc"), "a link"),
        ("tape/.part-x", os.mkfifo, "a pipe"),
    ],
)
def test_an_unfinished_name_excuses_no_link_and_no_pipe(
    theirs: Run, name: str, make: Callable[[Path], None], kind: str
) -> None:
    make(theirs.folder / name)
    with pytest.raises(run_files.RefusedFile, match=rf"{name} is {kind} where a run has a file"):
        Run.open(theirs.folder)


def test_what_is_unfinished_keeps_no_run_from_being_read(theirs: Run) -> None:
    """A report that is printed keeps a browser's folder here, with links and sockets; a killed process leaves what it wrote."""
    (theirs.folder / ".part-browser").mkdir()
    (theirs.folder / ".part-browser" / "SingletonLock").symlink_to("host-1")
    for name in (".part-1", "tape/.part-1"):
        (theirs.folder / name).write_bytes(b"half")
    assert Run.open(theirs.folder).scenario_text()
    assert torch.is_tensor(Run.open(theirs.folder).scenario().federation.shards.dataset.x)
