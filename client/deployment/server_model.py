"""The network that a server names, as a client builds it: it opens no path, fetches nothing, and knows its size beforehand.

A refusal is a fixed sentence, so that it tells the server nothing of this machine, of the owner's file or of the data; what
went wrong stands in the client's own log.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

from fedgauge.client.components import SpecError, Table, coerce, is_own, path_arguments
from fedgauge.client.deployment.terms import NO_FILE, RequestRefused
from fedgauge.client.local_data import may_download
from fedgauge.client.models.bounds import SizeBound, TooLarge
from fedgauge.client.models.build import MODEL, build_model, changes_of

MOST_NUMBER = 2**24  # of an argument: no layer is wider, no network deeper
NOT_BUILT = (
    "[model]: this client does not build it: its name is unknown here or of a package that the owner does not allow, an "
    "argument does not fit, or it reads other data; the client's own log says what"
)
TOO_LARGE = "[model]: it has more entries or layers than this client's owner allows"
BIG_NUMBER = f"[model]: a number in it is above {MOST_NUMBER}"
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
        RequestRefused: with a fixed sentence; its cause is for the owner alone.
    """
    table, bound = dict(table), SizeBound(most)
    downloads = may_download.set(False)
    try:
        mode = coerce(table.pop("mode", "eval"), Literal["train", "eval"], "[model]: mode")
        own = _refuse_paths(table)
        with bound.watching():
            _try_shapes(table, offered, seed, bound, own)
            built = build_model(table, "[model]", offered, seed, beside=("mode",)).train(mode == "train")
        bound.check(built)
        return built
    except RequestRefused:
        raise
    except TooLarge as error:
        raise RequestRefused(TOO_LARGE) from error
    except Exception as error:  # of any kind: which one it is may depend on this machine's files
        raise RequestRefused(NOT_BUILT) from error
    finally:
        may_download.reset(downloads)


def _refuse_paths(table: Table) -> bool:
    """Refuse arguments that are, or may be read as, paths, and numbers beyond every network's; whether all is fedgauge's own."""
    parts = [(table, MODEL), *((change, kind) for _, change, kind in changes_of(table, "[model]"))]
    own = all(is_own(part, kind) for part, kind in parts)
    names = _HUB_NAME if own else _NAME  # in fedgauge's own, only a name on the hub may have a slash
    for key, value in _leaves(table):
        if isinstance(value, str) and not (_USED if key == "use" else names).fullmatch(value):
            raise RequestRefused(NO_FILE)
        if isinstance(value, int) and abs(value) > MOST_NUMBER:
            raise RequestRefused(BIG_NUMBER)
    if any(path_arguments(part, kind) for part, kind in parts):
        raise RequestRefused(NO_FILE)
    return own


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """All values of a table at any depth, with their keys; keys count as values, too."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield "", name
            yield from _leaves(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, key)
    else:
        yield key, value


def _try_shapes(table: Table, offered: Mapping[str, Any], seed: int, bound: SizeBound, own: bool) -> None:
    """Build it once without values, so that its size is known before memory is taken."""
    try:
        with torch.device("meta"):
            bound.check(build_model(table, "[model]", offered, seed, beside=("mode",)))
    except (SpecError, NotImplementedError):  # an allowed package may look at values: the meta device has none
        if own:
            raise
