"""Data that comes, changes and goes while a worker trains (`dataset.watch`).

Owns the thread that looks at the watched folder, and what it tells people. Files are listed, read
and decoded in that thread; a training step waits only while new samples are copied into the
stream. Called by `worker`. Which samples are this worker's, and how they are mixed in, belongs to
`training.datasets`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol

from dlion_api.errors import DataError
from dlion_api.reasons import EventReason
from dlion_worker.training.datasets import Change, ChangeKind

_LOG = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
REST_PER_WORK = 20
"""A look that takes long is followed by a rest of so many times that: large folders are looked at
less often, at no more than a twentieth of a core."""

MOST_NAMED = 5
"""Files that one event names; of more it says how many."""

CLOSE_WITHIN_S = 0.5

PENDING = EventReason.DATA_PENDING
UNAVAILABLE = EventReason.DATA_UNAVAILABLE


class Report(Protocol):
    """Where events go."""

    def __call__(self, reason: EventReason, message: str, *, warning: bool = False) -> None:
        """Takes one event."""


class Watch(Protocol):
    """A folder that can be looked at (`FolderWatch`)."""

    @property
    def samples(self) -> int:
        """This worker's samples now."""
        ...

    @property
    def waiting(self) -> Collection[str]:
        """Files that have been seen and are not taken in yet."""
        ...

    def poll(self, now_s: float) -> list[Change]:
        """Looks once; what has changed."""
        ...


class GrowingData:
    """One worker's watched folder; `start` begins to look, `close` ends it.

    `report` and `on_samples` (the number of this worker's samples has changed) are called in the
    thread that looks.
    """

    def __init__(self, watch: Watch, *, report: Report, on_samples: Callable[[], None]) -> None:
        self._watch = watch
        self._report = report
        self._on_samples = on_samples
        self._samples = watch.samples
        self._seen_waiting: frozenset[str] = frozenset()
        self._told_pending: frozenset[str] = frozenset()
        self._fault = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="growing-data", daemon=True)

    def start(self) -> None:
        """Looks from now on, about once a second."""
        self._thread.start()

    def close(self) -> None:
        """Looks no more; what is being read just now is left."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_WITHIN_S)

    def look(self, now_s: float) -> None:
        """Looks once, and says what has changed."""
        try:
            changes = self._watch.poll(now_s)
        except (DataError, OSError, MemoryError) as error:
            self._tell_fault(f"{type(error).__name__}: {error}")
            return
        self._fault = ""
        for reason, message, is_warning in news(changes):
            self._report(reason, message, warning=is_warning)
        self._tell_pending()
        if self._watch.samples != self._samples:
            self._samples = self._watch.samples
            self._on_samples()

    def _run(self) -> None:
        rest_s = LOOK_EVERY_S
        try:
            while not self._ended.wait(rest_s):
                began_s = time.monotonic()
                self.look(began_s)
                rest_s = max(LOOK_EVERY_S, REST_PER_WORK * (time.monotonic() - began_s))
        finally:
            if not self._ended.is_set():  # a defect; its traceback goes to the worker's log
                self._report(
                    UNAVAILABLE,
                    "the data is no longer watched: an error that was not foreseen, see this "
                    "worker's log. Training goes on with the samples it has",
                    warning=True,
                )

    def _tell_fault(self, fault: str) -> None:
        """Once, not at every look: training goes on with the samples there are."""
        if fault != self._fault:
            self._report(UNAVAILABLE, f"{fault}. Looking again", warning=True)
        self._fault = fault

    def _tell_pending(self) -> None:
        """Files that a second look did not take in: still being written, or not readable yet."""
        waiting = frozenset(self._watch.waiting)
        pending = waiting & self._seen_waiting
        if fresh := sorted(pending - self._told_pending):
            self._report(PENDING, f"{named(fresh)}: not whole yet, waiting for the rest")
        self._seen_waiting, self._told_pending = waiting, pending


def news(changes: Collection[Change]) -> list[tuple[EventReason, str, bool]]:
    """Reason, words and whether it is a warning: one event for each kind of change of one look.

    Skipped files are named with what is wrong with each.
    """
    told: list[tuple[EventReason, str, bool]] = []
    for kind in (ChangeKind.ADDED, ChangeKind.CHANGED, ChangeKind.REMOVED):
        of_kind = [change for change in changes if change.kind is kind]
        if not of_kind:
            continue
        words = named([change.file for change in of_kind])
        if kind is not ChangeKind.REMOVED:
            words += f": {sum(change.samples for change in of_kind)} samples for this worker"
        told.append((kind.reason, words, False))
    skipped = [change for change in changes if change.kind is ChangeKind.SKIPPED]
    told += [(c.kind.reason, _why(c), True) for c in skipped[:MOST_NAMED]]
    if rest := [change.file for change in skipped[MOST_NAMED:]]:
        told.append((ChangeKind.SKIPPED.reason, f"{named(rest)}: skipped likewise", True))
        _LOG.warning("skipped: %s", "; ".join(_why(c) for c in skipped))
    return told


def _why(change: Change) -> str:
    """What is wrong, with the file's name once."""
    return change.message if change.file in change.message else f"{change.file}: {change.message}"


def named(files: Collection[str]) -> str:
    """The first few files, and how many more there are."""
    names = list(files)
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
