"""Findings, numbers, one logit and no label: restored against the truth, scored next to a guess, refused where they do not fit."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.attacks.engine.compatibility import differentiation_of
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.label_restoration import restore
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.solved_labels import NotRestored
from fedgauge.attacks.source import FederationSource
from fedgauge.client.components import SpecError, allowing
from fedgauge.client.data.dataset import Dataset
from fedgauge.client.data.images import mnist5k
from fedgauge.client.federation import Federation
from fedgauge.client.label_kinds import Binary, Findings, LabelKind, NoLabel, Numbers
from fedgauge.client.protocol import Protocol
from fedgauge.client.update import Batch
from tests.client.data.refusals import refused

HERE = "tests.client.test_label_kinds"
OWN = ("binary_cross_entropy", "mean_squared_error", "mean_absolute_error", "cross_entropy")
SGD = {"use": "local_sgd", "rate": 0.1}


def findings(soft: bool = False, nan: bool = False, constant: bool = False) -> Dataset:
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(256, (200, 1, 8, 8), generator=rng, dtype=torch.uint8)
    y = torch.rand(200, 5, generator=rng)
    y = y if soft else (y < 0.4).float()
    y[0, 0] = torch.nan if nan else y[0, 0]
    y = torch.ones_like(y) if constant else y
    return Dataset("findings", x[50:], y[50:], x[:50], y[:50], 5, (0.5,), (0.3,))


def dense(shape: tuple[int, ...], outputs: int = 5, sigmoid: bool = False) -> nn.Module:
    size = torch.Size(shape).numel()
    layers = [nn.Flatten(), nn.Linear(size, 32), nn.ReLU(), nn.Linear(32, outputs)]
    return nn.Sequential(*layers, *[nn.Sigmoid()] * sigmoid)


def convolutions(shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 10, 9, 9), nn.Sigmoid(), nn.Conv2d(10, 10, 3), nn.Flatten())


def normed(shape: tuple[int, ...]) -> nn.Module:
    head = nn.utils.parametrizations.weight_norm(nn.Linear(32, 10))
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.Sigmoid(), head)


class Auto(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(784, 16), nn.Linear(16, 784)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.inner(x.flatten(1)).relu())
        return out.view(x.shape)


def bce_of_logits(z: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(z, y)


def bce_of_probabilities(p: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy(p.squeeze(-1), y.to(p.dtype))


def bce_of_columns(p: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy(p, y)  # floats (B, 1), as of a DataLoader that adds the axis


def squared(output: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(output.squeeze(-1), y)


def huber(output: Tensor, y: Tensor) -> Tensor:
    return F.huber_loss(output.squeeze(-1), y, delta=200.0)


def focal(logits: Tensor, y: Tensor) -> Tensor:
    p = logits.softmax(-1).gather(1, y[:, None])[:, 0]
    return (-((1 - p) ** 2) * p.log()).mean()


def weighted(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, weight=torch.linspace(0.3, 3, 10).to(logits))


def total(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="sum")


def sum_of_findings(z: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(z, y, reduction="sum")


def broadcast(output: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(output, y.double())


def saturated(output: Tensor, y: Tensor) -> Tensor:
    return F.huber_loss(output.squeeze(-1), y, delta=1.0)


def poisson(output: Tensor, y: Tensor) -> Tensor:
    return F.poisson_nll_loss(output.squeeze(-1), y)


def weighted_bce(output: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output.squeeze(-1), y.float(), pos_weight=torch.tensor(3.0))


def flags(as_floats: bool = True, first: int = 0) -> Dataset:
    """One finding in each example, (N,), that the first ones lack."""
    data = findings()
    y, y_test = data.y[:, 0].clone(), data.y_test[:, 0]
    y[:first] = 0
    kinds = (y, y_test) if as_floats else (y.long(), y_test.long())
    return replace(data, y=kinds[0], y_test=kinds[1], classes=1 if as_floats else 2)


def reconstruction(output: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.mse_loss(output, x)


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    with allowing([HERE]):
        yield


def built(data: dict[str, Any], model: dict[str, Any], loss: str, batch_size: int = 1, rate: float = 0.1) -> Federation:
    tables = {"seed": 0, "rounds": 1, "clients": 8, "data": {"auxiliary": 60, "batch_size": batch_size, **data}}
    use = loss if loss in OWN else f"{HERE}:{loss}"
    own = {**model, "use": f"{HERE}:{model['use']}"}
    return Federation(
        Protocol.from_tables({**tables, "model": own, "loss": {"use": use}, "chain": [{**SGD, "rate": rate}]})
    ).check()


def restored(fed: Federation) -> tuple[Tensor, Tensor]:
    """The restored labels and the true ones, client by client."""
    source = FederationSource(fed)
    known = Auditor(source).knowledge(PlannedAttack.from_table({"use": "analytic"}, "x"))
    clients = tuple(range(fed.protocol.clients))
    return restore(source.wave(clients), known), torch.stack([fed.shards.batch_at(c, 1).y for c in clients])


@pytest.fixture(scope="module")
def houses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    rows = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    price = rows @ torch.tensor([3.0, -1.0, 2.0, 0.5]) + 50
    lines = [",".join(f"{v:.4f}" for v in (*row, p)) for row, p in zip(rows.tolist(), price.tolist(), strict=True)]
    path = tmp_path_factory.mktemp("data") / "houses.csv"
    path.write_text("\n".join(["area,age,rooms,tax,price", *lines]))
    return {"use": "table", "path": str(path), "label": "price"}


@pytest.mark.parametrize(
    ("loss", "sigmoid"), [("binary_cross_entropy", False), ("bce_of_logits", False), ("bce_of_columns", True)]
)
def test_the_findings_of_one_example_are_restored_exactly(loss: str, sigmoid: bool) -> None:
    fed = built({"use": f"{HERE}:findings"}, {"use": "dense", "sigmoid": sigmoid}, loss)
    found, truth = restored(fed)
    assert isinstance(fed.label_kind, Findings) and found.equal(truth)


def test_soft_findings_are_restored_as_numbers() -> None:
    fed = built({"use": f"{HERE}:findings", "soft": True}, {"use": "dense"}, "binary_cross_entropy")
    found, truth = restored(fed)
    assert isinstance(fed.label_kind, Numbers) and torch.allclose(found, truth, atol=1e-3)


@pytest.mark.parametrize(
    ("loss", "sigmoid"),
    [("binary_cross_entropy", False), ("bce_of_probabilities", True), ("bce_of_columns", True)],
)
@pytest.mark.parametrize("batch_size", [1, 8])
def test_classes_under_one_output_are_restored_as_under_two(loss: str, sigmoid: bool, batch_size: int) -> None:
    fed = built({"use": "census"}, {"use": "dense", "outputs": 1, "sigmoid": sigmoid}, loss, batch_size)
    found, truth = restored(fed)
    right = float((found.sort(1).values == truth.sort(1).values).double().mean())
    assert right == 1 if batch_size == 1 else right >= 0.9
    assert found.dtype == torch.int64


@pytest.mark.parametrize("loss", ["squared", "huber", "mean_squared_error"])
def test_the_number_of_one_example_is_restored_from_the_residual(houses: dict[str, Any], loss: str) -> None:
    fed = built(houses, {"use": "dense", "outputs": 1}, loss, rate=1e-3)
    found, truth = restored(fed)
    kind = fed.label_kind
    assert isinstance(kind, Numbers) and float(((found - truth) / kind.spread).abs().max()) < 0.01
    guess = kind.guess(1)
    assert guess is not None and kind.scores(truth[:, 0], guess.expand(8))["label_error"] > 0.5


@pytest.mark.parametrize("loss", ["squared", "huber", "bce_of_logits"])
def test_batches_with_numbers_or_findings_are_read_exactly_with_a_proof(houses: dict[str, Any], loss: str) -> None:
    several = loss == "bce_of_logits"
    data = {"use": f"{HERE}:findings"} if several else houses
    fed = built(data, {"use": "dense", "outputs": 5 if several else 1}, loss, batch_size=3, rate=1e-3)
    source = FederationSource(fed)
    (result,) = Auditor(source).audit(
        PlannedAttack.from_table({"use": "spear", "iterations": 20}, "x"), source.wave((0,))
    )
    assert result.reconstruction.status == "converged" and result.reconstruction.y is not None
    (score,) = fed.label_kind.scores(source.truth(0, 1).y, result.reconstruction.y).values()
    assert score == 1 if several else score < 1e-3


def test_a_number_that_the_derivative_does_not_determine_is_not_claimed(houses: dict[str, Any]) -> None:
    with pytest.raises(NotRestored):
        restored(built(houses, {"use": "dense", "outputs": 1}, "saturated", rate=1e-3))


def test_labels_are_never_broadcast_against_outputs_of_another_shape(houses: dict[str, Any]) -> None:
    fed = built(houses, {"use": "dense", "outputs": 1}, "broadcast", rate=1e-3)
    outputs, y = torch.randn(5, 1), torch.randn(5)
    assert float(fed.loss(outputs, y)) == pytest.approx(float((outputs[:, 0] - y).square().mean()), rel=1e-5)


def test_an_autoencoder_has_no_label_and_its_input_is_read_exactly() -> None:
    fed = built({"use": "mnist5k"}, {"use": "Auto"}, "reconstruction")
    assert isinstance(fed.label_kind, NoLabel)
    source = FederationSource(fed)
    for result in Auditor(source).audit(PlannedAttack.from_table({"use": "analytic"}, "x"), source.wave((0, 1))):
        rows = {row.metric: row.value for row in result.rows}
        assert rows["psnr"] > 60 and "label_accuracy" not in rows


@pytest.mark.parametrize("loss", ["binary_cross_entropy", "bce_of_columns"])
def test_the_findings_of_fewer_examples_than_findings_are_restored(loss: str) -> None:
    model = {"use": "dense", "sigmoid": loss == "bce_of_columns"}
    fed = built({"use": f"{HERE}:findings"}, model, loss, batch_size=3)
    found, truth = restored(fed)
    scores = [fed.label_kind.scores(y, guess)["label_f1"] for y, guess in zip(truth, found, strict=True)]
    assert sum(scores) / 8 > 0.9


@pytest.mark.parametrize("head", ["convolutions", "normed"])
def test_labels_are_optimised_where_no_fully_connected_layer_gives_the_logits(head: str) -> None:
    fed = built({"use": "mnist5k"}, {"use": head}, "cross_entropy")
    with pytest.raises(NotRestored):
        restored(fed)
    source, table = FederationSource(fed), {"use": "inverting_gradients", "iterations": 2}
    (result,) = Auditor(source).audit(PlannedAttack.from_table(table, "x"), source.wave((0,)))
    assert result.reconstruction.status == "converged"


def test_findings_of_several_examples_are_not_claimed_under_a_sum() -> None:
    with pytest.raises(NotRestored):
        restored(built({"use": f"{HERE}:findings"}, {"use": "dense"}, "sum_of_findings", batch_size=3))


@pytest.mark.parametrize(
    ("loss", "sigmoid"), [("focal", False), ("weighted", False), ("total", False), ("cross_entropy", True)]
)
def test_classes_of_several_examples_are_restored_under_other_losses(loss: str, sigmoid: bool) -> None:
    model = {"use": "dense", "outputs": 10, "sigmoid": sigmoid}
    found, truth = restored(built({"use": "mnist5k"}, model, loss, batch_size=8))
    rights = [LabelKind().scores(y, guess)["label_accuracy"] for y, guess in zip(truth, found, strict=True)]
    assert sum(rights) / 8 > 0.9


def test_findings_of_as_many_examples_are_optimised_and_scored_next_to_a_guess() -> None:
    fed = built({"use": f"{HERE}:findings"}, {"use": "dense"}, "binary_cross_entropy", batch_size=5)
    with pytest.raises(NotRestored):
        restored(fed)
    source = FederationSource(fed)
    scores = []
    for table in ({"use": "inverting_gradients", "iterations": 200}, {"use": "mean_image"}):
        results = Auditor(source).audit(PlannedAttack.from_table(table, "x"), source.wave((0, 1)))
        assert {r.reconstruction.status for r in results} == {"converged"}
        scores.append(sum(r.value for result in results for r in result.rows if r.metric == "label_f1" and r.value) / 2)
    assert scores[0] > scores[1]


def test_given_findings_are_sorted_so_that_their_order_tells_nothing() -> None:
    fed = built({"use": f"{HERE}:findings"}, {"use": "dense"}, "binary_cross_entropy", batch_size=4)
    source, planned = (
        FederationSource(fed),
        PlannedAttack.from_table({"use": "inverting_gradients", "iterations": 1, "labels": "given"}, "x"),
    )
    (result,) = Auditor(source).audit(planned, source.wave())
    given, truth = result.reconstruction.y, source.truth(0, 1).y
    assert given is not None and sorted(given.tolist()) == sorted(truth.tolist())
    assert [r.value for r in result.rows if r.metric == "label_f1"] == [1.0]


def test_scores_of_labels_do_not_depend_on_their_order() -> None:
    y = torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 1]])
    assert Findings(y).scores(y, y.flip(0)) == {"label_f1": 1.0}
    assert Findings(y).scores(y, torch.ones_like(y))["label_f1"] == pytest.approx(2 * 4 / (4 + 9))
    assert Findings(y).scores(0 * y, 0 * y) == {"label_f1": 1.0}
    prices = Numbers(torch.tensor([1.0, 3.0]))
    assert prices.scores(torch.tensor([1.0, 3.0]), torch.tensor([3.0, 1.0])) == {"label_error": 0.0}
    assert prices.scores(torch.tensor([0.0]), prices.spread[None])["label_error"] == pytest.approx(1)
    assert LabelKind().scores(torch.tensor([1, 1, 2]), torch.tensor([2, 1, 0]))["label_accuracy"] == pytest.approx(
        2 / 3
    )


@pytest.mark.parametrize("loss", ["saturated", "mean_absolute_error"])
def test_a_loss_that_does_not_change_when_labels_are_shuffled_reads_them(houses: dict[str, Any], loss: str) -> None:
    fed = built(houses, {"use": "dense", "outputs": 1}, loss, rate=1e-3)
    assert isinstance(fed.label_kind, Numbers)


def test_a_loss_reads_labels_of_which_the_first_are_equal() -> None:
    fed = built(
        {"use": f"{HERE}:flags", "as_floats": False, "first": 140}, {"use": "dense", "outputs": 1}, "weighted_bce"
    )
    public = fed.shards.auxiliary_batch().y[:6]
    assert not public.any() and isinstance(fed.label_kind, Binary)


def test_two_classes_as_floats_are_numbers_without_an_r2_of_logits() -> None:
    fed = built({"use": f"{HERE}:flags"}, {"use": "dense", "outputs": 1}, "weighted_bce")
    found, truth = restored(fed)
    assert torch.allclose(found, truth, atol=1e-3) and math.isnan(fed.evaluate(fed.initial()[0])[0])
    fed = built({"use": f"{HERE}:flags"}, {"use": "dense", "outputs": 1, "sigmoid": True}, "bce_of_probabilities", 5)
    planned = PlannedAttack.from_table({"use": "inverting_gradients", "iterations": 2}, "x")
    (result, *_) = Auditor(source := FederationSource(fed)).audit(planned, source.wave())
    assert result.reconstruction.status == "converged"


@pytest.mark.parametrize(
    ("loss", "sigmoid", "turn"),
    [("bce_of_logits", False, 0.0), ("bce_of_columns", True, 0.5), ("mean_squared_error", False, 0.5)],
)
def test_a_prediction_turns_where_its_loss_says(loss: str, sigmoid: bool, turn: float) -> None:
    fed = built({"use": f"{HERE}:findings"}, {"use": "dense", "sigmoid": sigmoid}, loss)
    outputs = torch.tensor([[0.1, 0.9, -0.5, 0.2, 0.3]])
    assert float(fed.label_kind.right(outputs, (outputs > turn).float())) == 1


def test_outputs_on_another_scale_than_the_numbers_have_no_r2(houses: dict[str, Any]) -> None:
    for loss, known in (("poisson", False), ("huber", True)):
        fed = built(houses, {"use": "dense", "outputs": 1}, loss, rate=1e-3)
        assert (fed.evaluate(fed.initial()[0])[0] >= 0) is known


def test_a_loss_with_weights_in_float32_has_a_second_derivative() -> None:
    fed = built({"use": f"{HERE}:flags"}, {"use": "dense", "outputs": 1}, "weighted_bce")
    known = Auditor(FederationSource(fed)).knowledge(PlannedAttack.from_table({"use": "analytic"}, "x"))
    assert not differentiation_of(known, fed.initial()[0], one_pass=True).note


@pytest.mark.parametrize(
    ("data", "model", "loss", "word"),
    [
        ({"use": f"{HERE}:findings"}, {"use": "dense"}, "cross_entropy", "binary_cross_entropy"),
        ({"use": "price"}, {"use": "dense", "outputs": 1}, "cross_entropy", "mean_squared_error"),
        ({"use": "price"}, {"use": "dense", "outputs": 1}, "binary_cross_entropy", "mean_squared_error"),
        ({"use": "mnist5k"}, {"use": "dense", "outputs": 1}, "binary_cross_entropy", "10 classes.*number"),
        ({"use": f"{HERE}:findings", "nan": True}, {"use": "dense"}, "binary_cross_entropy", "NaN"),
        ({"use": f"{HERE}:findings", "constant": True}, {"use": "dense"}, "binary_cross_entropy", "one value"),
        ({"use": f"{HERE}:findings", "partition": "dirichlet"}, {"use": "dense"}, "binary_cross_entropy", "iid"),
    ],
)
def test_labels_of_one_kind_under_a_loss_of_another_are_refused_before_training(
    houses: dict[str, Any], data: dict[str, Any], model: dict[str, Any], loss: str, word: str
) -> None:
    with pytest.raises(SpecError, match=word):
        built(houses if data == {"use": "price"} else data, model, loss)


def test_the_loss_sees_the_inputs_that_the_network_gets() -> None:
    fed = built({"use": "mnist5k"}, {"use": "Auto"}, "reconstruction", batch_size=2)
    batch, params = fed.shards.batch_at(0, 1), fed.initial()[0]
    found = fed.gradient(params, Batch(batch.x, batch.y), None)
    leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
    x = mnist5k().normalise(batch.x)
    value = F.mse_loss(torch.func.functional_call(fed.model, leaves, (x,)), x)
    for name, slope in zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True):
        assert torch.allclose(found[name], slope, atol=1e-6)


def test_a_search_descends_through_a_loss_of_inputs_alike_on_every_route() -> None:
    fed = built({"use": "mnist5k"}, {"use": "Auto"}, "reconstruction")
    source, objectives = FederationSource(fed), []
    known = Auditor(source).knowledge(PlannedAttack.from_table({"use": "analytic"}, "x"))
    attack = PlannedAttack.from_table({"use": "inverting_gradients", "iterations": 20}, "x")
    streams = [lambda *_: torch.Generator().manual_seed(1)]
    for plain in (False, True):
        (result,) = attack.build().reconstruct(source.wave(), replace(known, plain=plain), attack.budget, streams)
        objectives.append(result.objective)
    assert objectives[0] == pytest.approx(objectives[1], rel=0.05)


def test_housing_prices_may_be_named_as_numbers(tmp_path: Path) -> None:
    path = tmp_path / "few.csv"
    path.write_text("a,rating\n" + "\n".join(f"{i * 0.37 % 1:.2f},{i % 5}" for i in range(100)))
    table = {"use": "table", "path": str(path), "label": "rating"}
    assert built({**table, "target": "number"}, {"use": "dense", "outputs": 1}, "squared").shards.dataset.classes == 1
    path.write_text(path.read_text() + "\n0.5,abc")
    refused("few.csv: column 'rating'", **table, target="number")
