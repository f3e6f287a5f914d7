"""How attacks were computed stays with their scores, and how busy devices are is told while they work."""

from dataclasses import replace
from pathlib import Path

from fedgauge.attacks.engine.devices import Numerics
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.views.outcomes import attacked_on
from tests.server.store.ledgers import filled, plan_of, rows_of, take

GPU = Numerics("cuda:0", "NVIDIA H100", "ieee", True, "2.13.0", "550.54")
CPU = Numerics("cpu", "x86_64 AVX2", "ieee", True, "2.13.0", "")


def attack(ledger: Ledger, *each: Numerics | None) -> None:
    for numerics in each:
        lease = take(ledger)
        ledger.finish(lease, rows_of(lease), None, None, numerics)


def test_equal_ways_to_compute_are_kept_once(path: Path) -> None:
    with filled(path, plan_of("a", wave=1), clients=5) as ledger:
        assert attacked_on(ledger) == ""
        attack(ledger, GPU, CPU, GPU, None)
        told = [(row["device"], row["driver"], row["deterministic"], row["jobs"]) for row in ledger.numerics()]
        assert told == [("cpu", "", 1, 1), ("cuda:0", "550.54", 1, 2)]
        assert "cpu x86_64 AVX2, " in attacked_on(ledger) and "; cuda:0 NVIDIA H100, " in attacked_on(ledger)
        attack(ledger, replace(GPU, device="cuda:1"))
        assert "; cuda:0 and cuda:1 NVIDIA" in attacked_on(ledger)


def test_a_retried_job_forgets_its_device(path: Path) -> None:
    with filled(path, plan_of("a", wave=4)) as ledger:
        attack(ledger, GPU)
        ledger.retry_ended({"converged"}, 4)
        assert ledger.numerics() == []
        attack(ledger, CPU)
        assert [row["device"] for row in ledger.numerics()] == ["cpu"]


def test_a_device_has_a_short_printable_name_in_sentences(path: Path) -> None:
    with filled(path, plan_of("a", wave=4)) as ledger:
        attack(ledger, replace(GPU, name="H100\x1b[2J\n", device="cuda:0\r"))
        assert attacked_on(ledger) == "attacked on cuda:0 H100 [2J , float32 (IEEE)"
