"""Which pictures a file shows: all where they are few, else a choice that says what it is."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedgauge.server.views.gallery import Card, Gallery

BYTES = 1_000_000  # of cards with their pictures; a quickstart's are shown whole, and a report stays below 6 MB
CARD_BYTES = 900  # of one card beside its pictures, about
IMAGE_BYTES = 350  # of one picture beside its pixels, about
SEED = 0  # of the random sample

Key = tuple[int, int]  # (client, example)


@dataclass(frozen=True)
class ExampleSample:
    """Which examples of which rounds are shown, and why each; attacked: how many examples each attacked round has."""

    keys: Mapping[int, Mapping[Key, str]]
    attacked: Mapping[int, int]

    @property
    def shown(self) -> int:
        """Examples that are shown."""
        return sum(map(len, self.keys.values()))

    @property
    def examples(self) -> int:
        """Examples that were attacked in the rounds that are shown."""
        return sum(self.attacked[round] for round in self.keys)

    @property
    def whole(self) -> bool:
        """Whether nothing is left out."""
        return self.shown == sum(self.attacked.values())

    def cards(self, gallery: Gallery) -> dict[int, list[Card]]:
        """The chosen cards by round."""
        return {
            round: [gallery.card(round, client, example, why) for (client, example), why in keys.items()]
            for round, keys in self.keys.items()
        }


def sample_examples(gallery: Gallery, room: int | None = None) -> ExampleSample:
    """Which examples of a gallery to show: about `room` of them, or as many as BYTES hold."""
    strengths: dict[int, dict[Key, float]] = {}
    attacked = gallery.attacked()
    for (round, client, example), strength in zip(attacked, attacked.strength.tolist(), strict=True):
        strengths.setdefault(round, {})[client, example] = strength
    keys = sample_keys(strengths, room or max(1, BYTES // _card_bytes(gallery)))
    return ExampleSample(keys, {round: len(found) for round, found in strengths.items()})


def _card_bytes(gallery: Gallery) -> int:
    return CARD_BYTES + (1 + len(gallery.attacks)) * (gallery.picture_bytes + IMAGE_BYTES)


def sample_keys(strengths: Mapping[int, Mapping[Key, float]], room: int) -> dict[int, dict[Key, str]]:
    """Which examples of which rounds to show, and why: all where there is room for them.

    Else, of each round, the example that leaked most, the one that hid best, and a random sample that depends on nothing
    but the round; where there is no room even for three a round, of rounds evenly spaced, with the one of the worst leak.
    """
    if sum(map(len, strengths.values())) <= room:
        return {round: dict.fromkeys(keys, "") for round, keys in strengths.items()}
    rounds = _spaced(list(strengths), max(1, room // 3), _worst_round(strengths))
    each = max(3, room // len(rounds))
    return {round: _sample(round, strengths[round], each) for round in rounds}


def _worst_round(strengths: Mapping[int, Mapping[Key, float]]) -> int:
    return max(strengths, key=lambda r: np.fmax.reduce([-np.inf, *strengths[r].values()]))


def _spaced(rounds: list[int], count: int, always: int) -> list[int]:
    if len(rounds) <= count:
        return rounds
    places = np.linspace(0, len(rounds) - 1, count).round().astype(int)
    kept = {rounds[i] for i in places}
    if always not in kept:
        nearest = min(kept, key=lambda r: abs(r - always))
        kept = kept - {nearest} | {always}
    return sorted(kept)


def _sample(round: int, strengths: Mapping[Key, float], count: int) -> dict[Key, str]:
    graded = {key: value for key, value in strengths.items() if not math.isnan(value)}
    why = {}
    if graded:
        why[min(graded, key=lambda k: graded[k])] = "hid best"
        why[max(graded, key=lambda k: graded[k])] = "leaked most"
    rest = [key for key in strengths if key not in why]
    drawn = np.random.default_rng((SEED, round)).permutation(len(rest))[: max(0, count - len(why))]
    why |= {rest[i]: "at random" for i in drawn}
    return dict(sorted(why.items()))
