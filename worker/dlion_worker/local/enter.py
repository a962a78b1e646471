"""Enters a network namespace and a control group, leaves a pid file, and becomes a command.

`python -m dlion_worker.local.enter [--netns NAME] [--cgroup DIR]... [--pid-file FILE] -- CMD ...`,
put before the command of a supervisor or a sidecar by `local.imposed`. It replaces itself by the
command, so that signals and exit codes are the command's own. Imports the standard library only:
it starts in a few hundredths of a second.
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

    Raises: OSError where there is no such namespace, or no right to enter it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with (NAMESPACES / name).open("rb") as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"setns to {name}: {os.strerror(number)}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Enter as the flags say, then become the command: returns only by an error."""
    parser = argparse.ArgumentParser(prog="python -m dlion_worker.local.enter")
    parser.add_argument("--netns")
    parser.add_argument("--cgroup", action="append", default=[], type=Path)
    parser.add_argument("--pid-file", type=Path)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    for group in options.cgroup:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    if options.pid_file is not None:
        options.pid_file.write_text(str(os.getpid()))
    if options.netns:
        enter_network(options.netns)
    os.execvp(options.command[0], options.command)  # noqa: S606 (an argument list, no shell)


if __name__ == "__main__":
    main(sys.argv[1:])
