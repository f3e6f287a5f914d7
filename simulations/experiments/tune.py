"""Tuning: `python -m fedgauge.simulations.experiments.tune NAME` searches settings of a sheet's attacks, on images that the sheet never reports.

By Optuna's sampler (TPE; Bergstra et al., 2011), with as many trials for every attack and the same start: the first half are at
the same places of their ranges for all attacks of a cell, so that luck favours none. What it prints goes into the sheet by
hand: a tuner that wrote there would make a figure depend on when it was last run.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedgauge.client.components import SpecError, Table
from fedgauge.client.rng import seed_of
from fedgauge.simulations.benchmarks.reporting import one_thread
from fedgauge.simulations.experiments.paper_tables import AttackSpec, PaperTable, Setting, load, restrict
from fedgauge.simulations.experiments.reproduce import attack
from fedgauge.simulations.experiments.setups import Setup, build_setup

AWAY = 500  # images between those that a sheet may report by default and those that it is tuned on


@dataclass(frozen=True)
class Range:
    """A hyperparameter's, inclusive; log: drawn evenly in the logarithm."""

    low: float
    high: float
    log: bool = True

    def draw(self, rng: np.random.Generator) -> float:
        """One value, to three digits."""
        value = (
            np.exp(rng.uniform(np.log(self.low), np.log(self.high))) if self.log else rng.uniform(self.low, self.high)
        )
        return float(f"{value:.3g}")


_DESCENT = {"rate": Range(0.1, 1.0), "decay": Range(0.95, 1.0, log=False), "anneal": Range(1e-3, 1.0)}
_RELATIVE = Range(1e-4, 1.0)  # the squared distance and the cosine are about 1 where nothing fits
SPACES: Mapping[str, Mapping[str, Range]] = {
    # a log-likelihood where nothing fits: half of the entries of the update, of which the sheets' network has 140,000
    "known": {"tv": Range(7.0, 7e4), **_DESCENT},
    "squared": {"tv": _RELATIVE, **_DESCENT},
    "cosine": {"tv": _RELATIVE, **_DESCENT},
    "inverting_gradients": {"tv": _RELATIVE, "rate": Range(0.03, 1.0)},
}


@dataclass(frozen=True)
class Tuned:
    """The best settings found for one attack on one cell, and what they scored on the tuning images."""

    cell: str
    attack: str
    settings: Mapping[str, float]
    psnr: float
    trials: int

    def to_json(self) -> str:
        """One line."""
        return json.dumps(vars(self) | {"settings": dict(self.settings)})


def space(table: Table) -> Mapping[str, Range]:
    """What is searched for an attack; nothing for one that has no settings."""
    return SPACES.get(str(table.get("conditional", str(table["use"]))), {})


def on_tuning_images(cell: Setting, n: int) -> Setting:
    """The cell on images that it does not report."""
    if cell.n * cell.images.batch_size > AWAY:
        raise SpecError(f"cell {cell.name} reports more than {AWAY} images, which would reach the tuning images")
    return replace(cell, n=n, images=replace(cell.images, first=cell.images.first + AWAY))


def candidates(trial: AttackSpec, trials: int, seed: int, cell: str) -> Iterator[dict[str, float]]:
    """Random settings, at the same places of their ranges for all attacks of a cell, so that luck favours none."""
    searched = space(trial.table)
    for i in range(trials):
        draws = {name: np.random.default_rng(seed_of(seed, "tune", cell, i, name)) for name in searched}
        yield {name: bounds.draw(draws[name]) for name, bounds in searched.items()}


def tune(paper_table: PaperTable, n: int, trials: int) -> Iterator[Tuned]:
    """For every attack with something to search, the candidate of the highest mean PSNR."""
    for cell in paper_table.cells:
        elsewhere = on_tuning_images(cell, n)
        setup = build_setup(elsewhere, paper_table.seed)
        for trial in elsewhere.trials:
            if space(trial.table):
                yield _best(elsewhere, trial, setup, paper_table.seed, trials)


def _best(cell: Setting, trial: AttackSpec, setup: Setup, seed: int, trials: int) -> Tuned:
    import optuna  # a developer's tool, which nothing that users run needs

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    start = list(candidates(trial, (trials + 1) // 2, seed, cell.name))
    sampler = optuna.samplers.TPESampler(seed=seed_of(seed, "tune", cell.name) % 2**32, n_startup_trials=len(start))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for settings in start:
        study.enqueue_trial(settings)

    def score(asked: optuna.Trial) -> float:
        searched = space(trial.table).items()
        settings = {name: float(f"{asked.suggest_float(name, r.low, r.high, log=r.log):.3g}") for name, r in searched}
        asked.set_user_attr("settings", settings)
        tried = replace(trial, table={**trial.table, **settings})
        return float(attack(tried, setup, seed, cell.wave).psnr.mean())

    study.optimize(score, n_trials=trials)
    found: dict[str, float] = study.best_trial.user_attrs["settings"]
    return Tuned(cell.name, trial.name, found, round(study.best_value, 2), trials)


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune a sheet and print one object a line."""
    parser = argparse.ArgumentParser(prog="python -m fedgauge.simulations.experiments.tune", description=__doc__)
    parser.add_argument("name", metavar="NAME", help="of a sheet in simulations/papers")
    parser.add_argument("--cells", metavar="PATTERN", help="only these: a part of their name, or with * and ?")
    parser.add_argument("--n", type=int, default=4, help="tuning images (default: 4)")
    parser.add_argument("--trials", type=int, default=16, help="of every attack (default: 16)")
    options = parser.parse_args(arguments)
    try:
        paper_table = restrict(load(options.name), None, None, options.cells)
        with one_thread():
            for tuned in tune(paper_table, options.n, options.trials):
                print(tuned.to_json(), flush=True)
    except SpecError as error:
        print(f"tune: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
