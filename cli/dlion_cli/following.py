"""A job of a cluster as it changes, over lost connections and expired watches, until it is gone.

Called by every command that waits. Says nothing itself: `on_trouble` is told of each interruption.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dlion_api.errors import AbsentError, DeniedError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlion_cli.cluster_jobs import Document, Jobs

WATCH_S: Final = 60
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 15.0


class TimeUpError(Exception):
    """The time that the user would wait is over."""


@dataclass(frozen=True)
class Gone:
    """The job was deleted, or there is another of its name."""


def follow(
    jobs: Jobs,
    name: str,
    *,
    timeout_s: float | None = None,
    on_trouble: Callable[[str], None] = lambda _words: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Document | Gone]:
    """The job as it is, then as it is after each change; ends with `Gone`.

    The caller leaves off when it has seen enough. Once the first answer has come, a server that is
    away is asked again and again, with growing pauses.

    Raises: AbsentError, DeniedError, UnavailableError at the first answer; DeniedError later, too;
    TimeUpError after `timeout_s`.
    """
    deadline_s = None if timeout_s is None else clock() + timeout_s
    uid = version = ""
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            document = jobs.get(name)
            if uid and _uid(document) != uid:
                yield Gone()
                return
            uid = _uid(document)
            if _version(document) != version:
                yield document
            version = _version(document)
            pause_s = FIRST_PAUSE_S
            for event in _changes(jobs, name, version, clock, deadline_s):
                if event is None:
                    yield Gone()
                    return
                version = _version(event)
                yield event
        except AbsentError:
            if not uid:
                raise
            yield Gone()
            return
        except UnavailableError as error:
            if not uid:
                raise
            on_trouble(str(error))
            sleep(pause_s if deadline_s is None else max(0, min(pause_s, deadline_s - clock())))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        if deadline_s is not None and clock() >= deadline_s:
            raise TimeUpError


def _changes(
    jobs: Jobs,
    name: str,
    version: str,
    clock: Callable[[], float],
    deadline_s: float | None,
) -> Iterator[Document | None]:
    """Documents of one watch; None when the job is deleted. Ends when the watch does."""
    left_s = WATCH_S if deadline_s is None else max(1, min(WATCH_S, round(deadline_s - clock())))
    for event in jobs.changes(name, version, within_s=left_s):
        kind, found = event.get("type"), event.get("object") or {}
        if kind == "DELETED":
            yield None
        elif kind in ("ADDED", "MODIFIED"):
            yield found
        elif kind == "ERROR":
            if found.get("code") == 403:
                raise DeniedError(str(found.get("message", "the watch was refused")))
            return  # 410: the version has expired; the job is read anew
        if deadline_s is not None and clock() >= deadline_s:
            return


def _uid(document: Document) -> str:
    return str(document.get("metadata", {}).get("uid", ""))


def _version(document: Document) -> str:
    return str(document.get("metadata", {}).get("resourceVersion", ""))
