"""One link, one direction, in virtual time: what is queued, what gives way, what has arrived.

Owns the queue that `exchange.window` is on a real link, message by message instead of frame by
frame. Called by `worker`, opened and closed by `connections`. Two lanes share the link, as there:
weights beside everything else. A state that is pulled comes beside both, on another connection.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from dlion_api.measurements import LinkDelivery
from dlion_worker.exchange import ExchangeConfig, LinkState, QueueRule
from dlion_worker.exchange.framing import Lane, lane_of
from dlion_worker.exchange.window import (
    BACKLOG_BUDGETS,
    MIN_BUDGET_BYTES,
    UNBUDGETED_WINDOW_BYTES,
)
from dlion_worker.policies.interface import Message, MessageKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlion_api.names import Rank
    from dlion_worker.simulation.clock import VirtualClock
    from dlion_worker.simulation.network import Network, Transfer

HEADER_BYTES = 128
"""Of a message beside its payload: its frame's fields, HTTP/2 and a TLS record. They take time on
the link; counters are of payloads, as a real link's."""


MOST_QUEUED = ExchangeConfig.max_queued_messages
"""Messages that wait for the window: one more, and a real link is given up."""


class VirtualLink:
    """From one worker to one peer, down until `open`; `deliver` takes what has arrived, in order.

    `give_up` is called with the reason where the queue is at its bound: it closes the link.
    """

    def __init__(
        self,
        clock: VirtualClock,
        network: Network,
        *,
        sender: Rank,
        receiver: Rank,
        rule: QueueRule,
        deliver: Callable[[Message], None],
        give_up: Callable[[str], None],
    ) -> None:
        self._clock, self._network = clock, network
        self._sender, self._receiver = sender, receiver
        self._rule = rule
        self._deliver, self._give_up = deliver, give_up
        self._openings = 0
        self._is_up = False
        self._last_due_s = 0.0
        self._pulls: list[Transfer] = []
        self._pulled_bytes = 0
        self._queues: dict[Lane, deque[Message]] = {lane: deque() for lane in Lane}
        self._under_way: dict[Lane, tuple[Transfer, Message]] = {}
        self._budget_bytes: int | None = None
        self._offered_bytes = 0
        self._busy_s = 0.0
        self._busy_since_s: float | None = None
        self._dropped = 0
        self._sent_bytes = self._arrived = 0
        self._reported_bytes, self._reported_busy_s = 0, 0.0

    @property
    def is_up(self) -> bool:
        """Whether messages pass."""
        return self._is_up

    def open(self) -> None:
        """Messages pass from now on."""
        self._openings += 1
        self._is_up = True

    def close(self) -> None:
        """What is queued or under way is lost, and what is pushed until the next `open`."""
        self._dropped += sum(len(queue) for queue in self._queues.values()) + len(self._under_way)
        self._offered_bytes = self._arrived_bytes()
        self._sent_bytes = max(self._sent_bytes, self._offered_bytes)
        for transfer in (*(one for one, _ in self._under_way.values()), *self._pulls):
            self._network.end(transfer)
        for queue in self._queues.values():
            queue.clear()
        self._under_way.clear()
        self._pulls.clear()
        self._rest()
        self._is_up = False

    def pull(self, size_bytes: int, take: Callable[[], object]) -> None:
        """Carries a state of that size beside the messages; `take` is called when it is there.

        It is not where the link is closed before.
        """
        opening = self._openings

        def through() -> None:
            self._pulls.remove(transfer)
            self._pulled_bytes += size_bytes
            self._clock.after(
                self._network.latency_s(self._sender, self._receiver),
                lambda: take() if self._is_up and opening == self._openings else None,
            )

        transfer = self._network.begin(
            self._sender, self._receiver, size_bytes + HEADER_BYTES, through
        )
        self._pulls.append(transfer)

    @property
    def latency_s(self) -> float:
        """One way, as it is now."""
        return self._network.latency_s(self._sender, self._receiver)

    def set_budget(self, budget_bytes: int | None) -> None:
        """Bytes per iteration; None: not known."""
        self._budget_bytes = budget_bytes

    def room_bytes(self) -> int | None:
        """Bytes of a gradient that the link takes now, as `exchange.window.Outbox.room_bytes`."""
        if self._budget_bytes is None:
            return None
        budget = max(MIN_BUDGET_BYTES, self._budget_bytes)
        held = self._left_bytes(Lane.ORDERED) + sum(
            m.size_bytes for m in self._queues[Lane.ORDERED] if not self._gives_way(m)
        )
        return max(0, min(budget, int(BACKLOG_BUDGETS * budget) - held))

    def push(self, message: Message) -> None:
        """Queues a message behind those of its lane; on a link that is down it is lost."""
        if not self._is_up:
            self._dropped += 1
            return
        lane = lane_of(message.kind)
        queue = self._queues[lane]
        if self._gives_way(message):
            kept = [waiting for waiting in queue if not self._gives_way(waiting)]
            self._dropped += len(queue) - len(kept)
            self._offered_bytes -= _payload(queue) - _payload(kept)
            self._queues[lane] = queue = deque(kept)
        if (waiting_count := self._waiting_count()) >= MOST_QUEUED:
            self._dropped += 1
            self._give_up(
                f"{waiting_count} messages wait for a peer that takes them too slowly; allowed: "
                f"{MOST_QUEUED}"
            )
            return
        queue.append(message)
        self._offered_bytes += message.size_bytes
        self._begin(lane)

    def take_delivery(self) -> LinkDelivery:
        """What has arrived since the last call, and how long it took on the link."""
        arrived, busy_s = self._arrived_bytes(), self._busy_so_far_s()
        delivery = LinkDelivery(
            peer=self._receiver,
            acknowledged_bytes=arrived - self._reported_bytes,
            busy_bytes=arrived - self._reported_bytes if busy_s > self._reported_busy_s else 0,
            receiver_busy_s=busy_s - self._reported_busy_s,
            unacknowledged_bytes=self._unacknowledged_bytes(),
        )
        self._reported_bytes, self._reported_busy_s = arrived, busy_s
        return delivery

    def state(self) -> LinkState:
        """The link's counters, as a real one has them."""
        arrived, under_way = self._arrived_bytes(), sum(self._left_bytes(lane) for lane in Lane)
        self._sent_bytes = max(self._sent_bytes, arrived + under_way)
        return LinkState(
            connected=self._is_up,
            incarnation=1,
            queued_bytes=max(0, self._offered_bytes - self._sent_bytes),
            unacknowledged_bytes=under_way,
            window_bytes=self._window_bytes(),
            sent_total=self._sent_bytes + self._pulled_bytes,
            acknowledged_total=arrived + self._pulled_bytes,
            received_total=0,
            dropped_messages=self._dropped,
            wire_sent_bytes=self._sent_bytes + self._pulled_bytes,
            wire_received_bytes=0,
        )

    # ---- inside

    def _begin(self, lane: Lane) -> None:
        if lane in self._under_way or not self._queues[lane]:
            return
        message = self._queues[lane].popleft()
        if self._busy_since_s is None:
            self._busy_since_s = self._clock.now_s
        transfer = self._network.begin(
            self._sender,
            self._receiver,
            message.size_bytes + HEADER_BYTES,
            lambda: self._through(lane, message),
        )
        self._under_way[lane] = (transfer, message)

    def _through(self, lane: Lane, message: Message) -> None:
        """The last byte has left the link; it is there a latency later, and never sooner than what
        left before it."""
        del self._under_way[lane]
        now_s, opening = self._clock.now_s, self._openings
        self._last_due_s = max(self._last_due_s, now_s + self.latency_s)

        def arrive() -> None:
            if self._is_up and opening == self._openings:
                self._deliver(message)

        self._clock.after(self._last_due_s - now_s, arrive)
        self._begin(lane)
        if not self._under_way:
            self._rest()

    def _rest(self) -> None:
        """Nothing is under way: the link is not busy any more."""
        if self._busy_since_s is not None:
            self._busy_s += self._clock.now_s - self._busy_since_s
            self._busy_since_s = None

    def _waiting_count(self) -> int:
        """Messages that are not wholly in the window, as a real link counts them."""
        if sum(len(queue) for queue in self._queues.values()) < MOST_QUEUED:
            return 0
        room_bytes = self._window_bytes() - sum(self._left_bytes(lane) for lane in Lane)
        waiting = 0
        for message in (message for queue in self._queues.values() for message in queue):
            room_bytes -= message.size_bytes
            waiting += room_bytes < 0
        return waiting

    def _gives_way(self, message: Message) -> bool:
        return self._rule is QueueRule.NEWEST and message.kind is MessageKind.GRADIENT

    def _left_bytes(self, lane: Lane) -> int:
        """Payload bytes of the message under way that have not arrived."""
        if lane not in self._under_way:
            return 0
        transfer, message = self._under_way[lane]
        return min(message.size_bytes, round(self._network.left_bytes(transfer)))

    def _arrived_bytes(self) -> int:
        queued = sum(_payload(queue) for queue in self._queues.values())
        left = sum(self._left_bytes(lane) for lane in Lane)
        self._arrived = max(self._arrived, self._offered_bytes - queued - left)
        return self._arrived

    def _busy_so_far_s(self) -> float:
        since_s = self._busy_since_s
        return self._busy_s + (0.0 if since_s is None else self._clock.now_s - since_s)

    def _window_bytes(self) -> int:
        if self._budget_bytes is None:
            return UNBUDGETED_WINDOW_BYTES
        return 2 * max(MIN_BUDGET_BYTES, self._budget_bytes)

    def _unacknowledged_bytes(self) -> int:
        return min(self._offered_bytes - self._arrived_bytes(), self._window_bytes())


def _payload(messages: Iterable[Message]) -> int:
    return sum(message.size_bytes for message in messages)
