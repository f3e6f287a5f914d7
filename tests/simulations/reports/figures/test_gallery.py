"""The gallery shows true examples above their reconstructions."""

import re
from pathlib import Path

import numpy as np

from fedgauge.client.federation import Federation
from fedgauge.server.store.run import Run
from tests.simulations.reports.figures.graded_runs import drawn, graded


def test_the_strip_shows_truths_over_what_came_back(run: Run) -> None:
    figure, federation = drawn(run)["gallery"], Federation(run.scenario().protocol)
    texts = [t.get_text() for t in figure.texts]
    columns = [re.match(r"round (\d+)\nclient (\d+)\n(leaked\nmost|leaked\nleast|at\nrandom)$", t) for t in texts]
    chosen = [(int(m[1]), int(m[2])) for m in columns if m]
    assert len(chosen) == 6, "of nine examples"
    pictures = [axes.get_images()[0].get_array() for axes in figure.axes]
    assert len(pictures) == 6 * 3
    for k, (round, client) in enumerate(chosen):
        truth = federation.batch_at(client, round).x[0, 0]
        np.testing.assert_array_equal(pictures[3 * k], (truth * 255).round().byte().numpy())
        for tile in pictures[3 * k + 1 : 3 * k + 3]:
            np.testing.assert_array_equal(tile, ((1 - truth) * 255).round().byte().numpy())
        assert f"{25.0 + 2 * round + client:.1f}" in texts
    assert [t for t in texts if t in ("truth", "first, PSNR (dB)", "second, PSNR (dB)")] == [
        "truth", "first, PSNR (dB)", "second, PSNR (dB)"
    ]  # fmt: skip


def test_a_picture_that_is_gone_is_said_to_be(run: Run, tmp_path: Path) -> None:
    lost = graded(tmp_path / "lost", clients=1, rounds=1)
    lost.reconstruction(1, 0, "first").unlink()
    first = drawn(lost)["gallery"].axes[1]
    assert [t.get_text() for t in first.texts] == ["no\nimage"]
    assert first.get_images() == []
