"""Shadow updates, the training data of learned attacks: auxiliary images and the updates that clients would send for them.

They pass through the clients' defense, to which a learned attack therefore adapts. Feature hashing adds up an update's entries in
random buckets. Random signs (count-sketch: Charikar et al., 2002; Weinberger et al., 2009) preserve inner products on average;
Learning To Invert (Wu et al., UAI 2023) uses none.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from fedgauge.attacks import label_restoration as labelling
from fedgauge.attacks.base import Knowledge, Wave
from fedgauge.attacks.engine.batch_limiter import SHARE, free_bytes
from fedgauge.attacks.engine.cache import TensorCache, digest
from fedgauge.attacks.engine.computation import classifier_parameters
from fedgauge.attacks.engine.simulator import Simulator
from fedgauge.client.gradient import gradient
from fedgauge.client.psnr import assigned
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch, Params, Update, as_rows

FEWEST = 4  # least number of batches in the auxiliary images; one is held out
VERSION = 2  # of the cached tensors; to be changed when they are computed in another way


@lru_cache(maxsize=4)
def sketch(entries: int, buckets: int, signed: bool) -> tuple[Tensor, Tensor]:
    """Draw each entry's bucket and sign (entries,): a fixed linear map, never formed as a matrix."""
    rng = generator("sketch", entries, buckets, signed)
    bins = torch.randint(buckets, (entries,), generator=rng)
    return bins, 2.0 * torch.randint(2, (entries,), generator=rng) - 1 if signed else torch.ones(entries)


@dataclass(frozen=True)
class UpdateFeatures:
    """The features of an update that an inverter uses.

    Args:
        by_label: one image at a time, by its label. The classifier's rows are ordered with the label's row first, so that an
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
        return self.hashed(as_rows(updates))

    def hashed(self, rows: Tensor) -> Tensor:
        """Hash rows of updates (n, entries) into the buckets; without buckets, return them unchanged."""
        if not self.buckets:
            return rows
        bins, signs = sketch(rows.shape[1], self.buckets, self.signed)
        return rows.new_zeros(len(rows), self.buckets).index_add_(1, bins.to(rows.device), rows * signs.to(rows))

    def noise(self, entries: int) -> Tensor:
        """The deviation (columns,) of independent noise of deviation 1 in every entry; (1,) if all columns are alike."""
        if not self.buckets:
            return torch.ones(1)
        return torch.bincount(sketch(entries, self.buckets, self.signed)[0], minlength=self.buckets).sqrt()


def own_row_first(known: Knowledge, updates: Update, labels: Tensor) -> Update:
    """Updates (n, ...) with the classifier's rows reordered: the row of the own label (n,) first, then the others.

    Unchanged if the model has no fully connected classifier.
    """
    try:
        names = classifier_parameters(known.model, known.shape)
    except ValueError:
        return updates
    classes = known.classes
    if updates[names[0]].shape[1] != classes:
        return updates
    order = (torch.arange(classes, device=labels.device) != labels[:, None]).int().argsort(dim=1, stable=True)
    each = torch.arange(len(labels), device=labels.device)[:, None]
    return {k: t[each, order] if k in names else t for k, t in updates.items()}


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

    @cached_property
    def cache(self) -> TensorCache:
        return replace(TensorCache.own(), device=self.device)

    @cached_property
    def auxiliary(self) -> Batch:
        """The auxiliary images; ValueError if they are too few."""
        return self.known.enough(FEWEST * self.known.batch_size)

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
        return sum(p.numel() for p in self.params.values())

    @property
    def each(self) -> int:
        return self.known.batch_size if self.view.by_label else 1

    @cached_property
    def columns(self) -> int:
        """Columns of a row.

        Raises:
            ValueError: the training data do not fit into memory.
        """
        columns = self.view.buckets or self.entries
        rows = self.passes * (len(self.split[0]) // self.known.batch_size) * self.each
        available = free_bytes(self.device)
        if available is not None and 4 * rows * columns > SHARE * available:
            need = f"{rows:,} simulated updates of {columns:,} numbers need {4 * rows * columns / 2**30:.1f} GiB"
            raise ValueError(f"{need}: set buckets to at most {int(SHARE * available) // (4 * rows):,}")
        return columns

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
        name = f"updates-{digest(self.key, held, quiet)}"
        if most is not None:  # simulating a part is as fast as reading it, and caching it would evict whole tables
            return ShadowDataset(**self._simulated(groups, name, quiet))
        return ShadowDataset(**self.cache.get(name, lambda: self._simulated(groups, name, quiet)))

    @property
    def device(self) -> torch.device:
        return next(iter(self.params.values())).device

    def _simulated(self, groups: Tensor, name: str, quiet: bool) -> dict[str, Tensor]:
        x, y = self.auxiliary.x[groups], self.auxiliary.y[groups]
        like, each = next(iter(self.params.values())), self.each  # not like the examples, which may be token ids
        found = like.new_empty(len(groups) * each, self.columns)
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
    found = groups.clone()
    for k in (y != labels).any(1).nonzero().flatten().tolist():
        found[k] = groups[k][assigned(labels[k][:, None] != y[k]).to(groups.device)]
    return found
