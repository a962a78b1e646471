"""A file cut into checksummed chunks, and the check of each that arrives.

Called by both sides of `keeping.proto`. Memory stays at one chunk, however long the file is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from isal.isal_zlib import crc32

from dlion_api.errors import ContractError

CHUNK_BYTES = 512 * 1024
MAX_MESSAGE_BYTES = CHUNK_BYTES + 4096
"""A message with one chunk."""


@dataclass(frozen=True)
class Piece:
    """One chunk of a file."""

    offset: int
    payload: bytes
    checksum: int


def cut(file: BinaryIO, total_bytes: int) -> Iterator[Piece]:
    """The file's first `total_bytes` in order.

    Raises:
        OSError: it cannot be read, or is shorter.
    """
    offset = 0
    while offset < total_bytes:
        payload = file.read(min(CHUNK_BYTES, total_bytes - offset))
        if not payload:
            raise OSError(f"the file ends after {offset} of {total_bytes} bytes")
        yield Piece(offset, payload, crc32(payload))
        offset += len(payload)


class Arrival:
    """How far a file has come."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.received_bytes = 0

    @property
    def whole(self) -> bool:
        """Whether all of it is there."""
        return self.received_bytes == self.total_bytes

    def take(self, offset: int, payload: bytes, checksum: int) -> None:
        """Counts the next chunk.

        Raises:
            ContractError: It is not the next one, is too long, or was damaged on its way.
        """
        end = offset + len(payload)
        if offset != self.received_bytes or end > self.total_bytes or not payload:
            raise ContractError(
                f"chunk of {len(payload)} bytes at {offset}; expected: some at"
                f" {self.received_bytes}, {self.total_bytes} in all"
            )
        if crc32(payload) != checksum:
            raise ContractError(f"chunk at {offset}: checksum does not match")
        self.received_bytes = end

    def check_whole(self) -> None:
        """Passes if all of it is there. Raises: ContractError."""
        if not self.whole:
            raise ContractError(
                f"the file ended after {self.received_bytes} of {self.total_bytes} bytes"
            )
