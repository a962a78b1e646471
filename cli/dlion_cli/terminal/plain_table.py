"""The style of tables without borders."""

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column, Table

_MIN_FOLDED: Final = 24
"""Characters that a folded column keeps, so that its lines are readable."""
_MAX_UNFOLDED: Final = 40
"""Characters of another column, beyond which it is cut before columns are left out."""
_MIN_CUT: Final = 8
_GAP: Final = 3
_UNLIMITED: Final = 100_000
_Kind = TypeVar("_Kind", bound=Table)


class FittedTable(Table):
    """A table that leaves out columns where they do not fit the terminal.

    Very long names do not count in full: they end in an ellipsis where there is no room. A pipe is
    wide enough for all columns: `output_console`.
    """

    left_out: Sequence[str] = ()
    """Titles of columns, the first to be left out first."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.left_out:
            yield from super().__rich_console__(console, options)
            return
        full = {str(each.header): _full_width(console, options, each) for each in self.columns}
        kept = {title: min(width, _MAX_UNFOLDED) for title, width in full.items()}
        for title in self.left_out:
            if _spare(kept, options) >= 0:
                break
            kept.pop(title, None)
        widest = max(kept, key=lambda title: kept[title])
        lacking = max(0, -_spare(kept, options))
        kept[widest] = max(min(_MIN_CUT, kept[widest]), kept[widest] - lacking)
        for title in kept:
            kept[title] += min(full[title] - kept[title], max(0, _spare(kept, options)))
        yield from _with_columns(self, kept).__rich_console__(console, options)


class FoldedLines:
    """A table in its full width, whose lines continue on the next ones of the terminal.

    A terminal folds long lines itself, but a view that is redrawn in place must count them.
    """

    def __init__(self, table: RenderableType) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(max_width=_UNLIMITED)
        for line in console.render_lines(self._table, wide, pad=False):
            length = Segment.get_line_length(line)
            cuts = [*range(options.max_width, length, options.max_width), length]
            for part in Segment.divide(line, cuts):
                yield from part
                yield Segment.line()


def _full_width(console: Console, options: ConsoleOptions, column: Column) -> int:
    """The width of its widest cell, the title included; of a folded column the least."""
    if not column.no_wrap:
        return _MIN_FOLDED
    wide = options.update(max_width=_UNLIMITED)
    cells = (column.header, *column.cells)
    return max(Measurement.get(console, wide, each).maximum for each in cells)


def _spare(widths: Mapping[str, int], options: ConsoleOptions) -> int:
    """Characters that columns of these widths leave free; negative: they do not fit."""
    return options.max_width - sum(widths.values()) - _GAP * (len(widths) - 1)


def _with_columns(table: Table, widths: Mapping[str, int]) -> Table:
    """The table with only these columns."""
    made, columns = _borderless(Table), [each for each in table.columns if each.header in widths]
    for column in columns:
        made.add_column(
            column.header, no_wrap=column.no_wrap, overflow=column.overflow,
            width=widths[str(column.header)] if column.no_wrap else None,
        )  # fmt: skip
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
    return kind(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
