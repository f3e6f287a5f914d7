"""The comparison of the local training over all attacked rounds: one sentence for the cards, and one result for the verdict.

A first update that fits says nothing of the later ones: a schedule changes the rate, a client keeps a layer from its last
round, noise is drawn in some rounds. So a run fits only if each compared update does.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace

from fedgauge.attacks.grading.rate_and_steps import RateTimesSteps
from fedgauge.attacks.grading.training_evidence import WARNING, TrainingEvidence

Found = Mapping[tuple[int, int], TrainingEvidence]  # by (round, client)

WORST_FIRST = (False, None, True)


def over_rounds(found: Found) -> TrainingEvidence:
    """Return the worst result, and how many of the compared updates have it.

    Args:
        found: at least one update's.
    """
    found = _with_changed_rates(found)
    key = min(found, key=lambda key: (WORST_FIRST.index(found[key].fits), key))
    worst = found[key]
    if len(found) == 1:
        return worst
    alike = sum(evidence.fits is worst.fits for evidence in found.values())
    return replace(
        worst,
        words=f"{worst.words} (client {key[1]}, round {key[0]}, as the first of {alike} updates of {len(found)} compared)",
    )


def _with_changed_rates(found: Found) -> Found:
    """The results, where a client's rate in a later round is not that of its first: then the chain's cannot be both."""
    first: dict[int, tuple[int, RateTimesSteps]] = {}
    changed = dict(found)
    for (round, client), evidence in sorted(found.items()):
        if (now := evidence.rates) is None:
            continue
        since, then = first.setdefault(client, (round, now))
        if now.high < then.low or now.low > then.high:
            words = (
                f"{WARNING}: the sum of the steps' rates was {then.words} in round {since} and is {now.words}, and the chain "
                "assumes one for all rounds: attack the rounds that have it (audit --attack ... --rounds)"
            )
            changed[round, client] = replace(evidence, fits=False, words=words)
    return changed


def to_json(found: Found) -> str:
    """Return the results as JSON."""
    return json.dumps([[*key, asdict(evidence)] for key, evidence in sorted(found.items())])


def from_json(text: str) -> dict[tuple[int, int], TrainingEvidence]:
    """Read the results again."""
    rows: Iterable[tuple[int, int, dict[str, object]]] = json.loads(text)
    return {(round, client): _evidence(**fields) for round, client, fields in rows}  # type: ignore[arg-type]  # from JSON


def _evidence(rates: Mapping[str, float] | None, **fields: object) -> TrainingEvidence:
    return TrainingEvidence(**fields, rates=RateTimesSteps(**rates) if rates else None)  # type: ignore[arg-type]
