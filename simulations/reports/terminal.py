"""Tables in a terminal."""

from rich.table import Table as RichTable
from rich.text import Text

from fedgauge.server.store.run_files import printable
from fedgauge.server.views.tables import Table


def rich_table(table: Table) -> RichTable:
    """Convert a table to rich's, without markup and control codes."""
    shown = RichTable(box=None)
    rows = table.written
    for k, column in enumerate(table.columns):
        text = column.form == "text"
        names = text and not any(" " in row[k] for row in rows)  # a name is not cut off where numbers have room
        shown.add_column(Text(printable(column.head)), justify="left" if text else "right", no_wrap=names)
    for row in rows:
        shown.add_row(*(Text(printable(cell).replace("\n", " ")) for cell in row))
    return shown
