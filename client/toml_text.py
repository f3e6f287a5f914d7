"""TOML that somebody else wrote: parsed to a limit of size and depth."""

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

MOST = 1 << 20  # bytes of a file, for its reader
_DEEPEST = 32  # names joined by dots
_QUOTED = r"""(?:"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
# more names joined by dots, for each of which tomllib goes through all those before; what stands in a text counts, too
_LONG_KEY = re.compile(
    rf"(?:(?<![\w-])[\w-]++|(?<![^\s\[{{,]){_QUOTED})(?:[ \t]*+\.[ \t]*+(?:[\w-]++|{_QUOTED})){{{_DEEPEST}}}", re.ASCII
)


def parse(data: bytes) -> Mapping[str, Any]:
    """Return the tables of a file; TOMLDecodeError says what is wrong, UnicodeDecodeError that it is no text."""
    text = data.decode("utf-8-sig")  # editors on Windows begin a file with its mark
    if _LONG_KEY.search(text):
        raise tomllib.TOMLDecodeError(f"more than {_DEEPEST} names are joined by dots")
    try:
        tables = tomllib.loads(text)
        json.dumps(tables, default=str)  # fails for what cannot be written again: numbers and nesting without an end
    except (ValueError, RecursionError) as error:
        raise tomllib.TOMLDecodeError(f"it is not valid TOML: {error}") from None
    return tables
