"""The trainer's own CPU quota: read again and again, and reported when it changes.

Owns how often the control group is read: a reading costs a tenth of a millisecond, which the
quota pays for. Called by the training thread; tells changes from a thread of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dlion_api.measurements import CpuAllowance
from dlion_worker.sidecar.node_facts import OwnCpu

LOOK_S = 0.1
WATCH_S = 0.2
TELL_S = 0.5


class QuotaWatch:
    """This process's quota as it was when last looked at. Safe to use from two threads."""

    def __init__(
        self, cpu: OwnCpu | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cpu = OwnCpu() if cpu is None else cpu
        self._clock = clock
        self.cores = self._cpu.quota_cores()
        self._look_s = clock() + LOOK_S
        self._tell_s = clock()
        self._lock = threading.Lock()
        self._changed = False

    def changed(self) -> bool:
        """Whether the quota has become another one since the last call; looks at most every
        0.1 s."""
        with self._lock:
            self._look()
            changed, self._changed = self._changed, False
            return changed

    @contextmanager
    def telling(self, tell: Callable[[CpuAllowance], None]) -> Iterator[None]:
        """Meanwhile a change is told at once, not only when the step under way is over: with a
        fifth of the quota that step takes five times as long, and the others would go on with
        shares that are out of date."""
        closing = threading.Event()
        thread = threading.Thread(
            target=self._watch, args=(tell, closing), name="quota-watch", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            closing.set()
            thread.join()

    def _watch(self, tell: Callable[[CpuAllowance], None], closing: threading.Event) -> None:
        while not closing.wait(WATCH_S):
            with self._lock:
                another = self._look()
            if another and (allowance := self.allowance(now=True)) is not None:
                tell(allowance)

    def _look(self) -> bool:
        if self._clock() < self._look_s:
            return False
        self._look_s = self._clock() + LOOK_S
        before, self.cores = self.cores, self._cpu.quota_cores()
        self._changed |= self.cores != before
        return self.cores != before

    def throttled_s(self) -> float:
        """How long the quota has held this process's group so far."""
        return self._cpu.throttled_s()

    def allowance(self, *, now: bool) -> CpuAllowance | None:
        """The next report, if one is due or wanted `now`."""
        if self._clock() < self._tell_s and not now:
            return None
        self._tell_s = self._clock() + TELL_S
        return CpuAllowance(self.cores, time.process_time(), self.throttled_s())
