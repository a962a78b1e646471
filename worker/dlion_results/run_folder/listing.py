"""Finds result folders and reads what a list of them shows, without reading their whole content.

Called by `dlion ls`. A finished run has its figures in `summary.json`; of others the last records
are read. Folders may be damaged, foreign or unreadable, and may change meanwhile: nothing raises.
Links are not followed. Needs neither NumPy nor TensorFlow.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from dlion_api.errors import ContractError, DLionError, SpecError
from dlion_api.protocol.progress import EvaluationRecord, StepRecord
from dlion_api.protocol.records import MAX_RECORD_BYTES
from dlion_results.run_folder.environment import COMMAND_FIELD, LocalCommand
from dlion_results.run_folder.events import parse_record
from dlion_results.run_folder.layout import (
    CHECKPOINTS,
    COMPARED,
    COMPARISON,
    COMPARISON_MARKER,
    ENVIRONMENT,
    EVENTS,
    JOB,
    LOCK,
    LOGS,
    REPLAY,
    SIMULATION,
    SUMMARY,
    has_results,
)
from dlion_results.run_folder.lock import is_held, is_lock
from dlion_results.run_folder.manifest import parse_job, read_manifest_bytes
from dlion_results.run_folder.regular_files import read_end, read_start
from dlion_results.run_folder.stored_values import (
    MAX_BYTES,
    MAX_FIGURE,
    UNREADABLE,
    count_of,
    number_of,
    parse_mapping,
    text_of,
)
from dlion_results.summary.accuracy_name import common_name
from dlion_results.summary.judgement import EndReason

MAX_DEPTH: Final = 4
"""Folders below the listed one: the runs of a comparison that is listed are that deep."""
MAX_FOLDERS: Final = 20_000
"""Visited at most, so that `dlion ls /` ends."""
TAIL_BYTES: Final = 4 * MAX_RECORD_BYTES
"""Read from the end of the records of a run without a summary."""
_RECORDED: Final = b"name: recorded\n"
"""How the environment of a replay by an older release begins."""
_COMMANDS: Final = {f"{COMMAND_FIELD}: {each}\n".encode(): str(each) for each in LocalCommand}
"""The first line of `environment.yaml`, which is written before anything of the run starts."""


class StoredState(StrEnum):
    """State of a result folder."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """Ended by a signal, or killed before it could write a summary."""
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"
    FOREIGN = "foreign"
    """A folder without results."""


@dataclass(frozen=True)
class StoredRun:
    """One line of the list. None and empty: not known."""

    path: Path
    state: StoredState
    command: str = ""
    """The command that made it, or `fetched`."""
    job: str = ""
    reason: str = ""
    """`ending.reason` of its summary."""
    detail: str = ""
    """How it ended, or what is wrong with the folder."""
    is_resumable: bool = False
    accuracy: float | None = None
    """Mean over replicas."""
    accuracy_name: str = ""
    """As of `EvaluationRecord`."""
    iteration: int | None = None
    duration_s: float | None = None
    started_at: datetime | None = None
    size_bytes: int | None = None


@dataclass(frozen=True)
class _Found:
    path: Path
    problem: str = ""
    """Why it cannot be read; empty: it can."""
    has_results: bool = True
    comparison: StoredRun | None = None
    """What the list shows, if it is the folder of a comparison."""


class ResultFinder:
    """Finds the result folders below a folder."""

    def __init__(self) -> None:
        self.is_cut = False
        """Whether folders were left out, because there are too many."""
        self._left = MAX_FOLDERS

    def find(self, root: Path) -> list[StoredRun]:
        """The folders with results, newest first; `root` itself if it is one.

        A comparison is one entry. If `root` is one, its runs are listed. Another folder directly
        below `root` without results is FOREIGN.
        """
        if has_results(_names(root)):
            return [read_run(root)]
        runs = [self._read(found) for found in self._below(root, 1)]
        if (comparison := read_comparison(root)) is not None:
            runs = [run for run in runs if run.state is not StoredState.FOREIGN] or [comparison]
        oldest = datetime.min.replace(tzinfo=UTC)
        return sorted(runs, key=lambda run: (run.started_at or oldest, str(run.path)), reverse=True)

    def _below(self, folder: Path, depth: int) -> Iterator[_Found]:
        for path in _folders(folder):
            self._left -= 1
            if self._left < 0:
                self.is_cut = True
                return
            try:
                names = {entry.name for entry in os.scandir(path)}
            except OSError as error:
                yield _Found(path, error.strerror or str(error), has_results=False)
                continue
            comparison = read_comparison(path)
            if comparison is not None or has_results(names):
                yield _Found(path, comparison=comparison)
                continue
            below = list(self._below(path, depth + 1)) if depth < MAX_DEPTH else []
            yield from below
            if not below and depth == 1:
                yield _Found(path, has_results=False)

    @staticmethod
    def _read(found: _Found) -> StoredRun:
        if found.has_results:
            return found.comparison or read_run(found.path)
        state = StoredState.UNREADABLE if found.problem else StoredState.FOREIGN
        modified = _modified(found.path)
        return StoredRun(
            found.path, state, detail=found.problem or "no results", started_at=modified
        )


def read_run(path: Path) -> StoredRun:
    """What the list shows of a result folder."""
    # Before all else: a run that ends meanwhile writes its summary, then releases its lock.
    is_running = is_held(path)
    names = _names(path)
    base = StoredRun(
        path,
        StoredState.INTERRUPTED,
        command=_command(path, names),
        size_bytes=_size_bytes(path),
        started_at=_modified(path / JOB) or _modified(path),
    )
    try:
        summary = (
            parse_mapping(read_start(path / SUMMARY, MAX_BYTES + 1)) if SUMMARY in names else {}
        )
    except UNREADABLE as error:
        return replace(base, state=StoredState.DAMAGED, detail=f"{SUMMARY}: {_short(error)}")
    ending = summary.get("ending")
    if is_running or not isinstance(ending, Mapping):
        return _unfinished(base, names, is_running=is_running)
    return _finished(base, summary, ending)


def read_comparison(path: Path) -> StoredRun | None:
    """What the list shows of the folder of `dlion compare --out`; None if it is none."""
    in_progress = is_held(path)  # before all else, as of a run
    names = _names(path)
    if has_results(names) or names.isdisjoint({COMPARISON, LOCK}):
        return None
    base = StoredRun(
        path,
        StoredState.RUNNING if in_progress else StoredState.INTERRUPTED,
        command="compare",
        detail="" if in_progress else "the same command continues it",
        size_bytes=_size_bytes(path),
        started_at=_modified(path / LOCK) or _modified(path),
    )
    if COMPARISON not in names:  # one that has begun has folders for its runs
        return base if is_lock(path / LOCK) and _folders(path) else None
    try:
        figures = parse_mapping(read_start(path / COMPARISON, MAX_BYTES + 1))
    except UNREADABLE as error:
        return replace(base, state=StoredState.DAMAGED, detail=f"{COMPARISON}: {_short(error)}")
    if not {"rows", "targetAccuracy"} <= figures.keys():
        return None
    if in_progress:
        return base
    return replace(base, state=StoredState.SUCCEEDED, detail=_compared(figures["rows"]))


def _compared(rows: object) -> str:
    """The number of runs, the columns and the environments."""
    known = [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []
    count = sum(len(runs) for row in known if isinstance(runs := row.get("runs"), list))
    columns, environments = (
        ", ".join(dict.fromkeys(filter(None, (text_of(row.get(name)) for row in known))))
        for name in ("variant", "environment")
    )
    return text_of(f"{count} runs: {columns} in {environments}")


def _finished(base: StoredRun, summary: Mapping[str, Any], ending: Mapping[str, Any]) -> StoredRun:
    reason = text_of(ending.get("reason"))
    if ending.get("succeeded") is True:
        state = StoredState.SUCCEEDED
    elif reason == EndReason.INTERRUPTED:
        state = StoredState.INTERRUPTED
    else:
        state = StoredState.FAILED
    accuracy, job = summary.get("accuracy"), summary.get("job")
    return replace(
        base,
        state=state,
        reason=reason,
        detail=text_of(ending.get("message")) or text_of(ending.get("stop_reason")),
        job=text_of(job.get("name")) if isinstance(job, Mapping) else "",
        is_resumable=state is not StoredState.SUCCEEDED and _has_checkpoint(base.path),
        accuracy=_figure(accuracy.get("mean")) if isinstance(accuracy, Mapping) else None,
        accuracy_name=text_of(accuracy.get("name")) if isinstance(accuracy, Mapping) else "",
        iteration=count_of(ending.get("iteration")),
        duration_s=_figure(summary.get("time_s")),
        started_at=_time(text_of(ending.get("started_at"))) or base.started_at,
    )


def _unfinished(base: StoredRun, names: set[str], *, is_running: bool) -> StoredRun:
    """A run without a summary, or one in progress."""
    state = StoredState.RUNNING if is_running else StoredState.INTERRUPTED
    tail = _Tail.of(base.path / EVENTS)
    run = replace(
        base,
        state=state,
        accuracy=tail.accuracy,
        accuracy_name=tail.accuracy_name,
        iteration=tail.iteration,
        duration_s=tail.end_s,
    )
    try:
        job = parse_job(read_manifest_bytes(base.path), source=JOB)
    except (DLionError, OSError) as error:
        if is_running:  # it may just have begun
            return run
        return replace(run, state=StoredState.DAMAGED, detail=f"{JOB}: {_short(error)}")
    detail = "" if is_running else "killed before it wrote its summary"
    if not is_running and EVENTS not in names:
        detail = "killed before its first record"
    resumable = not is_running and EVENTS in names and _has_checkpoint(base.path)
    return replace(run, job=job.metadata.name, detail=detail, is_resumable=resumable)


@dataclass(frozen=True)
class _Tail:
    """The last records of a run."""

    accuracy: float | None = None
    iteration: int | None = None
    end_s: float | None = None
    accuracy_name: str = ""

    @classmethod
    def of(cls, events: Path) -> _Tail:
        try:
            content = read_end(events, TAIL_BYTES)
        except OSError:
            return cls()
        accuracies: dict[int, float] = {}
        iterations, times_s, names = [], [], []
        for line in content.splitlines():
            try:
                record = parse_record(line)
            except ContractError:  # partial, damaged or foreign
                continue
            times_s.append(record.time_s)
            if isinstance(record, StepRecord):
                iterations.append(record.iteration)
            elif isinstance(record, EvaluationRecord):
                accuracies[record.rank] = record.accuracy
                names.append(record.accuracy_name)
        known = [each for each in map(_figure, accuracies.values()) if each is not None]
        mean = sum(known) / len(known) if known else None
        name = common_name(names)
        return cls(mean, max(iterations, default=None), max(times_s, default=None), name)


def _figure(value: object) -> float | None:
    return number_of(value, below=MAX_FIGURE)


def _command(path: Path, names: set[str]) -> str:
    for name, command in (
        (COMPARED, "compare"), (COMPARISON_MARKER, "compare"), (REPLAY, "replay"),
        (SIMULATION, "simulate"), (LOGS, "run"),
    ):  # fmt: skip
        if name in names:
            return command
    if LOCK not in names:
        return "fetched"  # it leaves locks and logs in the cluster
    with contextlib.suppress(OSError):
        start = read_start(path / ENVIRONMENT, max(map(len, [_RECORDED, *_COMMANDS])))
        for line, command in _COMMANDS.items():
            if start.startswith(line):
                return command
        return "replay" if start.startswith(_RECORDED) else "simulate"
    return ""


def _has_checkpoint(path: Path) -> bool:
    try:
        return any(
            not each.is_symlink() and each.is_file() and zipfile.is_zipfile(each)
            for each in path.glob(CHECKPOINTS)
        )
    except OSError:
        return False


def _names(path: Path) -> set[str]:
    try:
        return {entry.name for entry in os.scandir(path)}
    except OSError:
        return set()


def _folders(path: Path) -> list[Path]:
    """The folders in that folder, except links and hidden ones."""
    folders = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(path):
            with contextlib.suppress(OSError):
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
    return sorted(folders)


def _size_bytes(path: Path) -> int:
    """Bytes on disk of the files below, except unreadable ones."""
    total, waiting = 0, [path]
    while waiting:
        with contextlib.suppress(OSError):
            for entry in os.scandir(waiting.pop()):
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(Path(entry.path))
    return total


def _modified(path: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp(path.lstat().st_mtime, UTC)
    except (OSError, ValueError, OverflowError):
        return None


def _time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _short(error: BaseException) -> str:
    """The first line of an error, or its first problem."""
    if isinstance(error, SpecError) and error.problems:
        error = ValueError(str(error.problems[0]))
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{text.splitlines()[0] if text else type(error).__name__:.200}"
