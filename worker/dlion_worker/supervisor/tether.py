"""Becomes a command that dies with its parent: `tether.py PARENT_PID SIGNAL CMD ARGS...`, a file.

Nothing is ever forked without an exec, so a child cannot ask for its parent's death signal before
its program runs: this shim asks, and then becomes the program. The request outlives that.

Bound to a *thread*: Linux sends the signal when the thread that spawned the child ends. Spawn from
a thread that lives as long as the child is to live. A program with set-user-id or file
capabilities loses the tether. Imports the standard library only, so that it starts in 20 ms.
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
"""`dlion_api.exit_codes.ExitCode.USAGE`, spelt here since this file runs without site-packages."""


def tethered(command: Sequence[str], dies_by: int = signal.SIGKILL) -> list[str]:
    """The command line that starts `command` tied to the calling thread of this process.

    `dies_by`: the signal that it gets when that thread ends.
    """
    shim = str(Path(__file__).resolve())
    return [sys.executable, "-I", "-S", shim, str(os.getpid()), str(int(dies_by)), *command]


def main(arguments: Sequence[str]) -> None:
    """Ties this process to its parent, then becomes the command: returns only by an error."""
    parent_pid, dies_by, command = int(arguments[0]), int(arguments[1]), list(arguments[2:])
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, dies_by, 0, 0, 0) != 0:
        sys.exit(f"tether: prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:
        sys.exit(128 + signal.SIGKILL)  # the parent died before the request stood
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and that would be inherited
    try:
        os.execvp(command[0], command)  # noqa: S606 - an argument list, no shell
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}; is it installed, and executable?\n")
        sys.exit(_CANNOT_START)


if __name__ == "__main__":
    main(sys.argv[1:])
