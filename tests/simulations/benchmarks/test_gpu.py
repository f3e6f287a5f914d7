"""The GPU benchmark: it runs with torch and numpy alone, on any device, and says why a figure is missing."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fedgauge.attacks.engine.devices import CPU
from fedgauge.simulations.benchmarks import gpu
from fedgauge.simulations.benchmarks.engine import resnet18
from fedgauge.simulations.benchmarks.gpu import FULL, MEASURES, QUICK, GpuBenchmark, main, measure
from tests.separate_device import separate_device

ROOT = Path(__file__).resolve().parents[3]
ON_CPU = ["--device", "cpu", "--quick"]
TORCH_AND_NUMPY = (
    "torch", "torchgen", "functorch", "numpy", "numpy.libs", "typing_extensions.py", "sympy", "mpmath", "filelock", "networkx",
    "jinja2", "markupsafe", "fsspec", "packaging",
)  # fmt: skip
LONG = ("convnet", "libraries", "tf32")  # on the separate device
TARGETS = {
    "lenet": [">= 800", ">= 15"],
    "convnet": [">= 5", ">= 30"],
    "resnet": [">= 15", ">= 30", "<= 8"],
    "psnr": ["<= 0.3"],
    "learning": ["<= 15"],
}


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


@pytest.mark.full
@pytest.mark.slow
def test_it_runs_where_there_is_torch_and_nothing_else(bare: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-m", gpu.__name__, *ON_CPU]
    ended = subprocess.run(command, env=bare, cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.endswith("written to gpu.json\n")
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert kept["benchmark"] == "gpu"
    assert kept["settings"]["torch"] == torch.__version__
    assert kept["settings"]["device"].startswith("cpu ") and kept["settings"]["sizes"]["lenet"] == [4, 2]
    figures = {f["name"]: f for f in kept["figures"]}
    assert not any(f["target"] for f in figures.values()), "tiny sizes on a CPU decide nothing"
    missing = {name: f["note"] for name, f in figures.items() if f["value"] is None}
    assert {note.split()[0] for note in missing.values()} == {"skipped:"}
    assert {name for note in missing.values() for name in ("safetensors", "torchvision") if name in note} == {
        "safetensors", "torchvision",
    }  # fmt: skip
    absent = (
        "import fedgauge.simulations.benchmarks.gpu, sys; print({'ray', 'flwr', 'rich', 'scipy'} & set(sys.modules))"
    )
    seen = subprocess.run([sys.executable, "-S", "-c", absent], env=bare, capture_output=True, text=True, check=True)
    assert seen.stdout == "set()\n"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.full, pytest.mark.slow] if n in LONG else [])
        for n in MEASURES
        if n != "resnet"
    ],
)
def test_no_measure_mixes_its_device_with_the_cpu(name: str) -> None:
    """That of ResNet-18 is the ConvNet's with another network, and is run below."""
    with separate_device() as device:
        found = list(MEASURES[name](GpuBenchmark(device, QUICK)))
    assert found
    assert all(f.value is not None and math.isfinite(f.value) for f in found if "hardsigmoid_backward" not in f.note)


def test_each_row_of_the_targets_is_measured() -> None:
    """At full sizes the figures are those that docs/gpu.md names."""
    assert (FULL.lenet[0], FULL.convnet[0], FULL.resnet[0], FULL.pixels, FULL.psnr[0]) == (1024, 64, 16, 224, 64)
    assert FULL.auxiliary == 50_000
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


@pytest.mark.parametrize("arguments", [["lenets"], ["--device", "gpu"]])
def test_a_mistake_is_refused_before_anything_is_measured(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
def test_every_measure_runs_on_a_gpu(tmp_path: Path) -> None:
    assert main(["--quick", "-o", str(tmp_path / "found.json")]) == 0
