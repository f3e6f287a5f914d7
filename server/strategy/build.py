"""The Flower strategy of a scenario, built from [strategy]."""

import inspect

from flwr.serverapp.strategy import Bulyan, Strategy

from fedgauge.client.components import ComponentKind, SpecError, Table, build, check_arguments, resolve
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
    agreed = {  # the server evaluates; clients and the checked strategy use these names
        "fraction_evaluate": 0,
        "arrayrecord_key": "arrays",
        "configrecord_key": "config",
        "weighted_by_key": WEIGHT,
    }
    # Flower would wait for more clients than there are
    most = {"min_train_nodes": clients, "min_available_nodes": clients, "fraction_train": 1.0}
    wrong = {k: f"must be {v!r}" for k, v in agreed.items() if checked.get(k, v) != v}
    wrong |= {k: f"must be above 0 and at most {n}" for k, n in most.items() if not 0 < checked.get(k, n) <= n}
    fewest = {"num_nodes_to_select": 1, "num_malicious_nodes": 0}
    wrong |= {k: f"must be at least {n}" for k, n in fewest.items() if checked.get(k, n) < n}
    wrong |= {k: "must be above 0" for k in ("eta", "eta_l", "tau", "server_learning_rate") if checked.get(k, 1) <= 0}
    for key, words in wrong.items():
        raise SpecError(f"[strategy]: {key} {words}, got {checked[key]!r}")
    strategy: Strategy = build({**checked, "use": table["use"]}, "[strategy]", STRATEGY)
    if isinstance(strategy, Bulyan) and clients < (needed := 4 * strategy.num_malicious_nodes + 3):
        why = f"num_malicious_nodes = {strategy.num_malicious_nodes} needs {needed} clients, and there are {clients}"
        raise SpecError(f"[strategy]: Bulyan aggregates nothing: {why}")
    return strategy
