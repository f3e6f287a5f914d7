"""Try a network on a few examples; problems name the layer and the remedy."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call

from fedgauge.attacks.engine.compatibility import differentiation_of, forward_problem, lookup_problem, parameter_problem
from fedgauge.attacks.problem import Problem
from fedgauge.attacks.threat_model import public_knowledge
from fedgauge.client.data.batches import batch_of
from fedgauge.client.federation import Federation
from fedgauge.client.gradient import without_running_stats
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.losses import is_cross_entropy
from fedgauge.simulations.checks.check_result import CheckResult, Found, attempt

TRIED = 4  # examples on which a network is tried
DRAWS = "draws"  # code of a layer's problem that only searches have
PAIR = 2  # examples of a gradient: BatchNorm in train mode cannot normalise by one
UNIT = 1e-4  # how far a sum of probabilities may be from one


def check_network(fed: Federation) -> Iterator[CheckResult]:
    """Try the network on a few examples: first what training needs, then what only attacks or speed suffer from."""
    for name, check in (("model", _forward), ("gradient", _gradient)):
        result = attempt(name, partial(check, fed), stops=True)
        text = isinstance(fed.model, LanguageModel)
        if result.code == DRAWS and not text:  # clients train with dropout, and an exact attack may stand before it
            result = replace(result, needed=False, stops=False)
        yield result
        if result.stops and not result.works:
            return
    yield attempt("softmax", partial(_softmax, fed), needed=False)


def _inputs(fed: Federation, count: int = TRIED) -> Tensor:
    data = fed.shards.dataset
    return data.normalise(batch_of(data.x, data.y, torch.arange(min(count, len(data.y)))).x)


def _forward(fed: Federation) -> Found:
    model, data, params = fed.model, fed.shards.dataset, fed.initial()[0]
    x = _inputs(fed)
    logits = () if fed.label_kind.tried else (len(x), *data.y.shape[1:], data.classes)
    count = sum(p.numel() for p in params.values())
    what = "numbers" if data.y.is_floating_point() else "classes"
    works = f"{type(model).__name__}, outputs for {data.classes} {what}, {count:,} parameters"
    return parameter_problem(model, params) or forward_problem(model, params, x, logits) or works


def _gradient(fed: Federation) -> Found:
    data = fed.shards.dataset
    batch = batch_of(data.x, data.y, torch.arange(min(PAIR if fed.shards.batch_size > 1 else 1, len(data.y))))
    params = fed.initial()[0]
    update = fed.gradient(params, batch, None)
    if problem := lookup_problem(fed.model, params, _inputs(fed, len(batch.x))):
        return problem
    if bad := [name for name, t in update.items() if not t.isfinite().all()]:
        remedy = "check for a square root or division at zero"
        return Problem("not finite", f"the gradient of {bad[0]!r}", "is not finite", remedy)
    if not any(t.any() for t in update.values()):
        remedy = "check that labels differ, that the loss is not detached and that some units are active"
        return Problem("zero gradient", "", "every gradient is zero", remedy)
    return "finite"


def _softmax(fed: Federation) -> Found:
    """Check that the cross-entropy does not get probabilities: it would apply the softmax a second time."""
    with torch.no_grad(), without_running_stats(fed.model):  # a check must not change BatchNorm's statistics
        made: Tensor = functional_call(fed.model, fed.initial()[0], (_inputs(fed),))
    sums_to_one = bool(((made.sum(-1) - 1).abs() < UNIT).all())
    probabilities = made.shape[-1] > 1 and bool((made >= 0).all()) and sums_to_one
    if not (probabilities and is_cross_entropy(fed.loss)):
        return "no probabilities"
    why = "its outputs are probabilities, and the cross-entropy applies the softmax again"
    return Problem("softmax", "", why, "let it return logits, without its last softmax")


def try_derivatives(fed: Federation) -> Found:
    """Compare the network's second derivative, which every matching attack follows, with the change of the first."""
    known = replace(public_knowledge(fed, members=1), batch_size=min(PAIR, fed.shards.batch_size), auxiliary=None)
    found = differentiation_of(known, fed.initial()[0], one_pass=False)
    remedy = "let forward compute with tensors throughout, or take another layer"
    return Problem("derivative", "", found.note, remedy) if found.note else "as the gradient changes"
