"""Sheets: what a published table measured, as a file in papers/.

Its cells say data, network, chain and attacks, what the paper found, and with how many images and iterations.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from fedgauge.attacks import plan
from fedgauge.attacks.base import Attack, Budget
from fedgauge.attacks.grading.text_metrics import ROUGE, SPECIAL
from fedgauge.attacks.learned.auxiliary import Auxiliary
from fedgauge.attacks.malicious.server_attack import SERVER_ATTACK, ServerAttack
from fedgauge.attacks.matching.feedback_blending import FeedbackBlending
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.client.components import ComponentKind, SpecError, Table, build, call, check_arguments, coerce, resolve
from fedgauge.client.data.corpora import Longer
from fedgauge.client.federation import TRANSFORM
from fedgauge.client.models.tokenizer import Task
from fedgauge.client.transforms import Link, per_example

# as a scenario names them, and attacks with one part exchanged
ATTACK = ComponentKind("an attack", (*plan.ATTACK.groups, "fedgauge.ablations"), Attack)
PAPERS = Path(__file__).parents[1] / "papers"

OFFERED = ("model", "shape", "classes", "batch_size", "normalise")  # to the links that ask for them
IMAGE_METRICS = (
    *("psnr", "psnr_augmented", "best_psnr", "isolated_psnr", "mse", "success", "exact", "verbatim"),
    *("iterations", "success_gain", "iterations_saved"),
)
TEXT_METRICS = (*ROUGE, *(kind + SPECIAL for kind in ROUGE), "token_accuracy", "exact_sentence")
METRICS = IMAGE_METRICS + TEXT_METRICS


@dataclass(frozen=True)
class Images:
    """Which images, or sentences, are attacked, and how many a client holds.

    Args:
        use: the dataset.
        part: of it.
        first: the images before it are left alone (for tuning).
        batch_size: images an update.
        distinct: no class twice in a batch: for each batch, the next images that fit.
        classes: of these alone; default: of all.
        mean, std: what the network was trained with, where it is not the dataset's.
        tokenizer, length, vocabulary, task, longer: of sentences, as fedgauge.client.data.corpora's data sets take them; default: theirs.
    """

    use: str
    part: Literal["train", "test"] = "test"
    first: int = 0
    batch_size: int = 1
    distinct: bool = False
    classes: tuple[int, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    tokenizer: str | None = None
    length: int | None = None
    vocabulary: int | None = None
    task: Task | None = None
    longer: Longer | None = None

    @property
    def table(self) -> Table:
        """The dataset's component table."""
        told = {k: getattr(self, k) for k in ("tokenizer", "length", "vocabulary", "task", "longer")}
        return {"use": self.use, **{k: v for k, v in told.items() if v is not None}}


@dataclass(frozen=True)
class Pretraining:
    """How a network was trained before it is attacked: Adam, from the seed's initial weights, on training images.

    Args:
        steps, batch_size, rate: of Adam.
        defended: the cell's defenses are on: of updates on each example's gradient, of examples on the batch.
        first: training images before it are left alone.
    """

    steps: int
    batch_size: int = 32
    rate: float = 1e-3
    defended: bool = False
    first: int = 1000


@dataclass(frozen=True)
class AttackSpec:
    """One attack on a cell.

    Args:
        name: as it stands in the table.
        table: the attack's component table.
        budget: here.
        paper: what the paper reports: a figure for each metric, its spread, its n, iterations and restarts.
        labels: given, in the order in which the client meets them, or restored.
        lengths: of sentences: given, in the order of the labels, or hidden.
        defense: known (the attacker inverts the whole chain) or unknown (it assumes bare local training).
        metrics: what is reported.
        against: the cell's attack that gains are relative to.
        blend: arguments of feedback blending round the attack, over the sequence of each client's images.
        auxiliary: which of the cell's public images the attacker has (arguments of fedgauge.attacks.learned.auxiliary's Auxiliary).
    """

    name: str
    table: Table
    budget: Budget
    paper: Mapping[str, float]
    labels: Literal["given", "restored"] = "given"
    lengths: Literal["given", "hidden"] = "hidden"
    defense: Literal["known", "unknown"] = "known"
    metrics: tuple[str, ...] = ("psnr",)
    against: str = ""
    blend: Table | None = None
    auxiliary: Table | None = None

    def images(self) -> Auxiliary:
        """Which of the public images the attacker has; SpecError says what is wrong with its table."""
        where = f"attack {self.name}: auxiliary"
        chosen: Auxiliary = call(Auxiliary, check_arguments(Auxiliary, self.auxiliary or {}, where), where)
        return chosen

    def build(self) -> Attack | FeedbackBlending:
        """The attack itself; SpecError says what is wrong with its table."""
        where = f"attack {self.name}"
        attack = build(self.table, where, ATTACK)
        assert isinstance(attack, Attack)
        if self.blend is None:
            return attack
        if not isinstance(attack, GradientMatching):
            raise SpecError(f"{where}: feedback blending needs an attack by gradient matching, not {self.table['use']}")
        arguments = check_arguments(FeedbackBlending, self.blend, f"{where}: blend", {"attack": attack})
        blending: FeedbackBlending = call(FeedbackBlending, arguments, f"{where}: blend")
        return blending


@dataclass(frozen=True)
class Setting:
    """One network under one chain, met by some attacks.

    Args:
        n: updates that are attacked.
        clients: who send them in turns; for attacks that remember a client's earlier images.
        wave: updates that are attacked at once, where memory allows no more.
        weights: a checkpoint in the local data folder.
        heavy: only where --cells asks for it: hours on a few cores.
        auxiliary: training images, the last ones, that are the attacker's.
        malice: what a dishonest server does to the weights that it sends (a component table); None: an honest one.
        rounds: that often each client is asked, on the same examples; the malice sees its answers, the last one is attacked.
        members: clients with batch_size images each, whose updates the server sees only as their mean; the malice is on all
            but the first of them.
        alone: attacked is, of each batch, the one example that the malice isolates (which has the largest update), by itself
            and at honest weights: what isolating it is compared with.
        faintest: attacked is, of four times as many updates, the quarter that is smallest at honest weights.
    """

    name: str
    n: int
    wave: int
    images: Images
    model: Table
    chain: tuple[Table, ...]
    trials: tuple[AttackSpec, ...]
    weights: str = ""
    train: Pretraining | None = None
    heavy: bool = False
    clients: int = 1
    auxiliary: int = 200
    server_attack: Table | None = None
    rounds: int = 1
    members: int = 1
    alone: bool = False
    faintest: bool = False

    def __post_init__(self) -> None:
        for name in ("auxiliary", "rounds", "members"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def build_server_attack(self) -> ServerAttack | None:
        """The malice itself; SpecError says what is wrong with its table."""
        if self.server_attack is None:
            return None
        found: ServerAttack = build(self.server_attack, f"cell {self.name}: malice", SERVER_ATTACK)
        return found


@dataclass(frozen=True)
class WorldSpec:
    """A sheet that needs no images.

    Args:
        name: of its function in fedgauge.simulations.experiments.gaussian_world, vigilance or canaries.
        n, iterations: inputs, and evaluations of the gradient for each; or what the function says of them.
        only: a pattern that the cells' names match.
    """

    name: Literal["gaussian_world", "bayes_fig4", "guard_world", "patient_world", "canary_world"]
    n: int
    iterations: int
    only: str = "*"


@dataclass(frozen=True)
class PaperTable:
    """A published table: cells that are attacked, or a world."""

    name: str
    title: str
    note: str
    seed: int
    cells: tuple[Setting, ...] = ()
    world: WorldSpec | None = None


def names() -> list[str]:
    """Every table that can be reproduced."""
    return sorted(path.stem for path in PAPERS.glob("*/*.toml"))


def load(name: str) -> PaperTable:
    """A sheet by its name; SpecError when there is none, or a mistake in it."""
    if name not in names():
        raise SpecError(f"there is nothing called {name!r} to reproduce; there are {', '.join(names())}")
    path = next(PAPERS.glob(f"*/{name}.toml"))
    try:
        return parse(name, tomllib.loads(path.read_text()))
    except SpecError as error:
        raise SpecError(f"{path.name}: {error}") from error


def parse(name: str, tables: Mapping[str, Any]) -> PaperTable:
    """A sheet from parsed TOML; where a cell says nothing of n, wave, data, model, chain ... it has the sheet's."""
    shared = {"n", "clients", "wave", "data", "model", "chain", "weights", "train", "auxiliary"}
    shared |= {"server_attack", "rounds", "members", "alone", "faintest"}
    _refuse(tables, {"title", "note", "seed", "cell", "world"} | shared, "the sheet")
    head = {key: coerce(tables.get(key, ""), str, key) for key in ("title", "note")}
    seed = coerce(tables.get("seed", 0), int, "seed")
    cells = []
    for i, table in enumerate(coerce(tables.get("cell", []), list, "cell"), 1):
        _refuse(table, {"name", "attack", "heavy"} | shared, f"[[cell]] #{i}")
        cells.append(_cell({k: v for k, v in tables.items() if k in shared} | table, f"[[cell]] #{i}"))
    world = _options(WorldSpec, tables["world"], "[world]") if "world" in tables else None
    if (world is None) == (not cells):
        raise SpecError("a sheet has either [[cell]]s or a [world]")
    return PaperTable(name, **head, seed=seed, cells=tuple(cells), world=world)


def _refuse(table: Mapping[str, Any], allowed: set[str], where: str) -> None:
    if unknown := sorted(table.keys() - allowed):
        raise SpecError(f"{where} has no key {unknown[0]!r} (it has: {', '.join(sorted(allowed))})")


def _cell(table: Mapping[str, Any], where: str) -> Setting:
    name = coerce(table.get("name"), str, f"{where}: name")
    trials = [_trial(t, f"{where} {name}, attack #{j}") for j, t in enumerate(table.get("attack", []), 1)]
    if not trials:
        raise SpecError(f"{where} {name}: no [[cell.attack]]")
    for trial in trials:
        if trial.against and trial.against not in {t.name for t in trials}:
            raise SpecError(f"{where} {name}: against = {trial.against!r} is none of its attacks")
    chain = tuple(coerce(table.get("chain", []), list, f"{where}: chain"))
    for j, link in enumerate(chain, 1):
        _check_link(link, f"{where}, chain #{j}")
    training = table.get("train")
    made = dict(
        name=name,
        n=coerce(table.get("n"), int, f"{where}: n"),
        wave=coerce(table.get("wave", 64), int, f"{where}: wave"),
        images=_options(Images, table.get("data"), f"{where}: data"),
        model=coerce(table.get("model"), dict, f"{where}: model"),
        chain=chain,
        trials=tuple(trials),
        weights=coerce(table.get("weights", ""), str, f"{where}: weights"),
        train=None if training is None else _options(Pretraining, training, f"{where}: train"),
        clients=coerce(table.get("clients", 1), int, f"{where}: clients"),
        heavy=coerce(table.get("heavy", False), bool, f"{where}: heavy"),
        server_attack=coerce(table.get("server_attack"), dict | None, f"{where}: malice"),
        **{key: coerce(table.get(key, 1), int, f"{where}: {key}") for key in ("rounds", "members")},
        **{key: coerce(table.get(key, False), bool, f"{where}: {key}") for key in ("alone", "faintest")},
        auxiliary=coerce(table.get("auxiliary", 200), int, f"{where}: auxiliary"),
    )
    cell: Setting = call(Setting, made, where)
    cell.build_server_attack()
    return cell


def _options(kind: Any, table: Any, where: str) -> Any:
    return call(kind, check_arguments(kind, coerce(table, dict, where), where), where)


def _trial(table: Mapping[str, Any], where: str) -> AttackSpec:
    own = {f.name for f in fields(AttackSpec)} - {"table", "budget"}
    spent = {f.name for f in fields(Budget)}
    arguments = {k: v for k, v in table.items() if k in own}
    paper = {k: coerce(v, float, f"{where}: paper {k}") for k, v in arguments.pop("paper", {}).items()}
    blend = arguments.pop("blend", None)
    chosen = arguments.pop("auxiliary", None)
    made = {
        "table": {k: v for k, v in table.items() if k not in own | spent},
        "budget": _options(Budget, {k: v for k, v in table.items() if k in spent}, where),
        "paper": paper,
    }
    checked = check_arguments(AttackSpec, arguments, where, made)
    checked["blend"] = None if blend is None else coerce(blend, dict, f"{where}: blend")
    checked["auxiliary"] = None if chosen is None else coerce(chosen, dict, f"{where}: auxiliary")
    trial: AttackSpec = call(AttackSpec, checked, where)
    if unknown := [m for m in trial.metrics if m not in METRICS]:
        raise SpecError(f"{where}: metrics are of {', '.join(METRICS)}, got {unknown[0]!r}")
    try:
        trial.build()
        trial.images()
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from error
    return trial


def restrict(
    paper_table: PaperTable, n: int | None, budget: int | None, cells: str | None, attacks: str | None = None
) -> PaperTable:
    """A sheet with another n, other iterations, or only cells and attacks whose names match (a part, or with * and ?).

    Without a pattern: all cells but the heavy ones, and all attacks. What a chosen attack is measured against comes along.
    """
    for option, value in (("--n", n), ("--budget", budget)):
        if value is not None and value < 1:
            raise SpecError(f"{option} must be at least 1, got {value}")
    if paper_table.world is not None:
        if attacks is not None:
            raise SpecError(f"--attacks: {paper_table.name} compares no attacks; choose with --cells")
        world = replace(
            paper_table.world,
            n=n or paper_table.world.n,
            iterations=budget or paper_table.world.iterations,
            only=cells or "*",
        )
        return replace(paper_table, world=world)
    chosen = [c for c in paper_table.cells if (not c.heavy if cells is None else matches(c.name, cells))]
    if not chosen:
        known = ", ".join(c.name for c in paper_table.cells)
        if cells is None:
            raise SpecError(
                f"every cell of {paper_table.name} takes hours: choose with --cells among {known}; --cells '*': all"
            )
        raise SpecError(f"no cell of {paper_table.name} matches {cells!r}; it has: {known}")

    def spend(trial: AttackSpec) -> AttackSpec:
        if budget is None:
            return trial
        return replace(trial, budget=replace(trial.budget, iterations=budget))

    def kept(cell: Setting) -> list[AttackSpec]:
        names = {t.name for t in cell.trials if attacks is None or matches(t.name, attacks)}
        names |= {t.against for t in cell.trials if t.name in names}
        return [t for t in cell.trials if t.name in names]

    changed = [replace(c, n=n or c.n, trials=tuple(spend(t) for t in trials)) for c in chosen if (trials := kept(c))]
    if not changed:
        known = ", ".join(dict.fromkeys(t.name for c in chosen for t in c.trials))
        raise SpecError(f"no attack of {paper_table.name} matches {attacks!r}; it has: {known}")
    return replace(paper_table, cells=tuple(changed))


def build_link(table: Table, where: str, offered: Mapping[str, Any]) -> Link | per_example:
    """A link of a chain from its table; each = true: per example.

    Args:
        offered: the cell's model, shape, classes, batch_size and normalise.
    """
    arguments, each = _link(table, where)
    link: Link = build(arguments, where, TRANSFORM, offered)
    return per_example(link) if each else link


def _link(table: Table, where: str) -> tuple[Table, bool]:
    arguments = dict(coerce(table, dict, where))
    return arguments, coerce(arguments.pop("each", False), bool, f"{where}: each")


def _check_link(table: Table, where: str) -> None:
    """As much as can be checked before a network is there: built, unless it asks for something of the network or data."""
    arguments, _ = _link(table, where)
    target, given = resolve(arguments, where, TRANSFORM), dict.fromkeys(OFFERED)
    checked = check_arguments(target, {k: v for k, v in arguments.items() if k != "use"}, where, given)
    if not any(checked.get(k, "") is None for k in OFFERED):
        call(target, checked, where)


def matches(name: str, pattern: str) -> bool:
    """Whether a name has a pattern in it, or is one with * and ?."""
    return pattern in name or fnmatchcase(name, pattern)
