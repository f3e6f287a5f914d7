"""Shadow updates: simulates the updates that clients with auxiliary images would send, through the chain as the attacker knows it.

A learned attack is trained on pairs (images, update), and it adapts to a defense since its updates went through that defense.
Here the chain's own links draw noise from the attacker's generator; noise-free forms are for attacks that need gradients.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.func import vmap

from fedgauge.attacks import labels as labelling
from fedgauge.attacks.base import Knowledge, Wave
from fedgauge.attacks.engine.gradients.per_problem import examples_are_independent, gradients, local_training_changes
from fedgauge.attacks.engine.gradients.recording import Unsupported
from fedgauge.attacks.learned.cache import TensorCache, digest
from fedgauge.attacks.learned.feature_hashing import Sketch, check_memory
from fedgauge.client.chain import Chain
from fedgauge.client.models.losses import is_mean
from fedgauge.client.models.vision import last_linear, layer_parameters
from fedgauge.client.rng import generator
from fedgauge.client.training import gradient, local_sgd
from fedgauge.client.transforms import GroupMean, UpdateTransform, is_identity, per_example
from fedgauge.client.update import Batch, Params, Update, UpdateFn

CHUNK = 128  # clients at once: LeNet's updates of so many are 8 MB
NUMBERS = 2**26  # entries of the updates computed at once, 256 MB: only a few updates of a language model
FEWEST = 4  # least number of batches in the auxiliary images; one is held out
VERSION = 2  # of the cached tensors; to be changed when they are computed in another way


class Stages(NamedTuple):
    """The stages of a chain whose only gradients are those of whole batches, or of single examples."""

    each: tuple[UpdateTransform, ...]  # on each example's gradient
    before: tuple[UpdateTransform, ...]  # on the batch's gradient
    local: local_sgd
    after: tuple[UpdateTransform, ...]  # on the finished update


def stages(chain: Chain) -> Stages | None:
    """The stages of a client's chain; None if it computes in another way, so that it has to run itself."""
    place = chain.links.index(chain.local)
    front, after = ([k for k in part if not is_identity(k)] for part in (chain.links[:place], chain.links[place + 1 :]))
    one_by_one = [k.inner for k in front if isinstance(k, per_example)]
    before = [k for k in front if not isinstance(k, per_example)]
    if front != [k for k in front if isinstance(k, per_example)] + before:
        return None
    each, whole, last = (
        tuple(k for k in part if isinstance(k, UpdateTransform)) for part in (one_by_one, before, after)
    )
    if len(each) + len(whole) + len(last) < len(one_by_one) + len(before) + len(after):
        return None
    if not chain.local.plain or chain.local.batch_size is not None or (front and chain.local.steps > 1):
        return None
    return Stages(each, whole, chain.local, last)


@dataclass(frozen=True, eq=False)
class Simulator:
    """Simulates clients under one model, with any images.

    Args:
        known: has the chain; if it ends in a sum, each of its clients draws separately.
        quiet: use the chain's noise-free form.
    """

    known: Knowledge
    params: Params
    quiet: bool = False

    @property
    def members(self) -> int:
        """Clients in one update."""
        return next((link.members for link in self.known.chain.links if isinstance(link, GroupMean)), 1)

    @property
    def client(self) -> Chain:
        """The chain of each client."""
        links = tuple(link for link in self.known.chain.links if not isinstance(link, GroupMean))
        return Chain(links).mean if self.quiet else Chain(links)

    def updates(self, x: Tensor, y: Tensor, rng: Generator, chunk: int = CHUNK) -> Iterator[Update]:
        """The updates (n, ...) of N batches x (N, B, C, H, W) in [0, 1] with labels y (N, B), a few at a time, in order."""
        by_stages = self._stages
        entries = sum(p.numel() for p in self.params.values())
        chunk = max(1, min(chunk, NUMBERS // entries) // self.members)
        for some, labels in zip(x.split(chunk), y.split(chunk), strict=True):
            batches = self._apart(some, labels)
            if by_stages is not None:
                try:
                    yield _detached(self._summed(self._together(by_stages, batches, rng)))
                    continue
                except Unsupported:
                    by_stages = None  # use the chain itself from now on
            yield self._summed(self._by_chain(batches, rng))

    def differentiable(self, x: Tensor, y: Tensor) -> Update:
        """The updates (n, ...) of batches x (n, B, C, H, W), differentiable by x; for a quiet simulator."""
        batches = self._apart(x, y)
        if (by_stages := self._stages) is not None:
            try:
                return self._summed(self._together(by_stages, batches, None))
            except Unsupported:
                pass
        return self._summed(_mapped(self._bare(), self.params, batches, None))

    @property
    def _stages(self) -> Stages | None:
        if self.known.text is not None:  # token ids have no gradient, which `gradients` needs
            return None
        return stages(self.client) if is_mean(self.known.loss, self.known.classes) else None

    def _apart(self, x: Tensor, y: Tensor) -> Batch:
        """The batch of each member of a sum."""
        return Batch(*(t.reshape(-1, t.shape[1] // self.members, *t.shape[2:]) for t in (x, y)))

    def _summed(self, updates: Update) -> Update:
        if self.members == 1:
            return updates
        return {k: t.view(-1, self.members, *t.shape[1:]).mean(1) for k, t in updates.items()}

    def _together(self, plan: Stages, batches: Batch, rng: Generator | None) -> Update:
        """All clients' gradients in one pass, then each link on all of them, differentiable."""
        model, known = self.known.model, self.known
        size = batches.x.shape[1]
        x, y = known.normalise(batches.x), batches.y
        if plan.each:
            x, y = x.flatten(0, 1)[:, None], y.flatten()[:, None]
        if not examples_are_independent(model, self.params, x[:1] if len(x) == 1 else x[:2]):
            raise Unsupported("the model mixes the examples of a batch")
        x = x.requires_grad_()  # an input that already requires grad keeps its graph
        if plan.each or plan.before:
            found = _formed(gradients(model, self.params, x, y, 1.0, False, known.loss))
            found = _through(plan.each, found, rng)
            if plan.each:
                found = {k: t.view(-1, size, *t.shape[1:]).mean(1) for k, t in found.items()}
            found = {k: -plan.local.rate * t for k, t in _through(plan.before, found, rng).items()}
        else:
            found = _formed(local_training_changes(model, self.params, x, y, plan.local, False, known.loss))
        return _through(plan.after, found, rng)

    def _bare(self) -> UpdateFn:
        return self.client(gradient(self.known.model, self.known.loss, normalise=self.known.normalise))

    def _by_chain(self, batches: Batch, rng: Generator) -> Update:
        client = self._bare()
        if len(batches.x) > 1 and self._maps(client, batches):
            return _detached(_mapped(client, self.params, batches, rng))
        alone = [client(self.params, Batch(x, y), rng) for x, y in zip(*batches, strict=True)]
        return {k: torch.stack([one[k].detach() for one in alone]) for k in alone[0]}

    def _maps(self, client: UpdateFn, batches: Batch) -> bool:
        """Whether vmap works for this client: a link may branch on values, which vmap does not allow."""
        try:
            _mapped(client, self.params, Batch(batches.x[:2], batches.y[:2]), torch.Generator().manual_seed(0))
        except (RuntimeError, ValueError):
            return False  # then one client after the other, where a real error is raised again
        return True


def _mapped(client: UpdateFn, params: Params, batches: Batch, rng: Generator | None) -> Update:
    def one(x: Tensor, y: Tensor) -> Update:
        return client(params, Batch(x, y), rng)

    found: Update = vmap(one, randomness="different")(*batches)
    return found


def _formed(found: object) -> Update:
    assert isinstance(found, dict)
    return found


def _detached(updates: Update) -> Update:
    return {k: t.detach() for k, t in updates.items()}


def _through(links: tuple[UpdateTransform, ...], updates: Update, rng: Generator | None) -> Update:
    """Updates (n, ...) after some links, with separate draws for each."""
    for link in links:
        updates = vmap(lambda update, link=link: link.apply(update, rng), randomness="different")(updates)
    return updates


def flat(updates: Update) -> Tensor:
    """Updates (n, ...) as rows (n, entries)."""
    return torch.cat([t.flatten(1) for t in updates.values()], 1)


# --------------------------------------------------------------------------------------------------- what is learned from


@dataclass(frozen=True)
class UpdateFeatures:
    """The features of an update that an inverter uses.

    Args:
        by_label: one image at a time, by its label: the classifier's rows are ordered with the label's row first, so that an
            image's information is in the same place whatever its label; else the whole batch at once, by ascending labels.
        buckets: of feature hashing; 0: none. signed: with random signs.
    """

    by_label: bool = True
    buckets: int = 0
    signed: bool = True

    def rows(self, known: Knowledge, updates: Update, y: Tensor) -> Tensor:
        """Rows (n, columns) of updates (n, ...) with labels y (n, B); by label (n * B, columns)."""
        if self.by_label:
            updates = {k: t.repeat_interleave(y.shape[1], 0) for k, t in updates.items()}
            updates = own_row_first(known, updates, y.flatten())
        return self.hashed(flat(updates))

    def hashed(self, rows: Tensor) -> Tensor:
        """Rows (n, entries) of updates, hashed into buckets if there are any."""
        return self._sketch(rows.shape[1])(rows) if self.buckets else rows

    def noise(self, entries: int) -> Tensor:
        """The deviation (columns,) of independent noise of deviation 1 in every entry; (1,) if all columns are alike."""
        return self._sketch(entries).counts.sqrt() if self.buckets else torch.ones(1)

    def check(self, entries: int) -> None:
        """ValueError if updates of this many entries cannot be hashed into the buckets."""
        if self.buckets:
            self._sketch(entries)

    def columns(self, entries: int) -> int:
        """Columns of a row."""
        return self.buckets or entries

    def _sketch(self, entries: int) -> Sketch:
        return _sketch(entries, self.buckets, self.signed)


@lru_cache(maxsize=4)
def _sketch(entries: int, buckets: int, signed: bool) -> Sketch:
    return Sketch.draw(entries, buckets, signed, generator("sketch", entries, buckets, signed))


def own_row_first(known: Knowledge, updates: Update, labels: Tensor) -> Update:
    """Updates (n, ...) with the classifier's rows reordered: the row of the own label (n,) first, then the others.

    Unchanged if the model's last fully connected layer is no classifier.
    """
    try:
        layer = last_linear(known.model)
    except ValueError:
        return updates
    classes, names = known.classes, layer_parameters(layer)
    if updates[names[0]].shape[1] != classes:
        return updates
    orders = torch.stack([torch.tensor([c, *(i for i in range(classes) if i != c)]) for c in range(classes)])
    order = orders.to(labels.device)[labels]
    moved = {k: updates[k] for k in names if k in updates}
    each = torch.arange(len(labels), device=labels.device)[:, None]
    return {**updates, **{k: t[each, order] for k, t in moved.items()}}


@dataclass(frozen=True, eq=False)
class ShadowDataset:
    """Pairs of updates and images on which an inverter is trained or tested.

    Args:
        rows: (n, columns), the UpdateFeatures of the updates.
        groups: (N, B), the auxiliary images of each update; by label n = N * B, in this order, else n = N.
        labels: (N, B) ascending, as the attacker would restore them: some are wrong, and an image is placed at its own label
            if that is among them.
    """

    rows: Tensor
    groups: Tensor
    labels: Tensor


@dataclass(frozen=True, eq=False)
class ShadowTrainer:
    """Makes training data from the auxiliary images under one threat model and model; the same for every client.

    Args:
        passes: how often each image is grouped with others, for batches of several.
    """

    known: Knowledge
    params: Params
    view: UpdateFeatures
    passes: int = 1
    cache: TensorCache = field(default_factory=TensorCache.own)

    def __post_init__(self) -> None:
        if self.passes < 1:
            raise ValueError(f"passes must be at least 1, got {self.passes}")
        object.__setattr__(self, "cache", replace(self.cache, device=self.device))
        given, size = self.known.labels, self.known.batch_size
        if given is not None and given.shape[1] != size:
            raise ValueError(
                f"expected {size} given labels for each update, the inverter's batch size, got {given.shape[1]}"
            )

    @cached_property
    def auxiliary(self) -> Batch:
        """The auxiliary images; ValueError if there are none, too few, or of another shape."""
        found, known = self.known.auxiliary, self.known
        if found is None:
            raise ValueError("a learned attack needs auxiliary images, and the attacker has none")
        if tuple(found.x.shape[1:]) != tuple(known.shape):
            raise ValueError(
                f"expected auxiliary images of the clients' shape {tuple(known.shape)}, got {tuple(found.x.shape[1:])}"
            )
        if len(found.x) < FEWEST * known.batch_size:
            raise ValueError(
                f"learning to invert batches of {known.batch_size} needs at least {FEWEST * known.batch_size} auxiliary "
                f"images, got {len(found.x)}"
            )
        return found

    @cached_property
    def name(self) -> str:
        """The digest of threat model and features: of everything but the weights."""
        known, model = self.known, self.known.model
        images = digest(self.auxiliary.x, self.auxiliary.y)
        threat = digest(known.chain, known.batch_size, known.mean, known.std, known.loss, str(model), model.training)
        return digest(VERSION, images, threat, self.view, self.passes)

    @cached_property
    def key(self) -> str:
        """The digest of everything; an update of two examples covers what a user's own model or loss does not show by name."""
        known, found = self.known, self.auxiliary
        probe = gradient(known.model, known.loss, known.normalise)(self.params, Batch(found.x[:2], found.y[:2]), None)
        right: tuple[str, ...] = ("labels given",)
        if known.labels is None:
            right = ("labels by a rule",) if labelling.learns(known) else ()
        return digest(self.name, self.params, dict(known.model.named_buffers()), probe, *right)

    @cached_property
    def entries(self) -> int:
        """Entries of an update."""
        return sum(p.numel() for p in self.params.values())

    @cached_property
    def split(self) -> tuple[Tensor, Tensor]:
        """The images for training, and a tenth that is held out."""
        order = torch.randperm(len(self.auxiliary.x), generator=generator("held out", self.name)).to(self.device)
        held = max(self.known.batch_size, len(order) // 10)
        return order[held:], order[:held]

    def groups(self, held: bool, passed: int = 0) -> Tensor:
        """Batches (N, B) of the images in random order, each by ascending labels; an incomplete batch is left out."""
        images, size = self.split[held], self.known.batch_size
        order = torch.randperm(len(images), generator=generator("groups", self.name, held, passed)).to(self.device)
        found = images[order][: len(images) // size * size].view(-1, size)
        labels = self.auxiliary.y[found]
        if labels.dim() > found.dim():  # next words, which define no order of sentences
            return found
        return found.gather(1, labels.argsort(dim=1, stable=True))

    def shadow_data(self, held: bool, quiet: bool = False, most: int | None = None) -> ShadowDataset:
        """Training data, simulated now or cached.

        Args:
            held: use the held-out images.
            quiet: use the chain's noise-free form.
            most: only this many updates, which are not cached.
        """
        count = 1 if held else self.passes
        groups = torch.cat([self.groups(held, p) for p in range(count)])[:most]
        self.view.check(self.entries)
        if not len(groups):
            raise ValueError("the auxiliary images do not fill a single batch")
        # checked for the largest table, so that buckets that fit now fit for all of them
        largest = self.passes * (len(self.split[0]) // self.known.batch_size)
        each = self.known.batch_size if self.view.by_label else 1
        check_memory(largest * each, self.view.columns(self.entries), self.device)
        name = f"updates-{digest(self.key, held, quiet)}"
        if most is not None:  # simulating a part is as fast as reading it, and caching it would evict whole tables
            return ShadowDataset(**self._simulated(groups, name, quiet))
        return ShadowDataset(**self.cache.get(name, lambda: self._simulated(groups, name, quiet)))

    @property
    def device(self) -> torch.device:
        """Where updates are simulated."""
        return next(iter(self.params.values())).device

    def _simulated(self, groups: Tensor, name: str, quiet: bool) -> dict[str, Tensor]:
        x, y = self.auxiliary.x[groups], self.auxiliary.y[groups]
        each = self.known.batch_size if self.view.by_label else 1
        like = next(iter(self.params.values()))  # not like the examples, which may be token ids
        found = like.new_empty(len(groups) * each, self.view.columns(self.entries))
        labels = y.clone()
        done = 0
        for updates in Simulator(self.known, self.params, quiet).updates(x, y, generator("simulated", name)):
            part = slice(done, done + len(next(iter(updates.values()))))
            labels[part] = self.labels_as_restored(updates, y[part])
            found[part.start * each : part.stop * each] = self.view.rows(self.known, updates, labels[part])
            done = part.stop
        return {"rows": found, "groups": aligned_orders(groups, y, labels), "labels": labels}

    def labels_as_restored(self, updates: Update, y: Tensor) -> Tensor:
        """The labels (n, B) that the attacker would use for true ones y (n, B): restored, with mistakes, unless given."""
        if self.known.labels is not None or not self.view.by_label:
            return y
        seen = Wave(0, tuple(range(len(y))), self.params, updates)
        return labelling.restore(seen, self.known).sort(1).values


def aligned_orders(groups: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    """Batches (N, B) of images with labels y, reordered so that as many as possible are at their own label in `labels`."""
    from scipy.optimize import linear_sum_assignment

    found = groups.clone()
    for k in (y != labels).any(1).nonzero().flatten().tolist():
        order = linear_sum_assignment((labels[k][:, None] != y[k]).cpu().numpy())[1]
        found[k] = groups[k][torch.from_numpy(order).to(groups.device)]
    return found
