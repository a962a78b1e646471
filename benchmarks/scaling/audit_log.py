"""Requests of the operator to the API server, with their times, from its audit log.

Times are the API server's, to the microsecond, and of no other clock.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, TextIO

from api_access import USER_AGENT

from dlion_api.cluster_names import MANAGER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


@dataclass(frozen=True)
class Asked:
    """One answered request."""

    by_operator: bool
    """Otherwise it is by the benchmark."""
    verb: str
    resource: str
    """The resource with its subresource, such as `dlionjobs/status`."""
    name: str
    received_s: float
    """Seconds since the epoch."""
    answered_s: float
    code: int
    dry_run: bool

    @property
    def writes(self) -> bool:
        """Report whether it stores something, such as an event; Leases, renewed while idle, do not
        count.
        """
        is_write = self.verb in ("create", "update", "patch", "delete") and not self.dry_run
        return is_write and self.resource != "leases"


@dataclass
class AuditLog:
    """The requests of operator and benchmark so far, as the log grows."""

    path: Path
    operators: tuple[str, ...] = (MANAGER,)
    """The user agents of the operator's processes begin with one of these."""
    asked: list[Asked] = field(default_factory=list)
    _file: TextIO | None = None
    _rest: str = ""

    def read(self) -> list[Asked]:
        """Return all requests so far. A rotated log is first read to its end."""
        self._read_file()
        if self._file is None or self._file.name != str(self.path):
            return self.asked
        if self.path.exists() and self.path.stat().st_ino != _inode(self._file):
            self.close()
            self._read_file()
        return self.asked

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read_file(self) -> None:
        if self._file is None and self.path.exists():
            self._file = self.path.open(encoding="utf-8")
        if self._file is not None:
            text = self._rest + self._file.read()
            *lines, self._rest = text.split("\n")
            self.asked.extend(_asked(lines, self.operators))


def _inode(file: TextIO) -> int:
    import os

    return os.fstat(file.fileno()).st_ino


def _asked(lines: Iterable[str], operators: tuple[str, ...]) -> Iterator[Asked]:
    chosen = [f'"userAgent":"{agent}' for agent in (*operators, USER_AGENT)]
    for line in lines:
        if not any(each in line for each in chosen):
            continue
        event = json.loads(line)
        if event.get("stage") != "ResponseComplete":
            continue
        about = event.get("objectRef") or {}
        parts = (about.get("resource", event["requestURI"]), about.get("subresource"))
        yield Asked(
            by_operator=event["userAgent"].startswith(operators),
            verb=event["verb"],
            resource="/".join(filter(None, parts)),
            name=about.get("name", ""),
            received_s=_seconds(event["requestReceivedTimestamp"]),
            answered_s=_seconds(event["stageTimestamp"]),
            code=event["responseStatus"]["code"],
            dry_run="dryRun=All" in event["requestURI"],
        )


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()


def by_kind(asked: Iterable[Asked]) -> dict[str, int]:
    """Return counts of the operator's requests by kind, the most frequent first."""
    counts = Counter(f"{each.verb} {each.resource}" for each in asked if each.by_operator)
    return dict(counts.most_common())


def lags_s(asked: Iterable[Asked], *, verb: str, resource: str = "dlionjobs") -> list[float]:
    """Return the lags of the operator's status writes after changes of jobs by the benchmark.

    They are seconds from each answer (`create` or `patch`) to the answer of the operator's next
    status write of that job. One without an answer is infinite.
    """
    open_since: dict[str, float] = {}
    found = []
    for each in sorted(asked, key=lambda it: it.answered_s):
        if each.code >= 300:
            continue
        if not each.by_operator and (each.verb, each.resource) == (verb, resource):
            open_since[each.name] = each.answered_s
        elif each.by_operator and (each.verb, each.resource) == ("patch", f"{resource}/status"):
            began_s = open_since.pop(each.name, None)
            if began_s is not None:
                found.append(each.answered_s - began_s)
    return [*found, *(float("inf") for _ in open_since)]
