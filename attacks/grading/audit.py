"""The audit of a wave: attack first, and only then fetch the truth and grade."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

import torch
from torch import Generator, Tensor, nn

from fedgauge.attacks.base import (
    Attack,
    Budget,
    ClientState,
    Knowledge,
    Observation,
    Reconstruction,
    Sentences,
    StatefulAttack,
    Status,
    Stream,
    Trace,
    Wave,
)
from fedgauge.attacks.defense_inference import Inferred, infer
from fedgauge.attacks.grading.image_metrics import (
    AUGMENTED,
    HIGHER_IS_BETTER,
    Metric,
    image_metrics,
    label_accuracy,
    match,
)
from fedgauge.attacks.grading.text_metrics import match_sentences, text_metrics
from fedgauge.attacks.learned.auxiliary import check_disjoint
from fedgauge.attacks.limits import GaussianPrior, bayes_limit, limit_method
from fedgauge.attacks.matching.feedback_blending import FeedbackBlending
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.attacks.plan import PlannedAttack, describe
from fedgauge.client.data.corpora import Text
from fedgauge.client.data.images import batch_of
from fedgauge.client.deployment.owner import SelfAudit
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.losses import is_cross_entropy
from fedgauge.client.protocol import Federation
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, Chain, Params, Update, UpdateFn

OBJECTIVE = "objective"  # the metric of a row that tells an attack's own objective, where nothing else can be told
NO_TRUTH = 'labels = "given" hands over the true labels, which the server of a deployment does not have: say "restored"'
WHOLE_BATCH = -1  # the example number of a row that speaks of the whole batch
NO_DERIVATIVE = (  # on the card of an attack that cannot move
    "the chain's noise-free form has no derivative, so gradient matching cannot work: give the link a differentiable mean"
)
Truth = Callable[[int, int], Batch]  # (client, round) -> the private batch


@dataclass(frozen=True)
class ScoreRecord:
    """One score, as the ledger keeps it."""

    round: int
    client: int
    attack: str
    example: int
    metric: str
    value: float | None
    status: str
    seconds: float


@dataclass(frozen=True, eq=False)
class AuditResult:
    """One observation's outcome: the reconstruction, paired with the truth's order where there is one, and its rows.

    memory: what an attack with memory keeps of the client from now on; it knows nothing of the truth's order.
    """

    client: int
    reconstruction: Reconstruction
    rows: tuple[ScoreRecord, ...]
    memory: ClientState | None = None


@dataclass(frozen=True, eq=False)
class Auditor:
    """Attacks waves of one federation and grades them.

    Args:
        federation: gives the attacker its public knowledge and, in a simulation, the grader its truth.
        seed: of the attacker's randomness.
        blind: there is no truth here, as in a deployment: rows tell an attack's own objective, or that it has nothing to grade.
    """

    federation: Federation
    seed: int = 0
    blind: bool = False

    @cached_property
    def auxiliary(self) -> Batch:
        """The public images: the attacker's knowledge of the distribution, and the gallery of identification."""
        check_disjoint(self.federation.shards)
        return self.federation.shards.auxiliary_batch()

    @cached_property
    def metrics(self) -> list[Metric]:
        """What every reconstruction is graded by."""
        dataset = self.federation.shards.dataset
        if isinstance(dataset, Text):
            return text_metrics(dataset.tokenizer)
        return image_metrics(dataset.shape, self.auxiliary.x)

    def pairing(self, truth: Tensor, guess: Tensor) -> Tensor:
        """Order (B,) that pairs guess[order[i]] with truth[i], one to one."""
        dataset = self.federation.shards.dataset
        return match_sentences(truth, guess, dataset.tokenizer) if isinstance(dataset, Text) else match(truth, guess)

    def knowledge(
        self, planned: PlannedAttack, members: int | None = None, inferred: Inferred | None = None
    ) -> Knowledge:
        """The threat model of a planned attack.

        Args:
            members: clients in what is seen, under a secure sum; default: a whole group.
            inferred: the defense, where the plan leaves it to the attacker to read it off the updates.
        """
        fed, dataset = self.federation, self.federation.shards.dataset
        members = members or len(fed.protocol.groups(1)[0])
        chain = fed.chain if planned.defense == "known" else Chain((fed.chain.local,))
        if planned.defense == "inferred":
            if inferred is None:
                raise ValueError(f"{planned.name}: a defense is inferred from updates: call inferred(wave) first")
            chain = inferred.chain
        return Knowledge(
            model=fed.model,
            chain=fed.as_seen(chain, members),
            shape=dataset.shape,
            classes=dataset.classes,
            batch_size=members * fed.shards.batch_size,
            mean=dataset.mean,
            std=dataset.std,
            auxiliary=self.images(planned),
            loss=fed.loss,
            text=Sentences() if isinstance(dataset, Text) else None,
        )

    def images(self, planned: PlannedAttack) -> Batch:
        """Those of the public images that a planned attack has, with any that it makes up."""
        if planned.auxiliary is None:
            return self.auxiliary
        rng = generator(self.seed, "auxiliary", repr(sorted(planned.auxiliary.items())))
        return planned.images().of(self.auxiliary, self.federation.shards.dataset.classes, rng)

    def inferred(self, wave: Wave, members: int = 1) -> Inferred:
        """What the updates of a wave betray of the chain to someone who knows the local training alone."""
        fed = self.federation
        if isinstance(fed.shards.dataset, Text):
            raise ValueError(
                "a defense is inferred from zeros that the gradient of images never has, and that of words has where a word "
                'does not occur: attack with defense = "known" or "unknown"'
            )
        if not is_cross_entropy(fed.loss):
            raise ValueError(
                "a defense is inferred from zeros that the cross-entropy's gradient never has, and [loss] names another loss: "
                'attack with defense = "known" or "unknown"'
            )
        return infer(wave, fed.model, fed.chain.local, fed.shards.batch_size, members)

    @cached_property
    def prior(self) -> GaussianPrior:
        """The Gaussian prior of the limits, fitted to the auxiliary images."""
        return GaussianPrior.fit(self.auxiliary.x)

    def stream(self, planned: PlannedAttack, round: int, client: int) -> Stream:
        """The attacker's randomness for one observation."""
        return partial(generator, self.seed, "attack", planned.name, round, client)

    def audit(
        self,
        planned: PlannedAttack,
        wave: Wave,
        others: Mapping[int, int] | None = None,
        truth: Truth | None = None,
        memories: Mapping[int, ClientState] | None = None,
    ) -> list[AuditResult]:
        """Attack a wave, then grade it.

        Args:
            others: for a client, another one of the same round: the reconstruction is graded against that one's truth
                too, as the baseline wrong_client(attack) of that client.
            truth: default: the simulation's own.
            memories: by client, what an attack with memory keeps of it; none of a client that it never met.
        """
        members = [len(self.federation.protocol.members(client, wave.round)) for client in wave.clients]
        if len(set(members)) > 1:  # secure sums of several sizes
            parts = [wave.of([k for k, m in enumerate(members) if m == size]) for size in sorted(set(members))]
            each = {a.client: a for part in parts for a in self.audit(planned, part, others, truth, memories)}
            return [each[client] for client in wave.clients]
        if planned.is_limit:
            return self._limit(planned, wave, members[0])
        met = self._meet(planned, wave, members[0], truth or self._truth, memories or {})
        audited = []
        for client, (found, memory) in zip(wave.clients, met, strict=True):
            other = None if planned.is_baseline else (others or {}).get(client)
            if other is not None and len(self.federation.protocol.members(other, wave.round)) != members[0]:
                other = None  # a secure sum of fewer clients, or of more
            if self.blind:
                examples = members[0] * self.federation.shards.batch_size
                rows = self._ungraded(planned.name, wave.round, client, found, examples, other)
            else:
                found, rows = self._graded(planned.name, wave, client, other, found, truth)
            audited.append(AuditResult(client, found, tuple(rows), memory))
        return audited

    def _meet(
        self, planned: PlannedAttack, wave: Wave, members: int, truth: Truth, memories: Mapping[int, ClientState]
    ) -> list[tuple[Reconstruction, ClientState | None]]:
        """What the attack makes of each client of a wave; of the truth it is told what its threat model says, no more."""
        inferred = self.inferred(wave, members) if planned.defense == "inferred" else None
        attack, known = planned.build(), self.knowledge(planned, members, inferred)
        known = _told(planned, known, [truth(client, wave.round) for client in wave.clients] if _asks(planned) else [])
        self.federation.load_buffers(wave.buffers)
        streams = [self.stream(planned, wave.round, client) for client in wave.clients]
        started = time.perf_counter()
        reconstructions, kept = _remembering(attack, wave, known, planned.budget, streams, memories)
        seconds = (time.perf_counter() - started) / len(wave)
        assert len(reconstructions) == len(wave)
        said = f"chain inferred: {inferred}: {inferred.evidence}" if inferred is not None else ""
        return [
            (replace(found, seconds=seconds, reason="; ".join(filter(None, (said, found.reason)))), memory)
            for found, memory in zip(reconstructions, kept, strict=True)
        ]

    def _graded(
        self, attack: str, wave: Wave, client: int, other: int | None, found: Reconstruction, truth: Truth | None
    ) -> tuple[Reconstruction, list[ScoreRecord]]:
        """Rows of a reconstruction against its client's truth, and against another one's; and it, in the truth's order."""
        own, round = self.federation, wave.round
        changed = own.trained_on(wave.params, wave.buffers, client, round) if truth is None else None
        paired, rows = self._grade(attack, round, client, found, truth or self._truth, changed)
        if other is not None:
            baseline = f"wrong_client({attack})"
            _, wrong = self._grade(baseline, round, other, replace(found, y=None), truth or self._truth)
            rows += wrong
        return paired, rows

    def _truth(self, client: int, round: int) -> Batch:
        if self.blind:
            raise ValueError(NO_TRUTH)
        return self.federation.batch_at(client, round)

    def _ungraded(
        self, attack: str, round: int, client: int, found: Reconstruction, examples: int, other: int | None
    ) -> list[ScoreRecord]:
        """What can be said of a reconstruction without its truth: its objective, or that there is nothing to grade."""

        def row(client: int, attack: str, example: int, metric: str, value: float | None) -> ScoreRecord:
            return ScoreRecord(round, client, attack, example, metric, value, found.status, found.seconds)

        objective = found.objective if math.isfinite(found.objective) else None
        rows = [row(client, attack, WHOLE_BATCH, OBJECTIVE, objective)]
        if not has_images(found.x):
            rows += [row(client, attack, i, "psnr", None) for i in range(examples)]
            rows += [
                row(other, f"wrong_client({attack})", i, "psnr", None) for i in range(examples) if other is not None
            ]
        return rows

    def _limit(self, planned: PlannedAttack, wave: Wave, members: int) -> list[AuditResult]:
        """One bound for all clients of a round: they share params, and it reads neither update nor truth."""
        self.federation.load_buffers(wave.buffers)
        started = time.perf_counter()
        rng = generator(self.seed, "limit", planned.name, wave.round)
        try:
            mse, reason = bayes_limit(self.knowledge(planned, members), wave.params, self.prior, rng), ""
        except ValueError as error:
            mse, reason = None, str(error)
        seconds = (time.perf_counter() - started) / len(wave)
        status: Status = "not_applicable" if mse is None else "converged"
        values = {"mse": mse, "psnr": None if mse is None else -10 * math.log10(mse)}
        found = Reconstruction(None, None, math.nan if mse is None else mse, 0, seconds, status, reason)
        return [
            AuditResult(
                client,
                found,
                tuple(
                    ScoreRecord(wave.round, client, planned.name, WHOLE_BATCH, metric, value, status, seconds)
                    for metric, value in values.items()
                ),
            )
            for client in wave.clients
        ]

    def _grade(
        self,
        attack: str,
        round: int,
        client: int,
        found: Reconstruction,
        truth: Truth,
        changed: Batch | None = None,
    ) -> tuple[Reconstruction, list[ScoreRecord]]:
        """Rows of one reconstruction, and the reconstruction in the truth's order.

        Args:
            changed: the examples as the chain made them before training: a second truth, with rows of its own.
        """
        batch = truth(client, round)

        def row(example: int, metric: str, value: float | None) -> ScoreRecord:
            return ScoreRecord(round, client, attack, example, metric, value, found.status, found.seconds)

        rows = []
        if found.y is not None and batch.y.dim() == 1:
            rows.append(row(WHOLE_BATCH, "label_accuracy", label_accuracy(batch.y, found.y)))
        if found.x is None or not has_images(found.x):
            rows += [row(i, metric.name, None) for metric in self.metrics for i in range(len(batch.y))]
            return found, rows
        order = self.pairing(batch.x, found.x)
        x = found.x[order]
        for metric in self.metrics:
            rows += [row(i, metric.name, value) for i, value in enumerate(metric(batch.x, x).double().tolist())]
        if changed is not None:
            nearest = found.x[self.pairing(changed.x, found.x)]
            for metric in self.metrics:
                if (name := metric.name + AUGMENTED) in HIGHER_IS_BETTER:
                    rows += [row(i, name, v) for i, v in enumerate(metric(changed.x, nearest).double().tolist())]
        return replace(found, x=x, y=_reorder(found.y, order), trace=_rearranged(found.trace, order)), rows


def _asks(planned: PlannedAttack) -> bool:
    return "given" in (planned.labels, planned.lengths)


def _told(planned: PlannedAttack, known: Knowledge, batches: Sequence[Batch]) -> Knowledge:
    """What the threat model hands over of the truth: labels and lengths, examples never.

    The examples come by label, then by length, so that their order says nothing else.
    """
    if planned.labels == "given":
        if batches[0].y.dim() > 1:
            raise ValueError('labels = "given" would hand over the sentences: the labels of next_token are their words')
        known = replace(known, labels=torch.stack([batch.y.sort().values for batch in batches]))
    if planned.lengths == "given":
        if known.text is None or not isinstance(known.model, LanguageModel):
            raise ValueError('lengths = "given" is of sentences, and these are images')
        known = replace(known, text=Sentences(torch.stack([_lengths(batch, known.model.pad) for batch in batches])))
    return known


def _lengths(batch: Batch, pad: int) -> Tensor:
    lengths = (batch.x != pad).sum(1)
    if batch.y.dim() > 1:
        return lengths.sort().values
    order = sorted(range(len(lengths)), key=lambda i: (int(batch.y[i]), int(lengths[i])))
    return lengths[order]


def has_images(x: Tensor | None) -> bool:
    """Whether a reconstruction has anything to grade."""
    return x is not None and bool(torch.isfinite(x).all())


@dataclass(frozen=True)
class invert_own(SelfAudit):
    """A client's own update, inverted by an attack before it leaves: the client's guard asks for it.

    Args:
        attack: as [[attack]] use names it; it knows the whole chain, restores the labels, and has no auxiliary images.
        iterations, seconds: the most that it may spend.
    """

    attack: str
    iterations: int = 100
    seconds: float = 20.0

    def __post_init__(self) -> None:
        _ = self._planned  # an attack that does not exist is told at once

    @property
    def _planned(self) -> PlannedAttack:
        table = {"use": self.attack, "iterations": self.iterations, "seconds": self.seconds}
        return PlannedAttack.from_table(table, "audit")

    def leak(
        self, own: Federation, params: Params, buffers: Mapping[str, Tensor], update: Update, batch: Batch
    ) -> float:
        wave = Wave.stack([Observation(1, 0, params, update, buffers)])
        (audited,) = Auditor(own).audit(self._planned, wave, truth=lambda client, round: batch)
        found = audited.reconstruction
        if found.status in (
            "not_applicable",
            "diverged",
        ):  # weights that make an attack diverge are the server's to choose
            raise ValueError(found.reason)
        values = [r.value for r in audited.rows if r.metric == "psnr" and r.value is not None]
        if not values:
            raise ValueError("the attack left no images")
        return max(values)


def _remembering(
    attack: Attack,
    wave: Wave,
    known: Knowledge,
    budget: Budget,
    streams: Sequence[Stream],
    memories: Mapping[int, ClientState],
) -> tuple[list[Reconstruction], Sequence[ClientState | None]]:
    """Reconstructions, and what an attack with memory keeps of each client; None of one without."""
    if not isinstance(attack, StatefulAttack):
        return attack.reconstruct(wave, known, budget, streams), [None] * len(wave)
    return attack.advance(wave, known, budget, streams, [memories.get(c, attack.initial()) for c in wave.clients])


def _reorder(y: Tensor | None, order: Tensor) -> Tensor | None:
    return y if y is None else y[order]


def _rearranged(trace: Trace | None, order: Tensor) -> Trace | None:
    """The examples of every snapshot in the order of the last one's, so that each keeps its truth."""
    return trace if trace is None else replace(trace, x=trace.x[:, order])


def card(fed: Federation, planned: PlannedAttack, server: str = "honest server") -> str:
    """The threat model in words; of a limit, what it is a limit of.

    Args:
        server: what it does, in words.
    """
    images = _images(fed, planned)
    if planned.is_baseline:
        return f"{images} and nothing else"
    links = " > ".join(map(describe, fed.protocol.chain))
    batch = f"{fed.shards.batch_size} example{'s' if fed.shards.batch_size > 1 else ''} an update" + _sum_of(fed)
    if planned.is_limit:
        return "; ".join([f"chain {links}", batch, *_limit_parts(fed)])
    attack = planned.build()
    search = attack.attack if isinstance(attack, FeedbackBlending) else attack
    matching = isinstance(search, GradientMatching)
    own = search.labels if isinstance(search, GradientMatching) else "restored"
    norms = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in fed.model.modules())
    parts = [
        server,
        f"labels {own if planned.labels == 'restored' else planned.labels}",
        f"chain {_known_chain(planned, links)}",
        *([NO_DERIVATIVE] if matching and planned.defense == "known" and _is_flat(fed) else []),
        *([] if is_cross_entropy(fed.loss) else [f"loss {describe(fed.protocol.loss)} known"]),
        batch,
        f"{f'lengths {planned.lengths}' if isinstance(fed.shards.dataset, Text) else 'normalisation known'}, {images}",
        *([f"BatchNorm in {'train' if fed.model.training else 'eval'} mode, statistics known"] if norms else []),
        *(["each client's earlier rounds"] if isinstance(attack, StatefulAttack) else []),
        str(planned.budget),
    ]
    return "; ".join(parts)


def _images(fed: Federation, planned: PlannedAttack) -> str:
    """The auxiliary images in words."""
    if isinstance(fed.shards.dataset, Text):
        return f"{len(fed.shards.auxiliary)} auxiliary sentences of the same distribution"
    chosen = planned.images()
    if chosen.size is None and chosen.classes:
        return f"all fitting {chosen}"
    return f"{chosen.size or len(fed.shards.auxiliary)} {chosen}"


def _known_chain(planned: PlannedAttack, links: str) -> str:
    if planned.defense == "inferred":
        return f"inferred: from the updates of each wave (the true one: {links})"
    return f"{planned.defense}: {links}"


def _sum_of(fed: Federation) -> str:
    """How many clients' updates the server sees as one."""
    together = fed.protocol.secure_sum
    if together is None:
        return ""
    fewest = f"{together.least} to " if together.least < together.group and fed.protocol.stragglers.probability else ""
    return f", sum of {fewest}{together.group} clients"


@lru_cache(maxsize=1)
def _is_flat(fed: Federation) -> bool:
    """Whether the images move the update of local training, and not at all what the chain's noise-free form makes of it."""
    if len(fed.chain.links) == 1:
        return False
    batch = _somewhere(fed, generator(fed.protocol.seed, "derivative"))
    bare = fed.gradient
    try:
        update, slope = _slope(fed, fed.chain.mean(bare), batch)
        return update > 0 and slope == 0 and _slope(fed, fed.chain.local(bare), batch)[1] > 0
    except RuntimeError:  # a network without a second derivative: each attack fails with torch's words for it
        return False


def _somewhere(fed: Federation, rng: Generator) -> Batch:
    """Two examples by which an update can be differentiated: random pixels, or the embeddings of auxiliary words."""
    shards = fed.shards
    if isinstance(fed.model, LanguageModel):
        chosen = batch_of(shards.dataset.x, shards.dataset.y, shards.auxiliary[:2])
        return Batch(fed.model.embed(chosen.x).detach(), chosen.y)
    labels = torch.randint(shards.dataset.classes, (2,), generator=rng)
    return Batch(torch.rand(2, *shards.dataset.shape, generator=rng), labels)


def _slope(fed: Federation, client: UpdateFn, batch: Batch) -> tuple[float, float]:
    """Largest entries of an update, and of the derivative of a random projection of it by the images."""
    x = batch.x.clone().requires_grad_()
    update = client(fed.initial()[0], Batch(x, batch.y), None)
    rng = generator(fed.protocol.seed, "projection")
    projected = torch.stack([(t * torch.randn(t.shape, generator=rng)).sum() for t in update.values()]).sum()
    largest = max(float(t.detach().abs().max()) for t in update.values())
    if not projected.requires_grad:
        return largest, 0.0
    (slope,) = torch.autograd.grad(projected, x, allow_unused=True)
    return largest, 0.0 if slope is None else float(slope.abs().max())


def _limit_parts(fed: Federation) -> list[str]:
    return [
        f"Gaussian prior fitted to {len(fed.shards.auxiliary)} auxiliary images (Ledoit-Wolf shrinkage)",
        "labels known",
        limit_method(len(fed.protocol.groups(1)[0]) * fed.shards.batch_size * math.prod(fed.shards.dataset.shape)),
    ]
