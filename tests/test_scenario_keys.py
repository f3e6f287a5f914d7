"""The reference of keys says what reading a scenario accepts: the same keys, the same kinds of value, the same defaults."""

import datetime
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from docs.generate.arguments import NEEDED, Key
from docs.generate.scenario_keys import TABLES
from docs.generate.schema import scenario_schema
from fedgauge.client.components import SpecError
from fedgauge.server.store.scenario import Scenario

NO_VALUE = datetime.date(2026, 1, 1)  # TOML can write it, and no key takes it
# a component for each table that names one, and the arguments that are its own
COMPONENTS: dict[str, dict[str, Any]] = {
    "data": {"use": "mnist5k"},
    "model": {"use": "mlp", "hidden": [4], "activation": "relu"},
    "loss": {"use": "focal", "gamma": 2.0},
    "chain": {"use": "clip", "max_norm": 1.0},
    "attack": {"use": "analytic"},
    "server_attack": {"use": "class_fishing", "target": 0},
}
NEEDED_BESIDE = {"secure_sum": {"group": 2}, "canaries": {"clients": 2}}
REST = {"strategy"}  # what stands beside `use` is the strategy's own and is checked when it is built
SHIPPED = [
    p
    for p in (Path(__file__).parents[1] / "simulations").glob("*.toml")
    if "scenario" not in tomllib.loads(p.read_text())
]
PLACES = [(table, key) for table, keys in TABLES.items() for key in keys() if key.name != "use"]
Tables = Callable[..., dict[str, Any]]


def scenario(tables: Tables, table: str, **values: Any) -> dict[str, Any]:
    """A small scenario in which a table has these values."""
    whole = {**tables(model=COMPONENTS["model"]), "chain": [COMPONENTS["chain"], {"use": "local_sgd", "rate": 0.1}]}
    whole["attack"] = [COMPONENTS["attack"]]
    if table == "top":
        return {**whole, **values}
    name, _, inner = table.partition(".")
    if inner:
        values = {inner: values}
    values = {**COMPONENTS.get(name, {}), **NEEDED_BESIDE.get(name, {}), **values}
    if name in ("chain", "attack", "server_attack"):
        values = [values, *whole.get(name, [])[1:]]  # type: ignore[assignment]  # a list of tables
    server = {"server": "malicious"} if name == "server_attack" else {}
    return {**whole, **server, name: values}


@pytest.mark.parametrize(("table", "key"), PLACES, ids=[f"{table}-{key.name}" for table, key in PLACES])
def test_a_wrong_value_is_refused_in_the_words_of_the_reference(tables: Tables, table: str, key: Key) -> None:
    with pytest.raises(SpecError) as caught:
        Scenario.from_tables(scenario(tables, table, **{key.name: NO_VALUE}))
    assert f"{key.name} must be {key.value}, got" in str(caught.value).replace("'", '"')


@pytest.mark.parametrize("table", [table for table in TABLES if table not in REST])
def test_the_keys_are_those_that_reading_a_scenario_knows(tables: Tables, table: str) -> None:
    with pytest.raises(SpecError) as caught:
        Scenario.from_tables(scenario(tables, table, nonsense=1))
    known = re.search(r"\((?:it|a scenario) has: ([\w, ]+)\)", str(caught.value))
    assert known is not None, caught.value
    found = set(known[1].split(", ")) - COMPONENTS.get(table, {}).keys() - {"architectures"}  # a malicious server's
    listed = {key.name for key in TABLES[table]()} - {"use"}
    if table == "top":
        listed |= {name for name in TABLES if name != "top" and "." not in name}
    assert found == listed


@pytest.mark.parametrize("table", TABLES)
def test_a_key_without_a_default_is_needed(tables: Tables, table: str) -> None:
    for key in TABLES[table]():
        if key.default == NEEDED and key.name not in ("use", "group"):
            whole = scenario(tables, table)
            del whole[key.name]
            with pytest.raises(SpecError, match=f"'{key.name}'"):
                Scenario.from_tables(whole)
        assert key.meaning and not key.meaning[0].isupper(), key


@pytest.fixture(scope="module")
def schema() -> Draft7Validator:
    """The JSON schema, itself checked."""
    made = scenario_schema()
    Draft7Validator.check_schema(made)
    return Draft7Validator(made)


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_the_schema_accepts_the_scenarios_that_ship(schema: Draft7Validator, path: Path) -> None:
    assert [error.message for error in schema.iter_errors(tomllib.loads(path.read_text()))] == []


def test_the_schema_refuses_wrong_values_and_unknown_keys(schema: Draft7Validator, tables: Tables) -> None:
    assert schema.is_valid(scenario(tables, "top"))
    for table, key in PLACES:
        assert not schema.is_valid(scenario(tables, table, **{key.name: NO_VALUE})), (table, key.name)
    for table in set(TABLES) - REST:
        assert not schema.is_valid(scenario(tables, table, nonsense=1)), table
    own = {"use": "my_package.nets:Small", "width": 4}
    assert schema.is_valid({**scenario(tables, "top"), "model": own})
    assert not schema.is_valid({**scenario(tables, "top"), "model": {**own, "use": "lenett"}})


def test_defaults_change_nothing(tables: Tables) -> None:
    """What the reference gives as the default is what a scenario without the key has."""
    bare = Scenario.from_tables(scenario(tables, "top"))
    for table in ("top", "data", "model", "chain", "attack", "audit", "tape", "simulation", "guard"):
        known = [key for key in TABLES[table]() if key.default.startswith("`") and key.name != "use"]
        values = {key.name: tomllib.loads(f"v = {key.default.strip('`')}")["v"] for key in known}
        full = Scenario.from_tables(scenario(tables, table, **values))
        assert replace(full, tables={}, protocol=bare.protocol) == replace(bare, tables={}), table
        assert full.protocol.groups == bare.protocol.groups and full.protocol.seed == bare.protocol.seed
        assert full.federation.chain == bare.federation.chain and full.federation.shards.seed == 0
        assert [i.tolist() for i in full.federation.shards.indices] == [
            i.tolist() for i in bare.federation.shards.indices
        ]
