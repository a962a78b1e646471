"""Watches a folder of data files that changes while the job runs.

The trainer polls at an interval, possibly from another thread. A training step waits at most for a
copy of new samples. Time is an argument.
"""

from dataclasses import dataclass
from pathlib import Path

from dlion_api.errors import DataError
from dlion_api.names import WorkerIdentity
from dlion_api.reasons import EventReason
from dlion_api.spec import Job
from dlion_worker.training.datasets import open_sources
from dlion_worker.training.datasets.dataset import DataSet, Fingerprint
from dlion_worker.training.datasets.file_intake import FileIntake
from dlion_worker.training.datasets.stream import BatchStream

UNREADABLE_AFTER_S = 10.0
"""An unchanged file that is unreadable for this long is corrupt, not incomplete."""

_FORGOTTEN: Fingerprint = (-1, -1)
"""Stands for a file that must be read again."""


@dataclass(frozen=True)
class FileChange:
    """One file that was added, changed, removed or skipped. `samples`: this worker's in it."""

    kind: EventReason
    file: str
    samples: int
    message: str = ""


@dataclass
class _PendingFile:
    fingerprint: Fingerprint
    since_s: float


class FolderWatch:
    """Keeps a stream in sync with the folder that its data set was loaded from."""

    def __init__(
        self,
        job: Job,
        identity: WorkerIdentity,
        *,
        data_root: Path,
        data: DataSet,
        stream: BatchStream,
        patience_s: float = UNREADABLE_AFTER_S,
    ) -> None:
        path, _, names = open_sources.locate(job.spec.trainer.dataset, identity, data_root)
        self._intake = FileIntake(
            job,
            identity,
            path,
            class_names=names,
            class_count=data.class_count,
            input_shape=data.input_shape,
        )
        self._intake.remember(dict(data.parts))
        self._stream = stream
        self._patience_s = patience_s
        self._taken = dict(data.files)
        self._waiting: dict[str, _PendingFile] = {}
        self._skipped: dict[str, Fingerprint] = {}
        self._lingering: set[str] = set()
        self._unreported: list[FileChange] = []
        """The changes of polls that failed after them."""
        self._emptied: set[str] = set()
        """Files without samples now whose old ones stay, as there are no others."""

    @property
    def samples(self) -> int:
        return self._stream.samples

    @property
    def waiting(self) -> frozenset[str]:
        """Files that were detected but not read yet."""
        return frozenset(self._waiting)

    def poll(self, now_s: float) -> list[FileChange]:
        """Poll once; return the changes since the last poll. Call it about once a second.

        A file counts as complete when two successive polls find it unchanged and readable.
        """
        present = self._intake.present()
        self._unreported += self._take_out(present)
        ready = self._ready(present, now_s)
        taken, faults = self._intake.take(ready) if ready else ({}, {})
        try:  # all at once, so that steps wait for one copy
            self._stream.extend({key: pair for key, pair in taken.items() if len(pair[1])})
        except MemoryError:
            # otherwise the next poll takes them for near-duplicates of themselves
            self._intake.forget(list(taken))
            raise
        changes, self._unreported = self._unreported, []
        changes += [self._note_taken(key, len(y)) for key, (_, y) in taken.items()]
        return changes + [
            self._skip(key, fault)
            for key, fault in faults.items()
            if now_s - self._waiting[key].since_s >= self._patience_s
        ]

    def _take_out(self, present: dict[str, Fingerprint]) -> list[FileChange]:
        for key in self._waiting.keys() - present.keys():
            del self._waiting[key]
        for key in self._skipped.keys() - present.keys():
            del self._skipped[key]
        removed = sorted(self._taken.keys() - present.keys())
        try:
            self._stream.remove({*removed, *self._emptied})
        except DataError as error:
            # Stay in `_taken`, so that they are removed once there are other samples.
            new = [key for key in removed if key not in self._lingering]
            self._lingering = set(removed)
            return [FileChange(EventReason.DATA_SKIPPED, key, 0, str(error)) for key in new]
        self._lingering.clear()
        self._emptied.clear()
        self._intake.forget(removed)
        for key in removed:
            del self._taken[key]
        return [FileChange(EventReason.DATA_REMOVED, key, 0) for key in removed]

    def _ready(self, present: dict[str, Fingerprint], now_s: float) -> list[str]:
        """Files that are new or changed, and unchanged since the last poll."""
        ready = []
        for key, mark in present.items():
            if self._taken.get(key) == mark or self._skipped.get(key) == mark:
                self._waiting.pop(key, None)
                continue
            waiting = self._waiting.get(key)
            if waiting is None or waiting.fingerprint != mark:
                self._waiting[key] = _PendingFile(mark, now_s)
            else:
                ready.append(key)
        changed = [key for key in ready if key in self._taken]
        self._intake.forget(changed)
        # Read them again even if they get the old content back: it is not compared any more.
        self._taken.update(dict.fromkeys(changed, _FORGOTTEN))
        return ready

    def _note_taken(self, key: str, count: int) -> FileChange:
        kind = EventReason.DATA_CHANGED if key in self._taken else EventReason.DATA_ADDED
        self._taken[key] = self._waiting.pop(key).fingerprint
        self._skipped.pop(key, None)
        self._emptied.discard(key)
        if not count:
            try:
                self._stream.remove({key})
            except DataError as error:
                self._emptied.add(key)
                return FileChange(EventReason.DATA_SKIPPED, key, 0, str(error))
        return FileChange(kind, key, count)

    def _skip(self, key: str, reason: str) -> FileChange:
        self._intake.forget([key])  # as in `poll`
        self._skipped[key] = self._waiting.pop(key).fingerprint
        return FileChange(EventReason.DATA_SKIPPED, key, 0, reason)
