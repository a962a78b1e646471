"""Test the server that forks the processes of a run.

A forked child has its own session, log, title and random numbers. It runs the given function, and
reports its exit code and traceback. The server uses nothing that a fork would break, and its
children end with it. An interrupted request does not affect later ones. A server that still imports
closes at once.

Left out: supervisors and trainers, which all tests of local runs cover.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from attempts import first_that_holds
from dlion_api.errors import UnavailableError
from dlion_api.exit_codes import ExitCode
from dlion_local.runner.processes import ProcessGroup
from local_run import LONG_S, command_line

CHILD = """
import os, random, time
import numpy as np

def main(arguments):
    print(os.getsid(0), os.getpid(), random.random(), np.random.random(), *arguments, flush=True)
    if "wait" in arguments:
        time.sleep(60)
    if "fail" in arguments:
        raise RuntimeError("on request")
    return 7
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forked")
    package = folder / "forked_child"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(CHILD)
    return folder


def group_of(folder: Path) -> ProcessGroup:
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return ProcessGroup(folder, {"PYTHONPATH": path})


@pytest.fixture(scope="module")
def group(folder: Path) -> Iterator[ProcessGroup]:
    with closing(group_of(folder)) as group:
        group.preload()
        yield group


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_for_output(group: ProcessGroup, name: str) -> None:
    """Wait until the child has written to its log, which it makes itself."""
    path, deadline_s = group.log_path(name), time.monotonic() + LONG_S
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline_s, f"{name} has written nothing"
        time.sleep(0.02)


def output(group: ProcessGroup, name: str) -> str:
    deadline_s = time.monotonic() + LONG_S
    while group.poll()[name] is None and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return group.log_path(name).read_text()


def test_a_child_is_a_separate_process(group: ProcessGroup, folder: Path) -> None:
    pid_file = folder / "pid"
    pid = group.fork("one", "forked_child", ["a", "b"], enter=["--pid-file", str(pid_file)])
    group.fork("two", "forked_child", ["a", "b"])
    session, own, one_random, one_numpy, *arguments = output(group, "one").split()
    assert int(session) == int(own) == pid == int(pid_file.read_text())
    assert arguments == ["a", "b"]
    _, _, two_random, two_numpy, *_ = output(group, "two").split()
    assert one_random != two_random
    assert one_numpy != two_numpy
    assert group.poll() == {"one": 7, "two": 7}


def test_an_error_is_in_its_log(group: ProcessGroup) -> None:
    group.fork("failing", "forked_child", ["fail"])
    assert "RuntimeError: on request" in output(group, "failing")
    assert group.poll()["failing"] == 1
    group.fork("refusing", "dlion_worker.supervisor", ["--config", "/nowhere"])
    assert "/nowhere" in output(group, "refusing")
    assert group.poll()["refusing"] == ExitCode.SPEC
    assert group.failure() == ""


def test_a_child_has_its_title_and_reports_the_signal_that_ended_it(group: ProcessGroup) -> None:
    pid = group.fork("waiting", "forked_child", ["wait", "long"])
    wait_for_output(group, "waiting")
    assert command_line(pid) == ["forked_child", "wait", "long"]
    assert "PYTHONPATH" in Path(f"/proc/{pid}/environ").read_text()
    os.kill(pid, signal.SIGKILL)
    output(group, "waiting")
    assert group.poll()["waiting"] == -signal.SIGKILL


def test_the_server_has_started_no_thread_and_no_connection(group: ProcessGroup) -> None:
    """Exempt are the threads of linear algebra, which have hooks for a fork."""
    pid = group.fork("beside", "forked_child", ["wait"])
    server = Path(f"/proc/{parent(pid)}")
    names = {(task / "comm").read_text() for task in (server / "task").iterdir()}
    assert names == {(server / "comm").read_text()}, "gRPC's and TensorFlow's threads have names"
    targets = [str(entry.readlink()) for entry in (server / "fd").iterdir()]
    assert not [target for target in targets if target.startswith("socket:")]
    os.kill(pid, signal.SIGKILL)


def test_children_end_with_their_server(group: ProcessGroup) -> None:
    pid = group.fork("orphan", "forked_child", ["wait"])
    wait_for_output(group, "orphan")
    os.kill(parent(pid), signal.SIGKILL)
    output(group, "orphan")
    assert group.poll()["orphan"] == -signal.SIGTERM
    assert "fork server process has ended" in group.failure()
    with pytest.raises(UnavailableError, match="fork_server"):
        group.fork("late", "forked_child", [])


@pytest.fixture
def interrupting_signal() -> Iterator[signal.Signals]:
    """Return a signal that raises KeyboardInterrupt, as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield signal.SIGUSR1
    signal.signal(signal.SIGUSR1, before)


def test_an_interrupted_request_does_not_affect_later_ones(
    folder: Path, interrupting_signal: signal.Signals
) -> None:
    with closing(group_of(folder)) as group:
        group.preload()
        timer = threading.Timer(0.3, os.kill, (os.getpid(), interrupting_signal))
        timer.start()
        with pytest.raises(KeyboardInterrupt):  # the server still imports
            group.fork("first", "forked_child", ["a"])
        group.fork("second", "forked_child", ["wait"])
        wait_for_output(group, "second")
        assert output(group, "first").split()[-1] == "a"
        assert group.poll() == {"first": 7, "second": None}
        group.terminate()
        assert group.poll() == {"first": 7, "second": -signal.SIGTERM}


def test_a_server_that_still_imports_is_closed_at_once(tmp_path: Path) -> None:
    def closed_s() -> float:
        group = ProcessGroup(tmp_path)
        group.preload()
        began_s = time.monotonic()
        group.close()
        return time.monotonic() - began_s

    first_that_holds(closed_s, lambda took_s: took_s < 1)
