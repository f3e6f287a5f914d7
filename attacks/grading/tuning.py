"""Tuning without the truth: an attack is tried on shadow updates of auxiliary images, and the best settings attack the clients.

Shadow updates pass the clients' own chain at the weights of the round. So the attacker learns which prior fits this noise, this
network and this stage of the training without reading a private update. All candidates get the same shadow updates: first each
for a few iterations, then the given attack and the best of the others for most of them, since an early lead may not last.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from statistics import fmean

import torch
from torch import Tensor

from fedgauge.attacks.base import Attack, Budget, Knowledge, Wave
from fedgauge.attacks.engine.cache import TensorCache, digest
from fedgauge.attacks.engine.devices import CPU
from fedgauge.attacks.engine.simulator import Simulator
from fedgauge.attacks.grading.scores import Grader
from fedgauge.attacks.modality.base import Modality
from fedgauge.client.label_kinds import ordered
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch

FIRST = 0.08  # of the attack's iterations, for the first look at a candidate
LAST = 0.5  # of them, for the best; with six candidates and four observations a round half of the attack's cost
SIX = 6  # candidates; more share what six have
PER_SHADOW = 4  # observations of a round for each shadow update
MOST = 16  # examples of the shadow updates, which are two at least where the round pays for them
FEWEST = 5  # iterations in which a candidate shows anything
VERSION = 8  # of the cached choices; to be changed when they are made in another way


@dataclass(frozen=True, eq=False)
class Tuning:
    """Tuning of an attack for one round.

    Args:
        observations: attacked in the round.
        seed, round: of the attacker's randomness.
        cache: where choices are kept, so that all waves of a round share one.
    """

    modality: Modality
    budget: Budget
    observations: int
    seed: int
    round: int
    cache: TensorCache | None = None

    def of(self, attack: Attack, known: Knowledge, wave: Wave) -> tuple[Attack, str]:
        """The attack with the settings that are best on shadow updates, and the choice with its scores in words.

        It reads only the weights and buffers of the wave.

        Raises:
            ValueError: there are too few auxiliary images, or the chain cannot be simulated.
        """
        candidates = {"as given": attack, **attack.variants(known)}
        if len(candidates) == 1:
            return attack, "not tuned: the attack has one setting here"
        iterations, most = self.budget.iterations, max(2, MOST // known.batch_size)
        shadows = min(most, max(1, self.observations // PER_SHADOW))
        first = max(FEWEST, int(FIRST * iterations * min(1, SIX / (len(candidates) - 1))))
        last = max(FEWEST, int(LAST * iterations))

        def choice() -> dict[str, Tensor]:
            score = self._trial(known, wave, shadows, attack.trains_first)
            scores = [-torch.inf, *(score(one, first) for one in list(candidates.values())[1:])]
            other = max(range(len(scores)), key=scores.__getitem__)
            final = [score(attack, iterations), score(list(candidates.values())[other], last)]
            best = other if final[1] > final[0] else 0
            return {"best": torch.tensor(best), "scores": torch.tensor(final, dtype=torch.float64)}

        cache = self.cache or TensorCache.own()
        model = (str(known.model), known.model.training, wave.params, wave.buffers)
        images = known.auxiliary if known.auxiliary is not None else ()
        threat = (known.chain, known.batch_size, known.mean, known.std, known.loss, known.labels is None)
        name = digest(VERSION, list(candidates.values()), *model, *images, *threat, *vars(self.budget).values(),
                      self.observations, self.seed, self.round)  # fmt: skip
        made = cache.get(f"tuning-{name}", choice)
        best, (given, other) = int(made["best"]), made["scores"].tolist()
        label = list(candidates)[best]
        main = self.modality.main
        words = f"no other setting was better ({given:.1f} {main.unit} there)"
        if best:
            words = f"{label} ({other:.1f} {main.unit} there, {given:.1f} as given)"
        return candidates[label], f"tuned on {shadows * known.batch_size} auxiliary examples: {words}"

    def _trial(self, known: Knowledge, wave: Wave, shadows: int, one_split: bool) -> Callable[[Attack, int], float]:
        """The mean of the main metric on shadow updates after so many iterations, larger for more leakage; -inf for nothing.

        Args:
            one_split: whether these are the same images in all rounds, so that what is trained on the others is trained once.
        """
        count = shadows * known.batch_size
        public, part = known.enough(2 * count), () if one_split else (self.round,)
        order = torch.randperm(len(public.y), generator=generator(self.seed, "tuning", *part))
        chosen, rest = (Batch(*(t[rows.to(t.device)] for t in public)) for rows in (order[:count], order[count:]))
        x, y = (t.view(shadows, known.batch_size, *t.shape[1:]) for t in chosen)
        simulated = Simulator(known, wave.params).updates(x, y, generator(self.seed, "tuning updates", self.round))
        parts = list(simulated)
        update = {k: torch.cat([part[k] for part in parts]) for k in parts[0]}
        shadow = Wave(wave.round, tuple(range(shadows)), wave.params, update, wave.buffers)
        given = None if known.labels is None else torch.stack([ordered(own) for own in y])
        threat, truth = replace(known, auxiliary=rest, labels=given), (x.to(CPU), y.to(CPU))
        grader = Grader(self.modality, truth[0], label_kind=known.label_kind)
        streams = [partial(generator, self.seed, "tuning", self.round, s) for s in range(shadows)]

        def score(attack: Attack, iterations: int) -> float:
            results = attack.reconstruct(shadow, threat, Budget(iterations), streams)
            values = [grader.leaked(r.to(CPU), Batch(*one)) for r, *one in zip(results, *truth, strict=True)]
            return grader.modality.main.sign * fmean(chain.from_iterable(values)) if all(values) else -torch.inf

        return score
