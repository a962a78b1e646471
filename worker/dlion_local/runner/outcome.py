"""The result of a local run, from the exit codes and logs of its processes."""

from dataclasses import dataclass
from pathlib import Path

from dlion_api.endings import cause_of_signal, is_by_signal, signal_name
from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank
from dlion_local.runner.log_tail import last_error_in_log, last_traceback, log_tail


@dataclass(frozen=True)
class WorkerFailure:
    """Why a worker ended permanently before the run did."""

    code: ExitCode
    message: str
    """The last error in its log; empty if there is none."""
    traceback: str = ""
    """Traceback of a program that raised, in several lines; empty if its log has none."""

    def __str__(self) -> str:
        return f"{self.code.name} ({int(self.code)}){': ' if self.message else ''}{self.message}"


@dataclass(frozen=True)
class RunOutcome:
    exit_code: ExitCode
    """OK: it ended in order; `summary.judgement` decides whether it succeeded."""
    failed: dict[Rank, WorkerFailure]
    problems: tuple[str, ...] = ()
    """Why the run was ended early, apart from failed workers."""


def read_failure(code: int, log: Path) -> WorkerFailure:
    """The failure of a worker's supervisor, with the worker's last error.

    A code below 0 stands for the signal that ended the supervisor itself.

    An exit code that DLion does not use is the program's own, or of a library that it calls, and so
    may be the last line of the log. For a signal, only lines that belong to it count.
    """
    if code in set(ExitCode):
        is_program = code == ExitCode.PROGRAM
        traceback = last_traceback(log_tail(log)) if is_program else ""
        return WorkerFailure(ExitCode(code), last_error_in_log(log), traceback)
    if code < 0 or is_by_signal(code):
        number = -code if code < 0 else code - 128
        message = cause_of_signal(log_tail(log), number)
        how = f"{signal_name(number)}{': ' if message else ''}{message}"
        return WorkerFailure(ExitCode.FAILED, how)
    message = last_error_in_log(log, any_line=True)
    message = message or "the program or a library ended the process, without an error in its log"
    return WorkerFailure(ExitCode.PROGRAM, f"exit code {code}: {message}")
