"""SIGTERM and SIGINT to a trainer: noted while it trains, obeyed at once before and after.

Made by `__main__` on the main thread, used by `worker`. While training, the loop looks at `reason`
between two steps, so that what is saved is whole. Before there is anything to save, and once
everything is saved, the signal breaks off whatever goes on, the user's program included; so it does
the way into the run, on which nothing changes.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(Exception):  # noqa: N818 - not an error: the user or the coordinator asked
    """This worker was told to stop before it came into the run, or after all was saved."""


class Signals:
    """The process's handlers of both signals, from its construction on."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """The first signal, in words; None as long as there was none."""
        self._is_patient = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    @contextmanager
    def patiently(self) -> Iterator[None]:
        """Inside, a signal is only noted."""
        self._is_patient = True
        try:
            yield
        finally:
            self._is_patient = False

    @contextmanager
    def promptly(self) -> Iterator[None]:
        """Inside, a signal breaks off what goes on, also in the midst of what is done patiently."""
        was_patient, self._is_patient = self._is_patient, False
        try:
            yield
        finally:
            self._is_patient = was_patient

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.reason = self.reason or f"{signal.Signals(number).name} received"
        if not self._is_patient:
            raise Interrupted(self.reason)
