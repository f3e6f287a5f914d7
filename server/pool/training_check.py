"""The comparison of an app's updates with the local training that its audit assumes, in every attacked round."""

from collections.abc import Collection
from hashlib import sha256

from fedgauge.attacks.base import Observation
from fedgauge.attacks.grading.training_evidence import (
    TrainingEvidence,
    from_json,
    over_rounds,
    to_json,
    training_evidence,
)
from fedgauge.attacks.modality.registry import BASELINES
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import TapeError
from fedgauge.server.store.uploads import UploadMismatch, read_observation

MOST_CLIENTS = 3  # of a round
RECORDED = (
    "the updates were recorded before the server aggregated them, so noise that the server adds to their average does not protect "
    "them from this server"
)
NO_REPLAY = "not possible: the app's clients keep their data; they are taken to train as the chain says"


class TrainingCheck:
    """Compares updates before they are attacked, and writes the results into the ledger and on the attacks' cards.

    Of each round the first clients whose updates are attacked are compared, MOST_CLIENTS at most.
    """

    def __init__(self, run: Run, ledger: Ledger, scenario: Scenario) -> None:
        self._run, self._ledger, self._scenario = run, ledger, scenario
        self._assumed, meta = sha256(scenario.protocol.to_json().encode()).hexdigest(), ledger.meta()
        same = meta.get("training_assumed") == self._assumed
        try:
            self._found = from_json(meta.get("training_by_round", "[]")) if same else {}
        except (ValueError, TypeError):  # damaged: compare again
            self._found = {}

    def compare(self, round: int, clients: Collection[int]) -> None:
        """Compare the updates of a round's clients that were not compared yet."""
        known = sum(key[0] == round for key in self._found)
        for client in [c for c in sorted(clients) if (round, c) not in self._found][: max(0, MOST_CLIENTS - known)]:
            self._found[round, client] = self._evidence(round, client)
            self._write()

    def begin(self, coming: bool) -> bool:
        """Compare the first update on the tape, before anything is attacked; False: there is none yet.

        Args:
            coming: whether updates may still arrive.
        """
        taped = [o for o in self._ledger.observations() if o["status"] == "accepted" and o["digest"]]
        if not taped and coming:
            return False
        if taped:
            self.compare(taped[0]["round"], [taped[0]["client"]])
        self._write()  # also on the cards of attacks that were added since
        return True

    def _evidence(self, round: int, client: int) -> TrainingEvidence:
        try:
            seen, before = self._read(round, client), self._before(round, client)
            return training_evidence(self._scenario.federation, seen, before)
        except (TapeError, UploadMismatch) as error:
            return TrainingEvidence("undecided", None, f"whether the update fits this is not known: {error}")

    def _before(self, round: int, client: int) -> Observation | None:
        """The client's reply before a round; None: there is none, it was refused, or the tape does not have it any more."""
        earlier = [o for o in self._ledger.observations() if o["client"] == client and o["round"] < round]
        if not earlier or earlier[-1]["status"] != "accepted" or not earlier[-1]["digest"]:
            return None
        try:
            return self._read(earlier[-1]["round"], client)
        except TapeError:  # deleted after its attacks
            return None

    def _read(self, round: int, client: int) -> Observation:
        digests = {(o["round"], o["client"]): o["digest"] for o in self._ledger.observations()}
        return read_observation(
            self._run, self._ledger, self._scenario.federation, round, client, digests[round, client]
        )

    def _write(self) -> None:
        whole = over_rounds(self._found) if self._found else TrainingEvidence("undecided", None, "")
        words = "; ".join(filter(None, (whole.words, RECORDED)))
        names = [a["name"] for a in self._ledger.attacks() if a["name"] not in BASELINES]
        self._ledger.describe("training", dict.fromkeys(names, words))
        self._ledger.set_meta(
            replay="unknown",
            replay_detail="; ".join(filter(None, (NO_REPLAY, RECORDED, whole.words))),
            training=whole.words,
            training_fits=str(whole.fits),
            training_by_round=to_json(self._found),
            training_assumed=self._assumed,
        )
