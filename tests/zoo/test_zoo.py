"""Networks as people bring them: each is attacked with right numbers, or declined with a sentence. Never anything else."""

import importlib.util
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import cycle, product

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedgauge.attacks.base import Attack, Budget, Knowledge, Observation, Stream, Wave
from fedgauge.attacks.engine.compatibility import differentiation_of
from fedgauge.attacks.generative.gi_gip import gi_gip
from fedgauge.attacks.matching import recipes
from fedgauge.attacks.matching.adaptive import leave_layer_out
from fedgauge.attacks.matching.feedback_blending import feedback_blending
from fedgauge.attacks.matching.several_rounds import several_rounds
from fedgauge.client.chain import chain
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch
from tests.zoo.measure import RATE, plain, plain_objective, posed
from tests.zoo.networks import CLASSES, Network, networks

PROBLEMS, EXAMPLES = 2, 2
ZOO = networks()
# whose kinds of layers are those of a small network of the same family; `python -m tests.zoo.measure` looks at them too
LIKE_SMALLER = (
    *("resnet18", "mobilenet_v3_small", "densenet121", "regnet_y_400mf", "efficientnet_b0"),
    *("mobilenet_v2", "inception_v3", "timm mobilenet v3", "mnasnet0_5", "timm tinynet", "timm resnet", "timm regnet"),
    "vgg with batch norm",
)
# libraries warn of their own use of torch, and torch of its kernels
IGNORED = ("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:LSTM with projections:UserWarning")
pytestmark = [pytest.mark.filterwarnings(words) for words in IGNORED]

ATTACKS: Mapping[str, Callable[[], Attack]] = {
    "inverting_gradients": recipes.inverting_gradients,
    "idlg": recipes.idlg,
    "dlg": recipes.dlg,
    "bayes": recipes.bayes,
    "grad_inversion": recipes.grad_inversion,
    "surrogate": recipes.surrogate,
    "federated_averaging": recipes.federated_averaging,
    "feedback_blending": partial(feedback_blending, attack={"use": "idlg", "double": False}),
    "gi_gip": partial(gi_gip, latent=4, width=4, training=2),
    "several_rounds": several_rounds,
    "leave_layer_out": leave_layer_out,
}
REASONS = {  # why some of them decline a network that others attack
    "dlg": ("cannot be copied",),
    "idlg": ("cannot be copied",),
    "leave_layer_out": ("no fully connected layer", "layers to try are more than"),
}


def cases() -> list[object]:
    """The zoo's networks as parameters of a test, the large ones only in the full suite."""
    marks = {name: () if network.quick else (pytest.mark.full,) for name, network in ZOO.items()}
    return [pytest.param(ZOO[name], id=name, marks=marks[name]) for name in ZOO if name not in LIKE_SMALLER]


def knowledge(network: Network, model: nn.Module, y: Tensor, steps: int = 1) -> Knowledge:
    channels = network.shape[0]
    rng = torch.Generator().manual_seed(3)
    pictures = Batch(torch.rand(8, *network.shape, generator=rng), torch.arange(8) % CLASSES)
    return Knowledge(
        model, chain(local_sgd(RATE, steps)), network.shape, CLASSES, EXAMPLES, (0.4,) * channels, (0.3,) * channels,
        labels=y, auxiliary=pictures,
    )  # fmt: skip


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("network", cases())
def test_objective_and_slopes_are_plain_autograds_or_there_is_a_sentence(network: Network) -> None:
    if importlib.util.find_spec(network.package) is None:
        pytest.skip(f"needs the package {network.package}")
    if network.declined:
        with pytest.raises(ValueError, match=re.escape(network.declined)):
            posed(network, PROBLEMS, normal=True)
        return
    problems, x = posed(network, PROBLEMS, normal=True)
    before = {k: b.clone() for k, b in problems.known.model.named_buffers()}
    value, slopes = problems.value_and_slopes({"x": x}, torch.arange(PROBLEMS))
    buffers = dict(problems.known.model.named_buffers())
    assert all(torch.equal(b, before[k]) for k, b in buffers.items()), "an attack must not move a model's buffers"
    # a network of its own for every pass, since some layers keep a state
    expected, by_x = plain(problems, [network.build() for _ in x], x, by_all=False)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)
    # slopes that vanish beside the objective are its rounding
    least = 1e-9 * float(by_x.abs().max()) + 1e-12 * float(value.max())
    torch.testing.assert_close(slopes["x"], by_x, rtol=1e-9, atol=least)
    if not problems.way.composed:
        return
    c, fresh = PROBLEMS - 1, network.build()  # the original has no second derivative to compare with

    def original(at: Tensor) -> float:
        return float(plain_objective(problems, c, deepcopy(fresh), at).detach())

    direction = torch.randn(x[c].shape, generator=torch.Generator().manual_seed(c))
    slope = float((slopes["x"][c] * direction).sum())
    # the quotients' rounding: the objective's, 1e-14 in deep networks, over the step
    gap = 1e-5 * float(slopes["x"][c].norm() * direction.norm()) + 1e-8 * float(value[c])
    steps = (1e-4, 1e-5, 1e-6, 1e-3)
    quotients = ((original(x[c] + s * direction) - original(x[c] - s * direction)) / (2 * s) for s in steps)
    assert any(abs(slope - quotient) <= gap for quotient in quotients)
    assert original(x[c]) == pytest.approx(float(value[c]), rel=1e-9)


def attacked(network: Network, name: str, steps: int = 1) -> None:
    """Two iterations of an attack end with images, or with a sentence that was expected."""
    if importlib.util.find_spec(network.package) is None:
        pytest.skip(f"needs the package {network.package}")
    model = network.build()
    lazy = any(is_lazy(p) for p in model.parameters())
    params = dict(model.named_parameters()) if lazy else detached_params(model)
    x, y = network.examples(PROBLEMS, EXAMPLES)
    known = knowledge(network, model, y, steps)
    update = {k: torch.zeros(1) for k in params} if network.declined else {}
    observations = [
        Observation(1, c, params, update or known.forward(params, Batch(x[c], y[c]), None)) for c in range(PROBLEMS)
    ]
    streams: list[Stream] = [partial(generator, "zoo", c) for c in range(PROBLEMS)]
    found = ATTACKS[name]().reconstruct(Wave.stack(observations), known, Budget(2), streams)
    for result in found:
        if result.status == "not_applicable":
            expected = (*REASONS.get(name, ()), *((network.declined,) if network.declined else ()))
            if steps > 1:
                expected = (*expected, "modified by an inplace operation")  # the second step meets a changed input
            assert any(words in result.reason for words in expected), result.reason
            assert len(result.reason) > 30
        else:
            assert not network.declined, "it should have been declined"
            assert result.status in ("converged", "out_of_budget"), result
            assert result.x is not None
            assert result.x.shape == (EXAMPLES, *network.shape) and bool(result.x.isfinite().all())


def pairs() -> list[object]:
    """Each quick network with one attack and a number of steps in turn, so that all of these meet networks of every kind."""
    ways = product((1, 2), ATTACKS)
    quick = (network for network in ZOO.values() if network.quick)
    return [
        pytest.param(attack, network, steps, id=f"{network.name}-{attack}-{steps}", marks=pytest.mark.full)
        for network, (steps, attack) in zip(quick, cycle(ways))
    ]


@pytest.mark.parametrize(("name", "network", "steps"), pairs())
def test_every_matching_attack_runs_or_gives_a_sentence(name: str, network: Network, steps: int) -> None:
    attacked(network, name, steps)


@pytest.mark.parametrize("name", ATTACKS)
def test_flowers_quickstart_is_attacked_by_all(name: str) -> None:
    attacked(ZOO["Flower's quickstart"], name, 2)


@pytest.mark.parametrize("steps", [1, 2])
def test_flowers_quickstart_takes_one_pass(steps: int) -> None:
    problems, _ = posed(ZOO["Flower's quickstart"], PROBLEMS)
    assert (
        differentiation_of(replace(problems.known, chain=chain(local_sgd(RATE, steps))), problems.params, True).route
        == "one pass"
    )
