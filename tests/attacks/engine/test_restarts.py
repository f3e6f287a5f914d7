"""A search with restarts returns the one with the lowest objective."""

import pytest
import torch

from fedgauge.attacks.base import Budget, Stream
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.attacks.matching.recipes import idlg, inverting_gradients
from tests.attacks.matching import tiny_problems
from tests.attacks.matching.tiny_problems import streams


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("attack", [inverting_gradients(), idlg()], ids=["adam", "lbfgs"])
def test_the_result_is_of_the_restart_with_the_lowest_objective(attack: GradientMatching) -> None:
    wave, known = tiny_problems.scene(2, 2)[:2]

    def only(stream: Stream, restart: int) -> Stream:
        return lambda purpose, _: stream(purpose, restart)

    together = attack.reconstruct(wave, known, Budget(12, 4), streams(0, 1))
    single = [attack.reconstruct(wave, known, Budget(12), [only(s, r) for s in streams(0, 1)]) for r in range(4)]
    for k, found in enumerate(together):
        best, *others = sorted((results[k] for results in single), key=lambda result: result.objective)
        torch.testing.assert_close(found.x, best.x, rtol=0, atol=1e-6)
        assert all(float((found.x - other.x).abs().max()) > 1e-3 for other in others)
