"""Watches a folder of training data that changes during the run (`dataset.watch`).

Owns the watching thread and its events. Files are listed, read and decoded in that thread; a step
waits only while new samples are copied into the stream. `training.datasets` decides which samples
belong to this worker. Called by `worker`.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol

from dlion_api.errors import DataError
from dlion_api.reasons import EventReason
from dlion_worker.training.datasets import FileChange, FolderWatch

_LOG = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
REST_FACTOR = 20
"""A poll is followed by a pause of this many times its duration: at most 5 % of a core."""

MAX_NAMED = 5
"""Files named in one event; further ones are counted."""

CLOSE_WITHIN_S = 0.5


class EventSink(Protocol):
    def __call__(self, reason: EventReason, message: str, *, warning: bool = False) -> None:
        """Take one event."""


class DatasetWatcher:
    """Watches one worker's folder from `start` to `close`.

    `report` and `on_samples` (this worker's sample count has changed) are called in the watching
    thread.
    """

    def __init__(
        self, watch: FolderWatch, *, report: EventSink, on_samples: Callable[[], None]
    ) -> None:
        self._watch = watch
        self._report = report
        self._on_samples = on_samples
        self._samples = watch.samples
        self._last_waiting: frozenset[str] = frozenset()
        self._reported_pending: frozenset[str] = frozenset()
        self._fault = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dataset-watcher", daemon=True)

    def start(self) -> None:
        """Poll from now on, about once a second."""
        self._thread.start()

    def close(self) -> None:
        """Stop polling; a read in progress is abandoned."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_WITHIN_S)

    def check(self, now_s: float) -> None:
        """Poll once and report the changes."""
        try:
            changes = self._watch.poll(now_s)
        except (DataError, OSError, MemoryError) as error:
            self._report_fault(f"{type(error).__name__}: {error}")
            return
        self._fault = ""
        for reason, message, is_warning in summarize_changes(changes):
            self._report(reason, message, warning=is_warning)
        self._report_pending()
        if self._watch.samples != self._samples:
            self._samples = self._watch.samples
            self._on_samples()

    def _run(self) -> None:
        rest_s = POLL_INTERVAL_S
        try:
            while not self._ended.wait(rest_s):
                began_s = time.monotonic()
                self.check(began_s)
                rest_s = max(POLL_INTERVAL_S, REST_FACTOR * (time.monotonic() - began_s))
        finally:
            if not self._ended.is_set():  # a bug; its traceback is in the worker's log
                self._report(
                    EventReason.DATA_UNAVAILABLE,
                    "the data is no longer watched because of an unexpected error; see this "
                    "worker's log. Training continues with the present samples",
                    warning=True,
                )

    def _report_fault(self, fault: str) -> None:
        """Report a fault once, not at every poll; training continues."""
        if fault != self._fault:
            self._report(EventReason.DATA_UNAVAILABLE, f"{fault}. Retrying", warning=True)
        self._fault = fault

    def _report_pending(self) -> None:
        """Report files that a second poll could not read: incomplete, or not readable yet."""
        waiting = frozenset(self._watch.waiting)
        pending = waiting & self._last_waiting
        if new := sorted(pending - self._reported_pending):
            self._report(
                EventReason.DATA_PENDING,
                f"{format_file_list(new)}: incomplete, waiting for the rest",
            )
        self._last_waiting, self._reported_pending = waiting, pending


def summarize_changes(changes: Collection[FileChange]) -> list[tuple[EventReason, str, bool]]:
    """Return reason, message and whether it is a warning: one event per kind of change.

    Skipped files are named with the reason for each.
    """
    events: list[tuple[EventReason, str, bool]] = []
    for kind in (EventReason.DATA_ADDED, EventReason.DATA_CHANGED, EventReason.DATA_REMOVED):
        matching = [change for change in changes if change.kind is kind]
        if not matching:
            continue
        message = format_file_list([change.file for change in matching])
        if kind is not EventReason.DATA_REMOVED:
            message += f": {sum(change.samples for change in matching)} samples for this worker"
        events.append((kind, message, False))
    skipped = [change for change in changes if change.kind is EventReason.DATA_SKIPPED]
    events += [(c.kind, _skip_reason(c), True) for c in skipped[:MAX_NAMED]]
    if rest := [change.file for change in skipped[MAX_NAMED:]]:
        message = f"{format_file_list(rest)}: also skipped"
        events.append((EventReason.DATA_SKIPPED, message, True))
        _LOG.warning("skipped: %s", "; ".join(_skip_reason(c) for c in skipped))
    return events


def _skip_reason(change: FileChange) -> str:
    """What is wrong, naming the file once."""
    return change.message if change.file in change.message else f"{change.file}: {change.message}"


def format_file_list(files: Collection[str]) -> str:
    """Name the first few files and count the others."""
    names = list(files)
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
