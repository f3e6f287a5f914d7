"""A Flower app in its folder: its parts, its config, and its federation in the memory of one process."""

import importlib
import shutil
import sys
import threading
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.common.config import flatten_dict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.run import Run as FlowerRun

from fedgauge.client.components import SpecError, errors_in
from fedgauge.simulations.rehearsal.observer import Observer, Training

Settings = Mapping[str, bool | int | float | str]
ROUNDS = ("num-server-rounds", "num_server_rounds", "num-rounds", "num_rounds", "rounds")
PARTITIONS = 10  # as Flower's templates have
SMALL = 1 << 20  # bytes of a file that is copied
MANY = 1000  # entries of a folder, above which it is linked as a whole, as folders of data are
TRIES = 3  # how often a thread asks for clients, and none sends a message, before further ones appear


@dataclass(frozen=True)
class FlowerApp:
    """An app as its pyproject.toml describes it; clients: in its largest federation, if it has one there."""

    folder: Path
    server: str
    client: str
    config: Settings
    clients: int | None = None

    @classmethod
    def read(cls, folder: Path, settings: Settings) -> "FlowerApp":
        """Read an app's pyproject.toml.

        Args:
            settings: replace values of its config; "rounds" sets the number of rounds, whatever the app calls it.

        Raises:
            SpecError: there is no app, it lacks a part, or has no such setting.
        """
        path = folder / "pyproject.toml"
        with errors_in(f"name the folder of a Flower app: {path}", OSError, ValueError):
            table = tomllib.loads(path.read_text("utf-8"))
        parts = _table(table, "tool", "flwr", "app", "components")
        for part in ("serverapp", "clientapp"):
            if ":" not in str(parts.get(part, "")):
                raise SpecError(f"{path}: [tool.flwr.app.components] needs {part} = 'module:object', as flwr run does")
        with errors_in(f"{path}: [tool.flwr.app.config]", ValueError):
            config = flatten_dict(dict(_table(table, "tool", "flwr", "app", "config")))
        given = dict(settings)
        rounds = given.pop("rounds", None)
        if unknown := [key for key in given if key not in config]:
            keys = ", ".join(config) or "none"
            raise SpecError(f"--set {unknown[0]}: the app's config has no such key (it has: {keys})")
        if rounds is not None:
            given |= {key: rounds for key in ROUNDS if isinstance(config.get(key), int) and key not in given}
        federations = _table(table, "tool", "flwr", "federations")
        given_nodes = (_table(federations, name, "options").get("num-supernodes") for name in federations)
        nodes = [count for count in given_nodes if isinstance(count, int)]
        return cls(folder, parts["serverapp"], parts["clientapp"], config | given, max(nodes, default=None))

    def part(self, reference: str) -> Any:
        """Import the server app or the client app; the app's code may raise anything."""
        sys.path[:0] = [str(place) for place in importing(self.folder) if str(place) not in sys.path]
        module, _, name = reference.partition(":")
        found: Any = importlib.import_module(module)
        for attribute in name.split("."):
            found = getattr(found, attribute)
        return found


def _table(table: Any, *keys: str) -> Mapping[str, Any]:
    """Return the table below these keys; empty if there is none."""
    for key in keys:
        table = table.get(key) if isinstance(table, Mapping) else None
    return table if isinstance(table, Mapping) else {}


def importing(folder: Path) -> list[Path]:
    """Return the folders from which an app's modules are imported."""
    return [place for place in (folder, folder / "src") if place.is_dir()]


def mirror(folder: Path, to: Path) -> None:
    """Copy an app's small files and link its large ones and environments, so that a run changes none of them."""
    for entry in folder.iterdir():
        inner = list(islice(entry.iterdir(), MANY + 1)) if entry.is_dir() and not entry.is_symlink() else None
        if inner is not None and entry.name[0] not in "._" and len(inner) <= MANY and entry / "pyvenv.cfg" not in inner:
            (to / entry.name).mkdir()
            mirror(entry, to / entry.name)
        elif inner is None and entry.is_file() and entry.stat().st_size <= SMALL:
            shutil.copy(entry, to / entry.name)
        else:
            (to / entry.name).symlink_to(entry)


class AppGrid(Grid):
    """A grid that answers with the app's own ClientApp, each client with its own context, and observes its training.

    Args:
        clients: how many there are at first; more appear if the strategy waits for more.
    """

    def __init__(self, app: FlowerApp, client: Callable[[Message, Context], Message], clients: int, observer: Observer):
        self._client, self._observer, self._folder = client, observer, app.folder
        most = app.clients or max(PARTITIONS, clients)
        self._contexts = {
            node: Context(1, node, {"partition-id": node - 1, "num-partitions": most}, RecordDict(), dict(app.config))
            for node in range(1, most + 1)
        }
        self._here, self._asked = min(clients, most), Counter[int]()  # by thread: Flower's older servers ask in two
        self._one = threading.Lock()  # Flower's older servers ask each client in a thread of its own
        self._replies: dict[str, Message] = {}
        self.trained: dict[int, list[Training]] = {}  # by node, in the order of its train messages
        self.failed: list[str] = []

    def get_node_ids(self) -> Iterable[int]:
        self._asked[threading.get_ident()] += not self._one.locked()
        asked = self._asked[threading.get_ident()]
        if asked > TRIES and self._here < len(self._contexts):
            self._here = min(2 * self._here, len(self._contexts))
            self._asked.clear()
        elif sum(self._asked.values()) > 20 * TRIES:
            remedy = "raise --clients, or lower the app's minimum with --set KEY=VALUE"
            raise SpecError(f"the app waits for more than {len(self._contexts)} clients: {remedy}")
        return list(self._contexts)[: self._here]

    @property
    def run(self) -> FlowerRun:
        return FlowerRun.create_empty(1)

    def set_run(self, run: FlowerRun) -> None:
        """Ignore the run: there is one only."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return [self._answer(message) for message in messages]

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        replies = {reply.metadata.reply_to_message_id: reply for reply in map(self._answer, messages)}
        self._replies |= replies
        return list(replies)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(key) for key in message_ids if key in self._replies]

    def _answer(self, message: Message) -> Message:
        with self._one:
            return self._answered(message)

    def _answered(self, message: Message) -> Message:
        self._asked.clear()
        message.metadata.__dict__["_message_id"] = message.object_id  # as Flower's own grids do
        message = message_from_proto(message_to_proto(message))  # a client may change its own, as SecAgg+'s mod does
        node = message.metadata.dst_node_id
        context = self._contexts[node]
        try:
            if message.metadata.message_type.partition(".")[0] != "train":
                return self._client(message, context)
            with self._observer.training() as seen:
                configs = [r for r in message.content.values() if isinstance(r, ConfigRecord)]
                mus = [r[key] for r in configs for key in ("proximal-mu", "proximal_mu") if key in r]
                seen.proximal_mu = float(mus[0]) if mus and isinstance(mus[0], int | float) else None
                asked = any(message.content.array_records.values())
                reply = self._client(message, context)
            seen.uploads = asked and reply.has_content()
            self.trained.setdefault(node, []).append(seen)
            return reply
        except Exception as error:  # as with Flower, a client that fails is an error reply
            self.failed.append(f"partition {node - 1}: {blamed(error, self._folder)}")
            return Message(Error(0, f"{type(error).__name__}: {error}"), reply_to=message)


def blamed(error: BaseException, folder: Path) -> str:
    """Return an exception in one line, with the last line of the app's own code that it passed, if it passed any."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Path(f.filename).is_relative_to(folder)]
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{place}"
