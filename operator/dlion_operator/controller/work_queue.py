"""One loop per job: reconcile when something may have changed, with back-off after errors.

A job is never reconciled twice at the same time. `site_operator` owns the queue.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from dlion_api.errors import DLionError
from dlion_operator.kubernetes.log_context import set_logged_job
from dlion_operator.kubernetes.store import ObjectName
from dlion_operator.model.backoff import backoff_s

_LOG = logging.getLogger(__name__)

BATCH_DELAY_S = 0.5
"""Changes come in bursts: one pass handles all of them."""
MAX_CONCURRENT = 8
"""Passes that run at the same time."""

OK, ERROR, DEFECT = "ok", "error", "defect"
"""Results of a pass: success, an error to retry, or a defect in DLion. Metrics use them."""

Reconcile = Callable[[ObjectName], Awaitable[float | None]]
ReportResult = Callable[[str, float], None]
"""Takes the result of a pass (one of the three) and its duration in seconds."""


class WorkQueue:
    """The loops of all jobs, in one event loop."""

    def __init__(
        self, reconcile: Reconcile, is_known: Callable[[ObjectName], bool], report: ReportResult
    ) -> None:
        """`is_known`: whether that job exists. The loop of an unknown job ends after a pass without
        further work."""
        self._reconcile = reconcile
        self._is_known = is_known
        self._report = report
        self._tasks: dict[ObjectName, asyncio.Task[None]] = {}
        self._changed: dict[ObjectName, asyncio.Event] = {}
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)

    def trigger(self, name: ObjectName) -> None:
        """Request a pass: something may have changed for that job."""
        if name not in self._tasks:
            self._changed[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._run(name), name=f"job {'/'.join(name)}")
        self._changed[name].set()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, name: ObjectName) -> None:
        set_logged_job(name)
        changed = self._changed[name]
        failures = 0
        try:
            while True:
                requeue_s, failed = await self._reconcile_once(name, failures)
                failures = failures + 1 if failed else 0
                is_done = not failed and requeue_s is None
                if is_done and not self._is_known(name) and not changed.is_set():
                    return
                # After an error a change must not shorten the wait: the error would repeat at once.
                if failed and requeue_s is not None:
                    await asyncio.sleep(requeue_s)
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(requeue_s):
                        await changed.wait()
                await asyncio.sleep(BATCH_DELAY_S)
        finally:
            del self._tasks[name], self._changed[name]

    async def _reconcile_once(self, name: ObjectName, failures: int) -> tuple[float | None, bool]:
        """Return the seconds until the next pass, and whether this one failed."""
        async with self._slots:
            # Not before: this pass sees what has changed while it waited for its turn.
            self._changed[name].clear()
            began_s = time.monotonic()
            try:
                requeue_s = await self._reconcile(name)
            except DLionError as error:
                result, wait_s = ERROR, backoff_s(failures)
                _LOG.warning("%s, retrying in %.0f s: %s", "/".join(name), wait_s, error)
            except Exception:  # noqa: BLE001 - one job's defect must not end the others' loops
                result, wait_s = DEFECT, backoff_s(failures)
                _LOG.exception("%s: a defect in DLion; retrying", "/".join(name))
            else:
                self._report(OK, time.monotonic() - began_s)
                return requeue_s, False
            self._report(result, time.monotonic() - began_s)
            return wait_s, True
