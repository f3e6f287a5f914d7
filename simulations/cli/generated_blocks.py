"""Blocks of a page in docs/ that are generated from the code, and the program that writes them again."""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path


def fill_blocks(page: str, kind: str, block: Callable[[str], str]) -> str:
    """A page with what `block` makes of each NAME between `<!-- generated: KIND NAME -->` and `<!-- end -->`."""

    def filled(found: re.Match[str]) -> str:
        return f"{found['head']}\n{block(found['name'])}<!-- end -->"

    head = rf"(?P<head><!-- generated: {kind} (?P<name>[\w.]+) -->)"
    return re.sub(rf"{head}\n.*?<!-- end -->", filled, page, flags=re.DOTALL)


def write_page(fill: Callable[[str], str], program: str, arguments: Sequence[str] | None) -> int:
    """Fill the blocks of the page that --write names."""
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--write", type=Path, metavar="PAGE", required=True, help="fill the marked blocks of this page")
    page: Path = parser.parse_args(arguments).write
    page.write_text(fill(page.read_text()))
    return 0
