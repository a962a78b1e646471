"""Bounds the logs of a local run's workers, as a program may print without end.

In a pod, `dlion_worker.rotated_log` does this. Here the processes themselves append to the file, so
that it is cut in place.
"""

import os
from pathlib import Path

MAX_LOG_BYTES = 16 * 1024 * 1024
"""A larger log is cut."""
KEPT_BYTES = MAX_LOG_BYTES // 2
NOTE = b"(earlier lines were dropped: the log is too long)\n"


def cut_log(path: Path, *, max_bytes: int = MAX_LOG_BYTES, kept_bytes: int = KEPT_BYTES) -> int:
    """Drop the beginning of a log that is too large; return how many bytes shorter it is.

    Its last whole lines stay. Writers must open it to append. What they write in the microseconds
    before the end of the file moves is lost. Raises: OSError.
    """
    log = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        end = os.fstat(log).st_size
        if end <= max_bytes:
            return 0
        rest = os.pread(log, kept_bytes, end - kept_bytes)
        _, _, lines = rest.partition(b"\n")
        length = os.pwrite(log, NOTE + (lines or rest), 0)
        while added := os.pread(log, kept_bytes, end):  # meanwhile
            end += len(added)
            length += os.pwrite(log, added, length)
        os.ftruncate(log, length)
        return end - length
    finally:
        os.close(log)
