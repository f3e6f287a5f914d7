"""Check a scenario: its data, model, chain and attacks.

The doctor carries out all checks; a run, before its training, those that need no second build.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from rich.console import Console
from torch import nn

from fedgauge.attacks.grading.replay import replay
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.attacks.problem import Problem
from fedgauge.attacks.source import FederationSource
from fedgauge.client.components import SpecError, errors_in
from fedgauge.client.data.batches import batch_of
from fedgauge.client.data.dataset import Dataset
from fedgauge.client.federation import Federation
from fedgauge.client.models.language import LanguageModel
from fedgauge.server.pool.service import attack_devices
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.checks.attack_trial import NOT_APPLICABLE, PATIENCE, PLAN, check_attacks
from fedgauge.simulations.checks.chain_check import check_links, try_links
from fedgauge.simulations.checks.check_result import CheckResult, Found, attempt, attempt_all
from fedgauge.simulations.checks.network_check import check_network, try_derivatives
from fedgauge.simulations.checks.preflight import closed_forms

BETWEEN_BUILDS = "sort lists of files, and draw with torch's generator, which the seed sets, or read it from a file"
Stage = Callable[[Scenario], Iterator[CheckResult]]


def check(scenario: Scenario) -> list[CheckResult]:
    """Check a scenario that could be built; stop after a stage without which nothing can be trained."""
    trained = (_check_data, _check_model, _check_strategy, check_links, _check_step)
    return list(_carry_out(scenario, (*trained, check_attacks, _check_devices)))


def warnings_before(scenario: Scenario, patience: float = PATIENCE) -> Iterator[str]:
    """Try a scenario once before it is trained; yield what will fail. After `patience` seconds no further attack is tried.

    Raises:
        SpecError: clients cannot train, no update can be recomputed, or no planned attack works.
    """
    stages = (
        _check_strategy,
        lambda s: check_network(s.federation),
        check_links,
        partial(check_attacks, patience=patience),
    )
    for result in _carry_out(scenario, stages):
        _refuse(result)
        if result.works is False and (result.code != NOT_APPLICABLE or result.name == PLAN):
            yield f"{result.name}: {result.message}"


def try_first(scenario: Scenario, console: Console, where: str, patience: float = PATIENCE) -> None:
    """Print the warnings before a training.

    Raises:
        SpecError: it cannot work. Each sentence begins with `where`.
    """
    with errors_in(where):
        for words in warnings_before(scenario, patience):
            console.print(f"warning: {where}: {words}", highlight=False, markup=False, soft_wrap=True)


def refuse_misfit(fed: Federation, where: str) -> None:
    """Try network, loss and chain on a few examples; SpecError, which names the scenario's file, if they cannot train."""
    with errors_in(where):
        for result in (*attempt_all("model", check_network(fed)), *attempt_all("links", try_links(fed))):
            _refuse(result)


def _carry_out(scenario: Scenario, stages: Iterable[Stage]) -> Iterator[CheckResult]:
    for stage in stages:
        stopped = False
        for result in attempt_all("scenario", stage(scenario)):
            yield result
            stopped |= result.stops and not result.works
        if stopped:
            return


def _refuse(result: CheckResult) -> None:
    if result.stops and not result.works:
        raise SpecError(f"{result.name}: {result.message}")


def _check_strategy(scenario: Scenario) -> Iterator[CheckResult]:
    from fedgauge.server.strategy.build import build_strategy  # imports Flower: seconds

    logging.getLogger("flwr").setLevel(logging.ERROR)  # it warns that evaluation is off, which is our own choice
    build = partial(build_strategy, scenario.strategy, scenario.protocol.clients)
    yield attempt("strategy", lambda: type(build()).__name__, stops=True)


def _check_devices(scenario: Scenario) -> Iterator[CheckResult]:
    def found() -> str:
        devices = attack_devices(scenario.audit, in_cluster="RAY_ADDRESS" in os.environ)
        return f"attacks run on {' and '.join(map(str, devices)) or 'the Ray cluster'}"

    if scenario.audit.curious:
        yield attempt("devices", found)


def read_exactly(scenario: Scenario) -> str:
    """Return what an attack without a search, and not in the plan, reads exactly of simulated clients; empty if nothing.

    Only of one step of training, which is soon simulated.
    """
    if isinstance(scenario.federation.model, LanguageModel) or scenario.federation.chain.local.steps > 1:
        return ""
    planned = [f"({planned.table.get('use')}, no search)" for planned in scenario.plan.attacks]

    def read() -> str:
        leaks = (finding.words for finding in closed_forms(scenario) if finding.severity == "leaks")
        return next((words for words in leaks if not any(use in words for use in planned)), "")

    result = attempt("closed form", read)
    return result.message if result.works else ""


def _check_data(scenario: Scenario) -> Iterator[CheckResult]:
    fed = scenario.federation
    data = fed.shards.dataset
    yield CheckResult("data", True, True, describe_data(data))
    sizes = [len(own) for own in fed.shards.indices]
    range_of = " to ".join(f"{size:,}" for size in sorted({min(sizes), max(sizes)}))
    message = f"{range_of} examples per client, {fed.shards.batch_size} of them per round"
    yield CheckResult("shards", True, True, message)
    if data.one_class and (absent := sorted(set(range(data.classes)) - set(data.y.unique().tolist()))):
        why = f"no training example of {len(absent)} classes, the first of them {absent[0]}"
        yield CheckResult("classes", False, False, Problem("classes", "", why, "are the labels 0, 1, 2 ...?"))
    x = data.normalise(batch_of(data.x, data.y, torch.arange(min(1000, len(data.y)))).x).float()
    centre, width = x.mean().item(), x.std().item()
    if data.mean and (abs(centre) > 0.5 or not 0.5 < width < 2):
        why = f"normalised values have mean {centre:.2g} and deviation {width:.2g}, expected about 0 and 1"
        yield CheckResult("normalisation", False, False, Problem("normalisation", "", why, "check mean and std"))
    yield attempt("data, built again", lambda: _same_data(data, Federation(scenario.protocol).shards.dataset))


def describe_data(data: Dataset) -> str:
    modality, shape = modality_of(data), " x ".join(map(str, data.shape))
    what = f"{modality.main.private}s of {shape} {modality.parts}"
    if data.y.is_floating_point():
        return f"{len(data.y):,} + {len(data.y_test):,} {what}, labels of {data.classes} numbers each"
    of = "classes" if data.labelled else "words"
    return f"{len(data.y):,} + {len(data.y_test):,} {what}, {data.classes:,} {of}"


def _same_data(first: Dataset, again: Dataset) -> Found:
    for name in ("x", "y", "x_test", "y_test"):
        if not torch.equal(getattr(first, name), getattr(again, name)):
            return Problem("two builds", "", f"two builds differ in {name}", BETWEEN_BUILDS)
    return "the same bits"


def _check_model(scenario: Scenario) -> Iterator[CheckResult]:
    fed, results = scenario.federation, list(check_network(scenario.federation))
    yield from (result for result in results if result.needed or not result.works)
    if any(result.needed and not result.works for result in results):
        return
    dropout = [n for n, m in fed.model.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0]
    if dropout and not fed.model.training:
        why = "is dropout, which eval mode turns off, so that clients train without it"
        yield CheckResult("dropout", False, False, Problem("dropout", f"layer {dropout[0]!r}", why))
    if not isinstance(fed.model, LanguageModel):
        yield attempt("second derivative", partial(try_derivatives, fed))


def _check_step(scenario: Scenario) -> Iterator[CheckResult]:
    protocol = scenario.protocol

    def step() -> Found:
        seen = FederationSource(Federation(protocol)).seen(0)
        result = replay(Federation(protocol), seen)
        off = f"cosine {result.cosine:.7f}, relative error {result.relative_error:.1e}"
        message = f"replay check: {off}: {result.verdict}"
        return message if result.ok else Problem("replay", "", message)

    yield attempt("one client's step", step)
