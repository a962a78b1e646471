"""Prints the logs of a run on this machine, from the folder `logs` of its result folder.

Called by `dlion logs`. Each process has one file, which grows over its restarts. The lines have no
times, so that the files are printed one after the other; followed ones as their lines arrive.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dlion_api.errors import DataError, UnavailableError
from dlion_api.names import Rank
from dlion_cli.inputs.named_folder import require_folder
from dlion_cli.pod_streams.log_lines import LogLine, LogPrinter, LogSource
from dlion_cli.terminal.formatting import printable
from dlion_local.runner.log_limit import LogBeginning, read_beginning, uncut
from dlion_results.run_folder.description import find_worker
from dlion_results.run_folder.layout import EVENTS, LOGS
from dlion_results.run_folder.lock import is_held
from dlion_results.run_folder.manifest import read_job
from dlion_results.run_folder.regular_files import opened

if TYPE_CHECKING:
    from dlion_api.spec import Job

_POLL_INTERVAL_S: Final = 0.3
_BLOCK_BYTES: Final = 64 * 1024
_MAX_LINE_BYTES: Final = 1024 * 1024
"""A longer line is printed in parts."""
_PROCESSES: Final = {"trainer": "worker", "sidecar": "sidecar"}
"""Names of the files by container: a trainer writes to that of its supervisor."""


@dataclass(frozen=True)
class WorkerLogs:
    """The log files of a run's workers, as options select them."""

    folder: Path
    container: str
    group: str | None
    index: int | None
    without: frozenset[str] = frozenset()
    """Workers that are left out, as `group-index`."""

    def __post_init__(self) -> None:
        """Raises: DataError if the folder is not that of a run on this machine."""
        require_folder(self.folder)
        if not (self.folder / LOGS).is_dir():
            is_result = (self.folder / EVENTS).exists()
            why = "it was simulated, or fetched from a keeper without logs" if is_result else (
                "it is not a result folder of `dlion run`"
            )  # fmt: skip
            raise DataError(f"{self.folder}: has no logs: {why}. `dlion ls` lists result folders")

    def files(self) -> dict[Path, LogSource]:
        """The selected files that exist now, by rank."""
        pattern = re.compile(rf"{_PROCESSES[self.container]}-([0-9]{{1,9}})\.log")
        found = {}
        with contextlib.suppress(OSError):
            for name in os.listdir(self.folder / LOGS):  # noqa: PTH208 - one call, no objects
                if match := pattern.fullmatch(name):
                    found[Rank(int(match[1]))] = self.folder / LOGS / name
        labels = {rank: label for rank in found if (label := self._label(rank)) is not None}
        return {
            found[rank]: LogSource(found[rank].name, self.container, printable(labels[rank]))
            for rank in sorted(labels)
        }

    def require(self) -> dict[Path, LogSource]:
        """The selected files. Raises: UnavailableError if there are none."""
        if files := self.files():
            return files
        which = "" if self.group is None else f" of group {self.group}"
        which += "" if self.index is None else f" with index {self.index}"
        raise UnavailableError(
            f"{self.folder}: no worker{which} has a log of its {self.container}. "
            f"`dlion report {shlex.quote(str(self.folder))}` names the workers"
        )

    def lines_of(self, rank: Rank) -> list[str]:
        """All lines of that worker, if it is selected and has a log."""
        name = f"{_PROCESSES[self.container]}-{rank}.log"
        chosen = (path for path in self.files() if path.name == name)
        return [line for path in chosen for line in GrowingFile(path, None).lines(is_last=True)]

    @functools.cached_property
    def _job(self) -> Job | None:
        try:
            return read_job(self.folder)
        except DataError:
            return None

    def _label(self, rank: Rank) -> str | None:
        """The worker's name, or None if it is not selected."""
        worker = None if self._job is None else find_worker(self._job, rank)
        if worker is not None:
            selected = self.group in (None, worker.group) and self.index in (None, worker.index)
            selected &= f"{worker.group}-{worker.index}" not in self.without
            return worker.name if selected else None
        # Without a readable job the rank is all that is known.
        return f"worker {rank}" if self.group is None and self.index in (None, rank) else None


def print_logs(logs: WorkerLogs, printer: LogPrinter, *, tail: int | None, follow: bool) -> None:
    """Print the logs; with `follow`, also new lines until the run has ended.

    Raises: UnavailableError if there are none, and no run that may still write one.
    """
    if not (follow and is_held(logs.folder)):
        logs.require()
    readers: dict[Path, GrowingFile] = {}
    while True:
        is_alive = follow and is_held(logs.folder)  # before reading, so that no line is missed
        for path, source in logs.files().items():
            reader = readers.setdefault(path, GrowingFile(path, tail))
            for line in reader.lines(is_last=not is_alive):
                printer.show(source, LogLine("", line))
        if not is_alive:
            return
        time.sleep(_POLL_INTERVAL_S)


class GrowingFile:
    """The lines of a log that grows and may be cut: each once, from its last `tail` ones on."""

    def __init__(self, path: Path, tail: int | None) -> None:
        self._path = path
        self._tail = tail
        self._position = 0
        self._beginning = LogBeginning()
        self._rest = b""

    def lines(self, *, is_last: bool) -> Iterator[str]:
        """The lines since the last call, also if the file was cut meanwhile; with `is_last` also
        one without its end."""
        with contextlib.suppress(OSError), opened(self._path) as descriptor:
            while blocks := self._next(descriptor):
                *whole, self._rest = b"".join((self._rest, *blocks)).split(b"\n")
                yield from map(_text, whole)
                if len(self._rest) > _MAX_LINE_BYTES:
                    yield _text(self._rest)
                    self._rest = b""
        if is_last and self._rest:
            yield _text(self._rest)
            self._rest = b""

    def _next(self, descriptor: int) -> list[bytes]:
        """What comes next, with a line end before it where lines are missing; empty: nothing."""
        before, after = self._beginning, b""
        with uncut(descriptor):
            now, size = read_beginning(descriptor), os.fstat(descriptor).st_size
            if self._tail is not None:
                self._position = _tail_position(descriptor, size, self._tail)
                self._tail = None
            elif now.dropped_bytes > before.dropped_bytes:
                place = before.place_of(self._position)
                self._position = now.position_of(place)
                after = b"\n" if self._rest and place < now.dropped_bytes else b""
            elif now != before or size < self._position:  # replaced by another
                self._position, self._rest = 0, b""
            self._beginning = now
            block = os.pread(descriptor, _BLOCK_BYTES, self._position)
        self._position += len(block)
        return [each for each in (after, block) if each]


def _tail_position(descriptor: int, size: int, count: int) -> int:
    """Where the last `count` lines begin; read backwards, as logs may be large."""
    if count == 0:
        return size
    end = size - 1 if size and os.pread(descriptor, 1, size - 1) == b"\n" else size
    position = end
    while position > 0:
        start = max(0, position - _BLOCK_BYTES)
        block = os.pread(descriptor, position - start, start)
        newlines = block.count(b"\n")
        if newlines >= count:
            at = len(block)
            for _ in range(count):
                at = block.rindex(b"\n", 0, at)
            return start + at + 1
        count -= newlines
        position = start
    return 0


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r")
