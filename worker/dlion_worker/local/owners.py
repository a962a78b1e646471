"""Whose a namespace or control group is, told by its name, so that leftovers can be removed.

Used by `local.namespaces` and `local.quotas`. A process is known by its id *and* its start time:
ids are used again.
"""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_NAME = re.compile(r"dlion-(?P<pid>[0-9]+)-(?P<start>[0-9]+)-[0-9]+(-.*)?")
_counter = itertools.count()


@dataclass(frozen=True)
class Owner:
    """The process that made something and will take it away again."""

    pid: int
    start_ticks: int
    """Start of the process in clock ticks since the machine started."""

    @classmethod
    def of_this_process(cls) -> Self:
        """This process."""
        return cls(os.getpid(), _start_ticks(os.getpid()) or 0)

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """The owner that a name tells, None for a name that is not ours.

        >>> Owner.parse("dlion-12-345-0-hub")
        Owner(pid=12, start_ticks=345)
        >>> Owner.parse("cni-12-345")
        """
        found = _NAME.fullmatch(name)
        return None if found is None else cls(int(found["pid"]), int(found["start"]))

    def next_prefix(self) -> str:
        """A prefix for the names of one run, unlike any other of this process."""
        return f"dlion-{self.pid}-{self.start_ticks}-{next(_counter)}"

    def alive(self) -> bool:
        """Whether that very process still runs."""
        return _start_ticks(self.pid) == self.start_ticks


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])  # field 22 counted from 1, after the name
