"""Messages cut into checksummed chunks, and put together again from chunks that nobody trusts.

Called by `window` (cutting) and by `service` (putting together). A state machine without I/O:
serialised frames in, messages and acknowledgements out, time as an argument. Does not know links,
budgets or certificates.

Two messages may be on their way at once, one per lane: bulk (`WEIGHTS`) and everything else, so
that a gradient need not wait for four megabytes of weights. Within a lane messages keep their
order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from google.protobuf.message import DecodeError
from isal.isal_zlib import crc32

from dlion_api.errors import ContractError
from dlion_api.wire.exchange_pb2 import Acknowledgement, Frame, Header, Hello
from dlion_worker.policies.interface import Message, MessageKind

PROTOCOL = 2
MIN_CHUNK_BYTES = 32 * 1024
MAX_CHUNK_BYTES = 640 * 1024
CHUNKS_PER_MESSAGE = 3
"""What chunk sizes aim at: all but the first chunk of a message measure the link, and each costs
the loops of both sides about half a millisecond. With two, a drop to a quarter of the rate showed
after four or five iterations instead of three (benchmarks/link.py). The exchange's loop takes 7.5
ms of CPU an iteration with two, 8.6 with three, 9.7 with four, of 128 ms for the gradient
(benchmarks/exchange_cost.py)."""

MAX_FRAME_BYTES = MAX_CHUNK_BYTES + 4096
MAX_SMALL_BYTES = 4096
"""Largest payload of a message that is neither a gradient nor weights, nor says what these hold."""

MAX_REACH_BYTES = 16 * 2**20
"""Largest payload of a `REACH`: what two thousand workers say that are all linked with all."""

_EMPTY = frozenset(
    {
        MessageKind.PROGRESS,
        MessageKind.WEIGHTS_REQUEST,
        MessageKind.HELD_REQUEST,
        MessageKind.FOLD_REQUEST,
    }
)
_BULK = frozenset({MessageKind.WEIGHTS, MessageKind.FOLD})
_LARGE = _BULK | {MessageKind.GRADIENT, MessageKind.HELD}
_KINDS = {kind.value: kind for kind in MessageKind}
_MAX_ITERATION = 2**53
_MOST = {"iteration": _MAX_ITERATION, "local_batch_size": 2**32 - 1, "weights_version": 2**64 - 1}


_VARINT, _LENGTH_DELIMITED = 0, 2
"""Protobuf's wire types that a frame is made of."""

_LONGEST_SHIFT = 56
"""Of a varint's last byte but one: numbers have 64 bits, whatever a hostile peer makes of them."""

_PAYLOAD_KEY = bytes([Frame.PAYLOAD_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])


def _varint(number: int) -> bytes:
    """Protobuf's form of a length."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def cut_payload(data: bytes) -> tuple[bytes, memoryview | None]:
    """A serialised frame without its payload, and the payload where it stands last, as it does in
    frames of ours: protobuf would copy it twice. None: it does not, or these bytes are no frame.
    """
    if len(data) > MAX_FRAME_BYTES:
        return data, None  # to be refused by whoever parses it, as whatever is no frame
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
        pass  # it ends too early, or a number never ends
    return data, None


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while (byte := data[at]) > 0x7F:
        if shift > _LONGEST_SHIFT:
            raise IndexError(at)
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return number | byte << shift, at + 1


class Lane(IntEnum):
    """Which order a message keeps."""

    ORDERED = 0
    BULK = 1


def untouched(size_bytes: int) -> memoryview:
    """Room for so many bytes, all of which are to be written before any is read.

    Nothing is written here, not even zeros: of much room the kernel gives a page when that is first
    written to, so that whoever announces a long message costs the receiver what really comes of it.
    """
    return np.empty(size_bytes, np.uint8).data


def lane_of(kind: MessageKind) -> Lane:
    """The lane that messages of that kind travel in."""
    return Lane.BULK if kind in _BULK else Lane.ORDERED


def allowed_bytes(kind: MessageKind, max_message_bytes: int) -> int:
    """The largest payload of a message of that kind."""
    if kind in _EMPTY:
        return 0
    if kind is MessageKind.REACH:
        return MAX_REACH_BYTES
    return max_message_bytes if kind in _LARGE else MAX_SMALL_BYTES


def check_outgoing(message: Message, max_message_bytes: int) -> None:
    """Passes if the peer's `Reassembler` would take it.

    Raises:
        ContractError: It would not; better known here, by whoever made the message.
    """
    allowed = allowed_bytes(message.kind, max_message_bytes)
    size = memoryview(message.payload).nbytes
    if size > allowed:
        raise ContractError(
            f"{message.kind.name} message of {size} bytes; allowed: {allowed}."
            " Large models need a larger spec.network.maxMessageBytes; policies that send more than"
            " all entries in one message, a larger bound in dlion_worker.policies.message_sizes"
        )
    for name in ("iteration", "local_batch_size", "weights_version"):
        number, most = getattr(message, name), _MOST[name]
        if not 0 <= number <= most:
            raise ContractError(
                f"{message.kind.name} message: {name} {number}; allowed: 0 to {most}"
            )


def chunk_bytes(total_bytes: int, limit_bytes: int) -> int:
    """Bytes per chunk of a message: a third of it, within bounds that keep CPU and delay low.

    A frame costs about half a millisecond of CPU whatever its size (benchmarks/exchange.py).
    `limit_bytes` is what the window allows and the link carries in a while; it wins over the lower
    bound.
    """
    wanted = -(-total_bytes // CHUNKS_PER_MESSAGE)
    return max(1, min(max(MIN_CHUNK_BYTES, wanted), MAX_CHUNK_BYTES, limit_bytes))


class OutgoingMessage:
    """One message waiting to be cut into frames, or being cut."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self._payload = memoryview(message.payload).cast("B")
        self._sent_bytes = 0
        self._number = 0

    @property
    def started(self) -> bool:
        """Whether a frame of it has left: it can give way no more."""
        return self._number > 0

    @property
    def remaining_bytes(self) -> int:
        """Payload bytes that no frame carries yet."""
        return len(self._payload) - self._sent_bytes

    @property
    def done(self) -> bool:
        """Whether every byte (and the header) is in a frame."""
        return self.started and self.remaining_bytes == 0

    def begin(self, number: int) -> None:
        """Gives it its number in the epoch, before its first frame."""
        self._number = number

    def next_chunk_bytes(self, limit_bytes: int) -> int:
        """Payload bytes of its next frame, where the window allows chunks of `limit_bytes`."""
        return min(self.remaining_bytes, chunk_bytes(len(self._payload), limit_bytes))

    def next_frame(self, size_bytes: int, *, back_to_back: bool) -> bytes:
        """The next frame, serialised, with `size_bytes` of payload (no more than remain)."""
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
        # A message's fields may stand in any order: the payload is put behind the others by hand,
        # and so copied once instead of three times.
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
class _Incoming:
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
    """Puts one epoch's chunks together; holds at most one message per lane."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._last_number = 0
        self._open: dict[Lane, _Incoming] = {}

    def feed(self, frame: Frame, payload: bytes | memoryview) -> Message | None:
        """Takes one frame; the message that it completes, if it does.

        `payload` is the frame's: protobuf copies it each time that it is asked for.

        Raises:
            ContractError: The frame breaks the protocol; nothing after it on this stream can be
                trusted to be what its sender meant, so the stream has to end.
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

    def _find(self, number: int) -> _Incoming:
        for incoming in self._open.values():
            if incoming.header.message == number:
                return incoming
        raise ContractError(f"chunk of message {number}, which no header has opened")

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
            raise ContractError(f"message {number} begins before the one before it is whole")
        self._last_number = number
        self._open[lane] = _Incoming(header, kind, untouched(header.total_bytes))


class Inbox:
    """One incoming stream: frames in, messages out, and the counters that go back to the sender.

    The link's rate is measured here, where bytes arrive: over each frame that followed the one
    before it back to back, its bytes and the time since the one before.
    """

    def __init__(self, max_message_bytes: int, incarnation: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._incarnation = incarnation
        self._epoch = 0
        self.received_total = 0
        self._reset()

    def _reset(self) -> None:
        self._reassembler = Reassembler(self._max_message_bytes)
        self._frames = 0
        self._stream_bytes = 0
        self._busy_bytes = 0
        self._busy_s = 0.0
        self._last_arrival_s: float | None = None

    def parse(self, data: bytes) -> Frame:
        """The frame in these bytes.

        Raises:
            ContractError: They are not a frame, or one of a size or shape not allowed.
        """
        if len(data) > MAX_FRAME_BYTES:
            raise ContractError(f"frame of {len(data)} bytes; allowed: {MAX_FRAME_BYTES}")
        try:
            frame = Frame.FromString(data)
        except DecodeError as error:
            raise ContractError(f"{len(data)} bytes that are not a frame") from error
        if frame.HasField("hello") and (frame.HasField("header") or frame.message):
            raise ContractError("a hello shares its frame with a message")
        if frame.last and (frame.HasField("hello") or frame.HasField("header") or frame.message):
            raise ContractError("a stream's last frame carries something")
        return frame

    def greeted(self, hello: Hello) -> None:
        """Begins a new epoch: counters at zero, half a message forgotten."""
        if hello.epoch <= self._epoch:
            raise ContractError(f"hello of epoch {hello.epoch} after epoch {self._epoch}")
        self._reset()
        self._epoch = hello.epoch

    def feed(self, frame: Frame, now_s: float, payload: memoryview | None = None) -> Message | None:
        """Takes one frame after the hello; the message it completes, if any.

        `payload`: the frame's, where it was cut off before the frame was parsed (`cut_payload`).
        """
        if not self._epoch:
            raise ContractError("the first frame of a stream is not a hello")
        payload = memoryview(frame.payload) if payload is None else payload
        size = len(payload)
        self._frames += 1
        self._stream_bytes += size
        self.received_total += size
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
        """What has arrived so far in this epoch."""
        return Acknowledgement(
            epoch=self._epoch,
            incarnation=self._incarnation,
            frames=self._frames,
            stream_bytes=self._stream_bytes,
            busy_bytes=self._busy_bytes,
            receiver_busy_micros=round(self._busy_s * 1e6),
        )
