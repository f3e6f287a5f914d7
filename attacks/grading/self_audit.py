"""Self audit: a client attacks its own update before it leaves, and the client's guard decides by the result."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedgauge.attacks.base import Wave
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.modality.registry import modality_of
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.attacks.source import FederationSource
from fedgauge.client.deployment.deployed_client import SelfAudit, UpdatePolicy
from fedgauge.client.deployment.owner_file import GuardPolicy
from fedgauge.client.federation import Federation
from fedgauge.client.update import Batch, Params, Update


@dataclass(frozen=True)
class invert_own(SelfAudit):
    """Inverts the client's own update and reports the best value of the main metric: PSNR, or of text ROUGE-1.

    Args:
        attack: as [[attack]] use names it; it knows the whole chain, restores the labels, and has no auxiliary images.
        iterations, seconds: the most that it may spend.

    Raises:
        ValueError: the attack has no result, or needs earlier rounds.
    """

    attack: str
    iterations: int = 100
    seconds: float = 20.0

    def __post_init__(self) -> None:
        _ = self._planned  # so that an unknown attack is an error here

    @property
    def _planned(self) -> PlannedAttack:
        table = {"use": self.attack, "iterations": self.iterations, "seconds": self.seconds}
        return PlannedAttack.from_table(table, "audit")

    def leak(
        self,
        own: Federation,
        params: Params,
        buffers: Mapping[str, Tensor],
        update: Update,
        returned: Mapping[str, Tensor],
        batch: Batch,
    ) -> float:
        if own.chain.local.remembers:
            raise ValueError("the attack would need the rounds before, from which scaffold's control variates follow")
        source = FederationSource(own, blind=True)  # the main metric is all that is graded, below
        wave = Wave.stack([source.seen(0, 1, (params, buffers), update, returned)])
        auditor = Auditor(source)
        (audited,) = auditor.audit(self._planned, wave)
        result = audited.reconstruction
        worst = auditor.modality.main.leakiest(auditor.grader.leaked(result, batch), float)
        # the server chooses the weights, so weights that make the attack diverge must not pass for safe
        if worst is None or result.status in ("not_applicable", "diverged"):
            raise ValueError(result.reason or "the attack has no result")
        return worst

    def policy(self, own: Federation, guard: GuardPolicy) -> UpdatePolicy:
        main = modality_of(own.shards.dataset).main
        threshold = main.leaked
        if guard.threshold is not None:  # one beyond the best value would withhold nothing
            threshold = (min if main.higher_is_better else max)(guard.threshold, main.complete)
        return UpdatePolicy(guard.max_norm, threshold, main.unit, main.higher_is_better)
