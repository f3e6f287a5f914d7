"""The report: one self-contained HTML file with a run's leakage, figures, tables and pictures."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from fedgauge.attacks.modality.membership import MEMBERSHIP
from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.client.files import writing
from fedgauge.server.dashboard import DRAWING, STATIC
from fedgauge.server.store import run_files
from fedgauge.server.store.run import Run
from fedgauge.server.views import overview
from fedgauge.server.views.assurance.coverage import MAPS_TO, TEXTS, coverage
from fedgauge.server.views.clients import clients
from fedgauge.server.views.compare import compare
from fedgauge.server.views.formatting import number, percent, scenario_line, status_words
from fedgauge.server.views.gallery import Gallery, worst_cases
from fedgauge.server.views.intervals import Rate
from fedgauge.server.views.leakage import Leak
from fedgauge.server.views.notices import notices
from fedgauge.server.views.outcomes import attacked_on
from fedgauge.server.views.privacy import privacy
from fedgauge.server.views.reading import Reading, read_once
from fedgauge.server.views.strength import RoundLeak, round_table
from fedgauge.server.views.success import THRESHOLDS, success_curve
from fedgauge.server.views.verdict import a_or_an, verdict_of
from fedgauge.simulations.reports.audit_record import NAME, record_of, write_record
from fedgauge.simulations.reports.certificates import GaussianMechanism, certified, mechanism_of
from fedgauge.simulations.reports.sampling import ExampleSample, sample_examples

WORST = 3  # examples on the first screen
AT = 20  # dB: threshold at which the text states certified rates


def write_report(run: Run) -> Path:
    """Write report.html and the audit record into the run folder, atomically and for its owner only; returns the report's path."""
    with read_once(run) as reading:
        record = record_of(reading)
        content = _content(reading) | {"record": record[-1].digest, "record_name": NAME}
    write_record(run, record)
    return _write(run.folder / "report.html", "report.html", content, in_run=True)


def write_comparison(runs: Sequence[Run], path: Path) -> Path:
    """Write one HTML file that compares several runs, atomically and for its owner only; returns its path."""
    with ExitStack() as stack:
        distinct = {run.folder.absolute(): run for run in runs}
        readings = [stack.enter_context(read_once(run)) for run in distinct.values()]
        metrics = [m for m in MEASURED if any(m in reading.metrics for reading in readings)]
        comparisons = [compare(readings, metric) for metric in metrics] or [compare(readings)]
    return _write(
        path, "comparison.html", {"data": comparisons, "names": [run["id"] for run in comparisons[0]["runs"]]}
    )


def _write(path: Path, template: str, content: Mapping[str, Any], in_run: bool = False) -> Path:
    from plotly.offline import get_plotlyjs

    # the report is drawn by the live page's scripts and style
    style = Markup((STATIC / "style.css").read_text())
    figures = Markup("\n".join((STATIC / name).read_text() for name in DRAWING))
    page = fill_template(template, {**content, "style": style, "figures": figures, "plotly": Markup(get_plotlyjs())})
    with run_files.replacing(path) if in_run else writing(path) as file:
        file.write(page.encode(errors="replace"))
    return path


def fill_template(name: str, content: Mapping[str, Any]) -> str:
    """A template of this folder with these values, each escaped and without control codes."""
    return _template(name).render(**content)


def _template(name: str) -> jinja2.Template:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {
        "number": number,
        "percent": percent,
        "interval": interval,
        "ended": status_words,
        "one": a_or_an,
    }
    return environment.get_template(name)


def _shown(value: object) -> object:
    """What a place of the template shows: words from elsewhere without control codes."""
    return run_files.printable(value.encode(errors="replace").decode()) if type(value) is str else value


def interval(leak: Leak) -> str:
    """A mean's interval as text, with the number of clusters if it is below ten."""
    if leak.low is None or leak.high is None:
        return f"no interval from {leak.clusters} {leak.cluster}" if leak.clusters == 1 else ""
    few = f", {leak.clusters} {leak.cluster}s" if leak.clusters < 10 else ""
    digits = MEASURED[leak.metric].digits
    return f"{number(leak.low, digits)} to {number(leak.high, digits)}{few}"


def _content(reading: Reading) -> dict[str, Any]:
    """The values of the template."""
    ledger, scores = reading.ledger, reading.scores
    gallery, reasons = Gallery(reading), ledger.reasons()
    curve = success_curve(scores, ledger)
    certificate, shown = _certificate(reading, curve), sample_examples(gallery)
    known, lines = overview.knowledge(reading), round_table(scores, ledger)
    return {
        "name": reading.run.name,
        "facts": scenario_line(reading.tables),
        "verdict": verdict_of(reading),
        "notices": notices(reading),
        "misdeeds": overview.server_attack_effects(reading),
        "limit": overview.limit(reading),
        "of_error": "mse" in reading.metrics,
        "privacy": privacy(reading),
        "certificate": certificate,
        "lines": _by_round(lines),
        "graded": any(line.leak.n for line in lines),
        "failed": any(line.leak.failed for line in lines),
        "truth_shown": gallery.shards is not None or "truth" in reading.meta,
        "reasons": reasons[: overview.REASONS],
        "more_reasons": max(0, len(reasons) - overview.REASONS),
        "summary": overview.summary(reading),
        "further": [
            metric
            for metric in reading.metrics
            if metric not in (scores.measure.metric, "identified", "label_accuracy", *MEMBERSHIP)
        ],
        "gallery": shown,
        "membership": overview.membership(reading),
        "canaries": overview.canary_results(reading),
        "data": _data(reading, gallery, shown, certificate),
        "cards": known["cards"],
        "shared": known["shared"],
        "replied": len({round for round, _ in reading.sizes}),
        "participation": overview.participation(reading),
        "progress": reading.progress,
        "plan": reading.plan_coverage.to_json(),
        "without_truth": overview.ungraded(reading),
        "app_rounds": overview.app_rounds(reading),
        "replay": reading.meta.get("replay"),
        "replay_detail": reading.meta.get("replay_detail", ""),
        "scenario": reading.run.scenario_text(),
        "environment": overview.environment(reading),
        "attacked_on": attacked_on(reading.ledger),
        "coverage": coverage(reading),
        "texts": TEXTS,
        "maps_to": MAPS_TO,
        "measure": scores.measure,
        "identifies": "identified" in scores.modality.measured,
        "measured": MEASURED,
    }


def _data(
    reading: Reading, gallery: Gallery, shown: ExampleSample, certificate: "Certificate | None"
) -> dict[str, Any]:
    """The data that the page's script draws: the live page's views, with all sampled cards of the gallery."""
    cards = [card for comparisons in shown.cards(gallery).values() for card in comparisons]
    return {
        "overview": {
            "figures": overview.figures(reading, certificate.curve if certificate else None),
            "ungraded": overview.ungraded(reading),
        },
        "gallery": {
            "kind": gallery.kind,
            "rounds": list(shown.keys),
            "clients": sorted({card.client for card in cards}),
            "attacks": gallery.attacks,
            "labels": sorted({card.label for card in cards if card.label is not None}),
            "class_names": gallery.class_names,
            "cards": [asdict(card) for card in cards],
        },
        "worst": worst_cases(gallery, WORST),
        "noun": reading.scores.measure.private,
        "clients": clients(reading, reading.scores.measure.metric, None),
    }


@dataclass(frozen=True, eq=False)
class Certificate:
    """Upper bounds on success rates that differential privacy certifies.

    Args:
        mechanism: clipping and noise.
        curve: at THRESHOLDS, for one round.
        at: the threshold (dB) in the text; once, always: the certified rates there, for one round and for all.
        rounds: in the run.
    """

    mechanism: GaussianMechanism
    curve: Sequence[float]
    at: int
    once: float
    always: float
    rounds: int


def _certificate(reading: Reading, curve: Mapping[str, Sequence[Rate]]) -> Certificate | None:
    if (mechanism := mechanism_of(reading)) is None:
        return None
    rounds = reading.scenario.protocol.rounds
    once, always = (certified(curve, mechanism, n) for n in (1, rounds))
    if once is None or always is None:
        return None
    at = THRESHOLDS.index(AT)
    return Certificate(mechanism, once, AT, once[at], always[at], rounds)


def _by_round(lines: Sequence[RoundLeak]) -> list[list[RoundLeak]]:
    rounds: dict[int, list[RoundLeak]] = {}
    for line in lines:
        rounds.setdefault(line.round, []).append(line)
    return list(rounds.values())
