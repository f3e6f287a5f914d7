"""What every attack on sentences promises, whichever it is: found by walking the package, so a new one is held to it at once."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Wave
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.modality.sentences import TEXT_ATTACKS
from fedgauge.attacks.plan import ATTACK, PlannedAttack
from fedgauge.attacks.source import FederationSource
from fedgauge.client.federation import Federation
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.vision import mlp
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch
from tests.attacks.refusals import with_truth
from tests.attacks.test_attack_contract import well_shaped

# what makes an attack small enough for seconds; one that needs nothing needs no line
SMALL: dict[str, dict[str, Any]] = {
    "lamp": {"lm_steps": 10, "draws": 3, "orders": 3, "period": 2, "candidates": 4},
}
NAMES = [entry.name for entry in ATTACK.entries() if entry.group == TEXT_ATTACKS]
BUDGET = Budget(4)
every = pytest.mark.parametrize("name", NAMES)

Make = Callable[..., Federation]


class Seen(NamedTuple):
    """Two clients of a tiny federation, as the server sees them."""

    federation: Federation
    wave: Wave
    known: Knowledge


TASKS: dict[str, dict[str, Any]] = {
    "classification": {"model": {"use": "tiny_bert", "width": 48, "heads": 2}},
    "next_token": {
        "model": {"use": "tiny_gpt2", "width": 48, "heads": 2, "tied": False},
        "loss": {"use": "next_token"},
    },
}


@pytest.fixture(scope="module", params=TASKS)
def seen(request: pytest.FixtureRequest, make_federation: Make) -> Seen:
    return observed(make_federation, request.param)


def observed(make_federation: Make, task: str, batch_size: int = 1) -> Seen:
    data = {"use": "phrases", "length": 12, "task": task, "auxiliary": 40, "batch_size": batch_size}
    fed = make_federation(data=data, **TASKS[task])
    wave = FederationSource(fed).wave(range(2))
    return Seen(fed, wave, Auditor(FederationSource(fed)).knowledge(PlannedAttack("x", {"use": NAMES[0]})))


def built(name: str) -> Attack:
    return PlannedAttack.from_table({"use": name, **SMALL.get(name, {})}, "[[attack]]").build()


def run(name: str, wave: Wave, known: Knowledge, budget: Budget = BUDGET) -> list[Reconstruction]:
    streams = [partial(generator, "contract", client) for client in wave.clients]
    return built(name).reconstruct(wave, known, budget, streams)


def declines(name: str, known: Knowledge) -> bool:
    """Whether an attack reads decoders only, and this is an encoder."""
    return name == "somp" and known.loss is torch.nn.functional.cross_entropy


def well_formed(results: list[Reconstruction], wave: Wave, known: Knowledge) -> None:
    assert isinstance(known.model, LanguageModel)
    well_shaped(results, wave, known)
    for found in results:
        if found.x is not None:
            assert found.x.dtype == torch.int64
            assert 0 <= int(found.x.min()) <= int(found.x.max()) < known.model.vocabulary
            said = found.x != known.model.pad
            assert bool((said[:, 1:] <= said[:, :-1]).all()), "padding stands on the right alone"
        assert found.y is None or known.model.task == "classification"


@every
@pytest.mark.parametrize("seen", ["next_token"], indirect=True)
def test_another_truth_changes_the_scores_and_not_the_reconstruction(name: str, seen: Seen) -> None:
    """An audit that grades against sentences read backwards hands out the same ones."""
    table = {"use": name, "iterations": BUDGET.iterations, **SMALL.get(name, {})}
    fed, plan, wave = seen.federation, PlannedAttack.from_table(table, "[[attack]]"), seen.wave.of([0])

    def invented(client: int, round: int) -> Batch:
        own = fed.batch_at(client, round)
        return Batch(own.x.flip(1), own.y.flip(1) if own.y.dim() > 1 else own.y)

    honest, other = (
        Auditor(FederationSource(fed)).audit(plan, wave)[0],
        Auditor(with_truth(fed, invented)).audit(plan, wave)[0],
    )
    assert honest.reconstruction.x is not None and other.reconstruction.x is not None
    assert torch.equal(honest.reconstruction.x, other.reconstruction.x)
    scores = [[r.value for r in audited.rows if r.metric == "token_accuracy"] for audited in (honest, other)]
    assert len(scores[0]) == len(scores[1]) == 1
    if honest.reconstruction.reason.startswith("certified"):
        assert scores[0] != scores[1]


@every
def test_an_answer_follows_the_update_and_its_stream_alone_and_nothing_is_written_to(name: str, seen: Seen) -> None:
    """The other way round in the wave, the same sentences come out the other way round."""
    model = seen.federation.model
    everything = [*seen.wave.params.values(), *seen.wave.update.values(), *model.state_dict().values()]
    kept, state = [t.clone() for t in everything], torch.get_rng_state()
    results = run(name, seen.wave, seen.known)
    well_formed(results, seen.wave, seen.known)
    turned = run(name, seen.wave.of([1, 0]), seen.known)
    for a, b in zip(results, reversed(turned), strict=True):
        if declines(name, seen.known):
            assert a.x is b.x is None
        else:
            assert a.x is not None and b.x is not None and torch.equal(a.x, b.x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(everything, kept, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


GARBAGE: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "huge": lambda t: t * 1e30,
    "tiny": lambda t: t * 1e-30,
    "noise": lambda t: torch.randn(t.shape, generator=torch.Generator().manual_seed(0)),
    "nan": lambda t: torch.full_like(t, float("nan")),
    "inf": lambda t: torch.full_like(t, float("inf")),
    "one nan": lambda t: torch.where(torch.arange(t.numel()).view(t.shape) == 0, torch.nan, t),
}

# some attacks decline a batch before they look at its update
SPOILT = [*((name, 1) for name in GARBAGE), ("huge", 2), ("one nan", 2)]


@pytest.mark.product
@every
@pytest.mark.parametrize("garbage", SPOILT, ids=str)
def test_garbage_gives_a_status_never_an_exception(name: str, garbage: tuple[str, int], seen: Seen) -> None:
    kind, batch_size = garbage
    spoilt = dataclasses.replace(seen.wave, update={k: GARBAGE[kind](t) for k, t in seen.wave.update.items()})
    known = dataclasses.replace(seen.known, batch_size=batch_size)
    well_formed(run(name, spoilt, known), spoilt, known)


@pytest.mark.product
@every
@pytest.mark.parametrize("task", TASKS)
def test_two_sentences_an_update_are_read_or_refused_with_a_reason(name: str, task: str, make_federation: Make) -> None:
    _, wave, known = observed(make_federation, task, batch_size=2)
    well_formed(run(name, wave, known), wave, known)


@every
def test_where_there_are_no_words_an_attack_says_so(name: str, seen: Seen) -> None:
    images = dataclasses.replace(seen.known, model=mlp((1, 2, 2), 2))
    for found in run(name, seen.wave, images):
        assert (found.status, found.x, found.y) == ("not_applicable", None, None)
        assert found.reason
