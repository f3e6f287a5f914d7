"""What a scenario's rounds will bring if every client takes part: one count, for a trial before training, a page and a terminal."""

from collections import Counter
from collections.abc import Mapping

from fedgauge.server.store.scenario import Scenario


def expected_updates(scenario: Scenario, rounds: range) -> list[tuple[int, Mapping[str, int]]]:
    """Kinds of rounds: how many there are of each, and by attack how many updates it attacks in one; of a group one update."""
    plan, groups = scenario.plan, scenario.protocol.groups(1)
    some = max(1, int(len(groups) * scenario.strategy.get("fraction_train", 1.0)))
    seen = [group[0] for group in groups[:some]]
    alike = {plan.attacks_round(r): r for r in rounds}  # nothing else of a round decides: there may be a million
    times = Counter(map(plan.attacks_round, rounds))
    return [(n, {p.name: len(plan.targets(alike[kind], seen, p)) for p in plan.attacks}) for kind, n in times.items()]


def expected_jobs(scenario: Scenario, done: int, rounds: int | None = None) -> int:
    """The jobs that the rounds after `done` will add.

    Args:
        rounds: that the run trains; default: the scenario's.
    """
    to_come = range(done + 1, (rounds or scenario.protocol.rounds) + 1)
    return sum(n * sum(updates.values()) for n, updates in expected_updates(scenario, to_come))
