"""The device and precision of attacks stay with their scores."""

from pathlib import Path

from fedgauge.server.store.ledger import Ledger
from fedgauge.server.views.outcomes import attacked_on
from tests.server.store.ledgers import filled, plan_of, rows_of, take

GPU, CPU = "cuda:0 NVIDIA H100, float32 (IEEE)", "cpu x86_64 AVX2, float32 (IEEE)"


def attack(ledger: Ledger, *each: str | None) -> None:
    for computed_on in each:
        lease = take(ledger)
        ledger.finish(lease, rows_of(lease), None, None, computed_on)


def test_each_device_is_named_once(path: Path) -> None:
    with filled(path, plan_of("a", wave=1), clients=4) as ledger:
        assert attacked_on(ledger) == ""
        attack(ledger, GPU, CPU, GPU, None)
        assert ledger.devices() == [CPU, GPU]
        assert attacked_on(ledger) == f"attacked on {CPU}; {GPU}"


def test_a_retried_job_forgets_its_device(path: Path) -> None:
    with filled(path, plan_of("a", wave=4)) as ledger:
        attack(ledger, GPU)
        ledger.retry_ended({"converged"}, 4)
        assert ledger.devices() == []
        attack(ledger, CPU)
        assert ledger.devices() == [CPU]


def test_a_device_has_a_short_printable_name_in_sentences(path: Path) -> None:
    with filled(path, plan_of("a", wave=4)) as ledger:
        attack(ledger, "cuda:0\rH100\x1b[2J\n, float32 (IEEE)")
        assert attacked_on(ledger) == "attacked on cuda:0 H100 [2J , float32 (IEEE)"
