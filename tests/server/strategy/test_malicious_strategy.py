"""A malicious server in a real federation: who gets what, what the tape keeps of it, what is averaged, what it wins."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgauge.attacks.grading.knowledge_card import knowledge_card
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.client.components import SpecError
from fedgauge.client.inspection.policy import REASON
from fedgauge.client.update import Params, average
from fedgauge.server.pool.executors import LocalExecutor
from fedgauge.server.pool.service import serve
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.store.tape import read_tensors
from fedgauge.server.strategy.malicious_strategy import MaliciousStrategy
from fedgauge.server.views.overview import Overview
from fedgauge.server.views.participation import guarded
from fedgauge.server.views.server_attacks import server_attack_effects
from fedgauge.server.views.snapshot import RunSnapshot, read_once
from fedgauge.simulations.reports.report import write_report
from fedgauge.simulations.run.create import cards
from fedgauge.simulations.run.in_memory import train

FISHING = {"use": "class_fishing", "target": 3}
LONE = {"use": "lone_example", "iterations": 40}
DEAD = {"use": "dead_layer", "all_but": [0]}
IG = "inverting_gradients"
ONE_BATCH = {"use": "mnist5k", "batch_size": 1200, "auxiliary": 400}  # all that each of three clients holds
TARGET = {"use": "lone_target", "iterations": 300}


def begun(folder: Path, scenario: Scenario) -> Run:
    run = Run.create(folder, scenario)
    with run.ledger() as ledger:
        ledger.add_attacks(scenario.plan, cards(scenario, scenario.plan))
    return run


def trained(folder: Path, scenario: Scenario) -> Run:
    run = begun(folder, scenario)
    train(run)
    return run


def malicious_setup(make: Callable[..., Scenario], *server_attack: dict[str, Any], **changes: Any) -> Scenario:
    return make(
        **{"rounds": 3, "server": "malicious", "server_attack": list(server_attack), "attack": [LONE], **changes}
    )


def sent(run: Run, round: int, whose: int) -> Params:
    return run.tape().read(round, whose).params


@pytest.fixture(scope="module")
def fishing(make_scenario: Callable[..., Scenario], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Client 1 is fished in round 2 of three; trained, not yet attacked; not to be changed."""
    scenario = malicious_setup(make_scenario, {**FISHING, "clients": [1], "rounds": [2]})
    run = begun(tmp_path_factory.mktemp("runs") / "fishing", scenario)
    train(run)
    return run


def test_only_targeted_clients_get_other_weights_and_the_tape_keeps_them(fishing: Run) -> None:
    with fishing.ledger() as ledger:
        digests = {(o["round"], o["client"]): o["digest"].split(":")[0] for o in ledger.observations()}
    assert len({digests[2, c] for c in (0, 2)}) == 1 and digests[2, 1] != digests[2, 0]
    assert all(len({digests[r, c] for c in range(3)}) == 1 for r in (1, 3))
    rows = {c: sent(fishing, 2, c)["3.weight"].flatten(1).any(1).nonzero().flatten().tolist() for c in range(3)}
    assert rows == {0: list(range(10)), 1: [3], 2: list(range(10))}
    first = {k: t for k, t in sent(fishing, 2, 1).items() if not k.startswith("3.")}
    assert all(torch.equal(t, sent(fishing, 2, 0)[k]) for k, t in first.items())


@pytest.mark.parametrize("aggregate", [False, True])
def test_what_altered_clients_answer_is_averaged_only_if_it_is_asked_for(
    make_scenario: Callable[..., Scenario], tmp_path: Path, aggregate: bool
) -> None:
    scenario = malicious_setup(make_scenario, {**FISHING, "clients": [1], "rounds": [2], "aggregate": aggregate})
    run = trained(tmp_path / "run", scenario)
    counted = [0, 1, 2] if aggregate else [0, 2]
    mean = average([run.tape().read(2, c).update for c in counted], [1] * len(counted))
    before, after = sent(run, 2, 0), sent(run, 3, 0)
    torch.testing.assert_close(after, {k: t + mean[k] for k, t in before.items()}, rtol=1e-5, atol=1e-6)


def test_a_round_in_which_every_client_is_targeted_keeps_the_model(
    make_scenario: Callable[..., Scenario], tmp_path: Path
) -> None:
    run = begun(tmp_path / "run", malicious_setup(make_scenario, {**FISHING, "rounds": [1, 2]}))
    train(run)
    start = run.scenario().federation.initial()[0]
    torch.testing.assert_close(sent(run, 3, 0), start)
    assert not torch.equal(read_tensors(run.model)["3.weight"], start["3.weight"])
    with run.ledger() as ledger:
        assert not [problem for problem in ledger.problems() if problem.code == "undone"]


def test_the_audit_attacks_each_at_the_weights_it_was_sent_and_says_whose_server_it_is(
    make_scenario: Callable[..., Scenario], tmp_path: Path
) -> None:
    scenario = malicious_setup(make_scenario, {**FISHING, "clients": [1], "rounds": [2]})
    run = trained(tmp_path / "run", scenario)
    serve(run, LocalExecutor())
    with run.ledger() as ledger:
        assert ledger.meta()["replay"] == "ok"
        progress = ledger.progress()
        assert (progress.queued, progress.failed) == (0, 0)
        found = {(r["round"], r["client"]): r["status"] for r in ledger.scores() if r["attack"] == "lone_example"}
        (card,) = [a["knowledge"] for a in ledger.attacks() if a["name"] == "lone_example"]
    fishy = bool((scenario.federation.batch_at(1, 2).y == 3).any())
    assert found.pop((2, 1)) == ("converged" if fishy else "not_applicable")
    assert set(found.values()) == {"not_applicable"}  # at honest weights nothing is isolated
    assert all(part in card for part in ("malicious server", "class_fishing(target=3)", "client 1 in round 2"))
    honest = make_scenario()
    assert "honest server" in knowledge_card(honest.federation, PlannedAttack("x", {"use": "dlg"}))


def test_it_remembers_its_answers_over_a_restart(make_scenario: Callable[..., Scenario], tmp_path: Path) -> None:
    """Classes are tried in turn, whoever starts the server anew in between."""
    whole = {"use": "class_fishing", "clients": [0]}
    rows = {}
    for stop in (4, 2):
        scenario = malicious_setup(make_scenario, whole, rounds=4, data=ONE_BATCH)
        run = begun(tmp_path / str(stop), scenario)
        if stop < 4:
            run = stopped(run, scenario, stop)
        train(run)
        rows[stop] = [int(sent(run, r, 0)["3.weight"].flatten(1).any(1).nonzero()[0]) for r in range(1, 5)]
    assert rows[2] == rows[4]
    assert len(set(rows[4])) > 1


def stopped(run: Run, scenario: Scenario, rounds: int) -> Run:
    """A run whose server ended after some rounds, as a kill between two leaves it."""

    class Killed(Exception):
        pass

    record = Ledger.record_round

    def kill(self: Ledger, round: int, *figures: Any) -> None:
        record(self, round, *figures)
        if round == rounds:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "record_round", kill)
        with pytest.raises(Killed):
            train(run)
    return run


def test_inconsistent_weights_take_a_secure_sum_apart(make_scenario: Callable[..., Scenario], tmp_path: Path) -> None:
    tables = {
        "rounds": 1,
        "secure_sum": {"group": 3},
        "model": {"use": "lenet"},
        "data": {"use": "mnist5k", "batch_size": 1, "auxiliary": 200},
        "attack": [TARGET, {"use": "inverting_gradients", "iterations": 120}],
    }
    honest = begun(tmp_path / "honest", make_scenario(**tables | {"attack": tables["attack"][1:]}))  # type: ignore[index]
    dishonest = begun(tmp_path / "dishonest", malicious_setup(make_scenario, DEAD, **tables))
    psnr: dict[Run, dict[str, list[float]]] = {}
    for run in (honest, dishonest):
        train(run)
        serve(run, LocalExecutor())
        with run.ledger() as ledger:
            rows = [r for r in ledger.scores() if r["metric"] == "psnr"]
            psnr[run] = {name: [r["value"] for r in rows if r["attack"] == name] for name in ("lone_target", IG)}
            replayed = ledger.meta()
        assert replayed["replay"] == ("ok" if run is honest else "unknown")
    assert len(psnr[dishonest]["lone_target"]) == 3
    assert psnr[dishonest]["lone_target"][0] > max(psnr[honest][IG]) + 1  # the first image is the target's


@pytest.mark.parametrize(
    ("server_attack", "decoder", "replay", "share"),
    [
        # equal weights: of twelve images over 63 bins (1 - 1/64)^11 = .84 are alone in theirs
        ({"use": "imprint"}, "read_imprint", "ok", 0.5),
        # of a client's four images over 16 bins (1 - 1/16)^3 = .82; in one batch of twelve it were .49
        ({"use": "loki", "members": 3, "bins": 16}, "read_kernels", "unknown", 0.6),
    ],
    ids=["imprint", "loki"],
)
def test_images_of_a_secure_sum_are_read_at_crafted_weights(
    make_scenario: Callable[..., Scenario],
    tmp_path: Path,
    server_attack: dict[str, Any],
    decoder: str,
    replay: str,
    share: float,
) -> None:
    """Imprint draws one query for all, or nothing would add up; loki reads each client apart."""
    scenario = malicious_setup(
        make_scenario,
        server_attack,
        rounds=2,
        secure_sum={"group": 3},
        model={"use": "mlp", "hidden": []},
        data={"use": "mnist5k", "batch_size": 4, "auxiliary": 500},
        attack=[{"use": decoder}],
    )
    run = trained(tmp_path / "run", scenario)
    serve(run, LocalExecutor())
    with run.ledger() as ledger:
        assert ledger.meta()["replay"] == replay
        exact = [r["value"] > 100 for r in ledger.scores() if r["metric"] == "psnr" and r["attack"] == decoder]
    assert len(exact) == 24 and sum(exact) >= share * len(exact)


def test_effects_of_a_malicious_server_are_reported(make_scenario: Callable[..., Scenario], tmp_path: Path) -> None:
    """One client of three meets trap weights in the second and third of three rounds; of the other seven messages nothing."""
    scenario = malicious_setup(
        make_scenario,
        {"use": "trap_weights", "clients": [1], "rounds": [2, 3]},
        guard={"inspect": "log"},
        model={"use": "mlp", "hidden": [200]},
        data={"use": "mnist5k", "batch_size": 8, "auxiliary": 200},
        attack=[{"use": "read_rows"}],
    )
    run = trained(tmp_path / "run", scenario)
    with read_once(run) as reading:
        assert "0 of 0" in server_attack_effects(reading)["recovered"]
    serve(run, LocalExecutor())
    with run.ledger() as ledger, read_once(run) as reading:
        told = server_attack_effects(reading)
        rows = [r for r in ledger.scores("psnr") if r["attack"] == "read_rows" and r["value"] is not None]
        exact = [r for r in rows if r["client"] == 1 and r["round"] > 1 and r["value"] >= 60]
    assert all(part in told["sent"] for part in ("trap_weights()", "client 1 in rounds 2, 3", "2 messages"))
    others = [r["value"] >= 60 for r in rows if r not in exact and (r["client"] != 1 or r["round"] == 1)]
    assert exact and f"{len(exact)} of 16" in told["recovered"] and f"{sum(others)} of 56" in told["recovered"]
    assert "2 of 2 altered" in told["noticed"] and "0 of 7 honest" in told["noticed"]
    with RunSnapshot(run).now() as reading:
        page, report = Overview(reading), write_report(run).read_text()
    assert page.server_attacks == told
    assert "The malicious server" in report and "0 of 7 honest" in report


def test_statistics_of_altered_weights_are_not_averaged(make_scenario: Callable[..., Scenario], tmp_path: Path) -> None:
    """BatchNorm in train mode: two runs that differ in what an altered client met end with the same model and statistics."""
    found = []
    for target in (3, 5):
        scenario = malicious_setup(
            make_scenario,
            {**FISHING, "target": target, "clients": [1], "rounds": [1]},
            rounds=1,
            model={"use": "convnet", "width": 1, "mode": "train"},
        )
        run = begun(tmp_path / str(target), scenario)
        train(run)
        found.append(read_tensors(run.model))
    assert any("running_mean" in name for name in found[0])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_honest_weights_are_sent_if_crafting_fails_later(
    make_scenario: Callable[..., Scenario], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = malicious_setup(make_scenario, {**FISHING, "clients": [1], "rounds": [2]})
    run = begun(tmp_path / "run", scenario)

    def fail(*_: object, **__: object) -> Params:
        raise ValueError("no such luck")

    monkeypatch.setattr(MaliciousStrategy, "_crafted", fail)
    train(run)
    assert all(torch.equal(t, sent(run, 2, 0)[k]) for k, t in sent(run, 2, 1).items())
    with read_once(run) as reading:
        told = server_attack_effects(reading)["sent"]
    assert "; round 2, client 1: " in told and told.endswith(": no such luck")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"server": "honest"}, '[[server_attack]]'),
        ({"server_attack": []}, 'one of carried_input, class_fishing'),
        ({"server": "evil"}, "server must be one of 'honest', 'malicious', got 'evil'"),
        ({"server_attack": [{"use": "fly_fishing"}]}, "[[server_attack]] #1: "),
        ({"server_attack": [{**FISHING, "target": 10}]}, "[[server_attack]] #1: class_fishing: target must be"),
        ({"server_attack": [{**FISHING, "clients": [3]}]}, "[[server_attack]] #1: clients must be in 0..2, got 3"),
        ({"server_attack": [{**FISHING, "rounds": [0]}]}, "[[server_attack]] #1: rounds must be in 1..3, got 0"),
        ({"server_attack": [{**FISHING, "all_but": [0, 1, 2]}]}, "leave no client to attack"),
        ({"server_attack": [{**FISHING, "rounds": [1, 2]}, {**DEAD, "rounds": [2]}]}, "dead_layer: another"),
        ({"server_attack": [{"use": FISHING["use"]}], "secure_sum": {"group": 3}}, "which [secure_sum] hides"),
        ({"server_attack": [DEAD], "attack": [LONE]}, "[[attack]] lone_example: it decodes class_fishing or feature_fishing"),
        ({"server_attack": [DEAD], "attack": [TARGET]}, "lone_target: it reads a secure sum"),
        ({"server_attack": [{"use": "trap_weight"}]}, "did you mean 'trap_weights'"),
        ({"server_attack": [{"use": FISHING["use"]}]}, "client 0 draws its batches anew"),
        ({"server_attack": [DEAD], "model": {"use": "mlp", "hidden": []}}, "has a bias"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_carried_out_is_refused(
    make_scenario: Callable[..., Scenario], changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(SpecError) as told:
        make_scenario(**{"rounds": 3, "server": "malicious", "server_attack": [FISHING], **changes})
    assert named in str(told.value)


# ------------------------------------------------------------------------------------------------- clients that notice


@pytest.mark.parametrize("mode", ["log", "warn", "refuse"])
def test_a_client_that_notices_alarms_or_withholds_and_the_run_continues(
    make_scenario: Callable[..., Scenario], tmp_path: Path, mode: str
) -> None:
    """Fished in the second round: the classifier's rows are gone, which no honest round does."""
    scenario = malicious_setup(
        make_scenario,
        {**FISHING, "clients": [1], "rounds": [2]},
        guard={"inspect": mode},
        data={"use": "mnist5k", "batch_size": 16, "auxiliary": 200},
    )
    run = trained(tmp_path / "run", scenario)
    with run.ledger() as ledger:
        seen = {(o["round"], o["client"]): (o["status"], o["reason"]) for o in ledger.observations()}
        words = guarded(ledger.observations())
        assert ledger.meta().get("server_attack") is None
    assert len(seen) == 9
    status, reason = seen.pop((2, 1))
    if mode == "refuse":
        assert (status, reason.split(":")[0]) == ("missing", REASON)
    else:
        assert status == "accepted" and reason.startswith("guard: round 2: alarm")
    assert {status for status, _ in seen.values()} == {"accepted"}
    assert all(("suspicion" in reason) == (mode == "log") and "alarm" not in reason for _, reason in seen.values())
    assert "1 times in 1 rounds" in words and "round 2, on client 1" in words
