"""One direction of a link in virtual time: queue, replacement of messages, delivery.

Models the queue of `links.send_queue`, by message instead of by frame. Two lanes share the link:
weights, and everything else. A pulled state is a third transfer, as on a separate connection. Used
by `worker`; opened and closed by `connections`.
"""

from collections import deque
from collections.abc import Callable, Iterable

from dlion_api.names import Rank
from dlion_api.protocol.measurements import LinkDelivery
from dlion_core.links.events import LinkCounters
from dlion_core.links.framing import Lane, carries_gradient, lane_of
from dlion_core.links.link_budget import LinkBudget, QueueRule
from dlion_core.links.send_queue import MAX_QUEUED_MESSAGES
from dlion_core.policies.interface import Message
from dlion_simulator.clock import VirtualClock
from dlion_simulator.network import VirtualNetwork, VirtualTransfer


class VirtualLink:
    """A one-way link, down until `open`; `deliver` receives the messages in order.

    `overhead_bytes` of each message take link time beside its payload. `give_up` is called with a
    reason if the queue is full; it closes the link.
    """

    def __init__(
        self,
        clock: VirtualClock,
        network: VirtualNetwork,
        *,
        sender: Rank,
        receiver: Rank,
        rule: QueueRule,
        overhead_bytes: int,
        deliver: Callable[[Message], None],
        give_up: Callable[[str], None],
    ) -> None:
        self._clock, self._network = clock, network
        self._sender, self._receiver = sender, receiver
        self._rule, self._overhead_bytes = rule, overhead_bytes
        self._deliver, self._give_up = deliver, give_up
        self.epoch = 0
        """How often it was opened."""
        self.is_up = False
        """Whether messages pass."""
        self._last_due_s = 0.0
        self._pulls: list[VirtualTransfer] = []
        self._pulled_bytes = 0
        self._queues: dict[Lane, deque[Message]] = {lane: deque() for lane in Lane}
        self._in_flight: dict[Lane, tuple[VirtualTransfer, Message]] = {}
        self._budget = LinkBudget()
        self._offered_bytes = 0
        self._busy_s = 0.0
        self._busy_since_s: float | None = None
        self._dropped = 0
        self._sent_bytes = self._arrived = 0
        self._gradient_bytes = self._weights_bytes = self._control_bytes = 0
        self._header_bytes = self._probe_bytes = 0
        self._reported_bytes, self._reported_busy_s = 0, 0.0

    def open(self) -> None:
        """Let messages pass from now on."""
        self.epoch += 1
        self.is_up = True

    def close(self) -> None:
        """Drop queued and in-flight messages, and all later ones until `open`."""
        self._dropped += sum(len(queue) for queue in self._queues.values()) + len(self._in_flight)
        self._offered_bytes = self._arrived_bytes()
        self._sent_bytes = max(self._sent_bytes, self._offered_bytes)
        for transfer in (*(one for one, _ in self._in_flight.values()), *self._pulls):
            self._network.end(transfer)
        for queue in self._queues.values():
            queue.clear()
        self._in_flight.clear()
        self._pulls.clear()
        self._set_idle()
        self.is_up = False

    def pull(self, size_bytes: int, take: Callable[[], object]) -> None:
        """Transfer a state of that size beside the messages.

        `take` is called on arrival, unless the link was closed before.
        """
        connection = self.epoch

        def transfer_done() -> None:
            self._pulls.remove(transfer)
            self._pulled_bytes += size_bytes + self._overhead_bytes
            self._clock.after(
                self._network.latency_s(self._sender, self._receiver),
                lambda: take() if self.is_up and connection == self.epoch else None,
            )

        transfer = self._network.begin(
            self._sender, self._receiver, size_bytes + self._overhead_bytes, transfer_done
        )
        self._pulls.append(transfer)

    def count_probe(self, sent_bytes: int) -> None:
        """Count what the sender's sidecar sent to the receiver's. It takes no link time."""
        self._probe_bytes += sent_bytes

    @property
    def latency_s(self) -> float:
        """Current one-way latency."""
        return self._network.latency_s(self._sender, self._receiver)

    def set_budget(self, budget_bytes: int | None) -> None:
        """Set the budget in bytes per iteration; None if unknown."""
        self._budget = LinkBudget(budget_bytes)

    def sendable_bytes(self) -> int | None:
        """Bytes of a gradient that the link accepts now, as `SendQueue.sendable_bytes`."""
        held = self._remaining_bytes(Lane.ORDERED) + sum(
            m.size_bytes for m in self._queues[Lane.ORDERED] if not self._rule.drops(m)
        )
        return self._budget.sendable_bytes(held)

    def push(self, message: Message, epoch: int | None = None) -> None:
        """Queue a message in its lane. A link that is down, or not in that epoch, drops it."""
        if not self.is_up or epoch not in {None, self.epoch}:
            self._dropped += 1
            return
        lane = lane_of(message.kind)
        queue = self._queues[lane]
        if self._rule.drops(message):
            kept = [waiting for waiting in queue if not self._rule.drops(waiting)]
            self._dropped += len(queue) - len(kept)
            self._offered_bytes -= _payload(queue) - _payload(kept)
            self._queues[lane] = queue = deque(kept)
        if (waiting_count := self._waiting_count()) >= MAX_QUEUED_MESSAGES:
            self._dropped += 1
            self._give_up(
                f"{waiting_count} messages wait for a peer that takes them too slowly; allowed: "
                f"{MAX_QUEUED_MESSAGES}"
            )
            return
        queue.append(message)
        self._offered_bytes += message.size_bytes
        self._begin(lane)

    def take_delivery(self) -> LinkDelivery:
        """Bytes that arrived since the last call, and how long the link was busy."""
        arrived, busy_s = self._arrived_bytes(), self._busy_s
        if self._busy_since_s is not None:
            busy_s += self._clock.now_s - self._busy_since_s
        delivery = LinkDelivery(
            peer=self._receiver,
            acknowledged_bytes=arrived - self._reported_bytes,
            busy_bytes=arrived - self._reported_bytes if busy_s > self._reported_busy_s else 0,
            receiver_busy_s=busy_s - self._reported_busy_s,
            unacknowledged_bytes=min(self._offered_bytes - arrived, self._budget.window_bytes),
        )
        self._reported_bytes, self._reported_busy_s = arrived, busy_s
        return delivery

    def state(self) -> LinkCounters:
        """The link's counters, as on a real link."""
        arrived = self._arrived_bytes()
        in_flight_bytes = sum(self._remaining_bytes(lane) for lane in Lane)
        self._sent_bytes = max(self._sent_bytes, arrived + in_flight_bytes)
        return LinkCounters(
            connected=self.is_up,
            queued_bytes=max(0, self._offered_bytes - self._sent_bytes),
            unacknowledged_bytes=in_flight_bytes,
            window_bytes=self._budget.window_bytes,
            sent_total=self._sent_bytes,
            acknowledged_total=arrived,
            dropped_messages=self._dropped,
            gradient_total=self._gradient_bytes,
            weights_total=self._weights_bytes,
            control_total=self._control_bytes,
            header_total=self._header_bytes,
            state_total=self._pulled_bytes,
            probe_total=self._probe_bytes,
        )

    # ---- inside

    def _begin(self, lane: Lane) -> None:
        if lane in self._in_flight or not self._queues[lane]:
            return
        message = self._queues[lane].popleft()
        if lane is Lane.BULK:
            self._weights_bytes += message.size_bytes
        elif carries_gradient(message.kind):
            self._gradient_bytes += message.size_bytes
        else:
            self._control_bytes += message.size_bytes
        self._header_bytes += self._overhead_bytes
        if self._busy_since_s is None:
            self._busy_since_s = self._clock.now_s
        transfer = self._network.begin(
            self._sender,
            self._receiver,
            message.size_bytes + self._overhead_bytes,
            lambda: self._transfer_done(lane, message),
        )
        self._in_flight[lane] = (transfer, message)

    def _transfer_done(self, lane: Lane, message: Message) -> None:
        """Deliver a message one latency after its last byte left, in order."""
        del self._in_flight[lane]
        now_s, connection = self._clock.now_s, self.epoch
        self._last_due_s = max(self._last_due_s, now_s + self.latency_s)

        def arrive() -> None:
            if self.is_up and connection == self.epoch:
                self._deliver(message)

        self._clock.after(self._last_due_s - now_s, arrive)
        self._begin(lane)
        if not self._in_flight:
            self._set_idle()

    def _set_idle(self) -> None:
        """Mark the link as idle."""
        if self._busy_since_s is not None:
            self._busy_s += self._clock.now_s - self._busy_since_s
            self._busy_since_s = None

    def _waiting_count(self) -> int:
        """Messages that do not fully fit in the window, as a real link counts them."""
        if sum(len(queue) for queue in self._queues.values()) < MAX_QUEUED_MESSAGES:
            return 0
        sendable_bytes = self._budget.window_bytes - sum(
            self._remaining_bytes(lane) for lane in Lane
        )
        waiting = 0
        for message in (message for queue in self._queues.values() for message in queue):
            sendable_bytes -= message.size_bytes
            waiting += sendable_bytes < 0
        return waiting

    def _remaining_bytes(self, lane: Lane) -> int:
        """Payload bytes of the current message that have not arrived."""
        if lane not in self._in_flight:
            return 0
        transfer, message = self._in_flight[lane]
        return min(message.size_bytes, round(self._network.remaining_bytes(transfer)))

    def _arrived_bytes(self) -> int:
        queued = sum(_payload(queue) for queue in self._queues.values())
        left = sum(self._remaining_bytes(lane) for lane in Lane)
        self._arrived = max(self._arrived, self._offered_bytes - queued - left)
        return self._arrived


def _payload(messages: Iterable[Message]) -> int:
    return sum(message.size_bytes for message in messages)
