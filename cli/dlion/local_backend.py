"""Jobs on this machine, real or simulated: `dlion` processes and their result folders."""

from __future__ import annotations

import contextlib
import errno
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from dlion.job import JobSnapshot
from dlion.manifests import ManifestInput, yaml_text
from dlion.result_reader import ResultReader, is_file, is_result_folder
from dlion.run_processes import (
    end_process,
    forget,
    process_start,
    read_command,
    start_command,
    uses_folder,
)
from dlion_api.errors import AbsentError, DataError, Problem, SpecError, UnavailableError
from dlion_api.protocol.progress import ProgressRecord
from dlion_cli.inputs.manifests import STDIN, apply_set, load_manifest
from dlion_cli.inputs.program_files import program_error, program_problems
from dlion_cli.inputs.required_files import find_program_root
from dlion_cli.inputs.runnable import prepare_run, prepare_simulation
from dlion_cli.local_runs.run_logs import GrowingFile
from dlion_results.run_folder.events import read_events
from dlion_results.run_folder.folder import default_folder
from dlion_results.run_folder.layout import COMMAND_LOG, EVENTS, MODEL_AND_DATA
from dlion_results.run_folder.lock import lock_holder
from dlion_results.run_folder.regular_files import opened
from dlion_results.run_folder.storage import StorageError, storage_error

if TYPE_CHECKING:
    from dlion.model_project import ModelProject
    from dlion_api.spec import Job

_POLL_S: Final = 0.2
_RELEASE_WITHIN_S: Final = 2.0
"""A process that ends holds its lock a little longer."""
_REMOVE_ATTEMPTS: Final = 10


class LocalBackend:
    """The jobs whose result folders are in one folder. Thread-safe."""

    def __init__(self, kind: Literal["local", "simulated"], root: Path) -> None:
        """`kind` is that of new jobs; those that exist may be of either."""
        self._kind, self._root = kind, root.resolve()
        self._readers: dict[str, ResultReader] = {}
        self._lock = threading.Lock()

    def train(
        self,
        manifest: ManifestInput,
        assignments: Sequence[str],
        *,
        project: ModelProject | None,
        environment: str | None,
        data_root: Path,
        detach: bool,
    ) -> JobSnapshot:
        """Start the job. Raises: as `dlion validate`, before anything starts; OSError.

        A model and its data go into the job's folder, where its program is then looked up.
        """
        lines = None if assignments else manifest.document.lines
        value = manifest.document.value
        document = apply_set(value, assignments) if assignments else value
        job = load_manifest(document, source=manifest.source, lines=lines)
        program_root = (
            find_program_root(job, manifest.file, None)
            if project is None
            else project.program.parent
        )
        shares = {} if project is None else project.shares(job, manifest.source)
        self._check(job, manifest.source, environment, program_root, data_root)
        folder = self._new_folder(job.metadata.name)
        arguments = [
            "run" if self._kind == "local" else "simulate",
            STDIN,
            *("--out", str(folder)),
            *("--data-root", str(data_root.resolve())),
        ]
        if environment is not None:
            is_path = "/" in environment or environment.lower().endswith((".yaml", ".yml"))
            place = str(Path(environment).resolve()) if is_path else environment
            arguments += ["--environment", place]
        text = yaml_text(document)
        try:
            if project is not None:
                program_root = folder / MODEL_AND_DATA
                project.write(program_root, shares)
            start_command(self._kind, arguments, folder, text, program_root, detach=detach)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        with self._lock:
            self._readers.pop(folder.name, None)  # of a thread that listed it: without the job
            self._reader(folder, job)
        return self.get(folder.name)

    def get(self, name: str) -> JobSnapshot:
        """The job of that name. Raises: AbsentError; SpecError for what can be no name."""
        path = self._folder(name)
        with self._lock:
            return self._reader(path).read(with_curve=True)

    def list(self) -> list[JobSnapshot]:
        """All jobs, oldest first. Other folders below the root are left out.

        Raises: DataError if the root cannot be read.
        """
        found = []
        try:
            paths = sorted(self._root.iterdir()) if self._root.is_dir() else []
        except OSError as error:
            raise DataError(f"{self._root}: cannot be read: {error.strerror}") from None
        for path in paths:
            if is_result_folder(path):
                with self._lock:
                    found.append(self._reader(path).read(with_curve=False))
        # A damaged folder may have no time.
        return sorted(
            found, key=lambda job: 0.0 if job.created is None else job.created.timestamp()
        )

    def wait(
        self,
        name: str,
        is_wanted: Callable[[JobSnapshot], bool],
        timeout_s: float | None,
    ) -> JobSnapshot:
        """The job once it is as wanted, or else after the time. Raises: as `get`."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            job = self.get(name)
            left_s = _POLL_S if deadline_s is None else deadline_s - time.monotonic()
            if is_wanted(job) or left_s <= 0:
                return job
            time.sleep(min(_POLL_S, left_s))

    def logs(self, name: str, worker: int | None, follow: bool) -> Iterator[str]:
        """Lines of a worker's log; None: of the command's. Raises: at once, as `get`."""
        path = self._folder(name)
        with self._lock:
            job = self._reader(path).job()
        if worker is not None and job is not None:
            count = len(job.workers())
            if not 0 <= worker < count:
                problem = Problem("worker", "is not a rank", str(worker), f"0 to {count - 1}")
                raise SpecError([problem], source=name)
        log = path / "logs" / f"worker-{worker}.log"
        if worker is None or self.get(name).backend == "simulated":
            log = path / COMMAND_LOG  # a simulation is one process
            if not log.exists():
                raise UnavailableError(
                    f"{name}: its command was started in a terminal, which has its output"
                )
        return self._lines(path, log, follow)

    def records(self, name: str) -> tuple[Job | None, Iterator[ProgressRecord]]:
        """The manifest and the records so far. Raises: as `get`."""
        path = self._folder(name)
        with self._lock:
            job = self._reader(path).job()
        return job, read_events(path / EVENTS) if is_file(path / EVENTS) else iter(())

    def end(self, name: str) -> None:
        """End the job's processes; return when they have ended. Raises: UnavailableError."""
        path = self._folder(name)
        command = read_command(path)
        if command is not None and command.is_alive(path):
            end_process(path, command.pid, command.started_ticks)
        deadline_s = time.monotonic() + _RELEASE_WITHIN_S
        while (holder := _holder(path)) is not None:
            started = process_start(holder)
            if started is not None and uses_folder(holder, path):
                end_process(path, holder, started)
            elif time.monotonic() > deadline_s:
                raise UnavailableError(
                    f"{path}: a process uses this folder that is not on this machine, or is not "
                    f"visible here (process {holder or 'unknown'}). End it there"
                )
            time.sleep(_POLL_S / 10)

    def delete(self, name: str) -> None:
        """End the job and remove its result folder. Raises: UnavailableError, StorageError."""
        path = self._folder(name)
        self.end(name)
        with self._lock:
            self._readers.pop(name, None)
        try:
            _remove(path)
        except OSError as error:
            message = (
                f"cannot remove the result folder: {error.strerror or error}. Check the rights "
                "of it and of the folder above it"
            )
            raise StorageError(error.errno or errno.EIO, message, str(path)) from error
        forget(path)

    def close(self) -> None:
        """Nothing: runs continue."""

    def _check(
        self,
        job: Job,
        source: str,
        environment: str | None,
        program_root: Path,
        data_root: Path,
    ) -> None:
        try:
            is_folder = data_root.is_dir()
        except OSError as error:
            raise DataError(f"data_root: {data_root}: {error.strerror}") from None
        if not is_folder:
            raise DataError(f"data_root: {data_root}: there is no such folder")
        if problems := program_problems(job, program_root):
            raise program_error(problems, source)
        if self._kind == "local":
            prepare_run(
                job, environment, source=source, program_root=program_root, data_root=data_root
            )
            return
        if environment is None:
            advice = "Name one: `dlion simulate --help`, docs/environments.md"
            problem = Problem("environment", "is needed in virtual time", advice=advice)
            raise SpecError([problem], source=source)
        prepare_simulation(job, environment, source=source)

    def _new_folder(self, job_name: str) -> Path:
        first = self._root / default_folder(job_name, datetime.now().astimezone()).name
        folder, number = first, 1
        while True:
            try:
                folder.mkdir(parents=True)
                return folder
            except FileExistsError:
                number += 1
                folder = first.with_name(f"{first.name}-{number}")
            except OSError as error:
                raise storage_error("cannot make the result folder", folder, error) from error

    def _folder(self, name: str) -> Path:
        if (
            not isinstance(name, str)
            or not name
            or Path(name).name != name
            or name in (".", "..")
            or "\0" in name
        ):
            problem = Problem("name", "is not a job's name", repr(name), "a folder's name, no path")
            raise SpecError([problem])
        path = self._root / name
        if not is_result_folder(path):
            raise AbsentError(
                f"there is no job {name!r} in {self._root}. `list_jobs()` names those that are "
                "there; another root may have it: Client(root=…)"
            )
        return path

    def _reader(self, path: Path, job: Job | None = None) -> ResultReader:
        """The reader of that folder. A new one replaces those whose folders others have removed."""
        if path.name not in self._readers:
            there = {name: each for name, each in self._readers.items() if each.path.exists()}
            self._readers = there | {path.name: ResultReader(path, job)}
        return self._readers[path.name]

    def _lines(self, path: Path, log: Path, follow: bool) -> Iterator[str]:
        reader = ResultReader(path)
        while not is_file(log):
            if not follow or not reader.is_running():
                return
            time.sleep(_POLL_S)
        try:
            with opened(log):
                pass
        except OSError as error:
            raise DataError(f"{log}: cannot be read: {error.strerror or error}") from None
        file = GrowingFile(log, None)
        while True:
            is_last = not follow or not reader.is_running()
            yield from file.lines(is_last=is_last)
            if is_last:
                return
            time.sleep(_POLL_S)


def _holder(path: Path) -> int | None:
    try:
        return lock_holder(path)
    except OSError as error:
        raise UnavailableError(
            f"{path}: its lock cannot be read ({error.strerror}), so a run may use it. Check its "
            "rights"
        ) from None


def _remove(path: Path) -> None:
    """Remove the folder. Workers of a killed run may write to it for a moment. Raises: OSError."""
    for _ in range(_REMOVE_ATTEMPTS):
        with contextlib.suppress(OSError):
            return shutil.rmtree(path)
        time.sleep(_POLL_S)
    return shutil.rmtree(path)
