"""Brings files to the keeper in a thread of its own: training never waits for it.

Owns the order and the retries. Of a file that is brought again before it has gone, only the newest
goes: what waits is names, and a file is opened when its turn comes. Called by
`dlion_worker.trainer.saving`.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dlion_api.errors import ContractError, UnavailableError
from dlion_worker.coordination.backoff import Backoff

_LOG = logging.getLogger(__name__)

_SLICE_S = 0.1


class Keeper(Protocol):
    """What brings one file (`KeeperClient`)."""

    def put(self, path: str, source: Path) -> int: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """What has become of a file."""

    path: str
    iteration: int
    error: str = ""
    """Why it is not there; empty: it is."""
    final: bool = True
    """False: it is tried again."""


@dataclass(frozen=True)
class _Errand:
    source: Path
    iteration: int


class Courier:
    """The errands of one worker. Its methods may be called from any thread."""

    def __init__(self, keeper: Keeper, told: Callable[[Outcome], None]) -> None:
        """`told` hears in the courier's thread what became of each errand; of one that is tried
        again and again it hears once."""
        self._keeper = keeper
        self._told = told
        self._changed = threading.Condition()
        self._waiting: dict[str, _Errand] = {}
        self._under_way: str | None = None
        self._ended = threading.Event()
        self._last_error: dict[str, str] = {}
        self._refused: set[str] = set()
        """Files that the keeper would not have when they were brought last."""
        self.brought_count = 0
        self.failed_count = 0
        """Attempts that failed."""
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)
        self._thread.start()

    def bring(self, path: str, source: Path, *, iteration: int) -> None:
        """To be brought as soon as may be; returns at once."""
        with self._changed:
            self._waiting[path] = _Errand(source, iteration)
            self._changed.notify_all()

    def wait(self, paths: Collection[str], *, within_s: float) -> bool:
        """Whether those files are there, or refused for good, before that time has passed."""
        deadline_s = time.monotonic() + within_s
        while self._is_out(paths):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or self._ended.is_set():
                return False
            with self._changed:  # in slices: a signal is to be heard
                self._changed.wait(min(_SLICE_S, left_s))
        return True

    def refused(self, paths: Collection[str]) -> bool:
        """Whether one of those files was refused for good when it was brought last."""
        with self._changed:
            return not self._refused.isdisjoint(paths)

    def close(self) -> None:
        """Breaks off what is under way; what waits is left."""
        self._ended.set()
        with self._changed:
            self._changed.notify_all()
        self._keeper.close()
        self._thread.join()

    def _is_out(self, paths: Collection[str]) -> bool:
        with self._changed:
            return any(path in self._waiting or path == self._under_way for path in paths)

    def _run(self) -> None:
        backoff = Backoff(random.random)
        while (errand := self._next()) is not None:
            path, what = errand
            outcome = self._try(path, what)
            with self._changed:
                self._under_way = None
                self._refused.discard(path)
                if not outcome.final:
                    self._waiting.setdefault(path, what)
                elif outcome.error:
                    self._refused.add(path)
                self._changed.notify_all()
            if self._ended.is_set():
                return
            self._tell(outcome)
            if outcome.final:
                backoff.reset()
            else:
                self._ended.wait(backoff.next_s())

    def _next(self) -> tuple[str, _Errand] | None:
        with self._changed:
            while not self._waiting and not self._ended.is_set():
                self._changed.wait()
            if self._ended.is_set():
                return None
            path = next(iter(self._waiting))
            self._under_way = path
            return path, self._waiting.pop(path)

    def _try(self, path: str, errand: _Errand) -> Outcome:
        try:
            self._keeper.put(path, errand.source)
        except UnavailableError as error:
            self.failed_count += 1
            return Outcome(path, errand.iteration, str(error), final=False)
        except (ContractError, OSError) as error:
            self.failed_count += 1
            return Outcome(path, errand.iteration, str(error))
        self.brought_count += 1
        return Outcome(path, errand.iteration)

    def _tell(self, outcome: Outcome) -> None:
        known = self._last_error.get(outcome.path, "")
        if outcome.error and not outcome.final and known:
            return
        self._last_error[outcome.path] = outcome.error
        if outcome.error:
            _LOG.warning("%s", outcome.error)
        self._told(outcome)
