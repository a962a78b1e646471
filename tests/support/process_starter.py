"""Fast starts of operators, `dlion run` commands and workers' trainers, without their imports.

Two processes per test session, one of them with TensorFlow, have imported the modules and fork.
`OperatorProcess` uses it for operators of this tree with a kubeconfig, `LocalRun` for most runs and
`PodRun` for most pods. Others start their own Python. Two programs are forked indirectly: a run's
fork server with the run, as its child, and a pod's trainer by its supervisor.

This module is also the program of the forking processes, which read requests from standard input.
`start` forks a program; `wait` returns the exit code and the CPU seconds of one that has ended.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

RUN_MARK = "DLION_TEST_RUN"
"""A variable of all processes of one run, which /proc shows: 32 characters."""
OPERATOR, RUN, POD = "dlion_operator", "dlion_cli", "dlion_worker.pod"
KINDS = {OPERATOR: "operators", RUN: "training", POD: "training"}
IMPORTED = {
    "operators": ("dlion_operator.controller.process",),
    "training": (
        "dlion_cli.command_line",
        "dlion_cli.commands.local.run",
        "dlion_cli.local_runs.local_training",
        "dlion_worker.artifact_server.process",
        "dlion_worker.pod.__main__",
        "dlion_worker.sidecar.__main__",
        "dlion_worker.supervisor.__main__",
        "dlion_worker.trainer.__main__",
        "dlion_worker.evaluator.__main__",
    ),
}
"""The imports of a process that forks programs of that kind."""
FORK_SERVER = "dlion_local.runner.fork_server"
_TITLE_ROOM = " " * 250
"""Like that of a fork server: its children show their module and arguments there."""


@dataclass
class ForkedProgram:
    """A program that a starter has forked; used like a `subprocess.Popen`."""

    pid: int
    starter: Starter
    returncode: int | None = None
    _handle: int = field(init=False, default=-1)

    def __post_init__(self) -> None:
        self._handle = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """The exit code, once it has ended; negative for a signal."""
        return self._ended_within(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return the exit code. Raises: subprocess.TimeoutExpired."""
        code = self._ended_within(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal; no effect once it has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, number)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _ended_within(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._handle, select.POLLIN)
            if poll.poll(None if timeout_s is None else timeout_s * 1000):
                self.returncode = self.starter.reap(self.pid)
                os.close(self._handle)
        return self.returncode


class Starter:
    """The process that forks programs of one kind. Threads may share it."""

    def __init__(self, kind: str) -> None:
        self.reaped_cpu_s = 0.0
        """The CPU seconds of ended programs, and of the children that they waited for."""
        self._lock = threading.Lock()
        # -P: its own imports are the programs'. The other options are those of a fork server.
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, kind, _TITLE_ROOM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "MALLOC_ARENA_MAX": "2", "SPT_NOENV": "1", RUN_MARK: "0" * 32},
        )
        atexit.register(self.end)

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        stdout: Path | None = None,
    ) -> ForkedProgram:
        """Start `python -m` with that module and its arguments, in this process's folder.

        `log` gets its output, except what `stdout` gets.
        """
        log.touch()  # the forked process opens it later, and tests read it at once
        request = {"start": [*command], "environment": {**environment}, "log": str(log)}
        places = {"folder": str(Path.cwd()), "stdout": str(stdout or log)}
        return ForkedProgram(self._ask(request | places), self)

    def reap(self, pid: int) -> int:
        """Return the exit code of an ended program."""
        code, cpu_s = self._ask({"wait": pid})
        self.reaped_cpu_s += cpu_s
        return int(code)

    def _ask(self, request: dict[str, Any]) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with self._lock:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            return json.loads(stdout.readline())

    def end(self) -> None:
        """End it by closing its input."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


_starters: list[Starter] = []


@cache
def _starter_of(kind: str) -> Starter:
    _starters.append(Starter(kind))
    return _starters[-1]


def start(
    program: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    stdout: Path | None = None,
) -> ForkedProgram:
    """Fork `OPERATOR`, `RUN` or `POD` from this session's process for it; see `Starter.start`."""
    return _starter_of(KINDS[program]).start([program, *arguments], environment, log, stdout)


reported_cpu_s: dict[int, float] = {}
"""CPU seconds by process id, of children that report them and that are not waited for yet."""


def unwaited_cpu_s() -> float:
    """CPU seconds used for tests that the times of waited children lack.

    They belong to programs started here that have ended, and to children that report them.
    """
    return sum(each.reaped_cpu_s for each in _starters) + sum(reported_cpu_s.values())


# ---- the process that forks --------------------------------------------------------------------


def _serve(kind: str) -> None:
    """Answer requests until there are no more. A terminal's Ctrl-C is for the tests."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.dup(1)
    os.dup2(2, 1)  # the output of a library is not an answer
    mark = Mark()
    importlib.import_module("setproctitle").getproctitle()  # finds its room by the environment
    for module in IMPORTED[kind]:
        importlib.import_module(module)
    gc.freeze()  # garbage collection in a child would copy the shared memory
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        answer: object
        if "wait" in request:
            _, status, used = os.wait4(request["wait"], 0)
            answer = [os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime]
        else:
            answer = pid = os.fork()
            if pid == 0:
                os.close(answers)
                _become(request, mark)
        os.write(answers, json.dumps(answer).encode() + b"\n")


class Mark:
    """The mark of a run in the environment that /proc shows, which is that of the first program."""

    def __init__(self) -> None:
        getenv = ctypes.CDLL(None).getenv
        getenv.restype, getenv.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
        self._address = int(getenv(RUN_MARK.encode()))

    def write(self) -> None:
        """Write the value that `os.environ` has now."""
        mark = os.environ[RUN_MARK].encode()
        assert len(mark) == 32
        ctypes.memmove(self._address, mark, 32)


def _become(request: dict[str, Any], mark: Mark) -> NoReturn:
    """Run the program in the forked process, from its arguments to its exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also if all tests run under nohup
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    null = os.open(os.devnull, os.O_RDONLY)
    # A terminal opened before `setsid` does not become that of the program's session.
    output, errors = (
        os.open(request[name], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for name in ("stdout", "log")
    )
    for opened, number in ((null, 0), (output, 1), (errors, 2)):
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = request["start"]
    program = sys.argv[0]
    if program == RUN:
        os.setsid()  # as `LocalRun` starts others
        sys.path.insert(0, request["folder"])  # as with `python -m`
        _keep_a_fork_server(mark)
        mark.write()
    elif program == POD:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))  # as its shell does
        os.execv = _continue_in_this_process  # type: ignore[assignment]
    runpy.run_module(f"{program}.__main__", run_name="__main__", alter_sys=True)
    os._exit(0)


def _continue_in_this_process(_: str, command: Sequence[str]) -> NoReturn:
    """Replaces `os.execv`: continue as the sidecar, or as the supervisor that forks the trainer."""
    from dlion_local.runner.fork_server import SUPERVISOR, _fork_trainer

    python, flag, module, *arguments = command
    assert (python, flag) == (sys.executable, "-m"), command
    options = {"start": _fork_trainer} if module == SUPERVISOR else {}
    os._exit(importlib.import_module(f"{module}.__main__").main(arguments, **options))


def _keep_a_fork_server(mark: Mark) -> None:
    """Fork the process that becomes this run's fork server once the run starts it."""
    from dlion_local.emulation.line_process import LineProcess

    waiting, start = ServerInWaiting(mark), LineProcess.start

    def begin(self: LineProcess) -> None:
        if self._module == FORK_SERVER and not waiting.is_begun:
            self._errors_path.parent.mkdir(parents=True, exist_ok=True)
            waiting.begin(dict(self._environment or os.environ), self._errors_path)
            self._process = waiting  # type: ignore[assignment]
        else:
            start(self)

    LineProcess.start = begin  # type: ignore[method-assign]


class ServerInWaiting:
    """A child of this process that can become a fork server; used as its `subprocess.Popen`.

    Before that it has no mark: if the run never needs it, no check finds it as a leftover.
    """

    def __init__(self, mark: Mark) -> None:
        order, self._order = os.pipe()
        requests, own_requests = os.pipe()
        own_answers, answers = os.pipe()
        self.is_begun = False
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            for other in (self._order, own_requests, own_answers):
                os.close(other)
            _serve_on_order(order, requests, answers, mark)
        for other in (order, requests, answers):
            os.close(other)
        self.stdin = os.fdopen(own_requests, "wb")
        self.stdout = os.fdopen(own_answers, "rb")

    def begin(self, environment: dict[str, str], errors: Path) -> None:
        """Become the server."""
        self.is_begun = True
        with os.fdopen(self._order, "w") as order:
            json.dump({"environment": environment, "errors": str(errors)}, order)

    def poll(self) -> int | None:
        """The exit code, once it has ended."""
        return self._look(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return the exit code. Raises: subprocess.TimeoutExpired."""
        if self.returncode is None and timeout is not None:
            handle = os.pidfd_open(self.pid)
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            ended = poll.poll(timeout * 1000)
            os.close(handle)
            if not ended:
                raise subprocess.TimeoutExpired(FORK_SERVER, timeout)
        code = self._look(0)
        assert code is not None
        return code

    def kill(self) -> None:
        """Send SIGKILL."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _look(self, options: int) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, options)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _serve_on_order(order: int, requests: int, answers: int, mark: Mark) -> None:
    """The child: wait for the order; exit if the parent ends before."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(order) as read:
        order_text = read.read()
    if not order_text:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    os.environ.clear()
    os.environ.update(json.loads(order_text)["environment"])
    mark.write()
    errors = os.open(
        json.loads(order_text)["errors"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644
    )
    for opened, number in ((requests, 0), (answers, 1), (errors, 2)):
        os.dup2(opened, number)
        os.close(opened)
    serve: Callable[[], None] = importlib.import_module(FORK_SERVER).serve
    serve()
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1])
