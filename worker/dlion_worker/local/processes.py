"""The child processes of `dlion run`: started with a log file each, ended together, none left.

Called by the local runner for supervisors, sidecars and relays. Every child is tethered: it dies
with this process, even where that is killed. Every child leads a session of its own: a terminal's
Ctrl-C reaches the runner alone, which then ends the run in order. Does not restart anything.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

from dlion_worker.supervisor.tether import tethered

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_POLL_S = 0.02
KILLED_WITHIN_S = 1.0
"""How long the kernel may take to end a process after SIGKILL before we give up on it."""


class ProcessGroup:
    """Named child processes with logs in `<results_dir>/logs`; a context that ends them all."""

    def __init__(self, results_dir: Path | str) -> None:
        self._logs = Path(results_dir) / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        # A tethered child dies with the *thread* that started it: this one outlives them all.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dlion-start")

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        enter: Sequence[str] = (),
        dies_by: int = signal.SIGKILL,
    ) -> int:
        """Starts a child and yields its pid; its output goes to `log_path(name)`, appended.

        `env` is added to this process's environment. `enter` is put before the command (to enter
        a namespace, say); it must *become* the command, not fork it. `dies_by`: the signal that
        it gets when this process dies; after SIGTERM it has to end by itself. A name may be used
        again once its child has ended.

        Raises:
            ValueError: the name is not fit for a file, or its child still runs.
            OSError: the log cannot be written.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"process name {name!r}; allowed: letters, digits, '.', '_', '-'")
        if name in self._children and self._children[name].poll() is None:
            raise ValueError(f"process {name} still runs (pid {self._children[name].pid})")
        environment = {**os.environ, **(env or {})}
        with self.log_path(name).open("ab") as log:
            return self._starter.submit(
                self._spawn, name, tethered([*enter, *command], dies_by), environment, log
            ).result()

    def _spawn(
        self, name: str, command: Sequence[str], environment: dict[str, str], log: IO[bytes]
    ) -> int:
        """In the starter's thread: a Ctrl-C in the caller cannot come between start and list."""
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._children[name] = child
        return child.pid

    def log_path(self, name: str) -> Path:
        """Where that child's output stands."""
        return self._logs / f"{name}.log"

    def poll(self) -> dict[str, int | None]:
        """Every child's exit code, None while it runs, -n where signal n ended it."""
        return {name: child.poll() for name, child in self._children.items()}

    def running(self) -> tuple[str, ...]:
        """Names of the children that run."""
        return tuple(name for name, code in self.poll().items() if code is None)

    def send(self, name: str, number: int) -> None:
        """Sends one child a signal; nothing happens if it has ended."""
        self._children[name].send_signal(number)

    def terminate(self, grace_s: float = 5.0) -> tuple[str, ...]:
        """Ends every child: SIGTERM, then SIGKILL for what still runs after `grace_s`.

        Returns within `grace_s` plus a second, with the names of those that had to be killed.
        """
        for name in self.running():
            self._children[name].terminate()
        self._wait(grace_s)
        late = self.running()
        for name in late:
            self._kill(self._children[name])
        self._wait(KILLED_WITHIN_S)
        return late

    def close(self, grace_s: float = 5.0) -> None:
        """Ends every child and the thread that started them; nothing can be started after."""
        self.terminate(grace_s)
        self._starter.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _wait(self, at_most_s: float) -> None:
        deadline_s = time.monotonic() + at_most_s
        while self.running() and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)

    def _kill(self, child: subprocess.Popen[bytes]) -> None:
        # The child leads its session and is not reaped: the group is its own, and nobody else's.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
