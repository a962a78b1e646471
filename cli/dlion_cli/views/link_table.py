"""Tables of the links between workers in the live view."""

from collections.abc import Iterable, Mapping

from rich.table import Table
from rich.text import Text

from dlion_api.names import Rank
from dlion_cli.terminal.formatting import UNKNOWN, format_bytes
from dlion_cli.views.worker_rows import LinkRow, WorkerRow

_MAX_LINKS = 6
"""Maximum links of a worker in the table. With more, it shows the slowest and the fastest link, and
those that are down."""
_NARROW_BARS = 6
_LINK_COLUMNS = 12
_BARS = "▁▂▃▄▅▆▇█"


def links_cell(row: WorkerRow) -> Text:
    """The recent rate of each link; of many links the slowest, the fastest and those down.

    Truncated on the right if the column is narrower than `links_columns`.
    """
    cell = Text(no_wrap=True, overflow="ellipsis")
    if len(row.links) <= _MAX_LINKS:
        shown = sorted(row.links.items())
    else:
        up = [(peer, link) for peer, link in sorted(row.links.items()) if link.connected]
        by_rate = sorted(up, key=lambda item: item[1].bytes_per_s)
        shown = [item for item in sorted(row.links.items()) if not item[1].connected]
        if by_rate:
            _append(cell, by_rate[0], "slowest ")
        if len(by_rate) > 1:
            _append(cell, by_rate[-1], "fastest ")
    for item in shown:
        _append(cell, item)
    return cell


def links_columns(link_count: int) -> int:
    """The width of `links_cell` for that number of connected links.

    >>> links_columns(3), links_columns(99)
    (36, 48)
    """
    return _LINK_COLUMNS * (link_count if link_count <= _MAX_LINKS else 4)


def link_table(rows: Mapping[Rank, WorkerRow]) -> Table:
    """One row per worker: bytes sent, a sparkline, and the recent rate of each link.

    Each peer has a column if that fits 80 characters; otherwise all links share one cell.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold dim")
    table.add_column("sent to", no_wrap=True, overflow="ellipsis", max_width=16)
    table.add_column("total", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, min_width=_NARROW_BARS)
    is_matrix = len(rows) - 1 <= _MAX_LINKS
    if is_matrix:
        for peer in rows:
            table.add_column(f"→{peer}/s", justify="right", no_wrap=True)
    else:
        table.add_column("per link and s")  # the only column that shrinks
    for row in rows.values():
        links = [_rate(row, peer) for peer in rows] if is_matrix else [links_cell(row)]
        bars = Text(sparkline(list(row.spark)[-_NARROW_BARS:]), style="blue")
        table.add_row(Text(row.name), format_bytes(row.sent_bytes), bars, *links)
    return table


def sparkline(values: Iterable[float]) -> str:
    """A bar for each value, the largest one full; empty if all are 0.

    >>> sparkline([0, 1, 2])
    '▁▅█'
    """
    known = list(values)
    top = max(known, default=0.0)
    if top <= 0:
        return ""
    return "".join(_BARS[min(len(_BARS) - 1, int(v / top * len(_BARS)))] for v in known)


def _rate(row: WorkerRow, peer: Rank) -> Text:
    link = row.links.get(peer)
    if peer == row.rank or link is None:
        return Text("" if peer == row.rank else UNKNOWN, style="dim")
    return Text(format_bytes(link.bytes_per_s)) if link.connected else Text("down", style="red")


def _append(cell: Text, item: tuple[Rank, LinkRow], word: str = "") -> None:
    peer, link = item
    cell.append(f"{word}→{peer} ", style="dim" if link.connected else "red")
    cell.append(f"{format_bytes(link.bytes_per_s) if link.connected else 'down'}  ")
