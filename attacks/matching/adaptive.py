"""Adaptive attacks on Soteria and PRECODE, which use knowledge of the entries or noise that the defense hides."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Streams, Wave, not_applicable
from fedgauge.attacks.engine.gradient_distances import Distance, cosine, left_out, visible_columns
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.attacks.matching.objective import unrolled
from fedgauge.attacks.matching.recipes import inverting_gradients
from fedgauge.client.components import NotNegative
from fedgauge.client.update import Batch


@dataclass(frozen=True)
class leave_layer_out(Attack):
    """Against Soteria: Inverting Gradients without one layer's weight gradient (Balunovic et al., ICLR 2022, section 5).

    Args:
        layer: name of a fully connected layer, or "auto": the one that the attacker's chain hides. If the chain hides
            none, every fully connected layer is left out in turn, with an equal share of the budget. The update of the
            chosen reconstruction is nearest to the observed one over the tensors that no trial left out.
        columns: match the layer's nonzero columns, which are unchanged if one mask was drawn for the round and no other
            defense changed them.
        tv, rate: of total variation and of Adam.
    """

    layer: str = "auto"
    columns: bool = False
    tv: NotNegative = 4e-4
    rate: float = 0.1

    def reconstruct(self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams) -> list[Reconstruction]:
        if self.layer == "auto" and known.chain.hidden:
            return self._without(known.chain.hidden, wave, known, budget, streams)
        layers = [f"{n}.weight" for n, m in known.model.named_modules() if isinstance(m, nn.Linear)]
        trials = layers if self.layer == "auto" else [f"{self.layer}.weight"]
        if not trials or not set(trials) <= set(layers):
            named = "no fully connected layer" if not layers else f"no fully connected layer {self.layer!r}"
            return not_applicable(wave, f"the model has {named} to leave out")
        if budget.iterations < len(trials):
            return not_applicable(wave, f"{len(trials)} layers to try are more than {budget.iterations} iterations")
        (each, rest), seconds = divmod(budget.iterations, len(trials)), budget.seconds and budget.seconds / len(trials)
        found = []
        for i, name in enumerate(trials):
            share = replace(budget, iterations=each + (i < rest), seconds=seconds)
            found.append(self._without(frozenset({name}), wave, known, share, streams))
        return found[0] if len(found) == 1 else [_nearest(k, wave, known, trials, found) for k in range(len(wave))]

    def _without(
        self, names: frozenset[str], wave: Wave, known: Knowledge, budget: Budget, streams: Streams
    ) -> list[Reconstruction]:
        # the engine itself leaves out what the chain hides
        distance: Distance = left_out(cosine(), names - known.chain.hidden)
        if self.columns:
            distance = visible_columns(cosine(), tuple(sorted(names)))
            known = replace(known, chain=known.chain.mean)  # of which nothing is hidden
        engine = inverting_gradients(self.tv, self.rate).with_objective(likelihood=distance)
        return engine.reconstruct(wave, known, budget, streams)


def precode_joint(tv: NotNegative = 0.01, rate: float = 0.1, prior: float = 1e-3) -> GradientMatching:
    """Against PRECODE if no first layer reveals the images: Inverting Gradients that optimises the bottleneck's noise too.

    Args:
        prior: weight of the noise's normal density.
    """
    return inverting_gradients(tv, rate).with_objective(training=unrolled(latent=prior))


def _nearest(
    k: int, wave: Wave, known: Knowledge, left: Sequence[str], found: Sequence[list[Reconstruction]]
) -> Reconstruction:
    """Of one observation's reconstructions, the one with the nearest update over the tensors that every trial matched."""
    common = left_out(cosine(), left)
    seen = wave.alone(k)

    def objective(trial: Reconstruction) -> float:
        if trial.x is None or trial.y is None:
            return float("inf")
        like = next(iter(wave.params.values()))
        update = known.forward(wave.params, Batch(trial.x.to(like), trial.y), None)
        value: Tensor = common(seen, update)
        return float(torch.nan_to_num(value, nan=float("inf")))

    trials = [trial[k] for trial in found]
    objectives = [objective(trial) for trial in trials]
    best = min(range(len(trials)), key=objectives.__getitem__)
    return replace(trials[best], objective=objectives[best], iterations=sum(t.iterations for t in trials))
