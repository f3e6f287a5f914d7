"""Numbers as text are the same in Python and on the page."""

import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from fedgauge.attacks.modality.base import Measured
from fedgauge.server.dashboard import STATIC
from fedgauge.server.views.formatting import in_unit, number, percent, rounded

METRICS = [Measured("a metric", digits=digits, unit=unit) for digits in (None, 0, 1, 2, 3) for unit in ("", "dB")]
HALVES = [n / 2**bits for bits in range(1, 8) for n in range(-99, 2000, 2)]
NEAR = [
    12.5497,
    2.49996,
    2.50004,
    -2.49996,
    3.5000004,
    0.28496,
    0.12499996,
    99.9996,
    0.0009999951,
    999.5,
    1e-5,
    9.995e-5,
    0.0,
    -0.0,
    -0.0004,
    -0.4,
]
DRAW = random.Random(0)
ANY = [DRAW.choice((-1, 1)) * DRAW.random() * 10 ** DRAW.randint(-12, 12) for _ in range(3000)]


@pytest.fixture(scope="module")
def node() -> str:
    """A program that runs JavaScript."""
    found = shutil.which("node")
    if found is None:
        playwright = pytest.importorskip("playwright", reason="needs node on the path, or the package playwright")
        found = str(Path(playwright.__file__).parent / "driver" / "node")
    return found


def on_the_page(node: str, values: list[float | None]) -> list[list[str]]:
    metrics = json.dumps([{"digits": m.digits, "unit": m.unit, "fraction": m.fraction} for m in METRICS])
    write = f"v => [percent(v), decimal(v), ...{metrics}.map(m => inMetric(m, v))]"
    said = f"console.log(JSON.stringify(JSON.parse(require('fs').readFileSync(0)).map({write})))"
    script = (STATIC / "format.js").read_text() + said
    done = subprocess.run([node, "-e", script], input=json.dumps(values), capture_output=True, text=True, check=True)
    lines: list[list[str]] = json.loads(done.stdout)
    return lines


@pytest.mark.parametrize("values", [HALVES, NEAR, ANY], ids=["halves", "near halves", "any"])
def test_page_and_report_write_the_same_digits(node: str, values: list[float]) -> None:
    for value, page in zip([None, *values], on_the_page(node, [None, *values]), strict=True):
        assert page == written(value), value


def written(value: float | None) -> list[str]:
    return [percent(value), number(value, None), *(in_unit(value, metric) for metric in METRICS)]


@pytest.mark.parametrize("values", [HALVES, NEAR, ANY], ids=["halves", "near halves", "any"])
def test_a_value_that_was_rounded_for_the_page_is_written_as_the_value_itself(values: list[float]) -> None:
    """Up to four digits: 12.49996 was sent as 12.5, and shown as 12."""
    for value in (v for v in values if abs(v) < 10):
        assert written(rounded(value)) == written(value), value
        assert rounded(value) == pytest.approx(value, rel=1e-4)


def test_nothing_rounds_to_a_negative_zero() -> None:
    assert (number(-0.04, 1), percent(-0.004), number(-0.0, None)) == ("0.0", "0\u00a0%", "0")
