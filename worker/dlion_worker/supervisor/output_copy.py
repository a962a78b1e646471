"""Copies the output of this process and its children to a file, beside its usual way.

A thread reads a pipe that replaces standard output and error. So a container's log and the file
have the same lines in the same order.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from dlion_worker.rotated_log import RotatedLog

_BLOCK_BYTES = 64 * 1024
END_S = 2.0
"""How long to wait at the end for the reader of a container's log."""


@contextlib.contextmanager
def copied_output(path: Path | None) -> Iterator[None]:
    """Within it, append standard output and error of this process to the log at `path`, too.

    None: change nothing.
    """
    if path is None:
        yield
        return
    readable, writable = os.pipe2(os.O_CLOEXEC)
    before = [os.dup(number) for number in (1, 2)]
    copying = threading.Thread(
        target=_copy, args=(readable, os.dup(before[0]), RotatedLog(path)), daemon=True,
        name="output copy",
    )  # fmt: skip
    copying.start()
    for number in (1, 2):
        os.dup2(writable, number)
    os.close(writable)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in zip((1, 2), before, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        # The pipe ends with the last process that writes to it. One that was adopted and cannot be
        # killed must not hold this one up.
        copying.join(END_S)


def _copy(readable: int, output: int, log: RotatedLog) -> None:
    while block := os.read(readable, _BLOCK_BYTES):
        log.append(block)
        _write(output, block)
    log.close()
    os.close(readable)
    os.close(output)


def _write(output: int, block: bytes) -> None:
    """Write it, or drop it where nothing reads: the child must never wait for that."""
    rest = memoryview(block)
    with contextlib.suppress(OSError):
        while rest:
            rest = rest[os.write(output, rest) :]
