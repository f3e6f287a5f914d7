"""The report: one HTML file that says what a run leaked, with figures, tables and pictures, and asks nothing of a network."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from fedgauge.attacks.grading.image_metrics import HIGHER_IS_BETTER, PSNR_CAP
from fedgauge.client.components import SpecError
from fedgauge.server import dashboard
from fedgauge.server.store.run import Run
from fedgauge.server.store.tape import write_bytes
from fedgauge.server.views import overview
from fedgauge.server.views.clients import clients
from fedgauge.server.views.compare import compare
from fedgauge.server.views.formatting import decibel, number, percent, rounded, scenario_line
from fedgauge.server.views.gallery import Gallery
from fedgauge.server.views.intervals import Rate
from fedgauge.server.views.leakage import Leak, RoundLeak, round_table
from fedgauge.server.views.reading import Reading
from fedgauge.server.views.scores import OF_IMAGES, OF_TEXT
from fedgauge.server.views.success import THRESHOLDS, success_curve
from fedgauge.server.views.verdict import verdict
from fedgauge.simulations.reports.certificates import GaussianMechanism, certified, gaussian_mechanism
from fedgauge.simulations.reports.sampling import ExampleSample, sample_examples

STATIC = Path(dashboard.__file__).parent / "static"  # the live page's script and style, which are the report's too
OWN_COLUMNS = (OF_IMAGES.metric, OF_TEXT.metric, "identified", "label_accuracy")
AT = 20  # dB: of the words on certified rates


def write_report(run: Run) -> Path:
    """Write report.html into the run folder, atomically and for its owner only; returns its path."""
    run.ledger().close()  # brings an older schema up to date
    with closing(Reading(run)) as reading, reading.now():
        content = _content(reading)
    return _write(run.folder / "report.html", "report.html", content)


def write_comparison(runs: Sequence[Run], path: Path) -> Path:
    """Write one HTML file that sets several runs side by side, atomically and for its owner only; returns its path."""
    readings = []
    with ExitStack() as stack:
        for run in dict.fromkeys(Run(run.folder.resolve()) for run in runs):
            run.ledger().close()
            reading = stack.enter_context(closing(Reading(run)))
            readings.append(stack.enter_context(reading.now()))
        metrics = [m for m in HIGHER_IS_BETTER if any(m in reading.metrics for reading in readings)]
        found = [compare(readings, metric) for metric in metrics or ["psnr"]]
    return _write(path, "comparison.html", {"data": found, "names": [run["id"] for run in found[0]["runs"]]})


def _write(path: Path, template: str, content: Mapping[str, Any]) -> Path:
    from plotly.offline import get_plotlyjs

    style, figures = (Markup((STATIC / name).read_text()) for name in ("style.css", "figures.js"))
    page = _template(template).render(**content, style=style, figures=figures, plotly=Markup(get_plotlyjs()))
    write_bytes(path, page.encode())
    return path


def _template(name: str) -> jinja2.Template:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "decibel": decibel, "percent": percent, "interval": interval}
    return environment.get_template(name)


def interval(leak: Leak) -> str:
    """A mean's interval, with the number of clusters where it is below ten."""
    if leak.low is None or leak.high is None:
        return f"no interval from {leak.clusters} client" if leak.clusters == 1 else ""
    few = f", {leak.clusters} clients" if leak.clusters < 10 else ""
    return f"{decibel(leak.low)} to {decibel(leak.high)}{few}"


def _content(reading: Reading) -> dict[str, Any]:
    """Everything that the template shows."""
    ledger, scores = reading.ledger, reading.scores
    gallery, reasons = Gallery(reading), ledger.reasons()
    curve = success_curve(scores, ledger) if len(scores) else {}
    certificate, shown = _certificate(reading, curve), sample_examples(gallery)
    known = overview.knowledge(reading)
    return {
        "name": reading.run.name,
        "facts": scenario_line(reading.tables),
        "verdict": verdict(scores, ledger),
        "notices": overview.notices(reading),
        "misdeeds": overview.server_attack_effects(reading),
        "limit": overview.limit(reading),
        "privacy": overview.privacy(reading),
        "certificate": certificate,
        "lines": _by_round(round_table(scores, ledger)),
        "reasons": reasons[: overview.REASONS],
        "more_reasons": max(0, len(reasons) - overview.REASONS),
        "summary": overview.summary(reading),
        "further": [metric for metric in reading.metrics if metric not in OWN_COLUMNS],
        "gallery": shown,
        "data": _data(reading, gallery, shown, certificate),
        "cards": known["cards"],
        "shared": known["shared"],
        "replied": len({round for round, _ in reading.sizes}),
        "participation": overview.participation(reading),
        "progress": reading.progress,
        "errors": ledger.errors(),
        "replay": reading.meta.get("replay"),
        "replay_detail": reading.meta.get("replay_detail", ""),
        "scenario": (reading.run.folder / "scenario.toml").read_text(),
        "environment": overview.environment(reading),
        "cap": PSNR_CAP,
        "measure": scores.measure,
    }


def _data(
    reading: Reading, gallery: Gallery, shown: ExampleSample, certificate: "Certificate | None"
) -> dict[str, Any]:
    """What the page's script draws: the live page's views of the run, with the chosen cards of its gallery all at once."""
    cards = [card for found in shown.cards(gallery).values() for card in found]
    return {
        "overview": {
            **overview.figure(reading),
            "success": overview.success(reading) + ([certificate.series] if certificate else []),
            "ungraded": overview.ungraded(reading),
            "thresholds": THRESHOLDS,
            "knowledge": overview.knowledge(reading),
        },
        "gallery": {
            "kind": gallery.kind,
            "rounds": list(shown.keys),
            "clients": sorted({card.client for card in cards}),
            "attacks": gallery.attacks,
            "labels": sorted({card.label for card in cards if card.label is not None}),
            "cards": [asdict(card) for card in cards],
        },
        "clients": clients(reading, reading.scores.measure.metric, None),
    }


@dataclass(frozen=True, eq=False)
class Certificate:
    """What differential privacy certifies of the success rates.

    Args:
        mechanism: clipping and noise.
        series: the curve for one round, as the page's script draws it.
        at: the threshold (dB) of the words; once, always: the certified rates there, of one round and of all.
        rounds: in the run.
    """

    mechanism: GaussianMechanism
    series: Mapping[str, Any]
    at: int
    once: float
    always: float
    rounds: int


def _certificate(reading: Reading, curve: Mapping[str, Sequence[Rate]]) -> Certificate | None:
    try:
        federation = reading.scenario.federation
    except SpecError:  # its data is not on this machine, as a notice says
        return None
    mechanism = gaussian_mechanism(federation.chain, federation.shards.batch_size, federation.model)
    if mechanism is None:
        return None
    rounds = federation.protocol.rounds
    once, always = (certified(curve, mechanism, n) for n in (1, rounds))
    if once is None or always is None:
        return None
    words = [f"at most {percent(v)} of the examples, by any attack on one round" for v in once]
    series = {"name": "certified (ReRo), one round", "kind": "limit", "y": [rounded(v) for v in once], "told": words}
    at = THRESHOLDS.index(AT)
    return Certificate(mechanism, series, AT, once[at], always[at], rounds)


def _by_round(lines: Sequence[RoundLeak]) -> list[list[RoundLeak]]:
    rounds: dict[int, list[RoundLeak]] = {}
    for line in lines:
        rounds.setdefault(line.round, []).append(line)
    return list(rounds.values())
