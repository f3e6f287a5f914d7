"""Results of a gate as lines and as JUnit XML."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from fedgauge.client.files import writing
from fedgauge.server.store.run_files import printable
from fedgauge.server.views.gate import GateResult, Outcome
from fedgauge.simulations.run.exit_status import FAILED, INAPPLICABLE, INCOMPLETE


def gate_status(results: Sequence[GateResult]) -> int:
    """Return the exit status: 0 passed, 1 failed, 4 updates never attacked, 3 not measured."""
    outcomes = {result.outcome for result in results}
    statuses: dict[Outcome, int] = {"failed": FAILED, "incomplete": INCOMPLETE, "not measured": INAPPLICABLE}
    return next((status for outcome, status in statuses.items() if outcome in outcomes), 0)


def gate_lines(results: Sequence[GateResult]) -> list[str]:
    said = ["inconclusive" if r.outcome == "not measured" and r.value is not None else r.outcome for r in results]
    return [printable(f"gate: {word} (it fails if {r.threshold}); {r}") for word, r in zip(said, results, strict=True)]


def write_junit(results: Sequence[GateResult], of: str, path: Path) -> None:
    """Write JUnit XML: a test case for each threshold, an error if not measured or incomplete."""
    counts = Counter(result.outcome for result in results)
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
