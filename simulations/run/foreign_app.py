"""`curious`: the one line that lets a curious server watch a user's own Flower app."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from flwr.serverapp.strategy import Strategy

from fedgauge.client import registry
from fedgauge.client.components import ALLOW_PATH, allowing
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.strategy.curious_strategy import CuriousStrategy, UpdateRecorder
from fedgauge.simulations.run.create import create_run


def curious(strategy: Strategy, audit: str | Path, run: str | Path, allow: Sequence[str] = ()) -> CuriousStrategy:
    """The same strategy with a curious server around it: it trains the same model, and keeps every update for `fedgauge audit`.

    Args:
        audit: a scenario that says what the app's clients are taken to do.
        run: the folder of the new run; if there is one already, a number is added to its name.
        allow: packages of the app that the scenario names, beside those in FEDGAUGE_ALLOW.

    Raises:
        TypeError: not a strategy of flwr.serverapp.strategy.
        SpecError: the scenario cannot be read.
    """
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"expected a strategy of flwr.serverapp.strategy, got {type(strategy).__module__}.{type(strategy).__name__}: "
            "Flower's older strategies exchange other messages; move the app to ServerApp and ClientApp with messages"
        )
    beside = [Path(p) for p in os.environ.get(ALLOW_PATH, "").split(os.pathsep) if p]
    packages = [*registry.allowed(), *allow]
    with allowing(packages, beside) if allow else nullcontext():
        scenario = Scenario.load(Path(audit))
    folder, attempt = Path(run), 1
    while folder.exists():
        attempt += 1
        folder = Path(run).with_name(f"{Path(run).name}-{attempt}")
    begun = create_run(scenario, folder, "deployment")
    recorder = UpdateRecorder(
        begun.ledger(), begun.tape(), scenario.plan, scenario.tape.keep, scenario.federation, packages
    )
    return CuriousStrategy(strategy, recorder, replies="weights", options=scenario.validator)
