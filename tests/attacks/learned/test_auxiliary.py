"""Auxiliary images: disjoint from the clients', in the shares that were asked for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.grading.knowledge_card import knowledge_card
from fedgauge.attacks.learned.auxiliary import Auxiliary, cosine_matrix, pseudo_images
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.source import FederationSource
from fedgauge.client.components import SpecError
from fedgauge.client.rng import generator
from tests.attacks.learned.small_threats import images


def test_a_mixture_holds_the_share_that_it_says() -> None:
    batch = images(400)
    found = Auxiliary(size=50, classes=(0, 1), beta=0.3).of(batch, 4, generator("mix"))
    assert len(found.y) == 50
    assert int((found.y >= 2).sum()) == 15
    own = {x.numpy().tobytes() for x in batch.x}
    assert len({x.numpy().tobytes() for x in found.x} & own) == 50
    assert set(Auxiliary(classes=(3,)).of(batch, 4, generator("ood")).y.tolist()) == {3}
    for wrong, named in ((Auxiliary(size=500), "400"), (Auxiliary(classes=(4,)), "4")):
        with pytest.raises(ValueError, match=named):
            wrong.of(batch, 4, generator("wrong"))


def test_pseudo_images_have_the_moments_of_the_images_in_their_basis() -> None:
    torch.testing.assert_close(cosine_matrix(8) @ cosine_matrix(8).T, torch.eye(8, dtype=torch.float64))
    smooth = 0.5 + 0.05 * torch.randn(500, 1, 1, 1, generator=generator("s")).expand(500, 1, 8, 8)
    dct, pixel = (pseudo_images(smooth, 2000, kind, generator("m")) for kind in ("dct", "pixel"))  # type: ignore[arg-type]
    for made in (dct, pixel):
        assert float(made.mean()) == pytest.approx(0.5, abs=0.01)
        assert float(made[:, 0, 3, 3].std()) == pytest.approx(0.05, rel=0.1)
    assert float(dct.std(dim=(2, 3)).max()) < 1e-5, "constant images have one coefficient"
    assert float(pixel.std(dim=(2, 3)).mean()) == pytest.approx(0.05, rel=0.1)


def test_the_knowledge_card_and_the_knowledge_have_the_chosen_images(make_federation: Callable[..., Any]) -> None:
    fed = make_federation()
    table = {"use": "ridge_inversion", "auxiliary": {"size": 40, "classes": [0, 1], "pseudo": 10}}
    planned = PlannedAttack.from_table(table, "[[attack]] #1")
    known = Auditor(FederationSource(fed)).knowledge(planned)
    assert known.auxiliary is not None
    assert len(known.auxiliary.x) == 50
    assert set(known.auxiliary.y[:40].tolist()) == {0, 1}
    card = knowledge_card(fed, planned)
    assert all(fact in card for fact in ("40 auxiliary images", "100%", "classes 0, 1 and", "10 pseudo-images"))
    assert PlannedAttack.from_json(planned.to_json()) == planned
    assert "auxiliary" not in PlannedAttack("x", {"use": "ridge_inversion"}).to_json(), "old keys stay"
    with pytest.raises(SpecError):
        PlannedAttack.from_table({**table, "auxiliary": {"sise": 4}}, "[[attack]] #1")
