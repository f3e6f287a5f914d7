"""The Flower strategy of a scenario, built from [strategy]."""

import inspect

from flwr.serverapp.strategy import Strategy

from fedgauge.client.components import ComponentKind, SpecError, Table, call, check_arguments, resolve
from fedgauge.client.deployment.secure_sum_mod import WEIGHT

STRATEGY = ComponentKind("a strategy", ("fedgauge.strategies",), Strategy)


def build_strategy(table: Table, clients: int, least: int | None = None) -> Strategy:
    """Build the strategy that [strategy] names.

    Defaults: every client trains, one reply is enough, and no client evaluates (the server does, on held-out data).

    Args:
        least: how many clients a round waits for, if the table does not say; default: all.

    Raises:
        SpecError: an unknown strategy or argument, or a value with which it cannot train.
    """
    target = resolve(table, "[strategy]", STRATEGY)
    parameters = inspect.signature(target).parameters
    waits = {"min_train_nodes": 1, "min_available_nodes": least or clients}
    defaults = {"fraction_evaluate": 0.0, "min_evaluate_nodes": 0, **waits}
    arguments = {k: v for k, v in defaults.items() if k in parameters} | {k: v for k, v in table.items() if k != "use"}
    checked = check_arguments(target, arguments, "[strategy]", {})
    if checked.get("fraction_evaluate"):
        raise SpecError("[strategy]: fraction_evaluate must be 0: the server evaluates")
    for key, agreed in (("arrayrecord_key", "arrays"), ("configrecord_key", "config"), ("weighted_by_key", WEIGHT)):
        if checked.get(key, agreed) != agreed:  # clients and the checked strategy use these names
            raise SpecError(f"[strategy]: {key} must be {agreed!r}, got {checked[key]!r}")
    for key in ("min_train_nodes", "min_available_nodes"):
        if checked.get(key, 1) > clients:
            raise SpecError(f"[strategy]: {key} must be at most clients = {clients}, got {checked[key]}")
    if not 0 < checked.get("fraction_train", 1.0) <= 1:  # Flower would wait for more clients than there are
        raise SpecError(f"[strategy]: fraction_train must be above 0 and at most 1, got {checked['fraction_train']}")
    strategy = call(target, checked, "[strategy]")
    assert isinstance(strategy, Strategy)
    return strategy
