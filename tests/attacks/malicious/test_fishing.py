"""Fishing leaves one example of a batch its gradient, and the rest none: by a class, or by a threshold that is halved."""

from dataclasses import replace

import pytest
import torch

from fedgauge.attacks.base import Knowledge, Observation
from fedgauge.attacks.delegating import DelegatingAttack
from fedgauge.attacks.engine.computation import classifier
from fedgauge.attacks.malicious.fishing import class_fishing, count_isolated, feature_fishing, lone_example
from fedgauge.attacks.malicious.server_attack import ServerAttack
from fedgauge.attacks.matching.recipes import dlg
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.client.chain import Chain, chain
from fedgauge.client.components import SpecError
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params, mlp
from fedgauge.client.rng import generator
from fedgauge.client.transforms import GroupMean, per_example
from fedgauge.client.update import Batch
from fedgauge.defenses.clip import clip
from tests.attacks.malicious.served import answer, craft, read
from tests.attacks.refusals import check_named

SHAPE, CLASSES, SIZE = (1, 5, 5), 6, 8


def known(links: Chain | None = None, size: int = SIZE) -> Knowledge:
    torch.manual_seed(0)
    public = Batch(torch.rand(50, *SHAPE, generator=generator("public")), torch.arange(50) % CLASSES)
    model = mlp(SHAPE, CLASSES, hidden=[20])
    return Knowledge(model, links or chain(local_sgd(0.1)), SHAPE, CLASSES, size, (0.4,), (0.3,), auxiliary=public)


def examples(labels: list[int], seed: int = 0) -> Batch:
    return Batch(torch.rand(len(labels), *SHAPE, generator=generator("own", seed)), torch.tensor(labels))


def meet(server_attack: ServerAttack, threat: Knowledge, batch: Batch, rounds: int) -> list[Observation]:
    honest, seen = detached_params(threat.model), list[Observation]()
    for round in range(1, rounds + 1):
        params = server_attack.craft(honest, threat, generator("malice", round), seen)
        seen.append(Observation(round, 0, params, answer(threat, params, batch)))
    return seen


@pytest.mark.parametrize("times", [0, 1, 3])
def test_a_fished_class_alone_has_a_gradient_and_its_bias_counts_the_examples(times: int) -> None:
    threat = known()
    batch = examples([2] * times + [0, 1, 3, 4, 5, 0, 1, 3][: SIZE - times])
    (seen,) = meet(class_fishing(target=2), threat, batch, 1)
    assert count_isolated(seen.params, seen.update, threat) == pytest.approx(times, abs=1e-4)
    mine = batch.y == 2
    names = [k for k in seen.update if not k.startswith(classifier(threat.model, threat.shape))]
    if not times:
        assert all(float(seen.update[k].abs().max()) < 1e-9 for k in names)
        return
    alone = answer(threat, seen.params, Batch(batch.x[mine], batch.y[mine]))
    for name in names:  # the mean over the whole batch is that over the class, times its share
        torch.testing.assert_close(seen.update[name], alone[name] * times / SIZE, rtol=1e-4, atol=1e-9)


def test_classes_are_tried_in_turn_until_one_occurs_once() -> None:
    threat, batch = known(), examples([0, 0, 0, 3, 3, 3, 3, 1])
    seen = meet(class_fishing(), threat, batch, 5)
    assert [round(count_isolated(o.params, o.update, threat)) for o in seen] == [3, 1, 1, 1, 1]


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_threshold_halved_round_by_round_leaves_one_example_of_a_class(seed: int) -> None:
    threat, batch = known(), examples([4] * SIZE, seed)
    seen = meet(feature_fishing(target=4), threat, batch, 25)
    counts = [count_isolated(o.params, o.update, threat) for o in seen]
    assert counts[-1] == pytest.approx(1, abs=2e-3)
    first = next(i for i, count in enumerate(counts) if abs(count - 1) < 1e-3)
    assert all(torch.equal(seen[first + 1].params[k], t) for k, t in seen[-1].params.items())  # kept, once found
    singles = [Batch(batch.x[i : i + 1], batch.y[i : i + 1]) for i in range(SIZE)]
    sizes = sorted(float(answer(threat, seen[-1].params, single)["1.weight"].norm()) for single in singles)
    assert sizes[-2] < 2e-3 * sizes[-1]


@pytest.mark.parametrize("links", [chain(local_sgd(0.1)), chain(per_example(clip(0.5)), local_sgd(0.1))])
def test_the_isolated_example_is_inverted_as_if_it_were_alone(links: Chain) -> None:
    threat, batch = known(links), examples([0, 0, 0, 3, 3, 3, 3, 1])
    (seen,) = meet(class_fishing(target=1), threat, batch, 1)
    attack = lone_example({"use": "inverting_gradients", "tv": 0.0})
    found = read(attack, threat, seen.params, seen.update, iterations=100)
    assert found.x is not None and found.x.shape == batch.x.shape
    error = float((found.x[0] - batch.x[-1]).square().mean())
    assert error < 1e-3, found.reason
    assert threat.auxiliary is not None
    # nothing was seen of them
    torch.testing.assert_close(found.x[1:], threat.auxiliary.x.mean(0).expand(SIZE - 1, *SHAPE))


def test_unsuitable_targets_of_fishing_are_refused() -> None:
    threat, batch = known(), examples([0] * SIZE)
    check_named("target", lambda: craft(class_fishing(target=6), threat))
    with pytest.raises(SpecError):
        lone_example({"use": "analitic"})
    honest = detached_params(threat.model)
    (seen,) = meet(class_fishing(target=1), threat, batch, 1)
    parts = chain(replace(local_sgd(0.1), batch_size=2))
    for other, params, update, name in (
        (known(), honest, answer(threat, honest, batch), "6 rows"),
        (known(), seen.params, seen.update, "class 1"),
        (known(chain(local_sgd(0.1, steps=2))), seen.params, seen.update, "2 local steps"),
        (known(parts), seen.params, seen.update, "on parts"),
        (known(Chain((clip(1.0), local_sgd(0.1), GroupMean(2)))), seen.params, seen.update, "on parts"),
    ):
        found = read(lone_example(), other, params, update)
        assert (found.status, found.x) == ("not_applicable", None) and name in found.reason


def test_the_attack_that_inverts_it_is_named_by_a_table_of_a_scenario() -> None:
    for use in ("lone_example", "lone_target", "separated"):
        made = PlannedAttack("a", {"use": use, "attack": {"use": "dlg"}}).build()
        assert isinstance(made, DelegatingAttack) and made.inner == dlg()
    with pytest.raises(SpecError):
        PlannedAttack("a", {"use": "lone_example", "attack": {"use": "dlg", "restarts": 2}}).build()
