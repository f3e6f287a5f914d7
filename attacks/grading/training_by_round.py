"""The comparison of the local training over all attacked rounds: one sentence for the cards, and one result for the verdict.

A first update that fits says nothing of the later ones: a schedule changes the rate, a client keeps a layer from its last
round, noise is drawn in some rounds. So a run fits only if each compared update does.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace

from fedgauge.attacks.grading.rate_and_steps import RateTimesSteps
from fedgauge.attacks.grading.training_evidence import WARNING, TrainingEvidence

Found = Mapping[tuple[int, int], TrainingEvidence]  # by (round, client)

SAYS = {True: "fits in", False: "does not fit", None: "undecided in"}
WORST_FIRST = (False, None, True)


def over_rounds(found: Found) -> TrainingEvidence:
    """Return the worst result, with the rounds and clients to which each result applies.

    Args:
        found: at least one update's.
    """
    found = _with_changed_rates(found)
    key = min(found, key=lambda key: (WORST_FIRST.index(found[key].fits), key))
    worst = found[key]
    if len(found) == 1:
        return worst
    by_client = defaultdict[int, dict[int, bool | None]](dict)
    for (round, client), evidence in sorted(found.items()):
        by_client[client][round] = evidence.fits
    alike = defaultdict[str, list[int]](list)
    for client, fits in by_client.items():
        alike[_rounds_of(fits)].append(client)
    compared = "; ".join(
        f"client{'s' * (len(clients) > 1)} {_listed(clients)}: {text}" for text, clients in alike.items()
    )
    return replace(worst, words=f"{worst.words} (client {key[1]}, round {key[0]}). Compared: {compared}")


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
                f"the sum of the steps' rates was {then.words} in round {since} and is {now.words}, and the chain assumes one "
                "for all rounds: attack the rounds that have it (audit --attack ... --rounds)"
            )
            whole = f"{evidence.words}; {words}" if evidence.fits is False else f"{WARNING}: {words}"
            changed[round, client] = replace(evidence, fits=False, words=whole)
    return changed


def _rounds_of(fits: Mapping[int, bool | None]) -> str:
    parts, every = [], list(fits)
    for result in reversed(WORST_FIRST):
        rounds = [round for round, value in fits.items() if value is result]
        if not rounds:
            continue
        onward = result is False and rounds == every[-len(rounds) :] and len(rounds) < len(every)
        where = f"from round {rounds[0]} on" if onward else f"round{'s' * (len(rounds) > 1)} {_listed(rounds)}"
        parts.append(f"{SAYS[result]} {'' if onward or result is not False else 'in '}{where}")
    return ", ".join(parts)


def _listed(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 2 and last - first == len(numbers) - 1:
        return f"{first} to {last}"
    return " and ".join(filter(None, (", ".join(map(str, numbers[:-1])), str(last))))


def to_json(found: Found) -> str:
    """Return the results as JSON."""
    return json.dumps([[*key, asdict(evidence)] for key, evidence in sorted(found.items())])


def from_json(text: str) -> dict[tuple[int, int], TrainingEvidence]:
    """Read the results again."""
    rows: Iterable[tuple[int, int, dict[str, object]]] = json.loads(text)
    return {(round, client): _evidence(**fields) for round, client, fields in rows}  # type: ignore[arg-type]  # from JSON


def _evidence(rates: Mapping[str, float] | None, **fields: object) -> TrainingEvidence:
    return TrainingEvidence(**fields, rates=RateTimesSteps(**rates) if rates else None)  # type: ignore[arg-type]
