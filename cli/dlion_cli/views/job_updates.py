"""Yields a job after each change, across lost connections and expired watches.

Called by every command that waits. Prints nothing; `on_disconnect` receives connection errors.
"""

import time
from collections.abc import Callable, Iterator
from typing import Final

from dlion_api.errors import AbsentError, DeniedError, UnavailableError
from dlion_cli.cluster.cluster_jobs import JobClient
from dlion_cli.views.job_status import JobStatus

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
) -> Iterator[JobStatus]:
    """Yield the job, then each change; end when it was deleted or replaced by one of its name.

    After the first response, it retries with increasing pauses while the server is unavailable.

    Raises: AbsentError or UnavailableError at the first request; DeniedError at any;
    WaitTimeoutError after `timeout_s`.
    """
    deadline_s = None if timeout_s is None else clock() + timeout_s
    uid = version = ""
    pause_s = FIRST_PAUSE_S
    while True:
        began_s = clock()
        try:
            job = JobStatus(jobs.get(name))
            if uid and job.uid != uid:
                return
            uid = job.uid
            if job.version != version:
                yield job
            version = job.version
            pause_s = FIRST_PAUSE_S
            for changed in _changes(jobs, name, version, clock, deadline_s):
                if changed is None:
                    return
                version = changed.version
                yield changed
            # A proxy may end each watch at once.
            wait_s = FIRST_PAUSE_S - (clock() - began_s)
        except AbsentError:
            if not uid:
                raise
            return
        except UnavailableError as error:
            if not uid:
                raise
            on_disconnect(str(error))
            wait_s, pause_s = pause_s, min(2 * pause_s, MAX_PAUSE_S)
        if wait_s > 0:
            sleep(wait_s if deadline_s is None else max(0, min(wait_s, deadline_s - clock())))
        if deadline_s is not None and clock() >= deadline_s:
            raise WaitTimeoutError


def _changes(
    jobs: JobClient, name: str, version: str, clock: Callable[[], float], deadline_s: float | None
) -> Iterator[JobStatus | None]:
    """The job at each change, None once it was deleted; ends when one watch ends."""
    left_s = WATCH_S if deadline_s is None else max(1, round(min(WATCH_S, deadline_s - clock())))
    for event in jobs.watch(name, version, within_s=left_s):
        kind, document = event.get("type"), event.get("object") or {}
        if kind == "DELETED":
            yield None
        elif kind in ("ADDED", "MODIFIED"):
            yield JobStatus(document)
        elif kind == "ERROR":
            if document.get("code") == 403:
                raise DeniedError(str(document.get("message", "the watch was denied")))
            return  # 410: the version has expired; the caller reads the job again
        if deadline_s is not None and clock() >= deadline_s:
            return
