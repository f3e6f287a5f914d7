"""README, SECURITY and docs stay true: their commands, examples and links work, and what is generated is current."""

import argparse
import ast
import json
import pkgutil
import re
import shlex
import sqlite3
import subprocess
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from docs.generate.__main__ import pages
from fedgauge.attacks.modality.image_metrics import BACKBONES, image_metrics, lpips_metric
from fedgauge.client.deployment.secure_sum import PairwiseMasking
from fedgauge.defenses.accounting import privacy_statement
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.cli.main import _parser
from fedgauge.simulations.experiments.sweep_file import Sweep
from fedgauge.simulations.reproduction.paper_table_files import load, restrict

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [README, *(ROOT / f"{name}.md" for name in ("SECURITY", "CONTRIBUTING", "CHANGELOG")), *DOCS]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def each_page(check: Callable[[Path], None]) -> Callable[[], None]:
    """Checks every page; of one that fails the traceback names the page."""

    def test() -> None:
        for page in PAGES:
            check(page)

    return test


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return [textwrap.dedent(body) for body in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def first_cells(page: str) -> set[str]:
    """The code in the first column of any table."""
    cells = [cells_of(line)[0] for line in text_of(page).splitlines() if line.startswith("|")]
    return set(re.findall(r"`([^`]+)`", " ".join(cells)))


def components(kind: str) -> set[str]:
    """The names in the generated table of a kind."""
    (block,) = re.findall(
        rf"<!-- generated: components {kind} -->\n(.*?)<!-- end -->", text_of("docs/components.md"), re.DOTALL
    )
    return set(re.findall(r"^\| `([^`]+)`", block, re.MULTILINE))


# ---------------------------------------------------------------------------------------------------------- the pages


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Paths and anchors of a page's links into the project."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if "://" not in target and not target.startswith("mailto:"):
            path, _, anchor = target.partition("#")
            yield path, anchor


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@each_page
def test_every_folder_file_and_module_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    paths = set(re.findall(r"`((?:client|defenses|attacks|server|simulations|tests)/[\w/.-]*)`", text))
    imported = re.findall(r"^ *(?:from|import) fedgauge\.([\w.]+)", text, re.MULTILINE)
    example = {"defenses/foo.py"}  # of adding-components.md
    assert {path for path in paths - example if not (ROOT / path).exists()} == set()
    modules = [ROOT / module.replace(".", "/") for module in imported if module != "defenses.foo"]
    assert [str(path) for path in modules if not path.is_dir() and not path.with_suffix(".py").is_file()] == []


@each_page
def test_every_name_of_fedgauges_python_exists(page: Path) -> None:
    names = re.findall(r"`(fedgauge(?:\.\w+)+)[`(]", prose(page.read_text()))
    for name in set(names) - PYPROJECT["entry-points"].keys():
        pkgutil.resolve_name(name)


def test_the_group_of_every_kind_of_component_is_named() -> None:
    assert PYPROJECT["entry-points"].keys() <= set(
        re.findall(r"`(fedgauge\.\w+)`", text_of("docs/adding-components.md"))
    )


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = {README}, [README]
    while waiting:
        page = waiting.pop()
        found = {(page.parent / path).resolve() for path, _ in links(page) if path.endswith(".md")} - reached
        reached |= found
        waiting += found
    assert set(PAGES) <= reached


# ----------------------------------------------------------------------------------------------- commands and examples


def commands() -> set[str]:
    return set(_parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr,arg-type]  # argparse has no public list


def test_every_command_is_in_the_table_and_exists() -> None:
    named = {cell.split()[1] for cell in first_cells("docs/commands.md") if cell.startswith("fedgauge ")}
    assert named == commands()


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """The options of a command and of its own commands."""
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {option for own in action.choices.values() for option in options_of(own)}
    return found


COMMAND = re.compile(r"^ *(?:\w+=\S+ )?(?:\.venv/bin/)?(fedgauge [a-z-]+.*)$", re.MULTILINE)


@each_page
def test_every_command_that_a_page_shows_can_be_given(page: Path) -> None:
    """A command in a block is parsed whole; of one within a sentence or a table the name and the options are known."""
    text = page.read_text()
    written = [line for body in blocks(text, "sh") + blocks(text, "yaml") for line in COMMAND.findall(body)]
    for line in written:
        words = shlex.split(line, comments=True)[1:]
        words = words[: words.index(">")] if ">" in words else words
        _parser(words[0]).parse_args(words)  # a mistake ends it
    for line in re.findall(r"`(fedgauge [a-z-]+[^`]*)`", prose(text)):
        name = line.split()[1]
        assert name in commands(), line
        assert set(re.findall(r"(?<![\w'-])--?[a-z][\w-]*", line)) <= options_of(_parser(name)), line


@each_page
def test_the_make_targets_exist(page: Path) -> None:
    makefile = text_of("Makefile")
    shown = re.findall(r"^make ([\w-]+)", "\n".join(blocks(page.read_text(), "sh")), re.MULTILINE)
    for target in [*shown, *re.findall(r"`make ([\w-]+)`", page.read_text())]:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@each_page
def test_the_programs_behind_python_m_exist(page: Path) -> None:
    for module in re.findall(r"python -m (?:fedgauge\.)?((?:simulations|tests|docs)\.[\w.]+)", page.read_text()):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_the_readmes_program_runs_and_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks(README.read_text(), "python")
    exec(compile(example, "README.md", "exec"), {})  # the README's own text
    (value,) = (float(v) for v in re.findall(r"[\d.]+", capsys.readouterr().out))
    assert value > 100


def test_the_readmes_scenario_holds_together() -> None:
    (example,) = blocks(README.read_text(), "toml")
    scenario = Scenario.from_tables(tomllib.loads(example))
    assert scenario.plan.attacks[0].budget.iterations == 500


def test_the_malicious_example_is_a_scenario_that_holds_together() -> None:
    (example,) = blocks(text_of("docs/malicious-server.md"), "toml")
    tables = {"rounds": 2, "clients": 2, "model": {"use": "mlp"}, "data": {"use": "mnist5k"}}
    chosen = Scenario.from_tables({**tables, "chain": [{"use": "local_sgd", "rate": 0.1}], **tomllib.loads(example)})
    assert (
        chosen.server.startswith("malicious server: class_fishing") and chosen.plan.attacks[0].budget.iterations == 400
    )


def test_the_sweep_of_the_page_holds_together(tmp_path: Path) -> None:
    example, *_ = blocks(text_of("docs/defenses.md"), "toml")
    (tmp_path / "sweep.toml").write_text(example)
    assert len(Sweep.load(tmp_path / "sweep.toml").cells) == 4


@pytest.mark.parametrize("page", ["attacks", "canaries", "gpu", "scenarios", "guides/tutorial"])
def test_the_parts_of_a_scenario_that_a_page_shows_fit_into_one(page: str) -> None:
    """Each in place of the tables of a small scenario, whose local training stays if the part has none."""
    local = {"use": "local_sgd", "rate": 0.1}
    small = {"rounds": 2, "clients": 8, "data": {"use": "mnist5k"}, "model": {"use": "mlp"}, "attack": [{"use": "dlg"}]}
    for example in blocks(text_of(f"docs/{page}.md"), "toml"):
        part = tomllib.loads(example)
        noise = [{"use": "clip", "max_norm": 1.0}, {"use": "gaussian", "sigma": 0.1}] if "canaries" in part else []
        chain = [*noise, *part.get("chain", ())]
        chain += [] if any(link["use"].startswith("local") for link in chain) else [local]
        Scenario.from_tables({**small, **part, "chain": chain})


def test_the_table_of_the_page_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its columns by a file as the page describes it."""
    monkeypatch.chdir(tmp_path)
    rows = [
        f"{20 + k % 60},{1500 + 10 * k},{('baker', 'driver')[k % 2]},{k % 7},n{k},day {k},{k % 2}" for k in range(200)
    ]
    (tmp_path / "loans.csv").write_text("\n".join(["age,income,trade,branch,name,opened,default", *rows]))
    found, agreed = (tomllib.loads(block)["data"] for block in blocks(text_of("docs/tables.md"), "toml"))
    tables = {"rounds": 1, "clients": 2, "model": {"use": "mlp"}, "chain": [{"use": "local_sgd", "rate": 0.1}]}
    for data, kinds in ((found, [True, True, False, False]), ({**found, **agreed}, [True, True, False])):
        read: Any = Scenario.from_tables({**tables, "data": {**data, "auxiliary": 20}}).federation.shards.dataset
        assert [column.numeric for column in read.columns.every] == kinds


def test_the_secure_sum_of_an_owners_file_can_be_agreed() -> None:
    (example,) = blocks(text_of("docs/client-owner.md"), "toml")
    terms = PairwiseMasking(**tomllib.loads(example)["secure_sum"])
    assert (terms.group, terms.threshold, terms.clip) == (3, 3, 0.1)


@pytest.mark.parametrize("page", ["docs/defenses.md", "docs/secure-sum.md"])
def test_the_mods_of_a_page_can_be_mounted(page: str) -> None:
    (example,) = blocks(text_of(page), "py")
    exec(compile(example, page, "exec"), {"app": ClientApp(), "FedAvg": FedAvg})  # the page's own text


@each_page
def test_every_table_that_a_page_reproduces_has_the_cells_that_it_names(page: Path) -> None:
    shown = re.findall(r"fedgauge reproduce ([a-z]\w+)(?!\w*\.toml)(?:[^`\n]*--cells '([^']+)')?", page.read_text())
    for name, cells in shown:
        table = load("suite_small" if name == "suite" else name)
        restrict(table, None, None, cells or "*")


@each_page
def test_every_toml_is_readable_and_names_components_that_there_are(page: Path) -> None:
    known = set(re.findall(r"^\| `([^`]+)`", text_of("docs/components.md"), re.MULTILINE))
    for block in blocks(page.read_text(), "toml"):
        tomllib.loads(block)
        assert {use for use in re.findall(r'\buse = "([^"]+)"', block) if ":" not in use} <= known


@each_page
def test_every_block_of_code_can_be_read(page: Path) -> None:
    """Those of Python, YAML and the shell; TOML is above, and what the tests run is nearer to it."""
    text = page.read_text()
    for block in [*blocks(text, "py"), *blocks(text, "python")]:
        ast.parse(re.sub(r"^%.*$", "", block, flags=re.MULTILINE))  # a notebook's own commands
    for block in blocks(text, "yaml"):
        assert yaml.safe_load(block)
    shell = "\n".join(blocks(text, "sh"))
    assert subprocess.run(["bash", "-n"], input=shell, text=True, capture_output=True).stderr == ""
    languages = {fence for fence in re.findall(r"^ *```(.*)$", text, re.MULTILINE) if fence}
    assert languages <= {"py", "python", "yaml", "sh", "toml", "sql", "text"}, "no test reads these"


def test_the_ledgers_example_is_a_question_that_a_ledger_answers(tmp_path: Path) -> None:
    (example,) = blocks(text_of("docs/watching.md"), "sql")
    of_notebook = re.findall(r'read_sql_query\(\\"(.+?)\\"', text_of("docs/notebooks/read-a-ledger.ipynb"))
    Ledger(tmp_path / "ledger.sqlite", create=True).close()
    with closing(sqlite3.connect(f"file:{tmp_path}/ledger.sqlite?mode=ro", uri=True)) as db:
        assert [db.execute(question).fetchall() for question in (example, *of_notebook)] == [[], []]


# --------------------------------------------------------------------------------------------------------- components


def test_generated_blocks_are_current() -> None:
    assert [name_of(page) for page, fresh in pages() if page.read_text() != fresh] == [], "make docs"


def test_every_server_attack_is_explained_and_no_other() -> None:
    heads = "| server attack | what it sends |"
    table = text_of("docs/malicious-server.md").partition(heads)[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)) == components("server_attack")


@pytest.mark.parametrize("page", ["docs/attacks.md", "docs/text.md"])
def test_the_attacks_that_a_page_recommends_exist(page: str) -> None:
    lines = [cells_of(line) for line in text_of(page).splitlines() if line.startswith("|")]
    heads = [k for k, cells in enumerate(lines) if cells[:2] == ["setting", "attack"] and len(cells) == 3]
    chosen = []
    for cells in lines[heads[0] + 2 :]:
        names = re.findall(r"`(\w+)`", cells[1])
        if not names:
            break
        chosen += names
    assert chosen and set(chosen) <= components("attack")


def test_the_metrics_are_named() -> None:
    names = {m.name for m in image_metrics((3, 32, 32), torch.zeros(2, 3, 32, 32))} | {"label_accuracy"}
    names |= {f"lpips_{net}" for net in BACKBONES}
    assert all(found is None or found.name in names for found in map(lpips_metric, BACKBONES))
    assert names <= first_cells("docs/measurement.md")


# ---------------------------------------------------------------------------------------------------- papers' figures


def test_all_kept_figures_are_shown() -> None:
    shown = re.findall(r"<!-- figures: ([\w ]+)(?:;[^>]*)? -->", "\n".join(page.read_text() for page in DOCS))
    kept_ones = {path.stem for path in (ROOT / "simulations/papers").rglob("*.json")}
    assert set(" ".join(shown).split()) == kept_ones


def test_every_table_of_a_paper_is_named() -> None:
    named = set(re.findall(r"`(\w+)`", text_of("docs/papers/README.md")))
    assert {path.stem for path in (ROOT / "simulations/papers").rglob("*.toml")} <= named


# ------------------------------------------------------------------------------------------------------------ defenses


def test_the_defenses_epsilons_are_what_the_accountant_says() -> None:
    """An epsilon follows from the settings alone, so that it needs no new measurement."""
    measured = json.loads(text_of("simulations/results/defenses/sweep.json"))["rows"]
    kept_ones = {row["defense"]: row["epsilon"] for row in measured}
    for cell in Sweep.load(ROOT / "simulations/defenses.toml").cells:
        scenario = Scenario.from_tables(cell.tables)
        rounds = dict.fromkeys(range(scenario.protocol.clients), scenario.protocol.rounds)
        found = privacy_statement(scenario.federation, rounds, scenario.privacy.delta).record
        assert kept_ones[cell.defense] == (None if found is None else pytest.approx(found, rel=1e-3)), cell.defense


@pytest.mark.parametrize("name", ["defenses", "defenses_batch16"])
def test_the_kept_sweep_has_a_row_for_each_of_the_ready_one(name: str) -> None:
    cells = Sweep.load(ROOT / f"simulations/{name}.toml").cells
    measured = json.loads(text_of(f"simulations/results/{name}/sweep.json"))["rows"]
    planned = {(cell.defense, attack) for cell in cells for attack in cell.attacks}
    assert {(row["defense"], row["attack"]) for row in measured} == planned
    assert all(row["mean"] is not None or row["reason"] for row in measured), "a number or a reason"


# -------------------------------------------------------------------------------------------------- the way of an update


def test_every_station_of_an_update_is_where_the_page_says() -> None:
    """A file with the functions that an update passes there."""
    page = text_of("docs/architecture.md")
    walk = page[page.index("## The way of an update") : page.index("## Where each part is")]
    named = re.findall(r"`([\w/]+\.py)`:\s+(`[\w.]+`(?:,\s+`[\w.]+`)*)", walk)
    for file, functions in named:
        written: set[str] = set()
        for node in ast.parse((ROOT / file).read_text()).body:
            if isinstance(node, ast.FunctionDef):
                written.add(node.name)
            if isinstance(node, ast.ClassDef):
                written |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        assert set(re.findall(r"`([\w.]+)`", functions)) <= written, file
    assert len(named) > 15, "the test reads nothing"


def test_each_promise_of_security_names_the_test_that_holds_it() -> None:
    page = text_of("SECURITY.md")
    promised = page.partition("## What is promised")[2].partition("\n## ")[0]
    _, _, *rows = [cells_of(line) for line in promised.splitlines() if line.startswith("|")]
    named = {party: re.findall(r"`(tests/[\w/]+\.py)`", tests) for party, *_, tests in rows}
    untested = [party for party, tests in named.items() if not tests]
    assert len(named) > 5 and untested == ["installed packages, Python, torch, Flower, Ray"]
    assert [test for tests in named.values() for test in tests if not (ROOT / test).is_file()] == []
