"""The network that a server names, as a client builds it: it opens no path and fetches nothing.

A refusal is a fixed sentence, which reveals nothing of this machine, the owner's file or the data. The client's own log has
the reason.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from torch import nn

from fedgauge.client.components import Table, coerce, is_own, path_arguments
from fedgauge.client.data_folder import offline
from fedgauge.client.deployment.server_terms import NO_FILE, RequestRefused
from fedgauge.client.models.build import MODEL, build_model, changes_of

NOT_BUILT = (
    "[model]: this client does not build it: its name is unknown here or of a package that the owner does not allow, an "
    "argument does not fit, or it reads other data; the client's own log says what"
)
TOO_LARGE = "[model]: it has more entries than this client's owner allows"
_WORD = r"\w(?:[\w.-]*\w)?"
_NAME = re.compile(_WORD)
_HUB_NAME = re.compile(rf"{_WORD}(?:/{_WORD})?")  # owner/model
_USED = re.compile(r"\w+(?:\.\w+)*(?::\w+(?:\.\w+)*)?")  # a component: name, or module:name


def build_servers_model(table: Table, offered: Mapping[str, Any], seed: int, most: int) -> nn.Module:
    """The network of a server's [model], in the mode that it asks for; call it where the owner's packages are allowed.

    Args:
        offered: of the owner's dataset.
        most: entries of its parameters and buffers.

    Raises:
        RequestRefused: with a fixed sentence; its cause is only for the owner.
    """
    table = dict(table)
    built: nn.Module | None = None
    try:
        mode = coerce(table.pop("mode", "eval"), Literal["train", "eval"], "[model]: mode")
        if not _names_paths(table):
            with offline():
                built = build_model(table, offered, seed, more_keys=("mode",)).train(mode == "train")
    except Exception as error:  # of any kind: which one it is may depend on this machine's files
        raise RequestRefused(NOT_BUILT) from error
    if built is None or sum(t.numel() for t in (*built.parameters(), *built.buffers())) > most:
        raise RequestRefused(NO_FILE if built is None else TOO_LARGE)
    return built


def _names_paths(table: Table) -> bool:
    """Check for arguments that are, or may be read as, paths."""
    parts = [(table, MODEL), *((change, kind) for _, change, kind in changes_of(table))]
    # in fedgauge's own, only a name on the hub may have a slash
    names = _HUB_NAME if all(is_own(part, kind) for part, kind in parts) else _NAME
    texts = [(key, value) for key, value in _leaves(table) if isinstance(value, str)]
    plain = all((_USED if key == "use" else names).fullmatch(value) for key, value in texts)
    return not plain or any(path_arguments(part, kind) for part, kind in parts)


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values of a table at any depth, with their keys; keys also count as values."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield "", name
            yield from _leaves(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, key)
    else:
        yield key, value
