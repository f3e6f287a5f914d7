"""What is wrong with a scenario, its data, model and loss.

Everything is built twice and compared. Then one client trains one step in memory and its update is recomputed: the replay
check of a run.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedgauge.attacks.base import Observation
from fedgauge.attacks.engine.gradients.per_problem import examples_are_independent
from fedgauge.attacks.grading.replay import replay
from fedgauge.client.data.images import Dataset, batch_of
from fedgauge.client.federation import Federation
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.losses import is_cross_entropy, is_mean, takes_probabilities
from fedgauge.client.rng import generator
from fedgauge.client.training import StochasticLayer, gradient, without_running_stats
from fedgauge.client.update import Batch
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.checks.check_result import CheckFailed, CheckResult, attempt

TRIED = 4  # examples on which a network is tried
STEP = 1e-6  # of the finite difference, in pixels in [0, 1] and float64
RELATIVE = 0.05  # tolerance: a kink between the two points may add to rounding
ROUNDING = 1e-5  # tolerance, of the largest: some parameters' gradients are zero except for rounding
BETWEEN_BUILDS = "draw with torch's generator, which the seed sets, or read it from a file"


def check(scenario: Scenario) -> list[CheckResult]:
    """Check a scenario that could be built; the last checks are left out where an earlier one failed."""
    fed = scenario.federation
    results = [*_check_data(fed), *_check_model(fed), *_check_loss(fed)]
    if all(r.works or not r.needed for r in results):
        results += [_tried("second derivative", fed, _second_derivative), _tried("one client's step", fed, _one_step)]
    return results


def _tried(name: str, fed: Federation, check: Callable[[Federation], str]) -> CheckResult:
    return attempt(name, partial(check, fed))


def _check_data(fed: Federation) -> Iterator[CheckResult]:
    data = fed.shards.dataset
    yield CheckResult("data", True, True, describe_data(data))
    sizes = [len(own) for own in fed.shards.indices]
    message = f"{min(sizes):,} to {max(sizes):,} examples per client, {fed.shards.batch_size} of them per round"
    yield CheckResult("shards", True, True, message)
    if data.y.dim() == 1 and (absent := sorted(set(range(data.classes)) - set(data.y.unique().tolist()))):
        message = (
            f"no training image of {len(absent)} classes, the first of them {absent[0]}: are the labels 0, 1, 2 ...?"
        )
        yield CheckResult("classes", False, False, message)
    x = data.normalise(batch_of(data.x, data.y, torch.arange(min(1000, len(data.y)))).x).float()
    centre, width = x.mean().item(), x.std().item()
    if data.mean and (abs(centre) > 0.5 or not 0.5 < width < 2):
        message = f"normalised images have mean {centre:.2g} and deviation {width:.2g}, expected about 0 and 1: see mean and std"
        yield CheckResult("normalisation", False, False, message)
    yield _tried("data, built again", fed, _same_data)


def describe_data(data: Dataset) -> str:
    """How many examples of what shape and how many classes."""
    shape = " x ".join(map(str, data.shape))
    what = f"images of {shape}" if data.mean else f"sentences of {shape} tokens"
    of = "classes" if data.y.dim() == 1 else "words"
    return f"{len(data.y):,} + {len(data.y_test):,} {what}, {data.classes:,} {of}"


def _same_data(fed: Federation) -> str:
    first, again = fed.shards.dataset, Federation(fed.protocol).shards.dataset
    for name in ("x", "y", "x_test", "y_test"):
        if not torch.equal(getattr(first, name), getattr(again, name)):
            raise CheckFailed(
                f"two builds differ in {name}, so clients and auditor would see other examples: sort lists of files, "
                f"and {BETWEEN_BUILDS}"
            )
    return "the same bits"


def _check_model(fed: Federation) -> Iterator[CheckResult]:
    count = sum(p.numel() for p in fed.model.parameters())
    built = _tried("model", fed, _logits)
    yield CheckResult(
        built.name, built.works, built.needed, f"{built.message}{f', {count:,} parameters' if built.works else ''}"
    )
    yield _tried("model, built again", fed, _same_model)
    if built.works:
        yield _tried("model, run again", fed, _deterministic)
    for name, module in fed.model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            message = f"layer {name!r} is dropout, " + (
                'and no attack knows its draws: set [model] mode = "eval", or leave it out'
                if module.training
                else "which eval mode turns off: clients train without it"
            )
            yield CheckResult("dropout", False, module.training, message)
    if built.works and not _independent(fed):
        drawn = any(isinstance(m, StochasticLayer) for m in fed.model.modules())
        message = "a layer draws" if drawn else "the model mixes the examples of a batch"
        yield CheckResult("engine", False, False, f"{message}, so matching uses vmap and is several times slower")


def _independent(fed: Federation) -> bool:
    x = _inputs(fed, 2 * TRIED)
    if len(x) < 2 * TRIED:
        return True
    with without_running_stats(fed.model):
        return examples_are_independent(fed.model, fed.initial()[0], x.view(2, TRIED, *x.shape[1:]))


def _inputs(fed: Federation, count: int = TRIED) -> Tensor:
    """Some training examples, normalised as the model's input."""
    data = fed.shards.dataset
    return data.normalise(batch_of(data.x, data.y, torch.arange(min(count, len(data.y)))).x)


def _pass(fed: Federation) -> Tensor:
    with torch.no_grad(), without_running_stats(fed.model):  # a check must not change BatchNorm's statistics
        logits: Tensor = functional_call(fed.model, fed.initial()[0], (_inputs(fed),))
    return logits


def _logits(fed: Federation) -> str:
    data, logits = fed.shards.dataset, _pass(fed)
    expected = (min(TRIED, len(data.x)), *data.y.shape[1:], data.classes)
    if not isinstance(logits, Tensor) or logits.shape != expected:
        form = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise CheckFailed(
            f"it gives {form} for {TRIED} {'images' if data.mean else 'sentences'}, expected logits {expected}: let its "
            "factory take `shape` and `classes`, which it is offered"
        )
    if not logits.isfinite().all():
        raise CheckFailed("its logits are not finite: check its initial weights, and mean and std of the data")
    if whole := [name for name, p in fed.model.named_parameters() if not p.is_floating_point()]:
        raise CheckFailed(f"parameter {whole[0]!r} is not a floating-point number")
    return f"{type(fed.model).__name__}, logits for {data.classes} classes"


def _same_model(fed: Federation) -> str:
    first, again = fed.model.state_dict(), Federation(fed.protocol).model.state_dict()
    if first.keys() != again.keys():
        raise CheckFailed("two builds have parameters of different names: build the same network each time")
    for name, tensor in first.items():
        if not torch.equal(tensor, again[name]):
            raise CheckFailed(
                f"two builds differ in {name!r}, so equal seeds would not give equal runs: {BETWEEN_BUILDS}"
            )
    return "the same weights"


def _deterministic(fed: Federation) -> str:
    if any(isinstance(m, StochasticLayer) for m in fed.model.modules()):
        return "it draws by design, and attacks know this"
    if not torch.equal(_pass(fed), _pass(fed)):
        raise CheckFailed(
            "two passes over the same images differ: something draws in its forward pass (functional dropout?), which the "
            "replay check cannot repeat and no attack knows; make it depend on self.training, or leave it out"
        )
    return "the same logits"


def _check_loss(fed: Federation) -> Iterator[CheckResult]:
    if is_cross_entropy(fed.loss):
        yield CheckResult("loss", True, True, "cross-entropy")
        return
    classes = fed.shards.dataset.classes
    yield CheckResult("loss", True, True, f"{fed.protocol.loss['use']}; labels cannot be read off its gradient")
    if not is_mean(fed.loss, classes):
        message = "a batch's loss is not the mean of its examples' (is it a sum, or weighted?), so matching uses vmap and is slower"
        yield CheckResult("loss of a batch", False, False, message)
    if not takes_probabilities(fed.loss, classes):
        message = "it takes whole labels only: no attack optimises labels (dlg), no link may blend them (mixup)"
        yield CheckResult("loss of probabilities", False, False, message)


def _second_derivative(fed: Federation) -> str:
    """Compare the second derivative, which every matching attack needs, with a finite difference.

    It is the derivative of a client's gradient with respect to the image.
    """
    model, loss = copy.deepcopy(fed.model).double(), fed.loss
    if isinstance(loss, nn.Module):
        loss = copy.deepcopy(loss).double()
    params, data = {k: p.double() for k, p in fed.initial()[0].items()}, fed.shards.dataset
    compute, y = gradient(model, loss, normalise=data.normalise), data.y[:1]
    rng = generator("doctor", "projection")
    weights = {k: torch.randn(p.shape, generator=rng, dtype=p.dtype) for k, p in params.items()}

    def projected(x: Tensor) -> Tensor:
        """One number from each parameter's gradient, (parameters,)."""
        update = compute(params, Batch(x, y), None)
        return torch.stack([(t * weights[k]).sum() for k, t in update.items()])

    first = batch_of(data.x, data.y, torch.arange(1)).x
    x = (model.embed(first).detach() if isinstance(model, LanguageModel) else first.double()).requires_grad_()
    total = projected(x)
    if not total.requires_grad:
        raise CheckFailed("the gradient does not depend on the image: is something detached in the model?")
    slopes = torch.stack([torch.autograd.grad(part, x, retain_graph=True)[0] for part in total])
    if not slopes.isfinite().all():
        raise CheckFailed("it is not finite: a square root, norm or division at zero in the model or loss?")
    step = STEP * torch.randn(x.shape, generator=rng, dtype=x.dtype)
    change, expected = (projected(x + step) - projected(x - step)).detach() / 2, (slopes * step).flatten(1).sum(1)
    tolerance = RELATIVE * torch.maximum(change.abs(), expected.abs()) + ROUNDING * expected.abs().max()
    if off := [name for name, far in zip(params, (change - expected).abs() > tolerance, strict=True) if far]:
        raise CheckFailed(
            f"it differs from the change of the gradient of {off[0]!r}: does the model use an autograd Function that has only "
            "a first derivative?"
        )
    idle = [name for name, t in compute(params, Batch(x.detach(), y), None).items() if not t.any()]
    return "equal to the finite difference" + (f"; no gradient reaches {', '.join(idle[:3])}" if idle else "")


def _one_step(fed: Federation) -> str:
    """Let one client compute an update with the real client app and validator, and run the replay check on it."""
    result = replay(Federation(fed.protocol), _observed(fed))
    message = f"replay check: cosine {result.cosine:.7f}, relative error {result.relative_error:.1e}: {result.verdict}"
    if not result.ok:
        raise CheckFailed(message)
    return message


def _observed(fed: Federation) -> Observation:
    """What the server sees of the first client that answers in the first round."""
    from flwr.app import ArrayRecord, ConfigRecord
    from flwr.serverapp.strategy import FedAvg

    from fedgauge.server.strategy.validator import RoundReplies, UpdateValidator
    from fedgauge.simulations.run.in_memory import MemoryGrid, flower

    received: list[RoundReplies] = []
    params, buffers = fed.initial()
    protocol = fed.protocol
    grid = MemoryGrid(protocol)
    with flower():
        inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
        validator = UpdateValidator(inner, received.append, buffers, protocol.seed, grid.clients, protocol=protocol)
        group = _first_group(fed)
        sent = validator.configure_train(1, ArrayRecord(params), ConfigRecord(), grid)
        chosen = [m for m in sent if grid.clients[m.metadata.dst_node_id] in group]
        validator.aggregate_train(1, grid.send_and_receive(chosen))
    (replies,) = received
    if not replies.accepted:
        reasons: Mapping[int, str] = {s.client: s.reason for s in replies.refused if s.client in group}
        raise CheckFailed(f"client {group[0]} gave no update: {reasons.get(group[0], 'no reply')}")
    one = replies.accepted[0]
    return Observation(1, one.client, replies.params, one.update, replies.buffers)


def _first_group(fed: Federation) -> tuple[int, ...]:
    """The first group of clients of round 1 that is not prevented by stragglers; without a secure sum a group is one client."""
    groups = fed.protocol.groups(1)
    least = fed.protocol.secure_sum.least if fed.protocol.secure_sum else 1
    return next((g for g in groups if sum(not fed.protocol.misses(c, 1) for c in g) >= least), groups[0])
