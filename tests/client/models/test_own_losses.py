"""Losses as users write them: any form of outputs and labels is taken and its labels restored, or named before training."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.label_restoration import restore
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.source import FederationSource
from fedgauge.client.components import SpecError, allowing
from fedgauge.client.data.dataset import Dataset
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol

HERE = "tests.client.models.test_own_losses"
LAST = {"softmax": nn.Softmax(1), "log": nn.LogSoftmax(1), "sigmoid": nn.Sigmoid(), "squeezed": nn.Flatten(0)}


def data(labels: str = "classes") -> Dataset:
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(256, (200, 1, 8, 8), generator=rng, dtype=torch.uint8)
    classes = torch.randint(4, (200,), generator=rng)
    y = {
        "classes": classes,
        "one-hot": F.one_hot(classes, 4).float(),
        "soft": torch.rand(200, 4, generator=rng).softmax(1),
        "findings": (torch.rand(200, 4, generator=rng) < 0.4).float(),
        "two": (classes > 1).long(),
        "number": 3.7 * classes + torch.rand(200, generator=rng),
        "int32": classes.int(),
    }[labels]
    count = {"two": 2, "number": 1}.get(labels, 4)
    return Dataset("x", x[50:], y[50:], x[:50], y[:50], count, (0.5,), (0.3,))


def dense(shape: tuple[int, ...], outputs: int = 4, last: str = "") -> nn.Module:
    layers = [nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, outputs)]
    return nn.Sequential(*layers, *([LAST[last]] if last else []))


class Two(nn.Module):
    """Two heads."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x.flatten(1)), self.second(x.flatten(1))


smoothed = partial(F.cross_entropy, label_smoothing=0.1)
weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3, 4]))
plain = lambda logits, y: F.cross_entropy(logits, y)  # noqa: E731
with_logits = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2, 3, 4]))


class FocalLoss(nn.Module):
    def __init__(self, gamma: float = 2.0) -> None:
        super().__init__()
        self.gamma = gamma

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        entropy = F.cross_entropy(inputs, targets, reduction="none")
        return ((1 - (-entropy).exp()) ** self.gamma * entropy).mean()


def summed(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="sum")


def probable(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, F.one_hot(y, 4).float())


def of_logs(output: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(output, y)


def of_shares(output: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(output.log(), y)


def of_chances(output: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy(output, F.one_hot(y, 4).float())


def divergence(logits: Tensor, y: Tensor) -> Tensor:
    return F.kl_div(logits.log_softmax(1), y, reduction="batchmean")


def column(logits: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, y.unsqueeze(1).float())


def column_of_logits(logits: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits.squeeze(-1), y)


def squared(output: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(output, y)


def both(output: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return F.cross_entropy(output[0], y) + output[1].square().mean()


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    with allowing([HERE]):
        yield


def federation(labels: str, loss: dict[str, Any], batch_size: int = 1, **model: Any) -> Federation:
    own = loss if loss["use"] in ("cross_entropy", "focal", "huber") else {**loss, "use": f"{HERE}:{loss['use']}"}
    tables = {
        "rounds": 1,
        "clients": 2,
        "data": {"use": f"{HERE}:data", "labels": labels, "auxiliary": 40, "batch_size": batch_size},
        "model": {"use": f"{HERE}:dense", **model},
        "loss": own,
        "chain": [{"use": "local_sgd", "rate": 0.1}],
    }
    return Federation(Protocol.from_tables(tables)).check()


@pytest.mark.parametrize(
    ("labels", "loss", "model"),
    [
        *(
            ("classes", name, {})
            for name in ("smoothed", "weighted", "plain", "FocalLoss", "summed", "probable", "focal")
        ),
        ("classes", "of_logs", {"last": "log"}),
        ("classes", "of_shares", {"last": "softmax"}),
        ("classes", "of_chances", {"last": "sigmoid"}),
        ("one-hot", "cross_entropy", {}),
        ("soft", "cross_entropy", {}),
        ("soft", "divergence", {}),
        ("findings", "with_logits", {}),
        ("two", "column", {"outputs": 1}),
        ("number", "squared", {"outputs": 1, "last": "squeezed"}),
    ],
)
def test_a_users_loss_is_taken_and_the_label_of_one_example_restored(
    labels: str, loss: str, model: dict[str, Any]
) -> None:
    fed = federation(labels, {"use": loss}, **model)
    source, clients = FederationSource(fed), (0, 1)
    planned = PlannedAttack.from_table({"use": "inverting_gradients", "iterations": 2}, "x")
    results = Auditor(source).audit(planned, source.wave(clients))
    assert [r.reconstruction.status for r in results] == ["converged"] * 2
    truth = torch.stack([source.truth(c, 1).y for c in clients])
    found = restore(source.wave(clients), Auditor(source).knowledge(planned))
    assert torch.allclose(found.float(), truth.float(), atol=1e-3)
    assert 0 <= fed.evaluate(fed.initial()[0], 20)[0] <= 1


@pytest.mark.parametrize(
    ("labels", "loss", "model", "word"),
    [
        ("classes", {"use": "both"}, {"use": f"{HERE}:Two"}, "tuple"),
        ("number", {"use": "column_of_logits"}, {"outputs": 1}, "labels from 0 to 1"),
        ("int32", {"use": "plain"}, {}, "torch.int32"),
        ("classes", {"use": "weighted", "gamma": 1.0}, {}, "built already"),
        ("classes", {"use": "cross_entropy", "weight": [1, 2, 3]}, {}, "4 classes"),
        ("classes", {"use": "cross_entropy", "weight": [1, 2, 3, -1]}, {}, "weight must"),
        ("classes", {"use": "focal", "gamma": -1}, {}, "gamma"),
    ],
)
def test_untrainable_scenarios_are_named_before_training(
    labels: str, loss: dict[str, Any], model: dict[str, Any], word: str
) -> None:
    with pytest.raises(SpecError, match=word):
        federation(labels, loss, **model)
