"""Before training: what would fail after a minute of Flower's start is tried first, in seconds, and said in one sentence."""

import logging
import time
from collections.abc import Iterator
from functools import partial

from rich.console import Console

from fedgauge.client.components import SpecError
from fedgauge.client.federation import Federation
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.checks.attack_trial import NONE_APPLIES, StandInTrial, real, untried
from fedgauge.simulations.checks.chain_check import check_links, try_links
from fedgauge.simulations.checks.check_result import CheckResult, attempt, attempt_all
from fedgauge.simulations.checks.network_check import (
    SOFTMAX,
    ends_in_softmax,
    try_copy,
    try_gradient,
    try_input,
    try_network,
)

PATIENCE = 10.0  # seconds: the doctor tries all attacks


def refuse_misfit(fed: Federation, where: str = "") -> None:
    """Try network, loss and chain on a few examples.

    Args:
        where: the scenario's file, which begins the sentence.

    Raises:
        SpecError: the network cannot take these examples, return their logits or be differentiated (it names the layer), or a
            link cannot transform an update.
    """
    start = f"{where}: " if where else ""
    for check in (try_network, try_gradient):
        found = attempt("[model]", partial(check, fed))
        if not found.works:
            raise SpecError(f"{start}[model]: {found.message}")
    for found in attempt_all("links", try_links(fed)):
        if not found.works:
            raise SpecError(f"{start}[[chain]]: {found.name}: {found.message}")


def try_strategy(scenario: Scenario) -> str:
    """Build the server's strategy; SpecError if it could not aggregate a round's replies."""
    from fedgauge.server.strategy.build import build_strategy  # imports Flower: seconds

    logging.getLogger("flwr").setLevel(logging.ERROR)  # it warns that evaluation is off, which is our own choice
    protocol = scenario.protocol
    groups = len(protocol.groups(1)) if protocol.secure_sum is not None else None
    return type(build_strategy(scenario.strategy, protocol.clients, groups=groups)).__name__


def try_first(scenario: Scenario, console: Console, where: str = "", patience: float = PATIENCE) -> None:
    """Try a scenario, its server's strategy included, and print what will not work as it should.

    Args:
        where: a name that begins each sentence.
        patience: seconds, after which no further attack is tried.

    Raises:
        SpecError: it cannot be trained, its updates not be computed again, or none of the planned attacks works.
    """
    start = f"{where}: " if where else ""
    try:
        try_strategy(scenario)
        for words in warnings_before(scenario, patience):
            console.print(f"warning: {start}{words}", highlight=False, markup=False, soft_wrap=True)
    except SpecError as error:
        raise SpecError(f"{start}{error}") from error


def warnings_before(scenario: Scenario, patience: float = PATIENCE) -> Iterator[str]:
    """Try a scenario once; yields what will not work as it should.

    Args:
        patience: seconds, after which no further attack is tried.

    Raises:
        SpecError: clients cannot train, no update could be computed again, or none of the planned attacks works.
    """
    fed = scenario.federation
    refuse_misfit(fed)
    for check in (try_input, try_copy):
        if not (found := attempt("[model]", partial(check, fed))).works:
            yield f"[model]: {found.message}"
    if ends_in_softmax(fed):
        yield f"[model]: {SOFTMAX}"
    causes: list[CheckResult] = []
    for usable, found in check_links(scenario):
        if not usable:
            raise SpecError(f"[[chain]]: {found.name}: {found.message}")
        if not found.works:
            causes.append(found)
            yield f"[[chain]]: {found.name}: {found.message}"
    if not scenario.audit.curious:
        return
    trial, began = StandInTrial.of(scenario), time.perf_counter()
    tried = [p for p in real(scenario) if not untried(p)]
    failed: list[CheckResult] = []
    inapplicable: list[CheckResult] = []
    for planned in tried:
        if time.perf_counter() - began > patience:
            return
        found = trial.result(planned, partial(trial.once, planned))
        if found.needed and not found.works:
            failed.append(found)
            yield f"{found.name}: {found.message}"
        elif not found.works:
            inapplicable.append(found)
    if failed and len(failed) == len(real(scenario)):
        cause = (causes or failed)[0]
        raise SpecError(f"none of the planned attacks works: {cause.name}: {cause.message}")
    if inapplicable and len(inapplicable) == len(real(scenario)):
        yield from (f"{found.name}: {found.message}" for found in inapplicable)
        yield NONE_APPLIES
