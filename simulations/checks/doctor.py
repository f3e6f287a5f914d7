"""The doctor: what this machine has (versions, hardware, data, weights), or what is wrong with a scenario or an owner's file.

A scenario is examined by building everything twice, looking at the parts, and letting one client train one step in memory,
whose update is then recomputed: the replay check of a run.
"""

import copy
import math
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedgauge.attacks.base import Observation
from fedgauge.attacks.engine.gradients.per_problem import examples_are_independent
from fedgauge.attacks.grading.image_metrics import BACKBONES, lpips_weights
from fedgauge.attacks.grading.replay import replay
from fedgauge.attacks.plan import describe
from fedgauge.client.components import SpecError, build
from fedgauge.client.data import images
from fedgauge.client.data.corpora import Text
from fedgauge.client.data.images import Dataset, batch_of
from fedgauge.client.deployment.deployed_client import DeployedClient
from fedgauge.client.deployment.owner import OwnerConfig
from fedgauge.client.deployment.state_folder import ClientFolder
from fedgauge.client.deployment.terms import RequestRefused, ServerTerms
from fedgauge.client.federation import DATASET, Federation
from fedgauge.client.local_data import cache_folder, data_folder
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.losses import is_cross_entropy, is_mean, takes_probabilities
from fedgauge.client.rng import generator
from fedgauge.client.training import StochasticLayer, gradient, without_running_stats
from fedgauge.client.update import Batch
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.run.environment import PACKAGES, package


@dataclass(frozen=True)
class CheckResult:
    """One thing looked at: whether it works (None: not checked), whether fedgauge needs it, and a sentence."""

    name: str
    works: bool | None
    needed: bool
    words: str


def examine() -> list[CheckResult]:
    """Try everything that fedgauge stands on; starting Ray takes some seconds."""
    findings = [_python()]
    for name in PACKAGES:
        version = package(name)
        needed = name not in ("transformers", "rouge-score", "fedgauge")
        findings.append(CheckResult(name, version is not None, needed, version or f"not installed: pip install {name}"))
    findings += [_attempt("torchvision import", _torchvision, True), _attempt("Ray", _ray, False)]
    beside = shutil.which(
        "flower-superlink", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    )
    findings.append(
        CheckResult("Flower's programs", beside is not None, True, beside or "flower-superlink is not on the path")
    )
    folder = data_folder()
    words = str(folder) if folder else "none (set FEDGAUGE_DATA to a folder); public data is downloaded on first use"
    findings.append(CheckResult("local data", folder is not None, False, words))
    findings += [_dataset(e.name, folder is not None) for e in DATASET.entries() if e.module == images.__name__]
    for net, backbone in BACKBONES.items():
        weights = lpips_weights(net)
        where = f"missing: weights/{backbone.local} in the local data folder, or FEDGAUGE_LPIPS=download"
        findings.append(CheckResult(f"LPIPS weights, {net}", weights is not None, False, str(weights or where)))
    findings.append(CheckResult("cache", True, False, str(cache_folder())))
    return findings


def _python() -> CheckResult:
    return CheckResult("Python", sys.version_info >= (3, 11), True, platform.python_version())


def _attempt(name: str, attempt: Callable[[], str], needed: bool) -> CheckResult:
    try:
        return CheckResult(name, True, needed, attempt())
    except Exception as error:  # whatever breaks it is what the user asked to see
        return CheckResult(name, False, needed, f"{type(error).__name__}: {error}")


def _torchvision() -> str:
    import torchvision

    mended = torch.version.cuda is None
    return f"{torchvision.__version__} beside torch {torch.__version__}" + (
        ", operators declared by fedgauge" if mended else ""
    )


def _ray() -> str:
    from fedgauge.server.pool.ray_executor import RayExecutor

    executor = RayExecutor(workers=1)
    try:
        return f"a worker started (process {executor.pids()[0]})"
    finally:
        executor.close()


def _dataset(short: str, local: bool) -> CheckResult:
    embedded = short in EMBEDDED
    if not embedded and not local:
        return CheckResult(short, None, False, "downloaded on first use")
    try:
        dataset = build({"use": short}, f"dataset {short}", DATASET) if embedded or _has_local(short) else None
    except SpecError as error:
        return CheckResult(short, False, short == "mnist5k", str(error))  # text is an extra
    if dataset is None:
        return CheckResult(short, None, False, "not in the local data folder; downloaded on first use")
    return CheckResult(short, True, short == "mnist5k", f"{len(dataset.y):,} + {len(dataset.y_test):,} examples")


def _has_local(short: str) -> bool:
    folder = data_folder()
    places = [] if folder is None else [folder / short, folder / "text" / short]
    return folder is not None and (any(p.is_dir() for p in places) or any(folder.glob(f"{short}-train-*.npz")))


# --------------------------------------------------------------------------------------------------------- of a scenario

TRIED = 4  # examples with which a network is tried
STEP = 1e-6  # of pixels in [0, 1], in float64
OFF = 0.05  # relative: a kink between the two points may add to rounding
ROUNDING = 1e-5  # of the largest: some parameters' gradients are zero but for it
BETWEEN_BUILDS = "draw with torch's generator, which the seed sets, or read it from a file"


def check(scenario: Scenario) -> list[CheckResult]:
    """Examine a scenario that could be built; what fails is a finding, and what follows from it is not looked at."""
    fed = scenario.federation
    findings = [*_data_findings(fed), *_model_findings(fed), *_loss_findings(fed)]
    if all(f.works or not f.needed for f in findings):
        findings += [_looked_at("second derivative", fed, _twice), _looked_at("one client's step", fed, _one_step)]
    return findings


def check_owner(owner: OwnerConfig) -> list[CheckResult]:
    """Examine a client's file before it meets a server, by what the last one said, or a small network in its place."""
    protocol = ClientFolder(owner.state).protocol()
    findings = [_tried("data", lambda: _data_words(owner.dataset))]
    if not findings[0].works:
        return findings
    if protocol is None:
        words = "no protocol has come yet: a small network stands in for the server's model, this client is taken for the last"
        findings.append(CheckResult("server", None, False, words))
    owned: list[DeployedClient] = []

    def build_all() -> str:
        terms = _stand_in(owner) if protocol is None else ServerTerms.parse(protocol)
        owned.append(DeployedClient.of(owner, terms))
        return " > ".join(map(describe, owner.chain))

    findings.append(_tried("chain, loss, guard", build_all))
    return [*findings, *(_tried("one step", partial(_own_step, own)) for own in owned)]


def _stand_in(owner: OwnerConfig) -> ServerTerms:
    models = {"classification": {"use": "tiny_bert"}, "next_token": {"use": "tiny_gpt2"}}
    mlp = {"use": "mlp", "hidden": [16]}
    model = models[owner.dataset.task] if isinstance(owner.dataset, Text) else mlp
    return ServerTerms(seed=0, rounds=1, clients=owner.client + 1, model=model)


def _own_step(own: DeployedClient) -> str:
    params, buffers = own.initial()
    update = own.compute(params, buffers, own.owner.batch(own.draw(1)), {})
    norm = math.sqrt(sum(float(t.double().square().sum()) for t in update.values()))
    if not math.isfinite(norm):
        raise _CheckFailed("the update is not finite: is the rate too high?")
    return f"an update of norm {norm:.3g}"


def _tried(name: str, look: Callable[[], str]) -> CheckResult:
    try:
        return CheckResult(name, True, True, look())
    except (_CheckFailed, SpecError, RequestRefused) as error:
        return CheckResult(name, False, True, str(error))
    except Exception as error:  # a user's own code raises what it likes, and that is what was asked for
        return CheckResult(name, False, True, f"{type(error).__name__}: {str(error).strip()}")


def _looked_at(name: str, fed: Federation, look: Callable[[Federation], str]) -> CheckResult:
    return _tried(name, partial(look, fed))


EMBEDDED = ("mnist5k", "phrases")  # data sets that need no file


class _CheckFailed(Exception):
    """What is wrong, and what to change."""


def _data_findings(fed: Federation) -> Iterator[CheckResult]:
    data = fed.shards.dataset
    yield CheckResult("data", True, True, _data_words(data))
    sizes = [len(own) for own in fed.shards.indices]
    words = f"{min(sizes):,} to {max(sizes):,} examples a client, of which {fed.shards.batch_size} a round"
    yield CheckResult("shards", True, True, words)
    if data.y.dim() == 1 and (absent := sorted(set(range(data.classes)) - set(data.y.unique().tolist()))):
        words = (
            f"no training image of {len(absent)} classes, the first of them {absent[0]}: are the labels 0, 1, 2 ...?"
        )
        yield CheckResult("classes", False, False, words)
    x = data.normalise(batch_of(data.x, data.y, torch.arange(min(1000, len(data.y)))).x).float()
    centre, width = x.mean().item(), x.std().item()
    if data.mean and (abs(centre) > 0.5 or not 0.5 < width < 2):
        words = f"normalised images have mean {centre:.2g} and deviation {width:.2g}, expected about 0 and 1: see mean and std"
        yield CheckResult("normalisation", False, False, words)
    yield _looked_at("data, built again", fed, _same_data)


def _data_words(data: Dataset) -> str:
    shape = " x ".join(map(str, data.shape))
    what = f"images of {shape}" if data.mean else f"sentences of {shape} tokens"
    of = "classes" if data.y.dim() == 1 else "words"
    return f"{len(data.y):,} + {len(data.y_test):,} {what}, {data.classes:,} {of}"


def _same_data(fed: Federation) -> str:
    first, again = fed.shards.dataset, Federation(fed.protocol).shards.dataset
    for name in ("x", "y", "x_test", "y_test"):
        if not torch.equal(getattr(first, name), getattr(again, name)):
            raise _CheckFailed(
                f"two builds differ in {name}, so clients and auditor would see other examples: sort what is listed, "
                f"and {BETWEEN_BUILDS}"
            )
    return "the same bits"


def _model_findings(fed: Federation) -> Iterator[CheckResult]:
    count = sum(p.numel() for p in fed.model.parameters())
    made = _looked_at("model", fed, _logits)
    yield CheckResult(
        made.name, made.works, made.needed, f"{made.words}{f', {count:,} parameters' if made.works else ''}"
    )
    yield _looked_at("model, built again", fed, _same_model)
    if made.works:
        yield _looked_at("model, run again", fed, _deterministic)
    for name, module in fed.model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            words = f"layer {name!r} is dropout, " + (
                'whose draws no attack knows: [model] mode = "eval", or leave it out'
                if module.training
                else "which eval mode turns off: clients train without it"
            )
            yield CheckResult("dropout", False, module.training, words)
    if made.works and not _independent(fed):
        drawn = any(isinstance(m, StochasticLayer) for m in fed.model.modules())
        words = "a layer draws" if drawn else "the model mixes the examples of a batch"
        yield CheckResult("engine", False, False, f"{words}, so matching goes by vmap, several times slower")


def _independent(fed: Federation) -> bool:
    x = _inputs(fed, 2 * TRIED)
    if len(x) < 2 * TRIED:
        return True
    with without_running_stats(fed.model):
        return examples_are_independent(fed.model, fed.initial()[0], x.view(2, TRIED, *x.shape[1:]))


def _inputs(fed: Federation, count: int = TRIED) -> Tensor:
    """Some training examples as the model is fed."""
    data = fed.shards.dataset
    return data.normalise(batch_of(data.x, data.y, torch.arange(min(count, len(data.y)))).x)


def _pass(fed: Federation) -> Tensor:
    with torch.no_grad(), without_running_stats(fed.model):  # a look must not move BatchNorm's statistics
        logits: Tensor = functional_call(fed.model, fed.initial()[0], (_inputs(fed),))
    return logits


def _logits(fed: Federation) -> str:
    data, logits = fed.shards.dataset, _pass(fed)
    expected = (min(TRIED, len(data.x)), *data.y.shape[1:], data.classes)
    if not isinstance(logits, Tensor) or logits.shape != expected:
        form = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise _CheckFailed(
            f"it gives {form} for {TRIED} {'images' if data.mean else 'sentences'}, expected logits {expected}: let its "
            "factory take `shape` and `classes`, which it is offered"
        )
    if not logits.isfinite().all():
        raise _CheckFailed("its logits are not finite: check its initial weights, and mean and std of the data")
    if whole := [name for name, p in fed.model.named_parameters() if not p.is_floating_point()]:
        raise _CheckFailed(f"parameter {whole[0]!r} is no floating-point number")
    return f"{type(fed.model).__name__}, logits for {data.classes} classes"


def _same_model(fed: Federation) -> str:
    first, again = fed.model.state_dict(), Federation(fed.protocol).model.state_dict()
    if first.keys() != again.keys():
        raise _CheckFailed("two builds have parameters of other names: build the same network each time")
    for name, tensor in first.items():
        if not torch.equal(tensor, again[name]):
            raise _CheckFailed(
                f"two builds differ in {name!r}, so equal seeds would not give equal runs: {BETWEEN_BUILDS}"
            )
    return "the same weights"


def _deterministic(fed: Federation) -> str:
    if any(isinstance(m, StochasticLayer) for m in fed.model.modules()):
        return "it draws by design, which attacks know of"
    if not torch.equal(_pass(fed), _pass(fed)):
        raise _CheckFailed(
            "two passes over the same images differ: something draws in its forward pass (functional dropout?), which a "
            "replay cannot repeat and no attack knows; make it depend on self.training, or leave it out"
        )
    return "the same logits"


def _loss_findings(fed: Federation) -> Iterator[CheckResult]:
    if is_cross_entropy(fed.loss):
        yield CheckResult("loss", True, True, "cross-entropy")
        return
    classes = fed.shards.dataset.classes
    yield CheckResult("loss", True, True, f"{fed.protocol.loss['use']}; labels cannot be read off its gradient")
    if not is_mean(fed.loss, classes):
        words = "a batch's loss is not the mean of its examples' (a sum, or weights?), so matching goes by vmap, slower"
        yield CheckResult("loss of a batch", False, False, words)
    if not takes_probabilities(fed.loss, classes):
        words = "it takes whole labels only: no attack optimises labels (dlg), no link may blend them (mixup)"
        yield CheckResult("loss of probabilities", False, False, words)


def _twice(fed: Federation) -> str:
    """The derivative by an image of what a client computes, which every matching attack needs, held against a difference."""
    model, loss = copy.deepcopy(fed.model).double(), fed.loss
    if isinstance(loss, nn.Module):
        loss = copy.deepcopy(loss).double()
    params, data = {k: p.double() for k, p in fed.initial()[0].items()}, fed.shards.dataset
    compute, y = gradient(model, loss, normalise=data.normalise), data.y[:1]
    rng = generator("doctor", "projection")
    weights = {k: torch.randn(p.shape, generator=rng, dtype=p.dtype) for k, p in params.items()}

    def projected(x: Tensor) -> Tensor:
        """Of each parameter's gradient one number, (parameters,)."""
        update = compute(params, Batch(x, y), None)
        return torch.stack([(t * weights[k]).sum() for k, t in update.items()])

    first = batch_of(data.x, data.y, torch.arange(1)).x
    x = (model.embed(first).detach() if isinstance(model, LanguageModel) else first.double()).requires_grad_()
    total = projected(x)
    if not total.requires_grad:
        raise _CheckFailed("the gradient does not depend on the image: is something detached in the model?")
    slopes = torch.stack([torch.autograd.grad(part, x, retain_graph=True)[0] for part in total])
    if not slopes.isfinite().all():
        raise _CheckFailed("it is not finite: a square root, norm or division at zero in the model or loss?")
    step = STEP * torch.randn(x.shape, generator=rng, dtype=x.dtype)
    change, expected = (projected(x + step) - projected(x - step)).detach() / 2, (slopes * step).flatten(1).sum(1)
    room = OFF * torch.maximum(change.abs(), expected.abs()) + ROUNDING * expected.abs().max()
    if off := [name for name, far in zip(params, (change - expected).abs() > room, strict=True) if far]:
        raise _CheckFailed(
            f"it differs from the change of the gradient of {off[0]!r}: has an autograd Function of the model's a first "
            "derivative only?"
        )
    idle = [name for name, t in compute(params, Batch(x.detach(), y), None).items() if not t.any()]
    return "as a difference has it" + (f"; no gradient reaches {', '.join(idle[:3])}" if idle else "")


def _one_step(fed: Federation) -> str:
    """One client's update through the real client app and door, and the replay check of it."""
    seen = _observed(fed)
    found = replay(Federation(fed.protocol), seen)
    words = f"replay check: cosine {found.cosine:.7f}, relative error {found.relative_error:.1e}: {found.verdict}"
    if not found.ok:
        raise _CheckFailed(words)
    return words


def _observed(fed: Federation) -> Observation:
    """What the server sees of the first client that answers in the first round."""
    from flwr.app import ArrayRecord, ConfigRecord
    from flwr.serverapp.strategy import FedAvg

    from fedgauge.server.strategy.validator import RoundReplies, UpdateValidator
    from fedgauge.simulations.run.in_memory import MemoryGrid, flower

    intakes: list[RoundReplies] = []
    params, buffers = fed.initial()
    protocol = fed.protocol
    grid = MemoryGrid(protocol)
    with flower():
        inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
        validator = UpdateValidator(inner, intakes.append, buffers, protocol.seed, grid.clients, protocol=protocol)
        group = _first_group(fed)
        sent = validator.configure_train(1, ArrayRecord(params), ConfigRecord(), grid)
        chosen = [m for m in sent if grid.clients[m.metadata.dst_node_id] in group]
        validator.aggregate_train(1, grid.send_and_receive(chosen))
    (intake,) = intakes
    if not intake.accepted:
        reasons: Mapping[int, str] = {s.client: s.reason for s in intake.refused if s.client in group}
        raise _CheckFailed(f"client {group[0]} gave no update: {reasons.get(group[0], 'no reply')}")
    one = intake.accepted[0]
    return Observation(1, one.client, intake.params, one.update, intake.buffers)


def _first_group(fed: Federation) -> tuple[int, ...]:
    """Clients by whose update, or sum, the first round begins, with one of them at least in time."""
    groups = fed.protocol.groups(1)
    least = fed.protocol.secure_sum.least if fed.protocol.secure_sum else 1
    return next((g for g in groups if sum(not fed.protocol.misses(c, 1) for c in g) >= least), groups[0])
