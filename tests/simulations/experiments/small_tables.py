"""Small paper tables that need no downloads."""

from collections.abc import Mapping
from typing import Any

import torch

from fedgauge.simulations.experiments.measures import AttackOutcome
from fedgauge.simulations.experiments.paper_table_files import parse
from fedgauge.simulations.experiments.paper_tables import (
    PaperTable,
    Setting,
)

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


def quiet(words: str) -> None:
    """Says nothing."""


def outcome(mse: list[float], iterations: list[float]) -> AttackOutcome:
    errors = torch.tensor(mse, dtype=torch.float64)[:, None]
    scores = {"psnr": -10 * errors.log10(), "mse": errors}
    return AttackOutcome(scores, torch.tensor(iterations, dtype=torch.float64), 0, 0.0, {})


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
