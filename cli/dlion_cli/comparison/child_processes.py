"""Runs child processes from several threads, and terminates all of them together."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Sequence
from typing import Final

from dlion_api.errors import DLionError
from dlion_api.exit_codes import ExitCode
from dlion_cli.terminal.failures import SubprocessFailedError

_MESSAGE_PREFIX: Final = "dlion: "
_MAX_MESSAGE_CHARS: Final = 2000


class ChildProcesses:
    """The running processes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen[bytes]] = set()
        self._terminated = False

    def run(self, command: Sequence[str]) -> tuple[int, str]:
        """Run a command to its end; return exit code and standard error.

        Raises: DLionError after `terminate_all`.
        """
        with self._lock:
            if self._terminated:
                raise DLionError("terminated")
            child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            self._children.add(child)
        try:
            _, stderr = child.communicate()
        finally:
            with self._lock:
                self._children.discard(child)
        return child.returncode, stderr.decode(errors="replace").strip()

    def terminate_all(self) -> None:
        """Terminate all processes; no new ones start."""
        with self._lock:
            self._terminated = True
            children = list(self._children)
        for child in children:
            child.terminate()


def subprocess_error(what: str, code: int, stderr: str) -> SubprocessFailedError:
    """The error for a failed process of ours, with its own message and exit code."""
    if code < 0:
        message = (
            f"the run was ended by {signal.Signals(-code).name}. If memory is short, give a smaller"
            " --jobs; the same command continues"
        )
        return SubprocessFailedError(f"{what}: {message}", ExitCode.UNAVAILABLE)
    known = ExitCode(code) if code in set(ExitCode) else ExitCode.FAILED
    message = stderr[-_MAX_MESSAGE_CHARS:] if known is ExitCode.FAILED else final_message(stderr)
    return SubprocessFailedError(f"{what}: {message}", known)


def final_message(stderr: str) -> str:
    """The final error message of a `dlion` command's standard error.

    >>> final_message("a warning\\n0:01 elapsed\\ndlion: job.yaml: 1 problem:\\n  spec: is wrong")
    'job.yaml: 1 problem:\\n  spec: is wrong'
    """
    _, mark, message = f"\n{stderr}".rpartition(f"\n{_MESSAGE_PREFIX}")
    return message if mark else stderr[-_MAX_MESSAGE_CHARS:]
