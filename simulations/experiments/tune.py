"""Tuning: `python -m fedgauge.simulations.experiments.tune NAME` tunes a table's attacks on images that it never reports.

Optuna's sampler (TPE; Bergstra et al., 2011) gives every attack equally many trials and the same start: the first half lie at
the same relative positions in the ranges of all attacks in a setting, so that luck favours none. Results go into the table's
file by hand: a tuner that wrote there would make a figure depend on when it was last run.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedgauge.client.components import SpecError, Table
from fedgauge.client.rng import seed_of
from fedgauge.simulations.experiments.paper_table_files import load, restrict
from fedgauge.simulations.experiments.paper_tables import AttackSpec, PaperTable, Setting
from fedgauge.simulations.experiments.run_attack import run_attack
from fedgauge.simulations.experiments.setups import Setup, build_setup
from fedgauge.simulations.run.environment import one_thread

TUNING_OFFSET = 500  # images between the first reported and the first tuning image


@dataclass(frozen=True)
class Range:
    """The inclusive range of a hyperparameter; log: drawn evenly in the logarithm."""

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
_RELATIVE = Range(1e-4, 1.0)  # the squared distance and the cosine are about 1 if nothing fits
SPACES: Mapping[str, Mapping[str, Range]] = {
    # a log-likelihood if nothing fits: half the entries of the update, of which the tables' network has 140,000
    "known": {"tv": Range(7.0, 7e4), **_DESCENT},
    "squared": {"tv": _RELATIVE, **_DESCENT},
    "cosine": {"tv": _RELATIVE, **_DESCENT},
    "inverting_gradients": {"tv": _RELATIVE, "rate": Range(0.03, 1.0)},
}


@dataclass(frozen=True)
class TunedSettings:
    """The best hyperparameters of one attack in one setting, and their score on the tuning images."""

    cell: str
    attack: str
    settings: Mapping[str, float]
    psnr: float
    trials: int

    def to_json(self) -> str:
        """One line."""
        return json.dumps(vars(self) | {"settings": dict(self.settings)})


def search_space(table: Table) -> Mapping[str, Range]:
    """The ranges to search for an attack; empty if it has no hyperparameters."""
    return SPACES.get(str(table.get("conditional", str(table["use"]))), {})


def on_tuning_images(cell: Setting, n: int) -> Setting:
    """The setting on images that it does not report."""
    if cell.n * cell.images.batch_size > TUNING_OFFSET:
        raise SpecError(
            f"cell {cell.name} reports more than {TUNING_OFFSET} images, so they would overlap with the tuning images"
        )
    return replace(cell, n=n, images=replace(cell.images, first=cell.images.first + TUNING_OFFSET))


def candidates(spec: AttackSpec, trials: int, seed: int, cell: str) -> Iterator[dict[str, float]]:
    """Random hyperparameters, at the same relative positions in their ranges for all attacks of a setting."""
    searched = search_space(spec.table)
    for i in range(trials):
        draws = {name: np.random.default_rng(seed_of(seed, "tune", cell, i, name)) for name in searched}
        yield {name: bounds.draw(draws[name]) for name, bounds in searched.items()}


def tune(paper_table: PaperTable, n: int, trials: int) -> Iterator[TunedSettings]:
    """For every attack with hyperparameters to search, the candidate with the highest mean PSNR."""
    for cell in paper_table.cells:
        tuning_setting = on_tuning_images(cell, n)
        setup = build_setup(tuning_setting, paper_table.seed)
        for spec in tuning_setting.attacks:
            if search_space(spec.table):
                yield _best(tuning_setting, spec, setup, paper_table.seed, trials)


def _best(cell: Setting, spec: AttackSpec, setup: Setup, seed: int, trials: int) -> TunedSettings:
    import optuna  # only developers need it

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    start = list(candidates(spec, (trials + 1) // 2, seed, cell.name))
    sampler = optuna.samplers.TPESampler(seed=seed_of(seed, "tune", cell.name) % 2**32, n_startup_trials=len(start))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for settings in start:
        study.enqueue_trial(settings)

    def score(optuna_trial: optuna.Trial) -> float:
        searched = search_space(spec.table).items()
        settings = {
            name: float(f"{optuna_trial.suggest_float(name, r.low, r.high, log=r.log):.3g}") for name, r in searched
        }
        optuna_trial.set_user_attr("settings", settings)
        tried = replace(spec, table={**spec.table, **settings})
        return float(run_attack(tried, setup, cell.wave).psnr.mean())

    study.optimize(score, n_trials=trials)
    best_settings: dict[str, float] = study.best_trial.user_attrs["settings"]
    return TunedSettings(cell.name, spec.name, best_settings, round(study.best_value, 2), trials)


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune a paper's table and print one object a line."""
    parser = argparse.ArgumentParser(prog="python -m fedgauge.simulations.experiments.tune", description=__doc__)
    parser.add_argument("name", metavar="NAME", help="a table in simulations/papers")
    parser.add_argument("--cells", metavar="PATTERN", help="only these settings: part of their name, or with * and ?")
    parser.add_argument("--n", type=int, default=4, help="tuning images (default: 4)")
    parser.add_argument("--trials", type=int, default=16, help="for every attack (default: 16)")
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
