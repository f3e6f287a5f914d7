"""Ray workers on several devices: each sees its own GPU alone, and one that dies is replaced by one of its kind."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.ray_executor import RayExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.ledger_types import Progress
from tests.server.pool.test_devices import close
from tests.server.pool.test_ray import quietly

pytestmark = [pytest.mark.slow, pytest.mark.full]

IG = {"use": "inverting_gradients", "iterations": 4}
DEVICES = [torch.device("cuda", 0), torch.device("cuda", 2), torch.device("cpu")]


@pytest.fixture(scope="module")
def executor() -> Iterator[RayExecutor]:
    """Two GPUs, which no machine of the tests has, and one core."""
    with pytest.MonkeyPatch.context() as patch, quietly():
        patch.setenv("CUDA_VISIBLE_DEVICES", "104,105,106")
        made = RayExecutor(1, None, DEVICES)
    yield made
    with quietly():
        made.close()


def seen(executor: RayExecutor) -> dict[str, tuple[str, str, int]]:
    """By device: which GPUs an idle worker's process sees, what it calls its own, and its process."""

    def look(actor: Any) -> tuple[str, str, int]:
        return os.environ["CUDA_VISIBLE_DEVICES"], str(actor._worker.device), os.getpid()

    return {name: executor._ray.get(worker.__ray_call__.remote(look)) for name, worker in executor._idle}


def test_each_worker_sees_its_own_gpu_and_no_other(executor: RayExecutor) -> None:
    assert {name: found[:2] for name, found in seen(executor).items()} == {
        "cuda:0": ("104", "cuda:0"),
        "cuda:2": ("106", "cuda:0"),
        "cpu": ("", "cpu"),
    }
    assert executor.slots == 3


def test_workers_with_an_unusable_gpu_attack_on_the_cpu_with_a_reason(
    kit: Any, tmp_path: Path, executor: RayExecutor
) -> None:
    scenario = kit.scenario(attack=[IG], audit={"executor": "ray", "wave": 1})
    here, there = (kit.make_run(tmp_path / name, scenario) for name in ("here", "there"))
    serve(here, LocalExecutor())
    serve(there, executor)
    close(here, there)
    with there.ledger() as ledger:
        told = [r["reason"] for r in ledger.reasons()]
        used = {words.split()[0] for words in ledger.devices()}
    assert told and all(re.search(r"CPU: cuda:[02] raised \w+: ", words) for words in told)
    assert "cpu" in used


def test_a_worker_of_a_gpu_that_dies_is_replaced_by_one_of_the_same_gpu(
    kit: Any, tmp_path: Path, executor: RayExecutor
) -> None:
    scenario = kit.scenario(attack=[IG], audit={"executor": "ray", "wave": 1})
    whole, run = (kit.make_run(tmp_path / name, scenario) for name in ("whole", "run"))
    serve(whole, LocalExecutor())
    before = seen(executor)
    os.kill(before["cuda:2"][2], signal.SIGKILL)
    serve(run, executor)
    close(run, whole)
    with run.ledger() as ledger:
        assert ledger.progress() == Progress(done=16)
    after = seen(executor)
    assert {name: found[:2] for name, found in after.items()} == {name: found[:2] for name, found in before.items()}
    assert [name for name in after if after[name][2] != before[name][2]] == ["cuda:2"]
