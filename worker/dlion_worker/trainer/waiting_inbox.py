"""The inbox of a real worker: the exchange's thread fills it, the training thread waits for it."""

import threading
import time
from collections.abc import Callable

from dlion_api.names import Rank
from dlion_api.protocol.membership import Membership
from dlion_core.lifecycle.inbox import EventInbox
from dlion_core.links.events import ExchangeEvent
from dlion_core.policies.interface import Event, Message, TopologyChanged


class WaitingInbox(EventInbox):
    """An inbox on the monotonic clock, whose reader can wait."""

    def __init__(
        self,
        send: Callable[[Rank, Message, int], None],
        membership: Callable[[], Membership | None] = lambda: None,
    ) -> None:
        super().__init__(send, membership, clock_s=time.monotonic)
        self._has_arrived = threading.Event()

    def put(self, arrival: ExchangeEvent | TopologyChanged) -> None:
        """Add one event; never blocks."""
        super().put(arrival)
        self._has_arrived.set()

    def wait(self, timeout_s: float) -> list[Event]:
        """Wait for the next event; return it with everything queued behind it."""
        self._has_arrived.wait(timeout_s)
        self._has_arrived.clear()  # before the queue is read, so that no later event is missed
        return self.drain()
