"""What the recorder of a scenario's own server keeps of a round's checked replies."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgauge.attacks.plan import AttackPlan
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.tape import Tape
from fedgauge.server.strategy.reply_checks import AcceptedReply, RoundReplies
from fedgauge.server.update_recorder import UpdateRecorder

PARAMS = {"w": torch.tensor([1.0, 2.0])}
BUFFERS = {"norm.running_mean": torch.tensor([0.5])}


def intake(round: int, clients: tuple[int, ...] = (0, 1, 2)) -> RoundReplies:
    accepted = tuple(AcceptedReply(c, {"w": torch.tensor([float(c), float(round)])}, 4 + c, {}) for c in clients)
    refused = (
        Participation(8, "rejected", "w has entries that are not finite"),
        Participation(9, "missing", "no reply"),
    )
    return RoundReplies(round, PARAMS, BUFFERS, accepted, refused)


class Tapped:
    """A recorder on a fresh ledger and tape, after some rounds of three clients."""

    def __init__(self, folder: Path, plan: AttackPlan | None, keep: Any, rounds: tuple[int, ...] = (1, 2, 3)) -> None:
        self.ledger = Ledger(folder / "ledger.sqlite", create=True)
        self.tape = Tape(folder / "tape")
        if plan is not None:
            self.ledger.add_attacks(plan, {p.name: "card" for p in plan.attacks})
        self.recorder = UpdateRecorder(self.ledger, self.tape, plan, keep)
        for round in rounds:
            self.recorder(intake(round))
        self.files = sorted(p.name.removesuffix(".safetensors") for p in (folder / "tape").glob("*"))

    def kept(self) -> dict[int, list[int]]:
        """Which clients' updates of which rounds the ledger says are on the tape; all of them must be readable."""
        found: dict[int, list[int]] = {}
        for o in self.ledger.observations():
            if o["digest"] is not None:
                seen = self.tape.read(o["round"], o["client"], o["digest"])
                assert seen.update["w"].tolist() == [o["client"], o["round"]]
                assert seen.params["w"].tolist() == [1.0, 2.0]
                assert seen.buffers["norm.running_mean"].tolist() == [0.5]
                found.setdefault(o["round"], []).append(o["client"])
        on_tape = sum(len(clients) for clients in found.values()) + len(found)
        assert len(self.files) == on_tape, "a file that the ledger does not know, or the reverse"
        return found


def plan_of(kit: Any, **audit: Any) -> AttackPlan:
    plan: AttackPlan = kit.scenario(audit=audit).plan
    return plan


def jobs(ledger: Ledger) -> list[tuple[int, str, int]]:
    rows = ledger._db.execute("SELECT j.round, a.name, j.client FROM jobs j JOIN attacks a ON a.id = j.attack_id")
    return sorted(tuple(r) for r in rows)


def test_keep_all_keeps_every_accepted_update_and_attacks_what_the_plan_says(kit: Any, tmp_path: Path) -> None:
    at = Tapped(tmp_path, plan_of(kit, rounds=[2], clients=[0, 2]), "all")
    assert at.kept() == {1: [0, 1, 2], 2: [0, 1, 2], 3: [0, 1, 2]}
    assert jobs(at.ledger) == sorted(
        (2, a, c) for a in ("inverting_gradients", "mean_image", "class_mean_image", "random_image") for c in (0, 2)
    )


@pytest.mark.parametrize("keep", ["attacked", "none"])
def test_keep_attacked_keeps_attacked_updates_and_one_for_the_replay_check(kit: Any, tmp_path: Path, keep: str) -> None:
    at = Tapped(tmp_path, plan_of(kit, rounds=[2], clients=[0, 2]), keep)
    assert at.kept() == {1: [0], 2: [0, 2]}
    assert {round for round, _, _ in jobs(at.ledger)} == {2}


def test_the_first_round_needs_no_extra_update_when_it_is_attacked(kit: Any, tmp_path: Path) -> None:
    assert Tapped(tmp_path, plan_of(kit, every=2, clients=[1]), "attacked").kept() == {1: [1], 3: [1]}


def test_without_a_plan_nothing_is_kept_and_everybody_is_recorded(tmp_path: Path) -> None:
    at = Tapped(tmp_path, None, "all")
    assert at.kept() == {}
    assert not (tmp_path / "tape").exists()
    assert len(at.ledger.observations()) == 15
    assert at.ledger.progress().total == 0


def test_a_tap_that_dies_between_tape_and_ledger_leaves_nothing_half_known(kit: Any, tmp_path: Path) -> None:
    """Files without rows are never read; rows and jobs come in one transaction."""
    at = Tapped(tmp_path, plan_of(kit), "all", rounds=(1,))
    at.ledger.close()
    with pytest.raises(sqlite3.ProgrammingError):
        at.recorder(intake(2))
    with Ledger(tmp_path / "ledger.sqlite") as again:
        assert {o["round"] for o in again.observations()} == {1}
        assert {round for round, _, _ in jobs(again)} == {1}
        recorder = UpdateRecorder(again, at.tape, at.recorder.plan)
        recorder(intake(2))  # the same round again overwrites what was left
        assert {round for round, _, _ in jobs(again)} == {1, 2}
