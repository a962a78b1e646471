"""The virtual clock: runs scheduled events in an order independent of the machine.

Time is in whole nanoseconds, so that equal times compare equal.
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

NANOSECONDS_PER_S = 1_000_000_000


@dataclass(order=True)
class ScheduledEvent:
    """A scheduled event."""

    due_ns: int
    number: int
    action: Callable[[], object] | None = field(compare=False)

    def cancel(self) -> None:
        """Cancel the event."""
        self.action = None


class VirtualClock:
    """Runs events in order of time; simultaneous events run in the order of scheduling."""

    def __init__(self) -> None:
        self._queue: list[ScheduledEvent] = []
        self._numbers = itertools.count()
        self._now_ns = 0

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return self._now_ns / NANOSECONDS_PER_S

    def after(self, seconds: float, action: Callable[[], object]) -> ScheduledEvent:
        """Schedule `action` after `seconds`; negative values count as 0."""
        due_ns = self._now_ns + max(0, round(seconds * NANOSECONDS_PER_S))
        event = ScheduledEvent(due_ns, next(self._numbers), action)
        heapq.heappush(self._queue, event)
        return event

    def has_only(self, event: ScheduledEvent | None) -> bool:
        """Whether no event other than `event` is scheduled."""
        while self._queue and self._queue[0].action is None:
            heapq.heappop(self._queue)
        if self._queue and self._queue[0] is not event:
            return False
        return all(other is event or other.action is None for other in self._queue)

    def advance(self) -> bool:
        """Run the next event. Return False if there is none."""
        while self._queue:
            event = heapq.heappop(self._queue)
            action, event.action = event.action, None
            if action is not None:
                self._now_ns = event.due_ns
                action()
                return True
        return False
