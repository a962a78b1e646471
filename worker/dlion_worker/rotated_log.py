"""The end of a process's output, in two files of bounded size.

A pod's supervisor writes it and its sidecar reads it. Imports only the standard library.
"""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

MAX_LOG_BYTES = 256 * 1024
"""Maximum size of each of the two files, and of what `read_end` returns."""
_EARLIER_SUFFIX = ".1"
_ATTEMPTS = 5
"""Attempts to read both files between two rotations."""


class RotatedLog:
    """Appends output to a file; a full file replaces the one before. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def append(self, output: bytes) -> None:
        """Append as much as the disk takes. A failure loses this output, and no later one."""
        output = output[-MAX_LOG_BYTES:]
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("ab", buffering=0)
            if self._file.tell() + len(output) > MAX_LOG_BYTES:
                self._file.close()
                self._path.replace(_earlier(self._path))
                self._file = self._path.open("ab", buffering=0)
            self._file.write(output)
        except OSError:  # a full disk must not stop the process whose output this is
            self.close()

    def close(self) -> None:
        """Close the file; `append` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_end(path: Path) -> bytes:
    """Read the end of the output at that path, whole lines; empty without any.

    Another process may append meanwhile. Raises: OSError.
    """
    newest = b""
    for _ in range(_ATTEMPTS):
        with suppress(FileNotFoundError), _open(path) as file:
            earlier = read_bounded(_earlier(path))
            newest = file.read(2 * MAX_LOG_BYTES)
            # Else the files were rotated meanwhile, and the earlier one may be a later one by now.
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return last_lines(earlier + newest)
    return last_lines(newest or read_bounded(_earlier(path)))


def read_bounded(path: Path) -> bytes:
    """Read the beginning of a file, more than any log has; empty without one. Raises: OSError."""
    with suppress(FileNotFoundError), _open(path) as file:
        return file.read(2 * MAX_LOG_BYTES)
    return b""


def _open(path: Path) -> BinaryIO:
    """Open a regular file. The trainer's program may write to the folder: a link would show it
    files of the process that reads, and a pipe would block that process."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(number, "rb")


def last_lines(output: bytes) -> bytes:
    """Cut the beginning off, so that whole lines of at most `MAX_LOG_BYTES` are left.

    Of a longer line its end is left.
    """
    if len(output) <= MAX_LOG_BYTES:
        return output
    end = output[-MAX_LOG_BYTES:]
    is_at_line = output[-MAX_LOG_BYTES - 1 : -MAX_LOG_BYTES] == b"\n"
    _, newline, rest = end.partition(b"\n")
    return end if is_at_line or not newline or not rest else rest


def _earlier(path: Path) -> Path:
    return path.with_name(path.name + _EARLIER_SUFFIX)
