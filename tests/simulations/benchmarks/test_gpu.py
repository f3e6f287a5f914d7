"""The GPU benchmark: it runs with torch and numpy alone, on any device, and says why a figure is missing."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fedgauge.attacks.engine.devices import CPU
from fedgauge.simulations.benchmarks import gpu
from fedgauge.simulations.benchmarks.engine import flops, resnet18
from fedgauge.simulations.benchmarks.gpu import (
    FULL,
    MEASURES,
    QUICK,
    GpuBenchmark,
    main,
    measure,
)
from fedgauge.simulations.benchmarks.reporting import Figure
from tests.separate_device import separate_device

ROOT = Path(__file__).resolve().parents[3]
ON_CPU = ["--device", "cpu", "--quick"]
TORCH_AND_NUMPY = (
    "torch", "torchgen", "functorch", "numpy", "numpy.libs", "typing_extensions.py", "sympy", "mpmath", "filelock", "networkx",
    "jinja2", "markupsafe", "fsspec", "packaging",
)  # fmt: skip
LONG = ("resnet", "deep-steps", "tf32")  # on the separate device
TARGETS = {
    "lenet": [">= 100"],
    "convnet": [">= 5", ">= 30"],
    "resnet": [">= 5", ">= 30", "<= 10"],
    "psnr": ["<= 0.3"],
    "learning": ["<= 15"],
    "transfers": ["<= 5"],
    "text": ["<= 60"],
}
Measure = Callable[[GpuBenchmark], list[Figure]]


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine that has torch with what it needs, and fedgauge's folder under its name, not installed."""
    installed = Path(torch.__file__).parents[1]
    folder = tmp_path / "path"
    folder.mkdir()
    for name in TORCH_AND_NUMPY:
        if (installed / name).exists():
            (folder / name).symlink_to(installed / name)
    (folder / "fedgauge").symlink_to(ROOT)
    return {"PYTHONPATH": str(folder), "HOME": str(tmp_path), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_it_runs_where_there_is_torch_and_nothing_else(bare: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-m", gpu.__name__, *ON_CPU]
    alone = [n for n in MEASURES if n != "deep-steps"]
    ended = subprocess.run([*command, *alone], env=bare, cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.endswith("written to gpu.json\n")
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert kept["benchmark"] == "gpu"
    assert kept["settings"]["torch"] == torch.__version__
    assert (kept["settings"]["device"], kept["settings"]["sizes"]["lenet"]) == ("cpu", [4, 2])
    assert [row["measure"] for row in kept["rows"]] == alone
    figures = {f["name"]: f for f in kept["figures"]}
    assert not any(f["target"] for f in figures.values()), "tiny sizes on a CPU decide nothing"
    missing = {name: f["note"] for name, f in figures.items() if f["value"] is None}
    (text,) = (note for name, note in missing.items() if name.startswith("LAMP"))
    assert text == "skipped: needs the package transformers"
    assert all("CUDA graph" in name or "compiled" in name or name.startswith("LAMP") for name in missing)
    absent = (
        "import fedgauge.simulations.benchmarks.gpu, sys; print({'ray', 'flwr', 'rich', 'scipy'} & set(sys.modules))"
    )
    seen = subprocess.run([sys.executable, "-S", "-c", absent], env=bare, capture_output=True, text=True, check=True)
    assert seen.stdout == "set()\n"


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.full, pytest.mark.slow] if n in LONG else []) for n in MEASURES],
)
def test_no_measure_mixes_its_device_with_the_cpu(name: str) -> None:
    with separate_device() as device:
        found = MEASURES[name](GpuBenchmark(device, QUICK))
    assert found
    skipped = [f.note for f in found if f.value is None]
    assert all(note in ("skipped: needs a GPU", "skipped: --quick") for note in skipped)
    assert all(math.isfinite(f.value) for f in found if f.value is not None)
    gaps = [float(f.note.split("relative gap ")[1].split(";")[0]) for f in found if "relative gap" in f.note]
    assert all(gap < 1e-4 for gap in gaps), "a recorded step computes something else"


def test_each_row_of_the_targets_is_measured() -> None:
    """At full sizes the figures are those that docs/gpu.md names."""
    assert (FULL.lenet[0], FULL.convnet[0], FULL.resnet[0], FULL.pixels, FULL.psnr[0]) == (1024, 64, 16, 224, 64)
    assert (FULL.auxiliary, FULL.length, FULL.sentences) == (50_000, 32, 16)
    targets = {
        name: [f.target for f in measure(name, GpuBenchmark(CPU, QUICK), targets=True) if f.target] for name in TARGETS
    }
    assert targets == TARGETS


def test_the_residual_network_is_torchvisions() -> None:
    import torchvision

    ours, theirs = resnet18((3, 64, 64), 10).eval(), torchvision.models.resnet18(num_classes=10).eval()
    for batch_norm in (m for m in theirs.modules() if isinstance(m, nn.BatchNorm2d)):
        nn.init.uniform_(batch_norm.weight, 0.5, 1.5)
        nn.init.uniform_(batch_norm.running_mean, -0.5, 0.5)
    names = zip(ours.state_dict(), theirs.state_dict().values(), strict=True)
    ours.load_state_dict(dict(names))
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.allclose(ours(x), theirs(x), atol=1e-4)


def test_a_products_operations_are_counted() -> None:
    layer = nn.Linear(5, 7, bias=False)
    assert flops(lambda: layer(torch.ones(3, 5))) == 2 * 3 * 5 * 7


def test_a_measure_that_fails_says_why_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(benchmark: GpuBenchmark) -> list[Figure]:
        raise RuntimeError("CUDA error: an illegal memory access\nand how to debug it")

    toys: dict[str, Measure] = {
        "broken": broken,
        "odd": lambda benchmark: [Figure("odd", math.nan, "x", note="of nothing")],
        "fine": lambda benchmark: [Figure("fine", 2.0, "x")],
    }
    monkeypatch.setattr(gpu, "MEASURES", toys)
    assert main([*ON_CPU, "-o", str(tmp_path / "found.json")]) == 1
    found = {f["name"]: f for f in json.loads((tmp_path / "found.json").read_text())["figures"]}
    assert found["broken"]["note"] == "failed: RuntimeError: CUDA error: an illegal memory access"
    assert (found["odd"]["value"], found["odd"]["note"]) == (None, "not finite; of nothing")
    assert found["fine"]["value"] == 2.0
    assert "fine  2  x" in capsys.readouterr().out


def test_a_measure_is_kept_as_soon_as_it_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def taken_away(benchmark: GpuBenchmark) -> list[Figure]:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "MEASURES", {"a": lambda benchmark: [Figure("a", 1.0, "x")], "b": taken_away})
    with pytest.raises(KeyboardInterrupt):
        main([*ON_CPU, "-o", str(tmp_path / "found.json")])
    assert [f["name"] for f in json.loads((tmp_path / "found.json").read_text())["figures"]] == ["a"]


def test_an_operator_without_a_deterministic_algorithm_is_measured_without(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[bool] = []

    def refusing(benchmark: GpuBenchmark) -> list[Figure]:
        if allowed[-1]:
            raise RuntimeError("put_ does not have a deterministic implementation")
        return [Figure("speed", 3.0, "x", note="fast")]

    monkeypatch.setattr(gpu, "MEASURES", {"refusing": refusing})
    monkeypatch.setattr(gpu, "compute_on", lambda device, deterministic: allowed.append(deterministic))
    (figure,) = measure("refusing", GpuBenchmark(CPU, QUICK), targets=True)
    assert allowed == [True, False]
    assert (figure.value, figure.note) == (3.0, "fast; an operator has no deterministic algorithm")


def test_no_measure_begins_after_its_minutes(tmp_path: Path) -> None:
    assert main([*ON_CPU, "lenet", "--minutes", "-1", "-o", str(tmp_path / "found.json")]) == 0
    (figure,) = json.loads((tmp_path / "found.json").read_text())["figures"]
    assert figure["note"] == "skipped: the -1 minutes were over (--minutes)"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lenets"], "there is no measure 'lenets'; there are lenet, convnet"),
        (["--device", "cpu", "--peak", "0"], "--peak must be above 0, got 0"),
        (["--device", "gpu"], "there is no device 'gpu'"),
        (
            ["--device", "cpu", "-o", "nowhere/found.json"],
            "nowhere/found.json cannot be written (No such file or directory)",
        ),
        (["--device", "cpu", "-o", "."], ". cannot be written (Is a directory): name another file by -o"),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_what_can_be_run_here(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "--device cpu --quick" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
def test_every_measure_runs_on_a_gpu(tmp_path: Path) -> None:
    assert main(["--quick", "-o", str(tmp_path / "found.json")]) == 0
