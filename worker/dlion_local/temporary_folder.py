"""Temporary folders that outlive only a killed process, and then only until the next run.

Their owner holds a lock in them, which the kernel releases when it ends. So a folder without its
owner is known whatever process ids there are, also among containers that share one folder.
"""

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

PREFIX: Final = "dlion-"
OWNER: Final = "owner.lock"
"""Only temporary folders have it. A result folder may have such a name, and is never removed."""


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new folder, removed at the end with its content. Raises: OSError."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with (folder / "owner").open("x") as lock:
            with suppress(OSError):  # a file system without locks: the folder is never abandoned
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (folder / "owner").rename(folder / OWNER)  # only now: the file always has its lock
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned_folders() -> list[Path]:
    """Remove the temporary folders of this user whose owners have ended. Return them."""
    folders = sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
    return [folder for folder in folders if _remove_if_abandoned(folder)]


def _remove_if_abandoned(folder: Path) -> bool:
    try:
        is_own = folder.lstat().st_uid == os.geteuid() and not folder.is_symlink()
        descriptor = os.open(folder / OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # no folder, or not one of DLion's
        return False
    try:
        status = os.fstat(descriptor)
        if not is_own or not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        log.warning("removing temporary files of a run that was killed: %s", folder)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # its owner holds the lock
        return False
    finally:
        os.close(descriptor)
    return True
