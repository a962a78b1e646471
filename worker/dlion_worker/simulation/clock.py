"""The virtual clock: what happens next, in an order that never depends on the machine.

Owns simulated time, in whole nanoseconds so that equal moments are equal. Called by everything in
this package.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

NANOSECONDS = 1_000_000_000


@dataclass(order=True)
class Appointment:
    """Something that is to happen; `cancel` undoes that."""

    due_ns: int
    number: int
    action: Callable[[], object] | None = field(compare=False)

    def cancel(self) -> None:
        """It will not happen."""
        self.action = None


class VirtualClock:
    """Runs appointments in the order of their times, those of one moment in the order made."""

    def __init__(self) -> None:
        self._due: list[Appointment] = []
        self._numbers = itertools.count()
        self._now_ns = 0

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return self._now_ns / NANOSECONDS

    def after(self, seconds: float, action: Callable[[], object]) -> Appointment:
        """Calls `action` that much later; never earlier than now."""
        due_ns = self._now_ns + max(0, round(seconds * NANOSECONDS))
        appointment = Appointment(due_ns, next(self._numbers), action)
        heapq.heappush(self._due, appointment)
        return appointment

    def has_only(self, appointment: Appointment | None) -> bool:
        """Whether that appointment, or nothing at all, is what is left to happen."""
        while self._due and self._due[0].action is None:
            heapq.heappop(self._due)
        if self._due and self._due[0] is not appointment:
            return False
        return all(other is appointment or other.action is None for other in self._due)

    def advance(self) -> bool:
        """Carries out the next appointment; False: there is none."""
        while self._due:
            appointment = heapq.heappop(self._due)
            action, appointment.action = appointment.action, None
            if action is not None:
                self._now_ns = appointment.due_ns
                action()
                return True
        return False
