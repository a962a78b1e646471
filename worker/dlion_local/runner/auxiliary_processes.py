"""Keeps the auxiliary processes of a local run alive: the sidecars and the evaluator.

Restarts a process that has ended, with a growing delay, until it fails too often. Workers train on
meanwhile, with the last directive and without evaluations.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from dlion_api.endings import signal_name
from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_local.runner.log_tail import last_error_in_log
from dlion_local.runner.processes import ProcessGroup

FIRST_WAIT_S = 0.5
MAX_WAIT_S = 8.0
MAX_RESTARTS = 5
"""Restarts of one process before the run fails; reset once it has run for `HEALTHY_S`."""
HEALTHY_S = 60.0


@dataclass(frozen=True)
class AuxiliaryProcess:
    """An auxiliary process; `start` starts it in the process group under `name`."""

    name: str
    reason: EventReason
    """Reason of the event that reports its end."""
    start: Callable[[], object]
    worker: Rank | None = None
    """The worker that it serves; None: all."""

    def __str__(self) -> str:
        return f"the {self.reason.removesuffix('Ended').lower()}" + (
            "" if self.worker is None else f" of worker {self.worker}"
        )


@dataclass
class _ProcessState:
    process: AuxiliaryProcess
    started_s: float
    restarts: int = 0
    due_s: float | None = None
    """When to restart it; None: it was running at the last check."""
    is_given_up: bool = False


class AuxiliaryProcesses:
    """All auxiliary processes of one run. Not thread-safe."""

    def __init__(self, group: ProcessGroup, warn: Callable[[Rank, EventReason, str], None]) -> None:
        """`warn` records a warning: a worker, a reason and a message."""
        self._group = group
        self._warn = warn
        self._states: list[_ProcessState] = []

    def start(self, process: AuxiliaryProcess, now_s: float) -> None:
        """Start a process and keep it running."""
        process.start()
        self._states.append(_ProcessState(process, now_s))

    def poll(self, now_s: float, running: Collection[Rank]) -> str:
        """Restart ended processes. Return why the run cannot continue, or an empty string.

        `running` are the workers that have not ended: the sidecars of others are not needed.
        """
        codes = self._group.poll()
        lost = [
            self._check(state, codes, now_s) for state in self._states if _needed(state, running)
        ]
        return "; ".join(filter(None, lost))

    def _check(self, state: _ProcessState, codes: dict[str, int | None], now_s: float) -> str:
        if state.due_s is not None:
            if now_s >= state.due_s:
                state.process.start()
                state.started_s, state.due_s = now_s, None
            return ""
        code = codes[state.process.name]
        return "" if code is None else self._ended(state, code, now_s)

    def _ended(self, state: _ProcessState, code: int, now_s: float) -> str:
        process = state.process
        log = self._group.log_path(process.name)
        error = last_error_in_log(log)
        how = f"{process} ended with {_exit_text(code)}{': ' if error else ''}{error}"
        if now_s - state.started_s >= HEALTHY_S:
            state.restarts = 0
        rank = Rank(0) if process.worker is None else process.worker
        if state.restarts >= MAX_RESTARTS:
            state.is_given_up = True
            self._warn(rank, process.reason, f"{how}; given up")
            return f"{how}, {state.restarts + 1} times within a short time: see logs/{log.name}"
        wait_s = min(MAX_WAIT_S, FIRST_WAIT_S * 2**state.restarts)
        state.restarts += 1
        state.due_s = now_s + wait_s
        self._warn(rank, process.reason, f"{how}; it is started again in {wait_s:g} s")
        return ""


def _needed(state: _ProcessState, running: Collection[Rank]) -> bool:
    worker = state.process.worker
    return not state.is_given_up and (bool(running) if worker is None else worker in running)


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal_name(-code)
    return f"signal {-code} ({name})" if name.startswith("SIG") else name
