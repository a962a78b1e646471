"""How a run ends: stop reasons from the manifest's stop rules, exit codes in words, and a worker's
final report.

Shared by trainers, the simulator, the command line and the operator. No I/O.
"""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank
from dlion_api.plain_text import without_escapes

STOP_RULES = ("maxSteps", "maxSeconds", "maxEpochs", "targetAccuracy")
"""Fields of `spec.trainer.stop` that end a run. `continuous` never does."""

MAX_REASON_LENGTH = 512
MAX_RANKS = 4096
MAX_END_ITERATION = 2**53
"""As a status allows: above it JSON readers lose digits."""
MAX_LINE_CHARACTERS = 500
SIGKILL_EXIT_CODE = 137
KILLED_HINT = ", most often for want of memory (resources.limits.memory)"

_FAULT = "Fatal Python error: "
_LOG_RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:")
_HANDED_ON = re.compile(r"worker \d+: ")
_MET = re.compile(rf"({'|'.join(STOP_RULES)}) (\S+) reached")


def stop_rule_met(rule: str, value: float) -> str:
    """Return the stop reason for a stop rule that is met.

    >>> stop_rule_met("maxSteps", 100)
    'maxSteps 100 reached'
    """
    if rule not in STOP_RULES:
        raise ValueError(f"{rule}: no stop rule; allowed: {', '.join(STOP_RULES)}")
    return f"{rule} {stop_value(value)} reached"


def stop_value(value: float) -> str:
    """Return the value of a stop rule with all its digits, as in a manifest.

    >>> stop_value(1234567.0), stop_value(0.9123454)
    ('1234567', '0.9123454')
    """
    return str(int(value) if float(value).is_integer() else value)


def own_reason(reason: str) -> str:
    """Return a stop reason without the prefix of the worker that it came from.

    >>> own_reason("worker 2: maxSteps 60 reached")
    'maxSteps 60 reached'
    """
    return _HANDED_ON.sub("", reason, count=1) if _HANDED_ON.match(reason) else reason


def is_stop_rule(reason: str) -> bool:
    """Whether the stop reason is a stop rule of the manifest that is met.

    Any other reason (a failure, a deadline, a signal) ends a run early.

    >>> is_stop_rule("targetAccuracy 0.9 reached: mean over 3 replicas 0.9012")
    True
    >>> is_stop_rule("SIGTERM received")
    False
    """
    return _MET.match(own_reason(reason)) is not None


def met_rule(reason: str) -> tuple[str, float] | None:
    """Return the stop rule that is met, with its value; None for any other reason.

    >>> met_rule("worker 2: maxSteps 60 reached")
    ('maxSteps', 60.0)
    """
    if (met := _MET.match(own_reason(reason))) is None:
        return None
    try:
        value = float(met[2])
    except ValueError:
        return None
    return (met[1], value) if math.isfinite(value) else None


@dataclass(frozen=True)
class EndReport:
    """What a worker reports when it ends cleanly.

    In a cluster it is the termination message of the trainer's container, so that a restarted
    operator can read it from the pod's status.
    """

    stop_reason: str
    """Why the run ended, as this worker knows it."""
    iteration: int
    """The last iteration of this worker."""
    ranks: tuple[Rank, ...] = ()
    """Replicas in the site's model. Empty: this worker did not save the model."""
    missing: tuple[Rank, ...] = ()
    """Replicas that had joined the run but are not in the model."""

    def to_json(self) -> str:
        """Return one line of JSON; with 500 workers it fits a termination message (4,096 bytes)."""
        reason = self.stop_reason[:MAX_REASON_LENGTH]
        return json.dumps({**asdict(self), "stop_reason": reason}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> EndReport | None:
        """Parse a report. Return None for any other text, such as a user's log."""
        try:
            values = json.loads(text)
            return cls(
                stop_reason=str(values["stop_reason"])[:MAX_REASON_LENGTH],
                iteration=_iteration(values["iteration"]),
                ranks=_ranks(values["ranks"]),
                missing=_ranks(values["missing"]),
            )
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None


def _iteration(value: float) -> int:
    if value > MAX_END_ITERATION:
        raise ValueError("not an iteration")
    return max(0, int(value))


def _ranks(values: object) -> tuple[Rank, ...]:
    if not isinstance(values, list) or len(values) > MAX_RANKS:
        raise ValueError("not a list of ranks")
    if not all(isinstance(value, int) and 0 <= value < 2**31 for value in values):
        raise ValueError("not a rank")
    return tuple(Rank(value) for value in values)


def describe_exit(code: int, lines: Sequence[str]) -> str:
    """Describe that exit code, with the last of these lines that is not the supervisor's JSON."""
    often = ""
    if code == ExitCode.RESTARTS and (given_up := _given_up(lines)) is not None:
        code, restarts = given_up
        often = f" after {restarts} restarts (maxRestarts)"
    hint = KILLED_HINT if code == SIGKILL_EXIT_CODE else ""
    own = [without_escapes(line) for line in lines if not line.startswith("{")]
    last = cause_of_signal(own, code - 128) if is_by_signal(code) else "".join(own[-1:])
    last = f": {last[:MAX_LINE_CHARACTERS]}" if last else ""
    return f"{describe_exit_code(code)}{often}{hint}{last}"


def cause_of_signal(lines: Sequence[str], number: int) -> str:
    """Return what the last lines of a process report about the signal that ended it; may be empty.

    That is the fault handler's error with the Python line, and what a library writes before it
    aborts. Other lines have nothing to do with the signal.

    >>> fault = ["Fatal Python error: Bus error", "", "Current thread 0x1 (most recent):"]
    >>> cause_of_signal(["step 7", *fault, '  File "a.py", line 3 in f'], signal.SIGBUS)
    'Bus error at File "a.py", line 3 in f'
    """
    starts = [i for i, line in enumerate(lines) if line.startswith(_FAULT)]
    before, stack = (lines[: starts[-1]], lines[starts[-1] :]) if starts else (lines, [])
    message = stack[0].removeprefix(_FAULT) if stack else ""
    if number == signal.SIGABRT:
        last = next((line for line in reversed(before) if line), "")
        message = message if _LOG_RECORD.match(last) else last or message
    current = [i for i, line in enumerate(stack) if line.startswith("Current thread ")]
    place = "".join(stack[current[0] + 1 : current[0] + 2]).strip() if current else ""
    return f"{message.strip()} at {place}" if place.startswith("File ") else message.strip()


def is_by_signal(code: int) -> bool:
    """Whether a shell's exit code stands for a signal that ended the process."""
    return 128 < code < 193 and code not in set(ExitCode)


def signal_name(number: int) -> str:
    """
    >>> signal_name(11), signal_name(40)
    ('SIGSEGV', 'signal 40')
    """
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"


def cause_of_exit(code: int, lines: Sequence[str]) -> int:
    """Return the exit code that explains the end: for RESTARTS that of the trainer's last end."""
    given_up = _given_up(lines) if code == ExitCode.RESTARTS else None
    return code if given_up is None else given_up[0]


def _given_up(lines: Sequence[str]) -> tuple[int, int] | None:
    """Exit code and restarts of a trainer on which the supervisor gave up, or None."""
    for line in reversed(lines):
        try:
            record = json.loads(line)
            if record["supervisor"] == "giving up":
                return int(record["code"]), int(record["restarts"])
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            continue
    return None


def describe_exit_code(code: int) -> str:
    """Return an exit code with its name from docs/errors-and-exit-codes.md.

    >>> describe_exit_code(67), describe_exit_code(137)
    ('67 (PROGRAM)', '137 (SIGKILL)')
    """
    if code in {int(each) for each in ExitCode}:
        return f"{code} ({ExitCode(code).name})"
    return f"{code} ({signal_name(code - 128)})" if is_by_signal(code) else str(code)
