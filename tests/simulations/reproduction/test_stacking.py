"""The stacking of membership scores: fitted without the attacked clients' truth, and compared client by client."""

import pytest
import torch
from torch import Tensor

from fedgauge.client.federation import Federation
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch
from fedgauge.simulations.reproduction import stacking


def drawn(name: str) -> Tensor:
    """Scores of which the second tells members apart, of 5 clients."""
    scores = torch.randn(5, 280, 7, generator=generator(name), dtype=torch.float64)
    scores[:, :30, 1] += 2
    return scores


def test_it_is_fitted_to_a_shadow_federation_of_images_that_no_client_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Federation] = []

    def scores_of(fed: Federation, strangers: Batch) -> Tensor:
        seen.append(fed)
        return drawn(f"federation {len(seen)}")

    monkeypatch.setattr(stacking, "scores_of", scores_of)
    monkeypatch.setitem(stacking.DATA, "use", "mnist5k")
    stacked = stacking.attacked((stacking.EPOCH,), 0)
    shadow, ours = (torch.cat(fed.shards.indices) for fed in seen)
    assert len(shadow) == len(ours) == 500 and not torch.isin(shadow, ours).any()
    assert not torch.isin(seen[0].shards.auxiliary, torch.cat([shadow, ours])).any()
    rows = {(row.attack, row.metric): row for row in stacking.figures("made up", stacked)}
    assert rows["stacking", "AUC"].here == pytest.approx(rows["cosine", "AUC"].here, abs=0.02), "one score is enough"
    gain = rows[stacking.GAIN, "AUC"]
    assert gain.low is not None and gain.high is not None and gain.low < 0.02 and gain.high > -0.02 and gain.n == 150
