"""One loop per job: looks when something may have changed, waits after errors, and never twice at
once.

Owned by `handlers`; knows nothing of what a look does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable

from dlion_api.errors import DLionError
from dlion_operator.log_keys import speak_of
from dlion_operator.store import ObjectName

_LOG = logging.getLogger(__name__)

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
BETWEEN_LOOKS_S = 0.5
"""News comes in bursts: one look for all of it."""
AT_ONCE = 8
"""Looks under way at one time."""

OK, ERROR, DEFECT = "ok", "error", "defect"
"""How a look ends: well, to be repeated, or by a fault of ours; metrics and alerts name them."""

Look = Callable[[ObjectName], Awaitable[float | None]]
Report = Callable[[str, float], None]
"""Takes how a look ended (one of the three) and how long it took, in seconds."""


class Loops:
    """The loops of all jobs, in one event loop."""

    def __init__(self, look: Look, is_known: Callable[[ObjectName], bool], report: Report) -> None:
        """`is_known`: whether there is such a job; its loop ends after the look that finds none
        and has nothing more to look at."""
        self._look = look
        self._is_known = is_known
        self._report = report
        self._tasks: dict[ObjectName, asyncio.Task[None]] = {}
        self._news: dict[ObjectName, asyncio.Event] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)

    def trigger(self, name: ObjectName) -> None:
        """Something may have changed for that job."""
        if name not in self._tasks:
            self._news[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._run(name), name=f"job {'/'.join(name)}")
        self._news[name].set()

    async def close(self) -> None:
        """Ends all loops; a request under way is broken off."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, name: ObjectName) -> None:
        speak_of(name)
        news = self._news[name]
        failures = 0
        try:
            while True:
                news.clear()
                again_s, failed = await self._look_once(name, failures)
                failures = failures + 1 if failed else 0
                is_done = not failed and again_s is None
                if is_done and not self._is_known(name) and not news.is_set():
                    return
                # After an error news does not shorten the wait: it would be repeated at once.
                if failed and again_s is not None:
                    await asyncio.sleep(again_s)
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(again_s):
                        await news.wait()
                await asyncio.sleep(BETWEEN_LOOKS_S)
        finally:
            del self._tasks[name], self._news[name]

    async def _look_once(self, name: ObjectName, failures: int) -> tuple[float | None, bool]:
        """When to look again, and whether this look failed."""
        async with self._slots:
            began_s = time.monotonic()
            try:
                again_s = await self._look(name)
            except DLionError as error:
                result, wait_s = ERROR, backoff_s(failures)
                _LOG.warning("%s, looked at again in %.0f s: %s", "/".join(name), wait_s, error)
            except Exception:  # noqa: BLE001 - one job's defect must not end the others' loops
                result, wait_s = DEFECT, backoff_s(failures)
                _LOG.exception("%s: a defect of ours; tried again", "/".join(name))
            else:
                self._report(OK, time.monotonic() - began_s)
                return again_s, False
            self._report(result, time.monotonic() - began_s)
            return wait_s, True


def backoff_s(failures: int) -> float:
    """How long to wait after so many failures before: doubling, with jitter."""
    longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(failures, 10))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - spreads retries, hides nothing
