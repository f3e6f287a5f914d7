"""Setups: what a server observes in one setting of a paper's table, computed by the clients' code without Flower."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.attacks.base import Knowledge, Observation, Sentences
from fedgauge.client.chain import Chain, trained_on
from fedgauge.client.components import SpecError, build, call
from fedgauge.client.data.corpora import Text
from fedgauge.client.data.images import Dataset, batch_of
from fedgauge.client.federation import DATASET
from fedgauge.client.local_data import data_folder
from fedgauge.client.models.build import build_model
from fedgauge.client.models.losses import next_token, per_example_accuracy
from fedgauge.client.models.tokenizer import Tokenizer
from fedgauge.client.models.vision import detached_params, floating_buffers, load_weights
from fedgauge.client.rng import generator
from fedgauge.client.training import gradient, local_sgd
from fedgauge.client.transforms import GroupMean, UpdateTransform, per_example
from fedgauge.client.update import Batch, Loss, Params, Transform, UpdateFn, average, norm
from fedgauge.simulations.experiments.paper_tables import OFFERED, Images, Setting, build_link

AUXILIARY = 200  # last training images, held out of pretraining


@dataclass(frozen=True, eq=False)
class Setup:
    """What the server observes and knows in one setting, and the true batches, which only grading reads.

    Args:
        clients: whose updates come in turns: 0, 1, 2, 0, 1, 2 ...
        augmented: the examples as they were trained on, where the chain changes them.
        tokenizer: of sentences.
        isolated: for each batch, the example with the largest update at the weights that were sent.
    """

    observations: tuple[Observation, ...]
    truth: tuple[Batch, ...]
    known: Knowledge
    note: str = ""
    clients: int = 1
    augmented: tuple[Batch, ...] | None = None
    tokenizer: Tokenizer | None = None
    isolated: tuple[int, ...] | None = None


def build_setup(cell: Setting, seed: int) -> Setup:
    """Compute the n updates of a setting; SpecError if data or weights are missing."""
    dataset = _dataset(cell)
    together = cell.members * cell.images.batch_size
    candidates = choose(dataset, replace(cell.images, batch_size=together), cell.n * (4 if cell.faintest else 1))
    model, note = _network(cell, dataset, seed)
    chain = Chain(_links(cell, dataset, model, cell.images.batch_size))
    known = Knowledge(
        model=model,
        chain=chain if cell.members == 1 else Chain((*chain.links, GroupMean(cell.members))),
        shape=dataset.shape,
        classes=dataset.classes,
        batch_size=together,
        mean=dataset.mean,
        std=dataset.std,
        auxiliary=_auxiliary(dataset, cell, candidates),
        loss=_loss(dataset),
        text=Sentences() if isinstance(dataset, Text) else None,
    )
    bare = gradient(model, known.loss, dataset.normalise)
    clients = _Clients(cell, chain(bare), known, detached_params(model), seed)
    truth = clients.faintest(candidates) if cell.faintest else candidates
    isolated: tuple[int, ...] | None = None
    if cell.alone or any("isolated_psnr" in spec.metrics for spec in cell.attacks):
        isolated = tuple(map(clients.isolated, range(cell.n), truth))
    if cell.alone and isolated is not None:
        truth = tuple(Batch(b.x[i : i + 1], b.y[i : i + 1]) for b, i in zip(truth, isolated, strict=True))
        isolated = (0,) * cell.n
        known = replace(known, chain=chain, batch_size=1)
        clients = replace(clients, cell=replace(cell, server_attack=None, rounds=1, members=1))
    observations = clients.observed(truth)
    params = clients.honest
    made = [trained_on(chain, bare, params, batch, generator(seed, "client", k, 1)) for k, batch in enumerate(truth)]
    augmented = tuple(batch for batch in made if batch is not None)
    # every client has equally many images
    turns = max(c for c in range(1, max(cell.clients, 1) + 1) if cell.n % c == 0)
    tokenizer = dataset.tokenizer if isinstance(dataset, Text) else None
    return Setup(observations, truth, known, note, turns, augmented or None, tokenizer, isolated)


@dataclass(frozen=True, eq=False)
class _Clients:
    """The clients of a setting, and what its server sends them."""

    cell: Setting
    client: UpdateFn
    known: Knowledge
    honest: Params
    seed: int

    def observed(self, truth: Sequence[Batch]) -> tuple[Observation, ...]:
        """One observation per batch; neighbours that were sent equal weights share the tensors, so that one wave can hold them."""
        observations: list[Observation] = []
        for k, batch in enumerate(truth):
            observation = self._observed(k, batch)
            same_weights = bool(observations) and all(
                torch.equal(observation.params[name], t) for name, t in observations[-1].params.items()
            )
            observations.append(replace(observation, params=observations[-1].params) if same_weights else observation)
        return tuple(observations)

    def faintest(self, candidates: Sequence[Batch]) -> tuple[Batch, ...]:
        """The quarter of the batches with the smallest updates at the honest weights."""
        rng = partial(generator, self.seed, "client")
        sizes = torch.tensor([float(norm(self.client(self.honest, b, rng(k, 1)))) for k, b in enumerate(candidates)])
        chosen = sizes.topk(len(candidates) // 4, largest=False).indices.sort().values
        return tuple(candidates[k] for k in chosen.tolist())

    def isolated(self, k: int, batch: Batch) -> int:
        """The example of a batch (of a group's first client) with the largest update at the weights that were sent."""
        sent = self._observed(k, batch).params
        size = len(batch.y) // self.cell.members
        singles = [Batch(batch.x[i : i + 1], batch.y[i : i + 1]) for i in range(size)]
        rng = partial(generator, self.seed, "client", k)
        return max(range(size), key=lambda i: float(norm(self.client(sent, singles[i], rng(1)))))

    def _observed(self, k: int, batch: Batch) -> Observation:
        """What the server observes in the last round of its k-th client, or group of clients."""
        cell, server_attack, buffers = self.cell, self.cell.build_server_attack(), floating_buffers(self.known.model)
        parts = [Batch(*part) for part in zip(batch.x.chunk(cell.members), batch.y.chunk(cell.members), strict=True)]
        observations: list[Observation] = []
        for round in range(1, cell.rounds + 1):
            sent = self.honest
            if server_attack is not None:
                arguments = {"known": self.known, "rng": generator(self.seed, "malice", k, round), "seen": observations}
                sent = call(server_attack.craft, {"sent": self.honest, **arguments}, f"cell {cell.name}: server attack")
            weights_by_member = [sent] if cell.members == 1 else [self.honest, *[sent] * (cell.members - 1)]
            updates = [
                _detached(self.client(params, part, generator(self.seed, "client", k * cell.members + i, round)))
                for i, (params, part) in enumerate(zip(weights_by_member, parts, strict=True))
            ]
            update = updates[0] if cell.members == 1 else average(updates, [1] * cell.members)
            observations.append(Observation(round, k, weights_by_member[0], update, buffers))
        return replace(observations[-1], round=1)


def _loss(dataset: Dataset) -> Loss:
    """The loss that clients minimise."""
    return next_token() if isinstance(dataset, Text) and dataset.task == "next_token" else F.cross_entropy


def _noun(dataset: Dataset) -> str:
    return "sentences" if isinstance(dataset, Text) else "images"


def _detached(update: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k: t.detach() for k, t in update.items()}


def _auxiliary(dataset: Dataset, cell: Setting, candidates: Sequence[Batch]) -> Batch:
    """Public examples: the last training examples; SpecError if some of them are attacked, or if there are too few."""
    first, images = len(dataset.y) - cell.auxiliary, cell.images
    if first < 0:
        raise SpecError(
            f"cell {cell.name}: auxiliary = {cell.auxiliary:,}, but {dataset.name} has {len(dataset.y):,} {_noun(dataset)}"
        )
    attacked = [t.x for t in candidates] if images.part == "train" else []
    public = batch_of(dataset.x, dataset.y, torch.arange(first, len(dataset.y)))
    own = {x.numpy().tobytes() for batch in attacked for x in batch}
    if both := sum(x.numpy().tobytes() in own for x in public.x) if own else 0:
        raise SpecError(
            f"cell {cell.name}: {both} of the {cell.auxiliary:,} auxiliary {_noun(dataset)} are attacked; lower auxiliary"
        )
    return public


def _dataset(cell: Setting) -> Dataset:
    dataset = _read(tuple(cell.images.table.items()), f"cell {cell.name}: data")
    if isinstance(dataset, Text):
        if cell.images.mean or cell.images.std:
            raise SpecError(f"cell {cell.name}: data: mean and std are for images, but {dataset.name} holds sentences")
        return dataset
    mean, std = cell.images.mean or dataset.mean, cell.images.std or dataset.std
    if not len(mean) == len(std) == dataset.shape[0]:
        raise SpecError(f"cell {cell.name}: data: mean and std need {dataset.shape[0]} numbers each (one a channel)")
    return replace(dataset, mean=mean, std=std)


@lru_cache(maxsize=2)
def _read(items: tuple[tuple[str, Any], ...], where: str) -> Dataset:
    dataset = build(dict(items), where, DATASET)
    assert isinstance(dataset, Dataset)
    return dataset


def choose(dataset: Dataset, images: Images, n: int) -> tuple[Batch, ...]:
    """The first n batches of a dataset, in order; SpecError if there are too few examples."""
    x, y = (dataset.x_test, dataset.y_test) if images.part == "test" else (dataset.x, dataset.y)
    if y.dim() > 1 and (images.distinct or images.classes):
        raise SpecError(f"distinct and classes need class labels, but the labels of {dataset.name} are words")
    left = [i for i in range(images.first, len(y)) if not images.classes or int(y[i]) in images.classes]
    batches = []
    for _ in range(n):
        taken: list[int] = []
        for i in left:
            if not images.distinct or int(y[i]) not in {int(y[j]) for j in taken}:
                taken.append(i)
            if len(taken) == images.batch_size:
                break
        if len(taken) < images.batch_size:
            raise SpecError(
                f"{dataset.name}, {images.part} part, has too few {_noun(dataset)} for {n} updates of {images.batch_size} from "
                f"number {images.first} on; lower --n"
            )
        left = [i for i in left if i not in set(taken)]
        batches.append(batch_of(x, y, torch.tensor(taken)))
    return tuple(batches)


# -------------------------------------------------------------------------------------------------------- the networks


def _network(cell: Setting, dataset: Dataset, seed: int) -> tuple[nn.Module, str]:
    """The setting's network in eval mode, and a note on its training."""
    table, server_attack = cell.model, cell.build_server_attack()
    if server_attack is not None and server_attack.architecture is not None:
        table = {**table, "architectures": [server_attack.architecture]}
    model = build_model(table, f"cell {cell.name}: model", dataset.offered, seed).eval()
    if cell.weights:
        where = f"cell {cell.name}: weights"
        folder = data_folder()
        if folder is None:
            raise SpecError(
                f"{where}: {cell.weights} belongs into the local data folder: set FEDGAUGE_DATA to that folder"
            )
        call(load_weights, {"model": model, "path": folder / cell.weights}, where)
    if cell.train is None:
        return model, ""
    defended = cell.chain if cell.train.defended else []
    key = json.dumps([table, defended, asdict(cell.train), asdict(cell.images), seed])
    model.load_state_dict(_trained(key, partial(_train, model, cell, dataset, seed)))
    right = "words" if _loss(dataset) == next_token() else _noun(dataset)
    return model, f"{cell.train.steps} steps of training, {_accuracy(model, dataset):.0%} of the test {right} right"


_STATES: dict[str, dict[str, Tensor]] = {}


def _trained(key: str, train: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The trained weights of one network, computed once per process, so that all attacks and both precisions use the same."""
    if key not in _STATES:
        _STATES[key] = train()
    return _STATES[key]


def _train(model: nn.Module, cell: Setting, dataset: Dataset, seed: int) -> dict[str, Tensor]:
    training = cell.train
    assert training is not None
    bare = gradient(model, _loss(dataset), dataset.normalise)
    compute = _defended(bare, model, cell, dataset, training.batch_size) if training.defended else bare
    params = detached_params(model)
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
    return {**model.state_dict(), **{k: p.detach() for k, p in params.items()}}


def _links(cell: Setting, dataset: Dataset, model: nn.Module, batch_size: int) -> tuple[Transform, ...]:
    values = (model, dataset.shape, dataset.classes, batch_size, dataset.normalise)
    offered = dict(zip(OFFERED, values, strict=True))
    return tuple(build_link(table, f"cell {cell.name}: chain #{i}", offered) for i, table in enumerate(cell.chain, 1))


def _defended(bare: UpdateFn, model: nn.Module, cell: Setting, dataset: Dataset, batch_size: int) -> UpdateFn:
    """The gradient of a batch under the setting's defenses, without its local training.

    A defense of updates acts on each example's gradient, as it does on the attacked updates of single examples.
    """
    links = _links(cell, dataset, model, batch_size)
    before = links[: next(i for i, link in enumerate(links) if isinstance(link, local_sgd))]
    whole = Chain(before)
    return per_example(whole)(bare) if all(isinstance(link, UpdateTransform) for link in before) else whole(bare)


def _accuracy(model: nn.Module, dataset: Dataset, count: int = 2000) -> float:
    test = batch_of(dataset.x_test, dataset.y_test, torch.arange(min(count, len(dataset.y_test))))
    with torch.no_grad():
        return float(per_example_accuracy(model(dataset.normalise(test.x)), test.y).mean())
