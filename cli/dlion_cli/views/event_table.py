"""A table of events as `kubectl events` shows them, and events as they arrive."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from dlion_api.errors import UnavailableError
from dlion_cli.cluster.cluster_jobs import Document, JobClient, event_time, is_about
from dlion_cli.cluster.documents import mapping_of
from dlion_cli.terminal.formatting import format_duration
from dlion_cli.terminal.plain_table import plain_table
from dlion_cli.views.job_status import age_of, text

_WATCH_S: Final = 60
_FIRST_PAUSE_S: Final = 0.5
_MAX_PAUSE_S: Final = 15.0
COLUMNS: Final = ("LAST SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE")


_OPTIONAL: Final = ("TYPE", "OBJECT")
"""Columns that a narrow terminal lacks; the style of a line has the type, too."""


def event_cells(event: Mapping[str, Any], now: datetime) -> tuple[str, ...]:
    """The cells of one event, by `COLUMNS`."""
    about = mapping_of(event.get("involvedObject"))
    series = mapping_of(event.get("series"))
    count = series.get("count") or event.get("count")
    often = f" (x{count})" if isinstance(count, int) and count > 1 else ""
    return (
        age_of(event_time(dict(event)), now),
        text(event.get("type")),
        text(event.get("reason")),
        f"{text(about.get('kind')).lower()}/{text(about.get('name'))}",
        " ".join(text(event.get("message"), "").split()) + often,
    )


def events_table(events: Sequence[Mapping[str, Any]], now: datetime) -> Table:
    """One row per event, in the given order."""
    table = plain_table(*COLUMNS[:-1], folded=COLUMNS[-1], left_out=_OPTIONAL)
    for event in events:
        style = "yellow" if event.get("type") == "Warning" else ""
        table.add_row(*(Text(cell, style=style) for cell in event_cells(event, now)))
    return table


def kept_events_table(events: Sequence[Mapping[str, Any]]) -> Table:
    """One row per event of a keeper (`kept_records`), with its time in the run."""
    table = plain_table("RUN TIME", *COLUMNS[1:-1], folded=COLUMNS[-1], left_out=_OPTIONAL)
    for event in events:
        style = "yellow" if event.get("type") == "Warning" else ""
        cells = (format_duration(event["runSeconds"]), *event_cells(event, datetime.now(UTC))[1:])
        table.add_row(*(Text(cell, style=style) for cell in cells))
    return table


def follow_events(
    jobs: JobClient,
    job: Document,
    run_id: str,
    *,
    on_disconnect: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Document]:
    """Yield the events about a job and its run, then each new or repeated one; never ends.

    Raises: as `JobClient.related_events` at the first request; DeniedError, DataError at any.
    """
    known: dict[str, str] = {}
    is_first, pause_s = True, _FIRST_PAUSE_S
    while True:
        try:
            listed = jobs.related_events(job, run_id)
            is_first, pause_s = False, _FIRST_PAUSE_S
            kept = {_uid(event) for event in listed.items}  # the cluster has dropped the others
            known = {uid: version for uid, version in known.items() if uid in kept}
            yield from (event for event in listed.items if _is_new(event, known))
            for change in jobs.watch_events(listed.version, within_s=_WATCH_S):
                event = mapping_of(change.get("object"))
                if change.get("type") == "ERROR":
                    break  # the version has expired: list again
                is_shown = change.get("type") in ("ADDED", "MODIFIED")
                if is_shown and is_about(event, job, run_id):
                    yield from (one for one in [event] if _is_new(one, known))
        except UnavailableError as error:
            if is_first:
                raise
            on_disconnect(str(error))
        sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def _is_new(event: Document, known: dict[str, str]) -> bool:
    """Whether this version of the event was not yielded yet; keeps it in `known`."""
    uid = _uid(event)
    version = str(mapping_of(event.get("metadata")).get("resourceVersion"))
    is_new = known.get(uid) != version
    known[uid] = version
    return is_new


def _uid(event: Document) -> str:
    return str(mapping_of(event.get("metadata")).get("uid"))
