"""A recorded run as a source of observations: every update on the tape is read here."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fedgauge.attacks.base import Observation
from fedgauge.attacks.source import FederationSource
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.uploads import read_observation


@dataclass(frozen=True, eq=False)
class TapeSource(FederationSource):
    """The updates of a run, as its model has them."""

    run: Run = field(kw_only=True)
    ledger: Ledger = field(kw_only=True)

    def taped(self) -> Sequence[tuple[int, int, str]]:
        """Return round, client and digest of each accepted update with a file in the ledger, in order of arrival."""
        rows = self.ledger.observations()
        return [(o["round"], o["client"], o["digest"]) for o in rows if o["status"] == "accepted" and o["digest"]]

    def observation(self, round: int, client: int, digest: str) -> Observation:
        """One update.

        Raises:
            TapeError: a file is missing, damaged, or does not match the digest.
            UploadMismatch: a user's own app trains another model.
        """
        return read_observation(self.run, self.ledger, self.federation, round, client, digest)
