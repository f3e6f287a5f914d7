"""Number of jobs of a scenario if every client takes part."""

from collections import Counter
from collections.abc import Mapping

from fedgauge.server.store.scenario import Scenario


def expected_updates(scenario: Scenario, rounds: range) -> list[tuple[int, Mapping[str, int]]]:
    """Return the kinds of rounds: the number of rounds, and the number of attacked updates by attack."""
    plan, groups = scenario.plan, scenario.protocol.groups(1)
    some = max(1, int(len(groups) * scenario.strategy.get("fraction_train", 1.0)))
    seen = [group[0] for group in groups[:some]]
    alike = {plan.attacks_round(r): r for r in rounds}
    times = Counter(map(plan.attacks_round, rounds))
    return [(n, {p.name: len(plan.targets(alike[kind], seen, p)) for p in plan.attacks}) for kind, n in times.items()]


def expected_jobs(scenario: Scenario, done: int, rounds: int | None = None) -> int:
    """Return the number of jobs of the rounds after `done`.

    Args:
        rounds: of the run; default: the scenario's.
    """
    to_come = range(done + 1, (rounds or scenario.protocol.rounds) + 1)
    return sum(n * sum(updates.values()) for n, updates in expected_updates(scenario, to_come))
