"""What is wrong with a scenario: its data, model, loss, chain and attacks, in one sequence of checks.

The doctor carries out all of them. A run carries out those that need no second build, before anything is trained.
"""

import logging
import os
from collections.abc import Iterator
from functools import partial

import torch
from rich.console import Console
from torch import nn

from fedgauge.attacks.engine.devices import CPU
from fedgauge.attacks.engine.gradients.per_problem import examples_are_independent
from fedgauge.attacks.grading.replay import replay
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.attacks.source import FederationSource
from fedgauge.client.components import SpecError
from fedgauge.client.data.images import Dataset, batch_of
from fedgauge.client.federation import Federation
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.losses import is_cross_entropy, is_mean, takes_probabilities
from fedgauge.client.training import without_running_stats
from fedgauge.server.pool.service import attack_devices
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.checks.attack_trial import NONE_APPLIES, PATIENCE, estimate_attacks, try_attacks
from fedgauge.simulations.checks.chain_check import check_links, try_links
from fedgauge.simulations.checks.check_result import CheckResult, attempt, attempt_all, require
from fedgauge.simulations.checks.network_check import TRIED, check_network, inputs, try_derivatives

BETWEEN_BUILDS = "draw with torch's generator, which the seed sets, or read it from a file"


def check(scenario: Scenario) -> list[CheckResult]:
    """Check a scenario that could be built; the last checks are left out where an earlier one failed."""
    fed, again = scenario.federation, Federation(scenario.protocol)
    model = list(attempt_all("model", check_network(fed)))
    results = [
        *attempt_all("data", _check_data(fed, again)),
        *(result for result in model if result.needed or not result.works),
        attempt("model, built again", partial(_same_model, fed, again)),
        *(attempt_all("engine", _check_engine(fed)) if model[0].works else ()),
        *attempt_all("loss", _check_loss(fed)),
        attempt("strategy", partial(try_strategy, scenario)),
    ]
    if _all_work(results):
        if not isinstance(fed.model, LanguageModel):
            results.append(attempt("second derivative", partial(try_derivatives, fed)))
        results += attempt_all("chain", check_links(scenario))
        results.append(attempt("one client's step", partial(_one_step, fed)))
    if _all_work(results):
        results += attempt_all("attacks", estimate_attacks(scenario))
    return [*results, attempt("devices", partial(_devices, scenario))] if scenario.audit.curious else results


def _all_work(results: list[CheckResult]) -> bool:
    return all(result.works or not result.needed for result in results)


# ---------------------------------------------------------------------------------------------------- before training


def refuse_misfit(fed: Federation, where: str = "") -> None:
    """Try network, loss and chain on a few examples.

    Args:
        where: the scenario's file, which begins the sentence.

    Raises:
        SpecError: the network cannot take these examples, return their logits or be differentiated (it names the layer), or a
            link cannot transform an update.
    """
    _stop(attempt_all("model", check_network(fed)), f"{where}: [model]" if where else "[model]")
    _stop(attempt_all("links", try_links(fed)), f"{where}: [[chain]]" if where else "[[chain]]")


def _stop(results: Iterator[CheckResult], where: str) -> list[str]:
    """Sentences on what does not work; SpecError where nothing can be trained with it."""
    words = []
    for result in results:
        if not result.works:
            words.append(f"{where}: {result.name}: {result.message}")
            if result.stops:
                raise SpecError(words[-1])
    return words


def try_strategy(scenario: Scenario) -> str:
    """Build the server's strategy; SpecError if it could not aggregate a round's replies."""
    from fedgauge.server.strategy.build import build_strategy  # imports Flower: seconds

    logging.getLogger("flwr").setLevel(logging.ERROR)  # it warns that evaluation is off, which is our own choice
    protocol = scenario.protocol
    groups = len(protocol.groups(1)) if protocol.secure_sum is not None else None
    return type(build_strategy(scenario.strategy, protocol.clients, groups=groups)).__name__


def try_first(scenario: Scenario, console: Console, where: str, patience: float = PATIENCE) -> None:
    """Try a scenario, its server's strategy included, and print what will not work as it should.

    Args:
        where: a name that begins each sentence.
        patience: seconds, after which no further attack is tried.

    Raises:
        SpecError: it cannot be trained, its updates not be computed again, or none of the planned attacks works.
    """
    try:
        try_strategy(scenario)
        for words in warnings_before(scenario, patience):
            console.print(f"warning: {where}: {words}", highlight=False, markup=False, soft_wrap=True)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from error


def warnings_before(scenario: Scenario, patience: float = PATIENCE) -> Iterator[str]:
    """Try a scenario once; yields what will not work as it should.

    Args:
        patience: seconds, after which no further attack is tried.

    Raises:
        SpecError: clients cannot train, no update could be computed again, or none of the planned attacks works.
    """
    fed = scenario.federation
    yield from _stop(attempt_all("model", check_network(fed)), "[model]")
    causes = _stop(attempt_all("links", check_links(scenario)), "[[chain]]")
    yield from causes
    tried = list(try_attacks(scenario, patience))
    failed = [r for r in tried if r.needed and r.works is False]
    yield from (f"{r.name}: {r.message}" for r in failed)
    if tried and len(failed) == len(tried):
        cause = (causes or [f"{r.name}: {r.message}" for r in failed])[0]
        raise SpecError(f"none of the planned attacks works: {cause}")
    if tried and all(r.works is False and not r.needed for r in tried):
        yield from (f"{r.name}: {r.message}" for r in tried)
        yield NONE_APPLIES


# --------------------------------------------------------------------------------------------------------- the checks


def _devices(scenario: Scenario) -> str:
    found = attack_devices(scenario.audit, in_cluster="RAY_ADDRESS" in os.environ)
    if found == [CPU]:
        return "attacks run on the CPU"
    places = " and ".join(map(str, found)) or "the GPUs of the Ray cluster, or its cores"
    precision = scenario.audit.precision
    return f"attacks run on {places}, with {precision} products; the times of trials are this machine's CPU's"


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
        alike = torch.equal(getattr(first, name), getattr(again, name))
        require(alike, f"two builds differ in {name}: sort lists of files, and {BETWEEN_BUILDS}")
    return "the same bits"


def _same_model(fed: Federation, other: Federation) -> str:
    again = other.model.state_dict()
    for name, tensor in fed.model.state_dict().items():
        # a NaN equals nothing, itself included
        alike = name in again and torch.equal(tensor.nan_to_num(), again[name].nan_to_num())
        require(alike, f"two builds differ in {name!r}, so equal seeds would not give equal runs: {BETWEEN_BUILDS}")
    return "the same weights"


def _check_engine(fed: Federation) -> Iterator[CheckResult]:
    """What is lost in eval mode, and what makes matching slower."""
    dropout = [n for n, m in fed.model.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0]
    if dropout and not fed.model.training:
        message = f"layer {dropout[0]!r} is dropout, which eval mode turns off: clients train without it"
        yield CheckResult("dropout", False, False, message)
    x = inputs(fed, 2 * TRIED)
    if len(x) < 2 * TRIED:
        return
    with without_running_stats(fed.model):
        independent = examples_are_independent(fed.model, fed.initial()[0], x.view(2, TRIED, *x.shape[1:]))
    if not independent:
        message = "a layer draws, or the model mixes the examples of a batch, so matching uses vmap and is several times slower"
        yield CheckResult("engine", False, False, message)


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
    """Let a client, or a group of a secure sum, compute an update, and run the replay check on it in another federation."""
    own, client = Federation(fed.protocol), fed.protocol.groups(1)[0][0]
    result = replay(Federation(fed.protocol), FederationSource(own).seen(client))
    message = f"replay check: cosine {result.cosine:.7f}, relative error {result.relative_error:.1e}: {result.verdict}"
    require(result.ok, message)
    return message
