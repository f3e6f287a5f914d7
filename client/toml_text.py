"""TOML that somebody else wrote: parsed to a limit of size and depth."""

import re
import tomllib
from typing import Any

MOST = 1 << 20  # bytes; a table 32 deep takes 500 times its bytes of memory
_DEEPEST = 32  # tables and lists within each other
_QUOTED = r"""(?:"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
# more names joined by dots, for each of which tomllib goes through all those before; what stands in a text counts, too
_LONG_KEY = re.compile(
    rf"(?:(?<![\w-])[\w-]++|(?<![^\s\[{{,]){_QUOTED})(?:[ \t]*+\.[ \t]*+(?:[\w-]++|{_QUOTED})){{{_DEEPEST}}}", re.ASCII
)


def parse(data: bytes) -> dict[str, Any]:
    """The tables of a file; TOMLDecodeError says what is wrong, UnicodeDecodeError that it is no text."""
    if len(data) > MOST:
        raise tomllib.TOMLDecodeError(f"it has {len(data)} bytes, expected at most {MOST}")
    text = data.decode()
    if _LONG_KEY.search(text):
        raise tomllib.TOMLDecodeError(f"more than {_DEEPEST} names are joined by dots")
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists within lists
        raise tomllib.TOMLDecodeError(str(error)) from None
    level: list[Any] = [tables]
    for _ in range(_DEEPEST):
        inner = [item for items in level for item in (items.values() if isinstance(items, dict) else items)]
        # of thousands of hexadecimal digits Python reads a whole number, and then refuses to write it
        if any(isinstance(item, int) and item.bit_length() > 64 for item in inner):
            raise tomllib.TOMLDecodeError("a whole number has more than 64 bits")
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return tables
    raise tomllib.TOMLDecodeError(f"its tables and lists lie more than {_DEEPEST} deep in each other")
