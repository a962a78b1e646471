"""Files that are either the old or the new one, never half of each.

Called by whoever keeps small state on disk (worker configuration, membership, counters). Not for
logs, which grow by appending.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Replaces `path` whole: a reader, or a crash at any moment, sees old or new content.

    The content is on the disk before the name points to it, and the name before this returns.

    Raises:
        OSError: the disk is full, or the folder is missing or not writable; the old file stands.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
