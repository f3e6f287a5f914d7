"""A component is a table with `use` (its name) and its arguments: find it, check it, build it.

Errors are written for the author of the table: they name the place, the value and what is allowed. A name is a short name of
the registry, or module:name in a package that the user of this process has allowed. The environment holds what is allowed,
so child processes (Flower's, Ray's, the attack service) keep to the same list.
"""

import inspect
import os
import pkgutil
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

from fedgauge.client import entry_points
from fedgauge.client.entry_points import ALLOW, OWN, PLUG_INS, Entry, allowed, is_in

Table = Mapping[str, Any]  # what TOML or JSON gives: values of mixed type, checked here
ALLOW_PATH = "FEDGAUGE_ALLOW_PATH"  # folders, besides Python's own path, in which allowed packages are looked for
MEND = "mend this line, or name another component"
Settings = TypeVar("Settings")
_Types = tuple[type, ...]


class SpecError(ValueError):
    """A mistake in a scenario or protocol, explained in a sentence that its author can act on."""


@dataclass(frozen=True)
class ComponentKind:
    """One kind of component: where the registry lists it, and what it must be."""

    noun: str  # for messages, e.g. "a defense"
    groups: tuple[str, ...]  # of the registry, e.g. "fedgauge.links"
    type: type  # a class counts if it derives from this type, a function if its return annotation says so
    annotated: bool = True  # a user's function needs that annotation too; otherwise `build` checks what it returned
    outside: _Types = ()  # types that count for a user's class or function; default: this type
    instances: bool = False  # what is built already counts: of these types, partial, or of a user's class

    def admits_outside(self, target: Any, packages: tuple[str, ...]) -> bool:
        """Check that an object of these packages is, or may build, a component of this kind."""
        if self.instances and isinstance(target, (*self.outside, partial)):
            return callable(target)
        if isinstance(target, partial | types.MethodType):
            made = target.func if isinstance(target, partial) else target.__func__
            return self.admits_outside(made, packages)
        # a package may have imported the object only: mine:os.system
        if not is_in(str(getattr(target, "__module__", "")), packages) or inspect.isabstract(target):
            return False
        if inspect.isclass(target):
            calls = self.instances and any("__call__" in vars(base) for base in target.__mro__)
            return (calls or issubclass(target, self.outside or self.type)) and target is not self.type
        if not inspect.isfunction(target):
            return self.instances and callable(target)
        returned = _hints(target).get("return")
        if returned is None or returned is Any:
            return not self.annotated
        return inspect.isclass(returned) and issubclass(returned, self.outside or self.type)

    def entries(self) -> list[Entry]:
        """Every registered component of this kind, fedgauge's own first."""
        return [entry for group in self.groups for entry in entry_points.entries(group)]

    def names(self) -> list[str]:
        return sorted({entry.name for entry in self.entries()})


@contextmanager
def allowing(names: Iterable[str], folders: Iterable[Path] = (), plug_ins: bool = True) -> Iterator[None]:
    """Let components be named from these packages, and no others, in this context and in processes that it starts.

    Args:
        names: as Python imports them: "mynets", "mynets.small".
        folders: where Python looks for them, after its own path.
        plug_ins: whether components that other installed packages register may be named although they are not listed here.

    Raises:
        SpecError: a name is not a package's name, or is fedgauge's own.
    """
    names = list(dict.fromkeys(names))
    if wrong := [n for n in names if not all(map(str.isidentifier, n.split("."))) or n.split(".")[0] == OWN]:
        raise SpecError(f"--allow takes one package outside fedgauge (repeat it for more), got {wrong[0]!r}")
    before, path = {key: os.environ.get(key) for key in (ALLOW, ALLOW_PATH, PLUG_INS)}, list(sys.path)
    try:
        os.environ[ALLOW] = ",".join(names)
        os.environ[ALLOW_PATH] = os.pathsep.join(dict.fromkeys(str(folder.resolve()) for folder in folders))
        os.environ[PLUG_INS] = "all" if plug_ins else "allowed"
        yield
    finally:
        sys.path[:] = path
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def with_absolute_paths(table: Table, kind: ComponentKind, base: Path) -> Table:
    """Return the table with absolute paths; relative ones start from base.

    This is needed because Flower's processes and later readers of the run work in other folders.
    """
    try:
        paths = path_arguments(table, kind)
    except SpecError:  # `build` reports it
        return table
    return {k: str(base.absolute() / v) if k in paths and isinstance(v, str) else v for k, v in table.items()}


def path_arguments(table: Table, kind: ComponentKind) -> set[str]:
    """The keys of a table that its component reads as paths; SpecError if there is no such component."""
    hints = _hints(resolve(table, "", kind))
    return {name for name, hint in hints.items() if name in table and _has_path(hint)}


def _has_path(hint: Any) -> bool:
    """Check whether a value of this type may be or contain a path."""
    of = typing.get_origin(hint) or hint
    if isinstance(of, type) and issubclass(of, os.PathLike):
        return True
    return any(map(_has_path, typing.get_args(hint)))


def build(
    table: Table,
    where: str,
    kind: ComponentKind,
    offered: Mapping[str, Any] | None = None,
    more_keys: Sequence[str] = (),
) -> Any:
    """Call the component a table names with the table's other keys as arguments.

    Args:
        where: the table's place, for messages, e.g. "[[chain]] #1".
        offered: values for parameters without a default, by name, e.g. model, shape.
        more_keys: other valid keys of the table, for messages.

    Raises:
        SpecError: an unknown name, an unknown or missing argument, a wrong type, a value that the component refuses, or a
            user's component that returns something else than it should.
    """
    arguments = {k: v for k, v in table.items() if k != "use"}
    target = resolve(table, where, kind)
    built = call(target, check_arguments(target, arguments, where, offered, more_keys), where)
    if not isinstance(built, kind.outside or kind.type):
        raise SpecError(f"{where}: {table['use']!r} gave {type(built).__name__}, expected {_named(kind.type)}")
    return built


def call(target: Callable[..., Any], arguments: Mapping[str, Any], where: str) -> Any:
    """Call with checked arguments, and keep torch's precision; errors name the table, and the line if in a user's code.

    Raises:
        SpecError: the component refuses its arguments, or a user's component fails.
    """
    import torch  # takes a second

    standard = torch.get_default_dtype()
    try:
        made = target(**arguments)
        changed = torch.get_default_dtype() != standard
        return made.to(standard) if changed and isinstance(made, torch.nn.Module) else made
    except Exception as error:
        words = str(error)
        line = own_line(error)
        if line or is_in(str(getattr(target, "__module__", "")), entry_points.user_packages()):  # it may raise anything
            words = f"{type(error).__name__}: {error}{line}"
        elif not isinstance(error, ValueError | RuntimeError | FileNotFoundError):  # RuntimeError: torch out of memory
            raise
        raise SpecError(f"{where}: {words}") from error
    finally:
        torch.set_default_dtype(standard)


def own_line(error: BaseException) -> str:
    """The line of a user's package that raised an exception, in brackets; empty if none of them did."""
    users = entry_points.user_packages()
    own = [
        f"{frame.f_code.co_filename}, line {line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_in(frame.f_globals.get("__name__", ""), users)
    ]
    return f" ({own[-1]})" if own else ""


@contextmanager
def errors_in(where: object, *kinds: type[Exception]) -> Iterator[None]:
    """Prefix an error's message with the file or table that it concerns.

    Raises:
        SpecError: for a SpecError, and for an error of these kinds.
    """
    prefixed: tuple[type[Exception], ...] = (SpecError, *kinds)
    try:
        yield
    except prefixed as error:
        raise SpecError(f"{where}: {getattr(error, 'strerror', None) or error}") from error


@contextmanager
def users_errors() -> Iterator[None]:
    """Turn an exception that a user's own code raises into a SpecError; fedgauge's own faults keep their traceback."""
    try:
        yield
    except (Exception, SystemExit) as error:  # which would end a command with a status of its own
        if isinstance(error, SpecError) or not (line := own_line(error)):
            raise
        raise SpecError(f"{type(error).__name__}: {' '.join(str(error).split())}{line}: {MEND}") from error


def resolve(table: Table, where: str, kind: ComponentKind) -> Callable[..., Any]:
    """Return the function or class that a table's `use` names.

    Raises:
        SpecError: no such component, not allowed here, or not of this kind.
    """
    name = table.get("use")
    if not isinstance(name, str) or not name:
        raise SpecError(f'{where}: needs use = "name", got {name!r}; {_choices("", kind)}')
    entry = None if ":" in name else _entry(name, where, kind)
    own, value = entry is not None and entry.own, entry.value if entry else name
    module = value.partition(":")[0]
    if entry is None:
        if not is_in(module, allowed()):
            package = module.split(".")[0]
            flag = f": use --allow {package} on the command line, or set {ALLOW}={package}"
            advice = flag if package.isidentifier() and package != OWN else ""
            raise SpecError(f"{where}: use = {name!r} is not allowed here; {_choices(name, kind)}{advice}")
        for folder in os.environ.get(ALLOW_PATH, "").split(os.pathsep):
            if folder and folder not in sys.path:
                sys.path.append(folder)  # at the end, so that it hides no other package
    import torch  # takes a second

    standard = torch.get_default_dtype()
    try:
        target = pkgutil.resolve_name(value)
        fits = own or kind.admits_outside(target, (module.split(".")[0],) if entry else allowed())
    except (Exception, SystemExit) as error:  # a user's module and annotations may raise anything
        if own:
            raise
        reason = f"{type(error).__name__}: {error}{own_line(error)}"
        raise SpecError(f"{where}: {name!r} cannot be imported: {reason}") from error
    finally:
        torch.set_default_dtype(standard)  # which a user's module may change for all of the process
    if not fits:
        raise SpecError(f"{where}: {name!r} is not {kind.noun}: {_instead(target, kind, module)}")
    return typing.cast(Callable[..., Any], target)


def _instead(target: Any, kind: ComponentKind, module: str) -> str:
    """Suggest what to name instead of an object that is no component of this kind."""
    expected = kind.outside or (kind.type,)
    home, name = str(getattr(target, "__module__", "")), getattr(target, "__qualname__", "")
    if isinstance(target, expected):
        return f"it is built already: name the class {type(target).__name__}, or a function that returns such an object"
    fits = issubclass(target, expected) if inspect.isclass(target) else inspect.isfunction(target)
    if fits and home.split(".")[0] != OWN and not is_in(home, allowed()):
        return f'{module} only imports it: use = "{home}:{name}", with --allow {home.split(".")[0]}'
    words = " or ".join(map(_named, expected))
    return f"expected {words}, or a function -> {words}"


def is_own(table: Table, kind: ComponentKind) -> bool:
    return any(entry.own and entry.name == table.get("use") for entry in kind.entries())


def _entry(name: str, where: str, kind: ComponentKind) -> Entry:
    """The registered component of a short name; no plug-in replaces fedgauge's own."""
    found = [entry for entry in kind.entries() if entry.name == name]
    if not found:
        raise SpecError(f"{where}: unknown component {name!r}; {_choices(name, kind)}")
    if not found[0].own and len(found) > 1:
        packages = " and ".join(entry.package for entry in found)
        raise SpecError(f"{where}: {name!r} is registered by {packages}: uninstall all but one of them")
    return found[0]


def _choices(name: str, kind: ComponentKind) -> str:
    """The short name nearest to this one, or else all of them."""
    near = get_close_matches(name.rpartition(":")[2], kind.names(), 1, 0.6)
    return f"did you mean {near[0]!r}?" if near else f"{kind.noun} is one of {', '.join(kind.names())}"


def _named(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def check_arguments(
    target: Callable[..., Any],
    arguments: Table,
    where: str,
    offered: Mapping[str, Any] | None = None,
    more_keys: Sequence[str] = (),
) -> Mapping[str, Any]:
    """Arguments checked against a callable's signature and type hints, and completed from what is offered.

    Raises:
        SpecError: an argument is unknown, missing or of another type.
    """
    offered = offered or {}
    any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = {name: p for name, p in inspect.signature(target).parameters.items() if p.kind not in any_number}
    # a parameter with a default is the component's own argument, even if something of its name is offered
    given = {name for name, p in parameters.items() if name in offered and p.default is p.empty}
    allowed = [name for name in parameters if name not in given]
    for name in arguments:
        if name not in allowed:
            choices = [*allowed, *(b for b in more_keys if b not in allowed)]
            near = "".join(f"; did you mean {key!r}?" for key in get_close_matches(name, choices, 1))
            raise SpecError(f"{where}: unknown key {name!r} (it has: {', '.join(choices) or 'none'}){near}")
    hints = _hints(target)
    checked: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if name in arguments:
            checked[name] = coerce(arguments[name], hints.get(name, Any), f"{where}: {name}")
        elif name in given:
            checked[name] = offered[name]
        elif parameter.default is parameter.empty:
            raise SpecError(f"{where}: needs the key {name!r}")
    return checked


def _hints(target: Callable[..., Any]) -> Mapping[str, Any]:
    target = inspect.unwrap(target)  # of what is cached, as its signature is
    if not inspect.isclass(target) and not inspect.isfunction(target):
        return {}
    return typing.get_type_hints(target.__init__ if inspect.isclass(target) else target, include_extras=True)


def coerce(value: Any, hint: Any, where: str) -> Any:
    """Convert a value to its type hint (a float from an int, a tuple from a list).

    Raises:
        SpecError: it does not fit.
    """
    if hint is Any:
        return value
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        options = [option for option in inner if option is not type(None)]
        if len(options) == 1:
            return value if value is None else coerce(value, options[0], where)
        for option in inner:
            with suppress(SpecError):
                return coerce(value, option, where)
    elif origin is Annotated:
        found = coerce(value, inner[0], where)
        for bound in inner[1:]:
            if isinstance(bound, Range) and not bound.holds(found):
                raise SpecError(f"{where} must be {bound.words}, got {value!r}")
        return found
    elif origin is Literal:
        if any(value == i and type(value) is type(i) for i in inner):
            return value
    elif hint is int and isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise SpecError(f"{where} must fit in 64 bits, got {value}")  # as the ledger's and torch's integers do
    elif hint is Path and isinstance(value, str):
        return Path(value)
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) <= sys.float_info.max:
            raise SpecError(f"{where} must be a finite number, got {value!r}")
        return float(value)
    elif origin in (tuple, list, Sequence) and isinstance(value, list | tuple):
        if _any_length(hint) or len(value) == len(inner):
            return tuple(coerce(item, inner[0], f"{where}[{i}]") for i, item in enumerate(value))
    elif isinstance(hint, type) and is_dataclass(hint) and isinstance(value, dict):
        return settings_of(hint, value, where)
    elif origin in (dict, Mapping) and isinstance(value, Mapping):
        return {key: coerce(item, inner[1], f"{where}: {key}") for key, item in value.items()}
    elif isinstance(hint, type) and isinstance(value, hint) and isinstance(value, bool) <= (hint is bool):
        return value
    raise SpecError(f"{where} must be {spell(hint)}, got {value!r}")


def _any_length(hint: Any) -> bool:
    return typing.get_origin(hint) is not tuple or typing.get_args(hint)[-1] is ...


def spell(hint: Any) -> str:
    """Describe a type hint: an integer, one of 'a', 'b'."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, inner))
    if origin in (Union, types.UnionType):
        return " or ".join(spell(i) for i in inner if i is not type(None))
    if origin is Annotated:
        return spell(inner[0])
    if origin in (tuple, list, Sequence):
        return f"a list{'' if _any_length(hint) else f' of {len(inner)}'}, each {spell(inner[0])}"
    if origin in (dict, Mapping):
        return "a table"
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", dict: "a table"}
    return {**names, list: "a list", Path: "a path"}.get(hint, getattr(hint, "__name__", str(hint)))


def settings_of(kind: type[Settings], value: Any, where: str, more_keys: Sequence[str] = ()) -> Settings:
    """A dataclass of settings from a table; SpecError, which also names other valid keys, if it does not fit."""
    found: Settings = call(kind, check_arguments(kind, coerce(value, dict, where), where, more_keys=more_keys), where)
    return found


@dataclass(frozen=True)
class Range:
    """Numbers that a setting may have, as a part of its type: `Annotated[int, Range("at least 2", lambda n: n >= 2)]`.

    `coerce` checks it for every argument of a component, `Checked` for the fields of a dataclass.
    """

    words: str
    holds: Callable[[float], bool]


Count = Annotated[int, Range("at least 1", lambda n: n >= 1)]
Natural = Annotated[int, Range("at least 0", lambda n: n >= 0)]
NotNegative = Annotated[float, Range("at least 0", lambda v: v >= 0)]
Positive = Annotated[float, Range("above 0", lambda v: v > 0)]
Share = Annotated[float, Range("above 0 and at most 1", lambda v: 0 < v <= 1)]
Part = Annotated[float, Range("above 0 and below 1", lambda v: 0 < v < 1)]
Proportion = Annotated[float, Range("from 0 to 1", lambda v: 0 <= v <= 1)]
Fraction = Annotated[float, Range("at least 0 and below 1", lambda v: 0 <= v < 1)]


class Checked:
    """A dataclass with fields that are checked against the ranges in their types; None passes.

    Example:
        >>> @dataclass(frozen=True)
        ... class noise(Checked):
        ...     scale: Positive
        >>> noise(0.0)
        Traceback (most recent call last):
        ValueError: scale must be above 0, got 0.0
    """

    def __post_init__(self) -> None:
        for name, bound in _ranges(type(self)):  # type: ignore[arg-type]  # mypy takes a class's hash for its objects'
            value = getattr(self, name)
            if value is not None and not bound.holds(value):
                raise ValueError(f"{name} must be {bound.words}, got {value}")


@cache
def _ranges(kind: type[Any]) -> list[tuple[str, Range]]:
    found: list[tuple[str, Range]] = []
    for each in fields(kind):
        several = typing.get_origin(each.type) in (Union, types.UnionType)
        options = typing.get_args(each.type) if several else (each.type,)
        found += [(each.name, bound) for option in options for bound in getattr(option, "__metadata__", ())]
    return found
