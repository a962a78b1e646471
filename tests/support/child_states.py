"""States of processes that are not children of the tests' process."""

from __future__ import annotations

from pathlib import Path


def alive(pid: int) -> bool:
    """Report whether that process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
