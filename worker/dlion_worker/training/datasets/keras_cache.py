"""One process at a time in Keras' cache of data sets.

Keras downloads and unpacks in place: of a run's processes, which all start together, each would
find the cache empty and write the same files. Called by `named`.
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
    """The file that is locked: in Keras' folder, or in /tmp where that cannot be written.

    Not in TMPDIR: each run has one of its own.
    """
    home = Path(os.environ.get("KERAS_HOME") or "~/.keras").expanduser()
    if os.access(home, os.W_OK):
        return home / "dlion.lock"
    return Path("/tmp") / f"dlion-keras-{os.geteuid()}.lock"  # noqa: S108 - links not followed


@contextmanager
def alone() -> Iterator[None]:
    """Inside, no other process of this user reads or fills the cache; waits for its turn.

    The lock goes with its process, also where that is killed. Where there is none to be had (a
    file system that is read-only, or has no locks) the caller goes on without.
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
