"""The thresholds that a command line names, and what follows from a gate: lines, files, the exit status."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from fedgauge.client.components import SpecError
from fedgauge.server.views.assurance.gate import GateResult, Threshold
from fedgauge.simulations.reports.gate_output import gate_lines, gate_status, write_junit


def chosen_thresholds(options: argparse.Namespace) -> list[Threshold]:
    """The thresholds of --fail-above and --fail-below; SpecError if a file is named and no threshold."""
    found = [Threshold(name, bound) for name, bound in options.fail_above]
    found += [Threshold(name, bound, above=False) for name, bound in options.fail_below]
    if not found and options.junit:
        raise SpecError("--junit writes what a gate found: add a threshold, --fail-above psnr=20")
    return found


def conclude_gate(options: argparse.Namespace, results: Sequence[GateResult], of: Path, quiet: bool = False) -> int:
    """Write the files that were asked for, print a line for each threshold, and return the exit status.

    Args:
        of: the scenario, or the run's folder.
        quiet: print nothing, as standard output holds JSON.
    """
    if options.junit:
        write_junit(results, of.name, options.junit)
    if not quiet:
        print(*gate_lines(results), sep="\n", end="\n" if results else "")
    return gate_status(results)
