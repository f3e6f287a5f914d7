"""MkDocs hooks: take the pages of docs/ and of the root from their places in the repository, so that links work in both."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath
from tempfile import TemporaryDirectory

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbclient import NotebookClient
from nbconvert import MarkdownExporter
from traitlets.config import Config

ROOT = Path(__file__).resolve().parents[2]
OTHERS = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md", "simulations/**/*.md")
LINK = re.compile(r"\[(?P<words>[^\]]*)\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")


def pages() -> list[str]:
    """Return every page of the site as a path in the repository."""
    found = [path for pattern in ("docs/**/*.md", "docs/**/*.ipynb", *OTHERS) for path in ROOT.glob(pattern)]
    return sorted(path.relative_to(ROOT).as_posix() for path in found if ".ipynb_checkpoints" not in path.parts)


def linked(page: str) -> Iterator[tuple[re.Match[str], Path]]:
    """Yield the links of a page with their targets in the repository."""
    for link in LINK.finditer((ROOT / page).read_text()):
        yield link, ROOT / normpath(PurePosixPath(page).parent / link["target"])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the pages, the files that they show and link to, and the theme's files, instead of the files of docs/."""
    chosen = {*pages(), *config.extra_css}
    chosen |= {path.relative_to(ROOT).as_posix() for page in pages() for _, path in linked(page) if path.is_file()}
    kept = [file for file in files if not (file.abs_src_path or "").startswith(f"{ROOT}/docs/")]
    for name in sorted(chosen):
        if name.endswith(".ipynb"):
            kept += notebook(config, name)
        else:
            kept.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return Files(kept)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adapt a page to MkDocs: drop links to folders, link notebooks' pages, and unescape bars in a table's code."""
    place = PurePosixPath(page.file.src_uri).parent

    def kept(link: re.Match[str]) -> str:
        if (ROOT / normpath(place / link["target"])).is_dir():
            return link["words"]
        return re.sub(r"\.ipynb(?=[#)])", ".md", link[0])

    def unescaped(row: re.Match[str]) -> str:
        return re.sub(r"`[^`]+`", lambda code: code[0].replace(r"\|", "|"), row[0])

    return re.sub(r"^\|.*$", unescaped, LINK.sub(kept, markdown), flags=re.MULTILINE)


def notebook(config: MkDocsConfig, name: str) -> list[File]:
    """Return a notebook's page and its pictures; execute it first, unless `extra` says otherwise."""
    notes = nbformat.read(ROOT / name, as_version=4)
    if config.extra.get("execute_notebooks", True):
        execute(notes)
    text, resources = MarkdownExporter().from_notebook_node(
        notes, {"output_files_dir": f"{PurePosixPath(name).stem}-outputs"}
    )
    folder = PurePosixPath(name).parent
    pictures = [File.generated(config, str(folder / k), content=v) for k, v in resources["outputs"].items()]
    return [File.generated(config, name.removesuffix(".ipynb") + ".md", content=text), *pictures]


def execute(notes: nbformat.NotebookNode) -> None:
    """Fill in a notebook's outputs, in a temporary folder, with this environment's Python and programs."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    # a widget for progress is missed on standard error, with paths of this machine
    own = {"PATH": programs, "PYTHONWARNINGS": "ignore:IProgress not found", "OMP_NUM_THREADS": "1"}
    with TemporaryDirectory() as folder, TemporaryDirectory() as sockets:  # other users could reach a port
        private = Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
        place = {"metadata": {"path": folder}}
        NotebookClient(notes, timeout=900, resources=place, config=private).execute(env={**os.environ, **own})
