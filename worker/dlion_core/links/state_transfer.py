"""Cut a worker's state into checksummed chunks, and reassemble it. No I/O."""

from collections.abc import Iterator

from google.protobuf.message import DecodeError
from isal.isal_zlib import crc32

from dlion_api.errors import ContractError
from dlion_api.wire.exchange_pb2 import StateChunk
from dlion_core.links.events import StateSnapshot
from dlion_core.links.framing import MAX_FRAME_BYTES, uninitialized_buffer

CHUNK_BYTES = 64 * 1024
"""A link of 0.1 Mbit/s carries it in 5 s, which is less than the silence that ends a pull."""

MAX_CHUNK_GAP_S = 60.0
"""Longest silence within a pull, however slowly earlier chunks arrived: a bad peer could make each
gap longer than the one before."""

MAX_GATHERING_S = 1800.0
"""Longest time until a state begins. A peer waits up to a minute for an update, and for an earlier
pull of the same worker, which takes long on a slow link."""


def state_chunks(snapshot: StateSnapshot) -> Iterator[bytes]:
    """The serialised chunks of a snapshot, in order."""
    if snapshot.is_equal:
        chunk = StateChunk(iteration=snapshot.iteration, samples=snapshot.samples, is_equal=True)
        yield chunk.SerializeToString()
        return
    payload = memoryview(snapshot.payload).cast("B")
    for offset in range(0, len(payload), CHUNK_BYTES):
        part = bytes(payload[offset : offset + CHUNK_BYTES])
        yield StateChunk(
            iteration=snapshot.iteration,
            samples=snapshot.samples,
            total_bytes=len(payload),
            offset=offset,
            payload=part,
            checksum=crc32(part),
        ).SerializeToString()


class StateAssembler:
    def __init__(self, max_state_bytes: int, *, may_be_equal: bool = False) -> None:
        """`may_be_equal`: the request had a hash."""
        self._max_state_bytes, self._may_be_equal = max_state_bytes, may_be_equal
        self._buffer: memoryview | None = None
        self._received_bytes = 0
        self._iteration = self._samples = 0

    @property
    def has_begun(self) -> bool:
        """Whether a chunk with a part of the state has arrived; empty ones come before."""
        return self._buffer is not None

    def feed(self, data: bytes) -> StateSnapshot | None:
        """Add one chunk; return the state with the last one. Raises ContractError."""
        chunk = self._parse(data)
        if chunk.is_equal:
            if not self._may_be_equal or self._buffer is not None or chunk.payload:
                raise ContractError("state chunk is equal to a state, which was not named")
            return StateSnapshot(chunk.iteration, chunk.samples, b"", is_equal=True)
        if not chunk.payload:
            if self.has_begun:
                raise ContractError(
                    f"empty state chunk after {self._received_bytes} bytes; allowed: before it"
                )
            return None
        if self._buffer is None:
            self._begin(chunk)
        assert self._buffer is not None
        end = chunk.offset + len(chunk.payload)
        named = (chunk.total_bytes, chunk.iteration, chunk.samples)
        if named != (len(self._buffer), self._iteration, self._samples):
            raise ContractError(f"state chunk at {chunk.offset} belongs to another state")
        if chunk.offset != self._received_bytes or end > len(self._buffer):
            raise ContractError(
                f"state chunk of {len(chunk.payload)} bytes at {chunk.offset};"
                f" expected: at {self._received_bytes}, {len(self._buffer)} in all"
            )
        if len(chunk.payload) < CHUNK_BYTES and end < len(self._buffer):
            raise ContractError(
                f"state chunk of {len(chunk.payload)} bytes at {chunk.offset};"
                f" allowed before the last: {CHUNK_BYTES} or more"
            )
        if crc32(chunk.payload) != chunk.checksum:
            raise ContractError(f"state chunk at {chunk.offset}: checksum does not match")
        self._buffer[chunk.offset : end] = chunk.payload
        self._received_bytes = end
        if end < len(self._buffer):
            return None
        return StateSnapshot(self._iteration, self._samples, self._buffer.toreadonly())

    def _begin(self, chunk: StateChunk) -> None:
        if chunk.total_bytes > self._max_state_bytes:
            raise ContractError(
                f"state of {chunk.total_bytes} bytes; allowed: {self._max_state_bytes}"
            )
        self._iteration, self._samples = chunk.iteration, chunk.samples
        self._buffer = uninitialized_buffer(chunk.total_bytes)

    @staticmethod
    def _parse(data: bytes) -> StateChunk:
        if len(data) > MAX_FRAME_BYTES:
            raise ContractError(f"state chunk of {len(data)} bytes; allowed: {MAX_FRAME_BYTES}")
        try:
            return StateChunk.FromString(data)
        except DecodeError as error:
            raise ContractError(f"{len(data)} bytes that are not a state chunk") from error
