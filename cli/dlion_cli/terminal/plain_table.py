"""The style of tables without borders."""

from rich.table import Table


def plain_table(*titles: str, folded: str = "") -> Table:
    """A table without borders; a last column with the title `folded` takes several lines."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    for title in titles:
        table.add_column(title, no_wrap=True)
    if folded:
        table.add_column(folded, overflow="fold")
    return table
