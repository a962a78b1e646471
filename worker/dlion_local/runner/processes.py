"""The child processes of `dlion run`: forked with log files, and all ended together.

Used for supervisors, sidecars and the evaluator. A child gets SIGTERM when this process dies, even
by SIGKILL. Each child has its own session, so that a terminal's Ctrl-C reaches only the runner.
Nothing is restarted here.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dlion_local.runner.fork_server import ForkedProcess, ForkServer

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_POLL_S = 0.02
KILL_TIMEOUT_S = 1.0
"""How long the kernel may take to end a process after SIGKILL."""


class ProcessGroup:
    """Named child processes with logs in `<results_dir>/logs`, until `close`."""

    def __init__(
        self, results_dir: Path | str, fork_environment: Mapping[str, str] | None = None
    ) -> None:
        """`fork_environment` is added to the environment of the children."""
        self._logs = Path(results_dir) / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._children: dict[str, ForkedProcess] = {}
        self._fork_server = ForkServer(self._logs, fork_environment or {})
        self.failure = self._fork_server.failure
        self.preload = self._fork_server.start
        """Starts importing what the children need; does not wait."""
        self._is_closed = False
        # In a thread that Ctrl-C cannot interrupt between a child's start and its registration.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dlion-start")

    def fork(
        self, name: str, module: str, arguments: Sequence[str], *, enter: Sequence[str] = ()
    ) -> int:
        """Start a child that runs a module's `main` without importing it again; return its pid.

        `preload` must have been called. Its output is appended to `log_path(name)`. `enter` are
        flags of `emulation.network.enter`. A name may be reused once its child has ended.

        Raises:
            ValueError: the name is not valid for a file, or its child still runs.
            OSError: the log cannot be written.
            UnavailableError: the fork server has ended.
        """
        self._check_name(name)
        self.log_path(name).touch()
        return self._starter.submit(self._fork, name, module, arguments, enter).result()

    def _check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"process name {name!r}; allowed: letters, digits, '.', '_', '-'")
        if name in self._children and self._children[name].poll() is None:
            raise ValueError(f"process {name} still runs (pid {self._children[name].pid})")

    def _fork(self, name: str, module: str, arguments: Sequence[str], enter: Sequence[str]) -> int:
        child = self._fork_server.fork(module, arguments, enter=enter, log=self.log_path(name))
        self._children[name] = child
        return child.pid

    def log_path(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def poll(self) -> dict[str, int | None]:
        """Every child's exit code: None while it runs, -n if signal n ended it."""
        children = list(self._children.items())  # the starter's thread may add one meanwhile
        return {name: child.poll() for name, child in children}

    def running(self) -> tuple[str, ...]:
        return tuple(name for name, code in self.poll().items() if code is None)

    def terminate(self, grace_s: float = 5.0) -> tuple[str, ...]:
        """End every child: SIGTERM, then SIGKILL after `grace_s`.

        Returns within `grace_s` plus a second, with the names of those that were killed.
        """
        for name in self.running():
            self._children[name].terminate()
        self._wait(grace_s)
        late = self.running()
        for name in late:
            self._kill(self._children[name].pid)
        self._wait(KILL_TIMEOUT_S)
        return late

    def kill(self, name: str) -> None:
        """End a child by SIGKILL, with no chance to act; its own children die with it."""
        if self._children[name].poll() is None:
            self._kill(self._children[name].pid)

    @staticmethod
    def _kill(pid: int) -> None:
        """Kill a child that is not yet reaped, so that its id is not reused, and its children."""
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:  # it leads no session yet, and has no children
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self, grace_s: float = 5.0) -> None:
        """End every child, the fork server and the starter thread. May be called twice.

        No child can be started afterwards.
        """
        if self._fork_server.is_ready and not self._is_closed:
            self._starter.submit(int).result()  # a child that is being started is then known
        self._is_closed = True
        self.terminate(grace_s)
        self._fork_server.close()
        self._starter.shutdown()

    def _wait(self, at_most_s: float) -> None:
        deadline_s = time.monotonic() + at_most_s
        while self.running() and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
