"""Attacks by effort: a scenario that names none gets those that fit the federation, with budgets; others are left out.

The choice reads only the agreed protocol: the kind of data, the network, the chain. It reads nothing of the machine, so that a
scenario means the same audit everywhere.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Literal, get_args

from torch import nn

from fedgauge.attacks.engine.computation import dense_input_layer
from fedgauge.attacks.exact.feature_separation import tail_of
from fedgauge.attacks.exact.patch_embedding import patches_read
from fedgauge.attacks.exact.recursive import stages_of
from fedgauge.attacks.limits import noise_is_known
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.attacks.plan import ATTACK, MEMBERSHIP, PlannedAttack
from fedgauge.client.components import Table
from fedgauge.client.federation import Federation
from fedgauge.client.gradient import StochasticLayer
from fedgauge.client.models.language import LanguageModel

Effort = Literal["quick", "standard", "thorough"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)
ITERATIONS = {"quick": 100, "standard": 300, "thorough": 1000}
FAST = 0.3  # rate of the tuned search: 200 to 1,000 iterations are few for the published .1
GENERATED = 3 * 64 * 64  # values of an example, up to which a generator is trained in a minute or two
RIDGE_PARAMETERS = 1_000_000  # of a network, up to which a regression on its whole updates stays cheap
DENSE = partial(dense_input_layer, biased=False)


def attacks_by_effort(effort: Effort, federation: Federation) -> list[Table]:
    """The [[attack]] tables of an effort; more effort keeps each attack of less, with at least its budget."""
    groups = (*type(modality_of(federation.shards.dataset)).attacks, MEMBERSHIP)
    own = {entry.name for entry in ATTACK.entries() if entry.group in groups}
    levels = EFFORTS[: EFFORTS.index(effort) + 1]
    tables = [table for least, table in CHOICES if least in levels and table["use"] in own]
    chosen = [table for table in tables if _fits(table, federation)]
    return [dict(table) if table["use"] in ONCE else {**table, "iterations": ITERATIONS[effort]} for table in chosen]


def _fits(table: Table, fed: Federation) -> bool:
    works = WORKS.get(table.get("name", ""), WORKS.get(table["use"]))
    return works is None or works(fed)


def _alone(fed: Federation) -> bool:
    """Return whether one example is behind an update, or a group's sum."""
    return fed.shards.batch_size * fed.protocol.group_size == 1


def _works(read: Callable[[nn.Module, Sequence[int]], object], fed: Federation) -> bool:
    try:
        return bool(read(fed.model, fed.shards.dataset.shape))
    except ValueError:  # no such layer; other faults of the network are the doctor's to report
        return False


def _readable(fed: Federation) -> bool:
    """Return whether the ReLUs of the layer that reads the examples can separate them."""
    return not _alone(fed) and _works(partial(dense_input_layer, relu=True), fed)


def _separable(fed: Federation) -> bool:
    """Return whether fewer labelled images than classes are behind an update of one step, or a group's sum."""
    dataset, chain = fed.shards.dataset, fed.chain
    images = dataset.labelled and bool(dataset.mean) and not dataset.y.is_floating_point()
    fewer = fed.shards.batch_size * fed.protocol.group_size < dataset.classes
    hidden = bool(chain.hidden) or _has(fed, StochasticLayer)
    return images and fewer and chain.local.one_gradient and not hidden


def _has(fed: Federation, kind: type[nn.Module]) -> bool:
    return any(isinstance(module, kind) for module in fed.model.modules())


def _names_words(fed: Federation) -> bool:
    """Return whether the gradient of word embeddings, which has a row for each word, is shared and names a batch's words."""
    model = fed.model
    if not isinstance(model, LanguageModel) or model.parts.tied or _alone(fed):
        return False
    return model.parts.word in {name for name, p in model.named_parameters() if p.requires_grad}


# where an attack, or a table of this name, works, if not everywhere
WORKS: Mapping[str, Callable[[Federation], bool]] = {
    "analytic": lambda fed: _alone(fed) and _works(DENSE, fed),
    "patch_embedding": lambda fed: _alone(fed) and _works(patches_read, fed),
    "recursive": lambda fed: _alone(fed) and not _works(DENSE, fed) and _works(stages_of, fed),
    "feature_separation": lambda fed: _separable(fed) and _works(tail_of, fed),
    "spear": lambda fed: _readable(fed) and not noise_is_known(fed),
    "spear_plus_plus": _readable,
    "exact": _alone,
    "learned_rows": _alone,
    "tag": lambda fed: bool(getattr(fed.chain.local, "adaptive", False)),
    "tag_known_words": _names_words,
    "bayes": noise_is_known,
    "dlg": lambda fed: fed.shards.dataset.x.is_floating_point(),
    "leave_layer_out": lambda fed: bool(fed.chain.hidden),
    "precode_joint": lambda fed: _has(fed, StochasticLayer),
    "grad_inversion": lambda fed: _has(fed, nn.modules.batchnorm._BatchNorm),
    "class_gaussian": lambda fed: fed.shards.dataset.labelled and not fed.shards.dataset.y.is_floating_point(),
    "gifd": lambda fed: prod(fed.shards.dataset.shape) <= GENERATED,
    "surrogate": lambda fed: fed.chain.local.steps > 1,
    # a client that trains on the same examples in every round
    "several_rounds": lambda fed: min(map(len, fed.shards.indices)) <= fed.shards.batch_size,
    "ridge_inversion": lambda fed: sum(p.numel() for p in fed.model.parameters()) <= RIDGE_PARAMETERS,
}


def _search(use: str, tune: str, given: bool = False, **settings: Any) -> Table:
    """A search, named by what it knows: tuned on shadow updates, the labels given."""
    name = f"{use}{'_tuned' if tune == 'shadow' else ''}{'_labels_given' if given else ''}"
    return {"use": use, "name": name, "tune": tune, **settings, **({"labels": "given"} if given else {})}


# the least effort of each attack, in the order of a report: exact attacks, searches, learned ones, membership
CHOICES: tuple[tuple[Effort, Table], ...] = (
    ("quick", {"use": "analytic"}),
    ("quick", {"use": "patch_embedding"}),
    ("quick", {"use": "recursive"}),
    ("quick", {"use": "feature_separation"}),
    ("quick", {"use": "spear"}),
    ("standard", {"use": "spear_plus_plus"}),
    ("quick", {"use": "exact"}),
    ("quick", {"use": "dager"}),
    ("quick", {"use": "tag"}),
    ("quick", {"use": "tag", "name": "tag_known_words", "known_tokens": True}),
    ("quick", {"use": "tableak", "restarts": 10}),
    ("standard", {"use": "tableak", "name": "tableak_labels_given", "labels": "given", "restarts": 10}),
    ("quick", _search("inverting_gradients", "off")),
    ("standard", _search("inverting_gradients", "shadow", rate=FAST)),
    ("standard", _search("inverting_gradients", "shadow", given=True, rate=FAST)),
    ("quick", _search("bayes", "shadow")),
    ("standard", _search("bayes", "shadow", given=True)),
    ("quick", {"use": "leave_layer_out"}),
    ("quick", _search("precode_joint", "off")),
    ("standard", _search("precode_joint", "shadow")),
    ("standard", {"use": "dlg", "by_tensor": True}),  # recurrent networks, masks
    ("standard", {"use": "grad_inversion"}),
    ("standard", _search("gifd", "shadow")),
    ("thorough", _search("gifd", "off", given=True)),  # often better if the defense hides little
    ("thorough", _search("gifd", "shadow", given=True)),
    ("thorough", {"use": "idlg", "name": "idlg_labels_given", "labels": "given"}),  # ahead on smooth networks
    ("thorough", {"use": "class_gaussian", "name": "class_gaussian_labels_given", "labels": "given"}),
    # far ahead on smooth networks
    ("thorough", _search("class_gaussian", "off", given=True, name="second_order_labels_given", second_order=True)),
    ("standard", {"use": "surrogate"}),
    ("standard", {"use": "several_rounds"}),
    ("standard", {"use": "lamp"}),
    ("thorough", {"use": "ridge_inversion"}),
    ("thorough", {"use": "ridge_inversion", "name": "ridge_inversion_labels_given", "labels": "given"}),
    ("thorough", {"use": "learned_rows"}),
    ("quick", {"use": "membership"}),
    ("standard", {"use": "membership_over_rounds"}),
)
DIRECT = {  # attacks without a search
    *("analytic", "patch_embedding", "recursive", "exact", "dager", "ridge_inversion", "read_rows", "read_imprint"),
    *("read_kernels", "read_latents", "read_carried", "read_features"),
}
ONCE = {*DIRECT, "spear", "spear_plus_plus", "membership", "membership_over_rounds"}  # no effort sets their iterations


def budget_words(planned: PlannedAttack) -> str:
    """Return the budget of an attack in words."""
    return "no search" if planned.table["use"] in DIRECT else str(planned.budget)
