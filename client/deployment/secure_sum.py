"""Secure sum: the server learns the sum of a group's updates, and nothing of a single one (Bonawitz et al., CCS 2017).

Each pair of clients agrees on a mask that one adds and the other subtracts, so these masks cancel in the sum. Each client also
adds its own mask. Every client's two secrets, the seed of its own mask and the key of its pairs' masks, are shared among the
group (Shamir, 1979). If a client's vector arrived, the others send the server their shares of its seed; if it dropped out,
their shares of its key; never both, so a vector that arrives late stays masked.

Clients confirm their lists of survivors and dropouts to each other before they hand out shares. docs/secure-sum.md says which
servers this resists, and client/collusion.py why.
"""

import hashlib
import hmac
import secrets
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from fedgauge.client.collusion import Tolerance, check_threshold, tolerance
from fedgauge.client.components import Checked, Positive, Range
from fedgauge.client.deployment.shared_secrets import (
    SECRET,
    agreed,
    expand_seed,
    pair_seed,
    public_key,
    shamir_combine,
    shamir_share,
)

STEPS = ("advertise", "share", "mask", "confirm", "unmask")  # of a session, in their order
SHARE = 66  # bytes of a number below the prime
SEALED = 2 * SHARE + 16  # bytes of two encrypted shares
NONCE = bytes(12)  # every key encrypts one message
LEVELS = 2**24 - 2  # the highest level of fixed point, counted from 0
MOST_EXAMPLES = 2**20  # of one client; a client with more drops out
MOST_CLIENTS = (2**64 - 1) // (MOST_EXAMPLES * LEVELS)  # in a sum of 64 bits

Parsed = TypeVar("Parsed")
Integers = NDArray[np.uint64]
Vector = NDArray[np.float64]
Value = int | str | bytes | list[int] | list[bytes] | NDArray[Any]
Record = dict[str, Value]  # a message, or what a client keeps
Train = Callable[[], tuple[Vector, int]]  # -> a finished update, flat, and the number of its examples


class Refused(ValueError):
    """A client refuses a question that breaks the protocol or would reveal a secret."""


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise Refused(reason)


class TooFewSurvivors(Refused):
    """Fewer clients are left than the threshold: there is no sum."""


@dataclass(frozen=True, eq=False)
class SecureSumResult:
    """Result for the server."""

    mean: Vector  # (size,), of the updates, weighted by examples, in the precision of the fixed-point form
    examples: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class ClientSession:
    """A client's state during a session: its secrets, and the last question that it answered."""

    session: bytes
    step: str
    cipher_key: bytes
    mask_key: bytes
    seed: bytes = b""
    number: int = 0
    keys: tuple[bytes, ...] = ()  # all clients', by number: for shares, for masks, for shares ...
    senders: tuple[int, ...] = ()
    shares: tuple[bytes, ...] = ()  # of each sender's seed and key, together
    context: bytes = b""  # digest of terms, session and keys: shares and tags from clients with other ones do not fit
    survivors: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()

    @classmethod
    def kept(cls, state: Mapping[str, Value]) -> "ClientSession | None":
        """From the result of `to_record`; None if nothing is kept."""
        lists = {k: tuple(v) for k, v in state.items() if isinstance(v, list)}
        return cls(**{**cast(dict[str, Any], state), **lists}) if state else None

    def to_record(self) -> Record:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


@dataclass(frozen=True)
class PairwiseMasking(Checked):
    """The protocol, with the terms that all parties agree on beforehand: a client accepts no other terms from a server.

    An update's entries are clipped to [-clip, clip] and rounded to evenly spaced levels with zero among them, which moves an
    entry inside that range by at most clip / LEVELS; a level times the client's number of examples is summed modulo 2^64.

    Args:
        group: the most clients in one sum, >= 2.
        clip: above 0, in units of the update.
        threshold: the fewest clients in a sum. With t of n, a server that gives clients different lists of dropouts still learns
            only one sum, of t clients or more, if at most 2t - n - 1 clients help it. Default: more than two thirds, which
            fewer than a third of the group cannot break. No threshold helps against a server that forges clients' keys.
        colluders: helpers of a malicious server that the threshold must resist; default: all below a third.

    Example:
        >>> PairwiseMasking(group=5, clip=0.1).tolerance.dropouts
        1
    """

    group: Annotated[int, Range(f"from 2 to {MOST_CLIENTS}", lambda n: 2 <= n <= MOST_CLIENTS)]
    clip: Positive
    threshold: int | None = None
    colluders: int | None = field(default=None, repr=False)  # a party's own demand: the other need not share it

    def __post_init__(self) -> None:
        super().__post_init__()
        check_threshold(self.group, self.least, self.colluders)

    @property
    def least(self) -> int:
        return 2 * self.group // 3 + 1 if self.threshold is None else self.threshold

    @property
    def terms(self) -> str:
        """The settings that both sides must share, as comparable text."""
        return repr(replace(self, threshold=self.least))

    @property
    def tolerance(self) -> Tolerance:
        """Numbers of clients that may collude with the server, or drop out."""
        return tolerance(self.group, self.least)

    def quantise(self, update: Vector, examples: int) -> Integers:
        """An update (size,) as integers (size + 1,), times its number of examples, which is the last entry.

        Raises:
            ValueError: an entry is not finite, or there are too many examples.
        """
        if not 1 <= examples <= MOST_EXAMPLES:
            raise ValueError(f"the number of examples must be in 1..{MOST_EXAMPLES}, got {examples}")
        if not np.isfinite(update).all():
            raise ValueError("the update has entries that are not finite")
        levels = np.rint((np.clip(update, -self.clip, self.clip) / self.clip + 1) * (LEVELS / 2))
        return np.append(levels, 1).astype(np.uint64) * np.uint64(examples)

    def mean(self, total: Integers) -> tuple[Vector, int]:
        """The mean update (size,) and the number of examples, from a sum of such integers."""
        examples = int(total[-1])
        return self.clip * (total[:-1] / examples * (2 / LEVELS) - 1), examples

    def check(self, question: Mapping[str, Value]) -> None:
        """Check that the question is a step under these terms.

        Raises:
            Refused: it is not.
        """
        terms, step = question.get("terms"), question.get("step")
        _require(terms == self.terms, f"the server's terms are {terms!r:.200}, this client's are {self.terms!r}")
        _require(step in STEPS, f"asked to {step!r:.60}, expected one of {', '.join(STEPS)}")

    def answer(self, state: Mapping[str, Value], question: Mapping[str, Value], train: Train) -> tuple[Record, Record]:
        """The client's side: its new state, and its answer.

        Args:
            state: its last state, {} at first.
            train: called once a session, when the vector is masked.

        Raises:
            ValueError: the protocol does not ask this question now, or an answer would reveal a secret.
        """
        self.check(question)
        step, session = cast(str, question["step"]), cast(bytes, question["session"])
        if step == "advertise":  # an earlier session is deleted
            fresh = ClientSession(session, step, secrets.token_bytes(SECRET), secrets.token_bytes(SECRET))
            return fresh.to_record(), {"keys": [public_key(fresh.cipher_key), public_key(fresh.mask_key)]}
        member = ClientSession.kept(state)
        if member is None or member.session != session:
            raise Refused(f"asked to {step} in a session that this client is not in")
        in_order = (member.step, step) in {*pairwise(STEPS)}
        _require(in_order, f"asked to {step} after {member.step}: each question is answered once, in its order")
        if step == "share":
            return self._share(member, cast(list[bytes], question["keys"]))
        if step == "mask":
            return self._mask(member, _values_in(question), train)
        if step == "confirm":
            survivors, dropped = (tuple(cast(list[int], question[k])) for k in ("survivors", "dropped"))
            return self._confirm(replace(member, step="confirm", survivors=survivors, dropped=dropped))
        return self._unmask(member, _values_in(question))

    def _share(self, member: ClientSession, keys: list[bytes]) -> tuple[Record, Record]:
        """Shares of both secrets for all clients, each encrypted for its receiver."""
        count = len(keys) // 2
        own = [public_key(member.cipher_key), public_key(member.mask_key)]
        distinct = 2 * self.least <= len(set(keys)) == len(keys) == 2 * count <= 2 * self.group
        _require(distinct, f"expected different keys of {self.least} to {self.group} clients, got {len(keys)} keys")
        numbers = [n for n in range(1, count + 1) if keys[2 * n - 2 : 2 * n] == own]
        _require(bool(numbers), "this client's own keys are not among those that the server passes on")
        context = hashlib.sha256(repr((self.terms, member.session, keys)).encode()).digest()
        seed = secrets.token_bytes(SECRET)
        member = replace(member, step="share", seed=seed, number=numbers[0], keys=tuple(keys), context=context)
        both = [shamir_share(int.from_bytes(secret), self.least, count) for secret in (member.seed, member.mask_key)]
        parts = {n: b"".join(s[n - 1].to_bytes(SHARE) for s in both) for n in range(1, count + 1)}
        member = replace(member, senders=(member.number,), shares=(parts.pop(member.number),))
        sealed = {n: _cipher(member, n, sends=True).encrypt(NONCE, part, None) for n, part in parts.items()}
        return member.to_record(), _record_of(sealed)

    def _mask(self, member: ClientSession, sealed: Mapping[int, bytes], train: Train) -> tuple[Record, Record]:
        """The vector with its own mask and the masks of the pairs with all clients that sent shares."""
        others = sorted(sealed)
        count = len(member.keys) // 2
        known = set(range(1, count + 1)) - {member.number}
        _require(set(others) <= known, f"expected shares of others among clients 1..{count}, got them of {others}")
        self._check_enough(len(others) + 1)
        shares = [_opened(member, n, sealed[n]) for n in others]
        masked = self.quantise(*train())
        masked += expand_seed(member.seed, len(masked))
        for n in others:
            seed = pair_seed(member.mask_key, member.keys[2 * n - 1], member.session)
            mask = expand_seed(seed, len(masked))
            masked = masked + mask if member.number < n else masked - mask
        senders, kept = (*member.senders, *others), (*member.shares, *shares)
        return replace(member, step="mask", senders=senders, shares=kept).to_record(), {"masked": masked}

    def _confirm(self, member: ClientSession) -> tuple[Record, Record]:
        """Return a tag for each other survivor, which confirms this client's list of survivors and dropouts."""
        asked = sorted([*member.survivors, *member.dropped])
        sharing = sorted(member.senders)
        # nor is one client in both lists, as its two secrets together would unmask its update
        _require(asked == sharing, f"asked to confirm clients {asked}; those who share are {sharing}")
        _require(member.number in member.survivors, "the server says that this client dropped out, but still asks it")
        self._check_enough(len(member.survivors))
        tags = {n: _tag(member, n, sends=True) for n in member.survivors if n != member.number}
        return member.to_record(), _record_of(tags)

    def _unmask(self, member: ClientSession, tags: Mapping[int, bytes]) -> tuple[Record, Record]:
        """One share of one secret of each sender; the session ends, and its secrets are deleted."""
        others = tags.keys() & {*member.survivors} - {member.number}
        # a wrong tag counts as none: a single client that lies stops nobody
        agreeing = 1 + sum(hmac.compare_digest(tags[n], _tag(member, n, sends=False)) for n in others)
        self._check_enough(agreeing)
        held = dict(zip(member.senders, member.shares, strict=True))
        shares = {n: held[n][:SHARE] for n in member.survivors} | {n: held[n][SHARE:] for n in member.dropped}
        over = ClientSession(member.session, "unmask", b"", b"")
        return over.to_record(), _record_of(shares)

    def rounds(
        self, members: Sequence[int], size: int
    ) -> Generator[dict[int, Record], Mapping[int, Record], SecureSumResult]:
        """The server's side, as a generator: yields questions by member, receives the answers that came, returns the sum.

        The third question starts the training. A malformed answer counts as missing.

        Args:
            members: any distinct numbers, used as keys of the questions; at most a group.
            size: number of entries of an update.

        Raises:
            TooFewSurvivors: fewer than the threshold answered one of the questions.
        """
        session = secrets.token_bytes(16)
        base: Record = {"session": session, "terms": self.terms}
        answers = yield {m: {**base, "step": "advertise"} for m in members}
        advertised = self._usable(answers, members, lambda m, answer: _public_keys(answer))
        uses = Counter(key for pair in advertised.values() for key in pair)  # clients refuse keys that are not distinct
        advertised = {m: pair for m, pair in advertised.items() if uses[pair[0]] == uses[pair[1]] == 1}
        number = {m: i for i, m in enumerate(advertised, 1)}
        keys = [key for pair in advertised.values() for key in pair]
        answers = yield {m: {**base, "step": "share", "keys": keys} for m in number}
        everybody = list(number.values())
        sealed = self._usable(answers, number, lambda m, a: _checked(a, everybody, SEALED, but=number[m]))
        answers = yield _passed_on({**base, "step": "mask"}, sealed, number)
        masked = self._usable(answers, sealed, lambda m, answer: _vector(answer, size))
        # made once: later vectors are ignored, or the server might learn both secrets of a sender
        survivors, dropped = [number[m] for m in masked], [number[m] for m in sealed if m not in masked]
        asked: Record = {"survivors": survivors, "dropped": dropped}
        answers = yield {m: {**base, "step": "confirm", **asked} for m in masked}
        confirmed = self._usable(answers, masked, lambda m, a: _checked(a, survivors, SECRET, but=number[m]))
        answers = yield _passed_on({**base, "step": "unmask"}, confirmed, number)
        disclosed = self._usable(answers, confirmed, lambda m, a: _checked(a, [*survivors, *dropped], SHARE))
        shares = {number[m]: held for m, held in disclosed.items()}
        total: Integers = np.sum(list(masked.values()), axis=0, dtype=np.uint64)
        for n in survivors:
            total -= expand_seed(self._secret(n, shares), len(total))
        for n in dropped:
            key = self._secret(n, shares)
            for s in survivors:
                mask = expand_seed(pair_seed(key, keys[2 * s - 1], session), len(total))
                total = total - mask if s < n else total + mask
        examples, most = int(total[-1]), len(masked) * MOST_EXAMPLES
        if not len(masked) <= examples <= most or int(total[:-1].max(initial=0)) > examples * LEVELS:
            raise ValueError(f"{len(masked)} clients cannot have this sum, of {examples} examples: one of them lied")
        return SecureSumResult(*self.mean(total), tuple(masked))

    def _secret(self, n: int, shares: Mapping[int, Mapping[int, bytes]]) -> bytes:
        """The secret of a client, from as many survivors' shares of it as the threshold."""
        found = shamir_combine({helper: int.from_bytes(shares[helper][n]) for helper in sorted(shares)[: self.least]})
        if found >= 2 ** (8 * SECRET):
            raise ValueError(f"the shares of client {n}'s secret do not fit together: a client sent wrong ones")
        return found.to_bytes(SECRET)

    def _usable(
        self, answers: Mapping[int, Record], members: Iterable[int], read: Callable[[int, Record], Parsed]
    ) -> dict[int, Parsed]:
        """The members' readable answers, in their order; TooFewSurvivors if they are fewer than the threshold."""
        found = {}
        for m in members:
            with suppress(KeyError, TypeError, ValueError):  # of a malformed answer, or none
                found[m] = read(m, answers[m])
        self._check_enough(len(found))
        return found

    def _check_enough(self, clients: int) -> None:
        if clients < self.least:
            raise TooFewSurvivors(f"{clients} clients are left, fewer than the threshold {self.least}")


def _one_way(member: ClientSession, other: int, sends: bool, purpose: bytes) -> bytes:
    """Derive 32 secret bytes for one purpose between two clients in one direction."""
    theirs = member.keys[2 * other - 2]
    ends = [public_key(member.cipher_key), theirs]
    direction = b"".join(ends if sends else reversed(ends))
    return agreed(member.cipher_key, theirs, purpose + member.context + direction)


def _cipher(member: ClientSession, other: int, sends: bool) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(_one_way(member, other, sends, b"shares"))


def _tag(member: ClientSession, other: int, sends: bool) -> bytes:
    """Authenticate the sender's list of survivors and dropouts to the other client."""
    listed = hashlib.sha256(repr((member.survivors, member.dropped)).encode()).digest()
    return _one_way(member, other, sends, b"confirm" + listed)


def _opened(member: ClientSession, other: int, sealed: bytes) -> bytes:
    from cryptography.exceptions import InvalidTag

    try:
        share: bytes = _cipher(member, other, sends=False).decrypt(NONCE, sealed, None)
        return share
    except InvalidTag:
        raise Refused(f"client {other}'s share was not encrypted for this session, or was changed on its way") from None


def _public_keys(answer: Mapping[str, Any]) -> list[bytes]:
    """Return a client's two keys; ValueError for a key of low order, with which all others would fail."""
    cipher, mask = answer["keys"]
    for key in (cipher, mask):
        agreed(secrets.token_bytes(SECRET), key, b"")
    return [cipher, mask]


def _vector(answer: Mapping[str, Any], size: int) -> Integers:
    found = answer["masked"]
    if not isinstance(found, np.ndarray) or found.dtype != np.uint64 or found.shape != (size + 1,):
        raise ValueError(f"expected {size + 1} integers")
    return found


def _passed_on(base: Record, sent: Mapping[int, Mapping[int, bytes]], number: Mapping[int, int]) -> dict[int, Record]:
    """A question to each member with what all others sent to it."""
    return {m: {**base, **_record_of({number[s]: sent[s][number[m]] for s in sent if s != m})} for m in sent}


def _record_of(values: Mapping[int, bytes]) -> Record:
    """A byte string for, or from, each of several members, as a message carries them."""
    return {"members": list(values), "values": list(values.values())}


def _values_in(record: Mapping[str, Any]) -> dict[int, bytes]:
    return dict(zip(record["members"], record["values"], strict=True))


def _checked(answer: Mapping[str, Any], numbers: list[int], size: int, but: int = 0) -> dict[int, bytes]:
    """A byte string of this length for each of these numbers but one."""
    of, found, expected = answer["members"], answer["values"], [n for n in numbers if n != but]
    if not isinstance(of, list) or of != expected or any(not isinstance(v, bytes) or len(v) != size for v in found):
        raise ValueError(f"expected {size} bytes for each of {expected}")
    return _values_in(answer)
