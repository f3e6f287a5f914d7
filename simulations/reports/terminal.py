"""Tables in a terminal."""

from rich.table import Table as RichTable
from rich.text import Text

from fedgauge.server.store.run_files import printable
from fedgauge.server.views.tables import Table


def rich_table(table: Table) -> RichTable:
    """Convert a table to rich's, without markup and control codes."""
    shown = RichTable(box=None)
    for column in table.columns:
        shown.add_column(Text(printable(column.head)), justify="left" if column.form == "text" else "right")
    for row in table.written:
        shown.add_row(*(Text(printable(cell).replace("\n", " ")) for cell in row))
    return shown
