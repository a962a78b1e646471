"""Defers interrupting signals while this process cleans up.

Used by `runner.runner` and by the command line around it. It wraps handlers that raise
KeyboardInterrupt; their owner decides what a second signal does.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DeferredSignals:
    """Context manager that defers a KeyboardInterrupt by a signal to its end or to `deliver`.

    The handlers themselves run at once, so they know when the signal came. Contexts may be nested.
    Outside the main thread, which alone gets signals, it does nothing.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._delivers = False
        self._is_pending = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Raise a deferred KeyboardInterrupt, unless another exception is active."""
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._handle:  # unless the handler was replaced
                signal.signal(number, handler)
        if self._is_pending and error is None:
            raise KeyboardInterrupt

    @contextmanager
    def deliver(self) -> Iterator[None]:
        """Context in which signals interrupt; also raises for a deferred signal."""
        self._delivers = True
        try:
            if self._is_pending:
                self._is_pending = False
                raise KeyboardInterrupt
            yield
        finally:
            self._delivers = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handlers[number](number, frame)
        except KeyboardInterrupt:
            if self._delivers:
                raise
            self._is_pending = True
