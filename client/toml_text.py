"""TOML that somebody else wrote: parsed to a limit of size and depth."""

import tomllib
from typing import Any

MOST = 4 << 20  # bytes
_DEEPEST = 32  # tables and lists within each other


def parse(data: bytes) -> dict[str, Any]:
    """The tables of a file; TOMLDecodeError says what is wrong, UnicodeDecodeError that it is no text."""
    if len(data) > MOST:
        raise tomllib.TOMLDecodeError(f"it has {len(data)} bytes, expected at most {MOST}")
    text = data.decode()
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists within lists
        raise tomllib.TOMLDecodeError(str(error)) from None
    level: list[Any] = [tables]
    for _ in range(_DEEPEST):
        inner = [list(value.values()) if isinstance(value, dict) else value for value in level]
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return tables
    raise tomllib.TOMLDecodeError(f"its tables and lists lie more than {_DEEPEST} deep in each other")
