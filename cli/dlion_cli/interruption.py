"""Ctrl-C and SIGTERM to `dlion run`: heard once, and everything ended within five seconds.

Owns the handlers and the time that is left after a signal. Used by `run`; ending the processes is
the local runner's part.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

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
    """Inside, the first signal raises KeyboardInterrupt; a second one does not disturb its end."""
    interruption = Interruption(within_s)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        interruption.at_s = time.monotonic()
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _out_of_time(_number: int, _frame: FrameType | None) -> None:
    raise OutOfTimeError
