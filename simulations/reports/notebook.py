"""Runs in a notebook, after `%load_ext fedgauge.simulations.reports.notebook`: each shows its verdict and its attacks."""

from typing import Any

from fedgauge.server.store.run import Run
from fedgauge.server.views.formatting import scenario_line
from fedgauge.server.views.leak_tables import summary_table
from fedgauge.server.views.notices import notices
from fedgauge.server.views.snapshot import read_once
from fedgauge.server.views.verdict import verdict_of
from fedgauge.simulations.reports.report import fill_template


def run_html(run: Run) -> str:
    """Show a run's verdict, its notices, and its attacks over all rounds."""
    with read_once(run) as reading:
        facts, verdict, table = scenario_line(reading.tables), verdict_of(reading), summary_table(reading)
        content = {"name": run.name, "facts": facts, "verdict": verdict, "notices": notices(reading), "table": table}
        return fill_template("notebook.html", content)


def load_ipython_extension(shell: Any) -> None:
    """Let every Run show itself; IPython calls this for `%load_ext`."""
    shell.display_formatter.formatters["text/html"].for_type(Run, run_html)
