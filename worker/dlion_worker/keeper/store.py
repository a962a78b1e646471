"""Files of a run on the keeper's disk, each of them whole.

Owns how a file comes into being: beside its place, then moved over it. Called by `service`, which
has checked whose the path is. Knows no callers and no network.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO

RESERVE_BYTES = 16 * 2**20
"""Room that is left to the records and the summary."""

_ARRIVING = ".arriving-"


class Store:
    """The files below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def clear(self) -> int:
        """Removes what an earlier keeper had not received to its end; how many files."""
        torn = list(self._folder.glob(f"state/*/{_ARRIVING}*"))
        torn += self._folder.glob(f"models/*/{_ARRIVING}*")
        for path in torn:
            path.unlink(missing_ok=True)
        return len(torn)

    def arriving(self, path: str, total_bytes: int) -> ArrivingFile:
        """A file that is to stand at that path. Raises: OSError, also where it does not fit."""
        target = self._folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(target.parent).free
        if total_bytes + RESERVE_BYTES > free_bytes:
            raise OSError(
                errno.ENOSPC,
                f"{total_bytes} bytes do not fit, {free_bytes} are free; enlarge the claim",
            )
        return ArrivingFile(target)

    def open(self, path: str) -> BinaryIO:
        """The file at that path. Raises: FileNotFoundError, OSError."""
        return (self._folder / path).open("rb")


class ArrivingFile:
    """A file on its way: `keep` puts it in its place, `drop` forgets it if that was not done."""

    def __init__(self, target: Path) -> None:
        self._target = target
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=_ARRIVING)
        self._fresh = Path(name)
        self._file = os.fdopen(descriptor, "wb", buffering=0)

    def write(self, payload: bytes) -> None:
        """Adds to its end. Raises: OSError."""
        rest = memoryview(payload)
        while rest:
            rest = rest[self._file.write(rest) :]

    def keep(self) -> None:
        """Replaces what stood there, once this is on the disk. Raises: OSError."""
        os.fchmod(self._file.fileno(), 0o644)
        os.fsync(self._file.fileno())
        self._file.close()
        self._fresh.replace(self._target)
        folder = os.open(self._target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def drop(self) -> None:
        """Removes what has come of it. May be called after `keep`, too, and then does nothing."""
        self._file.close()
        self._fresh.unlink(missing_ok=True)
