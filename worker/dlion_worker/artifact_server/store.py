"""Stores files on the keeper's disk atomically: written beside the target, then renamed.

`service` has checked the path. Knows no callers and no network.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

RESERVE_BYTES = 16 * 2**20
"""Space reserved for the records and the summary."""

_PARTIAL_PREFIX = ".arriving-"


class ArtifactStore:
    """The files below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._creating = threading.Lock()
        self._partial: dict[Path, PartialFile] = {}
        """The last upload of each path, while it lasts."""

    def remove_partial(self) -> int:
        """Remove files that an earlier keeper did not receive completely; return how many."""
        folders = ("state/*", "models/*", "logs")
        found = (self._folder.glob(f"{each}/{_PARTIAL_PREFIX}*") for each in folders)
        partial = list(itertools.chain.from_iterable(found))
        for path in partial:
            path.unlink(missing_ok=True)
        return len(partial)

    def create(self, path: str, total_bytes: int) -> PartialFile:
        """Create a file that will replace `path`. Raises: OSError, also if it does not fit beside
        what is still to arrive of other paths: an earlier upload of this one is given up."""
        target = self._folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with self._creating:
            # Before the free space is read: what arrives meanwhile must not count as free.
            awaited = {path: each.missing_bytes for path, each in self._partial.items()}
            awaited_bytes = sum(awaited.values()) - awaited.get(target, 0)
            free_bytes = max(0, shutil.disk_usage(target.parent).free - awaited_bytes)
            if total_bytes + RESERVE_BYTES > free_bytes:
                raise OSError(
                    errno.ENOSPC,
                    f"{total_bytes} bytes do not fit, {free_bytes} are free; enlarge the claim",
                )
            if earlier := self._partial.get(target):
                earlier.supersede()
            file = PartialFile(target, total_bytes)
            going_on = {path: self._partial[path] for path, count in awaited.items() if count}
            self._partial = {**going_on, target: file}
        return file

    def remove(self, path: str) -> None:
        """Remove the file at that path, if there is one. Raises: OSError."""
        (self._folder / path).unlink(missing_ok=True)

    def open(self, path: str) -> BinaryIO:
        """Open the file at that path. Raises: FileNotFoundError, OSError."""
        return (self._folder / path).open("rb")


class PartialFile:
    """A file being received: `commit` moves it to its path, `discard` removes it otherwise."""

    def __init__(self, target: Path, total_bytes: int) -> None:
        self._target = target
        self._awaited_bytes = total_bytes
        self._is_superseded = False
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=_PARTIAL_PREFIX)
        self._temporary = Path(name)
        self._file = os.fdopen(descriptor, "wb", buffering=0)

    @property
    def missing_bytes(self) -> int:
        """How many bytes are still to arrive; from any thread."""
        return 0 if self._file.closed else max(0, self._awaited_bytes)

    def supersede(self) -> None:
        """Refuse all that still arrives: another upload has its space. From any thread."""
        self._is_superseded = True

    def write(self, payload: bytes) -> None:
        """Append. Raises: OSError."""
        self._check_current()
        rest = memoryview(payload)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._awaited_bytes -= len(payload)

    def rewrite(self, change: Callable[[bytes], bytes]) -> None:
        """Replace the content, a small one. Raises: OSError, and what `change` raises."""
        content = change(self._temporary.read_bytes())
        self._file.seek(0)
        self._file.truncate()
        self.write(content)

    def commit(self) -> None:
        """Sync to disk and replace the target. Raises: OSError."""
        self._check_current()
        os.fchmod(self._file.fileno(), 0o644)
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.replace(self._target)
        folder = os.open(self._target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def discard(self) -> None:
        """Remove the partial file; does nothing after `commit`."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _check_current(self) -> None:
        if self._is_superseded:
            raise OSError(errno.ECANCELED, "another upload of this file has begun")
