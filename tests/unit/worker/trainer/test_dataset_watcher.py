"""Tests of the dataset watcher.

The changes of one poll become one event per kind, with few files named. Skipped files are each
named with their fault. A file that is still incomplete at its second poll is reported as pending,
once. The number of samples is passed on when it changes. A failed poll is reported once and
repeated.

Left out: the conversion of files to samples (tests/unit/worker/training/test_watch); the thread
(tests/local).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dlion_api.errors import DataError
from dlion_api.reasons import EventReason
from dlion_worker.trainer.background.dataset_watcher import (
    DatasetWatcher,
    format_file_list,
    summarize_changes,
)
from dlion_worker.training.datasets import FileChange


@dataclass
class _Folder:
    """The scripted results of the next polls."""

    looks: list[list[FileChange] | Exception] = field(default_factory=list)
    samples: int = 10
    waiting: frozenset[str] = frozenset()

    def poll(self, _now_s: float) -> list[FileChange]:
        found = self.looks.pop(0) if self.looks else []
        if isinstance(found, Exception):
            raise found
        self.samples += sum(change.samples for change in found)
        return found


@dataclass
class _Recorder:
    events: list[tuple[str, str, bool]] = field(default_factory=list)
    grown_count: int = 0

    def report(self, reason: str, message: str, *, warning: bool = False) -> None:
        self.events.append((reason, message, warning))

    def grown(self) -> None:
        self.grown_count += 1


def _growing(folder: _Folder) -> tuple[DatasetWatcher, _Recorder]:
    recorded = _Recorder()
    return DatasetWatcher(folder, report=recorded.report, on_samples=recorded.grown), recorded


def _added(count: int) -> list[FileChange]:
    return [FileChange(EventReason.DATA_ADDED, f"{number}.npz", 2) for number in range(count)]


def test_many_files_make_one_event() -> None:
    assert summarize_changes(_added(7)) == [
        (
            "DataAdded",
            "0.npz, 1.npz, 2.npz, 3.npz, 4.npz and 2 more: 14 samples for this worker",
            False,
        )
    ]
    assert format_file_list(["a"]) == "a"


def test_each_kind_of_change_has_its_event() -> None:
    changes = [
        FileChange(EventReason.DATA_REMOVED, "old.npz", 0),
        FileChange(EventReason.DATA_CHANGED, "new.npz", 3),
        FileChange(EventReason.DATA_SKIPPED, "bad.npz", 0, "data/bad.npz: no readable .npz file"),
        FileChange(EventReason.DATA_SKIPPED, "odd.npz", 0, "samples of another shape"),
    ]
    assert summarize_changes(changes) == [
        ("DataChanged", "new.npz: 3 samples for this worker", False),
        ("DataRemoved", "old.npz", False),
        ("DataSkipped", "data/bad.npz: no readable .npz file", True),
        ("DataSkipped", "odd.npz: samples of another shape", True),
    ]


def test_skipped_files_beyond_a_few_are_counted() -> None:
    recorded = summarize_changes(
        [FileChange(EventReason.DATA_SKIPPED, f"{n}.npz", 0, "corrupt") for n in range(20)]
    )
    assert len(recorded) == 6
    assert recorded[-1][1].endswith("and 10 more: also skipped")


def test_a_file_that_stays_unread_is_reported_once() -> None:
    folder = _Folder()
    growing, recorded = _growing(folder)
    folder.waiting = frozenset({"late.npz"})
    growing.check(1.0)
    assert recorded.events == [], "every new file takes two polls"
    for now_s in (2.0, 3.0, 4.0):
        growing.check(now_s)
    assert recorded.events == [("DataPending", "late.npz: incomplete, waiting for the rest", False)]
    folder.waiting = frozenset()
    growing.check(5.0)
    folder.waiting = frozenset({"late.npz"})
    growing.check(6.0)
    growing.check(7.0)
    assert len(recorded.events) == 2, "a new wait is reported again"


def test_a_change_of_samples_is_passed_on() -> None:
    growing, recorded = _growing(
        _Folder([[], _added(3), [FileChange(EventReason.DATA_ADDED, "none.npz", 0)]])
    )
    growing.check(1.0)
    assert recorded.grown_count == 0
    growing.check(2.0)
    growing.check(3.0)
    assert recorded.grown_count == 1


def test_a_failed_poll_is_reported_once_and_repeated() -> None:
    gone = OSError(5, "Input/output error")
    growing, recorded = _growing(_Folder([gone, gone, _added(1), DataError("x")]))
    for now_s in range(4):
        growing.check(float(now_s))
    assert [reason for reason, _, _ in recorded.events] == [
        "DataUnavailable",
        "DataAdded",
        "DataUnavailable",
    ]
    assert recorded.events[0][2]
