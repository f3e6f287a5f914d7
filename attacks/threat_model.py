"""The threat model as data: what an attacker knows of a federation before it sees an update."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedgauge.attacks.base import Attack, Knowledge, Wave
from fedgauge.attacks.engine.computation import layer_inputs
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.client.chain import Chain
from fedgauge.client.federation import Federation
from fedgauge.client.label_kinds import ordered
from fedgauge.client.local_training import ControlledSGD, Correction, local_sgd, own_move
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.rng import generator
from fedgauge.client.transforms import is_identity, noise_free
from fedgauge.client.update import Batch


def public_knowledge(
    fed: Federation, auxiliary: Batch | None = None, chain: Chain | None = None, members: int | None = None
) -> Knowledge:
    """Knowledge of a federation's server: the agreed protocol and public examples.

    Args:
        auxiliary: the public examples; default: all of the federation's.
        chain: the clients' chain as the attacker believes it to be; default: the true one.
        members: clients that the server sees as one sum; default: a whole group.
    """
    dataset, members = fed.shards.dataset, members or fed.protocol.group_size
    known = Knowledge(
        model=fed.model,
        chain=fed.as_seen(fed.chain if chain is None else chain, members),
        shape=dataset.shape,
        classes=dataset.classes,
        batch_size=members * fed.shards.batch_size,
        mean=dataset.mean,
        std=dataset.std,
        auxiliary=fed.shards.auxiliary_batch() if auxiliary is None else auxiliary,
        loss=fed.loss,
        label_kind=fed.label_kind,
    )
    return modality_of(dataset).informed(known)


def needs_truth(planned: PlannedAttack) -> bool:
    """Return whether the plan gives the attacker facts of the private batch: labels or lengths."""
    return "given" in (planned.labels, planned.lengths)


def chosen_auxiliary(planned: PlannedAttack, auxiliary: Batch, classes: int, seed: int) -> Batch:
    """The public examples that a planned attack has of these, with those that it makes up."""
    if planned.auxiliary is None:
        return auxiliary
    rng = generator(seed, "auxiliary", repr(sorted(planned.auxiliary.items())))
    return planned.images().of(auxiliary, classes, rng)


def with_given_truth(planned: PlannedAttack, known: Knowledge, batches: Sequence[Batch]) -> Knowledge:
    """The knowledge with the labels and lengths that the plan gives the attacker; never the examples themselves.

    Labels are sorted, and lengths come by label, then by length, so that their order carries no other information.

    Raises:
        ValueError: labels are given, but the examples have none apart from the sentences.
    """
    if planned.labels == "given":
        if not batches[0].labelled:
            raise ValueError(
                'labels = "given" would give away the sentences, as next_token predicts them: use "restored"'
            )
        known = replace(known, labels=torch.stack([ordered(batch.y) for batch in batches]))
    if planned.lengths == "given":
        assert isinstance(known.model, LanguageModel)  # the plan refuses it for others
        lengths = [_lengths(batch, known.model.pad) for batch in batches]
        known = replace(known, lengths=torch.stack(lengths))
    return known


def waves_known_alike(model: nn.Module, chain: Chain, batch_size: int, wave: Wave) -> list[Wave]:
    """Split the wave into parts with equal knowledge of their clients.

    Each client is a part of its own if SCAFFOLD's control variates are in the chain, or if it returned its batch's statistics.
    """
    local = chain.local
    corrected = wave.correction and isinstance(local, ControlledSGD) and (local.steps > 1 or _behind(chain))
    if not corrected and not (wave.returned and reveals_statistics(model, chain, batch_size)):
        return [wave]
    return [wave.of([k]) for k in range(len(wave))]


def as_known(known: Knowledge, wave: Wave) -> tuple[Knowledge, Wave]:
    """Knowledge and a wave with the client's control variates (SCAFFOLD) and returned buffers taken into account.

    The correction is subtracted from the update, and steps begin where it moved them. Behind a link that changes more than
    noise does, a guess also computes it. The batch's own statistics replace the running ones, which train mode does not read.
    """
    chain, local = known.chain, known.chain.local
    if wave.returned and reveals_statistics(known.model, chain, known.batch_size):
        wave = replace(wave, buffers={**wave.buffers, **statistics_of_batch(known, wave)}, returned={})
    if not wave.correction or not isinstance(local, ControlledSGD):
        return known, wave
    own, behind = Correction({k: t[0] for k, t in wave.correction.items()}), _behind(chain)
    if local.steps == 1 and not behind:
        trained: local_sgd = local_sgd(local.rate, 1, local.batch_size)
    else:
        trained = replace(local, correction=own, corrected=not behind)
    chain = Chain(tuple(trained if link is local else link for link in chain.links))
    update = wave.update if behind else own_move(wave.update, wave.correction)
    return replace(known, chain=chain), replace(wave, update=update, correction={})


def reveals_statistics(model: nn.Module, chain: Chain, batch_size: int) -> bool:
    """Return whether returned buffers reveal a batch's statistics: BatchNorm in train mode moves them once for a gradient."""
    whole = chain.local.gradients(batch_size) == 1 and chain.slice_of(batch_size) == batch_size
    return whole and bool(_tracking(model, chain))


def statistics_of_batch(known: Knowledge, wave: Wave) -> dict[str, Tensor]:
    """The mean and the variance of one client's batch at every BatchNorm, by the buffers' names (Valadi et al., 2025).

    The running ones move by the layer's momentum towards the batch's mean, and towards its variance with n - 1 in place of n.
    """
    layers, like = _tracking(known.model, known.chain), next(iter(wave.params.values()))
    with torch.no_grad():
        inputs = layer_inputs(known.model, wave.params, layers.values(), like.new_zeros(known.batch_size, *known.shape))
    counts = {layer: values.numel() // values.shape[1] for layer, values in inputs}
    found = {}
    for name, layer in layers.items():
        for part, share in (("running_mean", 1.0), ("running_var", 1 - 1 / counts.get(layer, 2))):
            key = f"{name}.{part}" if name else part
            if key in wave.returned and key in wave.buffers:
                before, after = wave.buffers[key].double(), wave.returned[key][0].double()
                found[key] = (share * (before + (after - before) / float(layer.momentum or 1))).to(wave.buffers[key])
    return found


def _tracking(model: nn.Module, chain: Chain) -> dict[str, _BatchNorm]:
    """Return BatchNorms in train mode that return running statistics moved by a momentum, by name."""
    return {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, _BatchNorm) and m.training and m.track_running_stats and m.momentum and not chain.stays(name)
    }


def blurred_correction(known: Knowledge, attack: Attack) -> str:
    """Return why an attack that reads the update cannot work with control variates that a defense has changed; else empty."""
    if known.chain.local.beside is None or not attack.takes_gradients:
        return ""
    return (
        "SCAFFOLD's control variates are in the update, and the attacker cannot remove them behind a defense: attack with a search "
        "or a learned attack, which also compute them"
    )


def _behind(chain: Chain) -> bool:
    """Return whether a link behind local training changes the update by more than noise."""
    return not all(is_identity(noise_free(link)) for link in chain.links[chain.links.index(chain.local) + 1 :])


def _lengths(batch: Batch, pad: int) -> Tensor:
    lengths = (batch.x != pad).sum(1)
    labels = batch.y if batch.labelled else torch.zeros_like(lengths)
    return lengths[(labels * (lengths.max() + 1) + lengths).argsort()]
