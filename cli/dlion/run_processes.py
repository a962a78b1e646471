"""Starts `dlion` commands as separate processes, and ends them with all that they started.

A process leads a session, so that Ctrl-C in a terminal or a notebook does not reach it. Unless it
is detached, it ends with this interpreter: at its exit, and by the kernel if it is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from dlion_api.atomic_file import write_atomically
from dlion_api.errors import UnavailableError
from dlion_cli.terminal.interruption import SIGNALS
from dlion_results.run_folder.layout import COMMAND, COMMAND_LOG, LOCK
from dlion_worker.supervisor.parent_death import bound_to_parent

_MAX_BYTES: Final = 1 << 20
_STEPS: Final = ((signal.SIGINT, 10.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0))
"""Signals, and seconds to wait after each: `dlion run` ends within five after the first."""
_POLL_S: Final = 0.02


@dataclass(frozen=True)
class RunCommand:
    """The content of `command.json`: a command and its process, on this machine."""

    backend: str
    pid: int
    started_ticks: int
    """Start of the process, in clock ticks since boot: a process id may be used again. 0: it ended
    before that could be read."""
    created: str
    arguments: tuple[str, ...]

    def is_alive(self, folder: Path) -> bool:
        """Whether the process runs, and works on that folder: a copy of it has the same numbers."""
        with _lock:
            child = _own_child(folder)
            if child is not None and child.pid == self.pid:
                return child.poll() is None
        return process_start(self.pid) == self.started_ticks and uses_folder(self.pid, folder)


_lock = threading.Lock()
_spawners: list[ThreadPoolExecutor] = []
"""At most one executor, of this process."""
_children: dict[Path, tuple[int, subprocess.Popen[bytes]]] = {}
"""Children of this interpreter by folder, each with the process that started it: a fork inherits
the table."""
_bound: set[Path] = set()
"""Folders of the runs that end with this interpreter."""


def start_command(
    backend: str, arguments: Sequence[str], folder: Path, manifest: str, cwd: Path, *, detach: bool
) -> None:
    """Start `dlion ARGUMENTS` with the manifest as standard input; output goes to `command.log`.

    `folder` exists and is empty. With `detach` the process outlives this interpreter. Raises:
    OSError. After an error or Ctrl-C there is no process.
    """
    command = [sys.executable, "-P", "-m", "dlion_cli", *arguments]

    def spawn() -> subprocess.Popen[bytes]:
        # The command inherits the mask. A signal waits until it handles signals, and unblocks them.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        with (folder / COMMAND_LOG).open("xb") as log:
            child = subprocess.Popen(
                command if detach else bound_to_parent(command, signal.SIGTERM),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=cwd,
                start_new_session=True,
            )
        with _lock:
            _children[folder] = os.getpid(), child
            if not detach:
                _bound.add(folder)
        return child

    # The kernel binds a process to the thread that starts it, so that thread has to live on. Ctrl-C
    # does not reach it: a process that it starts is always in the table.
    spawned = _spawner().submit(spawn)
    try:
        _hand_over(backend, arguments, folder, manifest, spawned.result())
    except BaseException:
        if not spawned.cancel():
            wait([spawned])
        with _lock:
            child = _own_child(folder)
        if child is not None:
            end_process(folder, child.pid, process_start(child.pid) or 0)
            assert child.stdin is not None
            with contextlib.suppress(OSError):  # what it has not read
                child.stdin.close()
        forget(folder)
        raise


def _hand_over(
    backend: str,
    arguments: Sequence[str],
    folder: Path,
    manifest: str,
    child: subprocess.Popen[bytes],
) -> None:
    """Write `command.json`, and then the manifest to the command."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    started = process_start(child.pid)
    about = RunCommand(backend, child.pid, started or 0, created, tuple(arguments))
    write_atomically(folder / COMMAND, json.dumps(asdict(about)).encode() + b"\n", mode=0o644)
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin:
        # The command creates its files after it has read the manifest, so after command.json.
        child.stdin.write(manifest.encode())


def read_command(folder: Path) -> RunCommand | None:
    """The command that was started for the folder; None if there is none, or it is unreadable."""
    path = folder / COMMAND
    try:
        if not path.is_file() or path.is_symlink():
            return None
        with path.open("rb") as file:
            stored = json.loads(file.read(_MAX_BYTES))
        return RunCommand(
            backend="simulated" if stored["backend"] == "simulated" else "local",
            pid=_number(stored["pid"], least=1),
            started_ticks=_number(stored["started_ticks"], least=0),
            created=str(stored["created"]),
            arguments=tuple(str(each) for each in stored["arguments"]),
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _number(value: object, *, least: int) -> int:
    if not isinstance(value, int) or not least <= value < 1 << 63:
        raise ValueError("no such number")
    return value


def exit_code(folder: Path) -> int | None:
    """The exit code of the folder's command; None while it runs, or if another process began it."""
    with _lock:
        child = _own_child(folder)
        return None if child is None else child.poll()


def _own_child(folder: Path) -> subprocess.Popen[bytes] | None:
    """The folder's command, if this process and no parent of it has started it. Needs the lock."""
    owner, child = _children.get(folder, (0, None))
    return child if owner == os.getpid() else None


def forget(folder: Path) -> None:
    """The folder's command has ended, and its folder is gone."""
    with _lock:
        _children.pop(folder, None)
        _bound.discard(folder)


def process_start(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if it has ended."""
    try:
        # The name in parentheses may hold anything.
        stat = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        has_ended = stat[0] in (b"Z", b"X")
        # The first thread may end before others of the process.
        if has_ended and sum(1 for _ in Path(f"/proc/{pid}/task").iterdir()) < 2:
            return None
    except OSError:
        return None
    return int(stat[19])


def uses_folder(pid: int, folder: Path) -> bool:
    """Whether the process has the folder's lock or log open.

    A number in a file may be of a process on another machine, or of any process at all.
    """
    try:
        own = [path.stat() for name in (LOCK, COMMAND_LOG) if (path := folder / name).exists()]
        return any(
            os.path.samestat(each.stat(), one)
            for each in Path(f"/proc/{pid}/fd").iterdir()
            if each.readlink().name in (LOCK, COMMAND_LOG)
            for one in own
        )
    except OSError:
        return False


def end_process(folder: Path, pid: int, started_ticks: int) -> None:
    """End the process and, if it leads one, its group: SIGINT, SIGTERM, then SIGKILL.

    Returns once it has ended, within twenty seconds. Raises: UnavailableError if it has not, or
    belongs to another user.
    """
    # Another process that has the number now is not the run.
    leads = _leads_group(pid) and process_start(pid) in (started_ticks, None)
    for number, within_s in _STEPS:
        if _is_gone(folder, pid, started_ticks):
            break
        try:
            os.killpg(pid, number) if leads else os.kill(pid, number)
        except ProcessLookupError:
            break
        except PermissionError:
            raise UnavailableError(
                f"{folder}: process {pid} of another user runs it. Have that user end it"
            ) from None
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s and not _is_gone(folder, pid, started_ticks):
            time.sleep(_POLL_S)
    if leads:  # what it has left behind
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    if not _is_gone(folder, pid, started_ticks):
        raise UnavailableError(f"{folder}: process {pid} does not end, even by SIGKILL. Retry")


def _is_gone(folder: Path, pid: int, started_ticks: int) -> bool:
    with _lock:
        child = _own_child(folder)
        if child is not None and child.pid == pid:
            # Its first thread may end before others: then it has no exit code yet.
            return child.poll() is not None
    return process_start(pid) != started_ticks


def _leads_group(pid: int) -> bool:
    try:
        return os.getpgid(pid) == pid
    except ProcessLookupError:
        return False


def _spawner() -> ThreadPoolExecutor:
    with _lock:
        if not _spawners:
            atexit.register(_end_bound)
            _spawners.append(ThreadPoolExecutor(1, thread_name_prefix="dlion-start"))
        return _spawners[0]


def _begin_in_fork() -> None:
    """A fork has this module's values, but no thread of its parent."""
    _spawners.clear()
    _lock.release()


os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_begin_in_fork
)


def _end_bound() -> None:
    """End the runs that this interpreter started, all at once. Called at its exit."""
    with _lock:
        running = [
            (folder, child.pid)
            for folder in _bound
            if (child := _own_child(folder)) is not None and child.poll() is None
        ]
    threads = [threading.Thread(target=_end_quietly, args=(folder, pid)) for folder, pid in running]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _end_quietly(folder: Path, pid: int) -> None:
    with contextlib.suppress(UnavailableError):
        end_process(folder, pid, process_start(pid) or 0)
