"""Bounds the logs of a local run's workers, as a program may print without end.

In a pod, `dlion_worker.rotated_log` does this. Here the processes themselves append to the file, so
that it is cut in place.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MAX_LOG_BYTES: Final = 16 * 1024 * 1024
"""A larger log is cut."""
KEPT_BYTES: Final = MAX_LOG_BYTES // 2
_NOTE: Final = re.compile(rb"\((\d{1,19}) earlier bytes were dropped: the log is too long\)\n")
_MAX_NOTE_BYTES: Final = 80


@dataclass(frozen=True)
class LogBeginning:
    """What a log has lost at its beginning, by the note in its first line."""

    dropped_bytes: int = 0
    """Bytes of the output that all cuts together have dropped."""
    note_bytes: int = 0
    """Length of the note; 0: nothing was dropped."""

    def place_of(self, position: int) -> int:
        """The place in the whole output of this position in the file."""
        return self.dropped_bytes + max(0, position - self.note_bytes)

    def position_of(self, place: int) -> int:
        """The position in the file of this place; 0, where the note is, if it was dropped."""
        kept = place - self.dropped_bytes
        return self.note_bytes + kept if kept >= 0 else 0


def read_beginning(log: int) -> LogBeginning:
    """The beginning of the log with that descriptor. Raises: OSError."""
    note = _NOTE.match(os.pread(log, _MAX_NOTE_BYTES, 0))
    return LogBeginning() if note is None else LogBeginning(int(note[1]), note.end())


@contextlib.contextmanager
def uncut(log: int) -> Iterator[None]:
    """Within it, the log is not cut: its note and its lines belong together. Keep it short."""
    # Not every file system has locks; a reader may then repeat lines of the moment of a cut.
    with contextlib.suppress(OSError):
        fcntl.flock(log, fcntl.LOCK_SH)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(log, fcntl.LOCK_UN)


def cut_log(path: Path, *, max_bytes: int = MAX_LOG_BYTES, kept_bytes: int = KEPT_BYTES) -> int:
    """Drop the beginning of a log that is too large; return how many bytes shorter it is.

    Its last whole lines stay, after a note with what was dropped. Writers must open it to append.
    What they write in the microseconds before the end of the file moves is lost. While a process
    reads it (`uncut`), it stays as it is. Raises: OSError.
    """
    log = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        end = os.fstat(log).st_size
        if end <= max_bytes:
            return 0
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0
        beginning = read_beginning(log)
        rest = os.pread(log, kept_bytes, end - kept_bytes)
        _, _, lines = rest.partition(b"\n")
        kept = lines or rest
        dropped = beginning.place_of(end) - len(kept)
        note = b"(%d earlier bytes were dropped: the log is too long)\n" % dropped
        length = os.pwrite(log, note + kept, 0)
        while added := os.pread(log, kept_bytes, end):  # meanwhile
            end += len(added)
            length += os.pwrite(log, added, length)
        os.ftruncate(log, length)
        return end - length
    finally:
        os.close(log)  # which releases the lock
