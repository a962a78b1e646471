"""Runs `dlion` commands in child processes, from several threads, and terminates all together.

The children are forked from a process that has imported TensorFlow but not used it, as those of
`dlion run` are (docs/decisions/0028). So each one saves the seconds of that import.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Final

from dlion_api.errors import DLionError
from dlion_api.exit_codes import ExitCode
from dlion_cli.terminal.failures import SubprocessFailedError
from dlion_local.temporary_folder import temporary_folder

_MESSAGE_PREFIX: Final = "dlion: "
_MAX_MESSAGE_CHARS: Final = 2000
_PRELOADED: Final = ["dlion_cli.commands.local.simulate", "dlion_simulator.run"]


class ChildProcesses:
    """The running processes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._children: set[ForkServerProcess] = set()
        self._terminated = False
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        _start_server()

    def run(self, main: Callable[[list[str]], int], arguments: Sequence[str]) -> tuple[int, str]:
        """Run `main(arguments)` to its end; return exit code and standard error.

        Raises: DLionError after `terminate_all`.
        """
        with temporary_folder() as folder:
            errors = folder / "stderr"
            child = self._context.Process(target=_run, args=(main, list(arguments), errors))
            with self._lock:
                if self._terminated:
                    raise DLionError("terminated")
                child.start()
                self._children.add(child)
            # Not `join` alone: `start` in another thread asks for the exit codes of all children,
            # and each code can be read once.
            wait([child.sentinel])
            with self._lock:
                child.join()
                self._children.discard(child)
            assert child.exitcode is not None
            stderr = errors.read_text(errors="replace") if errors.exists() else ""
            return child.exitcode, stderr.strip()

    def terminate_all(self) -> None:
        """Terminate all processes; no new ones start."""
        self._terminated = True  # before the lock: a start may hold it for seconds
        with self._lock:
            children = list(self._children)
        for child in children:
            child.terminate()


def _start_server() -> None:
    """Start the process to fork from, without the terminal: TensorFlow's import writes to it."""
    terminal, silent = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)
    try:
        forkserver.ensure_running()
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
        os.close(silent)


def _run(main: Callable[[list[str]], int], arguments: list[str], errors: Path) -> None:
    for number, path in ((1, os.devnull), (2, errors)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    raise SystemExit(main(arguments))


def subprocess_error(what: str, code: int, stderr: str) -> SubprocessFailedError:
    """The error for a failed child process, with its own message and exit code."""
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
