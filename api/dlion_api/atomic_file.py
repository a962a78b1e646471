"""Replace a file atomically.

For small state on disk (worker configuration, membership, counters); not for logs.
"""

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Replace `path` so that a reader, also after a crash, finds the old or the new content.

    Syncs the content before the rename, and the folder before it returns.

    Raises:
        OSError: The disk is full, or the folder is missing or not writable. The old file stays.
    """
    # A part of the name: the whole with its random end may be longer than file systems allow.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:48]}.")
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
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
