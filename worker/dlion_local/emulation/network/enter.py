"""Enters a network namespace and control groups, writes a pid file, and executes a command.

`python -m dlion_local.emulation.network.enter [--netns NAME] [--cgroup DIR]... [--pid-file FILE] --
CMD ...`

`emulation.emulation` puts it before the command of a supervisor or sidecar. The command replaces
this process, so signals and exit codes are the command's own. Imports only the standard library, to
start quickly.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000


def enter_network(name: str) -> None:
    """Move the calling *thread* into the named network namespace (`os.setns` came with 3.12).

    Raises OSError if there is no such namespace, or no permission to enter it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with (NAMESPACES / name).open("rb") as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"setns to {name}: {os.strerror(number)}")


def enter(arguments: Sequence[str] | None) -> list[str]:
    """Enter as the flags specify; return the command after them."""
    parser = argparse.ArgumentParser(prog="python -m dlion_local.emulation.network.enter")
    parser.add_argument("--netns")
    parser.add_argument("--cgroup", action="append", default=[], type=Path)
    parser.add_argument("--pid-file", type=Path)
    parser.add_argument("command", nargs="*")
    options = parser.parse_args(arguments)
    for group in options.cgroup:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    if options.pid_file is not None:
        options.pid_file.write_text(str(os.getpid()))
    if options.netns:
        enter_network(options.netns)
    return list(options.command)


if __name__ == "__main__":
    command = enter(sys.argv[1:])
    if not command:
        sys.exit("enter: no command to execute; put one behind --")
    os.execvp(command[0], command)  # noqa: S606 (an argument list, no shell)
