"""What a gate found, for people and for machines: lines, JUnit XML, and a log in the form of SARIF 2.1.0."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from fedgauge.client.files import writing
from fedgauge.server.store.run_files import printable
from fedgauge.server.views.assurance.gate import GateResult, Outcome
from fedgauge.server.views.formatting import finite
from fedgauge.simulations.run.environment import package
from fedgauge.simulations.run.exit_status import FAILED, INAPPLICABLE, INCOMPLETE

PAGE = "docs/guides/gate.md"
_KINDS: dict[Outcome, str] = {"passed": "pass", "failed": "fail", "not measured": "open", "incomplete": "open"}


def gate_status(results: Sequence[GateResult]) -> int:
    """0 if every threshold holds, 1 if one does not, 4 if planned updates were never attacked, 3 if one was not measured."""
    outcomes = {result.outcome for result in results}
    statuses: dict[Outcome, int] = {"failed": FAILED, "incomplete": INCOMPLETE, "not measured": INAPPLICABLE}
    return next((status for outcome, status in statuses.items() if outcome in outcomes), 0)


def gate_lines(results: Sequence[GateResult]) -> list[str]:
    """One line for each threshold."""
    return [printable(f"gate: {r.outcome}: fails if {r.threshold}; {r}") for r in results]


def gate_tables(results: Sequence[GateResult]) -> list[dict[str, Any]]:
    """The results as plain data; what is infinite stands in the words alone."""
    return [
        {**asdict(r.threshold), **asdict(r.measurement), "value": finite(r.measurement.value), "outcome": r.outcome}
        for r in results
    ]


def write_junit(results: Sequence[GateResult], of: str, path: Path) -> None:
    """Write JUnit XML: a test case for each threshold, which is an error if it is not measured or incomplete."""
    counts = {outcome: sum(r.outcome == outcome for r in results) for outcome in _KINDS}
    suite = ElementTree.Element(
        "testsuite",
        name=printable(f"fedgauge gate: {of}"),
        tests=str(len(results)),
        failures=str(counts["failed"]),
        errors=str(counts["not measured"] + counts["incomplete"]),
    )
    for result in results:
        case = ElementTree.SubElement(suite, "testcase", classname="fedgauge.gate", name=f"fails if {result.threshold}")
        words = printable(result)
        if result.outcome == "passed":
            ElementTree.SubElement(case, "system-out").text = words
        else:
            ElementTree.SubElement(case, "failure" if result.outcome == "failed" else "error", message=words)
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    with writing(path) as file:
        file.write(ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True))


def write_sarif(results: Sequence[GateResult], of: Path, path: Path) -> None:
    """Write a log in the form of SARIF 2.1.0: a rule for each metric, a result of kind pass, fail or open for each threshold.

    Args:
        of: the scenario, or the run's folder, which every result is located in.
    """
    rules = [
        {"id": r.threshold.metric, "shortDescription": {"text": f"Fails if {r.threshold}."}, "help": {"text": PAGE}}
        for r in results
    ]
    found = [
        {
            "ruleId": r.threshold.metric,
            "kind": _KINDS[r.outcome],
            "level": "error" if r.outcome == "failed" else "none",
            "message": {"text": printable(r)},
            "locations": [{"physicalLocation": {"artifactLocation": {"uri": printable(of.as_posix())}}}],
            "properties": {"value": finite(r.measurement.value), "bound": r.threshold.bound, "outcome": r.outcome},
        }
        for r in results
    ]
    tool = {"driver": {"name": "fedgauge", "version": package("fedgauge") or "unknown", "rules": rules}}
    log = {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0"}
    content = json.dumps({**log, "runs": [{"tool": tool, "results": found}]}, indent=1, allow_nan=False)
    with writing(path) as file:
        file.write(content.encode())
