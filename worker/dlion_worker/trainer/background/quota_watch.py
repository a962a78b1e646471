"""Reads the trainer's own CPU quota repeatedly, and reports changes.

Reading the control group costs 0.1 ms of the quota, so this module limits how often. The training
thread calls it; changes are reported from a separate thread.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dlion_api.protocol.measurements import CpuAllowance
from dlion_worker.sidecar.node_facts import ProcessCpuLimits

READ_INTERVAL_S = 0.1
WATCH_INTERVAL_S = 0.2
REPORT_INTERVAL_S = 0.5


class QuotaWatch:
    """This process's quota as last read. Safe to use from two threads."""

    def __init__(
        self, cpu: ProcessCpuLimits | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cpu = ProcessCpuLimits() if cpu is None else cpu
        self._clock = clock
        self.cores = self._cpu.quota_cores()
        self.throttled_s = self._cpu.throttled_s
        self._next_read_s = clock() + READ_INTERVAL_S
        self._next_report_s = clock()
        self._lock = threading.Lock()
        self._changed = False

    def changed(self) -> bool:
        """Whether the quota has changed since the last call; reads at most every 0.1 s."""
        with self._lock:
            self._read()
            changed, self._changed = self._changed, False
            return changed

    @contextmanager
    def reporting_changes(self, report: Callable[[CpuAllowance], None]) -> Iterator[None]:
        """Report changes at once inside this context, not only after the current step.

        With a fifth of the quota a step takes five times as long, and peers would keep outdated
        batch shares meanwhile.
        """
        closing = threading.Event()
        thread = threading.Thread(
            target=self._watch, args=(report, closing), name="quota-watch", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            closing.set()
            thread.join()

    def _watch(self, report: Callable[[CpuAllowance], None], closing: threading.Event) -> None:
        while not closing.wait(WATCH_INTERVAL_S):
            with self._lock:
                has_changed = self._read()
            if has_changed and (allowance := self.allowance(now=True)) is not None:
                report(allowance)

    def _read(self) -> bool:
        if self._clock() < self._next_read_s:
            return False
        self._next_read_s = self._clock() + READ_INTERVAL_S
        before, self.cores = self.cores, self._cpu.quota_cores()
        self._changed |= self.cores != before
        return self.cores != before

    def allowance(self, *, now: bool) -> CpuAllowance | None:
        """The next report, if one is due or requested `now`."""
        if self._clock() < self._next_report_s and not now:
            return None
        self._next_report_s = self._clock() + REPORT_INTERVAL_S
        return CpuAllowance(self.cores, time.process_time(), self.throttled_s())
