"""Decides when a trainer is restarted, stopped or given up: a state machine without I/O.

A method for each event returns instructions; time is an argument. `process` drives it.
"""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from dlion_api.exit_codes import ExitCode
from dlion_api.spec.failures import FailureAction, FailureRule, action_after, end_of_exit

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 10.0
HEALTHY_S = 60.0
"""After this lifetime of a child, the back-off starts from the beginning."""

ENDED_BY_PROGRAM = (
    "the program ended the trainer's process with exit code 0 before the end of the training. "
    "Remove os._exit, sys.exit and quit from the program and what it imports: a program returns, "
    "or raises an error"
)


@dataclass(frozen=True)
class StartChild:
    """Start the child."""


@dataclass(frozen=True)
class SendSignal:
    number: int


@dataclass(frozen=True)
class LogEvent:
    """Log that event with JSON-serialisable details."""

    event: str
    details: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class LogError:
    """Log that line as a trainer logs its last error."""

    message: str


@dataclass(frozen=True)
class ExitSupervisor:
    code: int


Instruction = StartChild | SendSignal | LogEvent | LogError | ExitSupervisor


class SupervisionState(StrEnum):
    RUNNING = "Running"
    WAITING = "Waiting"  # for the back-off to end
    STOPPING = "Stopping"  # for the child to end, after a stop signal
    ENDED = "Ended"


class Supervision:
    """Supervises one child over its restarts. `max_restarts` counts all but ignored ones.

    `failure_rules` are the manifest's, `group` is the worker's. `ended_code`: the child's exit code
    for an orderly end. If it is not 0, then 0 is a program's own. `given_up_code`: the exit code
    after the last restart; None: the child's last code.
    """

    def __init__(
        self,
        *,
        max_restarts: int,
        grace_s: float,
        ended_code: int = ExitCode.OK,
        given_up_code: int | None = None,
        failure_rules: Sequence[FailureRule] = (),
        group: str = "",
    ) -> None:
        self.due_s: float | None = None
        """When to call `timer_expired`; None: never."""
        self.state = SupervisionState.WAITING
        self._max_restarts = max_restarts
        self._grace_s = grace_s
        self._ended_code = ended_code
        self._given_up_code = given_up_code
        self._failure_rules = failure_rules
        self._group = group
        self._starts = 0
        self._restarts = 0
        self._backoff_s = FIRST_BACKOFF_S
        self._started_s = 0.0
        self._forwarded: set[int] = set()

    def start(self, now_s: float) -> tuple[Instruction, ...]:
        """Start the child, for the first time or again."""
        self.state, self.due_s, self._started_s = SupervisionState.RUNNING, None, now_s
        self._starts += 1
        return (StartChild(),)

    def child_started(self, pid: int) -> tuple[Instruction, ...]:
        return (LogEvent("started", {"pid": pid, "start": self._starts}),)

    def child_exited(self, code: int, now_s: float) -> tuple[Instruction, ...]:
        """The child has ended: with an exit code, or -n by signal n."""
        lived_s = now_s - self._started_s
        has_ended = code == self._ended_code
        status = _status_fields(ExitCode.OK if has_ended else code)
        exited: tuple[Instruction, ...] = (
            LogEvent("exited", {**status, "lived_s": round(lived_s, 3)}),
        )
        if has_ended:
            return (*exited, self._end(ExitCode.OK))
        if -code in self._forwarded:
            # The child had no signal handler yet; the forwarded signal ended it.
            return (*exited, self._end(ExitCode.INTERRUPTED))
        as_shell = code if code >= 0 else 128 - code
        if code == ExitCode.OK:
            if self.state is SupervisionState.STOPPING:  # the program handled the signal itself
                return (*exited, self._end(ExitCode.INTERRUPTED))
            exited, as_shell = (*exited, LogError(ENDED_BY_PROGRAM)), int(ExitCode.PROGRAM)
        action = self._action_after(as_shell)
        if self.state is SupervisionState.STOPPING or action in ("FailWorker", "FailRun"):
            return (*exited, self._end(as_shell))
        if action == "Restart" and self._restarts >= self._max_restarts:
            given_up = LogEvent("giving up", {"restarts": self._restarts, "code": as_shell})
            given_code = self._given_up_code
            return (*exited, given_up, self._end(as_shell if given_code is None else given_code))
        if lived_s >= HEALTHY_S:
            self._backoff_s = FIRST_BACKOFF_S
        wait_s = self._backoff_s
        self._backoff_s = min(MAX_BACKOFF_S, 2 * wait_s)
        self._restarts += action == "Restart"
        self.state, self.due_s = SupervisionState.WAITING, now_s + wait_s
        restarting = {"wait_s": wait_s, "restart": self._restarts, "most": self._max_restarts}
        return (*exited, LogEvent("restarting", {**_status_fields(code), **restarting}))

    def _action_after(self, code: int) -> FailureAction:
        """What follows an exit code; those of no end are final, as a restart cannot help."""
        end = end_of_exit(code)
        return "FailWorker" if end is None else action_after(self._failure_rules, end, self._group)

    def stop_requested(self, number: int, now_s: float) -> tuple[Instruction, ...]:
        """The supervisor received a signal that asks it to stop."""
        stopping = LogEvent("stopping", {"signal": signal.Signals(number).name})
        if self.state is SupervisionState.WAITING:
            return (stopping, self._end(ExitCode.INTERRUPTED))
        if self.state is SupervisionState.RUNNING:
            self.state, self.due_s = SupervisionState.STOPPING, now_s + self._grace_s
        self._forwarded.add(number)
        return (stopping, SendSignal(number))

    def timer_expired(self, now_s: float) -> tuple[Instruction, ...]:
        """`due_s` has passed."""
        if self.state is SupervisionState.WAITING:
            return self.start(now_s)
        if self.state is SupervisionState.STOPPING:
            self.due_s = None
            return (LogEvent("killing", {"after_s": self._grace_s}), SendSignal(signal.SIGKILL))
        return ()

    def _end(self, code: int) -> ExitSupervisor:
        self.state, self.due_s = SupervisionState.ENDED, None
        return ExitSupervisor(int(code))


def _status_fields(code: int) -> dict[str, object]:
    if code >= 0:
        return {"code": code}
    try:
        return {"signal": signal.Signals(-code).name}
    except ValueError:  # real-time signals have no names
        return {"signal": f"signal {-code}"}
