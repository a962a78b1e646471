"""SIGTERM and SIGINT in a trainer: deferred during training, immediate before and after.

While training, the loop checks `reason` between two steps, so that what is saved is consistent. At
other times, the signal interrupts whatever runs, including the user's program. `__main__` creates
the handler on the main thread, and `worker` uses it.
"""

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType


class Interrupted(BaseException):
    """This worker was asked to stop before it joined the run, or after everything was saved.

    No Exception, as KeyboardInterrupt: it may interrupt the user's program, Keras or a library,
    whose handlers of any error must not take it for theirs.
    """


class SignalHandler:
    """Handles both signals of the process from its construction on."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """The name of the first signal; None while there was none."""
        self._is_deferred = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def is_interrupted(self) -> bool:
        return self.reason is not None

    def check(self) -> None:
        """Raise Interrupted if a signal has come. For threads, which signals do not interrupt."""
        if self.reason is not None:
            raise Interrupted(self.reason)

    def deferred(self) -> AbstractContextManager[None]:
        """Only record signals inside this context."""
        return self._deferring(True)

    def immediate(self) -> AbstractContextManager[None]:
        """Let signals interrupt inside this context, even within `deferred`."""
        return self._deferring(False)

    @contextmanager
    def _deferring(self, is_deferred: bool) -> Iterator[None]:
        was_deferred, self._is_deferred = self._is_deferred, is_deferred
        try:
            yield
        finally:
            self._is_deferred = was_deferred

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.reason = self.reason or f"{signal.Signals(number).name} received"
        if not self._is_deferred:
            raise Interrupted(self.reason)
