"""The inbox of a real worker: the exchange's thread fills it, the training thread waits for it."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from dlion_api.errors import UnavailableError
from dlion_api.names import Rank
from dlion_api.protocol.membership import Membership
from dlion_core.lifecycle.inbox import EventInbox
from dlion_core.links.events import ExchangeEvent, LinkUp
from dlion_core.policies.interface import Event, Message, MessageArrived, TopologyChanged

MAX_EARLY_BYTES: Final = 256 * 2**20
"""Bytes that one link may bring before this worker starts: it keeps them all meanwhile."""
MESSAGE_BYTES: Final = 1024
"""What the objects of a message without a payload take, about."""
MIN_EARLY_MESSAGES: Final = 16
"""So many messages may arrive of any size. A worker that joins needs some steps of each peer."""


class WaitingInbox(EventInbox):
    """An inbox on the monotonic clock, whose reader can wait."""

    def __init__(
        self,
        send: Callable[[Rank, Message, int], None],
        membership: Callable[[], Membership | None] = lambda: None,
    ) -> None:
        super().__init__(send, membership, clock_s=time.monotonic)
        self._has_arrived = threading.Event()
        self._early_bytes: Counter[Rank] = Counter()
        """By peer, over its present link. Only the exchange's thread uses it."""

    def put(self, arrival: ExchangeEvent | TopologyChanged) -> None:
        """Add one event; never blocks.

        Raises: UnavailableError for a message that is too much before the start. The link must then
        be opened again; what it has brought is dropped with it.
        """
        if isinstance(arrival, LinkUp):
            del self._early_bytes[arrival.peer]
        elif isinstance(arrival, MessageArrived) and not self._started:
            self._count_early(arrival)
        super().put(arrival)
        self._has_arrived.set()

    def _count_early(self, arrival: MessageArrived) -> None:
        size_bytes = max(MESSAGE_BYTES, arrival.message.size_bytes)
        self._early_bytes[arrival.sender] += size_bytes
        early_bytes = self._early_bytes[arrival.sender]
        if early_bytes > max(MAX_EARLY_BYTES, MIN_EARLY_MESSAGES * size_bytes):
            raise UnavailableError(f"{early_bytes:,} bytes have arrived before this worker starts")

    def wait(self, timeout_s: float) -> list[Event]:
        """Wait for the next event; return it with everything queued behind it."""
        self._has_arrived.wait(timeout_s)
        self._has_arrived.clear()  # before the queue is read, so that no later event is missed
        return self.drain()
