"""Uploads files to the keeper in a thread, so that training never waits for it.

The queue holds names: a file is opened when its turn comes, and of several versions only the newest
is uploaded.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from dlion_api.errors import ContractError, UnavailableError
from dlion_worker.artifact_client.client import ArtifactClient
from dlion_worker.coordination.backoff import Backoff

_LOG = logging.getLogger(__name__)

_SLICE_S = 0.1


@dataclass(frozen=True)
class UploadResult:
    path: str
    iteration: int
    error: str = ""
    """Why it failed; empty on success."""
    final: bool = True
    """False: it will be retried."""


@dataclass(frozen=True)
class _UploadTask:
    source: Path
    iteration: int
    after: Collection[str]


class UploadQueue:
    """The uploads of one worker. Its methods may be called from any thread."""

    def __init__(self, keeper: ArtifactClient, on_result: Callable[[UploadResult], None]) -> None:
        """`on_result` runs in the queue's thread: once per upload, and once for repeated
        failures."""
        self._keeper = keeper
        self._on_result = on_result
        self._changed = threading.Condition()
        self._waiting: dict[str, _UploadTask] = {}
        self._in_progress: str | None = None
        self._ended = threading.Event()
        self._last_error: dict[str, str] = {}
        self._refused: set[str] = set()
        """Files that the keeper rejected at their last upload."""
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)
        self._thread.start()

    def upload(
        self, path: str, source: Path, *, iteration: int, after: Collection[str] = ()
    ) -> None:
        """Queue a file and return at once.

        It waits for the files `after`, which wait for none, and fails if one of them is rejected.
        """
        with self._changed:
            # At the end also if it waits already: what belongs together arrives in its order.
            self._waiting.pop(path, None)
            self._waiting[path] = _UploadTask(source, iteration, after)
            self._changed.notify_all()

    def wait(self, paths: Collection[str], *, within_s: float) -> bool:
        """Wait until the files are uploaded or rejected permanently; False on timeout."""
        deadline_s = time.monotonic() + within_s
        while self._is_pending(paths):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or self._ended.is_set():
                return False
            with self._changed:  # in slices, so that signals are handled
                self._changed.wait(min(_SLICE_S, left_s))
        return True

    def is_refused(self, paths: Collection[str]) -> bool:
        """Whether one of the files was rejected permanently at its last upload."""
        with self._changed:
            return not self._refused.isdisjoint(paths)

    def close(self) -> None:
        """Cancel the current upload; discard the queue."""
        self._ended.set()
        with self._changed:
            self._changed.notify_all()
        self._keeper.close()
        self._thread.join()

    def _is_pending(self, paths: Collection[str]) -> bool:
        with self._changed:
            return any(path in self._waiting or path == self._in_progress for path in paths)

    def _run(self) -> None:
        backoff = Backoff()
        while (task := self._next()) is not None:
            path, what = task
            outcome = self._attempt(path, what)
            with self._changed:
                self._in_progress = None
                self._refused.discard(path)
                if not outcome.final:
                    self._waiting.setdefault(path, what)
                elif outcome.error:
                    self._refused.add(path)
                self._changed.notify_all()
            if self._ended.is_set():
                return
            self._report(outcome)
            if outcome.final:
                backoff.reset()
            else:
                self._ended.wait(backoff.next_s())

    def _next(self) -> tuple[str, _UploadTask] | None:
        with self._changed:
            while not self._waiting and not self._ended.is_set():
                self._changed.wait()
            if self._ended.is_set():
                return None
            path = next(
                path
                for path, task in self._waiting.items()
                if self._waiting.keys().isdisjoint(task.after)
            )
            self._in_progress = path
            return path, self._waiting.pop(path)

    def _attempt(self, path: str, task: _UploadTask) -> UploadResult:
        if self.is_refused(task.after):
            message = f"{path} not uploaded to the keeper: neither is a file that it is about"
            return UploadResult(path, task.iteration, message)
        try:
            self._keeper.put(path, task.source)
        except UnavailableError as error:
            return UploadResult(path, task.iteration, str(error), final=False)
        except (ContractError, OSError) as error:
            return UploadResult(path, task.iteration, str(error))
        return UploadResult(path, task.iteration)

    def _report(self, outcome: UploadResult) -> None:
        known = self._last_error.get(outcome.path, "")
        if outcome.error and not outcome.final and known:
            return
        self._last_error[outcome.path] = outcome.error
        if outcome.error:
            _LOG.warning("%s", outcome.error)
        self._on_result(outcome)
