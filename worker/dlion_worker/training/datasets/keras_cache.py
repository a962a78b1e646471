"""A lock on Keras' data set cache.

Keras downloads and unpacks in place. A run's processes start together; without the lock each would
find the cache empty and write the same files. Called by `named_datasets`.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOG = logging.getLogger(__name__)


def lock_path() -> Path:
    """The lock file: in Keras' folder, or in /tmp if that is not writable.

    Not in TMPDIR, because each run has its own.
    """
    home = Path(os.environ.get("KERAS_HOME") or "~/.keras").expanduser()
    if os.access(home, os.W_OK):
        return home / "dlion.lock"
    return Path("/tmp") / f"dlion-keras-{os.geteuid()}.lock"  # noqa: S108 - links not followed


@contextmanager
def cache_lock() -> Iterator[None]:
    """Hold the lock: no other process of this user uses the cache. Waits for it.

    The lock ends with its process, even if killed. If locking is not possible (a read-only file
    system, or one without locks), the caller continues without it.
    """
    file = _locked()
    try:
        yield
    finally:
        if file is not None:
            os.close(file)


def _locked() -> int | None:
    file = None
    try:
        file = os.open(lock_path(), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        _LOG.warning("Keras' cache is used without a lock: %s", error)
    return file
