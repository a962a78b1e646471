"""When a trainer is restarted, stopped or given up: a state machine without I/O.

Events in, instructions out; time is an argument. Driven by `process`.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from dlion_api.exit_codes import ExitCode

FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 10.0
HEALTHY_S = 60.0
"""A child that lived this long was well: the next restart waits briefly again."""


@dataclass(frozen=True)
class Exit:
    """How a child ended: by itself with a code, or by a signal."""

    code: int | None = None
    signal: int | None = None

    @property
    def as_code(self) -> int:
        """The code to pass on; 128 + n for signal n, as shells have it."""
        return 128 + (self.signal or 0) if self.code is None else self.code

    @property
    def fatal(self) -> bool:
        """Whether a restart cannot help."""
        return self.code in {code.value for code in ExitCode if code.fatal}


@dataclass(frozen=True)
class Began:
    """The supervisor runs; nothing has been started."""


@dataclass(frozen=True)
class Started:
    """The child runs."""

    pid: int


@dataclass(frozen=True)
class Exited:
    """The child has ended."""

    exit: Exit


@dataclass(frozen=True)
class Signalled:
    """The supervisor was asked to end."""

    number: int


@dataclass(frozen=True)
class TimeCame:
    """`Supervision.due_s` has passed."""


Event = Began | Started | Exited | Signalled | TimeCame


@dataclass(frozen=True)
class Start:
    """Start the child."""


@dataclass(frozen=True)
class Send:
    """Send the child that signal."""

    number: int


@dataclass(frozen=True)
class Tell:
    """Log that event; `details` are JSON-able."""

    event: str
    details: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class End:
    """End the supervisor with that code."""

    code: int


Instruction = Start | Send | Tell | End


class State(StrEnum):
    """What the supervisor is about."""

    RUNNING = "Running"
    WAITING = "Waiting"  # for the back-off to pass
    STOPPING = "Stopping"  # for the child to end, since somebody asked
    ENDED = "Ended"


class Supervision:
    """One child's life, over its restarts. `max_restarts` counts all of them, not only in a row.

    `given_up_code`: what it ends with when these are used up; None: with the child's last code.
    """

    def __init__(
        self, *, max_restarts: int, grace_s: float, given_up_code: int | None = None
    ) -> None:
        self.due_s: float | None = None
        """When `TimeCame` is to be handed in; None: not at all."""
        self.state = State.WAITING
        self._max_restarts = max_restarts
        self._grace_s = grace_s
        self._given_up_code = given_up_code
        self._restarts = 0
        self._backoff_s = FIRST_BACKOFF_S
        self._started_s = 0.0
        self._forwarded: set[int] = set()

    def handle(self, event: Event, now_s: float) -> tuple[Instruction, ...]:
        """What to do about that event, in order."""
        match event:
            case Began():
                return self._start(now_s)
            case Started(pid):
                return (Tell("started", {"pid": pid, "start": self._restarts + 1}),)
            case Exited(exit_):
                return self._exited(exit_, now_s)
            case Signalled(number):
                return self._signalled(number, now_s)
            case TimeCame():
                return self._time_came(now_s)

    def _start(self, now_s: float) -> tuple[Instruction, ...]:
        self.state, self.due_s, self._started_s = State.RUNNING, None, now_s
        return (Start(),)

    def _exited(self, exit_: Exit, now_s: float) -> tuple[Instruction, ...]:
        lived_s = now_s - self._started_s
        told = Tell("exited", {**_words(exit_), "lived_s": round(lived_s, 3)})
        if exit_.signal is not None and exit_.signal in self._forwarded:
            # It had not come as far as handling signals: it ended because it was asked to.
            return (told, self._end(ExitCode.INTERRUPTED))
        if self.state is State.STOPPING or exit_.fatal:
            return (told, self._end(exit_.as_code))
        if self._restarts >= self._max_restarts:
            given_up = Tell("giving up", {"restarts": self._restarts, "code": exit_.as_code})
            code = self._given_up_code
            return (told, given_up, self._end(exit_.as_code if code is None else code))
        if lived_s >= HEALTHY_S:
            self._backoff_s = FIRST_BACKOFF_S
        wait_s = self._backoff_s
        self._backoff_s = min(LONGEST_BACKOFF_S, 2 * wait_s)
        self._restarts += 1
        self.state, self.due_s = State.WAITING, now_s + wait_s
        restarting = {"wait_s": wait_s, "restart": self._restarts, "most": self._max_restarts}
        return (told, Tell("restarting", {**_words(exit_), **restarting}))

    def _signalled(self, number: int, now_s: float) -> tuple[Instruction, ...]:
        told = Tell("stopping", {"signal": signal.Signals(number).name})
        if self.state is State.WAITING:
            return (told, self._end(ExitCode.INTERRUPTED))
        if self.state is State.RUNNING:
            self.state, self.due_s = State.STOPPING, now_s + self._grace_s
        self._forwarded.add(number)
        return (told, Send(number))

    def _time_came(self, now_s: float) -> tuple[Instruction, ...]:
        if self.state is State.WAITING:
            return self._start(now_s)
        if self.state is State.STOPPING:
            self.due_s = None
            return (Tell("killing", {"after_s": self._grace_s}), Send(signal.SIGKILL))
        return ()

    def _end(self, code: int) -> End:
        self.state, self.due_s = State.ENDED, None
        return End(int(code))


def _words(exit_: Exit) -> dict[str, object]:
    if exit_.signal is not None:
        return {"signal": _signal_name(exit_.signal)}
    return {"code": exit_.code}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name each
        return f"signal {number}"
