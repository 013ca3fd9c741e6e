"""Tables of rows on a terminal or in a file."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table

    from qat.logs import Terminal

Column = tuple[str, str, str, float]  # title, key of a row, format, factor


def wide_console(file_width: int) -> "Terminal":
    """A console as wide as the terminal, or `file_width` columns where output goes to a file."""
    from qat.logs import Terminal

    console = Terminal()
    return console if console.is_terminal else Terminal(width=file_width)


def row_table(
    columns: Sequence[Column], rows: Sequence[dict], *, justify: Literal["left", "right"] = "right"
) -> "Table":
    """One line a row, with dashes for what it lacks; `justify` is of all columns but the first."""
    from rich.table import Table

    table = Table(columns[0][0])
    for title, *_ in columns[1:]:
        table.add_column(title, justify=justify)
    for row in rows:
        values = [(row.get(key), form, factor) for _, key, form, factor in columns]
        table.add_row(
            *("-" if v is None else form.format(v * factor) for v, form, factor in values)
        )
    return table


def numbers_table(headings: Sequence[str], body: Sequence[Sequence[str]], title: str) -> "Table":
    """A table of words; all columns but the first stand to the right, as numbers do."""
    from rich.table import Table

    table = Table(headings[0], title=title)
    for heading in headings[1:]:
        table.add_column(heading, justify="right")
    for row in body:
        table.add_row(*row)
    return table
