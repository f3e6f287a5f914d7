"""Examples of a report: all if they fit, otherwise a sample."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedgauge.server.views.gallery import Card, Gallery
from fedgauge.server.views.intervals import evenly

BYTES = 1_000_000  # for cards with pictures: a quickstart's all fit, and a report stays below 6 MB
CARD_BYTES = 900  # of one card without its pictures, about
IMAGE_BYTES = 350  # of one picture without its pixels, about
SEED = 0  # of the random sample

Key = tuple[int, int]  # (client, example)


@dataclass(frozen=True)
class ExampleSample:
    """Chosen examples of each round with their reasons; attacked: number of examples by round."""

    keys: Mapping[int, Mapping[Key, str]]
    attacked: Mapping[int, int]

    @property
    def shown(self) -> int:
        """Number of shown examples."""
        return sum(map(len, self.keys.values()))

    @property
    def examples(self) -> int:
        """Number of attacked examples in the shown rounds."""
        return sum(self.attacked[round] for round in self.keys)

    def cards(self, gallery: Gallery) -> list[Card]:
        """Return the chosen cards."""
        chosen = ((round, key, why) for round, keys in self.keys.items() for key, why in keys.items())
        return [gallery.card(round, *key, why) for round, key, why in chosen]


def sample_examples(gallery: Gallery, limit: int | None = None) -> ExampleSample:
    """Choose about `limit` examples of a gallery; default: as many as fit into BYTES."""
    strengths: dict[int, dict[Key, float]] = {}
    attacked = gallery.attacked()
    for (round, *key), strength in zip(attacked, attacked.strength.tolist(), strict=True):
        strengths.setdefault(round, {})[key[0], key[1]] = strength
    card_bytes = CARD_BYTES + (1 + len(gallery.attacks)) * (gallery.example_bytes + IMAGE_BYTES)
    keys = sample_keys(strengths, limit or max(1, BYTES // card_bytes))
    return ExampleSample(keys, {round: len(of_round) for round, of_round in strengths.items()})


def sample_keys(strengths: Mapping[int, Mapping[Key, float]], limit: int) -> dict[int, dict[Key, str]]:
    """Choose examples of each round, with reasons; all if there are at most `limit`.

    Otherwise each round has its most and least leaked example, and a random sample that depends only on the round. If fewer
    than three a round fit, rounds are evenly spaced, with the round of the worst leak.
    """
    if sum(map(len, strengths.values())) <= limit:
        return {round: dict.fromkeys(keys, "") for round, keys in strengths.items()}
    worst = max(strengths, key=lambda r: np.fmax.reduce([-np.inf, *strengths[r].values()]))
    spaced = evenly(np.array(list(strengths)), max(1, limit // 3))
    spaced[np.argmin(abs(spaced - worst))] = worst
    each = max(3, limit // len(spaced))
    return {round: _sample(round, strengths[round], each) for round in sorted(spaced.tolist())}


def _sample(round: int, strengths: Mapping[Key, float], count: int) -> dict[Key, str]:
    graded = sorted((key for key, value in strengths.items() if not math.isnan(value)), key=strengths.__getitem__)
    why = {graded[0]: "leaked least", graded[-1]: "leaked most"} if graded else {}
    rest = [key for key in strengths if key not in why]
    drawn = np.random.default_rng((SEED, round)).permutation(len(rest))[: max(0, count - len(why))]
    return dict(sorted((why | {rest[i]: "at random" for i in drawn}).items()))
