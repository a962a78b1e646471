"""CPU seconds that the exchange uses in this process: its own thread and gRPC's.

gRPC does about two fifths of its network work in separate threads. Systems other than Linux do
not identify them; only our own thread counts there.
"""

import threading
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_GRPC_PREFIXES = ("event_engine", "grpc_", "resolver-execut", "lifeguard", "timer_manager")
"""Name prefixes of gRPC core's threads, as the kernel stores them (15 characters)."""

_POLLER = "_poll_wrapper"
"""The Python thread in which gRPC's asyncio layer waits for completions."""


class ExchangeCpuMeter:
    """Sums the CPU time of threads that start and end; call it from one thread only.

    Each thread is identified once: doing it on every call took a millisecond with forty threads.
    """

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        self._is_ours: dict[int, bool] = {}
        self._last_s: dict[int, float] = {}
        self._ended_s = 0.0

    def seconds(self) -> float:
        """CPU seconds so far. Never decreases, even when a thread ends."""
        now_s = {t: spent_s for t in self._ours() if (spent_s := _spent_s(t)) is not None}
        if not now_s and self._thread.ident is not None and self._thread.is_alive():
            return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))
        for task, before_s in self._last_s.items():
            if now_s.get(task, 0.0) < before_s:
                # Ended, or another thread reuses the number: identify it again.
                self._ended_s += before_s
                self._is_ours.pop(task, None)
        self._last_s = now_s
        return self._ended_s + sum(now_s.values())

    def _ours(self) -> list[int]:
        tasks = _tasks()
        if self._is_ours.keys() != set(tasks):
            known = self._is_ours
            named = {
                thread.native_id
                for thread in threading.enumerate()
                if thread is self._thread or _POLLER in thread.name
            }
            self._is_ours = {
                task: known[task]
                if task in known
                else task in named or _name(task).startswith(_GRPC_PREFIXES)
                for task in tasks
            }
        return [task for task, is_ours in self._is_ours.items() if is_ours]


def _tasks() -> list[int]:
    try:
        return [int(task.name) for task in _TASKS.iterdir()]
    except OSError:
        return []


def _name(task: int) -> str:
    try:
        return (_TASKS / str(task) / "comm").read_text()
    except OSError:
        return ""


def _spent_s(task: int) -> float | None:
    """A thread's CPU clock (`pthread_getcpuclockid` in C); None if it has just ended."""
    try:
        return time.clock_gettime((~task << 3) | 6)
    except OSError:
        return None
