"""The trainer's own CPU quota: read again and again, and reported when it changes.

Owns how often the control group is read: a reading costs a tenth of a millisecond, which the
quota pays for. Called by the training thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dlion_api.measurements import CpuAllowance
from dlion_worker.sidecar.node_facts import OwnCpu

LOOK_S = 0.1
TELL_S = 0.5


class QuotaWatch:
    """This process's quota as it was when last looked at."""

    def __init__(
        self, cpu: OwnCpu | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cpu = OwnCpu() if cpu is None else cpu
        self._clock = clock
        self.cores = self._cpu.quota_cores()
        self._look_s = clock() + LOOK_S
        self._tell_s = clock()

    def changed(self) -> bool:
        """Whether the quota is another one than at the last call; looks at most every 0.1 s."""
        if self._clock() < self._look_s:
            return False
        self._look_s = self._clock() + LOOK_S
        before, self.cores = self.cores, self._cpu.quota_cores()
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
