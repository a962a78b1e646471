"""One writer per result folder: the lock that a run holds on it.

Owns `run.lock`. Called by `folder`. The kernel releases the lock with the process that holds it,
however that ends: the file itself stays, and means nothing without the lock. A file of that name
that is none of ours, or a link, is left as it is.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from typing import TYPE_CHECKING, Final

from dlion_api.errors import Problem, SpecError, UnavailableError
from dlion_worker.results.storage import storage_error

if TYPE_CHECKING:
    from pathlib import Path

LOCK = "run.lock"
BEGUN = "comparing.json"
"""By this `dlion compare` knows a folder for its own before its run starts there."""

_HOLDER: Final = re.compile(rb"(?:[0-9]{1,19}\n?|\0{1,20})?")
"""Also what may be left of it where the machine lost its power."""
_LONGEST_BYTES: Final = 20
_NO_FILE: Final = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO})
"""What the system says of a link, a folder and a socket that are opened to be written."""


class FolderLock:
    """The right to write in a result folder, from construction to `release`."""

    def __init__(self, folder: Path) -> None:
        """Takes the lock at once, without waiting.

        Raises: UnavailableError while another run holds it; SpecError where the file is not a
            lock's, which is left as it is; StorageError when the file cannot be written.
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
            self._take(folder)
        except OSError as error:
            self.release()
            raise storage_error("cannot lock the result folder", path, error) from error
        except BaseException:
            self.release()
            raise

    def _take(self, folder: Path) -> None:
        holder = _holder(self._descriptor)
        if holder is None:
            raise _foreign(folder / LOCK)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UnavailableError(
                f"{folder}: a run still goes on in this folder (process {holder or 'unknown'}), and"
                " two would spoil each other's results. Wait for its end or stop it by Ctrl-C, or"
                " choose another folder with --out"
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, b"%d\n" % os.getpid(), 0)

    def release(self) -> None:
        """Lets the next run in. May be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_lock(path: Path) -> bool:
    """Whether the file there is a lock's, held or not, or there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        return error.errno in {errno.ENOENT, errno.ENOTDIR}
    try:
        return _holder(descriptor) is not None
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str | None:
    """Who holds, or held, the lock; empty where nobody has said so. None: it is not a lock's."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size > _LONGEST_BYTES:
        return None
    content = os.pread(descriptor, _LONGEST_BYTES + 1, 0)
    return content.decode().strip("\0\n") if _HOLDER.fullmatch(content) else None


def _foreign(path: Path) -> SpecError:
    problem = Problem(
        str(path),
        "is not the lock of a run, and is left as it is",
        allowed="none, or a file that a run has written",
        advice="Move it away, or choose another folder with --out",
    )
    return SpecError([problem])
