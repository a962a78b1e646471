"""A folder whose files come, change and go while the job runs.

The trainer polls on an interval, from a thread of its own if it likes: nothing here makes a
training step wait longer than for a copy of the new samples. Time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from dlion_api.errors import DataError
from dlion_api.reasons import EventReason
from dlion_worker.training.datasets import opening
from dlion_worker.training.datasets.dataset import DataSet, Fingerprint, Samples
from dlion_worker.training.datasets.intake import Intake

if TYPE_CHECKING:
    from pathlib import Path

    from dlion_api.names import WorkerIdentity
    from dlion_api.spec import Job
    from dlion_worker.training.datasets.stream import BatchStream

PATIENCE_S = 10.0
"""A file that has not changed for so long and still cannot be read is corrupt, not half written."""


class ChangeKind(StrEnum):
    """What has become of a file; the values are reasons of events."""

    ADDED = EventReason.DATA_ADDED
    CHANGED = EventReason.DATA_CHANGED
    REMOVED = EventReason.DATA_REMOVED
    SKIPPED = EventReason.DATA_SKIPPED

    @property
    def reason(self) -> EventReason:
        """The event that tells of it."""
        return EventReason[f"DATA_{self.name}"]


@dataclass(frozen=True)
class Change:
    """One file that was taken in, taken out or skipped. `samples`: this worker's, of that file."""

    kind: ChangeKind
    file: str
    samples: int
    message: str = ""


@dataclass
class _Waiting:
    fingerprint: Fingerprint
    since_s: float


class FolderWatch:
    """Keeps a stream in step with the folder that its data set was loaded from."""

    def __init__(
        self,
        job: Job,
        identity: WorkerIdentity,
        *,
        data_root: Path,
        data: DataSet,
        stream: BatchStream,
        patience_s: float = PATIENCE_S,
    ) -> None:
        spec = job.spec.trainer.dataset
        assert spec.path is not None
        assert spec.evaluation_path is not None
        path = opening.resolved(spec.path, identity, data_root)
        evaluation = opening.resolved(spec.evaluation_path, identity, data_root)
        self._intake = Intake(
            job,
            identity,
            path,
            class_names=opening.class_names(path, spec, evaluation),
            class_count=data.class_count,
            input_shape=data.input_shape,
        )
        self._intake.remember(dict(data.parts))
        self._stream = stream
        self._patience_s = patience_s
        self._taken = dict(data.files)
        self._waiting: dict[str, _Waiting] = {}
        self._skipped: dict[str, Fingerprint] = {}
        self._lingering: set[str] = set()

    @property
    def samples(self) -> int:
        """This worker's samples now."""
        return self._stream.samples

    @property
    def waiting(self) -> frozenset[str]:
        """Files that have been seen and are not taken in yet."""
        return frozenset(self._waiting)

    def poll(self, now_s: float) -> list[Change]:
        """Looks once; what has changed since the last look. Call it every second or so.

        A file counts as written when two looks in a row find it the same and it can be read.
        """
        present = self._intake.present()
        changes = self._take_out(present)
        ready = self._ready(present, now_s)
        taken, faults = self._intake.take(ready) if ready else ({}, {})
        try:
            changes += self._take_in(taken)
        except MemoryError:
            self._intake.forget(list(taken))  # or at the next look they would be their own copies
            raise
        changes += [c for key in faults if (c := self._give_up(key, faults[key], now_s))]
        return changes

    def _take_out(self, present: dict[str, Fingerprint]) -> list[Change]:
        for key in self._waiting.keys() - present.keys():
            del self._waiting[key]
        for key in self._skipped.keys() - present.keys():
            del self._skipped[key]
        gone = sorted(self._taken.keys() - present.keys())
        try:
            self._stream.remove(set(gone))
        except DataError as error:
            # Kept among the taken ones, so that they go as soon as others have come.
            fresh = [key for key in gone if key not in self._lingering]
            self._lingering = set(gone)
            return [Change(ChangeKind.SKIPPED, key, 0, str(error)) for key in fresh]
        self._lingering.clear()
        self._intake.forget(gone)
        for key in gone:
            del self._taken[key]
        return [Change(ChangeKind.REMOVED, key, 0) for key in gone]

    def _ready(self, present: dict[str, Fingerprint], now_s: float) -> list[str]:
        """Files that are new or changed, and the same as at the last look."""
        ready = []
        for key, mark in present.items():
            if self._taken.get(key) == mark or self._skipped.get(key) == mark:
                self._waiting.pop(key, None)
                continue
            waiting = self._waiting.get(key)
            if waiting is None or waiting.fingerprint != mark:
                self._waiting[key] = _Waiting(mark, now_s)
            else:
                ready.append(key)
        self._intake.forget([key for key in ready if key in self._taken])
        return ready

    def _take_in(self, taken: dict[str, Samples]) -> list[Change]:
        """All at once, so that steps wait for one copy; one by one where some do not fit."""
        try:
            self._stream.extend({key: pair for key, pair in taken.items() if len(pair[1])})
        except DataError as error:
            if len(taken) > 1:
                return [c for key, pair in taken.items() for c in self._take_in({key: pair})]
            return [self._skip(key, str(error)) for key in taken]
        return [self._note_taken(key, len(y)) for key, (_, y) in taken.items()]

    def _note_taken(self, key: str, count: int) -> Change:
        if not count:
            try:
                self._stream.remove({key})
            except DataError as error:
                return self._skip(key, str(error))
        kind = ChangeKind.CHANGED if key in self._taken else ChangeKind.ADDED
        self._taken[key] = self._waiting.pop(key).fingerprint
        self._skipped.pop(key, None)
        return Change(kind, key, count)

    def _give_up(self, key: str, reason: str, now_s: float) -> Change | None:
        waiting = self._waiting[key]
        if now_s - waiting.since_s < self._patience_s:
            return None
        return self._skip(key, reason)

    def _skip(self, key: str, reason: str) -> Change:
        self._intake.forget([key])  # the same
        self._skipped[key] = self._waiting.pop(key).fingerprint
        return Change(ChangeKind.SKIPPED, key, 0, reason)
