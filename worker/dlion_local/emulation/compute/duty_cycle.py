"""Enforces CPU quotas without root, by stopping and continuing processes.

Run as `python -m dlion_local.emulation.compute.duty_cycle` by `emulation.compute.quotas`, once for
all workers. Requests are JSON lines on standard input: first a pid file of each worker's
supervisor, written by `emulation.network.enter`, then quotas. The supervisor's descendants are
throttled, so that a restarted trainer is included. At the end of input, or on SIGTERM, all stopped
processes are continued.

A quota holds on average: excess use, on several processors at once, is paid off by a longer stop.
The cost is a few system calls about twenty times per second and worker.
"""

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dlion_local.emulation.compute.quotas import process_cpu_s

CYCLE_S = 0.05
"""Approximate length of one run and stop together, for quotas below one core."""
SEARCH_S = 0.2
"""Interval between searches for descendants. A new trainer is not throttled until then."""
_MIN_SLEEP_S = 0.002
_MAX_SLEEP_S = 0.1


@dataclass
class CpuBudget:
    """CPU credit of a worker; a debt is paid off while it is stopped.

    Pure arithmetic: `ProcessThrottle` reads the clocks and sends the signals.
    """

    quota_cores: float
    credit_s: float = 0.0
    running: bool = True

    def update(self, passed_s: float, used_s: float, processors: int) -> float:
        """Account for used CPU and set `running`. Return the seconds until the next update."""
        max_s = self.quota_cores * CYCLE_S
        self.credit_s = min(max_s, self.credit_s + self.quota_cores * passed_s - used_s)
        if self.running and self.credit_s <= 0:
            self.running = False
        elif not self.running and self.credit_s >= max_s / 2:
            self.running = True
        if self.running:
            # The earliest time at which the credit is used up, with every processor busy.
            return self.credit_s / max(processors - self.quota_cores, 0.1)
        return (max_s / 2 - self.credit_s) / self.quota_cores


@dataclass
class ProcessThrottle:
    find_processes: Callable[[], list[int]]
    """Finds the processes to throttle; called every `SEARCH_S`."""
    budget: CpuBudget | None = None
    pids: list[int] = field(default_factory=list)
    used_s: float = 0.0
    """CPU seconds of all its processes, ended ones included."""
    stopped_s: float = 0.0
    _last_cpu_s: dict[int, float] = field(default_factory=dict)
    _stopped: set[int] = field(default_factory=set)
    _searched_at_s: float = float("-inf")
    _booked_at_s: float = 0.0

    def set_quota(self, cores: float | None, now_s: float) -> None:
        """Set the quota in cores; None removes it."""
        if cores is None:
            self.release()
            self.budget = None
            return
        if self.budget is None:
            self._booked_at_s = now_s
            self._read()  # earlier use does not count against the quota
            self.budget = CpuBudget(cores)
        else:
            self.budget.quota_cores = cores

    def run_once(self, now_s: float, processors: int) -> float:
        """Account for CPU use, then stop or continue. Return the seconds until the next run."""
        if now_s - self._searched_at_s >= SEARCH_S:
            self._searched_at_s = now_s
            self.pids = self.find_processes()
        used_s = self._read()
        if self.budget is None:
            return _MAX_SLEEP_S
        passed_s = now_s - self._booked_at_s
        self._booked_at_s = now_s
        if not self.budget.running:
            self.stopped_s += passed_s
        wait_s = self.budget.update(passed_s, used_s, processors)
        if self.budget.running:
            self.release()
        else:
            for pid in self.pids:
                if pid not in self._stopped and _send(pid, signal.SIGSTOP):
                    self._stopped.add(pid)
        return wait_s

    def _read(self) -> float:
        """CPU seconds used since the last reading."""
        used_s = 0.0
        readings = {}
        for pid in self.pids:
            total_s = process_cpu_s(pid)
            if total_s is not None:
                used_s += max(0.0, total_s - self._last_cpu_s.get(pid, 0.0))
                readings[pid] = total_s
        self._last_cpu_s = readings
        self.used_s += used_s
        return used_s

    def release(self) -> None:
        """Continue all stopped processes."""
        for pid in self._stopped:
            _send(pid, signal.SIGCONT)
        self._stopped.clear()


def descendants(pid_file: Path) -> list[int]:
    """All descendants of the process in the pid file; empty while there is no such file."""
    try:
        waiting = [int(pid_file.read_text())]
    except (FileNotFoundError, ValueError):
        return []
    pids: list[int] = []
    while waiting:
        children = _children(waiting.pop())
        pids += children
        waiting += children
    return pids


def _children(pid: int) -> list[int]:
    children: list[int] = []
    try:
        # Check every thread: a supervisor may start its trainer from any.
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += [int(child) for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return children
    return children


def _send(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def throttle_until_eof(throttles: dict[int, ProcessThrottle]) -> None:
    processors = len(os.sched_getaffinity(0))
    # Read unbuffered: select() does not see lines in a Python buffer.
    pending = b""
    while True:
        now_s = time.monotonic()
        wait_s = min(
            (throttle.run_once(now_s, processors) for throttle in throttles.values()),
            default=_MAX_SLEEP_S,
        )
        readable, _, _ = select.select([0], [], [], min(_MAX_SLEEP_S, max(_MIN_SLEEP_S, wait_s)))
        if not readable:
            continue
        data = os.read(0, 65536)
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            _answer(json.loads(line), throttles)


def _answer(request: Mapping[str, Any], throttles: dict[int, ProcessThrottle]) -> None:
    for rank, pid_file in request.get("pid_files", {}).items():
        throttles[int(rank)] = ProcessThrottle(partial(descendants, Path(pid_file)))
    if "rank" in request:
        throttles[request["rank"]].set_quota(request["quota_cores"], time.monotonic())
    answer = {
        "used_s": {rank: throttle.used_s for rank, throttle in throttles.items()},
        "stopped_s": {rank: throttle.stopped_s for rank, throttle in throttles.items()},
    }
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Enforce quotas until standard input ends or SIGTERM."""
    throttles: dict[int, ProcessThrottle] = {}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        throttle_until_eof(throttles)
    finally:
        for throttle in throttles.values():
            throttle.release()


if __name__ == "__main__":
    main()
