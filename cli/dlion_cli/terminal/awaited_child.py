"""Runs a child process, and shows on a terminal what it waits for if that takes long."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

QUIET_S = 3.0
"""A child that ends sooner is not worth a message."""


def run_child(
    command: Sequence[str],
    *,
    given: bytes,
    output: IO[bytes],
    waits_for: str,
    console: Console | None,
    quiet_s: float = QUIET_S,
) -> int:
    """Run the command with that standard input to its end; return its exit code.

    `output` receives standard output and error. After `quiet_s` the console shows `waits_for` until
    the child ends. It shows nothing if it is None or no terminal.
    """
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT
    ) as child:
        try:
            try:
                child.communicate(given, timeout=quiet_s)
            except subprocess.TimeoutExpired:
                if console is None or not console.is_terminal:
                    child.communicate()
                else:
                    with console.status(waits_for):
                        child.communicate()
        except BaseException:
            child.kill()
            raise
    return child.returncode
