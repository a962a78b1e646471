"""Cut a file into checksummed chunks, and verify the chunks that arrive.

Used by both sides of `keeping.proto`. Memory is limited to one chunk, however long the file.
"""

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from isal.isal_zlib import crc32

from dlion_api.errors import ContractError

CHUNK_BYTES = 512 * 1024
MAX_MESSAGE_BYTES = CHUNK_BYTES + 4096
"""Limit of a message with one chunk."""


class ArtifactChunk(NamedTuple):
    offset: int
    payload: bytes
    checksum: int


def read_chunks(file: BinaryIO, total_bytes: int) -> Iterator[ArtifactChunk]:
    """Read the file's first `total_bytes` in order.

    Raises:
        OSError: It cannot be read, or is shorter.
    """
    offset = 0
    while offset < total_bytes:
        payload = file.read(min(CHUNK_BYTES, total_bytes - offset))
        if not payload:
            raise OSError(f"the file ends after {offset} of {total_bytes} bytes")
        yield ArtifactChunk(offset, payload, crc32(payload))
        offset += len(payload)


class ChunkVerifier:
    """Verifies the chunks of one file as they arrive."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.received_bytes = 0

    def add(self, offset: int, payload: bytes, checksum: int) -> None:
        """Verify the next chunk.

        Raises:
            ContractError: It is not the next one, is too long, or is corrupted.
        """
        end = offset + len(payload)
        if offset != self.received_bytes or end > self.total_bytes or not payload:
            raise ContractError(
                f"chunk of {len(payload)} bytes at {offset}; expected: offset"
                f" {self.received_bytes}, {self.total_bytes} bytes in all"
            )
        if crc32(payload) != checksum:
            raise ContractError(f"chunk at {offset}: checksum does not match")
        self.received_bytes = end

    def check_complete(self) -> None:
        """Check that the whole file has arrived. Raises: ContractError."""
        if self.received_bytes != self.total_bytes:
            raise ContractError(
                f"the file ended after {self.received_bytes} of {self.total_bytes} bytes"
            )
