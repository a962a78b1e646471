"""What was sent on the links of a run, by kind of bytes, for `describe` and the result of a run."""

from collections.abc import Mapping
from typing import Any, Final

from rich.console import RenderableType
from rich.text import Text

from dlion_cli.terminal.formatting import format_bytes, format_percent, printable
from dlion_cli.terminal.plain_table import plain_table
from dlion_results.summary.link_use import KINDS, MESSAGE_KINDS, bytes_by_kind, carried_bytes

MAX_LINKS_SHOWN: Final = 12


def kinds_text(by_kind: Mapping[str, float]) -> str:
    """All bytes and their parts: the messages, which tables call sent, and each kind that there is.

    >>> kinds_text({"gradient": 980_000, "control": 10_000, "header": 10_000, "state": 0})
    '1 MB: sent 990 kB (gradient 980 kB, control 10 kB), header 10 kB'
    """
    texts = {kind: f"{kind} {format_bytes(count)}" for kind, count in by_kind.items() if count}
    sent = sum(by_kind.get(kind, 0) for kind in MESSAGE_KINDS)
    messages = [text for kind, text in texts.items() if kind in MESSAGE_KINDS]
    others = [text for kind, text in texts.items() if kind not in MESSAGE_KINDS]
    first = [f"sent {format_bytes(sent)} ({', '.join(messages)})"] if messages else []
    total = format_bytes(sum(by_kind.values()))
    return f"{total}: {', '.join((*first, *others))}" if texts else total


def sent_sentences(summary: Mapping[str, Any]) -> list[str]:
    """All bytes of the run by kind, and the link that carried most; empty if there are no links, or
    an older release did not count kinds."""
    links, by_kind = carried_bytes(summary), summary.get("bytes")
    if not links or not by_kind:
        return []
    text = f"Bytes on links: {kinds_text(bytes_by_kind(by_kind))}"
    if len(links) < 2 or not links[0].total:
        return [text]
    most = links[0]
    return [f"{text}; most from {most.sender} to {most.receiver}, {format_bytes(most.total)}"]


def links_parts(summary: Mapping[str, Any]) -> list[RenderableType]:
    """A table of the links that carried most; empty without any. Kinds without bytes have no
    column."""
    links = [link for link in carried_bytes(summary) if link.total]
    if not links:
        return []
    kinds = [kind for kind in KINDS if any(link.by_kind[kind] for link in links)]
    table = plain_table("LINK", "BYTES", *(kind.upper() for kind in kinds), "USED")
    for link in links[:MAX_LINKS_SHOWN]:
        cells = (link.total, *(link.by_kind[kind] for kind in kinds))
        name = printable(f"{link.sender} → {link.receiver}")
        used = format_percent(link.used_fraction)
        table.add_row(*map(Text, (name, *map(format_bytes, cells), used)))
    hidden = len(links) - MAX_LINKS_SHOWN
    more = [Text(f"and {hidden:,} more links in summary.json")] if hidden > 0 else []
    return [table, *more]
