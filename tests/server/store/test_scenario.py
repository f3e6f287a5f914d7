"""A scenario is checked whole before anything starts, and its mistakes are told to the person who wrote it."""

import copy
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedgauge.client.components import SpecError
from fedgauge.server.store.scenario import (
    Scenario,
    apply_setting,
    attack_from,
)

SGD = {"use": "local_sgd", "rate": 0.1}
CLIP = {"use": "clip", "max_norm": 1.0}


def write(folder: Path, tables: dict[str, Any]) -> Path:
    path = folder / "scenario.toml"
    path.write_text(tomli_w.dumps(tables))
    return path


# ----------------------------------------------------------------------------------------------------- what it becomes


def test_the_attackers_seed_is_the_federations_unless_it_has_its_own(kit: Any) -> None:
    assert kit.scenario(seed=7).plan.seed == 7
    assert kit.scenario(seed=7, audit={"seed": 8}).plan.seed == 8


def test_clients_are_sent_the_protocol_and_nothing_of_the_plan(kit: Any) -> None:
    """The names of everything that the server keeps to itself are searched for in what clients get."""
    scenario = kit.scenario(
        attack=[{"use": "dlg", "iterations": 12345, "name": "secret"}],
        audit={"executor": "local", "rounds": [2], "wave": 77},
        tape={"keep": "attacked"},
        strategy={"use": "FedAdam", "eta": 0.123},
    )
    sent = scenario.protocol.to_json()
    assert set(json.loads(sent)) == {"seed", "rounds", "clients", "data", "model", "chain"}
    for private in ("attack", "12345", "secret", "77", "attacked", "FedAdam", "0.123", "audit", "tape"):
        assert private not in sent


NOISY = [
    {"use": "local_sgd", "rate": 0.1},
    {"use": "clip", "max_norm": 1.0},
    {"use": "gaussian", "sigma": 0.1},
]


def test_epsilons_have_the_requested_delta(kit: Any) -> None:
    assert kit.scenario(chain=NOISY).privacy.delta == 1e-5
    scenario = kit.scenario(chain=NOISY, privacy={"delta": 1e-3})
    assert scenario.privacy.delta == 1e-3
    assert "privacy" not in scenario.protocol.to_json()


@pytest.mark.parametrize(
    ("chain", "privacy"),
    [(NOISY[:1], {}), ([NOISY[0], {"use": "sign"}], {"delta": 1e-6}), ([NOISY[0], NOISY[2]], {})]
    + [(NOISY, {"delta": 0}), (NOISY, {"epsilon": 3})],
)
def test_a_scenario_that_asks_for_an_invalid_epsilon_is_refused(kit: Any, chain: Any, privacy: Any) -> None:
    with pytest.raises(SpecError):
        kit.scenario(chain=chain, privacy=privacy)
    assert kit.scenario(chain=chain), "who does not ask may run it"


# ------------------------------------------------------------------------------------------------------------- FedProx


def test_fedproxs_weight_becomes_part_of_the_protocol(kit: Any) -> None:
    prox = {"use": "FedProx", "proximal_mu": 0.25}
    scenario = kit.scenario(strategy=prox, chain=[CLIP, SGD])
    assert [dict(t) for t in scenario.protocol.chain] == [CLIP, {**SGD, "proximal_mu": 0.25}]
    assert json.loads(scenario.protocol.to_json())["chain"][1]["proximal_mu"] == 0.25
    assert scenario.tables["chain"] == [CLIP, SGD], "the scenario as it was written stays as it was written"


@pytest.mark.parametrize(
    ("mu", "mine"), [(0.25, 0.5), (0.25, 0.0), (0.25, "much"), ("much", None), (-1.0, None), ([1], None)]
)
def test_two_different_mus_and_one_that_is_no_number_are_refused(kit: Any, mu: Any, mine: Any) -> None:
    own = {} if mine is None else {"proximal_mu": mine}
    with pytest.raises(SpecError):
        kit.scenario(strategy={"use": "FedProx", "proximal_mu": mu}, chain=[{**SGD, **own}])


# ----------------------------------------------------------------------------------------------------------- the errors


@pytest.mark.parametrize(
    ("changes", "named"),  # of each table one; what its values may be is claimed of its own reader
    [
        ({"modle": {}}, "'model'?"),
        ({"rounds": 0}, "rounds"),
        ({"clients": "four"}, "'four'"),
        ({"seed": 2**63}, "seed"),
        ({"strategy": "FedAvg"}, "[strategy]"),
        ({"attack": {"use": "dlg"}}, "[[attack]]"),
        ({"attack": ["dlg"]}, "[[attack]] #1"),
        ({"attack": [{"use": "dgl"}]}, "'dlg'?"),
        ({"attack": [{"iterations": 3}]}, "use = "),
        ({"audit": {"precision": "fp16"}}, "'tf32'"),
        ({"audit": {"workers": 0}}, "workers"),
        ({"audit": {"worker": 1}}, "'worker'"),
        ({"tape": {"kep": "all"}}, "retention_days"),
        ({"model": {"use": "mlp", "hidden": [2**63]}}, "[model]: hidden[0]"),
        ({"simulation": {"round_timeout": 0}}, "round_timeout"),
        ({"chain": [{"use": "clip", "max_nrom": 1.0}, SGD]}, "[[chain]] #1"),
    ],
    ids=str,
)
def test_mistakes_name_file_table_value_and_what_is_allowed(
    kit: Any, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    path = write(tmp_path, kit.tables(**changes))
    with pytest.raises(SpecError, match=f"^{path}: .*{re.escape(named)}"):
        Scenario.load(path)


def test_a_missing_file_a_folder_and_broken_toml_are_named(tmp_path: Path) -> None:
    broken = {f"{k}.toml": data for k, data in enumerate((b"rounds = ", b"\xff\xfe", b"a = 1\na = 2"))}
    for name, data in broken.items():
        (tmp_path / name).write_bytes(data)
    for path in (tmp_path / "none.toml", tmp_path, *(tmp_path / name for name in broken)):
        with pytest.raises(SpecError, match=str(path)):
            Scenario.load(path)


JUNK = st.sampled_from(
    [None, True, -1, 0, 2**70, -0.5, 1e308, float("nan"), "", "x", [], [None], [[1]], {}, {"use": 1}, {"a": 1}, "os:system"]
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in nested tables and lists."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for k, v in inner for p in places(v, (*path, k)))]


FULL: dict[str, Any] = {
    "strategy": {"use": "FedProx", "proximal_mu": 0.1},
    "chain": [{**CLIP, "each": True}, {**SGD, "steps": 2, "batch_size": 1}],
    "attack": [{"use": "dlg", "iterations": 2, "restarts": 1, "seconds": 1.0, "labels": "given"}],
    "audit": {"rounds": [1], "clients": [0], "wave": 1, "executor": "local", "workers": 1, "curious": True},
    "tape": {"keep": "all"},
    "simulation": {"parallel_clients": 1, "round_timeout": 5.0},
}


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_is_accepted_or_refused_with_a_message(kit: Any, data: st.DataObject) -> None:
    tables = copy.deepcopy(kit.tables(**FULL))
    *parents, last = data.draw(st.sampled_from([p for p in places(tables) if p]))
    here: Any = tables
    for key in parents:
        here = here[key]
    here[last] = data.draw(JUNK)
    words = "accepted"
    try:
        Scenario.from_tables(tables)
    except SpecError as error:
        words = str(error)
    assert words.strip()


# ------------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("setting", "place", "value"),
    [
        ("rounds=9", ("rounds",), 9),
        ("model.hidden=[4, 5]", ("model", "hidden"), [4, 5]),
        ("chain.0.rate=1e-3", ("chain", 0, "rate"), 1e-3),
        ("chain.0.each=true", ("chain", 0, "each"), True),
        ("audit.rounds=[1]", ("audit", "rounds"), [1]),
        ("tape.keep=none", ("tape", "keep"), "none"),
        ('tape.keep="none"', ("tape", "keep"), "none"),
        ("strategy.use=FedAdam", ("strategy", "use"), "FedAdam"),
        ("a.b.c=1", ("a", "b", "c"), 1),
        ("data.note=a=b", ("data", "note"), "a=b"),
        (" model.width = 4", ("model", "width"), 4),
        ("data.note=", ("data", "note"), ""),
        ('chain.0={use = "x"}', ("chain", 0), {"use": "x"}),
    ],
)
def test_a_setting_is_put_in_its_place(kit: Any, setting: str, place: tuple[Any, ...], value: Any) -> None:
    tables = kit.tables()
    apply_setting(tables, setting)
    found = tables
    for key in place:
        found = found[key]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "setting",
    ["rounds", "=3", "", "chain.1.rate=3", "chain.-1.rate=3", "chain.x.rate=3", "chain.².rate=3", "chain.²=3", "chain.1=3",
     "seed.x=3", "seed.x.y=3"],
)  # fmt: skip
def test_a_setting_without_a_place_is_refused(kit: Any, setting: str) -> None:
    tables = kit.tables()
    with pytest.raises(SpecError) as mistake:
        apply_setting(tables, setting)
    assert str(mistake.value).startswith(f"--set {setting}: ")
    assert tables == kit.tables()


def test_settings_are_checked_like_the_file(kit: Any, tmp_path: Path) -> None:
    path = write(tmp_path, kit.tables())
    assert Scenario.load(path, ["rounds=2", "audit.rounds=[2]"]).plan.rounds == (2,)
    with pytest.raises(SpecError):
        Scenario.load(path, ["rounds=2", "audit.rounds=[3]"])
    with pytest.raises(SpecError):
        Scenario.load(path, ["nonsense"])


def test_fewer_rounds_leave_out_the_attacked_ones_beyond(kit: Any, tmp_path: Path) -> None:
    path = write(tmp_path, kit.tables(rounds=9, audit={"rounds": [1, 2, 8, 9]}))
    scenario = Scenario.load(path, rounds=2)
    assert (scenario.protocol.rounds, scenario.plan.rounds) == (2, (1, 2))
    assert scenario == Scenario.from_tables(tomllib.loads(scenario.to_toml())), "it is kept as it was run"
    assert Scenario.load(path, rounds=20).plan.rounds == (1, 2, 8, 9)
    for rounds, attacked in ((0, [1]), (2, [0, 1]), (2, ["x"])):
        path = write(tmp_path, kit.tables(rounds=9, audit={"rounds": attacked}))
        with pytest.raises(SpecError):
            Scenario.load(path, rounds=rounds)


# --------------------------------------------------------------------------------------------------------- and back again


def test_an_attacks_paths_start_from_the_scenarios_folder(tmp_path: Path) -> None:
    assert attack_from({"use": "lamp", "lm_folder": "gpt2"}, tmp_path)["lm_folder"] == str(tmp_path / "gpt2")


@pytest.mark.parametrize("changes", [{}, FULL], ids=["small", "full"])
def test_a_scenario_written_down_is_the_scenario(kit: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    path = write(tmp_path, kit.tables(**changes))
    scenario = Scenario.load(path, ["rounds=2", "data.alpha=0.25", "model.hidden=[3, 4]"])
    again = tmp_path / "again.toml"
    again.write_text(scenario.to_toml())
    assert tomllib.loads(scenario.to_toml()) == scenario.tables
    assert Scenario.load(again) == scenario
    assert Scenario.load(again).protocol.to_json() == scenario.protocol.to_json()
    assert [p.to_json() for p in Scenario.load(again).plan.attacks] == [p.to_json() for p in scenario.plan.attacks]
