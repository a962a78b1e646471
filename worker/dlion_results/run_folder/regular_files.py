"""Reads regular files of folders whose content may be foreign, and nothing else.

A pipe would block its reader, and a device may have no end.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def opened(path: Path, *, follow_links: bool = False) -> Iterator[int]:
    """The descriptor of a regular file. Raises: OSError, also for pipes, and for links unless
    `follow_links`."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags if follow_links else flags | os.O_NOFOLLOW)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("is not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def read_start(path: Path, max_bytes: int, *, follow_links: bool = False) -> bytes:
    """The first bytes of a regular file. Raises: as `opened`."""
    with (
        opened(path, follow_links=follow_links) as descriptor,
        os.fdopen(descriptor, "rb", closefd=False) as file,
    ):
        return file.read(max_bytes)


def read_end(path: Path, max_bytes: int) -> bytes:
    """The last bytes of a regular file. Raises: as `opened`."""
    with opened(path) as descriptor, os.fdopen(descriptor, "rb", closefd=False) as file:
        file.seek(max(0, os.fstat(descriptor).st_size - max_bytes))
        return file.read(max_bytes)
