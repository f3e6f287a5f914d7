"""Paper tables: the data, networks, chains and attacks of a published table, with the figures that the paper reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fedgauge.attacks.malicious.server_attack import SERVER_ATTACK, ServerAttack
from fedgauge.attacks.plan import PlannedAttack
from fedgauge.client.components import Checked, Count, Natural, Positive, Table, build
from fedgauge.client.data.corpora import Longer
from fedgauge.client.models.tokenizer import Task

STRONGEST = "strongest"


@dataclass(frozen=True)
class Images(Checked):
    """The images or sentences that are attacked, and how many a client holds.

    Args:
        use: the dataset.
        part: its training or test part.
        first: images before this one are not used (they are for tuning).
        batch_size: images in an update.
        distinct: no class occurs twice in a batch: each batch takes the next images that fit.
        classes: only these; default: all.
        mean, std: those that the network was trained with, if not the dataset's.
        tokenizer, length, vocabulary, task, longer: of sentences, as in fedgauge.client.data.corpora; default: the dataset's.
    """

    use: str
    part: Literal["train", "test"] = "test"
    first: Natural = 0
    batch_size: Count = 1
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
        given = {k: getattr(self, k) for k in ("tokenizer", "length", "vocabulary", "task", "longer")}
        return {"use": self.use, **{k: v for k, v in given.items() if v is not None}}


@dataclass(frozen=True)
class Pretraining(Checked):
    """The training of a network before the attack: Adam, from the seed's initial weights, on training images.

    Args:
        steps, batch_size, rate: of Adam.
        defended: apply the setting's defenses: those of updates to each example's gradient, those of examples to the batch.
        first: training images before this one are not used.
    """

    steps: Count
    batch_size: Count = 32
    rate: Positive = 1e-3
    defended: bool = False
    first: Natural = 1000


@dataclass(frozen=True)
class AttackSpec(PlannedAttack):
    """One attack in a setting, or a limit on all of them (by its name): a planned attack, with what the paper reports of it.

    Args:
        name: its name in the paper's table.
        labels: given, in the client's order and not sorted; or restored.
        lengths: of sentences: given, in the order of the labels; or hidden.
        paper: a figure for each metric, its spread, its n, iterations and restarts.
        metrics: those to report.
        against: the attack of the same setting that gains are relative to; "strongest": the one of the highest PSNR among those
            that are compared with none.
    """

    labels: Literal["restored", "given"] = "given"
    defense: Literal["known", "unknown"] = "known"
    paper: Mapping[str, float] = field(default_factory=dict)
    metrics: tuple[str, ...] = ("psnr",)
    against: str = ""


@dataclass(frozen=True)
class Setting(Checked):
    """One network under one chain, with the attacks on it.

    Args:
        n: attacked updates.
        clients: they send the updates in turns; for attacks that remember a client's earlier images.
        wave: updates that are attacked at once; limited by memory.
        weights: a checkpoint in the local data folder.
        heavy: takes hours on a few cores, so it runs only if --cells names it.
        auxiliary: the last training images, which the attacker has.
        server_attack: what a malicious server does to the weights it sends (a component table); None: an honest server.
        rounds: how often each client is asked, on the same examples; the server attack sees all answers, the last is attacked.
        members: clients with batch_size images each. The server sees only the mean of their updates, and the server attack is
            on all but the first of them.
        alone: attack only the example of each batch that the server attack isolates (the one with the largest update), at
            honest weights. This is the reference for isolation.
        faintest: attack the quarter of four times as many updates that is smallest at honest weights.
    """

    name: str
    n: Count
    wave: Count
    images: Images
    model: Table
    chain: tuple[Table, ...]
    attacks: tuple[AttackSpec, ...]
    weights: str = ""
    train: Pretraining | None = None
    heavy: bool = False
    clients: Count = 1
    auxiliary: Count = 200
    server_attack: Table | None = None
    rounds: Count = 1
    members: Count = 1
    alone: bool = False
    faintest: bool = False

    def needed_by(self, spec: AttackSpec) -> set[str]:
        """The names of the attacks that an attack's gains are relative to."""
        if spec.against == STRONGEST:
            return {other.name for other in self.attacks if not other.against}
        return {spec.against} - {""}

    def build_server_attack(self) -> ServerAttack | None:
        """The server attack; SpecError if its table has a mistake."""
        if self.server_attack is None:
            return None
        server_attack: ServerAttack = build(self.server_attack, f"cell {self.name}: server_attack", SERVER_ATTACK)
        return server_attack


@dataclass(frozen=True)
class PaperTable:
    """A published table: attacked settings.

    Args:
        version: figures of another version do not compare; it rises when a cell changes, or what the code measures in it.
    """

    name: str
    title: str
    note: str
    seed: int
    cells: tuple[Setting, ...] = ()
    version: int = 1
