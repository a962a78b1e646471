"""The supervisor's skin: one thread that waits for signals, children and the time to act.

Owns the child: starts it (spawned, never forked; tethered, so that it dies with this process),
signals it, reaps it, and reaps as PID 1 or subreaper what it leaves behind. Decides nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from dlion_worker.supervisor.supervision import (
    Began,
    End,
    Event,
    Exit,
    Exited,
    Instruction,
    Send,
    Signalled,
    Start,
    Started,
    Supervision,
    Tell,
    TimeCame,
)
from dlion_worker.supervisor.tether import tethered

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PR_SET_CHILD_SUBREAPER = 36
CHILD_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2"}
"""Read by the C library when a process starts. A trainer's fifty threads would each get an arena
that keeps what was freed: about 80 MB (benchmarks/exchange_cost.py)."""

ASKED_TO_END = (signal.SIGTERM, signal.SIGINT)


class SupervisorProcess:
    """This process as the supervisor of one command. Main thread only: it handles signals."""

    def __init__(
        self, command: Sequence[str], supervision: Supervision, *, log: TextIO = sys.stderr
    ) -> None:
        self._command = list(command)
        self._supervision = supervision
        self._log = log
        self._child: int | None = None
        self._code: int | None = None

    def run(self) -> int:
        """Supervises until it is over; yields the exit code."""
        _adopt_orphans()
        with _signals() as readable:
            self._carry_out(Began())
            while self._code is None:
                for number in _wait(readable, self._supervision.due_s):
                    if number in ASKED_TO_END:
                        self._carry_out(Signalled(number))
                self._reap()
                due_s = self._supervision.due_s
                if due_s is not None and time.monotonic() >= due_s:
                    self._carry_out(TimeCame())
        _end_orphans()
        return self._code

    def _carry_out(self, event: Event) -> None:
        if self._code is None:
            for instruction in self._supervision.handle(event, time.monotonic()):
                self._do(instruction)

    def _do(self, instruction: Instruction) -> None:
        match instruction:
            case Start():
                self._start()
            case Send(number):
                self._send(number)
            case Tell(event, details):
                now = datetime.now(UTC).isoformat(timespec="milliseconds")
                line = json.dumps({"time": now, "supervisor": event, **details})
                # The reader of the log may be gone already; the child is still to be ended.
                with contextlib.suppress(OSError):
                    self._log.write(line + "\n")
                    self._log.flush()
            case End(code):
                self._code = code

    def _start(self) -> None:
        command = tethered(self._command)
        # A group of its own: a terminal's Ctrl-C reaches the supervisor alone, which forwards it.
        self._child = os.posix_spawn(
            command[0],
            command,
            {**CHILD_ENVIRONMENT, **os.environ},
            setpgroup=0,
            setsigmask=(),
            setsigdef=ASKED_TO_END,
        )
        self._carry_out(Started(self._child))

    def _send(self, number: int) -> None:
        # Not reaped yet, so the pid is still the child's.
        if self._child is not None:
            os.kill(self._child, number)

    def _reap(self) -> None:
        """Collects every child that has ended, the adopted ones too."""
        for pid, exit_ in _ended_children():
            if pid == self._child:
                # What the child started must not live beside its successor.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self._child = None
                self._carry_out(Exited(exit_))
            else:
                os.waitpid(pid, 0)


def _ended_children() -> Iterator[tuple[int, Exit]]:
    """Children that have ended, each left as it is: the loop body collects it."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        if ended.si_code == os.CLD_EXITED:
            yield ended.si_pid, Exit(code=ended.si_status)
        else:
            yield ended.si_pid, Exit(signal=ended.si_status)


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """A descriptor that yields one byte per signal, instead of the signals' own effects."""
    readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = {number: signal.getsignal(number) for number in (*ASKED_TO_END, signal.SIGCHLD)}
    for number in before:
        signal.signal(number, lambda *_: None)
    waker = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    # Whoever became this process may have held them back until somebody handles them (`pod`).
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
    """The signals that came; empty when the time has come first."""
    timeout_s = None if due_s is None else max(0.0, due_s - time.monotonic())
    ready, _, _ = select.select([readable], [], [], timeout_s)
    return os.read(readable, 512) if ready else b""


def _adopt_orphans() -> None:
    """What the child leaves behind becomes ours, to be reaped: as PID 1 it would anyway."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_orphans() -> None:
    """Ends and reaps whatever is still ours; only what the kernel lists (CONFIG_PROC_CHILDREN)."""
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    while listing.exists() and (orphans := listing.read_text(encoding="ascii").split()):
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(pid), signal.SIGKILL)
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(int(pid), 0)
