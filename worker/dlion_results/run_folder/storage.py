"""Writes files so that a full disk or a kill leaves nothing half-written.

Two ways: whole files that replace the old one atomically, and files that grow by complete lines.
"""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dlion_api.atomic_file import write_atomically
from dlion_api.errors import DLionError
from dlion_api.exit_codes import ExitCode

PROGRAM_ROOT = "state/program_root"
"""File of a result folder: the folder of the manifest that the run was started with."""


class StorageError(DLionError, OSError):
    """A disk is full or a folder is not writable; processes end with `ExitCode.STORAGE`."""

    exit_code = ExitCode.STORAGE


def storage_error(action: str, path: Path, error: OSError) -> StorageError:
    """The StorageError for `error`, with advice."""
    return StorageError(
        error.errno or errno.EIO,  # HDF5 gives none
        f"{action}: {error.strerror or error}. Free some space or make the folder writable, "
        "or choose another folder with --out",
        str(path),
    )


@contextmanager
def writing(action: str, path: Path) -> Iterator[None]:
    """Convert an OSError inside to a StorageError that names `path`.

    Errors of other writers, such as Keras, do not name the file when the disk is full.
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(action, path, error) from error


def check_writable(path: Path) -> None:
    """Check that the file `path` can be created or replaced. Raises StorageError."""
    with writing(f"cannot write {path.name}", path), tempfile.NamedTemporaryFile(dir=path.parent):
        pass


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` atomically; on failure the old file stays. Raises StorageError."""
    with writing(f"cannot write {path.name}", path):
        write_atomically(path, content, mode=0o644)


class AppendedFile:
    """A file that grows by whole chunks, each passed to the operating system by `append`.

    A chunk that does not fit on the disk is removed, so that the file stays readable and can grow
    later. `drop_partial_line` repairs a file after its writer was killed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(f"cannot open {path.name}", path):
            self._stream = path.open("ab", buffering=0)
        self._length = self._stream.tell()

    def append(self, chunk: bytes) -> None:
        """Append the whole chunk or nothing. Raises StorageError."""
        rest = memoryview(chunk)
        try:
            while rest:
                rest = rest[self._stream.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._stream.truncate(self._length)
            raise storage_error(f"cannot add to {self._path.name}", self._path, error) from error
        self._length += len(chunk)

    @property
    def is_empty(self) -> bool:
        return self._length == 0

    def is_in_place(self) -> bool:
        """Whether the path still refers to this file."""
        try:
            return os.path.samestat(os.fstat(self._stream.fileno()), self._path.stat())
        except OSError:
            return False

    def close(self) -> None:
        """Close the file; all appended data is already in it."""
        self._stream.close()


def drop_partial_line(path: Path, *, longest_line_bytes: int) -> None:
    """Remove a last line without newline, left by a killed writer. Raises StorageError."""
    with writing(f"cannot repair {path.name}", path), path.open("r+b") as stream:
        length = stream.seek(0, os.SEEK_END)
        start = max(0, length - longest_line_bytes)
        stream.seek(start)
        tail = stream.read()
        if tail and not tail.endswith(b"\n"):
            stream.truncate(start + tail.rfind(b"\n") + 1)


def stored_program_root(folder: Path) -> Path | None:
    """The folder of the manifest that a run was started with; None if `folder` is not a run's."""
    try:
        return Path(os.fsdecode((folder / PROGRAM_ROOT).read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return None
