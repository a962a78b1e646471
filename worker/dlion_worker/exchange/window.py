"""One outgoing link: what is queued, what gives way, and how much may be under way.

Called by `client`. A state machine without I/O: messages, budgets and acknowledgements in, frames
out, time as an argument. Nothing here paces by a clock: a frame may leave when acknowledgements
have made room for it, so the receiver's pace is the pace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import Rank
from dlion_api.wire.exchange_pb2 import Acknowledgement, Frame
from dlion_worker.exchange.framing import MIN_CHUNK_BYTES, Lane, OutgoingMessage, lane_of
from dlion_worker.policies.interface import Message, MessageKind

UNBUDGETED_WINDOW_BYTES = 8 * 2**20
"""Under way at most on a link whose rate nobody has measured yet."""

MIN_BUDGET_BYTES = 2048
"""A budget below this counts as this: a link must carry something, or it is never measured."""

CHUNKS_PER_WINDOW = 4
"""So many chunks fit in the window at least: one is acknowledged while others are under way."""

BACKLOG_BUDGETS = 1.5
"""So many budgets a link may hold when a gradient is handed to it, that one included: enough to
keep it busy through a step half as long again as usual, and less than the two that the window
allows, since after a drop all of it is in the new rate's way."""

SATURATED = 1.5
"""Acknowledgements this many times later than on the idle link mean that frames queue in it."""


ALIKE_FRACTION = 0.1
"""Links with so little difference in room take the same: what goes on them is selected and coded
once. What a link is given too little of shows as more room at the next gradient."""


class QueueRule(StrEnum):
    """What a link does with gradients that its peer cannot take as fast as they come."""

    KEEP = "keep"  # nothing gives way; the synchronisation policy bounds what is queued
    NEWEST = "newest"  # a gradient not yet begun gives way to a newer one


CHUNK_S = 0.125
"""A chunk is no more than the link carries in that time, so that a link that has become slower by
several times shows it within a step or two."""

WITHOUT_PAUSE = 2
"""Payloads under way that tell a busy link: the first may just have arrived, not the one behind."""


@dataclass(frozen=True)
class _UnderWay:
    frame: int
    stream_bytes: int
    ordered_bytes: int
    sent_at_s: float


class Outbox:
    """The sending half of one link, over all of its connections."""

    def __init__(self, rule: QueueRule, max_queued_messages: int) -> None:
        self._rule = rule
        self._max_queued_messages = max_queued_messages
        self._budget_bytes: int | None = None
        self._bandwidth_bytes_per_s: float | None = None
        self.epoch = 0
        self.sent_total = 0
        self.acknowledged_total = 0
        self.busy_bytes_total = 0
        self.receiver_busy_s_total = 0.0
        self.dropped_messages = 0
        self.wire_sent_bytes = 0
        self._base_delay_s = float("inf")
        self._delay_s = 0.0
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._queues: dict[Lane, deque[OutgoingMessage]] = {lane: deque() for lane in Lane}
        self._served_bytes = dict.fromkeys(Lane, 0)
        self._under_way: deque[_UnderWay] = deque()
        self._ordered_under_way_bytes = 0
        self._number = self._frames = self._acknowledged_frames = 0
        self._stream_bytes = self._acknowledged_bytes = 0
        self._busy_bytes = self._busy_micros = 0
        self._ran_dry = True  # there was nothing to send after the last frame
        self._held = False  # the window was full after the last frame
        self._heartbeat = False
        self.queued_bytes = 0

    def reset(self) -> int:
        """Forgets all that is queued or under way; the number of the epoch that begins."""
        self.dropped_messages += self.queued_messages
        self._begin_epoch()
        self.epoch += 1
        return self.epoch

    @property
    def queued_messages(self) -> int:
        """Messages that are not wholly in frames yet."""
        return sum(len(queue) for queue in self._queues.values())

    @property
    def unacknowledged_bytes(self) -> int:
        """Payload bytes in frames that the receiver has not acknowledged."""
        return self._stream_bytes - self._acknowledged_bytes

    @property
    def window_bytes(self) -> int:
        """The most that `unacknowledged_bytes` may be: two budgets."""
        if self._budget_bytes is None:
            return UNBUDGETED_WINDOW_BYTES
        return 2 * max(MIN_BUDGET_BYTES, self._budget_bytes)

    def set_budget(
        self, budget_bytes: int | None, bandwidth_bytes_per_s: float | None = None
    ) -> None:
        """Bytes per iteration for this link, and its rate; None: not known yet."""
        self._budget_bytes = budget_bytes
        self._bandwidth_bytes_per_s = bandwidth_bytes_per_s

    def room_bytes(self) -> int | None:
        """Bytes of a gradient that the link takes now and keeps within its budget and its backlog;
        None: as many as there are. May be called from any thread.

        What gives way to the next gradient, and bulk, which travels beside it, do not count.
        """
        if self._budget_bytes is None:
            return None
        budget = max(MIN_BUDGET_BYTES, self._budget_bytes)
        held = self._ordered_under_way_bytes + sum(
            waiting.remaining_bytes
            for waiting in tuple(self._queues[Lane.ORDERED])
            if not self._gives_way(waiting)
        )
        return max(0, min(budget, int(BACKLOG_BUDGETS * budget) - held))

    @property
    def idle_delay_s(self) -> float | None:
        """Least time from a frame to its acknowledgement, there and back; None: not known yet."""
        return self._base_delay_s if self._acknowledged_frames else None

    def push(self, message: Message) -> None:
        """Queues a message behind those of its lane.

        Raises:
            UnavailableError: The queue is at its bound, where its rule lets nothing give way: the
                link has to be given up, or the sender's memory would be.
        """
        lane = lane_of(message.kind)
        if self._rule is QueueRule.NEWEST and message.kind is MessageKind.GRADIENT:
            self._give_way(lane)
        if self.queued_messages >= self._max_queued_messages:
            raise UnavailableError(
                f"{self.queued_messages} messages wait for a peer that takes them too slowly;"
                f" allowed: {self._max_queued_messages}"
            )
        self._queues[lane].append(OutgoingMessage(message))
        self.queued_bytes += message.size_bytes

    def heartbeat(self) -> None:
        """Asks for a frame even if nothing is queued."""
        self._heartbeat = True

    def next_frame(self, now_s: float) -> bytes | None:
        """The next frame to hand to the network; None: nothing to send, or the window is full."""
        lane = self._next_lane()
        if lane is None:
            if self.queued_messages:
                self._held = True
            else:
                self._ran_dry = True
            if not self._heartbeat:
                return None
            return self._leave(Frame().SerializeToString(), 0, None, now_s)
        queue = self._queues[lane]
        outgoing = queue[0]
        if not outgoing.started:
            self._number += 1
            outgoing.begin(self._number)
        size = outgoing.next_chunk_bytes(self._chunk_limit_bytes)
        frame = outgoing.next_frame(size, back_to_back=self._back_to_back)
        self._ran_dry = self._held = False
        if outgoing.done:
            queue.popleft()
        self._served_bytes[lane] += size
        self.queued_bytes -= size
        return self._leave(frame, size, lane, now_s)

    def acknowledge(self, acknowledgement: Acknowledgement, now_s: float) -> None:
        """Makes room for what has arrived; acknowledgements of an earlier epoch say nothing.

        Raises:
            ContractError: It acknowledges what was never sent, or takes back what it has said.
        """
        a = acknowledgement
        if a.epoch < self.epoch:
            return
        self._check(a)
        last: _UnderWay | None = None
        while self._under_way and self._under_way[0].frame <= a.frames:
            last = self._under_way.popleft()
            self._ordered_under_way_bytes -= last.ordered_bytes
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
        """The lane whose next chunk fits the window; both waiting, each has half of the bytes."""
        waiting = [lane for lane in Lane if self._queues[lane]]
        if len(waiting) < len(Lane):
            # Alone on the link: what a lane takes now is not held against it later.
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
        """Whether it is the link that sets the time between the last frame and the next.

        Not if there was nothing to send in between, unless so much was under way all along that
        the link had no pause. Not if our own window was full while the frames under way did not
        queue in the network either: the pace is then the window's.
        """
        saturated = self._delay_s >= SATURATED * self._base_delay_s
        paused = self._ran_dry and self._payloads_under_way() < WITHOUT_PAUSE
        return not paused and (not self._held or saturated)

    def _payloads_under_way(self) -> int:
        """Frames with a payload that the receiver has not acknowledged."""
        before, count = self._acknowledged_bytes, 0
        for frame in self._under_way:
            count += frame.stream_bytes > before
            before = frame.stream_bytes
        return count

    @property
    def _chunk_limit_bytes(self) -> int:
        limit = self.window_bytes // CHUNKS_PER_WINDOW
        if self._bandwidth_bytes_per_s is None:
            return limit
        return min(limit, max(MIN_CHUNK_BYTES, int(self._bandwidth_bytes_per_s * CHUNK_S)))

    def _give_way(self, lane: Lane) -> None:
        """Drops the gradients of that lane that no frame has begun."""
        kept: deque[OutgoingMessage] = deque()
        for waiting in self._queues[lane]:
            if not self._gives_way(waiting):
                kept.append(waiting)
            else:
                self.dropped_messages += 1
                self.queued_bytes -= waiting.remaining_bytes
        self._queues[lane] = kept

    def _gives_way(self, waiting: OutgoingMessage) -> bool:
        """Whether the next gradient takes its place."""
        is_gradient = waiting.message.kind is MessageKind.GRADIENT
        return self._rule is QueueRule.NEWEST and is_gradient and not waiting.started

    def _leave(self, data: bytes, size_bytes: int, lane: Lane | None, now_s: float) -> bytes:
        self._heartbeat = False
        self._frames += 1
        self._stream_bytes += size_bytes
        self.sent_total += size_bytes
        self.wire_sent_bytes += len(data)
        ordered = size_bytes if lane is Lane.ORDERED else 0
        self._ordered_under_way_bytes += ordered
        self._under_way.append(_UnderWay(self._frames, self._stream_bytes, ordered, now_s))
        return data


def levelled(room_bytes: Mapping[Rank, int]) -> dict[Rank, int]:
    """Rooms of which those that hardly differ are as large as the least of them.

    >>> levelled({Rank(0): 1000, Rank(1): 950, Rank(2): 600})
    {0: 950, 1: 950, 2: 600}
    """
    level: dict[Rank, int] = {}
    group: list[Rank] = []
    for rank in sorted(room_bytes, key=lambda rank: (-room_bytes[rank], rank)):
        if group and room_bytes[rank] < (1 - ALIKE_FRACTION) * room_bytes[group[0]]:
            group = []
        group.append(rank)
        level.update(dict.fromkeys(group, room_bytes[rank]))
    return {rank: level[rank] for rank in room_bytes}
