"""What is wrong with a scenario: its data, model, loss, chain and attacks.

Everything is built twice and compared. Then one client trains one step in memory and its update is recomputed, the replay
check of a run; and every planned attack is tried for a few iterations.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from fedgauge.attacks.base import Observation
from fedgauge.attacks.engine.devices import CPU
from fedgauge.attacks.engine.gradients.per_problem import examples_are_independent
from fedgauge.attacks.grading.replay import replay
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.client.data.images import Dataset, batch_of
from fedgauge.client.federation import Federation
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.losses import is_cross_entropy, is_mean, takes_probabilities
from fedgauge.client.training import StochasticLayer, without_running_stats
from fedgauge.server.pool.service import attack_devices
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.checks.attack_trial import try_attacks
from fedgauge.simulations.checks.before_training import try_strategy
from fedgauge.simulations.checks.chain_check import check_chain
from fedgauge.simulations.checks.check_result import CheckFailed, CheckResult, attempt, attempt_all
from fedgauge.simulations.checks.network_check import (
    SOFTMAX,
    TRIED,
    ends_in_softmax,
    inputs,
    try_copy,
    try_derivatives,
    try_gradient,
    try_input,
    try_network,
)

BETWEEN_BUILDS = "draw with torch's generator, which the seed sets, or read it from a file"


def check(scenario: Scenario) -> list[CheckResult]:
    """Check a scenario that could be built; the last checks are left out where an earlier one failed."""
    fed, again = scenario.federation, Federation(scenario.protocol)
    results = [
        *attempt_all("data", _check_data(fed, again)),
        *attempt_all("model", _check_model(fed, again)),
        *attempt_all("loss", _check_loss(fed)),
    ]
    results.append(attempt("strategy", partial(try_strategy, scenario)))
    if all(r.works or not r.needed for r in results):
        results += [
            *(() if isinstance(fed.model, LanguageModel) else (_tried("second derivative", fed, try_derivatives),)),
            *attempt_all("chain", check_chain(scenario)),
            _tried("one client's step", fed, _one_step),
        ]
    if all(r.works or not r.needed for r in results):
        results += attempt_all("attacks", try_attacks(scenario))
    return [*results, attempt("devices", partial(_devices, scenario))] if scenario.audit.curious else results


def _devices(scenario: Scenario) -> str:
    audit = scenario.audit
    found = attack_devices(audit, in_cluster="RAY_ADDRESS" in os.environ)
    if found == [CPU]:
        return "attacks run on the CPU"
    places = " and ".join(map(str, found)) or "the GPUs of the Ray cluster, or its cores"
    products = "" if audit.precision == "ieee" else f", with products in {audit.precision}"
    return f"attacks run on {places}{products}; the times of trials are this machine's CPU's"


def _tried(name: str, fed: Federation, check: Callable[[Federation], str]) -> CheckResult:
    return attempt(name, partial(check, fed))


def _noted(name: str, fed: Federation, check: Callable[[Federation], str]) -> CheckResult:
    return attempt(name, partial(check, fed), needed=False)


def _check_data(fed: Federation, again: Federation) -> Iterator[CheckResult]:
    data = fed.shards.dataset
    yield CheckResult("data", True, True, describe_data(data))
    sizes = [len(own) for own in fed.shards.indices]
    message = f"{min(sizes):,} to {max(sizes):,} examples per client, {fed.shards.batch_size} of them per round"
    yield CheckResult("shards", True, True, message)
    if data.labelled and (absent := sorted(set(range(data.classes)) - set(data.y.unique().tolist()))):
        message = (
            f"no training example of {len(absent)} classes, the first of them {absent[0]}: are the labels 0, 1, 2 ...?"
        )
        yield CheckResult("classes", False, False, message)
    x = data.normalise(batch_of(data.x, data.y, torch.arange(min(1000, len(data.y)))).x).float()
    centre, width = x.mean().item(), x.std().item()
    if data.mean and (abs(centre) > 0.5 or not 0.5 < width < 2):
        message = f"normalised images have mean {centre:.2g} and deviation {width:.2g}, expected about 0 and 1: see mean and std"
        yield CheckResult("normalisation", False, False, message)
    yield attempt("data, built again", partial(_same_data, fed, again))


def describe_data(data: Dataset) -> str:
    """How many examples of what shape and how many classes."""
    modality, shape = modality_of(data), " x ".join(map(str, data.shape))
    what = f"{modality.main.private}s of {shape} {modality.parts}"
    of = "classes" if data.labelled else "words"
    return f"{len(data.y):,} + {len(data.y_test):,} {what}, {data.classes:,} {of}"


def _same_data(fed: Federation, other: Federation) -> str:
    first, again = fed.shards.dataset, other.shards.dataset
    for name in ("x", "y", "x_test", "y_test"):
        if not torch.equal(getattr(first, name), getattr(again, name)):
            raise CheckFailed(
                f"two builds differ in {name}, so clients and auditor would see other examples: sort lists of files, "
                f"and {BETWEEN_BUILDS}"
            )
    return "the same bits"


def _check_model(fed: Federation, again: Federation) -> Iterator[CheckResult]:
    count = sum(p.numel() for p in fed.model.parameters())
    built = _tried("model", fed, try_network)
    yield replace(built, message=f"{built.message}, {count:,} parameters") if built.works else built
    yield attempt("model, built again", partial(_same_model, fed, again))
    if built.works:
        yield from (r for r in (_noted("model, copied", fed, try_copy), _noted("input", fed, try_input)) if not r.works)
        yield _tried("gradient", fed, try_gradient)
        if ends_in_softmax(fed):
            yield CheckResult("softmax", False, False, SOFTMAX)
    dropout = [n for n, m in fed.model.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0]
    if dropout and not fed.model.training:
        message = f"layer {dropout[0]!r} is dropout, which eval mode turns off: clients train without it"
        yield CheckResult("dropout", False, False, message)
    if built.works and not _independent(fed):
        drawn = any(isinstance(m, StochasticLayer) for m in fed.model.modules())
        message = "a layer draws" if drawn else "the model mixes the examples of a batch"
        yield CheckResult("engine", False, False, f"{message}, so matching uses vmap and is several times slower")


def _independent(fed: Federation) -> bool:
    x = inputs(fed, 2 * TRIED)
    if len(x) < 2 * TRIED:
        return True
    with without_running_stats(fed.model):
        return examples_are_independent(fed.model, fed.initial()[0], x.view(2, TRIED, *x.shape[1:]))


def _same_model(fed: Federation, other: Federation) -> str:
    first, again = fed.model.state_dict(), other.model.state_dict()
    if first.keys() != again.keys():
        raise CheckFailed("two builds have parameters of different names: build the same network each time")
    for name, tensor in first.items():
        if not torch.equal(tensor.nan_to_num(), again[name].nan_to_num()):  # a NaN equals nothing, itself included
            raise CheckFailed(
                f"two builds differ in {name!r}, so equal seeds would not give equal runs: {BETWEEN_BUILDS}"
            )
    return "the same weights"


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


def _one_step(fed: Federation) -> str:
    """Let one client compute an update with the real client app and server check, and run the replay check on it."""
    result = replay(Federation(fed.protocol), _observed(fed))
    message = f"replay check: cosine {result.cosine:.7f}, relative error {result.relative_error:.1e}: {result.verdict}"
    if not result.ok:
        raise CheckFailed(message)
    return message


def _observed(fed: Federation) -> Observation:
    """What the server sees of the first client that answers in the first round."""
    from flwr.app import ArrayRecord, ConfigRecord
    from flwr.serverapp.strategy import FedAvg

    from fedgauge.server.strategy.checked import CheckedStrategy, RoundReplies
    from fedgauge.simulations.run.in_memory import MemoryGrid, flower

    received: list[RoundReplies] = []
    params, buffers = fed.initial()
    protocol = fed.protocol
    grid = MemoryGrid(protocol)
    with flower():
        inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
        checked = CheckedStrategy(inner, received.append, buffers, protocol.seed, grid.clients, protocol=protocol)
        group = _first_group(fed)
        sent = checked.configure_train(1, ArrayRecord(params), ConfigRecord(), grid)
        chosen = [m for m in sent if grid.clients[m.metadata.dst_node_id] in group]
        checked.aggregate_train(1, grid.send_and_receive(chosen))
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
