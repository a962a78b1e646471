"""A slow disk for some processes: a control group limits their writes to it."""

from __future__ import annotations

import os
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from testbed.groups import remove_all

if TYPE_CHECKING:
    from collections.abc import Iterator

_CONTROLLER = Path("/sys/fs/cgroup/blkio")


@contextmanager
def throttled_disk(folder: Path, bytes_per_s: int) -> Iterator[list[str]]:
    """A command prefix that limits the write rate to the disk of that folder.

    Skips if it is not possible: control groups of version 2, no root, a file system without a disk.
    """
    device = folder.stat().st_dev
    group = _CONTROLLER / f"dlion-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group for disks: {error}")
    try:
        rule = f"{os.major(device)}:{os.minor(device)} {bytes_per_s}"
        try:
            (group / "blkio.throttle.write_bps_device").write_text(rule)
        except OSError as error:
            pytest.skip(f"the disk of {folder} cannot be slowed: {error}")
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
    finally:
        remove_all([group])  # an ended process may stay in it for a moment
