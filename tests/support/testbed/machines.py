"""A machine of a testbed: processes that share one network, one process tree, one set of mounts.

Each node and each control plane is one. Its first process (`pause`) starts in a separate control
group, enters the machine's network namespace and creates new process and mount namespaces. All
other processes join those. So a machine dies like a real one: when its first process ends, the
kernel ends all others, containers too, and removes every mount.

The machine has its own /var/lib, /var/log and /run. Programs find their usual paths, and a hostPath
below /var/lib differs from node to node.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dlion_api.errors import UnavailableError
from testbed.groups import Groups, processes_in

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SCRIPT = Path(__file__).with_name("machine.sh")
_START_TIMEOUT_S = 20.0
_POLL_S = 0.02
_children: list[subprocess.Popen[bytes]] = []
"""Children of this process that may still run, on any machine."""


@dataclass(frozen=True)
class Machine:
    """One machine, identified by its folder: `DIR/{lib,log,logs}`."""

    name: str
    netns: str
    folder: Path
    groups: Groups
    """Its control groups; those of its pods are below them."""
    pause: Path

    def boot(self) -> None:
        """Start its first process alone. The earlier content of /var/lib is kept.

        Raises: UnavailableError with the output.
        """
        for name in ("lib", "log", "logs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for stale in (self.folder / "lib").glob(".*.pid"):
            stale.unlink()
        self.groups.make()
        command = [
            "unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private",
            "--", "sh", str(SCRIPT), str(self.folder), str(self.pause),
        ]  # fmt: skip
        started = self._spawn("machine", ["--netns", self.netns], command)
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while self.first_process() is None:
            if started.poll() is not None or time.monotonic() > deadline_s:
                raise UnavailableError(
                    f"machine {self.name} did not start: {self._tail('machine')}"
                )
            time.sleep(_POLL_S)

    def first_process(self) -> int | None:
        """The id of its process 1 on the testbed's machine; None while it is off."""
        for pid in processes_in(self.groups.system):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/exe").resolve() == self.pause and _inner_pid(pid) == 1:
                    return pid
        return None

    def start(
        self, name: str, command: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> None:
        """Start a program on the machine; its output is appended to `log_path(name)`.

        Raises: UnavailableError if the machine is off, or if the program runs already.
        """
        first = self.first_process()
        if first is None:
            raise UnavailableError(f"machine {self.name} is off: start it before {name}")
        if self.process(name) is not None:
            raise UnavailableError(f"{name} runs already on {self.name}: stop it first")
        pid_file = self._pid_file(name)
        pid_file.unlink(missing_ok=True)
        where = ["nsenter", "--target", str(first), "--mount", "--pid", "--net", "--"]
        inner = ["sh", "-c", 'echo $$ >"$0.new"; mv "$0.new" "$0"; exec "$@"', str(pid_file)]
        started = self._spawn(name, [], [*where, *inner, *command], env=env)
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not pid_file.exists():
            if started.poll() is not None or time.monotonic() > deadline_s:
                raise UnavailableError(f"{name} on {self.name} did not start: {self._tail(name)}")
            time.sleep(_POLL_S)

    def run(self, *command: str, stdin: Path | None = None, timeout_s: float = 120) -> str:
        """Run a program on the machine to its end, with the input `stdin`; return its output.

        Raises: UnavailableError with its standard error.
        """
        first = self.first_process()
        if first is None:
            raise UnavailableError(f"machine {self.name} is off")
        where = ["nsenter", "--target", str(first), "--mount", "--pid", "--net", "--"]
        with (stdin or Path(os.devnull)).open("rb") as given:
            done = subprocess.run(
                [*self._enter([]), *where, *command],
                stdin=given,
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout_s,
            )
        if done.returncode != 0:
            raise UnavailableError(
                f"{' '.join(command)} on {self.name} failed with {done.returncode}: "
                f"{done.stderr.strip() or done.stdout.strip()}"
            )
        return done.stdout

    def process(self, name: str) -> int | None:
        """The process id, on the testbed's machine, of a program started by that name."""
        try:
            inner = int(self._pid_file(name).read_text())
        except (FileNotFoundError, ValueError):
            return None
        first = self.first_process()
        if first is None:
            return None
        world = _process_namespace(first)
        for pid in processes_in(self.groups.system):
            if _inner_pid(pid) == inner and _process_namespace(pid) == world:
                return pid
        return None

    def programs(self) -> dict[str, int | None]:
        """Every program ever started on the machine, with its process id while it runs."""
        files = sorted((self.folder / "lib").glob(".*.pid"))
        names = [path.name[1 : -len(".pid")] for path in files]
        return {name: self.process(name) for name in names}

    def signal(self, name: str, number: int) -> None:
        """Send a program a signal. Raises: UnavailableError if it does not run."""
        pid = self.process(name)
        if pid is None:
            raise UnavailableError(f"{name} does not run on {self.name}")
        parent = int(_stat(pid)[1])
        os.kill(pid, number)
        if number == signal.SIGCONT:  # nsenter stops when its child does
            os.kill(parent, number)

    def stop(self, name: str, timeout_s: float = 10.0) -> None:
        """Kill a program and wait for its end; no effect if it does not run."""
        pid = self.process(name)
        if pid is None:
            return
        self.signal(name, signal.SIGKILL)
        deadline_s = time.monotonic() + timeout_s
        # It leaves its namespaces and control group while other threads of it still hold its ports.
        while Path(f"/proc/{pid}").exists():
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"{name} on {self.name} did not end after SIGKILL")
            time.sleep(_POLL_S)

    def power_off(self) -> None:
        """Cut the power: every process of the machine ends at once."""
        self.groups.kill()

    def log_path(self, name: str) -> Path:
        """The log file of that program."""
        return self.folder / "logs" / f"{name}.log"

    def _pid_file(self, name: str) -> Path:
        return self.folder / "lib" / f".{name}.pid"

    def _tail(self, name: str) -> str:
        path = self.log_path(name)
        return path.read_text(errors="replace")[-2000:] if path.exists() else "it printed nothing"

    def _enter(self, flags: Sequence[str]) -> list[str]:
        groups = [flag for path in self.groups.system for flag in ("--cgroup", str(path))]
        return [sys.executable, "-m", "dlion_local.emulation.network.enter", *groups, *flags, "--"]

    def _spawn(
        self,
        name: str,
        flags: Sequence[str],
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        reap()
        with self.log_path(name).open("ab") as log:
            child = subprocess.Popen(
                [*self._enter(flags), *command],
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for the testbed, not for its machines
            )
        _children.append(child)
        return child


def reap() -> None:
    """Reap the ended children of this process; they would stay as zombies."""
    _children[:] = [child for child in _children if child.poll() is None]


def _stat(pid: int) -> list[str]:
    """State, parent, ... of a process."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def _inner_pid(pid: int) -> int | None:
    """The id of a process within its own process namespace; None once it has ended."""
    with contextlib.suppress(OSError):
        if _stat(pid)[0] not in "ZX":
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("NSpid:"):
                    return int(line.split()[-1])
    return None


def _process_namespace(pid: int) -> str:
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    return ""
