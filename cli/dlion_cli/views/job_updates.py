"""Yields a job's document after each change, across lost connections and expired watches.

Called by every command that waits. Prints nothing; `on_disconnect` receives connection errors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from dlion_api.errors import AbsentError, DeniedError, UnavailableError
from dlion_cli.cluster.cluster_jobs import Document, JobClient

WATCH_S: Final = 60
FIRST_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 15.0


class WaitTimeoutError(Exception):
    """The user's time limit has expired."""


def follow(
    jobs: JobClient,
    name: str,
    *,
    timeout_s: float | None = None,
    on_disconnect: Callable[[str], None] = lambda _message: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Document]:
    """Yield the job, then each change; end when it was deleted or replaced by one of its name.

    After the first response, it retries with increasing pauses while the server is unavailable.

    Raises: AbsentError or UnavailableError at the first request; DeniedError at any;
    WaitTimeoutError after `timeout_s`.
    """
    deadline_s = None if timeout_s is None else clock() + timeout_s
    uid = version = ""
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            document = jobs.get(name)
            if uid and _uid(document) != uid:
                return
            uid = _uid(document)
            if _version(document) != version:
                yield document
            version = _version(document)
            pause_s = FIRST_PAUSE_S
            for event in _changes(jobs, name, version, clock, deadline_s):
                if event is None:
                    return
                version = _version(event)
                yield event
        except AbsentError:
            if not uid:
                raise
            return
        except UnavailableError as error:
            if not uid:
                raise
            on_disconnect(str(error))
            sleep(pause_s if deadline_s is None else max(0, min(pause_s, deadline_s - clock())))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        if deadline_s is not None and clock() >= deadline_s:
            raise WaitTimeoutError


def _changes(
    jobs: JobClient, name: str, version: str, clock: Callable[[], float], deadline_s: float | None
) -> Iterator[Document | None]:
    """Documents of one watch, None if the job was deleted; ends when the watch ends."""
    left_s = WATCH_S if deadline_s is None else max(1, min(WATCH_S, round(deadline_s - clock())))
    for event in jobs.watch(name, version, within_s=left_s):
        kind, document = event.get("type"), event.get("object") or {}
        if kind == "DELETED":
            yield None
        elif kind in ("ADDED", "MODIFIED"):
            yield document
        elif kind == "ERROR":
            if document.get("code") == 403:
                raise DeniedError(str(document.get("message", "the watch was denied")))
            return  # 410: the version has expired; the caller reads the job again
        if deadline_s is not None and clock() >= deadline_s:
            return


def _uid(document: Document) -> str:
    return str(document.get("metadata", {}).get("uid", ""))


def _version(document: Document) -> str:
    return str(document.get("metadata", {}).get("resourceVersion", ""))
