"""The attack service compares an app's updates with the assumed training in each round that it attacks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fedgauge.attacks.grading.knowledge_card import knowledge_card
from fedgauge.client.federation import Federation
from fedgauge.server.pool import assumed_training
from fedgauge.server.pool.assumed_training import MOST_CLIENTS, RECORDED, TrainingCheck
from fedgauge.server.pool.service import make_executor, serve
from fedgauge.server.store.ledger_types import Participation
from fedgauge.server.store.run import Run
from fedgauge.server.store.tape_source import TapeSource
from tests.small_runs import scenario


def foreign_run(folder: Path, wrong: bool, clients: int = 2, **changes: Any) -> Run:
    """A user's app of two rounds, whose clients upload differences in place of weights in the second, or do not."""
    attack = [{"use": "inverting_gradients", "iterations": 1}]
    chosen = scenario(clients=clients, attack=attack, **changes)
    run, federation = Run.create(folder, chosen), Federation(chosen.protocol)
    sent, buffers = federation.initial()
    with run.ledger() as ledger:
        ledger.add_attacks(chosen.plan, {p.name: knowledge_card(federation, p) for p in chosen.plan.attacks})
        ledger.set_meta(mode="deployment", rounds="2", state="trained")
        for round in (1, 2):
            run.tape().write_round(round, sent, buffers)
            replies, seen = [], []
            for client in range(clients):
                update = federation.client_update(sent, buffers, client, round)
                replies.append(update if wrong and round == 2 else {k: sent[k] + update[k] for k in sent})
                difference = {k: replies[-1][k] - sent[k] for k in sent}
                digest = run.tape().write_update(round, client, difference)
                seen.append(Participation(client, "accepted", "", 2, digest))
            ledger.record_intake(round, seen, chosen.plan)
            ledger.record_round(round, 0.1, 2.0, 1.0)
            sent = {k: torch.stack([reply[k] for reply in replies]).mean(0) for k in sent}
    return run


def attacked(run: Run) -> tuple[dict[str, str], dict[str, str]]:
    """The facts of a run and its attacks' cards after the attacks."""
    serve(run, make_executor(run.scenario().audit), run.scenario())
    with run.ledger() as ledger:
        return ledger.meta(), {row["name"]: row["training"] for row in ledger.attacks()}


@pytest.mark.parametrize("wrong", [False, True], ids=["weights", "differences"])
def test_mismatches_are_warned_of_from_their_round_on(wrong: bool, tmp_path: Path) -> None:
    meta, cards = attacked(foreign_run(tmp_path / "run", wrong))
    assert meta["training_fits"] == str(not wrong)
    assert ("client 0, round 2" in meta["training"]) is wrong
    assert ("not checked" in meta["training"]) is not wrong
    assert cards["inverting_gradients"] == f"{meta['training']}; {RECORDED}"
    assert cards["mean_image"] is None
    assert RECORDED in meta["replay_detail"]


def test_of_many_clients_the_first_are_compared_and_none_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = foreign_run(tmp_path / "run", wrong=False, clients=MOST_CLIENTS + 2)
    compared: list[tuple[int, int]] = []
    real = assumed_training.training_evidence

    def counted(fed: Any, seen: Any) -> Any:
        compared.append((seen.round, seen.client))
        return real(fed, seen)

    monkeypatch.setattr(assumed_training, "training_evidence", counted)
    attacked(run)
    assert compared == [(round, client) for round in (1, 2) for client in range(MOST_CLIENTS)]


def test_updates_that_the_tape_no_longer_has_are_compared_by_themselves(tmp_path: Path) -> None:
    meta, _ = attacked(foreign_run(tmp_path / "run", wrong=True, tape={"keep": "none"}))
    assert meta["training_fits"] == "False" and "round 2" in meta["training"]


def test_a_service_that_starts_again_keeps_the_worst_result(tmp_path: Path) -> None:
    run = foreign_run(tmp_path / "run", wrong=True)
    before, _ = attacked(run)
    with run.ledger() as ledger:
        assert TrainingCheck(TapeSource(run.scenario().federation, run=run, ledger=ledger)).begin(coming=False)
        assert ledger.meta()["training"] == before["training"]
        assert ledger.training_fits is False
