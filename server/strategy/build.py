"""The Flower strategy of a scenario: built from [strategy], and refused before training if it could not aggregate."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from flwr.serverapp.strategy import Bulyan, FedAvg, FedAvgM, FedTrimmedAvg, MultiKrum, Strategy
from flwr.serverapp.strategy.fedopt import FedOpt

from fedgauge.client.components import ComponentKind, SpecError, Table, call, check_arguments, resolve
from fedgauge.client.deployment.secure_sum_mod import WEIGHT

STRATEGY = ComponentKind("a strategy", ("fedgauge.strategies",), Strategy)
# the values with which a strategy of Flower can aggregate: class, argument, allowed values in words, and their test
_RANGES: tuple[tuple[type[FedAvg], str, str, Callable[[float], bool]], ...] = (
    (FedAvg, "fraction_train", "above 0 and at most 1", lambda v: 0 < v <= 1),
    (FedTrimmedAvg, "beta", "in [0, 0.5), as it is cut off at both ends", lambda v: 0 <= v < 0.5),
    (FedAvgM, "server_learning_rate", "above 0", lambda v: v > 0),
    (FedAvgM, "server_momentum", "in [0, 1)", lambda v: 0 <= v < 1),  # Flower ignores a negative one
    (FedOpt, "eta", "above 0", lambda v: v > 0),
    (FedOpt, "beta_1", "in [0, 1)", lambda v: 0 <= v < 1),  # the bias correction divides by 1 - beta_1
    (FedOpt, "beta_2", "in [0, 1)", lambda v: 0 <= v < 1),
    (FedOpt, "tau", "above 0", lambda v: v > 0),  # a weight that never moved is divided by tau alone
)


def build_strategy(table: Table, clients: int, least: int | None = None, groups: int | None = None) -> Strategy:
    """Build the strategy that [strategy] names.

    Defaults: every client trains, one reply is enough, and no client evaluates (the server does, on held-out data).

    Args:
        least: how many clients a round waits for, if the table does not say; default: all.
        groups: of a secure sum, each of which gives the strategy one reply; default: each client gives one.

    Raises:
        SpecError: an unknown strategy or argument, or a value with which it could not aggregate.
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
    if inspect.isclass(target) and issubclass(target, FedAvg):
        complete = {name: p.default for name, p in parameters.items()} | checked
        for kind, name, allowed, holds in _RANGES:
            if issubclass(target, kind) and name in complete and not holds(complete[name]):
                raise SpecError(f"[strategy]: {name} must be {allowed}, got {complete[name]}")
        _check_replies(target, complete, clients, groups)
    strategy = call(target, checked, "[strategy]")
    assert isinstance(strategy, Strategy)
    return strategy


def _check_replies(strategy: type[FedAvg], arguments: Mapping[str, Any], clients: int, groups: int | None) -> None:
    """SpecError if a round without any dropout gives this strategy fewer replies than it needs."""
    fraction, fewest = arguments.get("fraction_train", 1.0), arguments.get("min_train_nodes", 1)
    replies = max(int(clients * fraction), fewest)  # as FedAvg samples
    if replies < 1:
        raise SpecError(f"[strategy]: fraction_train = {fraction} of {clients} clients selects nobody: raise it")
    replies = replies if groups is None else groups
    liars = arguments.get("num_malicious_nodes", 0)
    # Krum scores a reply by its n - f - 2 nearest others; Bulyan skips every round of fewer than 4f + 3 replies
    krum = liars + 3 if liars and issubclass(strategy, MultiKrum) else 1
    needed = 4 * liars + 3 if issubclass(strategy, Bulyan) else krum
    if liars < 0 or replies < needed:
        raise SpecError(
            f"[strategy]: num_malicious_nodes = {liars} needs at least {needed} replies a round, and a round has {replies}"
        )
    chosen = arguments.get("num_nodes_to_select", 1)
    if issubclass(strategy, MultiKrum) and not 1 <= chosen <= replies:
        raise SpecError(
            f"[strategy]: num_nodes_to_select must be in 1..{replies}, the replies of a round, got {chosen}"
        )
