"""The audit: attack first and truth afterwards, rows that can be recomputed, a threat model in words."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fedgauge.client.data.batches
from fedgauge.attacks.base import Attack, Knowledge, Observation, Reconstruction, StatefulAttack, Wave
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.malicious.carried_input import carried_input
from fedgauge.attacks.malicious.fishing import class_fishing
from fedgauge.attacks.malicious.imprint import imprint
from fedgauge.attacks.malicious.loki import loki
from fedgauge.attacks.malicious.optimised_features import optimised_features
from fedgauge.attacks.malicious.scale_mia import scale_mia
from fedgauge.attacks.malicious.separate_models import separate_models
from fedgauge.attacks.malicious.server_attack import ServerAttack
from fedgauge.attacks.malicious.trap_weights import trap_weights
from fedgauge.attacks.modality import image_metrics
from fedgauge.attacks.modality.images import DECODERS, IMAGE_ATTACKS, ImageModality
from fedgauge.attacks.plan import ATTACK, PlannedAttack
from fedgauge.attacks.score_rows import WHOLE_BATCH, ScoreRecord
from fedgauge.attacks.source import FederationSource
from fedgauge.attacks.threat_model import public_knowledge
from fedgauge.client.data.batches import Shards
from fedgauge.client.federation import Federation
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch
from tests.attacks.refusals import with_truth

Make = Callable[..., Any]
MLP = {"use": "mlp", "hidden": [16]}
SGD = {"use": "local_sgd", "rate": 0.1}


def planned(use: str, **table: Any) -> PlannedAttack:
    return PlannedAttack.from_table({"iterations": 2, **table, "use": use}, "here")


def rows_of(rows: tuple[ScoreRecord, ...], attack: str, metric: str) -> list[float | None]:
    found = sorted((row.example, row.value) for row in rows if (row.attack, row.metric) == (attack, metric))
    return [value for _, value in found]


# ----------------------------------------------------------------------------------------- the attacker sees no truth


class TruthTouched(AssertionError):
    """Somebody asked for private data while an attack ran."""


@contextmanager
def guarded(monkeypatch: pytest.MonkeyPatch, kind: type[Attack]) -> Iterator[list[str]]:
    """Private data raises while an attack of this kind runs; yields the order of events."""
    events: list[str] = []
    attacking = False

    def guard(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if attacking:
                raise TruthTouched(name)
            events.append(name)
            return function(*args, **kwargs)

        return guarded

    entry = "advance" if issubclass(kind, StatefulAttack) else "reconstruct"
    original = getattr(kind, entry)

    def attack(self: Attack, wave: Wave, known: Knowledge, *others: Any) -> Any:
        nonlocal attacking
        attacking = True
        events.append("attack begins")
        try:
            return original(self, wave, known, *others)
        finally:
            attacking = False
            events.append("attack ends")

    with monkeypatch.context() as patched:
        patched.setattr(kind, entry, attack)
        patched.setattr(Shards, "batch_at", guard(Shards.batch_at, "truth"))
        patched.setattr(Federation, "batch_at", guard(Federation.batch_at, "asked"))
        patched.setattr(
            fedgauge.client.data.batches, "batch_of", guard(fedgauge.client.data.batches.batch_of, "images")
        )
        patched.setattr(Federation, "client_update", guard(Federation.client_update, "update"))
        yield events


SMALL: dict[str, dict[str, int]] = {  # an attack that trains first trains little here
    "gi_gip": {"latent": 8, "width": 4, "training": 5},
    "gifd": {"latent": 8, "width": 4, "training": 5},
    "learning_to_invert": {"hidden": 16},
    "ridge_inversion": {"buckets": 64},
}


# attacks on text: test_text_audit.py, text/test_text_contract.py; decoders of a malicious server's weights: below
PATCHES = "patch_embedding"  # reads no fully connected network: tests/attacks/exact/test_patch_embedding.py
OF_IMAGES = [e.name for e in ATTACK.entries() if e.group == IMAGE_ATTACKS and e.name != PATCHES]
OF_IMAGES += ImageModality.baselines
DECODED: dict[str, ServerAttack | None] = {  # by decoder, the server attack whose answers it reads
    "read_carried": carried_input(),
    "lone_example": class_fishing(),
    "read_imprint": imprint(bins=8),
    "lone_target": None,
    "read_features": optimised_features(),
    "separated": separate_models(count=1),
    "read_rows": trap_weights(),
    "read_latents": scale_mia(),
    "read_kernels": loki(members=1, bins=8),
}


def malicious_setup(use: str, make_federation: Make) -> tuple[Federation, Wave]:
    """A federation under a server attack, and what its first client (or group of two) answers."""
    server_attack = DECODED[use]
    changes = [server_attack.architecture] if server_attack is not None and server_attack.architecture else []
    together = {"secure_sum": {"group": 2}, "clients": 2} if server_attack is None else {}
    data = {"auxiliary": 200}  # optimised_features fits what is public
    fed: Federation = make_federation(model={**MLP, "architectures": changes}, data=data, **together)
    params, buffers = fed.initial()
    if isinstance(server_attack, class_fishing):
        server_attack = class_fishing(int(fed.batch_at(0, 1).y[0]))
    if server_attack is not None:
        params = server_attack.craft(params, public_knowledge(fed), generator("malice"))
    return fed, Wave.stack([Observation(1, 0, params, fed.client_update(params, buffers, 0, 1), buffers)])


def test_every_decoder_is_held_to_the_truths_order_of_events() -> None:
    assert sorted(DECODED) == sorted(entry.name for entry in ATTACK.entries() if entry.group == DECODERS)


@pytest.mark.parametrize("use", [*DECODED, *OF_IMAGES])
def test_no_attack_touches_private_data(
    use: str, make_federation: Make, observe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: dict[int, int] = {} if use in DECODED or use in ImageModality.baselines else {0: 1, 1: 0}
    if use in DECODED:
        fed, wave = malicious_setup(use, make_federation)
    else:
        fed = make_federation(model=MLP)
        wave = observe(fed, (0, 1))
    plan = planned(use, **SMALL.get(use, {}))
    with guarded(monkeypatch, type(plan.build())) as events:
        audited = Auditor(FederationSource(fed)).audit(plan, wave, others=others)
    begin, end = events.index("attack begins"), events.index("attack ends")
    assert "asked" not in events[:begin], "the truth was fetched before the attack"
    assert events[begin + 1] == "attack ends"
    # each client graded as itself and, baselines apart, as the other's wrong client
    graded, members = len(wave) + len(others), len(fed.protocol.group(0))
    assert events[end:].count("truth") == graded * members

    def invented(client: int, round: int) -> Batch:
        return Batch(torch.full((members, 1, 28, 28), 0.5), torch.zeros(members, dtype=torch.int64))

    for one, other in zip(audited, Auditor(with_truth(fed, invented)).audit(plan, wave), strict=True):
        values = rows_of(one.rows, plan.name, "mse")
        assert all(isinstance(value, float) for value in values) and values != rows_of(other.rows, plan.name, "mse")
        assert one.reconstruction.x is not None and other.reconstruction.x is not None
        assert torch.equal(one.reconstruction.x.sort(0).values, other.reconstruction.x.sort(0).values), (
            "but for the order"
        )


def result(**odd: Any) -> Reconstruction:
    return replace(Reconstruction(torch.zeros(1, 1, 28, 28), None, 0.0, 1, 0.0, "converged"), **odd)


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (None, "NoneType"),
        ([], "none"),
        ([result(), result()], "Reconstruction, Reconstruction"),
        ([(result().x, None)], "tuple"),
        ([result(x=torch.zeros(1, 1, 28, 28).numpy())], "x as a tensor.*ndarray"),
        ([result(y=[1])], "y as a tensor.*list"),
        ([result(x=torch.zeros(2, 1, 28, 28))], "whole batch"),
        ([result(x=torch.zeros(1, 1, 28, 28, dtype=torch.uint8))], "uint8"),
        ([result(status="great")], "great"),
    ],
)
def test_what_an_attack_should_not_return_is_named(
    make_federation: Make, observe: Make, monkeypatch: pytest.MonkeyPatch, returned: Any, named: str
) -> None:
    from fedgauge.attacks.exact.analytic import analytic

    fed = make_federation(model=MLP, data={"batch_size": 1})
    monkeypatch.setattr(analytic, "reconstruct", lambda *_: returned)
    with pytest.raises(ValueError, match=named):
        Auditor(FederationSource(fed)).audit(planned("analytic"), observe(fed, (0,)))


def test_the_guard_of_that_test_bites(make_federation: Make, observe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedgauge.attacks.grading.baselines import mean_image

    fed = make_federation(model=MLP)

    def cheat(self: Attack, wave: Wave, *others: Any) -> list[Reconstruction]:
        return [Reconstruction(fed.batch_at(c, wave.round).x, None, 0.0, 0, 0.0, "converged") for c in wave.clients]

    monkeypatch.setattr(mean_image, "reconstruct", cheat)
    wave = observe(fed, (0,))
    with guarded(monkeypatch, mean_image), pytest.raises(TruthTouched):
        Auditor(FederationSource(fed)).audit(planned("mean_image"), wave)


def test_memory_is_stored_before_the_truth_is_read(make_federation: Make, observe: Make) -> None:
    """The truth arranges what is shown; what the next round starts from stays as the attack found it."""
    fed = make_federation(model=MLP, data={"batch_size": 2})
    wave, plan = observe(fed, (0, 1)), planned("feedback_blending", fit=1e9)

    def turned(client: int, round: int) -> Batch:
        private = fed.batch_at(client, round)
        return Batch(private.x.flip(0), private.y.flip(0))

    honest, other = (
        Auditor(FederationSource(fed)).audit(plan, wave),
        Auditor(with_truth(fed, turned)).audit(plan, wave),
    )
    for a, b in zip(honest, other, strict=True):
        assert a.memory is not None
        assert b.memory is not None
        assert torch.equal(a.memory["blend"], b.memory["blend"])
        assert a.reconstruction.x is not None
        assert b.reconstruction.x is not None
        assert torch.equal(a.reconstruction.x, b.reconstruction.x.flip(0))
        assert int(a.memory["images"]) == 1
    assert {a.memory for a in Auditor(FederationSource(fed)).audit(planned("idlg"), wave)} == {None}


def test_a_stateful_attack_starts_from_its_memory(make_federation: Make, observe: Make) -> None:
    fed = make_federation(model=MLP)
    wave, plan = observe(fed, (0, 1)), planned("feedback_blending", iterations=1, fit=0)
    blend = torch.full((1, 1, 28, 28), 0.25)
    alone = Auditor(FederationSource(fed)).audit(plan, wave)
    remembered = Auditor(FederationSource(fed)).audit(
        plan, wave, memories={1: {"images": torch.tensor(2), "blend": blend}}
    )
    never, x = alone[0].reconstruction.x, remembered[1].reconstruction.x
    assert never is not None
    assert x is not None
    assert remembered[0].reconstruction.x is not None
    assert torch.equal(never, remembered[0].reconstruction.x)
    torch.testing.assert_close(x, blend)  # a single evaluation of the objective moves nothing
    assert remembered[1].memory is not None
    assert torch.equal(remembered[1].memory["blend"], blend)


def test_given_labels_include_no_images(make_federation: Make, observe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = make_federation(data={"batch_size": 4})
    wave, plan = observe(fed, (0, 1)), planned("inverting_gradients", labels="given")
    received: list[Knowledge] = []
    kind = type(plan.build())
    original = kind.reconstruct

    def reconstruct(self: Attack, wave: Wave, known: Knowledge, *others: Any) -> list[Reconstruction]:
        received.append(known)
        return original(self, wave, known, *others)

    monkeypatch.setattr(kind, "reconstruct", reconstruct)
    audited = Auditor(FederationSource(fed)).audit(plan, wave)
    (known,) = received
    assert known.labels is not None
    assert known.auxiliary is not None
    for k in range(2):
        private = fed.batch_at(k, 1)
        assert known.labels[k].tolist() == sorted(private.y.tolist()), "sorted, so that the order reveals nothing"
        assert all((image != known.auxiliary.x).flatten(1).any(1).all() for image in private.x)
        assert rows_of(audited[k].rows, plan.name, "label_accuracy") == [1.0]


# -------------------------------------------------------------------------------------------------------------- rows


def test_rows_are_the_metrics_of_the_paired_reconstruction(make_federation: Make, observe: Make) -> None:
    fed = make_federation(data={"batch_size": 3})
    plan = planned("inverting_gradients", iterations=5)
    for k, outcome in enumerate(Auditor(FederationSource(fed)).audit(plan, observe(fed, (0, 1)))):
        truth, x = fed.batch_at(k, 1).x, outcome.reconstruction.x
        assert x is not None
        assert image_metrics.match(truth, x).tolist() == [0, 1, 2], "the reconstruction stands in the truth's order"
        for metric in (image_metrics.mse, image_metrics.psnr, image_metrics.ssim):
            values = metric(truth, x).double().tolist()
            assert rows_of(outcome.rows, plan.name, metric.name) == pytest.approx(values)
        assert {row.metric for row in outcome.rows} == {"label_accuracy", "mse", "psnr", "ssim", "identified"}
        assert all((row.round, row.client, row.status) == (1, k, "converged") for row in outcome.rows)
        assert {row.example for row in outcome.rows if row.metric == "label_accuracy"} == {WHOLE_BATCH}
        assert len({row.seconds for row in outcome.rows}) == 1


def test_pairing_moves_the_labels_with_the_images(
    make_federation: Make, observe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedgauge.attacks.grading.baselines import mean_image

    fed = make_federation(data={"batch_size": 4})
    private = fed.batch_at(0, 1)
    shuffle = torch.tensor([2, 0, 3, 1])

    def perfect(self: Attack, wave: Wave, *others: Any) -> list[Reconstruction]:
        return [Reconstruction(private.x[shuffle], private.y[shuffle], 0.0, 1, 0.0, "converged")]

    monkeypatch.setattr(mean_image, "reconstruct", perfect)
    (outcome,) = Auditor(FederationSource(fed)).audit(planned("mean_image"), observe(fed, (0,)))
    assert outcome.reconstruction.x is not None
    assert outcome.reconstruction.y is not None
    assert torch.equal(outcome.reconstruction.x, private.x)
    assert torch.equal(outcome.reconstruction.y, private.y)
    assert rows_of(outcome.rows, "mean_image", "psnr") == [math.inf] * 4, "the raw value; means cap it"
    assert rows_of(outcome.rows, "mean_image", "identified") == [1.0] * 4
    assert rows_of(outcome.rows, "mean_image", "label_accuracy") == [1.0]


def test_pixels_outside_their_range_are_graded_as_a_client_would(
    make_federation: Make, observe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In [0, 1], where every private pixel lies: at home and here the same scores; what is not finite stays ungraded."""
    from fedgauge.attacks.grading.baselines import mean_image

    fed = make_federation(data={"batch_size": 1})
    x = torch.where(fed.batch_at(0, 1).x > 0.5, 3.0, -2.0)

    def graded(x: Tensor) -> tuple[Tensor | None, list[float | None]]:
        found = [Reconstruction(x, None, 0.0, 1, 0.0, "converged")]
        monkeypatch.setattr(mean_image, "reconstruct", lambda *_: found)
        (outcome,) = Auditor(FederationSource(fed)).audit(planned("mean_image"), observe(fed, (0,)))
        return outcome.reconstruction.x, rows_of(outcome.rows, "mean_image", "psnr")

    kept, values = graded(x)
    assert kept is not None and torch.equal(kept, x.clamp(0, 1))
    assert values == graded(x.clamp(0, 1))[1] and values[0] is not None and values[0] > 5
    assert graded(torch.full_like(x, math.inf))[1] == [None]


def test_a_failed_attack_is_counted(make_federation: Make, observe: Make) -> None:
    fed = make_federation(data={"batch_size": 2})
    (outcome,) = Auditor(FederationSource(fed)).audit(planned("analytic"), observe(fed, (0,)), others={0: 1})
    assert outcome.reconstruction.status == "not_applicable"
    assert {row.status for row in outcome.rows} == {"not_applicable"}
    for name in ("analytic", "wrong_client(analytic)"):
        for metric in ("mse", "psnr", "ssim", "identified"):
            assert rows_of(outcome.rows, name, metric) == [None, None]
        assert rows_of(outcome.rows, name, "label_accuracy") == [], (
            "an attack that claims no labels has no score of them"
        )


def test_wrong_client_is_graded_against_another_truth(make_federation: Make, observe: Make) -> None:
    fed = make_federation(clients=3, model=MLP)
    plan = planned("analytic", name="exact")
    others = {0: 2, 1: 0}
    audited = Auditor(FederationSource(fed)).audit(plan, observe(fed, (0, 1, 2)), others=others)
    for k, outcome in enumerate(audited):
        wrong = [row for row in outcome.rows if row.attack == "wrong_client(exact)"]
        if k not in others:
            assert wrong == []
            continue
        x = outcome.reconstruction.x
        assert x is not None
        assert {row.client for row in wrong} == {others[k]}
        assert rows_of(tuple(wrong), "wrong_client(exact)", "mse") == pytest.approx(
            image_metrics.mse(fed.batch_at(others[k], 1).x, x).tolist()
        )
        assert rows_of(outcome.rows, "exact", "psnr")[0] > 100  # type: ignore[operator]
        assert rows_of(outcome.rows, "wrong_client(exact)", "psnr")[0] < 30  # type: ignore[operator]


def test_baselines_are_what_they_say(make_federation: Make, observe: Make) -> None:
    fed = make_federation(data={"batch_size": 2, "auxiliary": 50})
    public = fed.shards.auxiliary_batch().x
    assert len(public) == 50
    auditor, wave = Auditor(FederationSource(fed)), observe(fed, (0, 1))
    for outcome in auditor.audit(planned("mean_image"), wave):
        assert outcome.reconstruction.x is not None
        assert torch.equal(outcome.reconstruction.x, public.mean(0).expand(2, 1, 28, 28))
    labels = fed.shards.auxiliary_batch().y
    told = PlannedAttack("class_mean_image", {"use": "class_mean_image"}, labels="given")
    for client, outcome in enumerate(auditor.audit(told, wave)):
        found, own = outcome.reconstruction.x, fed.batch_at(client, 1).y
        assert found is not None
        means = torch.stack([public[labels == c].mean(0) for c in own])
        assert sorted(found.sum((1, 2, 3)).tolist()) == pytest.approx(sorted(means.sum((1, 2, 3)).tolist()))
        assert outcome.reconstruction.y is None, "it restores no labels"
    drawn = [o.reconstruction.x for o in auditor.audit(planned("random_image"), wave)]
    assert all(x is not None and any(torch.equal(x[0], image) for image in public) for x in drawn)
    assert not torch.equal(drawn[0], drawn[1])  # type: ignore[arg-type]


def test_without_labels_the_class_mean_uses_restored_ones(make_federation: Make, observe: Make) -> None:
    fed = make_federation(data={"batch_size": 1, "auxiliary": 50})
    told = PlannedAttack("class_mean_image", {"use": "class_mean_image"}, labels="given")
    given, blind = (
        Auditor(FederationSource(fed, blind=b)).audit(told, observe(fed, (0,)))[0].reconstruction for b in (False, True)
    )
    assert given.x is not None and blind.x is not None
    assert torch.equal(given.x, blind.x), "one label is always restored"


def result(auditor: Auditor, plan: PlannedAttack, wave: Wave) -> Tensor:
    x = auditor.audit(plan, wave)[0].reconstruction.x
    assert x is not None
    return x


def test_starts_depend_on_seed_attack_round_and_client(make_federation: Make, observe: Make) -> None:
    fed = make_federation()
    start = planned("inverting_gradients", seconds=1e-9)
    other = planned("inverting_gradients", seconds=1e-9, name="again")
    first = result(Auditor(FederationSource(fed), 1), start, observe(fed, (0,)))
    assert torch.equal(first, result(Auditor(FederationSource(fed), 1), start, observe(fed, (0, 1)))), (
        "packing changes no start"
    )
    for changed in (
        result(Auditor(FederationSource(fed), 2), start, observe(fed, (0,))),
        result(Auditor(FederationSource(fed), 1), other, observe(fed, (0,))),
        result(Auditor(FederationSource(fed), 1), start, observe(fed, (1,))),
        result(Auditor(FederationSource(fed), 1), start, observe(fed, (0,), 2)),
    ):
        assert not torch.equal(first, changed)


# --------------------------------------------------------------------------------------------------------- knowledge


def test_the_defense_is_known_or_not(make_federation: Make, observe: Make) -> None:
    prune = {"use": "prune", "keep": 0.1}
    fed = make_federation(chain=[SGD, prune])
    wave, batch = observe(fed, (0,)), fed.batch_at(0, 1)
    forms = {
        d: Auditor(FederationSource(fed)).knowledge(planned("idlg", defense=d)).forward(wave.params, batch, None)
        for d in ("known", "unknown")
    }
    assert all(torch.equal(forms["known"][k], wave.update[k][0]) for k in wave.update)
    bare = make_federation(chain=[SGD]).client_update(wave.params, {}, 0, 1)
    assert all(torch.equal(forms["unknown"][k], bare[k]) for k in bare)


def test_the_attackers_form_holds_no_noise_of_the_client(make_federation: Make) -> None:
    fed, bare = (make_federation(chain=[SGD, *more]) for more in ([{"use": "gaussian", "sigma": 1.0}], []))
    params, buffers = fed.initial()
    found = Auditor(FederationSource(fed)).knowledge(planned("idlg")).forward(params, fed.batch_at(0, 1), None)
    assert all(torch.equal(found[k], t) for k, t in bare.client_update(params, buffers, 0, 1).items())


# --------------------------------------------------------------------------------------------------------------- plan
