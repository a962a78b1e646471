"""The supervisor's I/O: one thread that waits for signals, children and timers.

Owns the child: starts it so that it dies with this process, signals it and reaps it.
As PID 1 or subreaper it also reaps the child's orphans. Decides nothing.
"""

import contextlib
import ctypes
import functools
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from dlion_worker.supervisor.parent_death import bound_to_parent
from dlion_worker.supervisor.supervision import (
    ExitSupervisor,
    Instruction,
    LogError,
    LogEvent,
    SendSignal,
    StartChild,
    Supervision,
)

_PR_SET_CHILD_SUBREAPER = 36
CHILD_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2"}
"""Read by the C library at process start. Otherwise each of a trainer's fifty threads gets an arena
that keeps freed memory: about 80 MB (benchmarks/exchange_cost.py)."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


StartFunction = Callable[[Sequence[str]], int]
"""Starts a command as a child that dies with this process, in a separate process group, with
default actions for the stop signals. Returns its pid."""


def spawn(command: Sequence[str]) -> int:
    """Start the command as a separate program."""
    bound = bound_to_parent(command)
    # A separate process group: Ctrl-C reaches only the supervisor, which forwards it.
    return os.posix_spawn(
        bound[0],
        bound,
        {**CHILD_ENVIRONMENT, **os.environ},
        setpgroup=0,
        setsigmask=(),
        setsigdef=STOP_SIGNALS,
    )


class SupervisorProcess:
    """Supervises one command in this process. Main thread only, because it handles signals."""

    def __init__(
        self,
        command: Sequence[str],
        supervision: Supervision,
        *,
        start: StartFunction = spawn,
        log: TextIO = sys.stderr,
    ) -> None:
        self._start_child = functools.partial(start, list(command))
        self._supervision = supervision
        self._log = log
        self._child: int | None = None
        self._code: int | None = None

    def run(self) -> int:
        """Supervise until the end; return the exit code."""
        # The child's subreaper: its orphans are reaped here, as for PID 1.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        with _signals() as readable:
            self._carry_out(self._supervision.start(time.monotonic()))
            while self._code is None:
                for number in _wait(readable, self._supervision.due_s):
                    if number in STOP_SIGNALS:
                        self._carry_out(self._supervision.stop_requested(number, time.monotonic()))
                self._reap()
                due_s = self._supervision.due_s
                if due_s is not None and time.monotonic() >= due_s:
                    self._carry_out(self._supervision.timer_expired(time.monotonic()))
        _end_orphans()
        return self._code

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        if self._code is None:
            for instruction in instructions:
                self._do(instruction)

    def _do(self, instruction: Instruction) -> None:
        match instruction:
            case StartChild():
                self._child = self._start_child()
                self._carry_out(self._supervision.child_started(self._child))
            case SendSignal(number):
                # Not reaped yet, so the pid is still the child's.
                if self._child is not None:
                    os.kill(self._child, number)
            case LogEvent(event, details):
                now = datetime.now(UTC).isoformat(timespec="milliseconds")
                self._write(json.dumps({"time": now, "supervisor": event, **details}))
            case LogError(message):
                now = datetime.now(UTC).isoformat(sep=" ", timespec="milliseconds")
                self._write(f"{now} ERROR dlion_worker.supervisor: {message}")
            case ExitSupervisor(code):
                self._code = code

    def _write(self, line: str) -> None:
        # The log's reader may be gone already; the child must still be ended.
        with contextlib.suppress(OSError):
            self._log.write(line + "\n")
            self._log.flush()

    def _reap(self) -> None:
        """Reap every child that has ended, including adopted ones."""
        for pid, code in _ended_children():
            if pid == self._child:
                # The child's own processes must not survive into the next start.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self._child = None
                self._carry_out(self._supervision.child_exited(code, time.monotonic()))
            else:
                os.waitpid(pid, 0)


def _ended_children() -> Iterator[tuple[int, int]]:
    """Yield (pid, exit code, or -n by signal n) of ended children; the loop body reaps them."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        by_signal = ended.si_code != os.CLD_EXITED
        yield ended.si_pid, -ended.si_status if by_signal else ended.si_status


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """A descriptor that receives one byte per signal, in place of the signals' effects."""
    readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGCHLD)}
    for number in before:
        signal.signal(number, lambda *_: None)
    waker = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    # The program that executed this one may have blocked them until now (`pod`).
    signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
    try:
        yield readable
    finally:
        signal.set_wakeup_fd(waker)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(readable)
        os.close(writable)


def _wait(readable: int, due_s: float | None) -> bytes:
    """Return the signals received; empty if the timer expired first."""
    timeout_s = None if due_s is None else max(0.0, due_s - time.monotonic())
    ready, _, _ = select.select([readable], [], [], timeout_s)
    return os.read(readable, 512) if ready else b""


def _end_orphans() -> None:
    """Kill and reap remaining children that the kernel lists (CONFIG_PROC_CHILDREN)."""
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    while listing.exists() and (orphans := listing.read_text(encoding="ascii").split()):
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(pid), signal.SIGKILL)
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(int(pid), 0)
