"""Attacks on sentences next to plain loops written from their papers: one sentence at a time, torch's autograd and Adam.

DLG (Zhu et al., 2019), TAG (Deng et al., 2021), LAMP (Balunović et al., 2022) and DAGER (Petrov et al., 2024), on MiniLM-L6. Both
sides have the same updates, labels, lengths, iterations, numbers of draws and orders, and the same language model.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any, Literal

import torch
from torch import Generator, Tensor
from torch.func import functional_call
from torch.nn import functional as F

from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Streams, Wave
from fedgauge.attacks.text.certificate import language_model
from fedgauge.attacks.text.language_prior import TrainedPrior
from fedgauge.attacks.text.sentence_layout import propose
from fedgauge.client.components import Table, allowing
from fedgauge.client.update import Params, Update
from fedgauge.simulations.reproduction.measures import ComparedFigure
from fedgauge.simulations.reproduction.paper_table_files import load
from fedgauge.simulations.reproduction.paper_tables import AttackSpec
from fedgauge.simulations.reproduction.run_attack import compared_figures, run_attack
from fedgauge.simulations.reproduction.setups import build_setup

Loop = Literal["dlg", "tag", "lamp", "dager"]
CELL = "cola, short"  # of lamp_table1
PERIOD, CANDIDATES, DRAWS = 50, 50, 50  # of LAMP; as many orders of the best draw as draws
METRICS = ("rouge1", "rouge2", "exact_sentence")
NEAR, MOST = 1e-3, 1000  # relative distance from a span of rounding; sentences that DAGER compares
QUERY = "net.bert.encoder.layer.{}.attention.self.query.weight"


@dataclass(frozen=True)
class plain(Attack):
    """One of the loops."""

    kind: Loop = "dlg"

    def reconstruct(self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams) -> list[Reconstruction]:
        results = []
        for k in range(len(wave)):
            alone, rng = known.alone(k), streams[k]("plain")
            assert alone.labels is not None and alone.lengths is not None  # both are given
            update = {name: t / -known.scale for name, t in wave.alone(k).items()}
            if self.kind == "dager":
                ids = spans(alone, wave.params, update)
            else:
                ids = matched(
                    self.kind, alone, wave.params, update, alone.labels[0], int(alone.lengths), budget.iterations, rng
                )
            x = F.pad(ids, (0, known.shape[0] - len(ids)), value=language_model(known).pad)
            results.append(Reconstruction(x[None], alone.labels[0], 0.0, budget.iterations, 0.0, "converged"))
        return results


def matched(
    kind: Loop,
    known: Knowledge,
    params: Params,
    update: Update,
    y: Tensor,
    length: int,
    iterations: int,
    rng: Generator,
) -> Tensor:
    """Descend on the embeddings of one sentence, and under LAMP move its words; return the nearest words (L,)."""
    model = language_model(known)
    table, leaves = model.value(model.parts.word, params), {k: t.clone().requires_grad_() for k, t in params.items()}
    names = [name for name in update if name not in model.parts.key_biases]
    words = torch.tensor([i for i in range(model.vocabulary) if i not in model.special])
    size, ends = table[words].norm(dim=1).mean(), table[torch.tensor([*model.start, *model.end])]

    def whole(x: Tensor) -> Tensor:
        return torch.cat([ends[:1], x, ends[1:]])[None]

    def distance(x: Tensor, graph: bool = False) -> Tensor:
        loss = known.loss(functional_call(model, leaves, (whole(x),)), y)
        made = torch.autograd.grad(loss, [leaves[name] for name in names], create_graph=graph)
        pairs = [(a, update[name]) for a, name in zip(made, names, strict=True)]
        if kind == "lamp":
            return torch.stack([1 - (a * b).sum() / (a.norm() * b.norm()) for a, b in pairs]).mean()
        l1 = 0.01 if kind == "tag" else 0.0
        return torch.stack([((a - b) ** 2).sum() + l1 * (a - b).abs().sum() for a, b in pairs]).sum()

    def sentence(x: Tensor) -> Tensor:
        near = words[(F.normalize(x, dim=1) @ F.normalize(table[words], dim=1).T).argmax(1)]
        return torch.cat([torch.tensor(model.start), near, torch.tensor(model.end)])

    def drawn() -> Tensor:
        x = torch.randn(length - len(ends), table.shape[1], generator=rng)
        return x * (size / x.norm(dim=1, keepdim=True))

    x = drawn()
    if kind == "lamp":
        x = min([drawn() for _ in range(DRAWS)], key=distance)
        x = min([x[torch.randperm(len(x), generator=rng)] for _ in range(DRAWS)], key=distance)
        prior = TrainedPrior(known.public.x, model.pad, model.vocabulary, 600)
    x = x.clone().requires_grad_()
    adam = torch.optim.Adam([x], 0.01 if kind == "lamp" else 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(adam, 50, 0.89 if kind == "lamp" else 1.0)
    least, kept = float("inf"), x.detach()
    for done in range(iterations):
        adam.zero_grad()
        value = distance(x, graph=True)
        if kind == "lamp":
            value = value + (x.norm(dim=1).mean() - size) ** 2
        if value.item() < least:
            least, kept = value.item(), x.detach().clone()
        (x.grad,) = torch.autograd.grad(value, [x])
        adam.step()
        schedule.step()
        if kind == "lamp" and (done + 1) % PERIOD == 0:
            places = [x.detach()[order] for order in propose(len(x), CANDIDATES, rng)]
            x.data = min(places, key=lambda t: float(distance(t)) + 0.2 * float(prior([sentence(t).tolist()])))
    return sentence(kept)


@torch.no_grad()
def spans(known: Knowledge, params: Params, update: Update) -> Tensor:
    """DAGER: words (L,) whose inputs lie in the span of the first query's gradient, then of the sentences the second's best."""
    model = language_model(known)
    bert: Any = model.net.bert
    bases = []
    for block in range(2):
        _, values, rows = torch.linalg.svd(update[QUERY.format(block)], full_matrices=False)
        bases.append(rows[values > 1e-5 * values[0]])

    def off(h: Tensor, basis: Tensor) -> Tensor:
        return (h - h @ basis.T @ basis).norm(dim=-1) / h.norm(dim=-1)

    fits: list[list[int]] = []
    every = torch.arange(model.vocabulary)
    for position in range(known.shape[0]):
        inputs = bert.embeddings(every[:, None], position_ids=torch.tensor([[position]]))
        distances = off(inputs[:, 0], bases[0])
        near = (distances < NEAR).nonzero().flatten()
        if not len(near):
            break
        fits.append(near[distances[near].argsort()].tolist())
    sentences = [torch.tensor(s) for s in islice(product(*fits), MOST)]
    return min(
        sentences, key=lambda s: float(off(bert(s[None], output_hidden_states=True).hidden_states[1], bases[1]).mean())
    )


def text_world(
    n: int = 8, seed: int = 0, iterations: int = 100, kinds: Sequence[Loop] = ("dlg", "tag", "lamp", "dager")
) -> list[ComparedFigure]:
    """ROUGE-1, ROUGE-2, exact sentences and CPU seconds (on one thread) of the package's attacks and of the plain loops."""
    torch.set_num_threads(1)
    (cell,) = (cell for cell in load("lamp_table1").cells if cell.name == CELL)
    same: dict[str, Any] = {"budget": Budget(iterations), "lengths": "given", "metrics": METRICS}
    lamp: Table = {"use": "lamp", "period": PERIOD, "candidates": CANDIDATES, "draws": DRAWS, "orders": DRAWS}
    own: dict[Loop, Table] = {
        "dlg": {"use": "dlg_text"},
        "tag": {"use": "tag"},
        "lamp": lamp,
        "dager": {"use": "dager"},
    }
    specs = [AttackSpec(kind, own[kind], **same) for kind in kinds]
    specs += [AttackSpec(f"{kind}, plain", {"use": f"{__name__}:plain", "kind": kind}, **same) for kind in kinds]
    cell, rows = replace(cell, n=n, wave=n, attacks=tuple(specs)), list[ComparedFigure]()
    setup = build_setup(cell, seed)
    if "lamp" in kinds:  # the language model is trained first, and kept
        run_attack(AttackSpec("lamp", {**lamp, "draws": 1, "orders": 1}, Budget(1), lengths="given"), setup, n)
    for spec in specs:
        started = time.process_time()
        with allowing(["tests"]):
            outcome = run_attack(spec, setup, n)
        seconds = round(time.process_time() - started, 1)
        rows += [replace(row, seconds=seconds) for row in compared_figures(cell, spec, outcome, {}, "")]
    return rows
