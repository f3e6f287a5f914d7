"""Figures for papers: what is drawn is the analysis, in letters that can be read, and the same bytes each time."""

import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.collections import FillBetweenPolyCollection, LineCollection, QuadMesh
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from fedgauge.attacks.grading.scores import ScoreRecord
from fedgauge.attacks.plan import AttackPlan, PlannedAttack
from fedgauge.client.federation import Federation
from fedgauge.server.store.ledger_rows import Participation
from fedgauge.server.store.run import Run
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.formatting import LABELS
from fedgauge.server.views.leakage import leakage
from fedgauge.server.views.scores import Scores
from fedgauge.simulations.cli.main import main
from fedgauge.simulations.reports.figures import (
    MUTED,
    PURPLE,
    LeakPoint,
    PaperFigure,
    TradeoffPoint,
    _drawings,
    _RunFigures,
    pareto,
    worst_psnr,
    write_figures,
)

ROOT = Path(__file__).resolve().parents[2]
METRICS = ("psnr", "ssim", "mse", "identified", "label_accuracy")
Grade = Callable[[str, int, int], Mapping[str, float | None]]
SVG = "{http://www.w3.org/2000/svg}"


def grade(attack: str, round: int, client: int) -> Mapping[str, float | None]:
    """Values that differ by attack, round and client."""
    if attack == "bayes_limit":
        return {"psnr": 33.0, "mse": 5e-4}
    psnr = {"first": 25.0, "second": 20.0}.get(attack, 10.0) + 2 * round + client
    return {
        "psnr": psnr,
        "ssim": psnr / 40,
        "mse": 10 ** (-psnr / 10),
        "identified": float(attack in ("first", "second") and (round + client) % 2),
        "label_accuracy": 0.5,
    }


def only_psnr(attack: str, round: int, client: int) -> Mapping[str, float | None]:
    return {"psnr": grade(attack, round, client)["psnr"]}


def graded(
    folder: Path,
    how: Grade = grade,
    attacks: Sequence[str] = ("first", "second"),
    clients: int = 3,
    rounds: int = 3,
    accuracy: float = 0.3,
    limit: bool = True,
) -> Run:
    """A run whose attacks, baselines and limit were graded so; what came back is the negative of the truth."""
    chosen = Scenario.from_tables(
        {
            "seed": 1,
            "rounds": rounds,
            "clients": clients,
            "data": {"use": "mnist5k", "batch_size": 1, "auxiliary": 50},
            "model": {"use": "mlp", "hidden": [8]},
            "chain": [{"use": "local_sgd", "rate": 0.1}],
            "audit": {"executor": "local"},
        }
    )
    names = [*attacks, "mean_image", "random_image", *["bayes_limit"] * limit]
    plan = AttackPlan(tuple(PlannedAttack(name, {"use": "analytic"}) for name in names))
    run, federation = Run.create(folder, chosen), Federation(chosen.protocol)
    with run.ledger() as ledger:
        ledger.add_attacks(plan, {name: f"honest server; {name} knows it all" for name in names})
        ledger.record_round(0, 0.1, 2.3, 0.1, 0.0)
        for r in range(1, rounds + 1):
            ledger.record_intake(r, [Participation(c, "accepted", "", 1, f"{r}-{c}") for c in range(clients)], plan)
            ledger.record_round(r, accuracy * r / rounds, 2.0, 1.0, 0.01)
        while (lease := ledger.lease()) is not None:
            name, r = lease.attack.name, lease.round
            rows = {
                c: [ScoreRecord(r, c, name, 0, m, v, "converged", 0.1) for m, v in how(name, r, c).items()]
                for c in lease.clients
            }
            ledger.finish(lease, rows)
            for c in lease.clients if name in attacks else ():
                run.write_reconstruction(r, c, name, {"x": 1 - federation.batch_at(c, r).x})
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return graded(tmp_path_factory.mktemp("runs") / "graded")


@pytest.fixture(scope="module")
def written(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("figures")
    paths, missing = write_figures([run], folder)
    assert missing == []
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in paths)
    return folder


def drawn(run: Run) -> dict[str, Figure]:
    return {drawing.name: drawing.figure for drawing in _drawings(_RunFigures.read(run))}


def points(axes: Axes, color: str, dash: str | None = None) -> list[list[tuple[float, float]]]:
    """The lines of a colour, as drawn."""
    return [
        [(float(x), float(y)) for x, y in line.get_xydata()]
        for line in axes.get_lines()
        if to_hex(line.get_color()) == color and (dash is None or line.get_linestyle() == dash)
    ]


def named(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


BLUE, VERMILION = "#0072b2", "#d55e00"


# -------------------------------------------------------------------------------------------------------------- files


def test_each_plot_is_a_file_of_both_kinds_for_its_owner_only(written: Path) -> None:
    names = [*(f"leakage-{m}" for m in METRICS), "success", "clients", "gallery"]
    assert sorted(p.name for p in written.iterdir()) == sorted(f"{n}.{kind}" for n in names for kind in ("png", "svg"))
    assert {p.stat().st_mode & 0o777 for p in written.iterdir()} == {0o600}


@pytest.mark.slow
def test_equal_ledgers_give_equal_bytes_in_another_process(run: Run, written: Path, tmp_path: Path) -> None:
    """Under another style and hash seed; and pyplot, which would keep every figure, knows of none."""
    program = f"""
import sys
from pathlib import Path
from fedgauge.server.store.run import Run
from fedgauge.simulations.reports.figures import write_figures
write_figures([Run.open(Path({str(run.folder)!r}))], Path({str(tmp_path)!r}))
pyplot = sys.modules.get("matplotlib.pyplot")  # others may have imported it
assert pyplot is None or pyplot.get_fignums() == []
"""
    style = tmp_path.parent / "matplotlibrc"
    style.write_text("axes.facecolor: red\nfont.size: 30\n")
    environment = {"PYTHONHASHSEED": "7", "MATPLOTLIBRC": str(style), "PATH": "", "MPLCONFIGDIR": str(tmp_path.parent)}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True, timeout=300)
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in written.iterdir()}
    assert [p.name for p in tmp_path.iterdir() if p.read_bytes() != (written / p.name).read_bytes()] == []


def test_a_figure_fits_a_column_and_its_letters_can_be_read(written: Path) -> None:
    for path in written.glob("*.png"):
        with Image.open(path) as image:
            assert image.width == 990, path
            assert 300 < image.height < 2000, path
    for path in written.glob("*.svg"):
        page = ElementTree.parse(path).getroot()
        assert float(page.attrib["width"].removesuffix("pt")) == pytest.approx(3.3 * 72)
        sizes = [float(s) for e in page.iter(f"{SVG}text") for s in re.findall(r"([\d.]+)px", e.attrib["style"])]
        assert len(sizes) > 5, f"{path}: text is text"
        assert min(sizes) >= 7
        text = path.read_text()
        assert "dc:date" not in text
        assert "http://www.w3.org/1999/xlink" in text and not re.search(r'href="(?!#|data:)', text), "it loads nothing"


def test_a_file_says_what_the_attackers_knew(written: Path) -> None:
    for path in written.iterdir():
        if path.suffix == ".svg":
            told = path.read_text()
        else:
            with Image.open(path) as image:
                told = str(image.info["Description"])
                assert "Software" not in image.info
        assert "first: honest server; first knows it all" in told


def test_the_style_of_others_is_as_it_was(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    write_figures([graded(tmp_path / "run", only_psnr)], tmp_path / "figures")
    assert dict(matplotlib.rcParams) == before


# ------------------------------------------------------------------------------------------------- leakage over rounds


@pytest.mark.parametrize("metric", METRICS)
def test_lines_are_the_analysis(run: Run, metric: str) -> None:
    axes, right = drawn(run)[f"leakage-{metric}"].axes
    with run.ledger() as ledger:
        leaks = [k for k in leakage(Scores.read(ledger), metric) if k.round is not None]
    for attack, color in (("first", BLUE), ("second", VERMILION)):
        own = [k for k in leaks if k.attack == attack]
        (mean,) = points(axes, color, "-")
        assert mean == [(k.round, k.mean) for k in own]
        worst = points(axes, color, ":")
        assert worst == ([] if metric == "identified" else [[(k.round, k.best) for k in own]])
    baselines = [[(k.round, k.mean) for k in leaks if k.attack == name] for name in ("mean_image", "random_image")]
    assert points(axes, MUTED) == baselines
    limits = [(k.round, k.mean) for k in leaks if k.attack == "bayes_limit"]
    assert points(axes, PURPLE) == ([limits] if limits else [])
    assert bool(limits) == (metric in ("psnr", "mse"))
    (accuracy,) = [line.get_xydata().tolist() for line in right.get_lines()]
    assert accuracy == [[r, pytest.approx(0.1 if r == 0 else 0.1 * r)] for r in range(4)]
    assert axes.get_ylabel() == LABELS[metric]


def test_bands_are_the_intervals(run: Run) -> None:
    axes = drawn(run)["leakage-psnr"].axes[0]
    with run.ledger() as ledger:
        leaks = [k for k in leakage(Scores.read(ledger), "psnr") if k.round and k.attack in ("first", "second")]
    bands = [c for c in axes.collections if isinstance(c, FillBetweenPolyCollection)]
    assert len(bands) == 2
    for band, attack in zip(bands, ("first", "second"), strict=True):
        corners = {tuple(v) for v in band.get_paths()[0].vertices.tolist()}
        assert {(k.round, v) for k in leaks if k.attack == attack for v in (k.low, k.high)} <= corners


def test_everything_drawn_has_a_name(run: Run) -> None:
    figures = drawn(run)
    limit = "Bayes limit, Gaussian prior fitted\nto the auxiliary images"
    common = ["first", "second", limit, "mean_image", "random_image"]
    tail = ["worst case", "95 % interval (3 clients)", "test accuracy (right)"]
    assert named(figures["leakage-psnr"]) == common + tail
    assert "95 % interval (Wilson)" in named(figures["leakage-identified"])
    assert "worst case" not in named(figures["leakage-identified"])
    assert named(figures["success"]) == ["first", "second", "mean_image", "random_image"]


def test_baselines_are_grey_and_dashed_each_in_its_own_way(run: Run) -> None:
    axes = drawn(run)["leakage-psnr"].axes[0]
    dashes = [line._unscaled_dash_pattern for line in axes.get_lines() if to_hex(line.get_color()) == MUTED]  # type: ignore[attr-defined]
    assert len(dashes) == len({str(d) for d in dashes}) == 2
    assert all(pattern is not None for _, pattern in dashes)


def test_an_exact_hit_is_drawn_at_the_cap(tmp_path: Path) -> None:
    def exact(attack: str, round: int, client: int) -> Mapping[str, float | None]:
        return {"psnr": math.inf if attack == "first" and client == 0 else 20.0}

    run = graded(tmp_path / "exact", exact, limit=False)
    figures = drawn(run)
    axes = figures["leakage-psnr"].axes[0]
    assert points(axes, BLUE, ":") == [[(r, 60.0) for r in (1, 2, 3)]]
    assert points(axes, BLUE, "-") == [[(r, pytest.approx(100 / 3)) for r in (1, 2, 3)]]
    assert points(figures["success"].axes[0], BLUE) == [
        [(t, 1.0 if t <= 20 else pytest.approx(1 / 3)) for t in range(10, 61)]
    ]
    assert write_figures([run], tmp_path / "figures")[1] == []


def test_one_client_has_no_band(tmp_path: Path) -> None:
    run = graded(tmp_path / "lone", only_psnr, clients=1)
    figures = drawn(run)
    assert list(figures["leakage-psnr"].axes[0].collections) == []
    assert not [name for name in named(figures["leakage-psnr"]) if "interval" in name]
    assert write_figures([run], tmp_path / "figures")[1] == []


def test_one_round_is_drawn_in_points_that_can_be_told_apart(tmp_path: Path) -> None:
    run = graded(tmp_path / "single", rounds=1)
    axes = drawn(run)["leakage-psnr"].axes[0]
    firsts, seconds = points(axes, BLUE), points(axes, VERMILION)
    assert [y for ((_, y),) in firsts] == [28.0, 29.0], "mean and worst case"
    assert [y for ((_, y),) in seconds] == [23.0, 24.0]
    assert firsts[0][0][0] != seconds[0][0][0], "side by side"
    with run.ledger() as ledger:
        bands = [
            (k.low, k.high) for k in leakage(Scores.read(ledger), "psnr") if k.round and k.attack in ("first", "second")
        ]
    bars = [c.get_segments()[0][:, 1].tolist() for c in axes.collections if isinstance(c, LineCollection)]
    assert bars == [pytest.approx(band) for band in bands]
    ((left, low), (end, high)) = points(axes, MUTED)[0]
    assert low == high == 13.0 and left < 1 < end, "a piece of a dashed line"
    assert axes.get_xlim()[1] >= end


def test_a_round_without_an_image_leaves_its_place_empty(tmp_path: Path) -> None:
    def failing(attack: str, round: int, client: int) -> Mapping[str, float | None]:
        return {"psnr": None if attack == "first" and round == 2 else 20.0}

    figures = drawn(graded(tmp_path / "failing", failing, limit=False))
    assert points(figures["leakage-psnr"].axes[0], BLUE, "-") == [[(1, 20.0), (3, 20.0)]]


# -------------------------------------------------------------------------------------------------- success, clients


def test_the_heat_map_is_the_worst_psnr_of_each_client_and_round(run: Run) -> None:
    axes = drawn(run)["clients"].axes[0]
    (mesh,) = [c for c in axes.collections if isinstance(c, QuadMesh)]
    expected = [[25.0 + 2 * r + c for r in (1, 2, 3)] for c in (0, 1, 2)]
    np.testing.assert_array_equal(np.asarray(mesh.get_array()), expected)
    assert [t.get_text() for t in axes.texts] == [f"{v:.0f}" for row in expected for v in row]
    assert axes.yaxis_inverted(), "client 0 above"


def test_who_was_not_graded_is_blank_and_baselines_are_no_leak(tmp_path: Path) -> None:
    def one(attack: str, round: int, client: int) -> Mapping[str, float | None]:
        if attack == "mean_image":
            return {"psnr": 50.0}
        return {"psnr": math.inf if (round, client) == (2, 1) else None}

    run = graded(tmp_path / "one", one, limit=False)
    with run.ledger() as ledger:
        worst = worst_psnr(Scores.read(ledger))
    assert len(worst) == 9
    assert {key for key, value in worst.items() if not math.isnan(value)} == {(1, 2)}
    assert worst[1, 2] == 60.0
    (mesh,) = [c for c in drawn(run)["clients"].axes[0].collections if isinstance(c, QuadMesh)]
    assert np.ma.count_masked(mesh.get_array()) == 8
    assert write_figures([run], tmp_path / "figures")[1] == []


def test_many_cells_stay_a_small_file(tmp_path: Path) -> None:
    run = graded(tmp_path / "large", lambda a, r, c: {"psnr": 10.0 + r % 7 + c}, ("first",), clients=20, rounds=120)
    write_figures([run], tmp_path / "figures")
    assert (tmp_path / "figures" / "clients.svg").stat().st_size < 300_000
    assert {p.name for p in (tmp_path / "figures").glob("*.svg")} == {
        "leakage-psnr.svg", "success.svg", "clients.svg", "gallery.svg"
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ gallery


def test_the_strip_shows_truths_over_what_came_back(run: Run) -> None:
    figure, federation = drawn(run)["gallery"], Federation(run.scenario().protocol)
    texts = [t.get_text() for t in figure.texts]
    columns = [re.match(r"round (\d+)\nclient (\d+)\n(leaked\nmost|hid\nbest|at\nrandom)$", t) for t in texts]
    chosen = [(int(m[1]), int(m[2])) for m in columns if m]
    assert len(chosen) == 6, "of nine examples"
    pictures = [axes.get_images()[0].get_array() for axes in figure.axes]
    assert len(pictures) == 6 * 3
    for k, (round, client) in enumerate(chosen):
        truth = federation.batch_at(client, round).x[0, 0]
        np.testing.assert_array_equal(pictures[3 * k], (truth * 255).round().byte().numpy())
        for tile in pictures[3 * k + 1 : 3 * k + 3]:
            np.testing.assert_array_equal(tile, ((1 - truth) * 255).round().byte().numpy())
        assert f"{25.0 + 2 * round + client:.1f}" in texts
    assert [t for t in texts if t in ("truth", "first, PSNR (dB)", "second, PSNR (dB)")] == [
        "truth", "first, PSNR (dB)", "second, PSNR (dB)"
    ]  # fmt: skip


def test_a_picture_that_is_gone_is_said_to_be(run: Run, tmp_path: Path) -> None:
    lost = graded(tmp_path / "lost", clients=1, rounds=1)
    lost.reconstruction(1, 0, "first").unlink()
    first = drawn(lost)["gallery"].axes[1]
    assert [t.get_text() for t in first.texts] == ["no\nimage"]
    assert first.get_images() == []


# --------------------------------------------------------------------------------------------------------- comparison


def point(run: int, accuracy: float, leak: float, attack: str = "first") -> TradeoffPoint:
    return TradeoffPoint(run, accuracy, LeakPoint(attack, 0, leak, leak, None, 3))


POINTS = st.lists(
    st.builds(
        point,
        st.integers(0, 5),
        st.integers(0, 4).map(float),
        st.integers(0, 4).map(float),
        st.sampled_from(["first", "second"]),
    ),
    max_size=12,
)


@given(POINTS, st.booleans())
def test_the_front_is_what_nothing_dominates(drawn: list[TradeoffPoint], higher: bool) -> None:
    """Against its definition, of each run's strongest attack; a run has one accuracy."""
    accuracy = {p.run: p.accuracy for p in drawn}
    drawn = [point(p.run, accuracy[p.run], p.leakage, p.spot.attack) for p in drawn]
    sign = 1 if higher else -1
    leaks = {r: max(sign * p.leakage for p in drawn if p.run == r) for r in accuracy}

    def dominated(run: int) -> bool:
        return any(
            accuracy[o] >= accuracy[run]
            and leaks[o] <= leaks[run]
            and (accuracy[o], leaks[o]) != (accuracy[run], leaks[run])
            for o in accuracy
        )

    front = pareto(drawn, higher)
    places = [(p.accuracy, sign * p.leakage) for p in front]
    assert places == sorted({(accuracy[r], leaks[r]) for r in accuracy if not dominated(r)})


def test_runs_are_compared_by_what_they_end_with(tmp_path: Path) -> None:
    run = graded(tmp_path / "graded", only_psnr)
    weaker = lambda attack, round, client: {"psnr": {"first": 12.0, "second": 15.0}.get(attack, 11.0)}  # noqa: E731
    other = graded(tmp_path / "other" / "graded", weaker, accuracy=0.2, limit=False)
    paths, missing = write_figures([run, other, run], tmp_path / "figures")
    assert missing == []
    folder = tmp_path / "figures"
    assert {p.name for p in folder.iterdir()} == {"graded", "graded-2", "utility-psnr.png", "utility-psnr.svg"}
    assert {p.parent for p in paths} == {folder, folder / "graded", folder / "graded-2"}
    page = ElementTree.parse(folder / "utility-psnr.svg").getroot()
    words = ["".join(e.itertext()) for e in page.iter(f"{SVG}text")]
    for needed in ("1  graded", "2  graded", "Pareto front (strongest attacks)", "best baseline", "first", "second"):
        assert needed in words
    assert "bayes_limit" not in words, "a limit is no attack"


# ------------------------------------------------------------------------------------------------------- other states


def test_without_scores_nothing_is_drawn_and_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    silent = graded(tmp_path / "silent", lambda attack, round, client: {})
    assert main(["report", str(silent.folder), "--figures", str(tmp_path / "figures")]) == 0
    told = capsys.readouterr()
    assert told.out == f"{silent.folder / 'report.html'}\n"
    assert told.err == "fedgauge: silent: no attack has given a score yet, so there is nothing to draw\n"
    assert not (tmp_path / "figures").exists()


def test_the_command_prints_each_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = graded(tmp_path / "run", only_psnr, limit=False)
    other = graded(tmp_path / "other", lambda attack, round, client: {"psnr": 12.0}, limit=False)
    folder = tmp_path / "figures"
    assert main(["report", str(run.folder), str(other.folder), "--figures", str(folder)]) == 0
    printed = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert printed[:2] == [run.folder / "report.html", other.folder / "report.html"]
    assert printed[2] == tmp_path / "comparison.html"
    assert sorted(printed[3:]) == sorted(p for p in folder.rglob("*") if p.is_file())
    assert all(path.exists() for path in printed)


def test_names_are_text_and_no_formula(tmp_path: Path) -> None:
    hostile = '$\\frac{1}{2$ <script>alert(1)</script> & "x"'
    run = graded(tmp_path / "a<b>$x", only_psnr, attacks=(hostile.replace("/", "-"), "_hidden"), limit=False)
    paths, _ = write_figures([run], tmp_path / "figures")
    page = ElementTree.parse(tmp_path / "figures" / "leakage-psnr.svg").getroot()
    words = ["".join(e.itertext()) for e in page.iter(f"{SVG}text")]
    assert hostile.replace("/", "-") in words
    assert "_hidden" in words, "Matplotlib leaves names that begin so out of its own legends"
    assert not [e for e in page.iter() if e.tag.endswith("}script")]
    assert len(paths) == 2 * 4


def test_a_place_where_nothing_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = graded(tmp_path / "run", only_psnr, clients=1, rounds=1)
    (tmp_path / "file").write_text("mine")
    assert main(["report", str(run.folder), "--figures", str(tmp_path / "file")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_drawings_carry_their_run(run: Run) -> None:
    assert all(isinstance(d, PaperFigure) and d.about.startswith("graded. ") for d in _drawings(_RunFigures.read(run)))
