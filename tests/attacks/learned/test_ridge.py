"""Ridge inversion: the error that paper gives, in both forms."""

import pytest
import torch

from fedgauge.attacks.base import Budget
from fedgauge.attacks.learned.ridge import fit, minimise_on_grid, ridge_inversion
from fedgauge.attacks.modality.image_metrics import mse
from fedgauge.client.chain import Chain, chain
from fedgauge.client.local_training import local_sgd
from fedgauge.client.rng import generator
from fedgauge.client.transforms import per_example
from fedgauge.client.update import Batch
from fedgauge.defenses.noise import gaussian
from fedgauge.defenses.sign import sign
from tests.attacks.learned.small_threats import STREAMS, digits, error_of
from tests.attacks.refusals import check_named


@pytest.mark.parametrize("quiet", [False, True])
def test_ridge_in_a_linear_world_reaches_the_error_that_paper_gives(quiet: bool) -> None:
    """x ~ N(0, .05^2), seen = x + N(0, .1^2): the least mean squared error is 1 / (1 / .05^2 + 1 / .1^2) = .002.

    So it is, too, for a ridge that is fitted without noise, at a regulariser of n sigma^2 of |x|^2, within the search's step.
    """
    rng = generator("world")
    x = 0.5 + 0.05 * torch.randn(4000, 6, generator=rng)
    seen = x + 0.1 * torch.randn(4000, 6, generator=rng)
    none = torch.zeros(4000, dtype=torch.int64)
    rows, held = Batch((x if quiet else seen)[:3000], none[:3000]), Batch(seen[3000:], none[3000:])
    found = fit(rows, x[:3000], held, x[3000:], 0.0, 1, 1e-3)
    assert found.error == pytest.approx(0.002, rel=0.05)
    assert not quiet or 0.5 < found.regulariser / (3000 * 0.1**2 / (6 * 0.05**2)) < 2


@pytest.mark.parametrize("bond", [0.0, 3.0])
def test_both_forms_of_a_ridge_are_one(bond: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = generator("forms")
    x, y, targets = (
        torch.randn(80, 5, generator=rng),
        torch.randint(3, (80,), generator=rng),
        torch.rand(80, 2, generator=rng),
    )
    found = []
    for primal in (True, False):
        # as many rows, of which most are zeros that no form sees, decide which form it is
        padded = x if primal else torch.cat([x, torch.zeros(80, 200)], 1)
        rows = [Batch(padded[part], y[part]) for part in (slice(60), slice(60, 80))]
        made = fit(rows[0], targets[:60], rows[1], targets[60:], bond, 3, 1.0)
        assert (made.rows is None) == primal
        found.append((made.regulariser, made(rows[1])))
    assert found[0][0] == pytest.approx(found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-8, atol=1e-10)


def test_a_bond_learns_a_map_of_each_label_s_own() -> None:
    rng = generator("bond")
    x, y = torch.rand(600, 1, generator=rng) - 0.5, torch.randint(2, (600,), generator=rng)
    targets = 0.5 + torch.where(y[:, None] == 0, x, -x)
    errors = [
        fit(Batch(x[:500], y[:500]), targets[:500], Batch(x[500:], y[500:]), targets[500:], bond, 2, 1e-3).error
        for bond in (0.0, 10.0)
    ]
    assert errors[0] > 0.05
    assert errors[1] < 1e-3


def test_downhill_ends_where_the_error_is_least() -> None:
    assert minimise_on_grid(lambda r: (torch.tensor(r).log10() + 3).square().item(), 1.0) == pytest.approx(
        1e-3, rel=1e-6
    )
    check_named("finite", lambda: minimise_on_grid(lambda r: float("inf"), 1.0))


@pytest.mark.product
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize(
    "links", [chain(local_sgd(0.5)), chain(per_example(sign()), local_sgd(1.0)), chain(local_sgd(1.0), gaussian(0.01))]
)
def test_ridge_beats_the_mean_image_behind_every_defense(batch_size: int, links: Chain) -> None:
    known, wave, truth = digits(batch_size, links, given=True)  # how well labels are restored is another question
    assert known.auxiliary is not None
    found = ridge_inversion().reconstruct(wave, known, Budget(1), STREAMS)
    floor = float(torch.stack([mse(t, known.auxiliary.x.mean(0).expand_as(t)).mean() for t in truth]).mean())
    assert error_of(found, truth) < 0.75 * floor
    assert len({r.objective for r in found}) == 1, "one inverter serves all clients"
