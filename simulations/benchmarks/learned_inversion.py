"""What learning to invert costs: simulated updates, training steps, and what warm starts save from round to round."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from fedgauge.attacks.base import Budget, Knowledge, Reconstruction, Wave
from fedgauge.attacks.engine.simulator import Simulator
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.learned.learning_to_invert import learning_to_invert, matched_error
from fedgauge.attacks.learned.trainer import Trainer
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.client.chain import chain
from fedgauge.client.models.vision import detached_params, lenet
from fedgauge.client.rng import generator
from fedgauge.client.training import gradient, local_sgd
from fedgauge.client.update import Batch
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.benchmarks.observed_updates import untrained
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, Progress, interleaved, one_thread
from fedgauge.simulations.run import in_memory
from fedgauge.simulations.run.create import new_run

SHAPE = (3, 32, 32)
SQUARE = 2048  # side of the matrices whose product measures the machine's rate
TABLE = {"use": "learning_to_invert", "labels": "restored"}


def learning(
    progress: Progress,
    images: int = 256,
    hidden: int = 3000,
    batch: int = 256,
    repetitions: int = 5,
    rounds: int = 8,
    steps: int = 600,
) -> BenchmarkReport:
    """Gradient generation against a loop over images, training against matrix products alone, warm starts over rounds."""
    done, total = 0, 2 * 2 * (repetitions + 1) + 2 * rounds

    def tick(*_: int) -> None:
        nonlocal done
        progress(done := done + 1, total)

    with one_thread():
        figures = [
            _generation(images, repetitions, tick),
            _training(hidden, batch, repetitions, tick),
            *_federation(rounds, steps, tick),
        ]
    settings = dict(
        generation=f"updates of {images} CIFAR-shaped random images by LeNet, one an update, float32",
        training=f"published network for LeNet on CIFAR-10, hidden {hidden}, batch {batch}; Adam and loss are counted",
        rate=f"of a float32 product of two {SQUARE} x {SQUARE} matrices, in turns with the training",
        federation=f"in memory, 4 clients of mnist5k, lenet, {rounds} rounds, batch 1, rate .1, 1,000 auxiliary images",
        inverter=f"hidden 256, batch 64, rate 1e-3, at most {steps} steps; warm: at most a quarter of them",
        threads=1, seed=0, repetitions=repetitions, clock="CPU seconds, medians of interleaved repetitions",
    )  # fmt: skip
    return BenchmarkReport(tuple(figures), settings)


def _generation(images: int, repetitions: int, progress: Progress) -> Figure:
    model = untrained(partial(lenet, SHAPE, 10))
    params, links = detached_params(model), chain(local_sgd(1.0))
    known = Knowledge(model, links, SHAPE, 10, 1, (0.5,) * 3, (0.25,) * 3)
    rng = generator("learning", "images")
    x, y = torch.rand(images, 1, *SHAPE, generator=rng), torch.randint(10, (images, 1), generator=rng)
    client = links(gradient(model, normalise=known.normalise))
    timed = {
        "together": lambda: sum(len(u) for u in Simulator(known, params).updates(x, y, rng)),
        "loop": lambda: [client(params, Batch(a, b), None) for a, b in zip(x, y, strict=True)],
    }
    spent = {k: 1000 * median(t) / images for k, t in interleaved(timed, repetitions, progress).items()}
    note = f"{spent['together']:.2f} ms an image against {spent['loop']:.2f}"
    return Figure(
        "lenet: gradient generation / loop over images", spent["loop"] / spent["together"], "x", 6.0, note=note
    )


def _training(hidden: int, batch: int, repetitions: int, progress: Progress) -> Figure:
    attack = learning_to_invert(hidden=hidden, batch=batch)
    columns, outputs = sum(p.numel() for p in lenet(SHAPE, 10).parameters()), SHAPE[0] * SHAPE[1] * SHAPE[2]
    network = attack.network(columns, outputs, 0)

    def loss(rows: Tensor, truth: Tensor) -> Tensor:
        return matched_error(network(rows), truth)

    trainer = Trainer(network, attack.rate, attack.patience, 10**9, loss)
    rng = generator("learning", "rows")
    rows, truth = torch.randn(batch, columns, generator=rng), torch.rand(batch, 1, outputs, generator=rng)
    square = torch.randn(SQUARE, SQUARE, generator=rng)
    timed = {"step": lambda: trainer.train_step(rows, truth), "product": lambda: square @ square}
    spent = {k: median(t) for k, t in interleaved(timed, repetitions, progress).items()}
    weights = [p.numel() for p in trainer.network.parameters() if p.dim() == 2]
    # forward pass, gradients by the weights, and gradients by the inputs of all layers but the first
    rates = {
        "step": 2 * batch * (3 * sum(weights) - weights[0]) / spent["step"],
        "product": 2 * SQUARE**3 / spent["product"],
    }
    note = f"{rates['step'] / 1e9:.3g} of {rates['product'] / 1e9:.3g} GFLOP/s; {1000 * spent['step'] / batch:.2f} ms a sample"
    return Figure("published network: rate of training", 100 * rates["step"] / rates["product"], "%", 60.0, note=note)


def _federation(rounds: int, steps: int, progress: Progress) -> list[Figure]:
    """Inverters that start from the previous round's weights against inverters from scratch, by the error on held-out images."""
    tables = {
        "rounds": rounds,
        "clients": 4,
        "data": {"use": "mnist5k", "auxiliary": 1000},
        "model": {"use": "lenet"},
        "chain": [{"use": "local_sgd", "rate": 0.1}],
        "attack": [{**TABLE, "iterations": steps}],
    }
    attack = learning_to_invert(hidden=256, batch=64, rate=1e-3, patience=1000)
    scenario = Scenario.from_tables(tables)
    auditor = Auditor(scenario.federation)
    known = auditor.knowledge(PlannedAttack.from_table(TABLE, "[[attack]]"))
    with TemporaryDirectory(prefix="fedgauge-") as folder:
        run = new_run(scenario, "learning", Path(folder))
        in_memory.train(run)
        warm, scratch = _over_rounds(run, attack, known, rounds, steps, progress)
    errors = [a.objective / b.objective for a, b in zip(warm[1:], scratch[1:], strict=True)]
    most = max(a.iterations / b.iterations for a, b in zip(warm[1:], scratch[1:], strict=True))
    by_round = ", ".join(f"{a.objective:.4f} / {b.objective:.4f}" for a, b in zip(warm, scratch, strict=True))
    name, note = (
        "federation: warm-started error / from scratch",
        f"held-out MSE by round, warm / from scratch: {by_round}",
    )
    return [
        Figure(f"{name}, worst round", max(errors), "x", at_most=1.0, note=note),
        Figure(f"{name}, mean of rounds 2 to the last", sum(errors) / len(errors), "x"),
        Figure("federation: steps of the warm-started / from scratch, most", 100 * most, "%", at_most=25.0),
    ]


def _over_rounds(
    run: Run, attack: learning_to_invert, known: Knowledge, rounds: int, steps: int, progress: Progress
) -> tuple[list[Reconstruction], list[Reconstruction]]:
    """Reconstructions of the first client in each round, by warm-started inverters and by inverters from scratch."""
    memories: list[Mapping[str, Tensor]] = [attack.initial() for _ in range(4)]
    warm, scratch = [], []
    streams = [partial(generator, "learning", c) for c in range(4)]
    for round in range(1, rounds + 1):
        wave = Wave.stack([run.tape().read(round, c) for c in range(4)])
        found, memories = attack.advance(wave, known, Budget(steps), streams, memories)
        warm.append(found[0])
        progress(0, 0)
        scratch.append(attack.reconstruct(wave, known, Budget(steps), streams)[0])
        progress(0, 0)
    return warm, scratch
