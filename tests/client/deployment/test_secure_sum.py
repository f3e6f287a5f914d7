"""The secure sum: exact in the fixed-point domain, whoever drops out; what the server sees of one client is uniform."""

import itertools
import random
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chi2

from fedgauge.client.deployment.secure_sum import (
    LEVELS,
    MOST_EXAMPLES,
    SHARE,
    ClientSession,
    PairwiseMasking,
    Record,
    Refused,
    SecureSumResult,
    TooFewSurvivors,
    Vector,
    _tag,
)
from fedgauge.client.deployment.shared_secrets import (
    SECRET,
    evaluate_polynomial,
    expand_seed,
    pair_seed,
    shamir_combine,
    shamir_share,
)

FIVE = PairwiseMasking(group=5, clip=1.0, threshold=3, colluders=0)
QUESTIONS = ("advertise", "share", "mask", "confirm", "unmask")
Tamper = Callable[[str, dict[int, Record]], dict[int, Record]]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets from a seed: a statistical test that fails one time in a million fails always or never."""
    rng = random.Random(0)
    monkeypatch.setattr(secrets, "token_bytes", rng.randbytes)
    monkeypatch.setattr(secrets, "randbelow", rng.randrange)


def updates(count: int = 5, size: int = 40, seed: int = 0) -> dict[int, tuple[Vector, int]]:
    """By member 10, 11, ...: an update with entries beyond the clip, and a number of examples."""
    rng = np.random.default_rng(seed)
    return {10 + i: (rng.normal(0, 0.6, size), int(rng.integers(1, 50))) for i in range(count)}


class Group:
    """Some clients in one session: what each keeps, and everything that the server saw."""

    def __init__(self, terms: PairwiseMasking, held: Mapping[int, tuple[Vector, int]]) -> None:
        self.terms, self.held = terms, held
        self.states: dict[int, Record] = {m: {} for m in held}
        self.asked: dict[str, dict[int, Record]] = {}
        self.told: dict[str, dict[int, Record]] = {}

    def answer(self, m: int, question: Record) -> Record:
        self.states[m], answer = self.terms.answer(self.states[m], question, lambda: self.held[m])
        return answer

    def sum(
        self, lost: Mapping[str, set[int]] | None = None, tamper: Tamper = lambda step, answers: answers
    ) -> SecureSumResult:
        """The whole conversation; the answers of some members to some questions never arrive."""
        size = len(next(iter(self.held.values()))[0])
        server = self.terms.rounds(list(self.held), size)
        questions = next(server)
        try:
            for step in QUESTIONS:
                self.asked[step] = questions
                absent = (lost or {}).get(step, set())
                self.told[step] = {m: self.answer(m, q) for m, q in questions.items() if m not in absent}
                questions = server.send(tamper(step, dict(self.told[step])))
        except StopIteration as end:
            found: SecureSumResult = end.value
            return found
        raise AssertionError("the server asks for more than five things")


def plain_sum(terms: PairwiseMasking, held: Mapping[int, tuple[Vector, int]], members: Any) -> NDArray[Any]:
    """The sum of the fixed-point integers, in Python's own."""
    rows = [[int(v) for v in terms.quantise(*held[m])] for m in members]
    return np.array([sum(column) for column in zip(*rows, strict=True)], dtype=object)


def unmasked(group: Group, found: SecureSumResult) -> NDArray[Any]:
    """The integers behind a mean: the mean is so near to one level that they are told exactly."""
    levels = LEVELS
    scaled = (found.mean / group.terms.clip + 1) * levels / 2 * found.examples
    return np.append(np.array([round(v) for v in scaled], dtype=object), found.examples)


# ------------------------------------------------------------------------------------------------------- Shamir's shares


def test_shares_on_paper() -> None:
    """The worked example of Wikipedia's article on Shamir's scheme: 1234 + 166 x + 94 x^2 modulo 1613."""
    values = [evaluate_polynomial([1234, 166, 94], x) for x in range(1, 7)]
    assert [value % 1613 for value in values] == [1494, 329, 965, 176, 1188, 775]
    for chosen in itertools.combinations(range(1, 7), 3):
        assert shamir_combine({x: values[x - 1] for x in chosen}) == 1234


@given(secret=st.integers(0, 2**256 - 1), count=st.integers(1, 9), data=st.data())
@settings(max_examples=40)
def test_any_threshold_of_the_shares_gives_the_secret_and_one_fewer_does_not(
    secret: int, count: int, data: Any
) -> None:
    threshold = data.draw(st.integers(1, count))
    shares = dict(enumerate(shamir_share(secret, threshold, count), 1))
    chosen = data.draw(st.lists(st.sampled_from(sorted(shares)), min_size=threshold, unique=True))
    assert shamir_combine({x: shares[x] for x in chosen}) == secret
    if threshold > 1:
        assert shamir_combine({x: shares[x] for x in chosen[: threshold - 1]}) != secret


# ---------------------------------------------------------------------------------------------------------- masks, points


def test_masks_are_chacha20s_key_stream() -> None:
    """RFC 8439, appendix A.1, test vectors 1 and 2: a key of zeros, counters 0 and 1."""
    stream = bytes.fromhex(
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
    )
    assert expand_seed(bytes(32), 16).tobytes() == stream


def test_64_bits_hold_a_whole_groups_largest_sum() -> None:
    terms = PairwiseMasking(5, 0.5)
    largest = terms.quantise(np.array([0.5, 7.0, -0.5]), MOST_EXAMPLES)
    total = np.sum([largest] * 5, axis=0, dtype=np.uint64)
    assert [int(v) for v in total] == [5 * MOST_EXAMPLES * LEVELS] * 2 + [0, 5 * MOST_EXAMPLES]
    mean, examples = terms.mean(total)
    assert mean == pytest.approx([0.5, 0.5, -0.5], abs=1e-15)
    assert examples == 5 * MOST_EXAMPLES


@given(x=st.floats(-0.3, 0.3), examples=st.integers(1, 100))
@settings(max_examples=200)
def test_fixed_point_is_as_near_as_it_says_and_keeps_zero(x: float, examples: int) -> None:
    terms = PairwiseMasking(2, 0.3)
    mean, counted = terms.mean(terms.quantise(np.array([x, 0.0]), examples))
    assert abs(mean[0] - x) <= 0.3 / LEVELS + 1e-15
    assert (mean[1], counted) == (0.0, examples)


@pytest.mark.parametrize(("update", "examples"), [(np.nan, 1), (np.inf, 1), (0.0, 0), (0.0, 2**21)])
def test_values_without_a_fixed_point_form_are_refused(update: float, examples: int) -> None:
    with pytest.raises(ValueError, match="examples|finite"):
        FIVE.quantise(np.array([update]), examples)


@pytest.mark.parametrize(
    ("terms", "name"),
    [
        ({"group": 1}, "group"),
        ({"group": 4, "threshold": 2}, "threshold"),
        ({"group": 4, "threshold": 5}, "threshold"),
        ({"threshold": 3}, "threshold = 4"),
        ({"threshold": 4, "colluders": 3}, "threshold = 5"),
        ({"colluders": 4}, "colluders"),
        ({"colluders": -1}, "colluders"),
        ({"clip": 0.0}, "clip"),
        ({"group": 2**20 + 1}, "group"),
    ],
)
def test_impossible_terms_are_refused(terms: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        PairwiseMasking(**{"group": 5, "clip": 1.0, **terms})


# ------------------------------------------------------------------------------------------------------------- the sum


def test_the_sum_is_the_plain_sum_of_the_integers() -> None:
    held = updates()
    group = Group(FIVE, held)
    found = group.sum()
    assert found.members == (10, 11, 12, 13, 14)
    assert (unmasked(group, found) == plain_sum(FIVE, held, held)).all()
    weights = np.array([n for _, n in held.values()])
    clipped = np.clip([u for u, _ in held.values()], -FIVE.clip, FIVE.clip)
    assert found.mean == pytest.approx(weights @ clipped / weights.sum(), abs=FIVE.clip / LEVELS)


@given(count=st.integers(2, 6), size=st.integers(0, 5), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=40)
def test_clients_that_drop_out_wherever_it_is_exact_or_refused(count: int, size: int, seed: int, data: Any) -> None:
    held = updates(count, size, seed)
    terms = PairwiseMasking(count, 0.4, count // 2 + 1, colluders=0)
    lost = {step: data.draw(st.sets(st.sampled_from(sorted(held)), max_size=2)) for step in QUESTIONS}
    group = Group(terms, held)
    early = lost["advertise"] | lost["share"] | lost["mask"]
    if len(held.keys() - early - lost["confirm"] - lost["unmask"]) < terms.least:
        with pytest.raises(TooFewSurvivors):
            group.sum(lost)
        return
    found = group.sum(lost)
    assert (unmasked(group, found) == plain_sum(terms, held, sorted(held.keys() - early))).all()


# -------------------------------------------------------------------------------------------------- what the server sees


def p_value(values: NDArray[Any], shift: int) -> float:
    """Of a chi-squared test that eight bits of each integer are uniform."""
    counts = np.bincount(
        ((values >> values.dtype.type(shift)) & values.dtype.type(255)).astype(np.int64), minlength=256
    )
    expected = len(values) / 256
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), 255))


def uniform(values: NDArray[Any]) -> bool:
    """In every byte of the ring."""
    return all(p_value(values, shift) > 1e-6 for shift in range(0, 8 * values.dtype.itemsize, 8))


LONG = {m: (np.full(30_000, v), 7) for m, v in zip(range(10, 15), (0.0, 0.9, -1.0, 0.1, 0.3), strict=True)}


def test_a_single_clients_vector_is_uniform_to_the_server(drawn: None) -> None:
    """The same entry 30,000 times: nothing could be less uniform before it is masked."""
    group = Group(FIVE, LONG)
    found = group.sum()
    for m in LONG:
        masked = np.asarray(group.told["mask"][m]["masked"])
        assert not uniform(FIVE.quantise(*LONG[m])), "the test sees nothing"
        assert uniform(masked), m
        assert uniform(masked[1:] - masked[:-1]), "one mask for every entry"
    for a, b in itertools.combinations(LONG, 2):
        pair = np.asarray(group.told["mask"][a]["masked"]) + np.asarray(group.told["mask"][b]["masked"])
        assert uniform(pair), (a, b)
    assert not uniform((np.round(found.mean * 1e6) + 2**20).astype(np.uint64)), "and the sum is none"


def test_with_all_that_it_learns_a_survivor_stays_under_its_pairs_masks(drawn: None) -> None:
    """Its own mask is known after the sum: what is left is uniform still, up to the sum of all, which is none of one."""
    group = Group(FIVE, LONG)
    group.sum()
    shares = {i: list(a["values"]) for i, a in enumerate(group.told["unmask"].values(), 1)}  # type: ignore[arg-type]
    for n, m in enumerate(LONG, 1):
        seed = shamir_combine({i: int.from_bytes(s[n - 1]) for i, s in shares.items()}).to_bytes(SECRET)
        left = np.asarray(group.told["mask"][m]["masked"]) - expand_seed(seed, 30_001)
        assert uniform(left), m


def test_every_session_has_masks_of_its_own() -> None:
    group = Group(FIVE, LONG)
    group.sum()
    first = np.asarray(group.told["mask"][10]["masked"])
    group.sum()
    assert len(np.unique(first - np.asarray(group.told["mask"][10]["masked"]))) > 29_000


# ------------------------------------------------------------------------------------------------------- one of two secrets


def asked_to_confirm() -> tuple[Group, Record]:
    """Everybody has masked; nobody has been asked who is left. The fifth has dropped out."""
    group = Group(FIVE, updates(size=2))
    server = FIVE.rounds(list(group.held), 2)
    questions = next(server)
    for step in QUESTIONS[:3]:
        told = {m: group.answer(m, q) for m, q in questions.items()}
        if step == "mask":
            del told[14]
        questions = server.send(told)
    assert (questions[10]["survivors"], questions[10]["dropped"]) == ([1, 2, 3, 4], [5])
    return group, questions[10]


@pytest.mark.parametrize(
    ("survivors", "dropped"),
    [
        ([1, 2, 3, 4], [4, 5]),
        ([1, 2, 3], [5]),
        ([1, 2, 3, 4], [5, 6]),
        ([1, 2, 3, 3, 4], [5]),
        ([2, 3, 4], [1, 5]),
        ([1, 2], [3, 4, 5]),
    ],
)
def test_a_client_confirms_once_and_not_what_would_give_a_secret_away(survivors: list[int], dropped: list[int]) -> None:
    group, question = asked_to_confirm()
    with pytest.raises(Refused):
        group.answer(10, {**question, "survivors": survivors, "dropped": dropped})
    assert group.answer(10, question)["members"] == [2, 3, 4], "the honest question is answered still"
    for again in (question, {**question, "survivors": [1, 2, 3, 4, 5], "dropped": []}):
        with pytest.raises(Refused):
            group.answer(10, again)


@pytest.mark.parametrize("spoil", ["nobody", "changed", "another's", "of another list", "its own"])
def test_a_client_unmasks_only_what_as_many_as_the_threshold_confirm_to_it(spoil: str) -> None:
    """Three of five are needed, itself included: with one tag from another client it says nothing."""
    group, question = asked_to_confirm()
    told = {n: group.answer(9 + n, question) for n in (1, 2, 3)}
    tags = {n: dict(zip(told[n]["members"], told[n]["values"], strict=True)) for n in told}  # type: ignore[arg-type]
    base: Record = {"session": question["session"], "step": "unmask", "terms": question["terms"]}
    every: Record = {**question, "survivors": [1, 2, 3, 4, 5], "dropped": []}
    third = {
        "nobody": {},
        "changed": {3: bytes(SECRET)},
        "another's": {4: tags[3][1]},
        "of another list": {4: group.answer(13, every)["values"][0]},  # type: ignore[index]
        "its own": {1: tags[1][3]},
    }[spoil]
    with pytest.raises(TooFewSurvivors):
        group.answer(10, {**base, "members": [2, *third], "values": [tags[2][1], *third.values()]})
    honest = group.answer(10, {**base, "members": [2, 3, 4], "values": [tags[2][1], tags[3][1], b"a lie"]})
    assert honest["members"] == [1, 2, 3, 4, 5], "two others agree, and a third that lies stops nobody"


def learned(
    terms: PairwiseMasking, helpers: int, senders: Mapping[int, set[int]], survivors: Mapping[int, set[int]]
) -> list[set[int]]:
    """The sets of clients whose sum a lying server finds, in a full group whose last clients help it; real messages throughout.

    Args:
        senders: by client, who the server says has sent shares; all others are told of everybody.
        survivors: by client, who the server says has sent a vector; who is not named is not asked.
    """
    count, group = terms.group, Group(terms, updates(terms.group, size=4))
    numbers, honest = range(1, count + 1), range(1, count - helpers + 1)
    heard = {n: senders.get(n, {*numbers}) for n in numbers}
    server = terms.rounds(list(group.held), 4)
    asked = next(server)
    for _ in range(2):
        asked = server.send({m: group.answer(m, q) for m, q in asked.items()})
    masked: dict[int, NDArray[Any]] = {}
    for n in numbers:
        sealed = dict(zip(asked[9 + n]["members"], asked[9 + n]["values"], strict=True))  # type: ignore[arg-type]
        told = sorted(heard[n] - {n})
        answer = group.answer(9 + n, {**asked[9 + n], "members": told, "values": [sealed[s] for s in told]})
        masked[n] = np.asarray(answer["masked"])
    sessions = {n: ClientSession.kept(group.states[9 + n]) for n in numbers}
    kept = {n: session for n, session in sessions.items() if session is not None}
    base: Record = {"session": kept[1].session, "terms": terms.terms}
    tags: dict[int, dict[int, bytes]] = {}
    for n, left in survivors.items():
        question: Record = {**base, "step": "confirm", "survivors": sorted(left), "dropped": sorted(heard[n] - left)}
        try:
            answer = group.answer(9 + n, question)
        except TooFewSurvivors:
            continue
        tags[n] = dict(zip(answer["members"], answer["values"], strict=True))  # type: ignore[arg-type]
    shares: dict[tuple[str, int], dict[int, int]] = {}
    for n in set(numbers) - set(honest):  # what the server's helpers hold
        for owner, both in zip(kept[n].senders, kept[n].shares, strict=True):
            shares.setdefault(("seed", owner), {})[n] = int.from_bytes(both[:SHARE])
            shares.setdefault(("key", owner), {})[n] = int.from_bytes(both[SHARE:])
    for n, left in ((n, survivors[n]) for n in tags):
        lists = {"survivors": tuple(sorted(left)), "dropped": tuple(sorted(heard[n] - left))}
        passed = {s: tags[s][n] for s in tags if n in tags[s]}
        passed |= {h: _tag(replace(kept[h], **lists), n, sends=True) for h in set(numbers) - set(honest)}
        try:
            answer = group.answer(9 + n, {**base, "step": "unmask", "members": [*passed], "values": [*passed.values()]})
        except TooFewSurvivors:
            continue
        for owner, share in zip(answer["members"], answer["values"], strict=True):  # type: ignore[arg-type]
            shares.setdefault(("seed" if owner in left else "key", owner), {})[n] = int.from_bytes(share)
    found = {
        which: shamir_combine(dict(sorted(held.items())[: terms.least])).to_bytes(SECRET)
        for which, held in shares.items()
        if len(held) >= terms.least
    }
    keys = {n: found["key", n] for n in honest if ("key", n) in found}
    keys |= {n: kept[n].mask_key for n in set(numbers) - set(honest)}
    bare, hidden = {}, {n: {s for s in heard[n] - {n} if not {n, s} & keys.keys()} for n in honest}
    for n in (n for n in honest if ("seed", n) in found):
        bare[n] = masked[n] - expand_seed(found["seed", n], 5)
        for s in heard[n] - {n} - hidden[n]:
            one, other = (n, s) if n in keys else (s, n)
            mask = expand_seed(pair_seed(keys[one], kept[one].keys[2 * other - 1], kept[1].session), 5)
            bare[n] = bare[n] - mask if n < s else bare[n] + mask
    sums = []
    for n in bare:
        together = {n}
        while more := {s for m in together for s in hidden[m]} - together:
            together |= more
        if min(together) != n or not all(m in bare and m in hidden[s] for m in together for s in hidden[m]):
            continue
        total = np.sum([bare[m] for m in together], axis=0, dtype=np.uint64)
        plain = plain_sum(terms, group.held, [9 + m for m in together])
        assert total.tolist() == plain.tolist(), "the server takes off the masks of other clients than it knows"
        sums.append(together)
    return sums


def two_stories(terms: PairwiseMasking, helpers: int) -> list[set[int]]:
    """What the server learns if it tells as many as it needs that client 1 dropped out, and the others that all are there."""
    everyone, lied = {*range(1, terms.group + 1)}, range(2, terms.least - helpers + 2)
    honest = range(1, terms.group - helpers + 1)
    return learned(terms, helpers, {}, {n: everyone - {1} if n in lied else everyone for n in honest})


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_server_with_any_lie_learns_sums_of_as_many_as_it_should(data: Any) -> None:
    """At most one sum, of at least t - c clients that do not help it; it chooses who is told of whom."""
    count = data.draw(st.integers(3, 6))
    least = data.draw(st.integers(count // 2 + 1, count))
    terms = PairwiseMasking(count, 1.0, least, colluders=0)
    if terms.tolerance.lying < 0:
        return
    helpers = data.draw(st.integers(0, terms.tolerance.lying))
    everyone, honest = {*range(1, count + 1)}, range(1, count - helpers + 1)

    some = st.just(everyone) | st.sets(st.sampled_from(sorted(everyone)), min_size=least)
    lists, stories = [everyone, data.draw(some)], [data.draw(some), data.draw(some)]
    shown = {n: data.draw(st.sampled_from(lists)) | {n} for n in honest}
    left = {n: data.draw(st.sampled_from(stories)) & shown[n] for n in honest}
    found = learned(terms, helpers, shown, {n: those for n, those in left.items() if n in those})
    assert len(found) <= 1 and all(len(together) >= least - helpers for together in found)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7])
def test_the_tolerance_is_exact(count: int) -> None:
    """One helper more than it says, and the attack succeeds; with all but two of the group there is nobody left to hide."""
    for least in range(count // 2 + 1, count + 1):
        terms = PairwiseMasking(count, 1.0, least, colluders=0)
        lying = terms.tolerance.lying
        for helpers in {0, lying, min(lying + 1, count - 2)}:
            assert ({1} not in two_stories(terms, helpers)) == (helpers <= lying), (count, least, helpers)


def test_a_server_that_follows_the_protocol_gets_one_update_only_with_all_others_of_a_smallest_sum() -> None:
    terms = PairwiseMasking(5, 1.0, 4)
    group = Group(terms, updates())
    found = group.sum(lost={"mask": {11}})
    helpers = [12, 13, 14]
    assert len(helpers) == terms.tolerance.curious + 1
    own = plain_sum(terms, group.held, helpers)
    assert (unmasked(group, found) - own).tolist() == [int(v) for v in terms.quantise(*group.held[10])]


def test_the_default_resists_all_colluders_below_a_third() -> None:
    """Bonawitz et al., 2017, section 6.2: t > 2n / 3 with fewer than n / 3 corrupt clients."""
    for count in range(2, 60):
        resisted = PairwiseMasking(count, 1.0).tolerance
        below = max(c for c in range(count) if 3 * c < count)
        assert resisted.lying >= below
        assert 2 * resisted.threshold > count + resisted.lying and resisted.lying <= resisted.curious


def test_what_a_session_needed_is_forgotten_with_it() -> None:
    group = Group(FIVE, updates(size=2))
    group.sum()
    for state in group.states.values():
        kept = b"".join(v for v in state.values() if isinstance(v, bytes))
        assert kept == state["session"]
        assert [v for v in state.values() if isinstance(v, list) and v] == []


@pytest.mark.parametrize("after", QUESTIONS)
@pytest.mark.parametrize("step", QUESTIONS[1:])
def test_no_question_is_answered_twice_or_out_of_turn(step: str, after: str) -> None:
    """A second vector under the same masks would give the difference of two updates away."""
    if (after, step) in itertools.pairwise(QUESTIONS):
        return
    group = Group(FIVE, updates(size=2))
    server = FIVE.rounds(list(group.held), 2)
    asked = {}
    questions = next(server)
    for now in QUESTIONS:
        asked[now] = questions
        told = {m: group.answer(m, q) for m, q in questions.items()}
        if now == after:
            break
        questions = server.send(told)
    question = asked[step][10] if step in asked else {**questions[10], "step": step}
    with pytest.raises(Refused):
        group.answer(10, question)


def test_questions_of_another_session_or_of_other_terms_are_refused() -> None:
    group, question = asked_to_confirm()
    weaker = repr(PairwiseMasking(5, 2.0, 3, colluders=0))
    for changed in ({"session": b"another"}, {"terms": weaker}):
        with pytest.raises(Refused):
            group.answer(10, {**question, **changed})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda keys: keys[:4],
        lambda keys: [*keys, *[bytes([i]) * 32 for i in (1, 2)]],
        lambda keys: keys[:-1],
        lambda keys: [*keys[:8], *keys[6:8]],
        lambda keys: keys[2:],
        lambda keys: [keys[0], bytes(32), *keys[2:]],
        lambda keys: [keys[1], keys[0], *keys[2:]],
    ],
    ids=["few", "many", "odd", "twice", "without me", "another of me", "turned round"],
)
def test_a_client_checks_the_keys_that_it_is_handed(spoil: Callable[[list[bytes]], list[bytes]]) -> None:
    group = Group(FIVE, updates(size=2))
    server = FIVE.rounds(list(group.held), 2)
    questions = next(server)
    question = server.send({m: group.answer(m, q) for m, q in questions.items()})[10]
    with pytest.raises(Refused):
        group.answer(10, {**question, "keys": spoil(list(question["keys"]))})  # type: ignore[arg-type]


def test_a_client_trains_for_no_sum_of_few_and_not_with_shares_that_were_tampered_with() -> None:
    group = Group(FIVE, updates(size=2))
    server = FIVE.rounds(list(group.held), 2)
    questions = next(server)
    for _ in range(2):
        questions = server.send({m: group.answer(m, q) for m, q in questions.items()})
    question = questions[10]
    sealed: list[bytes] = list(question["values"])  # type: ignore[arg-type]
    for changes in (
        {"members": [2], "values": sealed[:1]},
        {"members": [1, 2, 3, 4]},
        {"members": [2, 3, 4, 6]},
        {"values": [bytes([sealed[0][0] ^ 1]) + sealed[0][1:], *sealed[1:]]},
        {"values": [sealed[1], sealed[0], *sealed[2:]]},
    ):
        with pytest.raises(Refused):
            FIVE.answer(group.states[10], {**question, **changes}, lambda: pytest.fail("trained"))  # type: ignore[dict-item]
    assert "masked" in group.answer(10, question)


# ----------------------------------------------------------------------------------------------------- malformed answers


@pytest.mark.parametrize(
    ("step", "answer"),
    [
        ("advertise", {}),
        ("advertise", {"keys": [b"short", b"short"]}),
        ("advertise", {"keys": 7}),
        ("advertise", {"keys": [bytes([9]).ljust(32, b"\0")] * 2}),
        ("advertise", {"keys": [bytes(32), bytes([9]).ljust(32, b"\0")]}),
        ("share", {"members": np.array([1, 2, 4, 5]), "values": [bytes(2 * SHARE + 16)] * 4}),
        ("confirm", {"members": [1, 2, 4, 5], "values": [bytes(SECRET)] * 3}),
        ("confirm", {"members": [1, 2, 4, 5], "values": [bytes(SECRET)] * 4}),
        ("share", {"members": [1, 2, 4, 5], "values": [b""] * 4}),
        ("share", {"members": [1, 2, 3, 4], "values": [bytes(2 * SHARE + 16)] * 4}),
        ("mask", {"masked": np.zeros(3, "<u4")}),
        ("mask", {"masked": np.zeros(2, "<u8")}),
        ("mask", {"masked": [1, 2, 3]}),
        ("unmask", {"members": [1, 2, 3, 5, 4], "values": [bytes(SHARE)] * 5}),
    ],
)
def test_an_answer_that_is_none_is_as_one_that_did_not_come(step: str, answer: Record) -> None:
    held = updates(size=2)
    group = Group(FIVE, held)

    def spoil(now: str, answers: dict[int, Record]) -> dict[int, Record]:
        return {**answers, 12: answer} if now == step else answers

    found = group.sum(tamper=spoil)
    inside = [m for m in held if m != 12 or step in ("confirm", "unmask")]
    assert (unmasked(group, found) == plain_sum(FIVE, held, inside)).all()


@pytest.mark.parametrize("far", [2**31, 2**30, -(2**29), None])
def test_no_vector_moves_a_mean_beyond_the_clip_and_wrong_shares_spoil_no_sum_unnoticed(far: int | None) -> None:
    """One entry of one client's masked vector, changed: the mean's would be billions of times the clip."""

    def spoil(now: str, answers: dict[int, Record]) -> dict[int, Record]:
        if now == "mask" and far is not None:
            masked = cast(NDArray[Any], answers[12]["masked"]).copy()
            masked[:1] += np.uint64(far * 2**32 % 2**64)
            answers[12] = {"masked": masked}
        if now == "unmask" and far is None:
            answers[10] = {**answers[10], "values": [bytes(SHARE)] * 5}
        return answers

    with pytest.raises(ValueError, match="secret" if far is None else "lied"):
        Group(FIVE, updates(size=2)).sum(tamper=spoil)
