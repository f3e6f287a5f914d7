"""Generated blocks of a page, and text that Markdown shows as it is."""

import re
from collections.abc import Callable


def fill_blocks(page: str, kind: str, block: Callable[[str], str]) -> str:
    """Return a page with `block(NAME)` between each `<!-- generated: KIND NAME -->` and `<!-- end -->`."""

    def filled(found: re.Match[str]) -> str:
        return f"{found['head']}\n{block(found['name'])}<!-- end -->"

    head = rf"(?P<head><!-- generated: {kind} (?P<name>[\w.]+) -->)"
    return re.sub(rf"{head}\n.*?<!-- end -->", filled, page, flags=re.DOTALL)


def escaped(text: str) -> str:
    """Escape text for a table's cell; code between backticks stays code."""
    parts = re.split(r"(`[^`]*`)", text)
    # an underscore within a word marks nothing up
    return "".join(
        part.replace("|", r"\|") if part.startswith("`") else re.sub(r"([\\|<*\[]|(?<!\w)_|_(?!\w))", r"\\\1", part)
        for part in parts
    )
