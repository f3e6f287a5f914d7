"""README stays true: its tables name what the code has, its example runs, its commands exist."""

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedgauge.attacks.grading.image_metrics import BACKBONES, image_metrics, lpips_metric
from fedgauge.attacks.malicious.server_attack import SERVER_ATTACK
from fedgauge.attacks.plan import ATTACK
from fedgauge.client.components import ComponentKind
from fedgauge.client.federation import DATASET, TRANSFORM
from fedgauge.client.models.build import MODEL
from fedgauge.client.models.losses import LOSS
from fedgauge.server.store.scenario import Scenario
from fedgauge.simulations.cli.main import _parser
from fedgauge.simulations.experiments.sweep import Sweep, SweepRow, summary

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def rows_of(sheet: str) -> list[dict[str, Any]]:
    """The kept figures of a paper's sheet."""
    rows: list[dict[str, Any]] = json.loads((ROOT / f"simulations/papers/results/{sheet}.json").read_text())["rows"]
    return rows


def first_cells() -> list[str]:
    """What stands in code marks in the first column of any table."""
    cells = [re.split(r"(?<!\\)\|", line)[1] for line in README.splitlines() if line.startswith("|")]
    return re.findall(r"`([^`]+)`", " ".join(cells))


@pytest.mark.parametrize("kind", [ATTACK, DATASET, LOSS, MODEL, TRANSFORM], ids=lambda k: k.noun)
def test_the_tables_name_every_component_and_no_other(kind: ComponentKind) -> None:
    module = tuple(f"{p}." if p in ("attacks", "defenses") else f"{p}:" for p in kind.packages)
    server_attacks = SERVER_ATTACK.names()  # in a table of their own
    assert sorted(c for c in first_cells() if c.startswith(module) and c not in server_attacks) == kind.names()


def test_every_malice_is_in_the_table_and_no_other() -> None:
    decoders = set(ATTACK.names())
    named = {c for c in first_cells() if c.startswith("fedgauge.attacks.malicious.")}
    assert sorted(named - decoders) == SERVER_ATTACK.names()


def test_the_threat_models_figures_are_the_kept_ones() -> None:
    def kept(sheet: str, cell: str, metric: str) -> float:
        rows = rows_of(sheet)
        (value,) = {row["here"] for row in rows if (row["cell"], row["metric"]) == (cell, metric)}
        return float(value)

    for cell in ("trap weights", "honest weights"):
        assert f"{100 * kept('trap_weights', cell, 'verbatim'):.1f} %" in README
    assert f"{100 * kept('imprint', 'N=64, K=256', 'verbatim'):.1f} % verbatim" in README
    assert kept("guard", "all networks", "false_alarms") == 0
    rows = rows_of("guard")
    seen = [row for row in rows if row["metric"] == "detected"]
    assert {row["here"] for row in seen} == {1}
    assert {row["attack"] for row in seen} == {name.rpartition(":")[2] for name in SERVER_ATTACK.names()}
    patient = rows_of("guard_patient")
    assert {row["here"] for row in patient} == {0, 1}
    missed = {(row["attack"], row["cell"]) for row in patient if row["here"] == 0}
    assert {cell for attack, cell in missed if attack == "optimised_features"} == {"mlp, MNIST"}
    assert {attack for attack, _ in missed} == {"label_flipping", "optimised_features"}
    assert {row["attack"] for row in patient} == {row["attack"] for row in seen}
    for cell in ("lenet, honest", "lenet, optimised", "lenet, batches of 8, distinct labels"):
        assert f"{kept('optimised_parameters', cell, 'psnr'):.1f}" in README
    for noise in ("no noise", "noise .01"):
        flipped, honest = (kept("label_flipping_noise", f"{how}, {noise}", "psnr") for how in ("flipped", "honest"))
        assert f"{flipped - honest:.1f} dB" in README
    for cell, told, measured in (
        ("sigma 0.5", "9.92", "11.62"),
        ("sigma 1", "4.40", "5.64"),
        ("sigma 3", "1.25", "2.21"),
    ):
        assert told in README and abs(kept("canary", cell, "epsilon") - float(told)) < 0.006
        assert measured in README and abs(kept("canary", cell, "epsilon_measured_variance") - float(measured)) < 0.006
    for sheet, cells in {
        "fishing": ("class", "class, alone", "feature", "feature, alone"),
        "inconsistency": ("inconsistent", "alone", "honest"),
    }.items():
        for cell in cells:
            assert f"{kept(sheet, cell, 'isolated_psnr'):.1f}" in README
    assert all(
        f"{kept('label_flipping', cell, 'psnr'):.1f} dB" in README
        or f"against {kept('label_flipping', cell, 'psnr'):.1f}" in README
        for cell in ("honest", "flipped")
    )
    four = [kept_by("learning_to_invert", f"{chain} B=4") for chain in ("none", "sign", "prune", "gauss")]
    assert "; ".join(f"{value:.4f}".removeprefix("0") for value in four) in README


def test_what_learns_is_told_beside_what_matches() -> None:
    told = []
    for chain in ("sign", "prune", "gauss"):
        rows = rows_of(f"lti_lenet_{chain}_all_attacks")
        kept = {row["attack"]: row["here"] for row in rows if row["metric"] == "mse"}
        each = (kept[name] for name in ("learning_to_invert", "ig", "gi_gip"))
        told.append(", ".join(f"{value:.4f}".removeprefix("0") for value in each))
    (line,) = (line for line in README.splitlines() if line.startswith("| 64 of these images under sign"))
    assert line.endswith(f"| {'; '.join(told)} |")


def test_what_auxiliary_images_are_worth_is_told() -> None:
    def told(sheets: Sequence[str], chosen: Sequence[str]) -> str:
        rows = [row for sheet in sheets for row in rows_of(sheet) if row["metric"] == "mse"]
        kept = {row["cell" if row["attack"] == "ridge" else "attack"]: row["here"] for row in rows}
        return "; ".join(f"{kept[name]:.4f}".removeprefix("0") for name in chosen)

    chains = ("none", "sign", "prune", "gauss")
    resnet = told([f"lti_resnet20_{chain}" for chain in chains], [f"{chain} B=1" for chain in chains])
    four = told([f"lti_resnet20_{chain}_4" for chain in chains], [f"{chain} B=4" for chain in chains])
    both = ("lti_auxiliary", "lti_auxiliary_beta_1")
    sizes = told(both, [f"{size} images" for size in (500, 1000, 2500, 5000, 10000)])
    shares = told(both, [f"beta {beta}" for beta in ("0", "0.01", "0.1", "0.5", "1")])
    for figures in (resnet, four, sizes, shares):
        assert f" | {figures} |\n" in README


def test_lamps_figures_are_the_kept_ones() -> None:
    def told(sheet: str, ending: str) -> str:
        rows = rows_of(sheet)
        kept = {row["metric"]: row["here"] for row in rows}
        return ", ".join(f"{kept[name + ending]:.1f}" for name in ("rouge1", "rouge2", "rougeL"))

    (line,) = (line for line in README.splitlines() if line.startswith("| LAMP (cosine"))
    both = [told(sheet, ending) for sheet in ("lamp_table1", "lamp_table1_tag") for ending in ("", "_special")]
    figures = [*both, told("lamp_table1_dlg", "")]
    assert line.endswith(f"| {'; '.join(figures)} % |")
    rows = rows_of("lamp_table4")
    parts = {row["attack"]: row["here"] for row in rows if row["metric"] == "rouge2"}
    (line,) = (line for line in README.splitlines() if line.startswith("| ROUGE-2 of LAMP"))
    figures = [f"{parts[name]:.1f}" for name in ("lamp_cos", "no_lm", "no_discrete", "no_length")]
    assert line.endswith(f"| {'; '.join(figures)} % |")


def test_what_matching_sentences_costs_is_told() -> None:
    figures = json.loads((ROOT / "simulations/benchmarks/results/text.json").read_text())["figures"]
    pairs = zip(figures[::2], figures[1::2], strict=True)
    (line,) = (line for line in README.splitlines() if line.startswith("| matching sentences on MiniLM-L6"))
    told = "; ".join(f"{ours['value']:.1f} ms, {ratio['value']:.1f} times" for ours, ratio in pairs)
    assert line.endswith(f"| {told} |")


def test_what_learned_rows_reads_under_defenses_is_told() -> None:
    def kept(sheet: str) -> dict[str, float]:
        rows = rows_of(sheet)
        return {row["cell"]: row["here"] for row in rows if row["metric"] == "token_accuracy"}

    told = {**kept("lti_text_defended"), **kept("lti_text_prune_tag"), **kept("lti_text_noise_tag")}
    cells = (
        "sign",
        "prune .99",
        "noise .01",
        *(f"{chain}, frequencies and TAG" for chain in ("prune .99", "noise .01")),
    )
    figures = [f"{told[cell]:.1f}" for cell in cells]
    (line,) = (line for line in README.splitlines() if line.startswith("| these words under sign"))
    assert line.endswith(f"| {'; '.join(figures)} % |")


def test_exact_attacks_are_told_as_they_were_measured() -> None:
    rows = [
        row
        for name in ("dager", "dager_batches_of_4")
        for row in rows_of(name)
        if row["metric"] == "exact_sentence" and row["cell"].startswith("cola")
    ]
    assert {row["here"] for row in rows} == {100}
    (line,) = (line for line in README.splitlines() if line.startswith("| DAGER on MiniLM"))
    told = {row["cell"].removeprefix("cola, MiniLM, "): row["n"] for row in rows}
    n = [told[f"B={size}"] for size in (1, 2, 4)]
    assert line.endswith(f"| all of {n[0]}, {n[1]}, {n[2]}; all of {told['B=1, embeddings shared']} |")


def kept_by(attack: str, cell: str) -> float:
    rows = rows_of("lti_lenet")
    (value,) = [row["here"] for row in rows if (row["cell"], row["attack"], row["metric"]) == (cell, attack, "mse")]
    return float(value)


def test_the_metrics_are_named() -> None:
    import torch

    names = {m.name for m in image_metrics((3, 32, 32), torch.zeros(2, 3, 32, 32))} | {"label_accuracy"}
    names |= {f"lpips_{net}" for net in BACKBONES}
    assert all(found is None or found.name in names for found in map(lpips_metric, BACKBONES))
    assert names <= set(first_cells())


def test_every_command_is_in_the_table_and_exists() -> None:
    commands = set(_parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr,arg-type]  # argparse has no public list
    named = {c.split()[1] for c in first_cells() if c.startswith("fedgauge ")}
    assert named == commands


def test_the_example_runs_and_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})  # the README's own text
    (value,) = (float(v) for v in re.findall(r"[\d.]+", capsys.readouterr().out))
    assert value > 100


def test_the_malicious_example_is_a_scenario_that_holds_together() -> None:
    (example,) = re.findall(r"```toml\n(server = .*?)```", README, re.DOTALL)
    tables = {"rounds": 2, "clients": 2, "model": {"use": "mlp"}, "data": {"use": "mnist5k"}}
    chosen = Scenario.from_tables({**tables, "chain": [{"use": "local_sgd", "rate": 0.1}], **tomllib.loads(example)})
    assert (
        chosen.server.startswith("malicious server: class_fishing") and chosen.plan.attacks[0].budget.iterations == 400
    )


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_engines_speeds_are_the_kept_ones() -> None:
    rows = json.loads((ROOT / "simulations/benchmarks/results/engine.json").read_text())["rows"]
    colour, digits = "random 3x32x32", "mnist5k 1x28x28"

    def told(key: str, *cells: tuple[str, int, bool]) -> list[str]:
        kept = {(row["network"], row["k"], row["compiled"]): row[key] for row in rows}
        return [f"{kept[network, k, compiled]:.1f}" for network, k, compiled in cells]

    def line(start: str) -> list[str]:
        (found,) = (line for line in README.splitlines() if line.startswith(start))
        return re.findall(r"\d+\.\d", found.split("|")[2])

    lenet, mlp, five = f"lenet, {colour}", f"mlp of 5.1 M, {colour}", f"lenet, 5 local steps, {colour}"
    wide = [(f"{name}, {colour}", 4, False) for name in ("convnet of width 64", "resnet20-4")]
    eager = [(lenet, 1, False), (lenet, 8, False), (lenet, 64, False), (f"lenet, {digits}", 64, False)]
    assert line("| engine against") == told("ratio", *eager)
    assert line("| the same, compiled") == told("ratio", *((lenet, k, True) for k in (1, 8, 64)))
    assert line("| the same, eager") == told("ratio", (mlp, 1, False), (mlp, 8, False), (five, 32, False))
    assert line("| the same: ConvNet") == told("ratio", *wide) + told("forwards", *wide)


def test_the_defenses_are_told_as_they_were_measured() -> None:
    found = Sweep.load(ROOT / "simulations/defenses.toml")
    kept = json.loads((ROOT / "simulations/results/defenses/sweep.json").read_text())
    lines = summary([SweepRow(**row) for row in kept], {cell.defense: cell.promise for cell in found.cells})
    assert "\n".join(lines) in README
    assert {row["defense"] for row in kept} == {cell.defense for cell in found.cells}, (
        "a row for each of the ready sweep"
    )
    assert all(row["mean"] is not None or row["reason"] for row in kept), "a number or a reason"


def test_every_dependency_of_the_card_is_declared_and_every_scenario_is_readable() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = ["flwr", "torch", "torchvision", "transformers", "numpy", "lpips", "rouge-score", "ray", "pytest"]
    declared = " ".join([*project["dependencies"], *sum(project["optional-dependencies"].values(), [])])
    for name in wanted:
        assert re.search(rf"(^| ){re.escape(name)}(\[|>)", declared), name
    for path in (ROOT / "simulations").glob("*.toml"):
        tomllib.loads(path.read_text())
