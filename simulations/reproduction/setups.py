"""Setups: what a server observes in one setting of a paper's table, computed by a federation without Flower."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from fedgauge.attacks.base import Attack, Knowledge, Observation, Stream, Wave
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.grading.scores import Grader
from fedgauge.attacks.malicious.inconsistency import dead_layer
from fedgauge.attacks.malicious.server_attack import craft_weights
from fedgauge.attacks.modality.image_metrics import AUGMENTED
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.source import FederationSource
from fedgauge.attacks.threat_model import public_knowledge
from fedgauge.client.chain import Chain
from fedgauge.client.components import SpecError, build, errors_in
from fedgauge.client.data.batches import Shards, batch_of
from fedgauge.client.data.dataset import Dataset
from fedgauge.client.data_folder import data_folder
from fedgauge.client.federation import DATASET, Federation
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.losses import CROSS_ENTROPY
from fedgauge.client.models.vision import detached_params
from fedgauge.client.protocol import Protocol, SecureSumOptions
from fedgauge.client.rng import generator
from fedgauge.client.transforms import UpdateTransform, per_example
from fedgauge.client.update import Batch, UpdateFn, average, norm
from fedgauge.simulations.reproduction.measures import metric_of
from fedgauge.simulations.reproduction.paper_tables import Images, Pretraining, Setting

AUXILIARY = 200  # last training images, held out of pretraining
TESTED = 2000  # test examples by which pretraining is judged


@dataclass(frozen=True, eq=False)
class ChosenShards(Shards):
    """Each client has the same examples in every round, in order; rows behind the training part are the test part's."""

    def rows_at(self, client: int, round: int) -> Tensor:
        return self.indices[client]

    def batch_at(self, client: int, round: int) -> Batch:
        data, rows = self.dataset, self.indices[client]
        test = int(rows[0]) >= len(data.y)
        return batch_of(data.x_test, data.y_test, rows - len(data.y)) if test else batch_of(data.x, data.y, rows)


@dataclass(frozen=True, eq=False, kw_only=True)
class PaperAuditor(Auditor):
    """An auditor of papers' attacks: given labels come in the client's order, as some papers give them, and with them lengths.

    Args:
        metrics: names of the metrics to grade by.
        purpose: key of the randomness. The attacks of one setting share it, so that luck of the draw does not separate them.
    """

    metrics: frozenset[str]
    purpose: tuple[str | int, ...] = ("attack",)

    @cached_property
    def grader(self) -> Grader:
        return Grader(self.modality, self.source.auxiliary.x, self.metrics, self.federation.label_kind)

    def stream(self, planned: PlannedAttack, round: int, client: int) -> Stream:
        return partial(generator, self.seed, *self.purpose, client // len(self.federation.protocol.group(client)))

    def _threat(self, planned: PlannedAttack, attack: Attack, wave: Wave, members: int) -> tuple[Knowledge, Wave]:
        known, wave = super()._threat(planned, attack, wave, members)
        if planned.labels == "given":
            truth = [self.source.truth(client, wave.round) for client in wave.clients]
            known = replace(known, labels=torch.stack([batch.y for batch in truth]))
            if isinstance(model := known.model, LanguageModel) and planned.lengths == "given":
                known = replace(known, lengths=torch.stack([(batch.x != model.pad).sum(1) for batch in truth]))
        return known, wave


@dataclass(frozen=True, eq=False)
class Setup:
    """The server's observations in one setting, with the auditor that attacks and grades them.

    Args:
        clients: number of clients, observed in turns: 0, 1, 2, 0, 1, 2 ...
        isolated: for each batch, the example with the largest update at the weights that were sent.
    """

    auditor: PaperAuditor
    observations: tuple[Observation, ...]
    note: str = ""
    clients: int = 1
    isolated: tuple[int, ...] | None = None


def build_setup(cell: Setting, seed: int) -> Setup:
    """Compute the n updates of a setting.

    Raises:
        SpecError: data or weights are missing.
    """
    dataset = _read(tuple(cell.images.table.items()), f"cell {cell.name}: data")
    dataset = replace(dataset, mean=cell.images.mean or dataset.mean, std=cell.images.std or dataset.std)
    images = replace(cell.images, batch_size=cell.members * cell.images.batch_size)
    shards = _shards(cell, dataset, choose(dataset, images, cell.n * (4 if cell.faintest else 1)), seed)
    with errors_in(f"cell {cell.name}"):
        fed = _federation(cell, shards, seed)
        note = _pretrain(cell, fed)
        _ = fed.chain
    if cell.faintest:
        fed = _with(fed, _faintest(fed, cell.members))
    clients = _Clients(cell, fed)
    isolated: tuple[int, ...] | None = None
    if cell.alone or any("isolated_psnr" in spec.metrics for spec in cell.attacks):
        isolated = tuple(map(clients.isolated, range(cell.n)))
    if cell.alone and isolated is not None:
        firsts = [fed.shards.indices[k * cell.members][i : i + 1] for k, i in enumerate(isolated)]
        isolated, fed = (0,) * cell.n, _with(fed, firsts, rounds=1, secure_sum=None)
        clients = _Clients(replace(cell, server_attack=None, rounds=1, members=1), fed)
    reported = {metric_of(measure).removesuffix(AUGMENTED) for spec in cell.attacks for measure in spec.metrics}
    metrics = frozenset({*reported, modality_of(dataset).main.metric})
    auditor = PaperAuditor(FederationSource(fed), seed, metrics=metrics)
    # every client has equally many images
    turns = max(c for c in range(1, cell.clients + 1) if cell.n % c == 0)
    return Setup(auditor, clients.observed(), note, turns, isolated)


def _federation(cell: Setting, shards: Shards, seed: int) -> Federation:
    table, server_attack = dict(cell.model), cell.build_server_attack()
    if server_attack is not None and server_attack.architecture is not None:
        table["architectures"] = [server_attack.architecture]
    if cell.weights:
        if (folder := data_folder()) is None:
            raise SpecError(f"weights: {cell.weights} belongs into the local data folder: set FEDGAUGE_DATA")
        table["weights"] = str(folder / cell.weights)
    protocol = Protocol(
        seed=seed,
        rounds=cell.rounds,
        clients=len(shards.indices),
        data=cell.images.table,
        model=table,
        chain=cell.chain,
        secure_sum=SecureSumOptions(cell.members) if cell.members > 1 else None,
        loss={"use": "next_token"} if not shards.dataset.labelled else dict(CROSS_ENTROPY),
    )
    fed = Federation(protocol)
    vars(fed).update(shards=shards)
    return fed


def _with(fed: Federation, indices: Sequence[Tensor], **changes: Any) -> Federation:
    shards = replace(fed.shards, indices=tuple(indices), batch_size=len(indices[0]))
    return fed.having(shards, clients=len(indices), **changes)


def _faintest(fed: Federation, members: int) -> list[Tensor]:
    """The rows of the clients in the quarter of the groups with the smallest updates at the honest weights."""
    params, buffers = fed.initial()
    groups = range(0, len(fed.shards.indices), members)
    sizes = torch.tensor([float(norm(fed.client_update(params, buffers, first, 1))) for first in groups])
    chosen = sizes.topk(len(groups) // 4, largest=False).indices.sort().values
    return [rows for k in chosen.tolist() for rows in fed.shards.indices[k * members : (k + 1) * members]]


@dataclass(frozen=True, eq=False)
class _Clients:
    """The clients of a setting, and what its server sends them."""

    cell: Setting
    fed: Federation

    def observed(self) -> tuple[Observation, ...]:
        """One observation per batch; neighbours that were sent equal weights share the tensors, so that one wave can hold them."""
        observations = [self._observed(0)]
        for k in range(1, self.cell.n):
            one, before = self._observed(k), observations[-1].params
            alike = all(torch.equal(one.params[name], t) for name, t in before.items())
            observations.append(replace(one, params=before) if alike else one)
        return tuple(observations)

    def isolated(self, k: int) -> int:
        """The example of a batch (of a group's first client) with the largest update at the weights that were sent."""
        fed, sent = self.fed, self._observed(k).params
        batch = fed.shards.batch_at(k * self.cell.members, 1)
        update, rng = fed.update_fn(), partial(generator, fed.protocol.seed, "client", k)
        singles = [Batch(batch.x[i : i + 1], batch.y[i : i + 1]) for i in range(len(batch.y))]
        return max(range(len(singles)), key=lambda i: float(norm(update(sent, singles[i], rng(1)))))

    def _observed(self, k: int) -> Observation:
        """Return the server's observation in the last round of its k-th client or group."""
        cell, fed, server_attack = self.cell, self.fed, self.cell.build_server_attack()
        honest, buffers = fed.initial()
        first, known, where = k * cell.members, public_knowledge(fed), f"cell {cell.name}: server attack"
        observations: list[Observation] = []
        for round in range(1, cell.rounds + 1):
            sent = [honest] * cell.members
            for place in range(cell.members):
                # the target of a secure sum gets honest weights, if the others' are dead
                spared = isinstance(server_attack, dead_layer) and place == 0 and cell.members > 1
                if server_attack is not None and not spared:
                    rng = generator(fed.protocol.seed, "malice", k, round)
                    sent[place] = craft_weights(server_attack, where, honest, known, rng, observations, place)
            updates = [
                {name: t.detach() for name, t in fed.own_update(params, buffers, first + i, round).items()}
                for i, params in enumerate(sent)
            ]
            update = updates[0] if cell.members == 1 else average(updates, [1] * cell.members)
            observations.append(FederationSource(fed).seen(first, round, (sent[0], buffers), update))
        return observations[-1]


def _shards(cell: Setting, dataset: Dataset, rows: Sequence[Tensor], seed: int) -> Shards:
    """The attacked examples, and the last training examples as public ones; SpecError if some are both, or if there are too few."""
    first = len(dataset.y) - cell.auxiliary
    if cell.images.part == "test":
        rows = [r + len(dataset.y) for r in rows]
    clients = tuple(part for group in rows for part in group.chunk(cell.members))
    return ChosenShards(dataset, clients, torch.arange(first, len(dataset.y)), cell.images.batch_size, seed)


@lru_cache(maxsize=2)
def _read(items: tuple[tuple[str, Any], ...], where: str) -> Dataset:
    dataset = build(dict(items), where, DATASET)
    assert isinstance(dataset, Dataset)
    return dataset


def choose(dataset: Dataset, images: Images, n: int) -> list[Tensor]:
    """The rows of the first n batches of a dataset's part, in order.

    Raises:
        SpecError: there are too few examples.
    """
    y = dataset.y_test if images.part == "test" else dataset.y
    left = [i for i in range(images.first, len(y)) if not images.classes or int(y[i]) in images.classes]
    batches: list[Tensor] = []
    for _ in range(n):
        taken: list[int] = []
        for i in left:
            if not images.distinct or int(y[i]) not in {int(y[j]) for j in taken}:
                taken.append(i)
            if len(taken) == images.batch_size:
                break
        else:
            held = f"{_examples(dataset)} in the {images.part} part"
            raise SpecError(f"{dataset.name} has too few {held} for {n} updates of {images.batch_size}; lower --n")
        left = [i for i in left if i not in set(taken)]
        batches.append(torch.tensor(taken))
    return batches


def _examples(dataset: Dataset) -> str:
    return f"{modality_of(dataset).main.private}s"


def _pretrain(cell: Setting, fed: Federation) -> str:
    """Train the federation's network as the setting says; returns a note on it."""
    if cell.train is None:
        return ""
    dataset = fed.shards.dataset
    defended = cell.chain if cell.train.defended else []
    key = json.dumps([fed.protocol.model, defended, asdict(cell.train), asdict(cell.images), fed.protocol.seed])
    if key not in _STATES:
        _STATES[key] = _train(cell.train, fed)
    fed.model.load_state_dict(_STATES[key])
    right = "words" if not dataset.labelled else _examples(dataset)
    accuracy, _ = fed.evaluate(fed.initial()[0], TESTED)
    return f"{cell.train.steps} steps of training, {accuracy:.0%} of the test {right} right"


_STATES: dict[str, dict[str, Tensor]] = {}  # by setting, so that all attacks and both precisions use the same weights


def _train(training: Pretraining, fed: Federation) -> dict[str, Tensor]:
    dataset, seed = fed.shards.dataset, fed.protocol.seed
    compute = defended_gradient(fed, training.batch_size) if training.defended else fed.gradient
    params = detached_params(fed.model)
    adam = torch.optim.Adam(params.values(), lr=training.rate)
    order = generator(seed, "training order")
    last = len(dataset.y) - AUXILIARY
    for step in range(training.steps):
        chosen = torch.randint(training.first, last, (training.batch_size,), generator=order)
        batch = batch_of(dataset.x, dataset.y, chosen)
        update = compute(params, batch, generator(seed, "training", step))
        for name, p in params.items():
            p.grad = update[name].detach()
        adam.step()
    return {**fed.model.state_dict(), **{k: p.detach() for k, p in params.items()}}


def defended_gradient(fed: Federation, batch_size: int) -> UpdateFn:
    """The gradient of a batch under the federation's defenses, without its local training.

    A defense of updates acts on each example's gradient, as it does on the attacked updates of single examples.
    """
    links = _with(fed, [torch.arange(batch_size)]).chain.links
    before = links[: next(i for i, link in enumerate(links) if isinstance(link, local_sgd))]
    whole = Chain(before)
    each = all(isinstance(link, UpdateTransform) for link in before)
    return per_example(whole)(fed.gradient) if each else whole(fed.gradient)
