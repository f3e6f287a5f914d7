"""Small paper tables that need no downloads."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedgauge.attacks.base import Knowledge
from fedgauge.attacks.threat_model import public_knowledge
from fedgauge.client.update import Batch
from fedgauge.server.views.intervals import Floats
from fedgauge.server.views.scores import Scores
from fedgauge.simulations.reproduction.measures import AttackOutcome
from fedgauge.simulations.reproduction.paper_table_files import parse
from fedgauge.simulations.reproduction.paper_tables import (
    PaperTable,
    Setting,
)
from fedgauge.simulations.reproduction.setups import Setup

ANALYTIC = {
    "name": "analytic",
    "use": "analytic",
    "iterations": 1,
    "metrics": ["psnr", "mse", "success"],
}
SGD = {"use": "local_sgd", "rate": 0.5}


def tables(**changes: Any) -> dict[str, Any]:
    """A sheet of one exact cell: an MLP, met by the analytic attack, on digits that need no network."""
    cell = {"name": "mlp", "model": {"use": "mlp", "hidden": [32]}, "attack": [ANALYTIC]}
    small: dict[str, Any] = {"n": 4, "data": {"use": "mnist5k"}, "chain": [SGD]}
    return {**small, "cell": [{**cell, **changes.pop("cell", {})}], **changes}


def paper_table(**changes: Any) -> PaperTable:
    return parse("small", tables(**changes))


def only(found: PaperTable) -> Setting:
    (cell,) = found.cells
    return cell


def known_to_the_server(setup: Setup) -> Knowledge:
    """Before anything of the private examples is given to it."""
    return public_knowledge(setup.auditor.federation)


def truth_of(setup: Setup) -> list[Batch]:
    """The private examples behind each observation."""
    return [setup.auditor.source.truth(seen.client, seen.round) for seen in setup.observations]


def outcome(mse: list[float], iterations: list[float]) -> AttackOutcome:
    """An attack on updates of one image each."""
    return of_scores({"psnr": -10 * np.log10(mse)[:, None], "mse": np.array(mse)[:, None]}, iterations)


def of_scores(scores: Mapping[str, Floats], iterations: list[float]) -> AttackOutcome:
    """An outcome of scores (n, B) by metric."""
    rows = [
        (1, client, "attack", example, metric, "converged", value)
        for metric, values in scores.items()
        for (client, example), value in np.ndenumerate(values)
    ]
    return AttackOutcome(Scores.of(rows), np.array(iterations, float), 0, 0.0, {})


BERT = {"use": "tiny_bert", "layers": 2, "width": 48, "heads": 2}
GPT2 = {"use": "tiny_gpt2", "layers": 2, "width": 48, "heads": 2}
WORDS = {"task": "next_token"}
PHRASES = {"use": "phrases", "length": 10, "vocabulary": 500}
EXACT = {
    "name": "exact",
    "use": "exact",
    "labels": "restored",
    "iterations": 1,
    "metrics": ["rouge1", "rouge2_special", "token_accuracy", "exact_sentence"],
}


def sentences(data: Mapping[str, Any] = {}, attack: Mapping[str, Any] = {}, **changes: Any) -> PaperTable:
    """A sheet of one cell: a tiny BERT on sentences that need no file, read exactly."""
    cell = {"model": BERT, "attack": [{**EXACT, **attack}], **changes.pop("cell", {})}
    return paper_table(data={**PHRASES, **data}, cell=cell, **changes)
