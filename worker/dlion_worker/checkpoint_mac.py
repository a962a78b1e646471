"""The MAC at the end of a worker's checkpoint: HMAC-SHA256 of all bytes before it.

The key is that of one worker in one run, so the MAC needs no name of either. An older checkpoint of
the same worker and run is valid, too. The archive before it stays one that NumPy reads.
"""

import hashlib
import hmac
import io
import os
from typing import Any, BinaryIO

_START = b"\nDLION-HMAC-SHA256 "
# In hexadecimal digits: no MAC looks like the end of a ZIP archive, which readers search there.
MAC_BYTES = len(_START) + 2 * hashlib.sha256().digest_size + 1
"""Length of the MAC with its prefix and line break."""
_PIECE_BYTES = 2**20


class MacWriter(io.RawIOBase):
    """Writes to a file and authenticates what it writes. It cannot seek: bytes stay as written."""

    def __init__(self, file: BinaryIO, key: bytes) -> None:
        super().__init__()
        self._file = file
        self._mac = hmac.new(key, digestmod=hashlib.sha256)

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self._mac.update(data)
        return self._file.write(data)

    def finish(self) -> None:
        """Write the MAC; nothing may follow."""
        self._file.write(_line(self._mac))


def has_valid_mac(file: BinaryIO, key: bytes) -> bool:
    """Whether the file ends with the MAC of all bytes before it. Reads it in pieces, and then
    returns to its beginning."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    left = file.seek(0, os.SEEK_END) - MAC_BYTES
    file.seek(0)
    while left > 0 and (piece := file.read(min(left, _PIECE_BYTES))):
        mac.update(piece)
        left -= len(piece)
    is_valid = left == 0 and hmac.compare_digest(file.read(), _line(mac))
    file.seek(0)
    return is_valid


def _line(mac: hmac.HMAC) -> bytes:
    return _START + mac.hexdigest().encode("ascii") + b"\n"
