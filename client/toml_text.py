"""TOML that somebody else wrote: parsed to a limit of size and depth."""

import json
import tomllib
from typing import Any

MOST = 1 << 20  # bytes


def parse(data: bytes) -> dict[str, Any]:
    """Return the tables of a file; TOMLDecodeError says what is wrong, UnicodeDecodeError that it is no text."""
    if len(data) > MOST:
        raise tomllib.TOMLDecodeError(f"it has {len(data)} bytes, expected at most {MOST}")
    text = data.decode()
    try:
        tables = tomllib.loads(text)
        json.dumps(tables, default=str)  # fails for what cannot be written again: numbers and nesting without an end
    except (ValueError, RecursionError) as error:
        raise tomllib.TOMLDecodeError(str(error)) from None
    return tables
