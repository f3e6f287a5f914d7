"""Claims about audits of text: whole federations of sentences, their defenses, floors, threat models and refusals."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgauge.attacks.base import Budget
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.grading.baselines import random_words
from fedgauge.attacks.grading.knowledge_card import knowledge_card
from fedgauge.attacks.grading.replay import replay
from fedgauge.attacks.modality.text_metrics import text_metrics
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.score_rows import ScoreRecord
from fedgauge.attacks.source import FederationSource
from fedgauge.client.components import SpecError, allowing
from fedgauge.client.federation import Federation
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.rng import generator
from fedgauge.client.update import norm
from fedgauge.server.store.scenario import Scenario
from tests.attacks.refusals import check_named

pytest.importorskip("transformers", reason="the extra [text] is not installed")
Make = Callable[..., Federation]
SMALL = {"use": "tiny_bert", "width": 16, "heads": 2}
LOCAL = {"use": "local_sgd", "rate": 0.1}
GPT = {"use": "tiny_gpt2", "width": 16, "heads": 2}
NEXT = {"use": "next_token"}


@pytest.fixture
def make(tables: Callable[..., dict[str, Any]], make_federation: Make) -> Make:
    def text(**changes: Any) -> Federation:
        data = {"use": "phrases", "batch_size": 2, "auxiliary": 200, **changes.pop("data", {})}
        return make_federation(**{"model": SMALL, **changes, "data": data})

    return text


def lm(make: Make, batch_size: int = 2, **changes: Any) -> Federation:
    return make(data={"task": "next_token", "batch_size": batch_size}, model=GPT, loss=NEXT, **changes)


# ----------------------------------------------------------------------------------------------------------- federation


@pytest.mark.parametrize(
    "link",
    [
        {"use": "gaussian", "sigma": 0.01},
        {"use": "clip", "max_norm": 0.1},
        {"use": "dp_sgd", "max_norm": 0.1, "noise_multiplier": 1.0},
        {"use": "quantize", "bits": 4},
    ],
    ids=lambda link: link["use"],
)
def test_defenses_of_updates_work_on_text_as_they_are(make: Make, link: dict[str, Any]) -> None:
    fed = make(chain=[link, LOCAL])
    params, buffers = fed.initial()
    bare = make().client_update(params, buffers, 0, 1)
    update = fed.client_update(params, buffers, 0, 1)
    assert update.keys() == params.keys()
    assert any(not torch.equal(update[k], bare[k]) for k in params)
    again = fed.client_update(params, buffers, 0, 1)
    assert all(torch.equal(update[k], again[k]) for k in params)
    if link["use"] == "clip":
        assert float(norm(update)) <= 0.1 * LOCAL["rate"] * (1 + 1e-5)  # type: ignore[operator]
    assert replay(fed, FederationSource(fed).seen(0)).ok


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"chain": [{"use": "mixup", "alpha": 1.0}, LOCAL]}, "mixup"),
        ({"chain": [{"use": "ats", "policy": "3-1-7"}, LOCAL]}, "ATS"),
        ({"chain": [{"use": "soteria"}, LOCAL]}, "soteria"),
        ({"model": {**SMALL, "defense": [{"use": "precode"}]}}, "precode"),
        ({"model": {"use": "lenet"}}, "lenet"),
        ({"model": GPT}, "next_token"),
        ({"loss": NEXT}, "next_token"),
        ({"data": {"task": "next_token"}, "model": GPT}, "cross_entropy"),
        ({"data": {"length": 200}}, "128 positions"),
        ({"model": {"use": "encoder"}}, "minilm"),
    ],
)
def test_unfit_settings_are_refused_for_text(make: Make, changes: dict[str, Any], name: str) -> None:
    with pytest.raises(SpecError, match=name):
        make(**changes).check()


# ---------------------------------------------------------------------------------------------------------------- audit


def rows_of(fed: Federation, observe: Any, planned: PlannedAttack, **more: Any) -> list[ScoreRecord]:
    (audited,) = Auditor(FederationSource(fed), **more).audit(planned, observe(fed))
    return list(audited.rows)


@pytest.mark.parametrize("made", [lambda m: m(), lm], ids=["classification", "next_token"])
def test_random_words_are_graded_by_every_metric(made: Callable[[Make], Federation], make: Make, observe: Any) -> None:
    fed = made(make)
    planned = PlannedAttack("random_words", {"use": "random_words"})
    found = rows_of(fed, observe, planned)
    names = {m.name for m in text_metrics(fed.shards.dataset.tokenizer)}  # type: ignore[attr-defined]
    assert {(r.metric, r.example) for r in found} == {(name, i) for name in names for i in range(2)}
    assert all(r.value is not None and 0 <= r.value <= 100 for r in found)
    assert "200 auxiliary sentences" in knowledge_card(fed, planned)


def test_random_words_are_as_frequent_as_in_auxiliary_text(make: Make, observe: Any) -> None:
    fed = make(data={"batch_size": 600})
    auditor = Auditor(FederationSource(fed))
    known = auditor.knowledge(PlannedAttack("random_words", {"use": "random_words"}))
    wave = observe(make())
    (found,) = random_words().reconstruct(wave, known, Budget(1), [partial(generator, "t")])
    assert found.x is not None
    special = torch.tensor(sorted(fed.model.special))  # type: ignore[arg-type]
    assert known.auxiliary is not None
    for x in (found.x, known.auxiliary.x):
        assert (x[:, 0] == fed.shards.dataset.tokenizer.cls).all()  # type: ignore[attr-defined]
    counts = [
        torch.bincount(x[~torch.isin(x, special)], minlength=fed.model.vocabulary).double()  # type: ignore[arg-type]
        for x in (found.x, known.auxiliary.x)
    ]
    shares = [c / c.sum() for c in counts]
    assert float((shares[0] - shares[1]).abs().max()) < 0.02
    lengths = [(x != 0).sum(1).double().mean() for x in (found.x, known.auxiliary.x)]
    assert abs(float(lengths[0] - lengths[1])) < 0.3


OWN = '''
from collections.abc import Sequence
from dataclasses import dataclass
import torch
from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Stream, Wave

@dataclass(frozen=True)
class echo(Attack):
    """Returns the labels and lengths that it was given."""
    def reconstruct(self, wave, known, budget, streams):
        x = torch.full((known.batch_size, *known.shape), known.model.pad)
        if known.lengths is not None:
            for i, n in enumerate(known.lengths[0].tolist()):
                x[i, :n] = 9
        y = None if known.labels is None else known.labels[0]
        return [Reconstruction(x, y, 0.0, 1, 0.0, "converged") for _ in wave.clients]
'''


@pytest.fixture
def own(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "mytext.py").write_text(OWN)
    with allowing(["mytext"], [tmp_path]):
        yield


@pytest.mark.usefixtures("own")
def test_lengths_and_labels_are_handed_over_where_the_threat_model_says_so(make: Make, observe: Any) -> None:
    fed = make()
    batch = fed.batch_at(0, 1)
    for lengths in ("hidden", "given"):
        table = {"use": "mytext:echo", "labels": "given", "lengths": lengths}
        planned = PlannedAttack.from_table(table, "[[attack]]")
        assert planned == PlannedAttack.from_json(planned.to_json())
        (audited,) = Auditor(FederationSource(fed)).audit(planned, observe(fed))
        x, y = audited.reconstruction.x, audited.reconstruction.y
        assert x is not None and y is not None
        assert torch.equal(y.sort().values, batch.y.sort().values)
        lengths_found = sorted((x == 9).sum(1).tolist())
        assert lengths_found == (sorted((batch.x != 0).sum(1).tolist()) if lengths == "given" else [0, 0])
        assert f"lengths {lengths}" in knowledge_card(fed, planned)


@pytest.mark.usefixtures("own")
def test_the_labels_of_next_token_are_never_handed_over(make: Make, observe: Any) -> None:
    planned = PlannedAttack.from_table({"use": "mytext:echo", "labels": "given"}, "[[attack]]")
    check_named("given", lambda: Auditor(FederationSource(lm(make))).audit(planned, observe(lm(make))))


def scenario(**changes: Any) -> dict[str, Any]:
    data = {"use": "phrases", "auxiliary": 100}
    return {"rounds": 1, "clients": 2, "data": data, "model": SMALL, "chain": [LOCAL], **changes}


def test_a_scenario_of_text_has_the_floor_of_text_and_no_limit_of_images() -> None:
    noisy = [{"use": "gaussian", "sigma": 0.1}, LOCAL]
    assert [p.name for p in Scenario.from_tables(scenario(chain=noisy)).plan.attacks] == ["random_words"]


def test_attacks_on_images_are_refused_for_text() -> None:
    with pytest.raises(SpecError):
        Scenario.from_tables(scenario(attack=[{"use": "dlg"}]))


def test_lengths_are_refused_for_images(tables: Callable[..., dict[str, Any]]) -> None:
    attack = [{"use": "dlg", "lengths": "given"}]
    with pytest.raises(SpecError):
        Scenario.from_tables(tables(attack=attack))


def test_frozen_words_travel_as_buffers_and_the_replay_is_exact(make: Make) -> None:
    fed = make(model={**SMALL, "freeze": ["words", "biases"]})
    assert isinstance(fed.model, LanguageModel)
    seen = FederationSource(fed).seen(0)
    assert fed.model.parts.word in seen.buffers and fed.model.parts.word not in seen.update
    assert replay(fed, seen).ok
