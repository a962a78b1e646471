"""Cut messages into checksummed chunks, and reassemble them from untrusted ones. No I/O.

Two messages may be in flight at once, one per lane: bulk (weights) and everything else, so that a
gradient does not wait for megabytes of weights. A lane preserves the order of its messages.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from google.protobuf.message import DecodeError
from isal.isal_zlib import crc32

from dlion_api.errors import ContractError
from dlion_api.wire.exchange_pb2 import Acknowledgement, Frame, Header, Hello
from dlion_core.policies.interface import Message, MessageKind

PROTOCOL = 2
MIN_CHUNK_BYTES = 32 * 1024
MAX_CHUNK_BYTES = 640 * 1024
CHUNKS_PER_MESSAGE = 3
"""The target number of chunks per message.

All chunks but the first measure the link, and each costs about half a millisecond on both sides.
With two, a drop to a quarter of the rate showed after four or five iterations instead of three
(benchmarks/link.py). The loop's CPU time per iteration is 7.5 ms with two, 8.6 with three and 9.7
with four, of 128 ms for the gradient (benchmarks/exchange_cost.py).
"""

MAX_FRAME_BYTES = MAX_CHUNK_BYTES + 4096
MAX_SMALL_BYTES = 4096
"""Maximum payload of small messages: all but gradients, weights, features and descriptions."""

MAX_LINK_STATE_BYTES = 16 * 2**20
"""Maximum payload of a `REACH` message: enough for two thousand fully connected workers."""

FORWARDING_BYTES = 16
"""What a `FORWARDED_STEP` message may be longer than the forwarded one."""

_EMPTY = frozenset(
    {
        MessageKind.PROGRESS,
        MessageKind.WEIGHTS_REQUEST,
        MessageKind.HELD_REQUEST,
        MessageKind.FOLD_REQUEST,
    }
)
_BULK = frozenset({MessageKind.WEIGHTS, MessageKind.FOLD})
_GRADIENTS = frozenset({MessageKind.GRADIENT, MessageKind.FORWARDED_STEP})
_LARGE = _BULK | {MessageKind.GRADIENT, MessageKind.HELD, MessageKind.FEATURES}
_KINDS = {kind.value: kind for kind in MessageKind}
_MAX_ITERATION = 2**53
_MAX_VALUES = {
    "iteration": _MAX_ITERATION,
    "local_batch_size": 2**32 - 1,
    "weights_version": 2**64 - 1,
}


_VARINT, _LENGTH_DELIMITED = 0, 2
"""The Protobuf wire types used in a frame."""

_MAX_VARINT_SHIFT = 56
"""Shift of the last byte but one of a 64-bit varint; longer ones are rejected."""

_PAYLOAD_KEY = bytes([Frame.PAYLOAD_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def split_payload(data: bytes) -> tuple[bytes, memoryview | None]:
    """Split a serialised frame into all but its payload, and the payload.

    Works if the payload is the last field, as in our frames, and saves two copies by protobuf. The
    payload is None if it is elsewhere or the bytes are not a frame.
    """
    if len(data) > MAX_FRAME_BYTES:
        return data, None  # the parser rejects it, like any other bytes that are not a frame
    at = 0
    try:
        while at < len(data):
            begin = at
            key, at = _read_varint(data, at)
            if key & 7 == _LENGTH_DELIMITED:
                length, at = _read_varint(data, at)
                if key == _PAYLOAD_KEY[0] and at + length == len(data):
                    return data[:begin], memoryview(data)[at:]
                at += length
            elif key & 7 == _VARINT:
                _, at = _read_varint(data, at)
            else:
                break
    except IndexError:
        pass  # it is cut short, or a varint has no end
    return data, None


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while (byte := data[at]) > 0x7F:
        if shift > _MAX_VARINT_SHIFT:
            raise IndexError(at)
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return number | byte << shift, at + 1


class Lane(IntEnum):
    """Messages of one lane arrive in order."""

    ORDERED = 0
    BULK = 1


def uninitialized_buffer(size_bytes: int) -> memoryview:
    """An uninitialised buffer; every byte must be written before it is read.

    The kernel allocates a page on the first write. A peer that announces a long message therefore
    costs the receiver only the memory for what really arrives.
    """
    return np.empty(size_bytes, np.uint8).data


def lane_of(kind: MessageKind) -> Lane:
    return Lane.BULK if kind in _BULK else Lane.ORDERED


def carries_gradient(kind: MessageKind) -> bool:
    """Whether the payload is a gradient or an update, of the sender or of a peer."""
    return kind in _GRADIENTS


def allowed_bytes(kind: MessageKind, max_message_bytes: int) -> int:
    if kind in _EMPTY:
        return 0
    if kind is MessageKind.REACH:
        return MAX_LINK_STATE_BYTES
    if kind is MessageKind.FORWARDED_STEP:
        return max_message_bytes + FORWARDING_BYTES
    return max_message_bytes if kind in _LARGE else MAX_SMALL_BYTES


def check_outgoing(message: Message, max_message_bytes: int) -> None:
    """Raise ContractError if the peer's `Reassembler` would not accept the message."""
    allowed = allowed_bytes(message.kind, max_message_bytes)
    size = memoryview(message.payload).nbytes
    if size > allowed:
        raise ContractError(
            f"{message.kind.name} message of {size} bytes; allowed: {allowed}."
            " Large models need a larger spec.network.maxMessageBytes; policies that send more than"
            " all entries in one message, a larger bound in dlion_core.policies.factory"
        )
    for name in ("iteration", "local_batch_size", "weights_version"):
        number, most = getattr(message, name), _MAX_VALUES[name]
        if not 0 <= number <= most:
            raise ContractError(
                f"{message.kind.name} message: {name} {number}; allowed: 0 to {most}"
            )


def chunk_bytes(total_bytes: int, limit_bytes: int) -> int:
    """Bytes per chunk: a third of the message, within bounds that limit CPU use and delay.

    A frame costs about half a millisecond of CPU whatever its size (benchmarks/exchange.py).
    `limit_bytes` comes from the window and the link's rate; it overrides the lower bound.
    """
    wanted = -(-total_bytes // CHUNKS_PER_MESSAGE)
    return max(1, min(max(MIN_CHUNK_BYTES, wanted), MAX_CHUNK_BYTES, limit_bytes))


class OutgoingMessage:
    """One queued message and how much of it is already in frames."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self._payload = memoryview(message.payload).cast("B")
        self._sent_bytes = 0
        self._number = 0

    @property
    def started(self) -> bool:
        """Whether a frame of it has been sent: it can no longer be superseded."""
        return self._number > 0

    @property
    def remaining_bytes(self) -> int:
        """Payload bytes that are not in a frame yet."""
        return len(self._payload) - self._sent_bytes

    @property
    def done(self) -> bool:
        """Whether the header and every byte are in frames."""
        return self.started and self.remaining_bytes == 0

    def begin(self, number: int) -> None:
        """Set its number in the epoch, before its first frame."""
        self._number = number

    def next_chunk_bytes(self, limit_bytes: int) -> int:
        """Payload bytes of its next frame; `limit_bytes` is the maximum chunk size."""
        return min(self.remaining_bytes, chunk_bytes(len(self._payload), limit_bytes))

    def next_frame(self, size_bytes: int, *, back_to_back: bool) -> bytes:
        """The next frame, serialised, with `size_bytes` of payload."""
        first = not self._sent_bytes
        payload = self._payload[self._sent_bytes : self._sent_bytes + size_bytes]
        frame = Frame(
            message=self._number,
            offset=self._sent_bytes,
            checksum=crc32(payload),
            back_to_back=back_to_back,
        )
        if first:
            frame.header.CopyFrom(self._header())
        self._sent_bytes += len(payload)
        # Protobuf allows fields in any order. Appending the payload by hand copies it once instead
        # of three times.
        return b"".join((frame.SerializeToString(), _PAYLOAD_KEY, _varint(len(payload)), payload))

    def _header(self) -> Header:
        return Header(
            message=self._number,
            kind=int(self.message.kind),  # type: ignore[arg-type]  # the same numbers, by contract
            iteration=self.message.iteration,
            local_batch_size=self.message.local_batch_size,
            weights_version=self.message.weights_version,
            total_bytes=len(self._payload),
        )


@dataclass
class _PartialMessage:
    header: Header
    kind: MessageKind
    buffer: memoryview
    received_bytes: int = 0

    def message(self) -> Message:
        return Message(
            kind=self.kind,
            iteration=self.header.iteration,
            local_batch_size=self.header.local_batch_size,
            weights_version=self.header.weights_version,
            payload=self.buffer.toreadonly(),
        )


class Reassembler:
    """Reassembles one epoch's chunks; holds at most one message per lane."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._last_number = 0
        self._open: dict[Lane, _PartialMessage] = {}

    def feed(self, frame: Frame, payload: bytes | memoryview) -> Message | None:
        """Add one frame and its payload; return the message that it completes, if any.

        Raises ContractError if the frame breaks the protocol. Nothing after it can be trusted, so
        the stream must end.
        """
        if frame.HasField("header"):
            self._begin(frame.header, frame.message)
        incoming = self._find(frame.message)
        end = frame.offset + len(payload)
        if frame.offset != incoming.received_bytes:
            raise ContractError(
                f"message {frame.message}: chunk at byte {frame.offset};"
                f" expected: {incoming.received_bytes}"
            )
        if end > incoming.header.total_bytes or (not payload and incoming.header.total_bytes):
            raise ContractError(
                f"message {frame.message}: chunk of {len(payload)} bytes at {frame.offset};"
                f" the message has {incoming.header.total_bytes}"
            )
        if crc32(payload) != frame.checksum:
            raise ContractError(f"message {frame.message}: checksum does not match its chunk")
        incoming.buffer[frame.offset : end] = payload
        incoming.received_bytes = end
        if end < incoming.header.total_bytes:
            return None
        del self._open[lane_of(incoming.kind)]
        return incoming.message()

    def _find(self, number: int) -> _PartialMessage:
        for incoming in self._open.values():
            if incoming.header.message == number:
                return incoming
        raise ContractError(f"chunk of message {number}, which has no header")

    def _begin(self, header: Header, number: int) -> None:
        kind = _KINDS.get(header.kind)
        if kind is None:
            raise ContractError(
                f"message kind {header.kind}; allowed: {', '.join(map(str, sorted(_KINDS)))}"
            )
        if header.message != number or number != self._last_number + 1:
            raise ContractError(
                f"message {header.message} in a frame of message {number};"
                f" expected: {self._last_number + 1}"
            )
        allowed = allowed_bytes(kind, self._max_message_bytes)
        if header.total_bytes > allowed:
            raise ContractError(
                f"{kind.name} message of {header.total_bytes} bytes; allowed: {allowed}"
            )
        if header.iteration > _MAX_ITERATION:
            raise ContractError(f"iteration {header.iteration}; allowed: up to {_MAX_ITERATION}")
        lane = lane_of(kind)
        if lane in self._open:
            raise ContractError(f"message {number} starts before the previous one is complete")
        self._last_number = number
        self._open[lane] = _PartialMessage(header, kind, uninitialized_buffer(header.total_bytes))


class StreamReceiver:
    """One incoming stream: frames in, messages and acknowledgement counters out.

    Measures the link's rate at arrival: the bytes of each frame that was sent back to back, and the
    time since the frame before it.
    """

    def __init__(self, max_message_bytes: int, incarnation: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._incarnation = incarnation
        self._epoch = 0
        self._reset()

    def _reset(self) -> None:
        self._reassembler = Reassembler(self._max_message_bytes)
        self._frames = 0
        self._stream_bytes = 0
        self._busy_bytes = 0
        self._busy_s = 0.0
        self._last_arrival_s: float | None = None

    def parse(self, data: bytes) -> Frame:
        """Parse a frame. Raises ContractError for other bytes, sizes and shapes."""
        if len(data) > MAX_FRAME_BYTES:
            raise ContractError(f"frame of {len(data)} bytes; allowed: {MAX_FRAME_BYTES}")
        try:
            frame = Frame.FromString(data)
        except DecodeError as error:
            raise ContractError(f"{len(data)} bytes that are not a frame") from error
        if frame.HasField("hello") and (frame.HasField("header") or frame.message):
            raise ContractError("a hello shares its frame with a message")
        if frame.last and (frame.HasField("hello") or frame.HasField("header") or frame.message):
            raise ContractError("a stream's last frame is not empty")
        return frame

    def hello_received(self, hello: Hello) -> None:
        """Start a new epoch: reset the counters, discard incomplete messages."""
        if hello.epoch <= self._epoch:
            raise ContractError(f"hello of epoch {hello.epoch} after epoch {self._epoch}")
        self._reset()
        self._epoch = hello.epoch

    def feed(self, frame: Frame, now_s: float, payload: memoryview | None = None) -> Message | None:
        """Add one frame after the hello; return the message that it completes, if any. `payload` is
        the frame's, if `split_payload` has cut it off: protobuf copies it on each access."""
        if not self._epoch:
            raise ContractError("the first frame of a stream is not a hello")
        payload = memoryview(frame.payload) if payload is None else payload
        size = len(payload)
        self._frames += 1
        self._stream_bytes += size
        if frame.back_to_back and self._last_arrival_s is not None:
            self._busy_bytes += size
            self._busy_s += now_s - self._last_arrival_s
        self._last_arrival_s = now_s
        if not frame.message:
            if size or frame.HasField("header"):
                raise ContractError("a heartbeat carries a message")
            return None
        return self._reassembler.feed(frame, payload)

    def acknowledgement(self) -> Acknowledgement:
        return Acknowledgement(
            epoch=self._epoch,
            incarnation=self._incarnation,
            frames=self._frames,
            stream_bytes=self._stream_bytes,
            busy_bytes=self._busy_bytes,
            receiver_busy_micros=round(self._busy_s * 1e6),
        )
