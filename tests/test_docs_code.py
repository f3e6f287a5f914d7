"""What the guides let a stranger write works as it stands: their blocks, in a folder of the stranger's own."""

import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from PIL import Image

from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.modality.image_metrics import psnr_of
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.source import FederationSource
from fedgauge.client import entry_points
from fedgauge.client.components import allowing
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.checks.scenario_check import check
from fedgauge.simulations.cli.components import components_of
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.run import in_memory
from fedgauge.simulations.run.create import create_run
from tests.client.test_array_inputs import masks

DOCS = Path(__file__).resolve().parents[1] / "docs"
GUIDES = ("bring-your-own.md", "audit-your-flower-app.md")
FILES = {"mine.py", "mine.toml", "pyproject.toml", "app.py", "audit.toml"}


def write(guide: str, folder: Path) -> None:
    """Append each block whose first line names a file to that file."""
    for body in re.findall(r"^```(?:python|toml)\n(.*?)^```", (DOCS / guide).read_text(), re.DOTALL | re.MULTILINE):
        if named := re.match(r"# (\S+\.(?:py|toml))\n", body):
            with (folder / named[1]).open("a") as file:
                file.write(body + "\n")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A stranger's folder with what the guides say."""
    for guide in GUIDES:
        write(guide, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    monkeypatch.chdir(tmp_path)
    with allowing(()):
        yield tmp_path
    for name in ("mine", "app"):
        sys.modules.pop(name, None)


def loaded(folder: Path, *settings: str) -> Scenario:
    return Scenario.load(folder / "mine.toml", settings)


def test_doctor_finds_nothing_wrong_with_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "mine.toml", "--allow", "mine"]) == 0
    told = capsys.readouterr().out
    for part in ("model", "link #1 (dimmed)", "link #3 (shrink)", "attack descent"):
        assert re.search(rf"^ *ok +{re.escape(part)}  ", told, re.MULTILINE), told
    assert not re.search(r"^ *wrong ", told, re.MULTILINE), told


def test_they_are_trained_on_and_attacked(folder: Path) -> None:
    with allowing(["mine"], [folder]):
        run = create_run(loaded(folder), folder / "run")
        in_memory.train(run)
        serve(run, LocalExecutor())
        with run.ledger() as ledger:
            assert ledger.progress().failed == 0
            found = {
                (s["round"], s["client"], s["attack"]): s["value"] for s in ledger.scores() if s["metric"] == "psnr"
            }
    attacked = {key for key in found if key[2] == "descent"}
    assert attacked == {(r, c, "descent") for r in (1, 2) for c in (0, 1)}
    gained = [found[key] - found[*key[:2], "mean_image"] for key in attacked]
    assert sum(gained) / len(gained) > 10, found  # dB; the attack knows the defenses


def test_every_kind_of_label_of_the_guide_is_restored_exactly_with_its_example(folder: Path) -> None:
    rows = re.findall(
        r"^\| ([\w ]+) \| `(mine:\w+)` \| `(mine:\w+)` \| `([\w:]+)` \|$",
        (DOCS / "bring-your-own.md").read_text(),
        re.MULTILINE,
    )
    exact = {"findings": ("label_f1", 1.0), "two classes by one logit": ("label_accuracy", 1.0), "none": ("psnr", 60.0)}
    for name, data, model, loss in rows:
        with allowing(["mine"], [folder]):
            changed: dict[str, Any] = {
                "data": {"use": data, "auxiliary": 100},
                "model": {"use": model},
                "loss": {"use": loss},
                "chain": ({"use": "local_sgd", "rate": 0.01},),
            }
            source = FederationSource(Federation(replace(loaded(folder).protocol, **changed)).check())
            (result,) = Auditor(source).audit(PlannedAttack("analytic", {"use": "analytic"}), source.wave())
        scores = {row.metric: row.value or 0.0 for row in result.rows}
        metric, least = exact.get(name, ("psnr", 60.0))
        assert scores["psnr"] > 60 and scores[metric] >= least, name
        assert scores.get("label_error", 0.0) < 0.01
    assert len(rows) == 4


def shown_data() -> list[str]:
    """The guide's blocks of TOML that begin with data: photographs, arrays, masks."""
    return re.findall(r"^```toml\n(\[data\].*?)^```", (DOCS / GUIDES[0]).read_text(), re.DOTALL | re.MULTILINE)


def attacked(folder: Path, attack: dict[str, Any], **changes: Any) -> dict[str, float]:
    """The scores of an attack on one update of the guide's scenario with other tables."""
    planned = PlannedAttack.from_table(attack, "the guide's attack")
    with allowing(["mine"], [folder]):
        plain = replace(loaded(folder).protocol, **changes, chain=({"use": "local_sgd", "rate": 0.1},))
        source = FederationSource(Federation(plain).check())
        result, *_ = Auditor(source).audit(planned, source.wave(range(1)))
    return {row.metric: row.value or 0.0 for row in result.rows}


@pytest.mark.parametrize(
    ("shape", "model", "use"), [((3, 16), "Windows", "recursive"), ((1, 4, 5, 6), "Small", "analytic")]
)
def test_the_windows_of_the_guide_and_volumes_are_read_exactly(
    folder: Path, shape: tuple[int, ...], model: str, use: str
) -> None:
    rng = np.random.default_rng(0)
    np.savez("windows.npz", x=rng.normal(size=(160, *shape)).astype(np.float32), y=rng.integers(0, 3, 160))
    tables = tomllib.loads(shown_data()[1])
    assert tables["model"] == {"use": "mine:Windows"}
    assert attacked(folder, {"use": use}, data=tables["data"], model={"use": f"mine:{model}"})["psnr"] > 60


def test_the_images_of_the_guides_masks_are_read_exactly(folder: Path) -> None:
    y = masks()
    x = 0.5 * y[:, None] + np.random.default_rng(0).normal(0, 0.1, (160, 1, 8, 8))
    np.savez("masks.npz", x=x.astype(np.float32), y=y)
    tables = tomllib.loads(shown_data()[2])
    (attack,) = tables.pop("attack")
    assert attacked(folder, attack, **tables)["psnr"] > 50
    optimised = attacked(folder, {**attack, "labels": "restored", "iterations": 10}, **tables)
    assert 0 <= optimised["mask_iou"] < 1


@pytest.mark.parametrize(
    ("use", "package"),
    [
        ("resnet", "torchvision"),
        pytest.param("hugging", "transformers", marks=pytest.mark.full),
    ],
)
def test_networks_of_other_packages_give_logits(folder: Path, use: str, package: str) -> None:
    pytest.importorskip(package)
    with allowing(["mine"], [folder]):
        federation = Federation(replace(loaded(folder).protocol, model={"use": f"mine:{use}"})).check()
        params, buffers = federation.initial()
        update = federation.client_update(params, buffers, client=0, round=1)
    assert update.keys() == params.keys() and any(t.any() for t in update.values())


def test_a_defense_and_an_attack_of_one_file_each_run(tmp_path: Path) -> None:
    """The attack is exact without the defense; the noise, which the knowledge card and the limit know, costs precision."""
    write("adding-components.md", tmp_path)
    found = {}
    with allowing(["mydefense", "myattack"], [tmp_path]):
        for sigma in (0.0, 0.01):
            tables = {
                "rounds": 1,
                "clients": 2,
                "data": {"use": "mnist5k", "batch_size": 1},
                "model": {"use": "mlp"},
                "chain": [{"use": "mydefense:fog", "sigma": sigma}, {"use": "local_sgd", "rate": 0.1}],
                "attack": [{"use": "myattack:quotient"}],
            }
            federation = Federation(Protocol.from_tables({k: v for k, v in tables.items() if k != "attack"}))
            source = FederationSource(federation)
            results = Auditor(source).audit(PlannedAttack("quotient", {"use": "myattack:quotient"}), source.wave())
            found[sigma] = [row.value for result in results for row in result.rows if row.metric == "psnr"]
            assert federation.chain.update_distribution is not None
            assert federation.chain.update_distribution.sigma == pytest.approx(0.1 * sigma)
            warned = [r.name for r in check(Scenario.from_tables(tables)) if r.works is False]
            assert warned == []
    assert min(found[0.0]) > 60 > max(found[0.01])
    for name in ("mydefense", "myattack"):
        sys.modules.pop(name, None)


def test_data_in_files_take_the_datas_place(folder: Path) -> None:
    text = re.sub(r"\[data\]\n.*?\n\n", shown_data()[0] + "\n", (folder / "mine.toml").read_text(), flags=re.DOTALL)
    (folder / "photos.toml").write_text(text)
    rng = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (folder / "photos" / name).mkdir(parents=True)
        for k in range(20):
            picture = rng.integers(256, size=(40, 40, 3), dtype=np.uint8)
            Image.fromarray(picture).save(folder / "photos" / name / f"{k}.png")
    with allowing(["mine"], [folder]):
        read = Scenario.load(folder / "photos.toml").federation.shards.dataset
    assert read.shape == (3, 32, 32) and read.classes == 2 and (len(read.y), len(read.y_test)) == (32, 8)


def test_the_plug_in_is_installed_and_found(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    told = subprocess.run([*command, "--target", str(tmp_path / "site"), str(folder)], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    monkeypatch.syspath_prepend(tmp_path / "site")
    entry_points._installed.cache_clear()
    try:
        found = {(c.kind, c.name): c for c in components_of() if c.package == "mine"}
        assert found.keys() == {("dataset", "bars"), ("link", "shrink"), ("attack", "descent")}
        assert not any(c.error for c in found.values()), found
        text = re.sub(r'"mine:(bars|shrink|descent)"', r'"\1"', (folder / "mine.toml").read_text())
        text = re.sub(r"\[(?:model|loss)\].*?\n\n", "", text, flags=re.DOTALL)
        text = re.sub(r'\[\[chain\]\]\nuse = "mine:dimmed"\n', "", text) + '[model]\nuse = "lenet"\n'
        (folder / "short.toml").write_text(text)
        assert "mine:" not in text
        scenario = Scenario.load(folder / "short.toml")  # nothing is allowed here
    finally:
        entry_points._installed.cache_clear()
    assert [type(link).__name__ for link in scenario.federation.chain.links] == ["local_sgd", "shrink"]


class AppGrid(in_memory.MemoryGrid):
    """Answers with a stranger's ClientApp."""

    client: Any

    def _answer(self, message: Message) -> Message:
        answer: Message = self.client(message, self._contexts[message.metadata.dst_node_id])
        return answer


def test_the_flower_app_is_audited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole app of the guide: its client's private bar is read off the weights that it returns."""
    monkeypatch.syspath_prepend(folder)
    app: Any = importlib.import_module("app")
    mine: Any = importlib.import_module("mine")
    with allowing(["mine"], [folder]):
        grid = AppGrid(Scenario.load(folder / "audit.toml").protocol)
    grid.client = app.client
    torch.manual_seed(0)
    with in_memory.flower():
        app.server(grid, Context(1, 1, {}, RecordDict(), {}))
    assert main(["audit", "runs/theirs", "--allow", "mine"]) == 0
    run = Run.open(folder / "runs" / "theirs")
    with allowing(["mine"], [folder]), run.ledger() as ledger:
        assert len(ledger.observations()) == 4
        nodes = ledger.nodes()  # clients are numbered in the order in which the app's strategy asks them
    for client, node in nodes.items():
        answer = run.read_reconstruction(1, client, "analytic")["x"]
        image = mine.bars().x[grid.clients[int(node)]]
        assert float(psnr_of(image[None].float() / 255, answer)) > 40
    assert sorted(nodes) == [0, 1]
