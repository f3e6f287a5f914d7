"""README, SECURITY and docs stay true: their commands, examples and links work, and their figures are the kept ones."""

import ast
import csv
import importlib
import itertools
import json
import pkgutil
import re
import sqlite3
import statistics
import subprocess
import textwrap
import tomllib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fedgauge.attacks.modality.image_metrics import BACKBONES, image_metrics, lpips_metric
from fedgauge.defenses.accounting import privacy_statement
from fedgauge.server.store.ledger import Ledger
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.cli.main import _parser
from fedgauge.simulations.experiments.sweep_file import Sweep
from fedgauge.simulations.experiments.sweep_rows import SweepRow, summary
from fedgauge.simulations.reports import kept_figures

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [README, *(ROOT / f"{name}.md" for name in ("SECURITY", "CONTRIBUTING", "CHANGELOG")), *DOCS]
COMPONENTS = ROOT / "docs/components.md"
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MOST_LINES = 300  # of a page
CHAINS = ("none", "sign", "prune", "gauss")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def blocks(text: str, language: str) -> list[str]:
    """What stands in fenced blocks of a language."""
    return [textwrap.dedent(body) for body in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def row(page: str, *start: str) -> list[str]:
    """The cells that follow these in the only table row that begins with them."""
    lines = [cells_of(line) for line in text_of(page).splitlines() if line.startswith("|")]
    (found,) = (cells[len(start) :] for cells in lines if cells[: len(start)] == list(start))
    return found


def first_cells(page: str) -> set[str]:
    """What stands in code marks in the first column of any table."""
    cells = [cells_of(line)[0] for line in text_of(page).splitlines() if line.startswith("|")]
    return set(re.findall(r"`([^`]+)`", " ".join(cells)))


def components(kind: str) -> set[str]:
    """The names in the generated table of a kind."""
    (block,) = re.findall(
        rf"<!-- generated: components {kind} -->\n(.*?)<!-- end -->", text_of("docs/components.md"), re.DOTALL
    )
    return set(re.findall(r"^\| `([^`]+)`", block, re.MULTILINE))


def results(sheet: str) -> Path:
    """The file of a paper's kept figures."""
    (found,) = (ROOT / "simulations/papers").rglob(f"{sheet}.json")
    return found


def rows_of(sheet: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(results(sheet).read_text())["rows"]
    return rows


def kept(sheet: str, cell: str, metric: str, attack: str | None = None) -> float:
    """One kept figure."""
    (value,) = {
        row["here"]
        for row in rows_of(sheet)
        if (row["cell"], row["metric"]) == (cell, metric) and attack in (None, row["attack"])
    }
    return float(value)


def benchmark(name: str) -> dict[tuple[str, str], float]:
    """The kept figures of a benchmark, by what they are figures of and their unit."""
    figures = json.loads(text_of(f"simulations/benchmarks/results/{name}.json"))["figures"]
    return {(figure["name"], figure["unit"]): figure["value"] for figure in figures}


def error(value: float) -> str:
    """As the pages write a mean squared error: .0077."""
    return f"{value:.4f}".removeprefix("0")


def without_paper(cell: str) -> str:
    """A cell without the paper's figure behind ours."""
    return cell.partition(" (")[0]


# ---------------------------------------------------------------------------------------------------------- the pages


def test_the_readme_is_short_and_so_is_every_page() -> None:
    as_long_as_the_code = {COMPONENTS, ROOT / "docs/reference/command-options.md"}
    written = [page for page in PAGES if page not in as_long_as_the_code]
    assert {name_of(page) for page in written if len(page.read_text().splitlines()) > MOST_LINES} == set()
    assert len((ROOT / "README.md").read_text().splitlines()) <= 250
    assert len((ROOT / "README.md").read_text().split()) <= 1500


@pytest.mark.parametrize("page", DOCS, ids=name_of)
def test_every_page_begins_with_a_sentence(page: Path) -> None:
    title, empty, *rest = page.read_text().splitlines()
    first = " ".join(itertools.takewhile(bool, rest))
    assert title.startswith("# ") and not empty
    assert re.match(r"[A-Z][^|<]{20,}?[.?:]( |$)", first), "say in a sentence of plain English what the page is for"


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Paths and anchors of a page's links into the project."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if "://" not in target and not target.startswith("mailto:"):
            path, _, anchor = target.partition("#")
            yield path, anchor


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_folder_file_and_module_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    paths = set(re.findall(r"`((?:client|defenses|attacks|server|simulations|tests)/[\w/.-]*)`", text))
    imported = re.findall(r"^ *(?:from|import) fedgauge\.([\w.]+)", text, re.MULTILINE)
    example = {"defenses/foo.py"}  # of adding-components.md
    assert {path for path in paths - example if not (ROOT / path).exists()} == set()
    modules = [ROOT / module.replace(".", "/") for module in imported if module != "defenses.foo"]
    assert [str(path) for path in modules if not path.is_dir() and not path.with_suffix(".py").is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_name_of_fedgauges_python_exists(page: Path) -> None:
    names = re.findall(r"`(fedgauge(?:\.\w+)+)[`(]", prose(page.read_text()))
    for name in set(names) - PYPROJECT["entry-points"].keys():
        pkgutil.resolve_name(name)


def test_the_group_of_every_kind_of_component_is_named() -> None:
    assert PYPROJECT["entry-points"].keys() <= set(
        re.findall(r"`(fedgauge\.\w+)`", text_of("docs/adding-components.md"))
    )


def test_the_readmes_first_screen_says_what_may_be_brought() -> None:
    first = text_of("README.md").partition("\n## ")[0]
    for what in ("Flower app", "torch", "data", "loss", "defense", "attack", "(docs/bring-your-own.md)"):
        assert what in first


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = {README}, [README]
    while waiting:
        page = waiting.pop()
        found = {(page.parent / path).resolve() for path, _ in links(page) if path.endswith(".md")} - reached
        reached |= found
        waiting += found
    assert set(PAGES) <= reached


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_are_todays(page: Path) -> None:
    assert not re.findall(r"fedleak|\bmalice\b|dishonest", page.read_text(), re.IGNORECASE)


# ----------------------------------------------------------------------------------------------- commands and examples


def commands() -> set[str]:
    return set(_parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr,arg-type]  # argparse has no public list


def test_every_command_is_in_the_table_and_exists() -> None:
    named = {cell.split()[1] for cell in first_cells("docs/commands.md") if cell.startswith("fedgauge ")}
    assert named == commands()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_that_a_page_shows_exists(page: Path) -> None:
    shown = "\n".join([*blocks(page.read_text(), "sh"), *re.findall(r"`(fedgauge [^`]+)`", prose(page.read_text()))])
    assert set(re.findall(r"^(?:\w+=\S+ )?fedgauge ([a-z-]+)", shown, re.MULTILINE)) <= commands()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_make_targets_exist(page: Path) -> None:
    makefile = text_of("Makefile")
    shown = re.findall(r"^make ([\w-]+)", "\n".join(blocks(page.read_text(), "sh")), re.MULTILINE)
    for target in [*shown, *re.findall(r"`make ([\w-]+)`", page.read_text())]:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_programs_behind_python_m_exist(page: Path) -> None:
    for module in re.findall(r"python -m fedgauge\.([\w.]+)", page.read_text()):
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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_toml_is_readable_and_names_components_that_there_are(page: Path) -> None:
    known = set(re.findall(r"^\| `([^`]+)`", text_of("docs/components.md"), re.MULTILINE))
    for block in blocks(page.read_text(), "toml"):
        tomllib.loads(block)
        assert {use for use in re.findall(r'\buse = "([^"]+)"', block) if ":" not in use} <= known


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_of_code_can_be_read(page: Path) -> None:
    """Those of Python, YAML and the shell; TOML is above, and what the tests run is nearer to it."""
    text = page.read_text()
    by_hand = re.sub(r"<!-- generated: signatures .*?<!-- end -->", "", text, flags=re.DOTALL)  # these have no bodies
    for block in [*blocks(by_hand, "py"), *blocks(by_hand, "python")]:
        ast.parse(re.sub(r"^%.*$", "", block, flags=re.MULTILINE))  # a notebook's own commands
    for block in blocks(text, "yaml"):
        assert yaml.safe_load(block)
    shell = "\n".join(blocks(text, "sh"))
    assert subprocess.run(["bash", "-n"], input=shell, text=True, capture_output=True).stderr == ""
    languages = {fence for fence in re.findall(r"^ *```(.*)$", text, re.MULTILINE) if fence}
    assert languages <= {"py", "python", "yaml", "sh", "toml", "sql"}, "no test reads these"


def test_the_ledgers_example_is_a_question_that_a_ledger_answers(tmp_path: Path) -> None:
    (example,) = blocks(text_of("docs/reference/ledger.md"), "sql")
    Ledger(tmp_path / "ledger.sqlite", create=True).close()
    with closing(sqlite3.connect(f"file:{tmp_path}/ledger.sqlite?mode=ro", uri=True)) as db:
        assert db.execute(example).fetchall() == []


def test_every_dependency_of_the_card_is_declared_and_every_scenario_is_readable() -> None:
    wanted = ["flwr", "torch", "torchvision", "transformers", "numpy", "lpips", "rouge-score", "ray", "pytest"]
    declared = " ".join([*PYPROJECT["dependencies"], *sum(PYPROJECT["optional-dependencies"].values(), [])])
    for name in wanted:
        assert re.search(rf"(^| ){re.escape(name)}(\[|>)", declared), name
    for path in (ROOT / "simulations").glob("*.toml"):
        tomllib.loads(path.read_text())


# --------------------------------------------------------------------------------------------------------- components


GENERATORS = {
    "list_components": "components",
    "list_keys": "scenario-keys",
    "list_signatures": "adding-components",
    "list_options": "reference/command-options",
    "list_ledger": "reference/ledger",
}


@pytest.mark.parametrize(("program", "page"), GENERATORS.items())
def test_what_is_written_from_the_code_is_what_the_code_says(program: str, page: str, tmp_path: Path) -> None:
    kept, fresh = ROOT / f"docs/{page}.md", tmp_path / "page.md"
    fresh.write_text(kept.read_text())
    command = [f"fedgauge.simulations.cli.{program}", "--write"]
    importlib.import_module(command[0]).main(["--write", str(fresh)])
    assert fresh.read_text() == kept.read_text(), f"make docs, or: python -m {' '.join(command)} docs/{page}.md"
    assert f"{' '.join(command)} docs/{page}.md" in text_of("Makefile")


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


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs/papers").glob("[a-z]*.md")), ids=name_of)
def test_the_papers_figures_are_the_kept_ones(page: Path) -> None:
    text = page.read_text()
    assert kept_figures.MARKED.search(text)
    assert kept_figures.fill(text) == text, "python -m fedgauge.simulations.reports.kept_figures docs/papers/[a-z]*.md"


def test_all_kept_figures_are_shown() -> None:
    shown = re.findall(r"<!-- figures: ([\w ]+) -->", "\n".join(page.read_text() for page in DOCS))
    kept_ones = {path.stem for path in (ROOT / "simulations/papers").rglob("*.json")}
    assert sorted(" ".join(shown).split()) == sorted(kept_ones)


def test_every_table_of_a_paper_is_named() -> None:
    named = set(re.findall(r"`(\w+)`", text_of("docs/papers/README.md")))
    assert {path.stem for path in (ROOT / "simulations/papers").rglob("*.toml")} <= named


# ------------------------------------------------------------------------------------------------ malicious servers


def test_the_threat_models_figures_are_the_kept_ones() -> None:
    page = "docs/malicious-server.md"
    trap, honest = (100 * kept("trap_weights", cell, "verbatim") for cell in ("trap weights", "honest weights"))
    assert f"{trap:.1f} % of the images verbatim (honest weights: {honest:.1f} %)" in text_of(page)
    imprinted = 100 * kept("imprint", "N=64, K=256", "verbatim")
    assert f"{imprinted:.1f} % verbatim" in text_of(page)


def test_the_guards_figures_are_the_kept_ones() -> None:
    assert kept("guard", "all networks", "false_alarms") == 0
    seen = [row for row in rows_of("guard") if row["metric"] == "detected"]
    assert {row["here"] for row in seen} == {1}
    assert {row["attack"] for row in seen} == components("server_attack")
    patient = rows_of("guard_patient")
    assert {row["here"] for row in patient} == {0, 1}
    missed = {(row["attack"], row["cell"]) for row in patient if row["here"] == 0}
    assert {cell for attack, cell in missed if attack == "optimised_features"} == {"mlp, MNIST"}
    assert {attack for attack, _ in missed} == {"label_flipping", "optimised_features"}
    assert {row["attack"] for row in patient} == {row["attack"] for row in seen}


def test_what_server_attacks_win_is_what_was_kept() -> None:
    page = "docs/malicious-server.md"

    def decibels(*start: str) -> list[float]:
        return [float(v) for v in re.findall(r"[\d.]+(?= dB)", " ".join(row(page, *start)))]

    def expected(sheet: str, metric: str, *cells: str) -> list[float]:
        return [round(kept(sheet, cell, metric), 1) for cell in cells]

    assert decibels("weights optimised for reconstruction, DLG's LeNet, one linear estimate") == expected(
        "optimised_parameters", "psnr", "lenet, optimised", "lenet, honest"
    )
    assert decibels("the same, batches of eight with distinct labels") == expected(
        "optimised_parameters", "psnr", "lenet, batches of 8, distinct labels"
    )
    assert decibels("fishing by class, one of 32 examples keeps its gradient") == expected(
        "fishing", "isolated_psnr", "class", "class, alone"
    )
    assert decibels("fishing by features, the same (n = 20)") == expected(
        "fishing", "isolated_psnr", "feature", "feature, alone"
    )
    assert decibels("dead weights for the other four clients of a secure sum") == expected(
        "inconsistency", "isolated_psnr", "inconsistent", "alone", "honest"
    )
    for net, words in (("CIFAR-10, B=16", "16, ConvSmall on CIFAR-10"), ("MNIST, B=64", "64, ConvSmall on MNIST")):
        cells = [f"convsmall, {net}, {sent}" for sent in ("Scale-MIA", "honest weights")]
        assert decibels(f"Scale-MIA, batches of {words}") == expected("scale_mia", "psnr", *cells)
    apart, mixed = (100 * kept("loki", f"M=8, {sent}", "verbatim") for sent in ("LOKI", "imprint"))
    summed = row(page, "LOKI, a secure sum of eight clients with 16 images each, 64 bins")
    assert summed[-2:] == [f"{apart:.1f} % verbatim", f"imprint, the same sum: {mixed:.1f} %"]
    flips = expected("label_flipping", "psnr", "flipped", "honest")
    assert decibels("flipped labels, a trained ConvNet, no noise")[:2] == flips
    for words, noise in (("without noise", "no noise"), ("under noise .01", "noise .01")):
        flipped, honest = (kept("label_flipping_noise", f"{how}, {noise}", "psnr") for how in ("flipped", "honest"))
        (won,) = decibels(f"flipped labels, linear estimate, what they win {words}")
        assert won == round(flipped - honest, 1)


@pytest.mark.parametrize(("true", "cell"), [("10.0", "sigma 0.5"), ("4.38", "sigma 1"), ("1.27", "sigma 3")])
def test_the_canarys_estimates_are_the_kept_ones(true: str, cell: str) -> None:
    known, measured = (float(v) for v in row("docs/canaries.md", true))
    assert abs(kept("canary", cell, "epsilon") - known) < 0.006
    assert abs(kept("canary", cell, "epsilon_measured_variance") - measured) < 0.006


# ------------------------------------------------------------------------------------------------------------ defenses


def test_the_defenses_epsilons_are_what_the_accountant_says() -> None:
    """An epsilon follows from the settings alone, so that it needs no new measurement."""
    measured = json.loads(text_of("simulations/results/defenses/sweep.json"))
    kept_ones = {row["defense"]: row["epsilon"] for row in measured}
    for cell in Sweep.load(ROOT / "simulations/defenses.toml").cells:
        scenario = Scenario.from_tables(cell.tables)
        rounds = dict.fromkeys(range(scenario.protocol.clients), scenario.protocol.rounds)
        found = privacy_statement(scenario.federation, rounds, scenario.privacy.delta).record
        assert kept_ones[cell.defense] == (None if found is None else pytest.approx(found, rel=1e-3)), cell.defense


def test_five_defenses_at_three_seeds_are_as_they_were_measured() -> None:
    kept_rows = [
        row
        for row in csv.DictReader(text_of("simulations/results/defenses/sweep.csv").splitlines())
        if row["metric"] == "psnr"
        and row["mean"]
        and not row["attack"].startswith(("ridge", "defense", "tuned_defense"))
    ]
    for defense in ("noise .1", "DP-SGD .05", "sign", "prune to 1 %", "2 bits"):
        cells = [
            ", ".join(
                f"{max(float(r['mean']) for r in kept_rows if _is(r, defense, seed, kind)):.1f}" for seed in range(3)
            )
            for kind in ("own", "tuned", "tuned, labels given", "a generator, labels given")
        ]
        assert f"| {defense} | {' | '.join(cells)} |" in text_of("docs/defenses.md")


def _is(row: dict[str, Any], defense: str, seed: int, kind: str) -> bool:
    tuned, given = row["attack"].startswith("tuned"), row["attack"].endswith("labels_given")
    pixels = "own" if not tuned else "tuned, labels given" if given else "tuned"
    found = "a generator, labels given" if "gifd" in row["attack"] else pixels
    return (row["defense"], row["seed"], found) == (defense, str(seed), kind)


@pytest.mark.parametrize("name", ["defenses", "defenses_batch16"])
def test_the_defenses_are_as_they_were_measured(name: str) -> None:
    found = Sweep.load(ROOT / f"simulations/{name}.toml")
    measured = json.loads(text_of(f"simulations/results/{name}/sweep.json"))
    lines = summary([SweepRow(**row) for row in measured], {cell.defense: cell.promise for cell in found.cells})
    assert "\n".join(lines) in text_of("docs/defenses.md")
    planned = {(cell.defense, attack) for cell in found.cells for attack in cell.attacks}
    assert {(row["defense"], row["attack"]) for row in measured} == planned, "a row for each of the ready sweep"
    assert all(row["mean"] is not None or row["reason"] for row in measured), "a number or a reason"


def test_two_searches_of_the_same_updates_are_as_they_were_measured() -> None:
    kept_rows = list(csv.DictReader(text_of("simulations/results/defenses/same_updates.csv").splitlines()))
    defenses = dict.fromkeys(r["defense"] for r in kept_rows)
    for defense in defenses:
        own = [r for r in kept_rows if r["defense"] == defense]
        cells = [
            ", ".join(
                f"{statistics.fmean(float(r['psnr']) for r in own if (r['round'], r['search']) == (round, search)):.1f}"
                for search in ("gifd", "pixels")
            )
            for round in ("1", "40")
        ]
        seeds = ", ".join(sorted({r["seed"] for r in own}))
        assert row("docs/explanation/weak-attacks.md", defense) == [*cells, seeds]
    assert len(defenses) == 29


def test_how_often_tuning_chose_worse_is_as_it_was_measured() -> None:
    found = csv.DictReader(text_of("simulations/results/defenses/sweep.csv").splitlines())
    means = {(r["defense"], r["seed"], r["attack"]): float(r["mean"]) for r in found if r["mean"]}
    words = " ".join(text_of("docs/defenses.md").split())
    for generator, start in ((False, "pixels in"), (True, "of `gifd` in")):
        changes = [
            tuned - means[defense, seed, own]
            for (defense, seed, attack), tuned in means.items()
            if attack.startswith("tuned") and ("gifd" in attack) == generator
            for own in ("inverting_gradients" if attack == "tuned" else attack.removeprefix("tuned_"),)
            if (defense, seed, own) in means
        ]
        worse = [c for c in changes if c < 0]
        most = f"{-min(worse):.1f}".removeprefix("0")
        assert f"{start} {len(worse)} of {len(changes)} pairs by up to {most} dB" in words


# ------------------------------------------------------------------------------------------------- Learning To Invert

LTI = "docs/papers/learning-to-invert.md"


def test_learning_to_inverts_errors_are_the_kept_ones() -> None:
    for start, size in (("1,000 images, one a client", 1), ("the same, four one-image clients summed", 4)):
        expected = [error(kept("lti_lenet", f"{chain} B={size}", "mse", "learning_to_invert")) for chain in CHAINS]
        assert list(map(without_paper, row(LTI, start))) == expected
    found = error(kept("lti_lenet_sign_4", "sign B=4", "mse", "ridge"))
    assert without_paper(row(LTI, "four clients summed, `ridge_inversion`")[0]) == found


@pytest.mark.parametrize(("start", "chain"), [("sign", "sign"), ("pruned to 1 %", "prune"), ("noise .1", "gauss")])
def test_what_learns_stands_beside_what_matches(start: str, chain: str) -> None:
    found = {row["attack"]: row["here"] for row in rows_of(f"lti_lenet_{chain}_all_attacks") if row["metric"] == "mse"}
    expected = [error(found[name]) for name in ("learning_to_invert", "ig", "gi_gip")]
    assert list(map(without_paper, row(LTI, start))) == expected


def test_what_auxiliary_images_are_worth_is_what_was_kept() -> None:
    for start, ending, size in (
        ("one image a client (the paper's inverter)", "", 1),
        ("four one-image clients summed", "_4", 4),
    ):
        expected = [error(kept(f"lti_resnet20_{c}{ending}", f"{c} B={size}", "mse")) for c in CHAINS]
        assert list(map(without_paper, row(LTI, start))) == expected
    rows = [r for sheet in ("lti_auxiliary", "lti_auxiliary_beta_1") for r in rows_of(sheet) if r["metric"] == "mse"]
    found = {r["attack"]: error(r["here"]) for r in rows}
    tables = [cells_of(line) for line in text_of(LTI).splitlines() if line.startswith("| error |")]
    sizes = [found[f"{size} images"] for size in (500, 1000, 2500, 5000, 10000)]
    shares = [found[f"beta {beta}"] for beta in ("0", "0.01", "0.1", "0.5", "1")]
    assert [cells[1:] for cells in tables] == [sizes, shares]
    for start, attack in (
        ("these images alone", "alone"),
        ("with as many DCT pseudo-images", "dct"),
        ("with as many images of pixel noise", "pixel"),
    ):
        assert without_paper(row(LTI, start)[0]) == error(kept("lti_ood", "none", "mse", attack))


# ---------------------------------------------------------------------------------------------------------------- text

TEXT = "docs/text.md"


@pytest.mark.parametrize(
    ("attack", "sheet"),
    [
        ("LAMP (cosine, 2,000 steps)", "lamp_table1"),
        ("TAG (2,500 steps)", "lamp_table1_tag"),
        ("DLG (2,500 steps)", "lamp_table1_dlg"),
    ],
)
def test_lamps_figures_are_the_kept_ones(attack: str, sheet: str) -> None:
    found = {row["metric"]: row["here"] for row in rows_of(sheet)}
    for words, ending in (("words alone", ""), ("with special tokens", "_special")):
        if sheet == "lamp_table1_dlg" and ending:
            continue  # the page has words alone of it
        expected = [f"{found[name + ending]:.1f}" for name in ("rouge1", "rouge2", "rougeL")]
        assert row(TEXT, f"{attack}, {words}")[:3] == expected


def test_what_each_part_of_lamp_is_worth_is_what_was_kept() -> None:
    parts = {row["attack"]: row["here"] for row in rows_of("lamp_table4") if row["metric"] == "rouge2"}
    for start, name in (
        ("whole", "lamp_cos"),
        ("without the language model", "no_lm"),
        ("without moves of words", "no_discrete"),
        ("without the embeddings' lengths", "no_length"),
    ):
        assert row(TEXT, start) == [f"{parts[name]:.1f}"]


def test_what_learned_rows_reads_is_what_was_kept() -> None:
    def accuracy(sheet: str, cell: str, attack: str) -> str:
        return f"{kept(sheet, cell, 'token_accuracy', attack):.1f}"

    for start, cell in (("sign", "sign"), ("pruned to 1 %", "prune .99"), ("noise .01", "noise .01")):
        assert row(TEXT, start)[0] == accuracy("lti_text_defended", cell, "learned_rows")
    assert row(TEXT, "undefended")[0] == accuracy("lti_text", "none", "learned_rows")
    for start, cell, sheet in (
        ("pruned to 1 %", "prune .99", "lti_text_prune_tag"),
        ("noise .01", "noise .01", "lti_text_noise_tag"),
    ):
        assert row(TEXT, start)[3] == accuracy(sheet, f"{cell}, frequencies and TAG", "tag")
    assert f"reads {accuracy('lti_text', 'none', 'learning_to_invert')} % of the undefended words" in text_of(TEXT)


def test_exact_attacks_are_as_they_were_measured() -> None:
    rows = [
        row
        for name in ("dager", "dager_batches_of_4")
        for row in rows_of(name)
        if row["metric"] == "exact_sentence" and row["cell"].startswith("cola")
    ]
    assert {row["here"] for row in rows} == {100}
    counts = {row["cell"].removeprefix("cola, MiniLM, "): row["n"] for row in rows}
    for start, cell in (
        *((f"`dager`, batches of {size}", f"B={size}") for size in (1, 2, 4)),
        ("`exact`, one sentence, embeddings shared", "B=1, embeddings shared"),
    ):
        assert row(TEXT, start) == [f"all of {counts[cell]}"]


def test_what_matching_sentences_costs_is_what_was_kept() -> None:
    kept_ones = json.loads(text_of("simulations/benchmarks/results/text.json"))["figures"]
    for start, ours, ratio in zip(
        (
            "a candidate of LAMP's",
            "a cosine step, 16 sentences together, a sentence",
            "a step of TAG's, 16 sentences together, a sentence",
        ),
        kept_ones[::2],
        kept_ones[1::2],
        strict=True,
    ):
        assert row(TEXT, start) == [f"{ours['value']:.1f} ms", f"{ratio['value']:.1f} times"]


# ---------------------------------------------------------------------------------------------------------------- speed

SPEED = "docs/performance.md"


def test_the_engines_speeds_are_the_kept_ones() -> None:
    rows = json.loads(text_of("simulations/benchmarks/results/engine.json"))["rows"]
    found = {(row["network"], row["k"], row["compiled"]): row for row in rows}
    colour, digits = "random 3x32x32", "mnist5k 1x28x28"
    for start, network, k, compiled in (
        *(("LeNet, 3 x 32 x 32", f"lenet, {colour}", k, False) for k in (1, 8, 64)),
        ("LeNet, 1 x 28 x 28", f"lenet, {digits}", 64, False),
        *(("LeNet, 3 x 32 x 32, compiled", f"lenet, {colour}", k, True) for k in (1, 8, 64)),
        ("LeNet, five local steps", f"lenet, 5 local steps, {colour}", 32, False),
        *(("MLP of 5.1 M", f"mlp of 5.1 M, {colour}", k, False) for k in (1, 8)),
        ("ConvNet of width 64", f"convnet of width 64, {colour}", 4, False),
        ("ResNet20-4", f"resnet20-4, {colour}", 4, False),
    ):
        assert row(SPEED, start, str(k)) == [f"{found[network, k, compiled]['ratio']:.1f}"]
    wide = [found[f"{name}, {colour}", 4, False]["forwards"] for name in ("convnet of width 64", "resnet20-4")]
    words = " ".join(text_of(SPEED).split())
    assert f"costs {wide[0]:.1f} forward passes of the ConvNet and {wide[1]:.1f} of ResNet20-4" in words


def test_what_interception_costs_is_what_was_kept() -> None:
    found = benchmark("intercept")
    assert row(SPEED, "intercepting a round of 4 LeNet clients") == [
        f"{found['4 clients, lenet, one step of 1 image: recording', 'ms a round']:.1f} ms"
    ]
    large = "10 clients, 11.1 M parameters, one"
    cpu = [v for (name, unit), v in found.items() if name.startswith(large) and unit == "% of CPU seconds"]
    assert row(SPEED, "intercepting 10 clients with 11 M parameters, of a round with ten local steps of 30 images") == [
        f"{cpu[0]:.1f} %"
    ]
    assert row(SPEED, "the same, of a round with a single step (of 64 images; of 1 image)") == [
        f"{cpu[1]:.1f}; {cpu[2]:.1f} %"
    ]


# the first words of a row of the table, and the kept figures in it
GPU_ROWS = {
    "Inverting Gradients, LeNet": ["LeNet at .*: engine / published loop"],
    "ConvNet 64": ["ConvNet .* 8 forwards an iteration", "ConvNet .*: engine / published loop"],
    "ResNet-18 .*: the same": ["ResNet-18 .* 8 forwards an iteration", "ResNet-18 .*: engine / published loop"],
    "ResNet-18 .*, one image": ["ResNet-18 .*, one image: .* iterations"],
    "mean PSNR": ["LeNet: PSNR on the GPU against the CPU"],
    "TF32": [".*: TF32 / IEEE", "LeNet: PSNR with TF32 - with IEEE", ".*: without / with deterministic algorithms"],
    "Learning To Invert": ["Learning To Invert, .* epochs"],
    "moving a wave": ["ResNet-18, .*: transfers of a wave of 10 s"],
    "LAMP": ["LAMP on BERT-base, .*"],
    "a step": [f"LeNet .* K = 1: a step, {how}" for how in ("eager", "recorded", "compiled", "recorded, CUDA graph")],
}


def test_what_attacks_cost_on_a_gpu_is_what_was_kept() -> None:
    """A page's number is the kept one at the page's own decimals; what was not measured, and nothing else, is open there."""
    kept_ones, page = json.loads(text_of("simulations/benchmarks/results/h100/gpu.json")), text_of("docs/gpu.md")
    number, shown = r"(\d*\.?\d+|open|equally)([^\d.,;]*)", []
    table = [cells_of(line) for line in page.splitlines() if line.startswith("|")]
    for start, names in GPU_ROWS.items():
        ((_, target, cell, _),) = (cells for cells in table if re.match(start, cells[0]))
        found = [[f for f in kept_ones["figures"] if re.fullmatch(name, f["name"])] for name in names]
        figures_of_page = re.findall(number, cell.rpartition(": ")[2])
        for (digits, words), figures in zip(figures_of_page, found, strict=True):
            shown, digits = [*shown, *figures], digits.replace("equally", "1.0")
            written = [f"{abs(f['value']):.{len(digits.partition('.')[2])}f}".removeprefix("0") for f in figures]
            assert written == [digits] * (digits != "open"), f"{start}: {digits}"
            assert ("less" in words) == any(f["value"] < 0 for f in figures), f"{start}: {digits}{words}"
        targets = re.findall(r"[\d.]+", " ".join(f["target"] for figures in found for f in figures))
        assert list(map(float, re.findall(r"[\d.]+", target))) == list(map(float, targets)), start
    assert not [f["name"] for f in kept_ones["figures"] if f["target"] and f not in shown], "a target that is not shown"
    (made,) = re.findall(r"torch ([\d.]+), driver ([\d.]+)", page)
    assert all(kept_ones["settings"][key].startswith(v) for key, v in zip(("torch", "driver"), made, strict=True))


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


# --------------------------------------------------------------------------------------------------------------- models

MODELS = "docs/guides/models.md"


def test_what_comes_back_of_each_model_is_what_was_kept() -> None:
    mlp = "a fully connected network of 2 x 200, CIFAR-10"
    for start, sheet, cell in (
        ((mlp, "8 images"), "spear", "relu B=8"),
        (("the same", "16 images"), "spear_plus_plus", "B=16"),
    ):
        (n,) = {found["n"] for found in rows_of(sheet) if (found["cell"], found["attack"]) == (cell, sheet)}
        assert kept(sheet, cell, "exact", sheet) == 1 and row(MODELS, *start)[0] == f"all of {n} images to 60 dB"
    lenet = kept("geiping_table1_100_images", "lenet untrained, 100 images", "psnr", "inverting_gradients")
    assert row(MODELS, "an untrained LeNet, CIFAR-10")[1] == f"{lenet:.1f} dB, mean of 100"
    resnet, guess = (kept("gifd_resnet20", "resnet20 trained", "psnr", a) for a in ("gifd", "class_mean_image"))
    assert row(MODELS, "a trained ResNet-20, CIFAR-10")[1:3] == [
        f"nothing by 600 iterations: {resnet:.1f} dB, mean of 8", f"{guess:.1f} dB, from its label",
    ]  # fmt: skip
    cells, rows = (kept("tableak", "Adult B=32", metric, "tableak") for metric in ("cells", "exact_row"))
    assert row(MODELS, "an MLP, Adult")[1] == f"{cells:.1f} % of the cells, {rows:.1f} % of the rows"
    large, whole, sure = (
        kept("tableak_128", "Adult B=128", metric, "tableak") for metric in ("cells", "exact_row", "sure_numbers")
    )
    assert row(MODELS, "the same", "128 rows")[0] == (
        f"{large:.1f} % of the cells, {whole:.1f} % of the rows; of the quarter of which the attack is surest {sure:.1f} %"
    )
    words = kept("lti_text", "none", "token_accuracy", "learned_rows")
    assert row(MODELS, "an untrained three-layer decoder, WikiText-2")[1].startswith(f"{words:.1f} %")
    one, first = (kept(f"adapters_rank_16_{r}", f"rank 16, B=1, {r}", "exact_sentence") for r in ("later", "first"))
    assert one == 100 and row(TEXT, "16", "1", "later") == ["40 of 40"]
    wide = kept("adapters_rank_64_later", "rank 64, B=1, later", "exact_sentence")
    assert wide == 100 and row(TEXT, "64", "1", "later") == ["20 of 20"]
    four, rouge = (
        kept("adapters_rank_16_batches_of_4", "rank 16, B=4, later", m) for m in ("exact_sentence", "rouge1")
    )
    assert four == 0 and row(TEXT, "16", "4", "later") == [f"0 of 8, ROUGE-1 {rouge:.0f} %"]
    assert row(TEXT, "16", "1", "first") == [f"{first * 40 / 100:.0f} of 40"]
    assert row(MODELS, "LoRA of rank 16 beside MiniLM-L6, CoLA")[1].startswith("all of 40 exactly")
    zoo = benchmark("zoo")
    tried, attacked, declined = (zoo[name, ""] for name in ("networks tried", "attacked", "declined with a sentence"))
    words = " ".join(text_of(MODELS).split())
    assert f"[{tried} networks]" in words and f"{attacked} are attacked, and {declined} are declined" in words
    readme = " ".join(text_of("README.md").split())
    assert f"| {tried} other networks | {attacked} attacked, {declined} declined" in readme
    generated = kept("gifd", "none other", "psnr", "gifd")
    assert row(MODELS, "the same, 4,500 images of other classes known")[1] == f"{generated:.1f} dB, mean of 16"
    assert f"| {cells:.0f} % of cells;" in readme and f"| {lenet:.0f} dB; a guess" in readme
    assert f"with public images {generated:.0f} |" in readme
