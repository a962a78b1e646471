"""A process without the rights of root, as tests of unreadable files need it."""

import contextlib
import os
from collections.abc import Iterator

_OTHER_USER = 65534


@contextlib.contextmanager
def without_rights() -> Iterator[None]:
    """Run the block as another user if this one is root, who may read everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(_OTHER_USER)
    try:
        yield
    finally:
        os.seteuid(user)
