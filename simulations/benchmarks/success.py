"""How often DLG and iDLG recover the image within the published loops' number of evaluations."""

from functools import partial
from statistics import median

import torch

from fedgauge.attacks.base import Budget
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.attacks.matching.recipes import dlg, idlg
from fedgauge.client.chain import chain
from fedgauge.client.data.images import Dataset, batch_of, cifar100, mnist5k
from fedgauge.client.local_data import has_images
from fedgauge.client.models.vision import lenet
from fedgauge.client.rng import generator
from fedgauge.client.training import local_sgd
from fedgauge.simulations.benchmarks.observed_updates import GradedImages, known_of, observed, singles, untrained
from fedgauge.simulations.benchmarks.reporting import BenchmarkReport, Figure, Progress, one_thread
from fedgauge.simulations.experiments.measures import SUCCESS_MSE

EVALUATIONS = 300 * 20  # of the published loops: 300 steps of L-BFGS, each of up to 20 evaluations


def success(progress: Progress, digits: int = 64, colours: int = 6, evaluations: int = EVALUATIONS) -> BenchmarkReport:
    """Success rates of DLG and iDLG on LeNet, one image per update."""
    works = [(mnist5k(), digits, attack) for attack in (idlg(), dlg())]
    if has_images("cifar100"):
        works += [(cifar100(), colours, attack) for attack in (idlg(), dlg())]
    figures: list[Figure] = []
    with one_thread():
        for done, (dataset, count, attack) in enumerate(works):
            figures += _measured(dataset, count, attack, evaluations)
            progress(done + 1, len(works))
    if not has_images("cifar100"):
        reason = "skipped: needs cifar100-train-*.npz and cifar100-test-*.npz in the local data folder (FEDGAUGE_DATA)"
        figures.append(Figure("cifar100: successes", None, "%", at_least=95.0, note=reason))
    settings = dict(
        network="lenet, untrained", images="first test images, one an update", success=f"MSE < {SUCCESS_MSE:g}", seed=0,
        evaluations=f"at most {evaluations}, restarts included", published_loops="75 % (MNIST), 75-100 % (CIFAR-100)",
    )  # fmt: skip
    return BenchmarkReport(tuple(figures), settings)


def _measured(dataset: Dataset, count: int, attack: GradientMatching, evaluations: int) -> list[Figure]:
    truth = singles(batch_of(dataset.x_test, dataset.y_test, torch.arange(count)))
    model = untrained(partial(lenet, dataset.shape, dataset.classes))
    known = known_of(model, chain(local_sgd(0.1)), dataset)
    streams = [partial(generator, 0, "success", k) for k in range(count)]
    found = attack.reconstruct(observed(known, truth), known, Budget(evaluations), streams)
    graded = GradedImages(found, truth, dataset)
    rate = 100 * sum(error < SUCCESS_MSE for error in graded.values("mse")) / count  # a failed attack is no success
    name = f"{'DLG' if attack.label_source == 'optimised' else 'iDLG'}, {dataset.name}"
    spent = median(r.iterations for r in found)
    quality = f", {median(graded.psnr):.1f} dB" if graded.psnr else ""
    note = f"n = {count}; median {spent:.0f} evaluations{quality}" + (f"; {graded.lost}" if graded.lost else "")
    return [Figure(f"{name}: successes", rate, "%", at_least=95.0, note=note)]
