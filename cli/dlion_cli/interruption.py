"""Ctrl-C, SIGTERM and hang-ups: heard once, and everything of `dlion run` ended in five seconds.

Owns the handlers and the time that is left after a signal. Used by `run`; ending the processes is
the local runner's part.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO, TypeGuard

REPORT_WITHIN_S = 3.5
"""From the signal to the end of the report, which grows with the run; the rest is left to exit."""


class OutOfTimeError(BaseException):
    """What goes on after an interruption takes too long. No `Exception`: nobody may swallow it."""


class Interruption:
    """Whether and when the first signal came."""

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self.at_s: float | None = None
        """By the monotonic clock; None as long as there was no signal."""

    @contextmanager
    def in_time(self) -> Iterator[None]:
        """After a signal, breaks off what is inside at `within_s` behind it; else does nothing.

        Main thread only. Raises: OutOfTimeError.
        """
        if self.at_s is None:
            yield
            return
        before = signal.signal(signal.SIGALRM, _out_of_time)
        try:
            left_s = self.at_s + self._within_s - time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left_s))
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)


@contextmanager
def interruptible(within_s: float = REPORT_WITHIN_S) -> Iterator[Interruption]:
    """Inside, the first signal raises KeyboardInterrupt; a second one does not disturb its end.

    Under `nohup` the terminal may go away.
    """
    interruption = Interruption(within_s)
    terminals = [stream.fileno() for stream in (sys.__stdout__, sys.__stderr__) if _shown(stream)]

    def interrupt(number: int, _frame: FrameType | None) -> None:
        interruption.at_s = time.monotonic()
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGHUP:
            _put_away(terminals)
        raise KeyboardInterrupt

    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _shown(stream: TextIO | None) -> TypeGuard[TextIO]:
    return stream is not None and not stream.closed and stream.isatty()


def _put_away(terminals: list[int]) -> None:
    """To write to a terminal that has gone is an error, and nobody reads it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for terminal in terminals:
        os.dup2(nowhere, terminal)
    os.close(nowhere)


def _out_of_time(_number: int, _frame: FrameType | None) -> None:
    raise OutOfTimeError
