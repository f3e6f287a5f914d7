"""The gallery shows true examples above their reconstructions."""

import re
from pathlib import Path

import numpy as np

from fedgauge.client.federation import Federation
from fedgauge.server.store.run import Run
from tests.simulations.reports.figures.graded_runs import drawn, graded


def test_the_strip_shows_truths_over_what_came_back(run: Run) -> None:
    figure, federation = drawn(run)["gallery"], Federation(run.scenario().protocol)
    columns = np.array(figure.axes).reshape(3, 6).T
    for column in columns:
        round, client = map(int, re.findall(r"\d+", column[0].get_title()))
        truth = federation.batch_at(client, round).x[0, 0]
        for axes, expected in zip(column, (truth, 1 - truth, 1 - truth), strict=True):
            pixels = (expected * 255).round().byte().numpy()
            np.testing.assert_array_equal(axes.get_images()[0].get_array(), pixels)
        assert column[1].get_xlabel() == f"{25.0 + 2 * round + client:.1f}"
    names = [text.get_text() for axes in columns[0] for text in axes.texts]
    assert names == ["truth", "first, PSNR (dB)", "second, PSNR (dB)"]


def test_a_picture_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    lost = graded(tmp_path / "lost", clients=1, rounds=1)
    lost.reconstruction(1, 0, "first").unlink()
    first = drawn(lost)["gallery"].axes[1]
    assert first.texts[0].get_text() == "no\nimage" and first.get_images() == []
