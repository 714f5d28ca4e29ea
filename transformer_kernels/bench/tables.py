"""Tables in the terminal, rendered by rich."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

UNKNOWN = "–"


def empty_table(
    title: str, headers: Sequence[str], *, text: Sequence[str], wrapped: Sequence[str] = ()
) -> Table:
    """Returns a table without rows.

    Args:
        title: title; brackets, as in names of files, are not read as markup.
        headers: headers of the columns.
        text: headers of columns that are left-aligned; the others are right-aligned.
        wrapped: headers of columns whose cells may take several lines.
    """
    table = Table(
        title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for header in headers:
        table.add_column(
            header,
            justify="left" if header in text else "right",
            no_wrap=header not in wrapped,
        )
    return table


def milliseconds(value: float) -> str:
    """Formats with three significant digits and no exponent."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
