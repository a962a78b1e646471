"""Starts the processes of a local run's workers, and the evaluator, by forking one process.

Importing TensorFlow takes a trainer seconds of CPU. A run of several workers imports it once: the
fork server does, and its children share the memory. Sidecars need nothing beyond it but their own
modules. A supervisor forks its trainer, so that a restart takes no import either. In a pod, each
worker starts its own programs.

`ForkServer` is the runner's side. `python -m dlion_local.runner.fork_server` is the server: a
request is a JSON line on standard input, answered by one on standard output. It has one Python
thread and has not used TensorFlow, so a fork copies no lock that another thread holds.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dlion_api.errors import UnavailableError
from dlion_local.emulation.compute.resource_owner import start_ticks
from dlion_local.emulation.line_process import LineProcess
from dlion_local.emulation.network.enter import enter
from dlion_worker.supervisor.parent_death import request_parent_death_signal
from dlion_worker.supervisor.process import CHILD_ENVIRONMENT, STOP_SIGNALS

SUPERVISOR = "dlion_worker.supervisor"
TRAINER = "dlion_worker.trainer"
EVALUATOR = "dlion_worker.evaluator"
SIDECAR = "dlion_worker.sidecar"
_FAILED = 1
_TITLE_ROOM = " " * 250
"""Children show their module and arguments in process listings in place of the server's."""


class ForkServer:
    """The server of one run, from `start` to `close`."""

    def __init__(self, log_dir: Path, environment: Mapping[str, str]) -> None:
        """`environment` is added to that of this process, for the server and its children."""
        # Titles must not overwrite the environment that /proc shows, so the arguments make room.
        added = {**CHILD_ENVIRONMENT, **os.environ, "SPT_NOENV": "1", **environment}
        self._process = LineProcess(
            "dlion_local.runner.fork_server", log_dir, environment=added, arguments=[_TITLE_ROOM]
        )
        self.start, self.failure = self._process.start, self._process.failure
        self.is_ready = False
        """Whether it has imported TensorFlow; until then `fork` blocks."""

    def fork(
        self, module: str, arguments: Sequence[str], *, enter: Sequence[str], log: Path
    ) -> ForkedProcess:
        """Fork a child that runs `main(arguments)` of the module's `__main__`.

        `enter` are flags of `emulation.network.enter`. The child's output is appended to `log`.
        SIGTERM is sent to it when the server ends.

        Raises UnavailableError if the server has ended.
        """
        request = {"module": module, "arguments": arguments, "enter": enter, "log": str(log)}
        pid = self._process.call(request)["pid"]
        self.is_ready = True
        return ForkedProcess(self._process, pid)

    def close(self) -> None:
        """End the server. Its children, if there are any, get SIGTERM."""
        if not self.is_ready:
            self._process.kill()  # it would see the end of its input only after its imports
        self._process.close()


class ForkedProcess:
    """A child of the server, with the part of `subprocess.Popen` that a process group uses."""

    def __init__(self, server: LineProcess, pid: int) -> None:
        self._server, self.pid = server, pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, -n if signal n ended it; None while it runs."""
        if self._code is None:
            try:
                self._code = self._server.call({"poll": self.pid})["code"]
            except UnavailableError:  # the server has ended, and its children got SIGTERM
                with contextlib.suppress(OSError):
                    if start_ticks(self.pid) is not None:
                        return None
                self._code = -signal.SIGTERM
        return self._code

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)


# ---- the server ----------------------------------------------------------------------------------


def serve() -> None:
    """Answer requests until the end of standard input."""
    request_parent_death_signal(os.getppid(), signal.SIGKILL)  # during the imports, too
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints is not an answer
    for module in (TRAINER, EVALUATOR, SIDECAR):
        importlib.import_module(f"{module}.__main__")
    gc.freeze()  # collecting in a child would copy the shared memory
    sys.stdout.flush()  # else each child would print it again
    codes: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            answer = {"code": _exit_code(request["poll"], codes)}
        else:
            answer = {"pid": _fork(request, answers)}
        os.write(answers, json.dumps(answer).encode() + b"\n")


def _exit_code(pid: int, codes: dict[int, int]) -> int | None:
    """Its exit code, also when asked again: an interrupt may have lost the first answer."""
    if pid not in codes:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            codes[pid] = os.waitstatus_to_exitcode(status)
    return codes.get(pid)


def _fork(request: Mapping[str, Any], answers: int) -> int:
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(answers)  # else the runner would not notice the end of the server
        _run_child(functools.partial(_start_requested, request, parent_pid))
    return pid


def _start_requested(request: Mapping[str, Any], parent_pid: int) -> int:
    # A separate session: Ctrl-C in the terminal reaches only the runner.
    os.setsid()
    request_parent_death_signal(parent_pid, signal.SIGTERM)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
    enter(request["enter"])
    keywords = {"start": _fork_trainer} if request["module"] == SUPERVISOR else {}
    return _run_module(request["module"], request["arguments"], **keywords)


def _fork_trainer(command: Sequence[str]) -> int:
    """Fork a supervisor's trainer; return its pid. In place of `supervisor.process.spawn`."""
    parent_pid = os.getpid()
    # The child must not handle them as its supervisor does: they wait until it has its own actions.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    pid = os.fork()
    if pid == 0:
        _run_child(functools.partial(_start_trainer, command, parent_pid))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with contextlib.suppress(OSError):  # the child does the same, maybe first
        os.setpgid(pid, pid)
    return pid


def _start_trainer(command: Sequence[str], parent_pid: int) -> int:
    os.setpgid(0, 0)
    request_parent_death_signal(parent_pid, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    for number in (*STOP_SIGNALS, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return _run_module(TRAINER, command[command.index(TRAINER) + 1 :])


def _run_module(module: str, arguments: Sequence[str], **keywords: Any) -> int:
    import numpy as np  # the runner's side, of the same file, starts sooner without it
    from setproctitle import setproctitle

    setproctitle(" ".join([module, *arguments]))
    np.random.seed()  # noqa: NPY002  # a program's own random numbers must differ among workers
    return int(importlib.import_module(f"{module}.__main__").main(arguments, **keywords))


def _run_child(run: Callable[[], int]) -> NoReturn:
    """Run, then exit without the handlers and buffers that belong to the parent."""
    code = _FAILED
    try:
        code = run()
    except SystemExit as error:  # wrong arguments
        code = error.code if isinstance(error.code, int) else _FAILED
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except BaseException:  # noqa: BLE001 - nothing of the parent may run in the child
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
    os._exit(0)  # without the teardown of TensorFlow
