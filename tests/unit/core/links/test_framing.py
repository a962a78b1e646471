"""Tests of framing.

Chunks of any size and interleaving are reassembled. Invalid frames are refused.

Left out: streams, certificates (tests/local/test_links.py); random hostile bytes (tests/fuzz).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from isal.isal_zlib import crc32

from dlion_api.errors import ContractError
from dlion_api.wire.exchange_pb2 import Frame, Header, Hello
from dlion_core.links.framing import (
    MAX_CHUNK_BYTES,
    MAX_FRAME_BYTES,
    MAX_LINK_STATE_BYTES,
    OutgoingMessage,
    Reassembler,
    StreamReceiver,
    check_outgoing,
    chunk_bytes,
    split_payload,
)
from dlion_core.policies.interface import Message, MessageKind

LIMIT = 100_000


def opened(max_message_bytes: int = LIMIT) -> StreamReceiver:
    inbox = StreamReceiver(max_message_bytes, incarnation=1)
    inbox.hello_received(Hello(epoch=1))
    return inbox


def frames_of(message: Message, number: int, sizes: list[int]) -> list[Frame]:
    outgoing = OutgoingMessage(message)
    outgoing.begin(number)
    frames = []
    for size in [*sizes, LIMIT]:
        take = min(size, outgoing.remaining_bytes)
        frames.append(Frame.FromString(outgoing.next_frame(take, back_to_back=False)))
        if outgoing.remaining_bytes == 0:
            break
    return frames


sizes = st.lists(st.integers(1, 50), max_size=20)


@given(st.binary(max_size=500), st.binary(max_size=500), sizes, sizes, st.lists(st.booleans()))
def test_any_chunking_and_interleaving_is_reassembled(
    gradient: bytes, weights: bytes, cuts: list[int], bulk_cuts: list[int], turns: list[bool]
) -> None:
    sent = [
        Message(MessageKind.GRADIENT, 3, 32, 5, gradient),
        Message(MessageKind.WEIGHTS, 2, 0, 4, weights),
    ]
    lanes = [frames_of(sent[0], 1, cuts), frames_of(sent[1], 2, bulk_cuts)]
    # Headers open in the order of their numbers. After that, each lane keeps its own order.
    order = [lanes[0].pop(0), lanes[1].pop(0)]
    for turn in [*turns, *[False] * 600]:
        lane = lanes[turn] or lanes[not turn]
        if lane:
            order.append(lane.pop(0))
    inbox = opened()
    arrived = [inbox.feed(inbox.parse(f.SerializeToString()), 0.0) for f in order]
    whole = {m.kind: m for m in arrived if m is not None}
    assert {k: bytes(m.payload) for k, m in whole.items()} == {
        MessageKind.GRADIENT: gradient,
        MessageKind.WEIGHTS: weights,
    }
    assert whole[MessageKind.GRADIENT].local_batch_size == 32
    assert whole[MessageKind.GRADIENT].weights_version == 5
    assert inbox.acknowledgement().stream_bytes == len(gradient) + len(weights)


@given(st.binary(min_size=1, max_size=300), sizes, st.data())
def test_any_flipped_bit_is_refused_or_harmless(
    payload: bytes, cuts: list[int], data: st.DataObject
) -> None:
    message = Message(MessageKind.GRADIENT, 3, 32, 5, payload)
    wire = [f.SerializeToString() for f in frames_of(message, 1, cuts)]
    which = data.draw(st.integers(0, len(wire) - 1))
    bit = data.draw(st.integers(0, 8 * len(wire[which]) - 1))
    broken = bytearray(wire[which])
    broken[bit // 8] ^= 1 << bit % 8
    wire[which] = bytes(broken)
    inbox = opened()
    try:
        arrived = [inbox.feed(inbox.parse(w), 0.0) for w in wire]
    except ContractError:
        return
    # A flipped bit of the header may give another message, but never another payload.
    for whole in arrived:
        assert whole is None or bytes(whole.payload) == payload


BAD: list[tuple[str, str, Callable[[Frame], None]]] = [
    ("kind", "message kind 99", lambda f: setattr(f.header, "kind", 99)),
    ("no kind", "message kind 0", lambda f: setattr(f.header, "kind", 0)),
    ("number", "expected: 1", lambda f: setattr(f.header, "message", 2)),
    ("frame number", "expected: 1", lambda f: setattr(f, "message", 2)),
    ("too large", "allowed: 100000", lambda f: setattr(f.header, "total_bytes", LIMIT + 1)),
    ("huge", "allowed: 100000", lambda f: setattr(f.header, "total_bytes", 2**63)),
    ("too long", "the message has 2", lambda f: setattr(f.header, "total_bytes", 2)),
    ("offset", "expected: 0", lambda f: setattr(f, "offset", 1)),
    ("checksum", "checksum", lambda f: setattr(f, "checksum", f.checksum ^ 1)),
    ("payload", "checksum", lambda f: setattr(f, "payload", b"xyz")),
    ("iteration", "iteration", lambda f: setattr(f.header, "iteration", 2**60)),
    ("empty chunk", "chunk of 0 bytes", lambda f: setattr(f, "payload", b"")),
    ("progress with payload", "allowed: 0", lambda f: setattr(f.header, "kind", 2)),
    ("heartbeat with payload", "heartbeat", lambda f: setattr(f, "message", 0)),
    ("no header", "which has no header", lambda f: f.ClearField("header")),
    ("last of all", "is not empty", lambda f: setattr(f, "last", True)),
    ("hello inside", "shares", lambda f: setattr(f.hello, "rank", 1)),
]


@pytest.mark.parametrize(("what", "words", "spoil"), BAD, ids=[b[0] for b in BAD])
def test_a_frame_that_breaks_the_protocol_is_refused_with_a_reason(
    what: str, words: str, spoil: Callable[[Frame], None]
) -> None:
    frame = frames_of(Message(MessageKind.GRADIENT, 3, 32, 5, b"abc"), 1, [])[0]
    spoil(frame)
    inbox = opened()
    with pytest.raises(ContractError, match=words):
        inbox.feed(inbox.parse(frame.SerializeToString()), 0.0)


def test_a_second_gradient_may_not_begin_inside_the_first() -> None:
    inbox = opened()
    first = frames_of(Message(MessageKind.GRADIENT, 3, payload=b"abc"), 1, [1])
    second = frames_of(Message(MessageKind.GRADIENT, 4, payload=b"abc"), 2, [])
    inbox.feed(first[0], 0.0)
    with pytest.raises(ContractError, match="before the previous one is complete"):
        inbox.feed(second[0], 0.0)


@pytest.mark.parametrize(("first", "second"), [(None, 2), (1, 3), (1, 1)])
def test_a_message_out_of_turn_is_refused(first: int | None, second: int) -> None:
    inbox = opened()
    message = Message(MessageKind.GRADIENT, 3, 32, 5, b"abc")
    for number in [number for number in (first,) if number is not None]:
        (frame,) = frames_of(message, number, [])
        assert inbox.feed(frame, 0.0) is not None
    (frame,) = frames_of(message, second, [])
    with pytest.raises(ContractError, match=f"expected: {1 if first is None else first + 1}$"):
        inbox.feed(frame, 0.0)


def test_nothing_is_accepted_before_a_hello_or_after_an_old_one() -> None:
    inbox = StreamReceiver(LIMIT, incarnation=1)
    with pytest.raises(ContractError, match="not a hello"):
        inbox.feed(Frame(), 0.0)
    inbox.hello_received(Hello(epoch=2))
    with pytest.raises(ContractError, match="epoch 2 after epoch 2"):
        inbox.hello_received(Hello(epoch=2))


def test_oversized_and_unreadable_bytes_are_refused() -> None:
    inbox = opened()
    with pytest.raises(ContractError, match="allowed"):
        inbox.parse(bytes(MAX_FRAME_BYTES + 1))
    with pytest.raises(ContractError, match="not a frame"):
        inbox.parse(b"\xff\xff\xff")


def test_a_new_hello_discards_a_partial_message_and_resets_the_counts() -> None:
    inbox = opened()
    message = Message(MessageKind.GRADIENT, 3, payload=b"abcdef")
    inbox.feed(frames_of(message, 1, [3])[0], 0.0)
    inbox.hello_received(Hello(epoch=2))
    assert inbox.acknowledgement().stream_bytes == 0
    whole = [inbox.feed(f, 0.0) for f in frames_of(message, 1, [2, 2])]
    assert bytes(whole[-1].payload) == b"abcdef"  # type: ignore[union-attr]


def test_the_receiver_times_only_frames_that_arrive_back_to_back() -> None:
    # time  frame          counts
    # 0.0   first          no: nothing before it
    # 0.5   back to back   3 bytes in 0.5 s
    # 9.0   after a pause  no
    # 9.2   back to back   3 bytes in 0.2 s
    inbox = opened()
    frames = frames_of(Message(MessageKind.GRADIENT, 1, payload=b"aaabbbcccddd"), 1, [3, 3, 3])
    times = [(0.0, False), (0.5, True), (9.0, False), (9.2, True)]
    for frame, (now_s, back_to_back) in zip(frames, times, strict=True):
        frame.back_to_back = back_to_back
        inbox.feed(frame, now_s)
    acknowledged = inbox.acknowledgement()
    assert (acknowledged.busy_bytes, acknowledged.receiver_busy_micros) == (6, 700_000)
    assert (acknowledged.frames, acknowledged.stream_bytes) == (4, 12)


@pytest.mark.parametrize(
    "message",
    [
        Message(MessageKind.GRADIENT, 1, payload=bytes(LIMIT + 1)),
        Message(MessageKind.PROGRESS, 1, payload=b"x"),
        Message(MessageKind.STOP, 1, payload=bytes(5000)),
        Message(MessageKind.REACH, 0, payload=bytes(MAX_LINK_STATE_BYTES + 1)),
        Message(MessageKind.GRADIENT, -1),
        Message(MessageKind.GRADIENT, 1, local_batch_size=2**32),
        Message(MessageKind.GRADIENT, 1, weights_version=-1),
    ],
    ids=["large", "progress with payload", "long reason", "reach", "iteration", "batch", "version"],
)
def test_a_message_that_every_peer_would_refuse_is_not_sent(message: Message) -> None:
    with pytest.raises(ContractError, match="allowed"):
        check_outgoing(message, LIMIT)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_a_message_takes_memory_for_received_and_not_for_announced_bytes() -> None:
    total = 256 * 2**20
    chunk = bytes(MAX_CHUNK_BYTES)
    frames = [Frame(message=number, payload=chunk, checksum=crc32(chunk)) for number in (1, 2)]
    for frame, kind in zip(frames, (MessageKind.GRADIENT, MessageKind.WEIGHTS), strict=True):
        header = Header(message=frame.message, iteration=1, total_bytes=total)
        header.kind = int(kind)  # type: ignore[assignment]  # the same numbers, by contract
        frame.header.CopyFrom(header)
    inbox = opened(total)
    before = resident_bytes()
    for frame in frames:
        assert inbox.feed(frame, 0.0) is None
    assert resident_bytes() - before < 32 * 2**20
    for place in range(1, 20):
        frames[1].ClearField("header")
        frames[1].offset = place * len(chunk)
        assert inbox.feed(frames[1], 0.0) is None
    assert resident_bytes() - before < 64 * 2**20


def test_a_delivered_payload_cannot_be_changed() -> None:
    frame = frames_of(Message(MessageKind.GRADIENT, 1, payload=b"abc"), 1, [])[0]
    whole = Reassembler(LIMIT).feed(frame, frame.payload)
    assert whole is not None
    assert memoryview(whole.payload).readonly


@given(st.integers(0, 2**26), st.integers(1, 2**23))
def test_chunks_stay_within_their_bounds(total: int, limit: int) -> None:
    size = chunk_bytes(total, limit)
    assert 1 <= size <= min(limit, MAX_CHUNK_BYTES)


def test_a_megabyte_goes_in_three_chunks_where_the_window_allows() -> None:
    assert -(-1_000_000 // chunk_bytes(1_000_000, 2**30)) == 3


FRAMES = st.builds(
    Frame,
    message=st.integers(0, 2**64 - 1),
    offset=st.integers(0, 2**64 - 1),
    payload=st.binary(max_size=300),
    checksum=st.integers(0, 2**32 - 1),
    back_to_back=st.booleans(),
    header=st.none() | st.builds(Header, total_bytes=st.integers(0, 2**40)),
)


def means(data: bytes) -> Frame | None:
    """Parse these bytes with protobuf."""
    try:
        return Frame.FromString(data)
    except DecodeError:
        return None


def cut_means(data: bytes) -> Frame | None:
    """Parse the same bytes with the payload cut off first."""
    head, payload = split_payload(data)
    frame = means(head)
    if frame is not None and payload is not None:
        frame.payload = bytes(payload)
    return frame


@given(FRAMES, st.binary(max_size=30), st.binary(max_size=30))
def test_a_payload_cut_off_first_equals_the_one_that_protobuf_reads(
    frame: Frame, before: bytes, after: bytes
) -> None:
    ours = OutgoingMessage(Message(MessageKind.GRADIENT, 1, 1, payload=frame.payload))
    ours.begin(1)
    for data in (
        ours.next_frame(len(frame.payload), back_to_back=True),
        frame.SerializeToString(),
        before + frame.SerializeToString() + after,
        frame.SerializeToString() + frame.SerializeToString()[: len(after)],
        before,
    ):
        assert cut_means(data) == means(data)


def test_the_payload_of_our_own_frames_is_cut_off_without_a_copy() -> None:
    ours = OutgoingMessage(Message(MessageKind.GRADIENT, 1, 1, payload=b"abc"))
    ours.begin(1)
    data = ours.next_frame(3, back_to_back=False)
    _, payload = split_payload(data)
    assert payload is not None
    assert payload.obj is data
    assert bytes(payload) == b"abc"


def test_a_frame_that_is_too_large_is_not_parsed() -> None:
    data = bytes(MAX_FRAME_BYTES + 1)
    assert split_payload(data) == (data, None)


@pytest.mark.timeout(20)
def test_a_varint_without_end_is_refused_at_once() -> None:
    data = b"\x18" + b"\xff" * 600_000 + b"\x00"
    assert split_payload(data) == (data, None)
