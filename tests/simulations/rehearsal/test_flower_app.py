"""The copy of an app's folder in which it runs."""

from pathlib import Path

from fedgauge.simulations.rehearsal.flower_app import MANY, SMALL, mirror


def test_code_is_copied_and_data_and_environments_are_linked(tmp_path: Path) -> None:
    app, copy = tmp_path / "app", tmp_path / "copy"
    for folder in ("src/theirs", "venv/lib", ".git", "images"):
        (app / folder).mkdir(parents=True)
    copy.mkdir()
    (app / "src/theirs/app.py").write_text("x = 1")
    (app / "large.bin").write_bytes(bytes(SMALL + 1))
    (app / "venv/pyvenv.cfg").touch()
    for i in range(MANY + 1):
        (app / "images" / f"{i}.png").touch()
    mirror(app, copy)
    linked = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_symlink()}
    assert linked == {"venv", ".git", "images", "large.bin"}
    (copy / "src/theirs/app.py").write_text("x = 2")
    assert (app / "src/theirs/app.py").read_text() == "x = 1"
