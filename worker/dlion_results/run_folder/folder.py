"""The result folder of a run: created, appended to during the run, finished at its end.

Defines the folder's layout (docs/results.md). `dlion run` creates it and appends every progress
record. `events` reads it again; `tally` and `summary` compute the figures.

    job.yaml           the manifest with its defaults
    environment.yaml   requested and measured values of the environment
    events.jsonl       every record of every worker, a line each
    run.lock           held by the run that uses the folder
    command.json       the process of the run, and command.log its output, if a client started it
    model-and-data/    its program, if a client was given a model and data in memory
    summary.json       the figures, once the run has ended
    tensorboard/       scalars per worker
    models/<site>/     the trained model (`model.keras`) and its description (`model.json`)
    state/             checkpoints, and the folder of the user's program (`program_root`)
    report.html        made by `dlion report`
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from dlion_api.errors import Problem, SpecError, UnavailableError
from dlion_api.names import Rank
from dlion_api.protocol.progress import ProgressRecord
from dlion_api.protocol.records import record_to_json
from dlion_api.spec import Job
from dlion_environments.yaml_text import to_yaml
from dlion_results.run_folder.environment import EnvironmentReport, environment_document
from dlion_results.run_folder.events import MAX_LINE_BYTES, read_events
from dlion_results.run_folder.layout import (
    CHECKPOINTS,
    ENVIRONMENT,
    EVENTS,
    JOB,
    LOCK,
    SUMMARY,
    TENSORBOARD,
)
from dlion_results.run_folder.lock import RESERVED, FolderLock, is_lock
from dlion_results.run_folder.models import read_models
from dlion_results.run_folder.resume_checks import check_resumable
from dlion_results.run_folder.storage import (
    PROGRAM_ROOT,
    AppendedFile,
    StorageError,
    drop_partial_line,
    write_whole,
    writing,
)
from dlion_results.run_folder.tensorboard import TensorBoardLogs
from dlion_results.summary.summary import Ending, Json, summarise
from dlion_results.summary.tally import RunTally

_log = logging.getLogger(__name__)


def default_folder(job_name: str, now: datetime) -> Path:
    """The default folder of a run: `runs/<job>-<YYYYmmdd-HHMMSS>`."""
    return Path("runs") / f"{job_name}-{now:%Y%m%d-%H%M%S}"


class ResultFolder:
    """An open result folder; `create` makes one. Not thread-safe."""

    def __init__(
        self,
        path: Path,
        job: Job,
        *,
        now: datetime,
        lock: FolderLock,
        created: Sequence[Path] = (),
    ) -> None:
        """Open the folder `path`.

        `lock` is the lock on it; `close` releases it. `created` are `path` and its parents as far
        as this run created them, innermost first.
        """
        self.path = path
        self._lock, self._created = lock, created
        self.job = job
        workers = job.workers()
        self._tally = RunTally(worker.rank for worker in workers)
        self._environment: EnvironmentReport | None = None
        self._bad_lines = 0
        names = {worker.rank: worker.name for worker in workers}
        self._logs = TensorBoardLogs(path / TENSORBOARD, names, opened_at_s=now.timestamp())
        if (path / EVENTS).exists():
            self._load_events()
        self._events = AppendedFile(path / EVENTS)

    @classmethod
    def create(
        cls, path: Path | None, job: Job, *, now: datetime, resume: bool = False
    ) -> ResultFolder:
        """Create the folder (`None`: `default_folder`) with `job.yaml` in it.

        With `resume`, open the folder of an earlier run: its events stay, new ones follow, and
        `job.yaml` gets the settings that may change (`resume_checks`).

        Raises: SpecError if the folder is not empty (or, with `resume`, holds no run of this job
        with a checkpoint, or an invalid lock); UnavailableError while another run uses it;
        DataError if its job cannot be read; StorageError if it cannot be written.
        """
        if path is None:
            return cls._create_default(job, now=now)
        _check(path, resume=resume)
        created = [each for each in (path, *path.parents) if not each.exists()]
        _make(path)
        try:
            lock = FolderLock(path)
        except StorageError:
            if created:
                _remove_created(path, created)
            raise
        try:
            _check(path, resume=resume)  # another run may have used it before the lock was taken
            if resume:
                check_resumable(path, job)
            try:
                write_whole(path / JOB, _yaml(job.to_document()))
                return cls(path, job, now=now, lock=lock, created=created)
            except (StorageError, KeyboardInterrupt):
                if not resume:
                    _remove_created(path, created)
                raise
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _create_default(cls, job: Job, *, now: datetime) -> ResultFolder:
        first = default_folder(job.metadata.name, now)
        while True:
            path = _unused(first)
            try:
                return cls.create(path, job, now=now)
            except (SpecError, UnavailableError):
                if path == _unused(first):
                    raise  # no other run took it meanwhile

    @classmethod
    def open_or_create(cls, path: Path, job: Job, *, now: datetime) -> ResultFolder:
        """Open the folder of that run, or create it.

        For a keeper, which may restart: existing content is not checked. Raises UnavailableError
        while another process writes to it, and StorageError.
        """
        _make(path)
        lock = FolderLock(path)
        try:
            write_whole(path / JOB, _yaml(job.to_document()))
            return cls(path, job, now=now, lock=lock)
        except BaseException:
            lock.release()
            raise

    @property
    def elapsed_s(self) -> float:
        """Time of the last record: a resumed run's clock continues from there."""
        return self._tally.end_s

    @property
    def last_iteration(self) -> int:
        """The highest iteration of any worker that trains; 0 before the first."""
        trains, workers = self.job.spec.exchange.trains, self._tally.workers.values()
        return max((each.last_iteration for each in workers if trains(each.rank)), default=0)

    @property
    def quarantined(self) -> frozenset[Rank]:
        """Workers that the others have quarantined."""
        return frozenset(r for r, worker in self._tally.workers.items() if worker.quarantine)

    @property
    def has_steps(self) -> bool:
        return any(worker.steps for worker in self._tally.workers.values())

    def append(self, record: ProgressRecord, text: str = "") -> None:
        """Append one record and pass it to the operating system. `text`: its JSON, if the caller
        has it. Raises StorageError."""
        self._events.append((text or record_to_json(record)).encode() + b"\n")
        self._tally.add(record)
        try:
            self._logs.add(record)
        except StorageError:
            self.check_exists()
            raise

    def check_exists(self) -> None:
        """Raises StorageError if the folder was removed or moved."""
        if not self._events.is_in_place():
            raise StorageError(
                errno.ENOENT,
                "the result folder is gone: it was removed or moved during the run. Its "
                "records and models are lost. Start a new run with another --out",
                str(self.path),
            )

    def write_environment(self, environment: EnvironmentReport) -> None:
        """Store requested and measured values of the environment. May be called again."""
        self._environment = environment
        write_whole(self.path / ENVIRONMENT, _yaml(environment_document(environment)))

    def store_program_root(self, program_root: Path) -> None:
        """Store the folder of the user's program, for runs that start from this folder's
        `job.yaml`.

        Raises StorageError.
        """
        path = self.path / PROGRAM_ROOT
        with writing("cannot make the folder", path.parent):
            path.parent.mkdir(exist_ok=True)
        write_whole(path, os.fsencode(program_root))

    def finish(self, ending: Ending, *, reference: Mapping[str, Any] | None = None) -> Json:
        """Write and return `summary.json`. Raises StorageError."""
        summary = summarise(
            self.job,
            self._tally,
            ending=ending,
            models=read_models(self.path),
            environment=self._environment,
            reference=reference,
            bad_line_count=self._bad_lines,
        )
        text = json.dumps(summary, indent=2, allow_nan=False)
        write_whole(self.path / SUMMARY, text.encode() + b"\n")
        return summary

    def discard(self) -> None:
        """Remove what was written, of a run without training, so that the name is free again.

        Not for a folder that was resumed or reopened.
        """
        _remove_created(self.path, self._created)
        self.close()

    def close(self) -> None:
        """Close the files. An unfinished folder remains readable."""
        self._events.close()
        self._logs.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load_events(self) -> None:
        drop_partial_line(self.path / EVENTS, longest_line_bytes=MAX_LINE_BYTES)
        for record in read_events(self.path / EVENTS, self._note_bad_line):
            self._tally.add(record)
            self._logs.note_existing(record)

    def _note_bad_line(self, line: str) -> None:
        self._bad_lines += 1
        _log.warning("%s: %s; ignored", self.path / EVENTS, line)


def _unused(path: Path) -> Path:
    """`path`, or with `-2`, `-3`, ... appended: two runs may begin within a second."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _check(path: Path, *, resume: bool) -> None:
    if resume:
        if not (path / EVENTS).exists():
            advice = "Name a folder that `dlion run` made"
            problem = Problem("--resume", "holds no run to resume", str(path), advice=advice)
            raise SpecError([problem])
        return
    if path.exists() and not path.is_dir():
        message, advice = "is a file, but results need a folder", "Name another"
    elif path.exists() and not (
        all(entry.name in RESERVED for entry in path.iterdir()) and is_lock(path / LOCK)
    ):
        message = "is not empty, and nothing in it may be overwritten"
        advice = _occupied_advice(path)
    else:
        return
    allowed = "a new or an empty folder"
    raise SpecError([Problem("--out", message, value=str(path), allowed=allowed, advice=advice)])


def _occupied_advice(path: Path) -> str:
    another = "Name another folder"
    if not (path / EVENTS).exists():
        return another
    if any(path.glob(CHECKPOINTS)):
        return f"{another}, or resume its run: dlion run FILE --resume {shlex.quote(str(path))}"
    return (
        f"{another}, or remove this one: its run has no checkpoint to resume from (a "
        "simulation never has one, and is cheap to repeat)"
    )


def _make(path: Path) -> None:
    with writing("cannot make the result folder", path):
        path.mkdir(parents=True, exist_ok=True)


def _remove_created(path: Path, created: Sequence[Path]) -> None:
    """Remove what a run writes before its first step, and the folders created for it.

    Errors are ignored, because another error is being reported.
    """
    shutil.rmtree(path / TENSORBOARD, ignore_errors=True)
    with contextlib.suppress(OSError):
        for name in (JOB, ENVIRONMENT, EVENTS, SUMMARY, PROGRAM_ROOT):
            (path / name).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (path / PROGRAM_ROOT).parent.rmdir()
        if is_lock(path / LOCK):
            (path / LOCK).unlink(missing_ok=True)
        for folder in created:
            folder.rmdir()


def _yaml(document: Mapping[str, Any]) -> bytes:
    return to_yaml(dict(document)).encode()
