"""Keeps two runs on one machine from choosing the same subnet."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dlion_api.errors import UnavailableError

LOCK_FILE: Final = Path("/run/dlion-subnets.lock")
"""It stays behind, empty. A user who can open a file can lock it, so only root can open this."""
TIMEOUT_S: Final = 30.0
"""A run of 250 workers creates its links in a few seconds."""
_POLL_S = 0.05


@contextmanager
def subnet_lock(path: Path = LOCK_FILE, timeout_s: float = TIMEOUT_S) -> Iterator[None]:
    """Hold the lock from the choice of a subnet until its route exists.

    Raises UnavailableError, with what to do, if another process holds it for that long, or the file
    cannot be opened.
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise UnavailableError(
            f"cannot open {path}: {error.strerror}. Remove it if it is a link or a folder, and "
            f"make {path.parent} writable for root"
        ) from error
    try:
        deadline_s = time.monotonic() + timeout_s
        while not _acquired(descriptor):
            if time.monotonic() > deadline_s:
                raise UnavailableError(
                    f"another process has held {path} for {timeout_s:g} s: a run that creates its "
                    f"network, or one that hangs. `fuser -v {path}` names it. Wait until it has "
                    "ended, or end it"
                )
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _acquired(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
