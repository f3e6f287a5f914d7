"""How often the labels of a batch are restored exactly, with repeats: every method under every kind of chain."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.labels import METHODS
from fedgauge.attacks.modality.image_metrics import label_accuracy
from fedgauge.client.chain import Chain, chain
from fedgauge.client.data.images import Dataset, batch_of, mnist5k
from fedgauge.client.models.vision import detached_params, lenet, mlp
from fedgauge.client.rng import generator, seed_of
from fedgauge.client.training import gradient, local_sgd
from fedgauge.client.transforms import per_example
from fedgauge.client.update import Params, Update
from fedgauge.defenses.clip import clip
from fedgauge.defenses.noise import gaussian
from fedgauge.defenses.prune import prune
from fedgauge.simulations.benchmarks.observed_updates import known_of, untrained
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, Progress, one_thread

RATE = 0.1
SEED = 1  # the thresholds of attacks/labels.py were chosen on the batches of seed 0
NETS: Mapping[str, Callable[..., nn.Module]] = {"lenet": lenet, "mlp": mlp}
FLOORS = {
    ("lenet", 2): 95.0,
    ("lenet", 4): 90.0,
    ("lenet", 8): 80.0,
    ("mlp", 2): 99.0,
    ("mlp", 4): 99.0,
    ("mlp", 8): 89.0,
}
UNDEFENDED = "undefended"

Seen = tuple[Update, Params, Knowledge, Tensor]


def labels(progress: Progress, batches: int = 100, sizes: Sequence[int] = (2, 4, 8)) -> BenchmarkReport:
    """The rate of batches whose labels each method restores exactly, `auto` first; a new network for each batch; sizes >= 2."""
    dataset = mnist5k()
    cells = [(net, name, size) for net in NETS for name in _chains(sizes[0]) for size in sizes]
    figures = []
    with one_thread():
        for done, (net, name, size) in enumerate(cells):
            seen = [_observe(dataset, net, _chains(size)[name], size, k) for k in range(batches)]
            figures.append(_figure(net, name, size, seen))
            progress(done + 1, len(cells))
    settings = dict(
        dataset=f"{dataset.name}, training images drawn with repeats", networks="untrained, a new one for each batch",
        seed=SEED, batches=batches, sizes=list(sizes),
        chains={name: str(_chains(sizes[0])[name].links) for name in _chains(sizes[0])},
        knowledge="honest server; chain, rate and normalisation known; no auxiliary images",
    )  # fmt: skip
    return BenchmarkReport(tuple(figures), settings)


def _chains(size: int) -> Mapping[str, Chain]:
    train = local_sgd(RATE)
    return {
        UNDEFENDED: chain(train),
        "clipped to .1": chain(clip(0.1), train),
        "clipped by example to 1": chain(per_example(clip(1.0)), train),
        "noise of .01": chain(gaussian(0.01), train),
        "pruned to .1": chain(train, prune(0.1)),
        "5 steps": chain(local_sgd(RATE, 5)),
        "5 steps at rate .01": chain(local_sgd(0.01, 5)),
        "2 steps on halves": chain(local_sgd(RATE, 2, size // 2)),
    }


def _observe(dataset: Dataset, net: str, links: Chain, size: int, k: int) -> Seen:
    """The k-th batch's update, the weights, what the server knows, and the true labels."""
    seed = seed_of(SEED, "labels", "network", k)
    model = untrained(partial(NETS[net], dataset.shape, dataset.classes), seed)
    draw = partial(generator, SEED, "labels", k)
    batch = batch_of(dataset.x, dataset.y, torch.randint(len(dataset.y), (size,), generator=draw("batch")))
    known = known_of(model, links, dataset, size)
    params = detached_params(model)
    update = links(gradient(model, normalise=dataset.normalise))(params, batch, draw("noise"))
    return update, params, known, batch.y


def _figure(net: str, name: str, size: int, seen: Sequence[Seen]) -> Figure:
    classes = seen[0][2].classes
    left_out = {"idlg"} | ({"grad_inversion"} if size > classes else set())  # one label; distinct labels
    exact = {
        method: 100
        * sum(label_accuracy(y, restore(update, params, known, None)) == 1 for update, params, known, y in seen)
        / len(seen)
        for method, restore in METHODS.items()
        if method not in left_out
    }
    others = ", ".join(f"{method} {value:.3g}" for method, value in exact.items() if method != "auto")
    floor = FLOORS.get((net, size)) if name == UNDEFENDED else None
    return Figure(f"{net}, {name}, B = {size}: exact", exact["auto"], "%", floor, note=f"n = {len(seen)}; {others}")
