"""Starts operators without the second that each would take to import its modules: one process per
test session has imported them and forks.

`OperatorProcess` uses it for operators of this tree with a kubeconfig; others start a Python of
their own. This module is also the program of that process, which reads requests from its standard
input: `start` forks an operator, `wait` returns the exit code of one that has ended.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PROGRAM = "dlion_operator"
IMPORTED = "dlion_operator.controller.process"


@dataclass
class ForkedOperator:
    """An operator that the starter has forked; used as a `subprocess.Popen` is."""

    pid: int
    starter: Starter
    returncode: int | None = None
    _handle: int = field(init=False, default=-1)

    def __post_init__(self) -> None:
        self._handle = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """The exit code, once it has ended; of a signal, negative."""
        return self._ended_within(0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, after its end. Raises: subprocess.TimeoutExpired."""
        code = self._ended_within(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(PROGRAM, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal; nothing happens once it has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, number)

    def _ended_within(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._handle, select.POLLIN)
            if poll.poll(None if timeout_s is None else timeout_s * 1000):
                self.returncode = self.starter.ask({"wait": self.pid})
                os.close(self._handle)
        return self.returncode


class Starter:
    """The process that forks operators. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],  # its own imports are the operators'
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.end)

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> ForkedOperator:
        """`python -m dlion_operator` with these arguments; `log` gets what it prints."""
        request = {"start": [*arguments], "environment": {**environment}, "log": str(log)}
        return ForkedOperator(self.ask(request), self)

    def ask(self, request: dict[str, Any]) -> int:
        """The answer to a request: a process id or an exit code."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with self._lock:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            return int(stdout.readline())

    def end(self) -> None:
        """It ends by the end of its input."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


_starters: list[Starter] = []


def starter() -> Starter:
    """The one of this session."""
    if not _starters:
        _starters.append(Starter())
    return _starters[0]


def _serve() -> None:
    """Answer requests until there are no more. A terminal's Ctrl-C is for the tests."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    __import__(IMPORTED)
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _become(request["start"], request["environment"], request["log"])
        print(pid, flush=True)


def _become(arguments: list[str], environment: dict[str, str], log: str) -> None:
    """The forked process: the operator, from its arguments to its exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for opened, number in ((null, 0), (output, 1), (output, 2)):
        os.dup2(opened, number)
    sys.argv = [PROGRAM, *arguments]
    runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _serve()
