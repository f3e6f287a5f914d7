"""The tap: a Flower grid around a grid that forwards every call unchanged and records what passes.

    grid = tap(grid, "audit.toml", "runs/theirs")     # in the ServerApp's main, before anything is sent

It never changes, drops, delays or reorders a message. Nothing in it raises into the app or draws from a global random generator:
what cannot be recorded is left out, logged once as a warning, and kept in the ledger, so that `fedgauge audit` repeats it.
"""

import functools
import os
import sys
import tomllib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, TypeVar, cast

from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedgauge.client import toml_text
from fedgauge.server.recorder import AppRecorder, Exchange
from fedgauge.server.store.run import Run

S = TypeVar("S", bound=Strategy)
Item = TypeVar("Item")
PLACEHOLDER = (
    "# The audit file could not be read when the app began. Write the scenario here, then run `fedgauge audit`.\n"
)


def tap(grid: Grid, audit: str | Path, run: str | Path, allow: Sequence[str] = ()) -> Grid:
    """Return a grid that behaves like the app's own and records what its clients upload, for `fedgauge audit`.

    Relative paths start from the folder of the calling file (where it has no such audit file, from the working directory); the
    absolute ones are logged. If nothing can be recorded, the app's own grid is returned and a warning says why.

    Args:
        grid: the app's grid.
        audit: the scenario that describes how the app's clients train; read as text, nothing in it is built or called.
        run: the folder of the new run; a number is appended if it exists.
        allow: packages of the app that the scenario names, for the command that is logged at the end.

    Raises:
        TypeError: the first argument is not a grid.

    Example:
        >>> @server.main()                                                              # doctest: +SKIP
        ... def main(grid, context):
        ...     grid = tap(grid, "audit.toml", "runs/theirs")
        ...     FedAvg().start(grid, initial_arrays)
    """
    if isinstance(grid, type) or not hasattr(grid, "send_and_receive"):
        raise TypeError(f"tap() takes the grid that Flower passes to the ServerApp's main, got {_named(grid)}")
    recorder = _open(audit, run, allow, _caller())
    return grid if recorder is None else _tapped(grid, recorder)


def curious(strategy: S, audit: str | Path, run: str | Path, allow: Sequence[str] = ()) -> S:
    """Return the app's own strategy, whose `start` taps the grid that it is given.

    Nothing else of the strategy changes. A strategy that wraps others goes in whole: `curious(Outer(Inner()), ...)`.

    Args:
        strategy: any strategy of flwr.serverapp.strategy.
        audit, run, allow: as for `tap`.

    Raises:
        TypeError: the first argument is not such a strategy.
    """
    if isinstance(strategy, type):
        raise TypeError(
            f"curious() takes a strategy, got the class {strategy.__name__}: write {strategy.__name__}(...)"
        )
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"curious() takes a strategy of flwr.serverapp.strategy, got {_named(strategy)}: with Flower's older strategies move "
            "the app to the message API; with a loop of your own use tap(grid, ...)"
        )
    start = _CuriousStart(strategy, vars(strategy).get("start"), audit, run, tuple(allow), _caller())
    try:
        strategy.start = start  # type: ignore[method-assign]
    except Exception as error:  # a class may refuse attributes in any way
        log(
            WARNING, "fedgauge records nothing: %s takes no attribute (%s); use tap(grid, ...)", _named(strategy), error
        )
        return strategy
    weakref.finalize(strategy, _warn_if_unused, start.used, type(strategy).__name__)
    return strategy


@dataclass(eq=False)
class _CuriousStart:
    """A strategy's `start` that taps its grid; an object of its own so that the strategy can still be copied and pickled."""

    strategy: Strategy
    own: Callable[..., Any] | None
    audit: str | Path
    run: str | Path
    allow: tuple[str, ...]
    caller: Path | None

    def __post_init__(self) -> None:
        self.used: list[bool] = []

    def __call__(self, *args: Any, **options: Any) -> Any:
        start: Callable[..., Any] = self.own or functools.partial(type(self.strategy).start, self.strategy)
        self.used.append(True)
        given = [arg for arg in (*args, *options.values()) if isinstance(arg, Grid)]
        recorder = _open(self.audit, self.run, self.allow, self.caller) if given else None
        if recorder is None:
            return start(*args, **options)
        tapped = _tapped(given[0], recorder)
        with recorder.training():
            result = start(
                *(tapped if arg is given[0] else arg for arg in args),
                **{k: tapped if arg is given[0] else arg for k, arg in options.items()},
            )
            if isinstance(result, Result):
                recorder.evaluated(result.evaluate_metrics_serverapp)
            return result


class Tap:
    """A grid around a grid; see `tap`. It passes for an instance of the class of the app's own grid."""

    def __init__(self, grid: Grid, recorder: AppRecorder) -> None:
        self.__dict__.update(_grid=grid, _recorder=recorder)

    @property
    def __class__(self) -> type:
        return type(self._grid)

    @__class__.setter
    def __class__(self, other: type) -> None:
        self._grid.__class__ = other

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_grid"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._grid, name, value)

    def send_and_receive(self, *args: Any, **options: Any) -> Any:
        """Forward the messages and return the replies, and record both."""
        exchange = self._recorder.exchange()
        args, options = _watched(args, options, "messages", exchange)
        return _passing(self._grid.send_and_receive(*args, **options), exchange.came, exchange.over)

    def push_messages(self, *args: Any, **options: Any) -> Any:
        """Forward the messages, and record them."""
        exchange = self._recorder.exchange()
        args, options = _watched(args, options, "messages", exchange)
        ids = self._grid.push_messages(*args, **options)
        if isinstance(ids, Collection):
            exchange.pushed(list(ids))
        return ids

    def pull_messages(self, *args: Any, **options: Any) -> Any:
        """Return the replies to pushed messages, and record them."""
        exchange = self._recorder.exchange()
        return _passing(self._grid.pull_messages(*args, **options), exchange.came, exchange.flush)


def _tapped(grid: Grid, recorder: AppRecorder) -> Grid:
    tapped = Tap(grid, recorder)
    weakref.finalize(tapped, recorder.close)
    return cast(Grid, tapped)


def _watched(
    args: tuple[Any, ...], options: dict[str, Any], name: str, exchange: Exchange
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, its messages noted as they pass."""
    if args:
        return (_passing(args[0], exchange.sent, exchange.flush), *args[1:]), options
    if name in options:
        return args, {**options, name: _passing(options[name], exchange.sent, exchange.flush)}
    return args, options


def _passing(items: Any, note: Callable[[Any], None], end: Callable[[], None]) -> Any:
    """The same collection, or an iterator over the same items in the same order; each item is noted as it passes."""
    if isinstance(items, Collection):
        try:
            noted = list(items)
        except Exception:  # the app's own collection fails, and will fail where the app or its grid reads it
            return items
        for item in noted:
            note(item)
        end()
        return items
    return _each(items, note, end) if isinstance(items, Iterable) else items


def _each(items: Iterable[Item], note: Callable[[Item], None], end: Callable[[], None]) -> Iterator[Item]:
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
        trouble, tables = "", dict[str, Any]()
        try:
            text = path.read_text()
            tables = toml_text.parse(text.encode())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            text, trouble = PLACEHOLDER, f"{path} cannot be read ({error}); updates are recorded all the same"
        opened = _new_run(base / run, text)
        recorder = AppRecorder(opened, tables, path.parent, allow)
        if trouble:
            recorder.warn("scenario", trouble)
        log(INFO, "fedgauge records this app in %s, with the scenario %s", opened.folder, path)
        return recorder
    except Exception as error:  # whatever it is, the app must go on
        log(WARNING, "fedgauge records nothing: %s: %s", type(error).__name__, error)
        return None


def _base(audit: Path, caller: Path | None) -> Path:
    """Where relative paths start: the calling file's folder, or the working directory if only that has the audit file."""
    here = Path.cwd() if caller is None else caller.resolve().parent
    if audit.is_absolute() or (here / audit).exists() or not (Path.cwd() / audit).exists() or _bundled(here):
        return here
    log(WARNING, "fedgauge: %s has no %s, so paths start from the working directory, %s", here, audit, Path.cwd())
    return Path.cwd()


def _bundled(folder: Path) -> bool:
    """Check for an app that Flower runs from its bundle, where the working directory is that of another process."""
    flower = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr").resolve()
    return folder.is_relative_to(flower)


def _new_run(folder: Path, text: str) -> Run:
    for attempt in range(1, 10_000):
        try:
            return Run.create(folder if attempt == 1 else folder.with_name(f"{folder.name}-{attempt}"), text)
        except FileExistsError:
            continue
    raise FileExistsError(f"{folder} and 9,999 numbered folders beside it exist")


def _caller() -> Path | None:
    """The file that called `tap` or `curious`; None in an interactive session."""
    file = sys._getframe(2).f_globals.get("__file__")
    return None if file is None else Path(file)


def _warn_if_unused(used: Sequence[bool], name: str) -> None:
    if not used:
        log(
            WARNING,
            "fedgauge recorded nothing: start() of the %s given to curious() was never called. If another strategy wraps it, "
            "write curious(Outer(%s(...)), ...)",
            name,
            name,
        )


def _named(value: object) -> str:
    kind = value if isinstance(value, type) else type(value)
    return f"{'the class ' if isinstance(value, type) else ''}{kind.__module__}.{kind.__qualname__}"
