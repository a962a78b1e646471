"""The result folder of a run: made once, added to while the run goes on, finished when it ends.

Owns the folder's layout (docs/results.md). `dlion run` makes one and appends every progress record
to it. Reading belongs to `events`, the figures to `tally` and `summary`, the page to `report`.

    job.yaml           the manifest with its defaults
    environment.yaml   what the environment asked for and what was measured
    events.jsonl       every record of every worker, a line each
    run.lock           held by the run that goes on in the folder
    summary.json       the figures, once the run has ended
    tensorboard/       scalars per worker
    models/<site>/     the trained model (`model.keras`) and what it is (`model.json`)
    state/             checkpoints, and where the user's program was (`program_root`)
    report.html        made by `dlion report`
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml

from dlion_api.errors import Problem, SpecError
from dlion_api.records import record_to_json
from dlion_worker.results.environment import EnvironmentReport, environment_document
from dlion_worker.results.events import LONGEST_LINE_BYTES, BadLine, read_events
from dlion_worker.results.lock import BEGUN, LOCK, FolderLock, is_lock
from dlion_worker.results.models import read_models
from dlion_worker.results.resuming import CHECKPOINTS, check_resumable
from dlion_worker.results.storage import (
    AppendedFile,
    StorageError,
    drop_torn_line,
    storage_error,
    write_whole,
)
from dlion_worker.results.summary import Ending, Json, summarise
from dlion_worker.results.tally import RunTally
from dlion_worker.results.tensorboard import TensorBoardLogs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from dlion_api.progress import ProgressRecord
    from dlion_worker.results.description import RunDescription

JOB = "job.yaml"
ENVIRONMENT = "environment.yaml"
EVENTS = "events.jsonl"
SUMMARY = "summary.json"
REPORT = "report.html"
TENSORBOARD = "tensorboard"
PROGRAM_ROOT = "state/program_root"

_log = logging.getLogger(__name__)


def default_folder(job_name: str, now: datetime) -> Path:
    """Where a run goes when no folder is named: `runs/<job>-<YYYYmmdd-HHMMSS>`."""
    return Path("runs") / f"{job_name}-{now:%Y%m%d-%H%M%S}"


def kept_program_root(folder: Path) -> Path | None:
    """The folder of the manifest that a run was started with; None: `folder` is no run's."""
    try:
        return Path(os.fsdecode((folder / PROGRAM_ROOT).read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return None


class ResultFolder:
    """An open result folder; `create` makes it. Not for use by two threads at once."""

    def __init__(
        self,
        path: Path,
        run: RunDescription,
        *,
        now: datetime,
        lock: FolderLock,
        made: Sequence[Path] = (),
    ) -> None:
        """`lock` is the one on `path`; `close` releases it. `made`: `path` and its parents, as far
        as they were made for this run, the innermost first."""
        self.path = path
        self._lock, self._made = lock, made
        self.run = run
        self._started_at = now
        self._tally = RunTally(worker.rank for worker in run.workers)
        self._environment: EnvironmentReport | None = None
        self._bad_lines = 0
        names = {worker.rank: worker.name for worker in run.workers}
        self._logs = TensorBoardLogs(path / TENSORBOARD, names, opened_at_s=now.timestamp())
        if (path / EVENTS).exists():
            self._take_up_events()
        self._events = AppendedFile(path / EVENTS)

    @classmethod
    def create(
        cls, path: Path | None, run: RunDescription, *, now: datetime, resume: bool = False
    ) -> ResultFolder:
        """Makes the folder (`None`: `default_folder`) with `job.yaml` in it.

        With `resume` the folder of an earlier run is taken up: its events stay, new ones follow,
        and `job.yaml` takes on the settings that may change (`resuming`).

        Raises: SpecError when the folder holds something already (or, with `resume`, no run of
            this job with a checkpoint, or a lock that is none); UnavailableError while another
            run goes on in it; DataError when its job cannot be read; StorageError when it cannot
            be written.
        """
        path = path or _unused(default_folder(run.key.name, now))
        _check(path, resume=resume)
        made = [each for each in (path, *path.parents) if not each.exists()]
        _make(path)
        try:
            lock = FolderLock(path)
        except StorageError:
            if made:
                _take_back(path, made)
            raise
        try:
            _check(path, resume=resume)  # again: another run may have come and gone before the lock
            if resume:
                check_resumable(path, run)
            try:
                write_whole(path / JOB, _yaml(run.document))
                return cls(path, run, now=now, lock=lock, made=made)
            except (StorageError, KeyboardInterrupt):
                if not resume:
                    _take_back(path, made)
                raise
        except BaseException:
            lock.release()
            raise

    @classmethod
    def take_up(cls, path: Path, run: RunDescription, *, now: datetime) -> ResultFolder:
        """The folder of that run, made where there is none, gone on with where there is.

        For a keeper, whose restarts are no news: nothing is asked of what the folder holds.

        Raises: UnavailableError while another process writes in it; StorageError.
        """
        _make(path)
        lock = FolderLock(path)
        try:
            write_whole(path / JOB, _yaml(run.document))
            return cls(path, run, now=now, lock=lock)
        except BaseException:
            lock.release()
            raise

    @property
    def report_path(self) -> Path:
        """Where `dlion report` puts the page of this run."""
        return self.path / REPORT

    @property
    def elapsed_s(self) -> float:
        """Time of the last record so far: where the clock of a run that is resumed goes on."""
        return self._tally.end_s

    @property
    def last_iteration(self) -> int:
        """Of the worker that came furthest; 0 before the first."""
        return max((worker.last_iteration for worker in self._tally.workers.values()), default=0)

    @property
    def has_steps(self) -> bool:
        """Whether any worker has finished a step."""
        return any(worker.steps for worker in self._tally.workers.values())

    def append(self, record: ProgressRecord) -> None:
        """Adds one record; it is on its way to the disk when this returns. Raises: StorageError."""
        self._events.append(record_to_json(record).encode() + b"\n")
        self._tally.add(record)
        try:
            self._logs.add(record)
        except StorageError:
            self.check_there()
            raise

    def check_there(self) -> None:
        """Returns where the folder is there. Raises: StorageError: it was removed or moved."""
        if not self._events.is_there():
            raise StorageError(
                errno.ENOENT,
                "the result folder is gone: it was removed or moved while the run went on. What "
                "the run had recorded and saved went with it; start afresh, with another --out",
                str(self.path),
            )

    def write_environment(self, environment: EnvironmentReport) -> None:
        """Keeps what the environment asked for, and what was measured. May be called again."""
        self._environment = environment
        write_whole(self.path / ENVIRONMENT, _yaml(environment_document(environment)))

    def keep_program_root(self, program_root: Path) -> None:
        """Keeps where the user's program is, for runs that start from this folder's `job.yaml`.

        Raises: StorageError.
        """
        path = self.path / PROGRAM_ROOT
        try:
            path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise storage_error("cannot make the folder", path.parent, error) from error
        write_whole(path, os.fsencode(program_root))

    def finish(self, ending: Ending, *, reference: Mapping[str, Any] | None = None) -> Json:
        """Writes `summary.json`; its content. Raises: StorageError."""
        summary = summarise(
            self.run,
            self._tally,
            ending=replace(ending, started_at=ending.started_at or self._started_at.isoformat()),
            models=read_models(self.path),
            environment=self._environment,
            reference=reference,
            bad_line_count=self._bad_lines,
        )
        text = json.dumps(summary, indent=2, allow_nan=False)
        write_whole(self.path / SUMMARY, text.encode() + b"\n")
        return summary

    def discard(self) -> None:
        """Takes back what `create` and this have written, of a run in which nothing was trained:
        the same name is free again. Not of one that was taken up or resumed."""
        self._events.close()
        self._logs.close()
        _take_back(self.path, self._made)
        self._lock.release()

    def close(self) -> None:
        """Closes the files. A folder that was never finished is readable all the same."""
        self._events.close()
        self._logs.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_up_events(self) -> None:
        """Goes on behind the events of the run that is resumed."""
        drop_torn_line(self.path / EVENTS, longest_line_bytes=LONGEST_LINE_BYTES)
        for record in read_events(self.path / EVENTS, self._note_bad_line):
            self._tally.add(record)
            self._logs.recall(record)

    def _note_bad_line(self, line: BadLine) -> None:
        self._bad_lines += 1
        _log.warning("%s: %s; left out", self.path / EVENTS, line)


def _unused(path: Path) -> Path:
    """`path`, or with `-2`, `-3`, ... behind it: two runs may begin within a second."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _check(path: Path, *, resume: bool) -> None:
    if resume:
        if not (path / EVENTS).exists():
            raise SpecError(
                [
                    Problem(
                        "--resume",
                        "holds no run that could go on",
                        value=str(path),
                        advice="Name a folder that `dlion run` made",
                    )
                ]
            )
        return
    if path.exists() and not path.is_dir():
        message, advice = "is a file, and results are a folder", "Name another"
    elif path.exists() and not (
        all(entry.name in {LOCK, BEGUN} for entry in path.iterdir()) and is_lock(path / LOCK)
    ):
        message, advice = "is not empty, and nothing in it may be overwritten", _way_out(path)
    else:
        return
    allowed = "a new or an empty folder"
    raise SpecError([Problem("--out", message, value=str(path), allowed=allowed, advice=advice)])


def _way_out(path: Path) -> str:
    """What to do about a folder that holds something."""
    another = "Name another folder"
    if not (path / EVENTS).exists():
        return another
    if any(path.glob(CHECKPOINTS)):
        return f"{another}, or go on with the run in it: dlion run FILE --resume {path}"
    return (
        f"{another}, or remove this one: the run in it has no checkpoint to go on from (a "
        "simulation never has, and costs only its time)"
    )


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error("cannot make the result folder", path, error) from error


def _take_back(path: Path, made: Sequence[Path]) -> None:
    """Removes what a run writes before its first step, and the folders that were made for it; as
    far as that goes: there is another error to tell."""
    shutil.rmtree(path / TENSORBOARD, ignore_errors=True)
    with contextlib.suppress(OSError):
        for name in (JOB, ENVIRONMENT, EVENTS, SUMMARY):
            (path / name).unlink(missing_ok=True)
        if is_lock(path / LOCK):
            (path / LOCK).unlink(missing_ok=True)
        for folder in made:
            folder.rmdir()


def _yaml(document: Mapping[str, Any]) -> bytes:
    text: str = yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True)
    return text.encode()
