"""How often labels are restored exactly by the rule that is learned from shadow updates, beside the published formulas."""

from collections.abc import Mapping
from statistics import fmean

import torch

from fedgauge.attacks.base import Wave
from fedgauge.attacks.labels import auto, restore
from fedgauge.attacks.modality.image_metrics import label_accuracy
from fedgauge.attacks.threat_model import public_knowledge
from fedgauge.client.components import Table
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, Progress, one_thread

SIZE = 4
AUXILIARY = 500
STEP: Table = {"use": "local_sgd", "rate": 0.1}
CHAINS: Mapping[str, list[Table]] = {
    "sign": [STEP, {"use": "sign", "scale": 0.001}],
    "sign of each example": [{"use": "sign", "each": True}, STEP],
    "pruned to 1 % of each example": [{"use": "prune", "keep": 0.01, "each": True}, STEP],
    "noise of .1": [{"use": "gaussian", "sigma": 0.1}, STEP],
    "DP-SGD of .05": [{"use": "dp_sgd", "max_norm": 1.0, "noise_multiplier": 0.05}, STEP],
    "2 bits": [STEP, {"use": "quantize", "bits": 2}],
    "5 steps": [{**STEP, "steps": 5}],
}


def label_rule(
    progress: Progress, batches: int = 50, nets: tuple[str, ...] = ("lenet", "convsmall")
) -> BenchmarkReport:
    """The rate of batches whose labels are restored exactly, each from one update, under every chain that learns a rule."""
    cells = [(net, name) for net in nets for name in CHAINS]
    figures = []
    with one_thread():
        for done, (net, name) in enumerate(cells):
            figures.append(_figure(net, name, batches))
            progress(done + 1, len(cells))
    settings = dict(
        dataset=f"mnist5k, {AUXILIARY} images auxiliary", networks="untrained", seed=0, batches=batches, size=SIZE,
        chains={name: str(chain) for name, chain in CHAINS.items()},
        knowledge="honest server; chain, rate and normalisation known; auxiliary images that no client holds",
    )  # fmt: skip
    return BenchmarkReport(tuple(figures), settings)


def _figure(net: str, name: str, batches: int) -> Figure:
    data = {"use": "mnist5k", "batch_size": SIZE, "auxiliary": AUXILIARY}
    tables = {"rounds": 1, "clients": batches, "data": data, "model": {"use": net}, "chain": CHAINS[name]}
    fed = Federation(Protocol.from_tables(tables))
    params, buffers = fed.initial()
    updates = [fed.client_update(params, buffers, c, 1) for c in range(batches)]
    seen = Wave(1, tuple(range(batches)), params, {k: torch.stack([u[k] for u in updates]) for k in params})
    known = public_knowledge(fed)
    truth = [fed.batch_at(c, 1).y for c in range(batches)]
    formulas = [auto(seen.alone(k), params, known) for k in range(batches)]
    exact, before = (
        100 * fmean(label_accuracy(y, own) == 1 for y, own in zip(truth, found, strict=True))
        for found in (restore(seen, known), formulas)
    )
    return Figure(f"{net}, {name}: exact", exact, "%", note=f"n = {batches}; by formula {before:.3g}")
