"""A small made-up census: people with an age, a trade, a home and an income, from a few lines of rules and a seed."""

import math
import random

NAMES = ("age", "schooling", "hours", "savings", "trade", "contract", "household", "region", "commute", "sex")
NUMERIC = ("age", "schooling", "hours", "savings")
CLASSES = ("below the median", "above the median")
COUNT = 4000
# of each trade: its share, the years of schooling that it asks for, and what it pays beside others
TRADES = {
    "office": (0.24, 13.0, 0.2),
    "care": (0.17, 13.5, 0.0),
    "building": (0.14, 11.0, 0.1),
    "trade": (0.16, 11.5, -0.1),
    "transport": (0.09, 10.5, -0.1),
    "teaching": (0.09, 16.5, 0.4),
    "engineering": (0.07, 16.0, 0.9),
    "farming": (0.04, 10.0, -0.5),
}
REGIONS = {"north": 0.2, "south": 0.19, "east": 0.15, "west": 0.21, "capital": 0.16, "islands": 0.06, "abroad": 0.03}
CONTRACTS = {"permanent": 0.68, "fixed term": 0.2, "own business": 0.12}
COMMUTES = {"car": 0.46, "train": 0.18, "bus": 0.12, "bicycle": 0.13, "on foot": 0.07, "at home": 0.04}


def people() -> tuple[list[dict[str, float | str]], list[int]]:
    """Return each person's cells by column, and the label: 1 for an income above the median."""
    rng = random.Random(1)
    every, incomes = [], []
    for _ in range(COUNT):
        trade = _drawn(rng, {name: share for name, (share, _, _) in TRADES.items()})
        _, wanted, paid = TRADES[trade]
        age = _within(rng.gauss(43, 13), 18, 80)
        schooling = _within(rng.gauss(wanted, 1.6), 8, 20)
        contract, region = _drawn(rng, CONTRACTS), _drawn(rng, REGIONS)
        hours = _within(rng.gauss(48 if contract == "own business" else 38 if rng.random() < 0.75 else 22, 4), 5, 80)
        income = paid + 0.12 * (schooling - 12) + 0.035 * (hours - 36) + 0.02 * (min(age, 58) - 40) + rng.gauss(0, 0.5)
        income += {"capital": 0.3, "islands": -0.2}.get(region, 0.0)
        savings = _within(math.exp(rng.gauss(2.2 + 0.03 * (age - 43) + 0.6 * income, 0.8)), 0, 500)
        alone = 0.4 if age < 30 else 0.2
        home = {"alone": alone, "couple": 0.3, "family": 0.75 - alone - 0.05, "shared": 0.1 if age < 35 else 0.02}
        cells = (age, schooling, hours, savings, trade, contract, _drawn(rng, home), region, _drawn(rng, COMMUTES))
        every.append(dict(zip(NAMES, (*cells, rng.choice(("female", "male"))), strict=True)))
        incomes.append(income)
    median = sorted(incomes)[COUNT // 2]
    return every, [int(income > median) for income in incomes]


def _within(value: float, low: float, high: float) -> float:
    return float(round(min(max(value, low), high)))


def _drawn(rng: random.Random, shares: dict[str, float]) -> str:
    return rng.choices(list(shares), list(shares.values()))[0]
