"""Tests of the send queue: bytes in flight, superseded messages, shares of bulk and gradients.

Each test plays sender, network and receiver by hand. The receiver is the real `StreamReceiver`.

Left out: streams and the passage of time.
"""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import Rank
from dlion_api.wire.exchange_pb2 import Acknowledgement, Frame, Hello
from dlion_core.links.framing import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, StreamReceiver
from dlion_core.links.link_budget import (
    BACKLOG_BUDGETS,
    MIN_BUDGET_BYTES,
    SIMILAR_FRACTION,
    UNBUDGETED_WINDOW_BYTES,
    QueueRule,
    equalize_similar,
)
from dlion_core.links.send_queue import SendQueue
from dlion_core.policies.interface import Message, MessageKind

KIB = 1024


class Wire:
    """One send queue, one receiver, and the frames between them."""

    def __init__(self, rule: QueueRule = QueueRule.KEEP, limit: int = 1000) -> None:
        self.send_queue = SendQueue(rule, limit)
        self.inbox = StreamReceiver(2**26, incarnation=1)
        self.under_way: deque[bytes] = deque()
        self.arrived: list[Message] = []
        self.now_s = 0.0
        self.inbox.hello_received(Hello(epoch=self.send_queue.reset()))

    def fill(self) -> int:
        """Let each frame leave that may; return how many did."""
        count = 0
        while (frame := self.send_queue.next_frame(self.now_s)) is not None:
            self.under_way.append(frame)
            count += 1
        return count

    def deliver(self, count: int = 1) -> None:
        """Deliver so many frames, with one acknowledgement for all."""
        for _ in range(count):
            frame = self.inbox.parse(self.under_way.popleft())
            if (message := self.inbox.feed(frame, self.now_s)) is not None:
                self.arrived.append(message)
        self.send_queue.acknowledge(self.inbox.acknowledgement(), self.now_s)

    def run(self) -> list[MessageKind]:
        """Send and deliver frame by frame until none is left; return the kinds by completion."""
        self.fill()
        while self.under_way:
            self.deliver()
            self.fill()
        return [message.kind for message in self.arrived]


def gradient(iteration: int, size: int = 100 * KIB) -> Message:
    return Message(MessageKind.GRADIENT, iteration, payload=bytes(size))


def progress(iteration: int) -> Message:
    return Message(MessageKind.PROGRESS, iteration)


@settings(deadline=None)  # a busy machine may pause for longer
@given(
    st.integers(0, 300 * KIB),
    st.lists(st.integers(0, 400 * KIB), min_size=1, max_size=6),
    st.lists(st.integers(1, 4), max_size=40),
)
def test_at_most_two_budgets_are_in_flight(
    budget: int, message_sizes: list[int], deliveries: list[int]
) -> None:
    wire = Wire()
    wire.send_queue.set_budget(budget)
    for iteration, size in enumerate(message_sizes, 1):
        wire.send_queue.push(gradient(iteration, size))
    for count in deliveries:
        wire.fill()
        assert wire.send_queue.unacknowledged_bytes <= 2 * max(budget, MIN_BUDGET_BYTES)
        wire.deliver(min(count, len(wire.under_way)))
    wire.run()
    assert [m.size_bytes for m in wire.arrived] == message_sizes
    assert wire.send_queue.acknowledged_total == wire.send_queue.sent_total == sum(message_sizes)
    assert wire.send_queue.queued_bytes == 0


@settings(deadline=None)  # a busy machine may pause for longer
@given(
    st.lists(st.tuples(st.integers(MIN_BUDGET_BYTES, 300 * KIB), st.integers(0, 6)), max_size=30),
    st.sampled_from(QueueRule),
)
def test_gradients_sized_to_the_free_room_never_exceed_the_backlog(
    rounds: list[tuple[int, int]], rule: QueueRule
) -> None:
    wire = Wire(rule)
    most = 0
    for iteration, (budget, delivered) in enumerate(rounds, 1):
        most = max(most, budget)
        wire.send_queue.set_budget(budget)
        room = wire.send_queue.sendable_bytes()
        assert room is not None
        assert 0 <= room <= budget
        wire.send_queue.push(gradient(iteration, room) if room else progress(iteration))
        wire.fill()
        held = wire.send_queue.unacknowledged_bytes + wire.send_queue.queued_bytes
        assert held <= BACKLOG_BUDGETS * most
        wire.deliver(min(delivered, len(wire.under_way)))


def test_a_budget_has_room_while_half_of_one_is_in_flight() -> None:
    wire = Wire()
    assert wire.send_queue.sendable_bytes() is None
    wire.send_queue.set_budget(100 * KIB)
    wire.send_queue.push(gradient(1, 50 * KIB))
    wire.fill()
    assert wire.send_queue.sendable_bytes() == 100 * KIB
    wire.send_queue.push(gradient(2, 100 * KIB))
    assert wire.send_queue.sendable_bytes() == 0
    wire.run()
    assert wire.send_queue.sendable_bytes() == 100 * KIB


def test_superseded_messages_and_bulk_take_no_room() -> None:
    wire = Wire(QueueRule.NEWEST)
    wire.send_queue.set_budget(100 * KIB)
    wire.send_queue.push(Message(MessageKind.WEIGHTS, 1, payload=bytes(4000 * KIB)))
    wire.fill()
    assert wire.send_queue.sendable_bytes() == 100 * KIB
    wire.send_queue.push(gradient(1))
    assert wire.send_queue.sendable_bytes() == 100 * KIB


def test_a_receiver_without_acknowledgements_holds_the_sender() -> None:
    wire = Wire()
    wire.send_queue.set_budget(64 * KIB)
    wire.send_queue.push(gradient(1, 1000 * KIB))
    wire.fill()
    assert wire.send_queue.unacknowledged_bytes == 128 * KIB
    assert wire.fill() == 0
    wire.deliver()
    assert wire.fill() == 1


def test_a_lower_budget_holds_until_enough_is_acknowledged() -> None:
    wire = Wire()
    wire.send_queue.push(gradient(1, 4000 * KIB))
    wire.send_queue.set_budget(500 * KIB)
    wire.fill()
    wire.send_queue.set_budget(125 * KIB)  # the bandwidth falls to a quarter
    while wire.send_queue.unacknowledged_bytes > 250 * KIB:
        assert wire.fill() == 0
        wire.deliver()
    wire.run()
    assert wire.arrived[0].size_bytes == 4000 * KIB


def test_a_newer_gradient_supersedes_only_an_older_gradient() -> None:
    # 1. gradient 1 has begun        stays: half of it is in flight
    # 2. progress 2, gradient 3      gradient 3 has not begun
    # 3. gradient 4                  supersedes gradient 3 but not progress 2
    wire = Wire(QueueRule.NEWEST)
    wire.send_queue.set_budget(32 * KIB)
    wire.send_queue.push(gradient(1))
    wire.fill()
    wire.send_queue.push(progress(2))
    wire.send_queue.push(Message(MessageKind.LOSS, 2, payload=bytes(8)))
    wire.send_queue.push(gradient(3))
    wire.send_queue.push(gradient(4))
    wire.run()
    assert [(m.kind.name, m.iteration) for m in wire.arrived] == [
        ("GRADIENT", 1), ("PROGRESS", 2), ("LOSS", 2), ("GRADIENT", 4),
    ]  # fmt: skip
    assert wire.send_queue.dropped_messages == 1


def test_kept_gradients_all_arrive_in_order() -> None:
    wire = Wire(QueueRule.KEEP)
    wire.send_queue.set_budget(32 * KIB)
    for iteration in range(1, 6):
        wire.send_queue.push(gradient(iteration))
    wire.run()
    assert [m.iteration for m in wire.arrived] == [1, 2, 3, 4, 5]
    assert wire.send_queue.dropped_messages == 0


def test_a_queue_at_its_bound_closes_the_link() -> None:
    wire = Wire(QueueRule.KEEP, limit=3)
    for iteration in range(3):
        wire.send_queue.push(gradient(iteration))
    with pytest.raises(UnavailableError, match="too slow"):
        wire.send_queue.push(gradient(4))


def test_gradients_pass_between_the_slices_of_bulk_and_bulk_keeps_half() -> None:
    wire = Wire()
    wire.send_queue.set_budget(128 * KIB)
    wire.send_queue.push(Message(MessageKind.WEIGHTS, 1, payload=bytes(1024 * KIB)))
    wire.fill()
    for iteration in range(2, 8):  # 6 x 100 KiB of gradients meet 1 MiB of weights
        wire.send_queue.push(gradient(iteration))
    kinds = wire.run()
    assert kinds[-1] is MessageKind.WEIGHTS  # bulk has half, and is the larger
    assert kinds[:6] == [MessageKind.GRADIENT] * 6


def test_bytes_are_counted_by_the_kind_of_message() -> None:
    """The payload excludes headers and heartbeats."""
    wire = Wire()
    wire.send_queue.push(Message(MessageKind.WEIGHTS, 1, payload=bytes(300 * KIB)))
    wire.send_queue.push(gradient(2))
    wire.send_queue.push(Message(MessageKind.LOSS, 2, payload=bytes(8)))
    wire.send_queue.push(progress(3))
    wire.run()
    queue = wire.send_queue
    assert queue.gradient_total == 100 * KIB
    assert (queue.weights_total, queue.control_total) == (300 * KIB, 8)
    assert queue.sent_total == 400 * KIB + 8
    assert 0 < queue.header_total < 1000
    assert queue.wire_sent_bytes == queue.sent_total + queue.header_total


def test_endless_gradients_do_not_starve_bulk() -> None:
    wire = Wire()
    wire.send_queue.set_budget(128 * KIB)
    wire.send_queue.push(Message(MessageKind.WEIGHTS, 1, payload=bytes(512 * KIB)))
    sent_before = iteration = 0
    while not any(m.kind is MessageKind.WEIGHTS for m in wire.arrived):
        if wire.send_queue.queued_messages < 4:
            iteration += 1
            wire.send_queue.push(gradient(iteration))
        wire.fill()
        sent_before = wire.send_queue.sent_total
        wire.deliver()
    assert sent_before <= 2 * 512 * KIB + 256 * KIB


def test_chunks_are_small_on_a_small_budget_and_bounded_without_one() -> None:
    wire = Wire()
    wire.send_queue.set_budget(20 * KIB)
    wire.send_queue.push(gradient(1, 400 * KIB))
    first = wire.send_queue.next_frame(0.0)
    assert len(Frame.FromString(first or b"").payload) == 10 * KIB
    wire = Wire()
    wire.send_queue.push(gradient(1, 4000 * KIB))
    first = wire.send_queue.next_frame(0.0)
    assert len(Frame.FromString(first or b"").payload) == MAX_CHUNK_BYTES


@pytest.mark.parametrize(
    ("bytes_per_s", "expected"), [(8e5, 100_000), (1e3, MIN_CHUNK_BYTES), (1e9, 400 * KIB)]
)
def test_a_chunk_is_at_most_what_the_link_carries_in_an_eighth_of_a_second(
    bytes_per_s: float, expected: int
) -> None:
    wire = Wire()
    wire.send_queue.set_budget(1200 * KIB, bytes_per_s)
    wire.send_queue.push(gradient(1, 1200 * KIB))
    first = wire.send_queue.next_frame(0.0)
    assert len(Frame.FromString(first or b"").payload) == expected


def flags(wire: Wire) -> list[bool]:
    return [Frame.FromString(frame).back_to_back for frame in wire.under_way]


def test_only_the_first_chunk_after_a_pause_is_not_back_to_back() -> None:
    wire = Wire()
    wire.send_queue.push(gradient(1))
    wire.send_queue.push(gradient(2))
    wire.fill()
    assert flags(wire) == [False] + [True] * 5
    wire.deliver(6)
    wire.send_queue.push(gradient(3))
    wire.fill()
    assert flags(wire) == [False, True, True]


def test_a_chunk_behind_two_in_flight_measures_the_link_with_an_empty_queue() -> None:
    wire = Wire()
    wire.send_queue.push(gradient(1))
    wire.fill()
    assert wire.send_queue.next_frame(wire.now_s) is None  # the queue was empty
    wire.deliver(1)
    wire.send_queue.push(gradient(2))  # two of the first are in flight
    wire.fill()
    assert flags(wire) == [True] * 5
    wire.deliver(4)
    assert wire.send_queue.next_frame(wire.now_s) is None
    wire.send_queue.push(gradient(3))  # one may have arrived long ago
    wire.fill()
    assert flags(wire) == [True, False, True, True]


def test_a_chunk_held_by_the_window_measures_the_link_only_if_frames_queue_in_it() -> None:
    # 1. the idle link acknowledges after 10 ms
    # 2. the window is full, frames still take 10 ms: the window sets the pace, not the link
    # 3. they take 40 ms: the link does
    wire = Wire()
    wire.send_queue.set_budget(32 * KIB)
    wire.send_queue.heartbeat()
    wire.fill()
    wire.now_s = 0.01
    wire.deliver()
    wire.send_queue.push(gradient(1, 1000 * KIB))
    wire.fill()
    wire.now_s += 0.01
    wire.deliver()
    wire.fill()
    assert not flags(wire)[-1]
    wire.now_s += 0.04
    wire.deliver()
    wire.fill()
    assert flags(wire)[-1]


def test_the_window_holds_the_bytes_of_two_round_trips() -> None:
    wire = Wire()
    wire.send_queue.set_budget(4 * KIB, 64 * KIB)
    assert wire.send_queue.window_bytes == 8 * KIB
    wire.send_queue.heartbeat()
    wire.fill()
    wire.now_s = 0.25
    wire.deliver()
    assert wire.send_queue.window_bytes == 32 * KIB
    wire.send_queue.set_budget(100 * KIB, 64 * KIB)
    assert wire.send_queue.window_bytes == 200 * KIB
    wire.send_queue.set_budget(4 * KIB, 1e12)
    assert wire.send_queue.window_bytes == UNBUDGETED_WINDOW_BYTES


def test_a_new_epoch_clears_the_queue_and_ignores_late_acknowledgements() -> None:
    wire = Wire()
    wire.send_queue.push(gradient(1))
    wire.fill()
    late = Acknowledgement(epoch=wire.send_queue.epoch, frames=4, stream_bytes=100 * KIB)
    wire.send_queue.push(gradient(2))
    wire.send_queue.reset()
    assert (wire.send_queue.queued_bytes, wire.send_queue.unacknowledged_bytes) == (0, 0)
    assert wire.send_queue.dropped_messages == 1
    wire.send_queue.acknowledge(late, 0.0)
    assert wire.send_queue.acknowledged_total == 0


@pytest.mark.parametrize(
    "nonsense",
    [
        {"frames": 99},
        {"frames": 2, "stream_bytes": 1},
        {"frames": 2, "stream_bytes": 2**60},
        {"frames": 0, "stream_bytes": 0},
        {"frames": 1, "stream_bytes": 25 * KIB, "busy_bytes": 26 * KIB},
        {"frames": 1, "stream_bytes": 26 * KIB},
        {"epoch": 9},
    ],
    ids=str,
)
def test_an_impossible_acknowledgement_is_refused(nonsense: dict[str, int]) -> None:
    wire = Wire()
    wire.send_queue.push(gradient(1))
    wire.fill()
    wire.deliver()
    with pytest.raises(ContractError, match="acknowledge"):
        wire.send_queue.acknowledge(Acknowledgement(**{"epoch": 1, **nonsense}), 0.0)


def test_a_message_does_not_wait_for_an_empty_one() -> None:
    wire = Wire()
    wire.send_queue.push(progress(1))
    wire.send_queue.push(Message(MessageKind.WEIGHTS, 1, payload=b""))
    assert sorted(wire.run()) == [MessageKind.PROGRESS, MessageKind.WEIGHTS]


@given(st.dictionaries(st.integers(0, 30), st.integers(0, 10**7), max_size=8))
def test_equalized_rooms_are_never_above_their_own_and_hardly_below(rooms: dict[int, int]) -> None:
    by_rank = {Rank(rank): room for rank, room in rooms.items()}
    level = equalize_similar(by_rank)
    assert level.keys() == by_rank.keys()
    for rank, room in by_rank.items():
        assert (1 - SIMILAR_FRACTION) * room <= level[rank] <= room
    for room in set(level.values()):
        assert room in by_rank.values()
