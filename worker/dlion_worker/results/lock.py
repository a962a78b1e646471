"""One writer per result folder: the lock that a run holds on it.

Owns `run.lock`. Called by `folder`. The kernel releases the lock with the process that holds it,
however that ends: the file itself stays, and means nothing without the lock.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

from dlion_api.errors import UnavailableError
from dlion_worker.results.storage import storage_error

if TYPE_CHECKING:
    from pathlib import Path

LOCK = "run.lock"
BEGUN = "comparing.json"
"""By this `dlion compare` knows a folder for its own before its run starts there."""


class FolderLock:
    """The right to write in a result folder, from construction to `release`."""

    def __init__(self, folder: Path) -> None:
        """Takes the lock at once, without waiting.

        Raises: UnavailableError while another run holds it; StorageError when the file cannot be
            written.
        """
        path = folder / LOCK
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise storage_error("cannot lock the result folder", path, error) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, b"%d\n" % os.getpid(), 0)
        except BlockingIOError as error:
            holder = os.pread(self._descriptor, 20, 0).decode("ascii", "replace").strip()
            self.release()
            raise UnavailableError(
                f"{folder}: a run still goes on in this folder (process {holder or 'unknown'}), and"
                " two would spoil each other's results. Wait for its end or stop it by Ctrl-C, or"
                " choose another folder with --out"
            ) from error
        except OSError as error:
            self.release()
            raise storage_error("cannot lock the result folder", path, error) from error

    def release(self) -> None:
        """Lets the next run in. May be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
