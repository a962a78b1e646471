"""Hostile frames, acknowledgements and chunks of state, against both ends of a stream.

The real sender makes valid streams. Then one frame of each is altered, or the order. The result
must be `ContractError` or a value. No payload appears that was not sent, and memory stays within
the limits. A refused stream is over, and everything arrives on the next one.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from pathlib import Path

from dlion_api.errors import ContractError
from dlion_api.wire.exchange_pb2 import Acknowledgement, Frame, Hello, StateChunk
from dlion_core.links.events import StateSnapshot
from dlion_core.links.framing import StreamReceiver, allowed_bytes, split_payload
from dlion_core.links.link_budget import QueueRule
from dlion_core.links.send_queue import SendQueue
from dlion_core.links.state_transfer import StateAssembler, state_chunks
from dlion_core.policies.interface import Message, MessageKind
from dlion_worker.transport.client import _acknowledgement
from hostile import bending

LIMIT = 20_000
NUMBERS = (*bending.NUMBERS, LIMIT, LIMIT + 1)
LARGE = (*bending.LARGE, LIMIT, LIMIT + 1)
KINDS = tuple(MessageKind)


def valid_stream(rng: random.Random) -> tuple[list[bytes], set[bytes]]:
    """Return frames of a few messages of the real sender, and their payloads."""
    send_queue = SendQueue(QueueRule.KEEP, 100)
    frames = [Frame(hello=Hello(epoch=send_queue.reset())).SerializeToString()]
    send_queue.set_budget(rng.choice((512, 4096, 40_000)))
    payloads = {b""}
    for iteration in range(rng.randint(1, 3)):
        kind = rng.choice(KINDS)
        size = min(rng.choice((1, 7, 500, 5000)), allowed_bytes(kind, LIMIT))
        payload = rng.randbytes(size)
        payloads.add(payload)
        send_queue.push(Message(kind, iteration, payload=payload))
    while (frame := send_queue.next_frame(0.0)) is not None:
        frames.append(frame)
    return frames, payloads


EDITS: tuple[Callable[[random.Random, Frame], object], ...] = (
    lambda rng, frame: setattr(frame, "message", rng.choice(LARGE)),
    lambda rng, frame: setattr(frame, "offset", rng.choice(LARGE)),
    lambda rng, frame: setattr(frame, "checksum", rng.choice(NUMBERS)),
    lambda rng, frame: setattr(frame, "payload", rng.randbytes(rng.choice((0, 1, 999)))),
    lambda rng, frame: setattr(frame.header, "kind", rng.randrange(len(KINDS) + 2)),
    lambda rng, frame: setattr(frame.header, "message", rng.choice(LARGE)),
    lambda rng, frame: setattr(frame.header, "total_bytes", rng.choice(LARGE)),
    lambda rng, frame: setattr(frame.header, "iteration", rng.choice(LARGE)),
    lambda rng, frame: frame.ClearField("header"),
    lambda rng, frame: setattr(frame.hello, "rank", rng.choice(NUMBERS)),
    lambda rng, frame: setattr(frame.hello, "epoch", rng.choice(LARGE)),
)


def _altered_fields(rng: random.Random, data: bytes) -> bytes:
    frame = Frame.FromString(data)
    rng.choice(EDITS)(rng, frame)
    return frame.SerializeToString()


def _altered(rng: random.Random, data: bytes, other: bytes) -> bytes:
    match rng.randrange(8):
        case 0 | 1 | 2:
            return bending.bytes_of(rng, data)
        case 3 | 4 | 5:
            return _altered_fields(rng, data)
        case 6:
            return bending.spliced(rng, data, other)
        case _:
            return rng.randbytes(rng.choice((0, 1, 30, 3000)))


def _reordered(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    """Drop (not the last: that is only a slow sender), repeat or move a frame."""
    changed = list(frames)
    at = rng.randrange(len(changed))
    match rng.randrange(3):
        case 0:
            del changed[rng.randrange(len(changed) - 1)]
        case 1:
            changed.insert(rng.randrange(len(changed) + 1), changed[at])
        case _:
            changed.insert(rng.randrange(len(changed)), changed.pop(at))
    return changed


def attack_inbox(rng: random.Random, folder: Path) -> str | None:
    """Give the receiver one stream with one frame altered, dropped, repeated or moved."""
    frames, payloads = valid_stream(rng)
    altered: bytes | None = None
    if rng.randrange(4) == 0:
        stream = bending.until_different(frames, lambda: _reordered(rng, frames))
    else:
        stream, at = list(frames), rng.randrange(len(frames))
        other = rng.choice(frames)
        altered = bending.until_different(frames[at], lambda: _altered(rng, frames[at], other))
        stream[at] = altered
    inbox = StreamReceiver(LIMIT, incarnation=1)
    refused = not _received(inbox, stream, payloads, altered)
    # A refused stream is closed. The peer dials again, and then no message is missing.
    fresh = StreamReceiver(LIMIT, incarnation=1)
    assert _received(fresh, frames, payloads, None)
    return "refused" if refused else "taken"


def _received(
    inbox: StreamReceiver, stream: list[bytes], sent: set[bytes], altered: bytes | None
) -> bool:
    """Return whether the receiver accepts the whole stream."""
    for data in stream:
        try:
            head, state_chunks = split_payload(data)
            frame = inbox.parse(head)
            if frame.HasField("hello"):
                inbox.hello_received(frame.hello)
                continue
            message = inbox.feed(frame, 0.0, state_chunks)
        except ContractError:
            return False
        if message is not None and (payload := bytes(message.payload)) not in sent:
            assert len(payload) <= LIMIT
            assert altered is not None, "unaltered frames made a payload that was not sent"
            # Only a frame with a valid checksum can do that: its sender is hostile.
            own = Frame.FromString(altered)
            assert zlib.crc32(own.payload) == own.checksum
    return True


def attack_outbox(rng: random.Random, folder: Path) -> str | None:
    """Give the sender one hostile acknowledgement; it continues in its next epoch."""
    send_queue = SendQueue(QueueRule.KEEP, 100)
    send_queue.reset()
    send_queue.push(Message(MessageKind.GRADIENT, 1, payload=bytes(3000)))
    send_queue.next_frame(0.0)
    honest = Acknowledgement(epoch=1, incarnation=1, frames=1, stream_bytes=3000, busy_bytes=9)
    data = bending.until_different(
        honest.SerializeToString(), lambda: _altered_acknowledgement(rng, honest)
    )
    try:
        send_queue.acknowledge(_acknowledgement(data), 1.0)
        word = "taken"
    except ContractError:
        word = "refused"
    assert 0 <= send_queue.unacknowledged_bytes <= 3000
    epoch = send_queue.reset()
    send_queue.push(Message(MessageKind.GRADIENT, 2, payload=bytes(100)))
    assert send_queue.next_frame(2.0) is not None
    send_queue.acknowledge(
        Acknowledgement(epoch=epoch, incarnation=1, frames=1, stream_bytes=100), 3.0
    )
    assert send_queue.unacknowledged_bytes == 0
    return word


def _altered_acknowledgement(rng: random.Random, honest: Acknowledgement) -> bytes:
    if rng.random() < 0.5:
        return bending.bytes_of(rng, honest.SerializeToString())
    altered = Acknowledgement()
    altered.CopyFrom(honest)
    setattr(altered, rng.choice([f.name for f in honest.DESCRIPTOR.fields]), rng.choice(LARGE))
    return altered.SerializeToString()


def attack_assembly(rng: random.Random, folder: Path) -> str | None:
    """Receive one hostile chunk of state; a new assembly then accepts the honest one."""
    snapshot = StateSnapshot(1, 1, rng.randbytes(rng.choice((1, 300))))
    honest = next(state_chunks(snapshot))
    data = bending.until_different(honest, lambda: _altered_chunk(rng, honest))
    try:
        taken = StateAssembler(LIMIT).feed(data)
        assert taken is None or len(taken.payload) <= LIMIT
        word = "taken"
    except ContractError:
        word = "refused"
    assert StateAssembler(LIMIT).feed(honest) == snapshot
    return word


def _altered_chunk(rng: random.Random, honest: bytes) -> bytes:
    if rng.random() < 0.5:
        return bending.bytes_of(rng, honest)
    chunk = StateChunk.FromString(honest)
    setattr(chunk, rng.choice(("total_bytes", "offset", "iteration", "samples", "checksum")),
            rng.choice(NUMBERS))  # fmt: skip
    return chunk.SerializeToString()
