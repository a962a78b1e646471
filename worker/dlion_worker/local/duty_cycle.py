"""A process that holds others' CPU at a quota by stopping and continuing them: no root needed.

`python -m dlion_worker.local.duty_cycle --config FILE`, started by `local.duty_cycled_cpu`; one for
all workers. The file names for each worker a pid file, left by `local.enter`: that process is the
supervisor, and what is held are its *descendants*, so that a restarted trainer is found again.
Quotas come as JSON lines on standard input; at the end of the input, or by SIGTERM, everything
that was stopped is continued, then the process ends.

A quota holds on the average: what a process used above it, on several processors at once, is a
debt that it stays stopped for. The work is a few system calls per turn, about twenty turns per
second and worker.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlion_worker.local.quotas import process_cpu_s

log = logging.getLogger(__name__)

CYCLE_S = 0.05
"""About how long one run and one stop together take, where the quota is below one core."""
SEARCH_S = 0.2
"""How often the descendants are looked up: a new trainer runs free for that long."""
_LEAST_SLEEP_S = 0.002
_MOST_SLEEP_S = 0.1


@dataclass
class Account:
    """CPU that a worker may still use, as credit; a debt is paid off by standing still.

    Pure arithmetic: who reads clocks and sends signals is `Holder`.
    """

    quota_cores: float
    credit_s: float = 0.0
    running: bool = True

    def book(self, passed_s: float, used_s: float, processors: int) -> float:
        """Note what passed; sets `running`; how long this may be left alone."""
        most_s = self.quota_cores * CYCLE_S
        self.credit_s = min(most_s, self.credit_s + self.quota_cores * passed_s - used_s)
        if self.running and self.credit_s <= 0:
            self.running = False
        elif not self.running and self.credit_s >= most_s / 2:
            self.running = True
        if self.running:
            # At the soonest, with every processor busy for it, the credit is used up by then.
            return self.credit_s / max(processors - self.quota_cores, 0.1)
        return (most_s / 2 - self.credit_s) / self.quota_cores


@dataclass
class Holder:
    """One worker's processes and its account."""

    find: Callable[[], list[int]]
    """The processes to hold now: asked again every `SEARCH_S`."""
    account: Account | None = None
    pids: list[int] = field(default_factory=list)
    used_s: float = 0.0
    """By processes that have gone, and by those that are there up to the last turn."""
    stopped_s: float = 0.0
    _seen_s: dict[int, float] = field(default_factory=dict)
    _stopped: set[int] = field(default_factory=set)
    _searched_at_s: float = float("-inf")
    _booked_at_s: float = 0.0

    def set_quota(self, cores: float | None, now_s: float) -> None:
        """Hold at so many cores from now on; None lets go."""
        if cores is None:
            self.release()
            self.account = None
            return
        if self.account is None:
            self._booked_at_s = now_s
            self._read()  # what was used before is not held against the quota
            self.account = Account(cores)
        else:
            self.account.quota_cores = cores

    def turn(self, now_s: float, processors: int) -> float:
        """Look, book, stop or continue; how long this worker may be left alone."""
        if now_s - self._searched_at_s >= SEARCH_S:
            self._searched_at_s = now_s
            self.pids = self.find()
        used_s = self._read()
        if self.account is None:
            return _MOST_SLEEP_S
        passed_s = now_s - self._booked_at_s
        self._booked_at_s = now_s
        if not self.account.running:
            self.stopped_s += passed_s
        alone_s = self.account.book(passed_s, used_s, processors)
        if self.account.running:
            self.release()
        else:
            for pid in self.pids:
                if pid not in self._stopped and _send(pid, signal.SIGSTOP):
                    self._stopped.add(pid)
        return alone_s

    def _read(self) -> float:
        """CPU seconds used since the last reading."""
        used_s = 0.0
        seen = {}
        for pid in self.pids:
            total_s = process_cpu_s(pid)
            if total_s is not None:
                used_s += max(0.0, total_s - self._seen_s.get(pid, 0.0))
                seen[pid] = total_s
        self._seen_s = seen
        self.used_s += used_s
        return used_s

    def release(self) -> None:
        """Continue what was stopped."""
        for pid in self._stopped:
            _send(pid, signal.SIGCONT)
        self._stopped.clear()


def descendants(pid_file: Path) -> list[int]:
    """The processes below the one that the pid file names; none while it is not there."""
    try:
        waiting = [int(pid_file.read_text())]
    except (FileNotFoundError, ValueError):
        return []
    found: list[int] = []
    while waiting:
        children = _children(waiting.pop())
        found += children
        waiting += children
    return found


def _children(pid: int) -> list[int]:
    children: list[int] = []
    try:
        # Of every thread: a supervisor may start its trainer from any.
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += [int(child) for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return children
    return children


def _send(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


class Ended(Exception):  # noqa: N818 (not an error: the order to end)
    """SIGTERM, raised where the loop stands."""


def hold(holders: Mapping[int, Holder]) -> None:
    """Hold everyone to their quotas until standard input ends."""
    processors = len(os.sched_getaffinity(0))
    # Waiting on a file descriptor that may be a pipe or a file: unbuffered, or lines would hide.
    pending = b""
    while True:
        now_s = time.monotonic()
        alone_s = min(
            (holder.turn(now_s, processors) for holder in holders.values()), default=_MOST_SLEEP_S
        )
        readable, _, _ = select.select(
            [0], [], [], min(_MOST_SLEEP_S, max(_LEAST_SLEEP_S, alone_s))
        )
        if not readable:
            continue
        data = os.read(0, 65536)
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            _answer(json.loads(line), holders)


def _answer(request: Mapping[str, Any], holders: Mapping[int, Holder]) -> None:
    if "rank" in request:
        holder = holders[request["rank"]]
        holder.set_quota(request["quota_cores"], time.monotonic())
    answer = {
        "used_s": {rank: holder.used_s for rank, holder in holders.items()},
        "stopped_s": {rank: holder.stopped_s for rank, holder in holders.items()},
    }
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _raise_ended(_number: int, _frame: object) -> None:
    raise Ended


def main() -> None:
    """Hold the workers of `--config FILE` until standard input ends or SIGTERM comes."""
    parser = argparse.ArgumentParser(prog="python -m dlion_worker.local.duty_cycle")
    parser.add_argument("--config", type=Path, required=True)
    options = parser.parse_args()
    config = json.loads(options.config.read_text(encoding="utf-8"))
    holders = {
        int(rank): Holder(find=_finder(Path(pid_file)))
        for rank, pid_file in config["pid_files"].items()
    }
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _raise_ended)
    try:
        hold(holders)
    except Ended:
        log.info("ended by SIGTERM")
    finally:
        for holder in holders.values():
            holder.release()


def _finder(pid_file: Path) -> Callable[[], list[int]]:
    return lambda: descendants(pid_file)


if __name__ == "__main__":
    main()
