"""Runs a command that dies with its parent: `parent_death.py PARENT_PID SIGNAL CMD ARGS...`.

A spawned child cannot request a parent-death signal before its program runs. This shim requests it
and then executes the program; the request survives `exec`, except for set-user-id programs and file
capabilities. Imports only the standard library, to start in 20 ms.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_CANNOT_START = 2
"""`dlion_api.exit_codes.ExitCode.USAGE`, repeated because this file runs without site-packages."""


def bound_to_parent(command: Sequence[str], death_signal: int = signal.SIGKILL) -> list[str]:
    """Return a command line that starts `command` bound to the calling thread.

    `death_signal`: the signal that the command gets when that *thread* ends. Spawn from a thread
    that lives long enough.
    """
    shim = str(Path(__file__).resolve())
    return [sys.executable, "-I", "-S", shim, str(os.getpid()), str(int(death_signal)), *command]


def request_parent_death_signal(parent_pid: int, death_signal: int) -> None:
    """Have the kernel send this process that signal when its parent's thread ends.

    Exits if the parent has died already, or if the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
        sys.exit(f"parent_death: prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:
        sys.exit(128 + signal.SIGKILL)  # the parent died before the request took effect


def main(arguments: Sequence[str]) -> None:
    """Bind this process to its parent, then execute the command. Returns only on error."""
    parent_pid, death_signal, command = int(arguments[0]), int(arguments[1]), list(arguments[2:])
    request_parent_death_signal(parent_pid, death_signal)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them; the command would inherit that
    try:
        os.execvp(command[0], command)  # noqa: S606 - an argument list, no shell
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}; is it installed, and executable?\n")
        sys.exit(_CANNOT_START)


if __name__ == "__main__":
    main(sys.argv[1:])
