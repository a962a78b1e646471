"""The lock on a result folder: one writer at a time.

Owns `run.lock`. The kernel releases the lock when the process ends; the file stays and means
nothing without the lock. A foreign file of that name, or a link, is not changed.
"""

import errno
import fcntl
import os
import re
import stat
import time
from pathlib import Path
from typing import Final

from dlion_api.errors import Problem, SpecError, UnavailableError
from dlion_results.run_folder.layout import (
    COMMAND,
    COMMAND_LOG,
    COMPARISON_MARKER,
    LOCK,
    MODEL_AND_DATA,
)
from dlion_results.run_folder.storage import storage_error, writing

RESERVED: Final = frozenset({LOCK, COMPARISON_MARKER, COMMAND, COMMAND_LOG, MODEL_AND_DATA})
"""Files and folders that may be in the folder of a new run."""

_HOLDER: Final = re.compile(rb"(?:[0-9]{1,19}\n?|\0{1,20})?")
"""Also matches what a power failure may leave."""
_MAX_LOCK_BYTES: Final = 20
_ATTEMPTS: Final = 5
_ATTEMPT_INTERVAL_S: Final = 0.01
_NO_FILE: Final = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO})
"""Errors for opening a link, a folder or a socket for writing."""


class FolderLock:
    """Exclusive write access to a result folder, from construction to `release`."""

    def __init__(self, folder: Path) -> None:
        """Take the lock; wait at most some hundredths of a second.

        Raises: UnavailableError while another run holds it; SpecError if the file is not a lock,
        which is left unchanged; StorageError if it cannot be written.
        """
        path = folder / LOCK
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._descriptor = os.open(path, flags, 0o644)
        except OSError as error:
            if error.errno in _NO_FILE:
                raise _foreign(path) from error
            raise storage_error("cannot lock the result folder", path, error) from error
        try:
            with writing("cannot lock the result folder", path):
                self._take(folder)
        except BaseException:
            self.release()
            raise

    def _take(self, folder: Path) -> None:
        holder = _holder(self._descriptor)
        if holder is None:
            raise _foreign(folder / LOCK)
        try:
            _lock(self._descriptor)
        except BlockingIOError as error:
            raise UnavailableError(
                f"{folder}: a run still uses this folder (process {holder or 'unknown'}); two runs"
                " would overwrite each other's results. Wait for its end, stop it with Ctrl-C, or"
                " choose another folder with --out"
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, b"%d\n" % os.getpid(), 0)

    def release(self) -> None:
        """Release the lock. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_held(folder: Path) -> bool:
    """Whether a run uses the folder now. A missing, foreign or unreadable lock is not held."""
    try:
        return lock_holder(folder) is not None
    except OSError:  # also a file system without locks
        return False


def lock_holder(folder: Path) -> int | None:
    """The process that uses the folder; None if there is none, 0 if it is unknown.

    Raises: OSError if the lock cannot be read.
    """
    try:
        descriptor = os.open(
            folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        )
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}:
            return None
        raise
    try:
        if _holder(descriptor) is None:
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return int(_holder(descriptor) or 0)
    finally:
        os.close(descriptor)  # releases a shared lock at once
    return None


def _lock(descriptor: int) -> None:
    """Take the exclusive lock. Raises: BlockingIOError while another process holds it.

    Tries again for a moment, because `lock_holder` takes a shared lock to look.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_ATTEMPT_INTERVAL_S)
        else:
            return
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_lock(path: Path) -> bool:
    """Whether the file is a lock, held or not, or does not exist."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        return error.errno in {errno.ENOENT, errno.ENOTDIR}
    try:
        return _holder(descriptor) is not None
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str | None:
    """Process id of the last holder; empty if unknown, None if the file is not a lock."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_LOCK_BYTES:
        return None
    content = os.pread(descriptor, _MAX_LOCK_BYTES + 1, 0)
    return content.decode().strip("\0\n") if _HOLDER.fullmatch(content) else None


def _foreign(path: Path) -> SpecError:
    problem = Problem(
        str(path),
        "is not the lock of a run, and is not changed",
        allowed="no such file, or one that a run has written",
        advice="Move it away, or choose another folder with --out",
    )
    return SpecError([problem])
