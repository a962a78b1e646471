"""The send queue of one link: queued messages, superseded ones, and the window. No I/O.

No timer paces it: a frame is sent when acknowledgements make room, so the receiver sets the pace.
"""

from collections import deque
from dataclasses import dataclass

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.wire.exchange_pb2 import Acknowledgement, Frame
from dlion_core.links.framing import (
    MIN_CHUNK_BYTES,
    Lane,
    OutgoingMessage,
    carries_gradient,
    lane_of,
)
from dlion_core.links.link_budget import UNBUDGETED_WINDOW_BYTES, LinkBudget, QueueRule
from dlion_core.policies.interface import Message

CHUNKS_PER_WINDOW = 4
"""The window holds at least this many chunks, so that one is acknowledged while others are in
flight."""

SATURATION_FACTOR = 1.5
"""Acknowledgements later than this multiple of the idle delay show that frames queue in the
network."""


MAX_QUEUED_MESSAGES = 64
"""A link with more queued messages is closed: its peer is too slow."""


CHUNK_S = 0.125
"""A chunk takes the link at most this long, so that a large drop in its rate shows within a step or
two."""

WINDOW_ROUND_TRIPS = 2
"""The window holds at least what the link carries in so many round trips: less would hold up a
message of more than a window where an acknowledgement takes longer than a step."""

MIN_BUSY_PAYLOADS = 2
"""With this many payloads in flight a link is busy: the first may just have arrived, the next has
not."""


@dataclass(frozen=True)
class _InFlightFrame:
    frame: int
    stream_bytes: int
    ordered_bytes: int
    sent_at_s: float


class SendQueue:
    """The sending half of one link, over all of its connections."""

    def __init__(self, rule: QueueRule, max_queued_messages: int) -> None:
        self._rule = rule
        self._max_queued_messages = max_queued_messages
        self._budget = LinkBudget()
        self._bandwidth_bytes_per_s: float | None = None
        self.epoch = 0
        self.sent_total = 0
        self.acknowledged_total = 0
        self.busy_bytes_total = 0
        self.receiver_busy_s_total = 0.0
        self.dropped_messages = 0
        self.gradient_total = self.weights_total = self.control_total = self.header_total = 0
        self._base_delay_s = float("inf")
        self._delay_s = 0.0
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._queues: dict[Lane, deque[OutgoingMessage]] = {lane: deque() for lane in Lane}
        self._served_bytes = dict.fromkeys(Lane, 0)
        self._in_flight: deque[_InFlightFrame] = deque()
        self._ordered_in_flight_bytes = 0
        self._number = self._frames = self._acknowledged_frames = 0
        self._stream_bytes = self._acknowledged_bytes = 0
        self._busy_bytes = self._busy_micros = 0
        self._was_empty = True  # there was nothing to send after the last frame
        self._was_blocked = False  # the window was full after the last frame
        self._heartbeat = False
        self.queued_bytes = 0

    def reset(self) -> int:
        """Discard everything queued or in flight; return the number of the new epoch."""
        self.dropped_messages += self.queued_messages
        self._begin_epoch()
        self.epoch += 1
        return self.epoch

    @property
    def queued_messages(self) -> int:
        """Messages that are not completely in frames."""
        return sum(len(queue) for queue in self._queues.values())

    @property
    def wire_sent_bytes(self) -> int:
        """Payload and headers."""
        return self.sent_total + self.header_total

    @property
    def unacknowledged_bytes(self) -> int:
        """Payload bytes sent and not acknowledged."""
        return self._stream_bytes - self._acknowledged_bytes

    @property
    def window_bytes(self) -> int:
        """The limit for `unacknowledged_bytes`: two budgets, or what two round trips carry."""
        if self._bandwidth_bytes_per_s is None or not self._acknowledged_frames:
            return self._budget.window_bytes
        carried = WINDOW_ROUND_TRIPS * self._base_delay_s * self._bandwidth_bytes_per_s
        return max(self._budget.window_bytes, int(min(carried, UNBUDGETED_WINDOW_BYTES)))

    def set_budget(
        self, budget_bytes: int | None, bandwidth_bytes_per_s: float | None = None
    ) -> None:
        """Set bytes per iteration for this link and its rate; None if unknown."""
        self._budget = LinkBudget(budget_bytes)
        self._bandwidth_bytes_per_s = bandwidth_bytes_per_s

    def sendable_bytes(self) -> int | None:
        """The largest gradient in bytes within the link's budget and backlog; None: no limit.

        Superseded gradients do not count, nor does bulk, which travels beside them. May be called
        from any thread.
        """
        held = self._ordered_in_flight_bytes + sum(
            waiting.remaining_bytes
            for waiting in tuple(self._queues[Lane.ORDERED])
            if not self._is_superseded(waiting)
        )
        return self._budget.sendable_bytes(held)

    @property
    def idle_delay_s(self) -> float | None:
        """Minimum round-trip time from a frame to its acknowledgement; None if unknown."""
        return self._base_delay_s if self._acknowledged_frames else None

    def push(self, message: Message) -> None:
        """Queue a message behind those of its lane. Raises UnavailableError if the queue is full
        and its rule drops nothing. Close the link, or the sender runs out of memory."""
        lane = lane_of(message.kind)
        if self._rule.drops(message):
            self._drop_superseded(lane)
        if self.queued_messages >= self._max_queued_messages:
            raise UnavailableError(
                f"{self.queued_messages} messages are queued for a peer that is too slow;"
                f" allowed: {self._max_queued_messages}"
            )
        self._queues[lane].append(OutgoingMessage(message))
        self.queued_bytes += message.size_bytes

    def heartbeat(self) -> None:
        """Request a frame even if nothing is queued."""
        self._heartbeat = True

    def next_frame(self, now_s: float) -> bytes | None:
        """The next frame to send, or None if there is none or the window is full."""
        lane = self._next_lane()
        if lane is None:
            if self.queued_messages:
                self._was_blocked = True
            else:
                self._was_empty = True
            if not self._heartbeat:
                return None
            return self._record_frame(Frame().SerializeToString(), 0, None, now_s)
        queue = self._queues[lane]
        outgoing = queue[0]
        if not outgoing.started:
            self._number += 1
            outgoing.begin(self._number)
        size = outgoing.next_chunk_bytes(self._chunk_limit_bytes)
        frame = outgoing.next_frame(size, back_to_back=self._back_to_back)
        self._was_empty = self._was_blocked = False
        if outgoing.done:
            queue.popleft()
        self._served_bytes[lane] += size
        if lane is Lane.BULK:
            self.weights_total += size
        elif carries_gradient(outgoing.message.kind):
            self.gradient_total += size
        else:
            self.control_total += size
        self.queued_bytes -= size
        return self._record_frame(frame, size, lane, now_s)

    def acknowledge(self, acknowledgement: Acknowledgement, now_s: float) -> None:
        """Make room for what has arrived; ignore acknowledgements of earlier epochs. Raises
        ContractError if it acknowledges what was never sent, or contradicts an earlier one."""
        a = acknowledgement
        if a.epoch < self.epoch:
            return
        self._check(a)
        last: _InFlightFrame | None = None
        while self._in_flight and self._in_flight[0].frame <= a.frames:
            last = self._in_flight.popleft()
            self._ordered_in_flight_bytes -= last.ordered_bytes
        if last is not None:
            if a.stream_bytes != last.stream_bytes:
                raise ContractError(
                    f"acknowledged {a.stream_bytes} bytes in {a.frames} frames;"
                    f" sent: {last.stream_bytes}"
                )
            self._delay_s = now_s - last.sent_at_s
            self._base_delay_s = min(self._base_delay_s, self._delay_s)
        self.acknowledged_total += a.stream_bytes - self._acknowledged_bytes
        self.busy_bytes_total += a.busy_bytes - self._busy_bytes
        self.receiver_busy_s_total += (a.receiver_busy_micros - self._busy_micros) / 1e6
        self._acknowledged_frames, self._acknowledged_bytes = a.frames, a.stream_bytes
        self._busy_bytes, self._busy_micros = a.busy_bytes, a.receiver_busy_micros

    def _check(self, a: Acknowledgement) -> None:
        if a.epoch > self.epoch or a.frames > self._frames or a.stream_bytes > self._stream_bytes:
            raise ContractError(
                f"acknowledged {a.frames} frames, {a.stream_bytes} bytes of epoch {a.epoch};"
                f" sent: {self._frames}, {self._stream_bytes} of epoch {self.epoch}"
            )
        if (
            a.frames < self._acknowledged_frames
            or a.stream_bytes < self._acknowledged_bytes
            or (a.stream_bytes > self._acknowledged_bytes and a.frames == self._acknowledged_frames)
            or a.busy_bytes < self._busy_bytes
            or a.busy_bytes > a.stream_bytes
            or a.receiver_busy_micros < self._busy_micros
        ):
            raise ContractError("an acknowledgement contradicts one before it")

    def _next_lane(self) -> Lane | None:
        """The lane whose next chunk fits the window; two waiting lanes share the bytes equally."""
        waiting = [lane for lane in Lane if self._queues[lane]]
        if len(waiting) < len(Lane):
            # What a lane sends while it is alone is not counted against it later.
            self._served_bytes = dict.fromkeys(Lane, 0)
        if not waiting:
            return None
        lane = min(waiting, key=lambda lane: self._served_bytes[lane])
        room = self.window_bytes - self.unacknowledged_bytes
        if self._queues[lane][0].next_chunk_bytes(self._chunk_limit_bytes) <= room:
            return lane
        return None

    @property
    def _back_to_back(self) -> bool:
        """Whether the link determines the time between the last frame and the next.

        It does not if there was nothing to send in between, unless the link stayed busy. Nor if our
        own window was full while the network was not saturated.
        """
        saturated = self._delay_s >= SATURATION_FACTOR * self._base_delay_s
        paused = self._was_empty and self._payloads_in_flight() < MIN_BUSY_PAYLOADS
        return not paused and (not self._was_blocked or saturated)

    def _payloads_in_flight(self) -> int:
        before, count = self._acknowledged_bytes, 0
        for frame in self._in_flight:
            count += frame.stream_bytes > before
            before = frame.stream_bytes
        return count

    @property
    def _chunk_limit_bytes(self) -> int:
        limit = self.window_bytes // CHUNKS_PER_WINDOW
        if self._bandwidth_bytes_per_s is None:
            return limit
        return min(limit, max(MIN_CHUNK_BYTES, int(self._bandwidth_bytes_per_s * CHUNK_S)))

    def _drop_superseded(self, lane: Lane) -> None:
        """Drop the gradients of that lane that have not been started."""
        kept: deque[OutgoingMessage] = deque()
        for waiting in self._queues[lane]:
            if not self._is_superseded(waiting):
                kept.append(waiting)
            else:
                self.dropped_messages += 1
                self.queued_bytes -= waiting.remaining_bytes
        self._queues[lane] = kept

    def _is_superseded(self, waiting: OutgoingMessage) -> bool:
        """Whether the next gradient replaces it."""
        return self._rule.drops(waiting.message) and not waiting.started

    def _record_frame(self, data: bytes, size_bytes: int, lane: Lane | None, now_s: float) -> bytes:
        self._heartbeat = False
        self._frames += 1
        self._stream_bytes += size_bytes
        self.sent_total += size_bytes
        self.header_total += len(data) - size_bytes
        ordered = size_bytes if lane is Lane.ORDERED else 0
        self._ordered_in_flight_bytes += ordered
        self._in_flight.append(_InFlightFrame(self._frames, self._stream_bytes, ordered, now_s))
        return data
