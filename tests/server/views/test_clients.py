"""The clients' table has the worst value of each client, the worst client first."""

import math
from collections.abc import Mapping
from pathlib import Path

from fedgauge.server.views.leak_tables import clients
from fedgauge.server.views.snapshot import read_once
from tests.server.views.graded_runs import graded


def worst(folder: Path, **changes: object) -> list[tuple[object, object, object]]:
    with read_once(graded(folder, **changes)) as reading:  # type: ignore[arg-type]
        rows = clients(reading).records
    return [(row["client"], row["worst"], row["round"]) for row in rows]


def test_rows_are_the_worst_case_of_each_client(tmp_path: Path) -> None:
    assert worst(tmp_path / "run") == [(c, 31.0 + c, 3) for c in (2, 1, 0)]


def test_a_client_without_a_grade_is_last_and_baselines_are_no_leak(tmp_path: Path) -> None:
    def one(attack: str, round: int, client: int) -> Mapping[str, float | None]:
        if attack == "mean_image":
            return {"psnr": 50.0}
        return {"psnr": math.inf if (round, client) == (2, 1) else None}

    rows = worst(tmp_path / "one", how=one, limit=False)
    assert rows == [(1, math.inf, 2), (0, None, None), (2, None, None)]
