"""The tap: a Flower grid around a grid that forwards every call unchanged and records what passes.

    grid = tap(grid, "audit.toml", "runs/theirs")     # in the ServerApp's main, before anything is sent

It never changes, drops, delays or reorders a message. Once set up, it neither raises into the app nor draws from a global
generator: what cannot be recorded is left out, logged once as a warning, and kept in the ledger, so that `fedgauge audit`
repeats it.
"""

import functools
import inspect
import itertools
import os
import sys
import tomllib
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, TypeVar, cast

from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedgauge.client import toml_text
from fedgauge.server.store.run import Run
from fedgauge.server.tap_recorder import AppRecorder, Exchange, say

S = TypeVar("S", bound=Strategy)
Item = TypeVar("Item")
PLACEHOLDER = (
    "# The audit file could not be read when the app began. Write the scenario here, then run `fedgauge audit`.\n"
)


def tap(grid: Grid, audit: str | Path, run: str | Path, allow: Sequence[str] = ()) -> Grid:
    """Return a grid that behaves like the app's own and records what its clients upload, for `fedgauge audit`.

    Relative paths start from the nearest folder with the audit file, from the calling file's up to the app's pyproject.toml;
    else from the working directory if that has it. The absolute ones are logged. If nothing can be recorded, the app's own grid
    is returned and a warning says why.

    Args:
        grid: the app's grid.
        audit: the scenario that describes how the app's clients train; read as text, nothing in it is built or called.
        run: the folder of the new run; a number is appended if it exists.
        allow: packages in addition to those that the scenario names, for the command that is logged at the end.

    Raises:
        TypeError: the first argument is not a grid.

    Example:
        >>> @server.main()                                                              # doctest: +SKIP
        ... def main(grid, context):
        ...     grid = tap(grid, "audit.toml", "runs/theirs")
        ...     FedAvg().start(grid, initial_arrays)
    """
    if isinstance(grid, type) or not hasattr(grid, "send_and_receive"):
        raise TypeError(f"tap() takes the grid that Flower passes to the ServerApp's main, got {_given(grid)}")
    recorder = _open(audit, run, allow, _caller())
    return grid if recorder is None else tapped(grid, recorder)


def curious(strategy: S, audit: str | Path, run: str | Path, allow: Sequence[str] = ()) -> S:
    """Return the app's own strategy with a `start` that taps its grid.

    Its class's `start` is replaced by one that taps the grid of this strategy only; the object itself is unchanged. A strategy
    that wraps others goes in whole: `curious(Outer(Inner()), ...)`.

    Args:
        strategy: any strategy of flwr.serverapp.strategy.
        audit, run, allow: as for `tap`.

    Raises:
        TypeError: the first argument is not such a strategy.
    """
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"curious() takes a strategy of flwr.serverapp.strategy, got {_given(strategy)}; or use tap(grid, ...)"
        )
    kind = type(strategy)
    if "start" in vars(strategy) or not inspect.isfunction(inspect.getattr_static(kind, "start")):
        say(WARNING, "fedgauge records nothing: start of %s is not a method; use tap(grid, ...)", kind.__name__)
        return strategy
    never = weakref.finalize(strategy, say, WARNING, NEVER_STARTED, kind.__name__)
    weakref.finalize(strategy, _CURIOUS.pop, id(strategy), None)
    _CURIOUS[id(strategy)] = functools.partial(_open, audit, run, allow, _caller()), never.detach
    _watch_start(kind)
    return strategy


# by the strategy's id: what opens its recording, and what to call when it starts
_CURIOUS: dict[int, tuple[Callable[[], AppRecorder | None], Callable[[], object]]] = {}
NEVER_STARTED = (
    "fedgauge recorded nothing: start() of the %s was never called; if another wraps it, curious() takes that"
)


def _watch_start(kind: type[Strategy]) -> None:
    """Let a class's `start` tap the grid of those strategies that are curious; for all others it is as before."""
    start: Any = kind.start
    if hasattr(start, "_fedgauge"):
        return

    @functools.wraps(start)
    def watched(self: Strategy, *args: Any, **options: Any) -> Any:
        asked = _CURIOUS.pop(id(self), None)  # so that a start that calls its parent's taps once
        if asked is None:
            return start(self, *args, **options)
        open, note_start = asked
        note_start()
        try:
            return _recorded(functools.partial(start, self), args, options, open)
        finally:
            _CURIOUS[id(self)] = asked

    @functools.wraps(start)
    async def awaited(self: Strategy, *args: Any, **options: Any) -> Any:
        return await watched(self, *args, **options)

    now: Any = awaited if inspect.iscoroutinefunction(start) else watched
    now._fedgauge = True
    kind.start = now  # type: ignore[method-assign]


def _recorded(
    start: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], open: Callable[[], AppRecorder | None]
) -> Any:
    """Call `start` as the app did, with its grid tapped; if it returns before its training ends, the grid ends the recording."""
    grid = next((arg for arg in (*args, *options.values()) if hasattr(arg, "send_and_receive")), None)
    if grid is None:
        say(WARNING, "fedgauge records nothing: start() was given no grid; use tap(grid, ...)")
    # a tapped one is of a start that returned before its training, and calls its parent's now
    if grid is None or type(grid) is Tap or (recorder := open()) is None:
        return start(*args, **options)
    own = tapped(grid, recorder)
    args = tuple(own if arg is grid else arg for arg in args)
    options = {k: own if arg is grid else arg for k, arg in options.items()}
    try:
        result = start(*args, **options)
    except BaseException as error:
        recorder.close("failed" if isinstance(error, Exception) else "interrupted")
        raise
    if isinstance(result, Result):
        recorder.evaluated(result.evaluate_metrics_serverapp)
        recorder.close()
    return result


class Tap:
    """A grid around a grid; see `tap`. It passes for an instance of the class of the app's own grid."""

    def __init__(self, grid: Grid, recorder: AppRecorder) -> None:
        self.__dict__.update(_fedgauge_grid=grid, _fedgauge_recorder=recorder)

    @property  # type: ignore[misc]  # what is set passes to the grid
    def __class__(self) -> type:
        return type(self._fedgauge_grid)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_fedgauge_grid"], name)
        if name not in WATCHED or not callable(value):
            return value
        return functools.wraps(value)(functools.partial(_forward, self, name, value))

    def __setattr__(self, name: str, value: object) -> None:
        if name in WATCHED:  # an app's own wrapper around the tap's method
            self.__dict__[name] = value
        else:
            setattr(self._fedgauge_grid, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            del self.__dict__[name]
        else:
            delattr(self._fedgauge_grid, name)

    def __reduce_ex__(self, protocol: Any) -> Any:  # a copy is the grid's, and not tapped
        return self._fedgauge_grid.__reduce_ex__(protocol)


WATCHED = ("send_and_receive", "push_messages", "pull_messages")
_VALUES: tuple[type, ...] = (type({}.values()), type(OrderedDict().values()))
READ_TWICE: tuple[type, ...] = (list, tuple, set, frozenset, dict, deque, *_VALUES)  # reading them changes nothing


def tapped(grid: Grid, recorder: AppRecorder) -> Grid:
    tapped = Tap(grid, recorder)
    weakref.finalize(tapped, recorder.end).atexit = False
    return cast(Grid, tapped)


def _forward(tapped: Tap, name: str, call: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """Call a method of the grid, and record the messages and replies that pass."""
    exchange = Exchange(tapped._fedgauge_recorder, tapped)
    if name != "pull_messages":  # which takes no messages
        if args:
            args = (_passing(args[0], exchange, exchange.sent, exchange.flush), *args[1:])
        elif "messages" in options:
            options["messages"] = _passing(options["messages"], exchange, exchange.sent, exchange.flush)
    found = call(*args, **options)
    if name != "push_messages":
        return _passing(found, exchange, exchange.came, exchange.over if name == "send_and_receive" else exchange.flush)
    if isinstance(found, list | tuple):
        exchange.pushed(found)
    return found


def _passing(items: Any, exchange: Exchange, note: Callable[[Any], None], end: Callable[[], None]) -> Any:
    """The same plain collection, or the same items in the same order at the same time; each is noted once, as it passes."""
    if isinstance(items, Iterator):
        return _each(items, note, end)
    if type(items) not in READ_TWICE:
        exchange.unread(type(items).__name__)
        return items
    for item in items:
        note(item)
    end()
    return items


def _each(items: Iterable[Item], note: Callable[[Any], None], end: Callable[[], None]) -> Iterator[Item]:
    try:
        for item in items:
            note(item)
            yield item
    finally:
        end()


def _open(audit: str | Path, run: str | Path, allow: Sequence[str], caller: Path | None) -> AppRecorder | None:
    """Create the run folder and its recorder; None, with a warning, if that fails for any reason."""
    try:
        base = _base(Path(audit), caller)
        path = base / audit
        tables: Mapping[str, Any] = {}
        trouble = ""
        try:
            text = path.read_text("utf-8")
            tables = toml_text.parse(text.encode())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            text, trouble = PLACEHOLDER, f"{path} cannot be read ({error}); updates are recorded all the same"
        allow = [allow] if isinstance(allow, str) else allow or ()
        opened = _new_run(base / run, text)
        recorder = AppRecorder(opened, tables, path.parent, allow)
        if trouble:
            recorder.warn("scenario", trouble)
        say(INFO, "fedgauge records this app in %s, with the scenario %s", opened.folder, path)
        return recorder
    except Exception as error:  # whatever it is, the app must go on
        say(WARNING, "fedgauge records nothing: %s: %s", type(error).__name__, error)
        return None


def _base(audit: Path, caller: Path | None) -> Path:
    """Return the base of relative paths: the calling file's folder, one above it up to its app's, or the working directory."""
    here = Path.cwd() if caller is None else caller.resolve().parent
    around = [here, *here.parents]
    app = next((i for i, folder in enumerate(around) if (folder / "pyproject.toml").exists()), 0)
    here = next((folder for folder in around[: app + 1] if (folder / audit).exists()), here)
    # Flower runs an app from its bundle, where the working directory is that of another process
    bundled = here.is_relative_to(Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr").resolve())
    if audit.is_absolute() or (here / audit).exists() or not (Path.cwd() / audit).exists() or bundled:
        return here
    say(WARNING, "fedgauge: %s has no %s, so paths start from the working directory, %s", here, audit, Path.cwd())
    return Path.cwd()


def _new_run(folder: Path, text: str) -> Run:
    names = itertools.chain([folder.name], (f"{folder.name}-{i}" for i in itertools.count(2)))
    return Run.create(next(path for name in names if not (path := folder.with_name(name)).exists()), text)


def _caller() -> Path | None:
    """The file that called `tap` or `curious`; None in an interactive session."""
    file = sys._getframe(2).f_globals.get("__file__")
    return None if file is None else Path(file)


def _given(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}: write {value.__name__}(...)"
    return f"an object of the class {type(value).__module__}.{type(value).__name__}"
