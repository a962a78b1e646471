"""Identifies the owner of a namespace or control group by its name, to remove leftovers.

A process is identified by its id *and* its start time, because ids are reused.
"""

import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_NAME = re.compile(r"dlion-(?P<pid>[0-9]+)-(?P<start>[0-9]+)-[0-9]+(-.*)?")
_counter = itertools.count()


@dataclass(frozen=True)
class ResourceOwner:
    """The process that created a resource and will remove it."""

    pid: int
    start_ticks: int
    """Start of the process in clock ticks since boot."""

    @classmethod
    def of_this_process(cls) -> Self:
        return cls(os.getpid(), start_ticks(os.getpid()) or 0)

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """The owner in a resource's name; None if DLion did not give the name.

        >>> ResourceOwner.parse("dlion-12-345-0-hub")
        ResourceOwner(pid=12, start_ticks=345)
        >>> ResourceOwner.parse("cni-12-345")
        """
        match = _NAME.fullmatch(name)
        return None if match is None else cls(int(match["pid"]), int(match["start"]))

    def next_prefix(self) -> str:
        """A prefix for the names of one run, unique in this process."""
        return f"dlion-{self.pid}-{self.start_ticks}-{next(_counter)}"

    def alive(self) -> bool:
        return start_ticks(self.pid) == self.start_ticks


def start_ticks(pid: int) -> int | None:
    """The start of a process; None if it has ended, whether or not its parent knows."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])  # field 22 counted from 1, after the name
