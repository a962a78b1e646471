"""Handles Ctrl-C, SIGTERM and SIGHUP, so that `dlion run` ends within five seconds.

While commands are imported a signal ends the process (`exit_on_signals`), later it raises
KeyboardInterrupt (`raise_on_signals`), and in a run only the first one does (`interruptible`). Once
the command has ended, it ends the process again (`exit_on_later_signals`). Owns the signal handlers
and the time limit. The local runner ends the processes.

Python drops an exception that is raised in a finalizer or callback, as of an abandoned response
(`io.IOBase`, without a report). So a command that handles one of `raise_on_signals` calls
`take_interrupt`; without it the signal is sent again.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from dlion_api.exit_codes import ExitCode

if TYPE_CHECKING:
    from sys import UnraisableHookArgs  # exists for type checkers only

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPORT_WITHIN_S = 3.5
"""Seconds from the signal to the end of the report; the rest of the five seconds is for exit."""


def exit_on_signals() -> None:
    """From now on a signal ends the process at once, with a message: it has begun nothing.

    Ignored signals stay ignored. Unblocks them: the starting process may have blocked them until
    now (`dlion.run_processes`). Main thread only.
    """
    for number in SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _exit_interrupted)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def raise_on_signals() -> None:
    """From now on the signals of `exit_on_signals` raise KeyboardInterrupt. Else do nothing."""
    given = [each for each in SIGNALS if signal.getsignal(each) is _exit_interrupted]
    for number in given:
        signal.signal(number, _raise_interrupt)
    if given:
        sys.unraisablehook = _report_dropped


def exit_on_later_signals() -> None:
    """From now on the signals of `raise_on_signals` end the process at once: it only reports why it
    ends. Else do nothing."""
    for number in SIGNALS:
        if signal.getsignal(number) is _raise_interrupt:
            signal.signal(number, _exit_interrupted)


def take_interrupt(error: BaseException | None) -> ExitCode:
    """The exit code of a command that this KeyboardInterrupt, or an error from it, ends.

    Its signal counts as handled.
    """
    pending, known = [error], set[int]()
    while pending:
        each = pending.pop()
        if each is None or id(each) in known:  # a user's code may make a cycle of errors
            continue
        known.add(id(each))
        if isinstance(each, _Interrupt):
            each.is_taken = True
        pending += each.__cause__, each.__context__
    return ExitCode.INTERRUPTED


class _Interrupt(KeyboardInterrupt):
    """A signal's exception. It sends the signal again if it is dropped."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.is_taken = False
        self._number = number

    def __del__(self) -> None:
        # A thread that starts while Python shuts down does not run, and `start` waits for it.
        if not self.is_taken and not sys.is_finalizing():
            _send_soon(self._number)


def _send_soon(number: int) -> None:
    """Send the signal after the finalizer or callback that runs now: there it would be dropped."""
    again = threading.Timer(0.05, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()


def _report_dropped(dropped: UnraisableHookArgs) -> None:
    if not isinstance(dropped.exc_value, _Interrupt):
        sys.__unraisablehook__(dropped)


def _exit_interrupted(number: int, _frame: FrameType | None) -> None:
    after_ctrl_c = b"\n" if number == signal.SIGINT and os.isatty(2) else b""
    with suppress(OSError):  # the terminal may be closed
        os.write(2, after_ctrl_c + b"dlion: interrupted\n")
    os._exit(ExitCode.INTERRUPTED)


def _raise_interrupt(number: int, _frame: FrameType | None) -> None:
    if number == signal.SIGHUP:
        _redirect_to_null(_terminals())
    raise _Interrupt(number)


class OutOfTimeError(BaseException):
    """The time after an interruption is over. No `Exception`, so that no handler swallows it."""


class Interruption:
    """Whether and when the first signal arrived."""

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self.at_s: float | None = None
        """Monotonic time of the signal; None before it."""

    @contextmanager
    def time_limit(self) -> Iterator[None]:
        """After a signal, raise OutOfTimeError once `within_s` have passed since it; else do
        nothing.

        Main thread only.
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
    """Inside, the first signal raises KeyboardInterrupt; later ones are ignored."""
    interruption = Interruption(within_s)
    terminals = _terminals()

    def interrupt(number: int, _frame: FrameType | None) -> None:
        interruption.at_s = time.monotonic()
        for each in before:
            active[each] = signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGHUP:
            _redirect_to_null(terminals)
        raise KeyboardInterrupt

    def dropped(unraisable: UnraisableHookArgs) -> None:
        # Python drops an exception that is raised in a callback, and with it the signal.
        if unraisable.exc_type is not KeyboardInterrupt:
            unraisable_hook(unraisable)
            return
        for each, handler in active.items():
            signal.signal(each, handler)
        _send_soon(signal.SIGINT)

    active: dict[signal.Signals, Any] = {}  # handlers when the first signal came
    unraisable_hook = sys.unraisablehook
    before = {number: signal.getsignal(number) for number in SIGNALS}
    if before[signal.SIGHUP] is signal.SIG_IGN:  # nohup: the terminal may close
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, interrupt)
    sys.unraisablehook = dropped
    try:
        yield interruption
    finally:
        sys.unraisablehook = unraisable_hook
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminals() -> list[int]:
    return [
        stream.fileno()
        for stream in (sys.__stdout__, sys.__stderr__)
        if stream is not None and not stream.closed and stream.isatty()
    ]


def _redirect_to_null(terminals: list[int]) -> None:
    """Redirect output: writing to a closed terminal would fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for terminal in terminals:
        os.dup2(nowhere, terminal)
    os.close(nowhere)


def _out_of_time(_number: int, _frame: FrameType | None) -> None:
    raise OutOfTimeError
