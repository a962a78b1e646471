"""The processes beside the workers of a local run, kept running: sidecars and the evaluator.

Called by the runner. Owns when one that has ended is started again, and when that has no use any
more. Workers train on meanwhile: with the last directive, without evaluations.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass

from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_worker.local.last_words import last_words
from dlion_worker.local.processes import ProcessGroup

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 8.0
MOST_RESTARTS = 5
"""Of one process, until it has lived for `HEALTHY_S`: so at most as many within that time."""
HEALTHY_S = 60.0


@dataclass(frozen=True)
class Companion:
    """One such process; `start` gives it to the process group under `name`."""

    name: str
    reason: EventReason
    """Of the event that says it has ended."""
    start: Callable[[], object]
    worker: Rank | None = None
    """Whom it serves; None: all."""

    def __str__(self) -> str:
        return f"the {self.reason.removesuffix('Ended').lower()}" + (
            "" if self.worker is None else f" of worker {self.worker}"
        )


@dataclass
class _Life:
    """What has become of a companion so far."""

    companion: Companion
    started_s: float
    restarts: int = 0
    due_s: float | None = None
    """When it is to be started again; None: it was running when last seen."""
    is_given_up: bool = False


class Companions:
    """All companions of one run. Not for use by two threads at once."""

    def __init__(self, group: ProcessGroup, tell: Callable[[Rank, EventReason, str], None]) -> None:
        """`tell` records a warning: about which worker, its reason, and words for people."""
        self._group = group
        self._tell = tell
        self._lives: list[_Life] = []

    def start(self, companion: Companion, now_s: float) -> None:
        """Starts it, to be kept running from now on."""
        companion.start()
        self._lives.append(_Life(companion, now_s))

    def poll(self, now_s: float, running: Collection[Rank]) -> str:
        """Starts again what has ended; why the run cannot go on, or nothing.

        `running` are the workers that have not ended: a sidecar of another is not needed.
        """
        codes = self._group.poll()
        lost = [self._see(life, codes, now_s) for life in self._lives if _needed(life, running)]
        return "; ".join(filter(None, lost))

    def _see(self, life: _Life, codes: dict[str, int | None], now_s: float) -> str:
        if life.due_s is not None:
            if now_s >= life.due_s:
                life.companion.start()
                life.started_s, life.due_s = now_s, None
            return ""
        code = codes[life.companion.name]
        return "" if code is None else self._ended(life, code, now_s)

    def _ended(self, life: _Life, code: int, now_s: float) -> str:
        companion = life.companion
        log = self._group.log_path(companion.name)
        said = last_words(log)
        how = f"{companion} ended with {_words(code)}{': ' if said else ''}{said}"
        if now_s - life.started_s >= HEALTHY_S:
            life.restarts = 0
        rank = Rank(0) if companion.worker is None else companion.worker
        if life.restarts >= MOST_RESTARTS:
            life.is_given_up = True
            self._tell(rank, companion.reason, f"{how}; given up")
            return f"{how}, {life.restarts + 1} times within a short time: see logs/{log.name}"
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**life.restarts)
        life.restarts += 1
        life.due_s = now_s + wait_s
        self._tell(rank, companion.reason, f"{how}; it is started again in {wait_s:g} s")
        return ""


def _needed(life: _Life, running: Collection[Rank]) -> bool:
    worker = life.companion.worker
    return not life.is_given_up and (bool(running) if worker is None else worker in running)


def _words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"
