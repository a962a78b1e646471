"""The style of tables without borders."""

from collections.abc import Sequence
from typing import Final, TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

_MIN_FOLDED: Final = 24
"""Characters that a folded column keeps, so that its lines are readable."""
_UNLIMITED: Final = 100_000
_Kind = TypeVar("_Kind", bound=Table)


class FittedTable(Table):
    """A table that leaves out columns where they do not fit the terminal.

    A pipe is wide enough for all of them: `output_console`.
    """

    left_out: Sequence[str] = ()
    """Titles of columns, the first to be left out first."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept, wide = list(self.columns), options.update(max_width=_UNLIMITED)
        folded_width = _MIN_FOLDED if any(not each.no_wrap for each in kept) else 0
        for title in self.left_out:
            uncut = _with_columns(self, [each for each in kept if each.no_wrap])
            if Measurement.get(console, wide, uncut).maximum + folded_width <= options.max_width:
                break
            kept = [each for each in kept if each.header != title]
        yield from _with_columns(self, kept).__rich_console__(console, options)


def _with_columns(table: Table, columns: Sequence[Column]) -> Table:
    """That table with these of its columns alone."""
    made = _borderless(Table)
    for column in columns:
        made.add_column(column.header, no_wrap=column.no_wrap, overflow=column.overflow)
    rows = zip(*(each.cells for each in columns), strict=True)
    for row, cells in zip(table.rows, rows, strict=True):
        made.add_row(*cells, style=row.style)
    return made


def plain_table(*titles: str, folded: str = "", left_out: Sequence[str] = ()) -> FittedTable:
    """A table without borders; a last column with the title `folded` takes several lines.

    `left_out`: titles of columns that a narrow terminal lacks, the least important first.
    """
    table = _borderless(FittedTable)
    table.left_out = left_out
    for title in titles:
        table.add_column(title, no_wrap=True)
    if folded:
        table.add_column(folded, overflow="fold")
    return table


def _borderless(kind: type[_Kind]) -> _Kind:
    return kind(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
