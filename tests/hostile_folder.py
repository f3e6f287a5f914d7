"""A folder in which somebody else has put a package called fedgauge."""

from pathlib import Path


def hostile(folder: Path) -> Path:
    """The folder, made; who imports its package leaves the file `ran` there."""
    package = folder / "fedgauge"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\nraise ImportError('theirs')\n")
    return folder
