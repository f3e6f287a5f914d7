"""What one client's images say: too few for an interval, but what looks identified is not called unshown."""

from pathlib import Path

from fedgauge.server.store.ledger import Ledger
from tests.server.views.test_leakage_and_verdict import PLAN, score
from tests.small_runs import verdict_on


def test_identified_images_of_one_client_leave_it_undetermined(tmp_path: Path) -> None:
    floor = {"psnr": [12.0, 12.5], "identified": [0.0, 0.0]}
    near = {"psnr": [18.0, 18.5], "identified": [1.0, 1.0]}
    found = {}
    for name, own in (("identified", near), ("not", {**near, "identified": [0.0, 0.0]})):
        with Ledger(tmp_path / f"{name}.sqlite", create=True) as ledger:
            ledger.add_attacks(PLAN, {p.name: "" for p in PLAN.attacks})
            score(ledger, {(1, 0, "matching"): own, (1, 0, "mean_image"): floor, (1, 0, "random_image"): floor})
            found[name] = verdict_on(ledger)
    assert found["identified"].word == "undetermined"
    assert "2 images of one client are too few to tell a leak from luck" in found["identified"].sentence
    assert "2 of 2 images are identified" in found["identified"].sentence
    assert found["not"].reconstruction == "not shown to leak"
