"""[loss]: what clients minimise is used everywhere, and refused where only the cross-entropy would do."""

import math
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedgauge.attacks.base import Budget, Observation, Wave
from fedgauge.attacks.engine.gradients.factored import FactoredGradient
from fedgauge.attacks.engine.gradients.per_problem import gradients, local_training_changes
from fedgauge.attacks.gaussian_prior import public_priors
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.grading.knowledge_card import knowledge_card
from fedgauge.attacks.grading.replay import replay
from fedgauge.attacks.limits import BLOCKS, bayes_limit, trace_bound
from fedgauge.attacks.matching.recipes import dlg, inverting_gradients
from fedgauge.attacks.matching.search import AdamSearch
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.source import FederationSource
from fedgauge.client.chain import chain
from fedgauge.client.components import SpecError, allowing
from fedgauge.client.federation import Federation
from fedgauge.client.gradient import gradient
from fedgauge.client.label_kinds import LabelKind
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.losses import (
    Expected,
    Reduction,
    binary_cross_entropy,
    cross_entropy,
    fitted_loss,
    focal,
    huber,
    is_mean,
    logit_gradient,
    mean_absolute_error,
    mean_squared_error,
    named_loss,
    next_token,
    per_example_accuracy,
    predicts_tokens,
    reconstruction,
    takes_probabilities,
)
from fedgauge.client.models.vision import detached_params, lenet
from fedgauge.client.protocol import Protocol
from fedgauge.client.rng import generator
from fedgauge.client.transforms import GroupMean
from fedgauge.client.update import Batch, relative_error
from fedgauge.defenses.noise import gaussian

SQUARED = {"use": "mean_squared_error"}
SGD = {"use": "local_sgd", "rate": 0.1}
MakeFederation = Callable[..., Federation]

OWN = """
import torch
from torch import nn
from torch.nn import functional as F

def focal(logits, labels, gamma=2.0):
    chances = logits.softmax(1).gather(1, labels[:, None])[:, 0]
    return -((1 - chances) ** gamma * chances.log()).mean()

class Smooth(nn.Module):
    def __init__(self, part: float = 0.1):
        super().__init__()
        self.part = part
    def forward(self, logits, labels):
        return F.cross_entropy(logits, labels, label_smoothing=self.part)

class Bare(nn.Module):
    def forward(self, logits, labels):
        return F.cross_entropy(logits, labels)

class Called:
    def __call__(self, logits, labels):
        return F.cross_entropy(logits, labels)

class Centers(nn.Module):
    def __init__(self):
        super().__init__()
        self.centers = nn.Parameter(torch.zeros(5, 5))
    def forward(self, logits, labels):
        return F.cross_entropy(logits, labels) + (logits - self.centers[labels]).square().mean() - logits.square().mean()

def total(logits, labels): return F.cross_entropy(logits, labels, reduction="sum")
def each(logits, labels): return F.cross_entropy(logits, labels, reduction="none")
def number(logits, labels): return F.cross_entropy(logits, labels).item()
def detached(logits, labels): return F.cross_entropy(logits.detach(), labels)
def nan(logits, labels): return logits.sum() * float("nan")
def alone(logits): return logits.sum()
def named(logits, labels) -> str: return "no loss"
def of_one_logit(z, labels): return F.binary_cross_entropy_with_logits(z.squeeze(-1), labels.to(z))
def unhappy(logits, labels): raise LookupError("no such weight")
"""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[None]:
    import sys

    (tmp_path / "mylosses.py").write_text(OWN)
    with allowing(["mylosses"], [tmp_path]):
        yield
    sys.modules.pop("mylosses", None)


def probe(classes: int = 5, n: int = 7) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return torch.randn(n, classes, generator=rng, dtype=torch.float64), torch.arange(n) % classes


# ------------------------------------------------------------------------------------------------------ the losses alone


def test_the_losses_are_their_formulas() -> None:
    logits, y = probe()
    one_hot = F.one_hot(y, 5).double()
    assert torch.allclose(mean_squared_error()(logits, y), (logits - one_hot).square().sum() / 35)
    assert torch.equal(cross_entropy()(logits, y), F.cross_entropy(logits, y))
    target = 0.8 * one_hot + 0.2 / 5
    assert torch.allclose(cross_entropy(0.2)(logits, y), -(target * logits.log_softmax(1)).sum(1).mean())
    for loss in (mean_squared_error(), cross_entropy(0.2)):
        assert torch.allclose(loss(logits, one_hot), loss(logits, y)), "labels may be probabilities"
        assert is_mean(loss, 5) and takes_probabilities(loss, 5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weights_sums_and_other_errors_are_torchs_own(reduction: Reduction) -> None:
    logits, y = probe()
    one_hot, weight = F.one_hot(y, 5).double(), torch.tensor([0.1, 2, 1, 0.5, 3], dtype=torch.float64)
    for smoothing in (0.0, 0.2):
        loss = cross_entropy(smoothing, weight.tolist(), reduction)
        theirs = F.cross_entropy(logits, y, weight, label_smoothing=smoothing, reduction=reduction)
        assert torch.allclose(loss(logits, y), theirs)
        assert torch.allclose(loss(logits, one_hot), theirs), "labels may be probabilities"
    findings = binary_cross_entropy(weight.tolist(), reduction)
    theirs = F.binary_cross_entropy_with_logits(logits, one_hot, pos_weight=weight, reduction=reduction)
    assert torch.allclose(findings(logits, one_hot), theirs)
    assert torch.allclose(huber(0.7)(logits, y), F.huber_loss(logits, one_hot, delta=0.7))
    assert torch.allclose(mean_absolute_error()(logits, y), F.l1_loss(logits, one_hot))
    assert torch.allclose(focal(0.0)(logits, y), F.cross_entropy(logits, y))
    chances = logits.softmax(1)[torch.arange(7), y]
    assert torch.allclose(focal()(logits, one_hot), -((1 - chances) ** 2 * chances.log()).mean())


def test_slopes_are_those_on_paper() -> None:
    logits, y = probe()
    one_hot = F.one_hot(y, 5).double()
    assert torch.allclose(logit_gradient(F.cross_entropy, logits, y), logits.softmax(1) - one_hot)
    assert torch.allclose(logit_gradient(mean_squared_error(), logits, y), 2 * (logits - one_hot) / 5)


@pytest.mark.parametrize("table", [{}, {"label_smoothing": 0.0}, {"label_smoothing": 0}])
def test_the_default_is_torchs_own_function(table: dict[str, Any]) -> None:
    assert named_loss({"use": "cross_entropy", **table}) is F.cross_entropy


def test_a_users_function_gets_its_arguments_from_the_table(own: None) -> None:
    logits, y = probe()
    plain = named_loss({"use": "mylosses:focal", "gamma": 0.0})
    assert torch.allclose(plain(logits, y), F.cross_entropy(logits, y)), "focal loss without focus (Lin et al., 2017)"
    chances = logits.softmax(1)[torch.arange(7), y]
    focal = named_loss({"use": "mylosses:focal"})
    assert torch.allclose(focal(logits, y), -((1 - chances) ** 2 * chances.log()).mean())
    assert is_mean(focal, 5) and not takes_probabilities(focal, 5)
    smooth = named_loss({"use": "mylosses:Smooth", "part": 0.3})
    assert torch.equal(smooth(logits, y), F.cross_entropy(logits, y, label_smoothing=0.3))


@pytest.mark.parametrize("use", ["Bare", "Called", "Centers"])
def test_a_users_class_needs_no_constructor_no_base_and_may_have_parameters(own: None, use: str) -> None:
    logits, y = probe()
    value = named_loss({"use": f"mylosses:{use}"})(logits, y)
    assert not value.requires_grad
    assert torch.allclose(value, F.cross_entropy(logits, y))


@pytest.mark.parametrize(
    ("table", "name"),
    [
        *(
            ({"use": f"mylosses:{use}"}, f"mylosses:{use}")
            for use in ("each", "number", "detached", "nan", "alone", "named")
        ),
        ({"use": "mylosses:of_one_logit"}, "mylosses:of_one_logit"),
        ({"use": "mylosses:unhappy"}, "LookupError.*mylosses.py, line "),
        ({"use": "mylosses:focal", "gama": 1}, "gama"),
        ({"use": "cross_entropy", "label_smoothing": 2.0}, "label_smoothing"),
        ({"use": "binary_cross_entropy", "pos_weight": [-3.0]}, "pos_weight"),
        ({"use": "hinge"}, "hinge"),
        ({"use": "elsewhere:loss"}, "--allow elsewhere"),
    ],
)
def test_invalid_losses_are_refused(
    own: None, make_federation: MakeFederation, table: dict[str, Any], name: str
) -> None:
    with pytest.raises(SpecError, match=rf"^\[loss\]: .*{name}"):
        _ = make_federation(loss=table).loss


# ------------------------------------------------------------------------------------------------------- in a federation


def test_the_loss_travels_with_the_protocol_and_clients_minimise_it(make_federation: MakeFederation) -> None:
    fed = make_federation(loss=SQUARED, data={"batch_size": 3})
    again = Federation(type(fed.protocol).from_json(fed.protocol.to_json()))
    assert again.loss == mean_squared_error()
    params, buffers = fed.initial()
    batch = fed.shards.batch_at(1, 1)
    leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
    logits = torch.func.functional_call(fed.model, leaves, (fed.shards.dataset.normalise(batch.x),))
    by_hand = torch.autograd.grad((logits - F.one_hot(batch.y, 10)).square().mean(), list(leaves.values()))
    update = again.own_update(params, buffers, 1, 1)
    assert all(torch.allclose(update[k], -0.1 * g, atol=1e-7) for k, g in zip(leaves, by_hand, strict=True))


def test_accuracy_and_mean_loss_are_the_losses_own(
    make_federation: MakeFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedgauge.client.federation.LOGITS", 3330)  # chunks of unequal size
    fed = make_federation(loss=SQUARED)
    params, data = fed.initial()[0], fed.shards.dataset
    logits = torch.func.functional_call(fed.model, params, (data.normalise(data.x_test.float() / 255),))
    accuracy, loss = fed.evaluate(params)
    assert loss == pytest.approx(float((logits - F.one_hot(data.y_test, 10)).square().mean()), rel=1e-5)
    first, second = logits.topk(2).values.T
    # images that rounding may decide either way, as it depends on the size of the chunks
    undecided = float((first - second < 1e-5).double().mean())
    assert undecided < 0.01
    right = (logits.argmax(1) == data.y_test).double().mean()
    assert accuracy == pytest.approx(float(right), abs=undecided + 1e-9)


def test_a_loss_of_whole_labels_and_a_link_that_blends_them_exclude_each_other(
    own: None, make_federation: MakeFederation
) -> None:
    blend = [{"use": "mixup", "alpha": 0.5}, SGD]
    with pytest.raises(SpecError):
        make_federation(loss={"use": "mylosses:focal"}, chain=blend, data={"batch_size": 2}).check()
    make_federation(loss=SQUARED, chain=blend, data={"batch_size": 2}).check()


def test_a_secure_sum_is_as_one_client_only_where_the_loss_is_a_mean(
    own: None, make_federation: MakeFederation
) -> None:
    together = {"secure_sum": {"group": 2}}

    def last(**changes: Any) -> GroupMean:
        fed = make_federation(**together, **changes)
        found = fed.as_seen(fed.chain, 2).links[-1]
        assert isinstance(found, GroupMean)
        return found

    assert last().together and last(loss=SQUARED).together
    assert not last(loss={"use": "mylosses:total"}).together


# ------------------------------------------------------------------------------------------------------------ to attacks


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("loss", [mean_squared_error(), cross_entropy(0.1)], ids=["squared", "smooth"])
def test_the_engines_one_pass_gives_every_problems_own_gradient(loss: Any, steps: int) -> None:
    """Against plain autograd, one problem after the other."""
    model = lenet((1, 8, 8), 5).double()
    params = detached_params(model)
    rng = torch.Generator().manual_seed(1)
    x = torch.rand(3, 2, 1, 8, 8, generator=rng, dtype=torch.float64).requires_grad_()
    y = torch.tensor([[0, 1], [2, 2], [4, 3]])
    rule = local_sgd(0.1, steps)
    client = chain(rule)(gradient(model, loss))
    found = local_training_changes(model, params, x, y, rule, False, loss)
    for k in range(3):
        expected = client(params, Batch(x[k], y[k]), None)
        assert all(torch.allclose(found[n][k], t, rtol=1e-9, atol=1e-12) for n, t in expected.items())
    if steps == 1:
        one = gradients(model, params, x, y, 1.0, False, loss)
        total = sum(t.square().sum() for t in one.values() if not isinstance(t, FactoredGradient))
        assert isinstance(total, Tensor)
        (by_x,) = torch.autograd.grad(total, x)
        single = x[0].detach().requires_grad_()
        update = gradient(model, loss)(params, Batch(single, y[0]), None)
        (expected_x,) = torch.autograd.grad(torch.stack([t.square().sum() for t in update.values()]).sum(), single)
        assert torch.allclose(by_x[0], expected_x, rtol=1e-7, atol=1e-12), "and twice"


def wave_of(fed: Federation, clients: tuple[int, ...] = (0,)) -> Wave:
    params, buffers = fed.initial()
    return Wave.stack([Observation(1, c, params, fed.own_update(params, buffers, c, 1), buffers) for c in clients])


def planned(use: str, **options: Any) -> PlannedAttack:
    return PlannedAttack.from_table({"use": use, **options}, "[[attack]]")


@pytest.mark.parametrize(
    "loss", [SQUARED, {"use": "mylosses:focal"}, {"use": "mylosses:total"}], ids=lambda t: t["use"]
)
def test_the_attacker_matches_the_loss_that_it_knows(own: None, make_federation: MakeFederation, loss: Any) -> None:
    """By one pass, by vmap for a sum; from the truth the objective is zero, under another loss it is not."""
    fed = make_federation(loss=loss, data={"batch_size": 2})
    wave, batch = wave_of(fed), fed.shards.batch_at(0, 1)
    known = replace(Auditor(FederationSource(fed)).knowledge(planned("inverting_gradients")), labels=batch.y[None])
    attack, streams = inverting_gradients(tv=0.0), [lambda *_: torch.Generator()]
    attack = replace(attack, search=AdamSearch(1e-9, box=False))
    (right,) = attack.continued(wave, known, Budget(1), streams, batch.x[None])
    wrong = replace(known, loss=cross_entropy(0.5))
    (other,) = attack.continued(wave, wrong, Budget(1), streams, batch.x[None])
    assert right.objective < 1e-4 and other.objective > 10 * max(right.objective, 1e-6)
    assert f"loss {loss['use'].rpartition(':')[2]}() known" in knowledge_card(fed, planned("inverting_gradients"))


def test_labels_of_several_examples_are_optimised_also_under_a_loss_of_whole_classes(
    own: None, make_federation: MakeFederation
) -> None:
    fed = make_federation(loss={"use": "mylosses:focal"}, data={"use": "mnist5k", "batch_size": 2})
    known, wave = Auditor(FederationSource(fed)).knowledge(planned("dlg")), wave_of(fed)
    for attack in (
        dlg(),
        replace(inverting_gradients(), objective=replace(inverting_gradients().objective, labels="optimised")),
    ):
        (found,) = attack.reconstruct(wave, known, Budget(2), [lambda *_: torch.Generator()])
        assert found.status == "converged" and found.y is not None and found.y.shape == (2,)


def test_a_loss_of_whole_classes_as_one_of_probabilities_is_the_same(own: None) -> None:
    focal = named_loss({"use": "mylosses:focal"})
    logits, y = torch.randn(3, 5), torch.tensor([0, 4, 4])
    assert torch.allclose(Expected(focal, False)(logits, F.one_hot(y, 5).float()), focal(logits, y))
    soft = torch.rand(3, 5).softmax(1)
    assert torch.allclose(Expected(F.cross_entropy, False)(logits, soft), F.cross_entropy(logits, soft))


def test_the_replay_check_notices_a_client_that_minimises_the_cross_entropy(make_federation: MakeFederation) -> None:
    said, done = make_federation(loss=SQUARED), make_federation()
    params, buffers = done.initial()
    seen = Observation(1, 0, params, done.own_update(params, buffers, 0, 1), buffers)
    assert not replay(said, seen).ok
    assert replay(said, replace(seen, update=said.own_update(params, buffers, 0, 1))).ok


def test_the_limit_is_that_of_the_loss(make_federation: MakeFederation) -> None:
    """Where the loss is nearly flat an update tells less: the bound must be near that of no update at all."""
    limits = {}
    for scale in (1e-4, 1.0):
        fed = make_federation(loss=SQUARED, model={"use": "mlp", "hidden": [6]},
                              data={"auxiliary": 200})  # fmt: skip
        auditor = Auditor(FederationSource(fed))
        known = auditor.knowledge(planned("idlg"))
        known = replace(known, chain=chain(gaussian(1.0), local_sgd(0.1)),
                        loss=lambda logits, y, s=scale: 100 * s * mean_squared_error()(logits, y))  # fmt: skip
        limits[scale] = bayes_limit(known, fed.initial()[0], public_priors(fed.shards), generator("limit"))
    parts = [(own.share, own.prior.blocks(BLOCKS)) for own in public_priors(fed.shards)]
    nothing = sum(share * trace_bound(torch.zeros(len(b), dtype=torch.float64), b) for share, b in parts)
    assert limits[1.0] < 0.99 * limits[1e-4]
    assert 0.99 * nothing < limits[1e-4] <= nothing * (1 + 1e-6)


# ----------------------------------------------------------------------------------------------------------- next token


def test_next_token_is_a_mean_over_a_sentences_words_then_over_sentences() -> None:
    # on paper: uniform logits over 4 words cost log 4 a word, whatever the lengths; a certain right word costs nothing
    logits = torch.zeros(2, 4, 4)
    y = torch.tensor([[0, 1, 2, 3], [2, 3, -100, -100]])
    assert float(next_token()(logits, y)) == pytest.approx(math.log(4))
    logits[1, 0, 3] = 100.0  # of the second sentence its only predicted word
    assert float(next_token()(logits, y)) == pytest.approx(math.log(4) / 2)


def test_next_token_is_what_hugging_face_calls_the_loss_of_one_sentence() -> None:
    rng = torch.Generator().manual_seed(0)
    logits, y = torch.randn(1, 6, 9, generator=rng), torch.tensor([[3, 1, 4, 1, -100, -100]])
    theirs = F.cross_entropy(logits[:, :-1].flatten(0, 1), y[:, 1:].flatten(), ignore_index=-100)
    torch.testing.assert_close(next_token()(logits, y), theirs)


def test_a_step_of_the_trainer_of_transformers_is_replayed_by_the_mean_over_words() -> None:
    """The Trainer's loss is a mean over all words of a batch, also over sentences of different lengths."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    guide = (Path(__file__).parents[3] / "docs" / "bring-your-own.md").read_text()
    (shown,) = re.findall(r'^\[loss\]\nuse = "next_token"\n.*?(?=^```)', guide, re.DOTALL | re.MULTILINE)
    loss = tomllib.loads(shown)["loss"]
    data = {"use": "phrases", "task": "next_token", "batch_size": 4, "auxiliary": 50}
    tables = {"rounds": 1, "clients": 2, "data": data, "model": {"use": "tiny_gpt2"}, "loss": loss, "chain": [SGD]}
    fed = Federation(Protocol.from_tables(tables))
    batch, params = fed.shards.batch_at(0, 1), fed.initial()[0]
    assert len(set((batch.y != -100).sum(1).tolist())) > 1 and not is_mean(fed.loss, 5)
    leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
    logits = torch.func.functional_call(fed.model, leaves, (batch.x,))
    value = ForCausalLMLoss(logits, batch.y, logits.shape[-1])
    update = fed.own_update(params, {}, 0, 1)
    trained = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))
    theirs = {k: -SGD["rate"] * t for k, t in trained.items()}
    assert relative_error(update, theirs) < 1e-5
    other = Federation(Protocol.from_tables({**tables, "loss": {"use": "next_token"}}))
    assert relative_error(other.own_update(params, {}, 0, 1), theirs) > 0.01


def test_next_token_is_a_mean_takes_probabilities_and_ignores_padding() -> None:
    loss = named_loss({"use": "next_token"})
    assert predicts_tokens(loss) and is_mean(loss, 5) and takes_probabilities(loss, 5)
    rng = torch.Generator().manual_seed(0)
    logits, y = torch.randn(2, 5, 5, generator=rng), torch.tensor([[0, 1, 2, -100, -100], [4, 3, 2, 1, 0]])
    soft = F.one_hot(y.clamp(min=0), 5) * (y != -100).unsqueeze(-1)
    torch.testing.assert_close(loss(logits, soft.float()), loss(logits, y))
    changed = logits.clone()
    changed[0, 2:] = 7.0  # what would predict padding
    torch.testing.assert_close(loss(changed, y), loss(logits, y))


def test_hits_are_labels_or_words_that_are_predicted() -> None:
    assert per_example_accuracy(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([1, 1]), LabelKind()).tolist() == [
        1.0,
        0.0,
    ]
    logits = F.one_hot(torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0]]), 4).float()
    assert per_example_accuracy(logits, torch.tensor([[0, 1, 2, 3], [0, 3, -100, -100]]), LabelKind()).tolist() == [
        pytest.approx(2 / 3),
        1.0,
    ]


def test_a_loss_that_refuses_a_batch_of_one_is_no_mean_of_examples() -> None:
    def pairs(logits: Tensor, y: Tensor) -> Tensor:
        if len(logits) < 2:
            raise ValueError("needs two examples")
        return F.cross_entropy(logits, y)

    assert not is_mean(pairs, 5)


def test_one_output_is_compared_with_its_own_label() -> None:
    """Torch does not warn that this loss compares outputs (4, 1) with labels (4,), each with each."""
    labels = torch.tensor([0.5, 3.0, 1.0, 2.0])
    table, outputs = {"use": "torch.nn.functional:poisson_nll_loss"}, torch.arange(4.0)[:, None]
    with allowing(["torch"]):
        loss, _ = fitted_loss(named_loss(table), table, (outputs, labels, outputs), labels, 1)
    assert torch.equal(loss(outputs, labels), F.poisson_nll_loss(outputs[:, 0], labels))


def test_the_cross_entropy_of_inputs_takes_any_that_a_search_tries() -> None:
    outputs, x = torch.full((1, 3), 0.5), torch.tensor([[-3.0, 0.4, 2.0]])
    assert float(reconstruction("cross_entropy")(outputs, torch.zeros(1), x)) == pytest.approx(math.log(2))
