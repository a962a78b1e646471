"""Signals that interrupt this process, held back while it takes things away in order.

Used by `local.runner` and by the command line around it. Knows only of handlers that raise
KeyboardInterrupt: who puts them there decides which signals these are, and what a second one does.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class HeldSignals:
    """A context: a KeyboardInterrupt by a signal comes at its end, or inside `let_through`.

    The handlers themselves are called at once, and so know when the signal came. Contexts may
    stand in each other. Elsewhere than in the main thread, where no signal interrupts, nothing is
    done.
    """

    def __init__(self) -> None:
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._lets_through = False
        self._is_pending = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._before[number] = handler
                    signal.signal(number, self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raises: KeyboardInterrupt for a signal that was held back, where nothing else is."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._take:  # else the handler has put another there
                signal.signal(number, handler)
        if self._is_pending and error is None:
            raise KeyboardInterrupt

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """Inside, a signal interrupts, also one that has come before."""
        self._lets_through = True
        try:
            if self._is_pending:
                self._is_pending = False
                raise KeyboardInterrupt
            yield
        finally:
            self._lets_through = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        try:
            self._before[number](number, frame)
        except KeyboardInterrupt:
            if self._lets_through:
                raise
            self._is_pending = True
