"""Test the commands that the Python client starts.

- A command gets its manifest. Its output and its process id are kept beside the results.
- A command that fails immediately makes a failed job with its message, which can be deleted. An
  interrupted command makes an interrupted job.
- A process that ignores signals is killed with its group within a time limit. A process of this
  interpreter ends with it; a detached one continues.
- A reused process id does not count as the run, nor does a process as that of a copied folder.
- A start that fails or is interrupted leaves no process. A fork and several threads can start
  commands.

Left out: training (tests/local/test_python_client.py).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import dlion
from dlion import run_processes
from dlion.manifests import program_manifest
from dlion.run_processes import (
    RunCommand,
    end_process,
    exit_code,
    process_start,
    read_command,
    start_command,
)
from dlion_api.exit_codes import ExitCode

STUBBORN = """
import os, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    time.sleep(600)
print("ready", flush=True)
time.sleep(600)
"""
SLEEPER = "import time; print('ready', flush=True); time.sleep(600)"


def wait_for(holds, what: str, within_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


def started(code: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, process_group=0
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def group_members(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def test_a_command_that_fails_is_a_failed_job(tmp_path: Path) -> None:
    """The manifest reaches its standard input, and its message reaches the job."""
    folder = tmp_path / "job-1"
    folder.mkdir()
    text = json.dumps({"kind": "none"})
    start_command("local", ["validate", "-"], folder, text, tmp_path, detach=False)
    client = dlion.Client(root=tmp_path)
    command = read_command(folder)
    assert command is not None
    assert (command.backend, command.arguments) == ("local", ("validate", "-"))
    assert client.get_job("job-1").state in ("Pending", "Failed")
    wait_for(lambda: exit_code(folder) is not None, "the command ends")
    assert exit_code(folder) == ExitCode.SPEC
    job = client.get_job("job-1")
    assert (job.state, job.reason, job.workers) == ("Failed", "Failed", ())
    assert "apiVersion" in job.message
    assert "apiVersion" in "\n".join(client.get_job_logs("job-1", worker=None, follow=True))
    other = dlion.Client(root=tmp_path).list_jobs()
    assert [(each.name, each.state) for each in other] == [("job-1", "Failed")]
    client.delete_job("job-1")
    assert not folder.exists()


def test_a_job_that_another_thread_lists_while_it_starts_has_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread reads the folder before the command has written its manifest there."""
    client = dlion.Client(root=tmp_path)

    def start_and_list(backend: str, _: object, *others: Any, **options: Any) -> None:
        start_command(backend, ["validate", "-"], *others, **options)  # writes no manifest
        assert [job.workers for job in client.list_jobs()] == [()]

    monkeypatch.setattr("dlion.local_backend.start_command", start_and_list)
    job = client.train({**program_manifest("digits", 2, None)}, set={"trainer.stop.maxSteps": 1})
    assert len(job.workers) == 2
    wait_for(lambda: exit_code(tmp_path / job.name) is not None, "the command ends")


def test_a_command_that_ended_before_its_start_was_read_is_a_failed_job(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with subprocess.Popen(["false"], stdin=subprocess.PIPE) as child:
        wait_for(lambda: process_start(child.pid) is None, "a process does not end")
        run_processes._hand_over("local", ("run", "-"), folder, "", child)
    command = read_command(folder)
    assert command is not None
    assert not command.is_alive(folder)
    client = dlion.Client(root=tmp_path)
    assert client.get_job("run").state == "Failed"
    client.delete_job("run")
    assert not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_interrupted_at_its_start_is_an_interrupted_job(
    tmp_path: Path, number: signal.Signals
) -> None:
    folder = tmp_path / "job-1"
    folder.mkdir()
    start_command("local", ["run", "-"], folder, "{}", tmp_path, detach=False)
    command = read_command(folder)
    assert command is not None
    os.kill(command.pid, number)
    wait_for(lambda: exit_code(folder) is not None, "the command ends")
    assert exit_code(folder) == ExitCode.INTERRUPTED
    job = dlion.Client(root=tmp_path).get_job("job-1")
    assert (job.state, job.reason, job.message) == ("Failed", "Interrupted", "interrupted")
    run_processes.forget(folder)  # the state that another interpreter finds
    assert dlion.Client(root=tmp_path).get_job("job-1").reason == "Interrupted"


def test_a_process_that_ignores_signals_is_killed_with_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [(signal.SIGINT, 0.3), (signal.SIGTERM, 0.3), (signal.SIGKILL, 5.0)]
    monkeypatch.setattr(run_processes, "_STEPS", steps)
    process = started(STUBBORN)
    assert len(group_members(process.pid)) == 2
    began_s = time.monotonic()
    end_process(tmp_path, process.pid, process_start(process.pid) or 0)
    assert 0.6 <= time.monotonic() - began_s < 10
    wait_for(lambda: not group_members(process.pid), "its child is gone")
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()


def test_only_the_process_itself_ends_in_another_group(tmp_path: Path) -> None:
    """A run in a terminal has such a group: the client must not end its other members."""
    first = started(SLEEPER)
    second = subprocess.Popen(
        [sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, process_group=first.pid
    )
    assert second.stdout.readline() == b"ready\n"
    end_process(tmp_path, second.pid, process_start(second.pid) or 0)
    assert second.wait() in (-signal.SIGINT, 1)
    assert first.poll() is None
    first.kill()
    first.wait()
    first.stdout.close()
    second.stdout.close()


def test_a_reused_process_id_is_not_the_run(tmp_path: Path) -> None:
    with (tmp_path / "command.log").open("xb") as log:
        process = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=log)
    start = process_start(process.pid)
    assert start is not None
    assert RunCommand("local", process.pid, start, "", ()).is_alive(tmp_path)
    assert not RunCommand("local", process.pid, start - 1, "", ()).is_alive(tmp_path)
    end_process(tmp_path, process.pid, start - 1)  # of an ended process: no effect
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    process.kill()
    wait_for(lambda: process_start(process.pid) is None, "a zombie has ended")
    assert not RunCommand("local", process.pid, start, "", ()).is_alive(tmp_path)
    process.wait()


def test_a_process_that_a_file_names_is_not_ended_unless_it_uses_the_folder(tmp_path: Path) -> None:
    process = started(SLEEPER)
    (folder := tmp_path / "job").mkdir()
    about = {
        "backend": "local", "pid": process.pid, "started_ticks": process_start(process.pid),
        "created": "", "arguments": [],
    }  # fmt: skip
    (folder / "command.json").write_text(json.dumps(about))
    client = dlion.Client(root=tmp_path)
    assert client.get_job("job").state == "Failed"
    client.delete_job("job")
    assert not folder.exists()
    assert process.poll() is None
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{", "null", '{"backend": "local", "pid": "1"}', "[" * 100_000,
        '{"backend":"local","pid":-1,"started_ticks":1,"created":"","arguments":[]}',
        '{"backend":"local","pid":0,"started_ticks":1,"created":"","arguments":[]}',
        '{"backend":"local","pid":1e99,"started_ticks":1,"created":"","arguments":[]}',
        '{"backend":"local","pid":1,"started_ticks":1,"created":"","arguments":null}',
    ],
)  # fmt: skip
def test_a_damaged_command_file_counts_as_missing(tmp_path: Path, content: str) -> None:
    (tmp_path / "command.json").write_text(content)
    assert read_command(tmp_path) is None


def children() -> set[int]:
    """Return the children of this process, of all its threads."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(pid) for each in lists for pid in each.read_text().split()}


@pytest.mark.parametrize("detach", [True, False])
def test_a_start_that_fails_leaves_no_process(tmp_path: Path, detach: bool) -> None:
    (folder := tmp_path / "job").mkdir()
    (folder / "command.json" / "in-the-way").mkdir(parents=True)
    before = children()
    with pytest.raises(OSError, match=r"command\.json"):
        start_command("local", ["run", "-"], folder, "", tmp_path, detach=detach)
    assert (folder / "command.log").exists(), "the process was started"
    assert children() <= before
    assert exit_code(folder) is None, "the process is forgotten"


PARENT = """
import os, sys, time
from pathlib import Path
from dlion.run_processes import read_command, start_command
folder = Path(sys.argv[1])
# A command that reads its manifest and then works on: a watch of standard input's end would not.
start_command("local", ["--help"], folder, "", folder.parent, detach=sys.argv[2] == "detach")
print("started", flush=True)
{then}
"""


IN_A_FORK = """
is_parent = os.fork()
print(read_command(folder).is_alive(folder), flush=True)
is_parent or sys.exit()
os.wait()
print(read_command(folder).is_alive(folder))
"""


INTERRUPTED = """
import os, signal, sys, threading, time
from pathlib import Path
from dlion.run_processes import start_command
signal.signal(signal.SIGINT, signal.default_int_handler)
folder = Path(sys.argv[1])
def interrupt():
    while not (folder / "command.json").exists():
        time.sleep(0.02)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    # More than a pipe holds, to a command that does not read.
    text, detach = "x" * 1_000_000, sys.argv[2] == "detach"
    start_command("local", [], folder, text, folder.parent, detach=detach)
except KeyboardInterrupt:
    lists = Path("/proc/self/task").glob("*/children")
    print("interrupted", *[each.read_text() for each in lists if each.read_text()])
"""
IN_A_FORK_AND_HERE = """
import signal
(other := folder.with_name("other")).mkdir()
if os.fork() == 0:
    signal.alarm(30)
    start_command("local", ["--help"], other, "", folder.parent, detach=False)
    print(read_command(other).is_alive(other), flush=True)
    os._exit(0)
print(os.wait()[1] == 0)
"""


@pytest.fixture
def sleeping_command(tmp_path: Path) -> Iterator[Path]:
    """Return a folder for PYTHONPATH with a `dlion_cli` that sleeps instead of training."""
    package = tmp_path / "path" / "dlion_cli"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "import signal, time\n"
        "signal.pthread_sigmask(signal.SIG_SETMASK, ())\n"  # as `dlion` after it starts
        "time.sleep(600)"
    )
    yield package.parent
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"DLION_TEST_SLEEPER={tmp_path}".encode() in words:
                os.kill(int(entry.name), signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "then", "goes_on"),
    [
        ("bound", "", False),
        ("bound", "raise SystemExit(3)", False),
        ("bound", "os.kill(os.getpid(), 9)", False),
        ("bound", IN_A_FORK, False),
        ("bound", IN_A_FORK_AND_HERE, False),
        ("detach", "", True),
        ("detach", "os.kill(os.getpid(), 9)", True),
    ],
)
def test_a_command_ends_with_its_interpreter_unless_it_is_detached(
    tmp_path: Path, sleeping_command: Path, how: str, then: str, goes_on: bool
) -> None:
    (folder := tmp_path / "runs" / "job").mkdir(parents=True)
    environment = os.environ | {"DLION_TEST_SLEEPER": str(tmp_path)}
    # The parent needs the real package, its child the sleeping one.
    code = PARENT.format(then=then).replace(
        "folder = Path", f"os.environ['PYTHONPATH'] = {str(sleeping_command)!r}\nfolder = Path"
    )
    parent = subprocess.run(
        [sys.executable, "-c", code, str(folder), how],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "started" in parent.stdout, parent.stderr
    assert "Traceback" not in parent.stderr
    assert "False" not in parent.stdout, "a fork finds the command, and its exit ends no process"
    command = read_command(folder)
    assert command is not None
    if goes_on:
        assert command.is_alive(folder)
        assert dlion.Client(root=folder.parent).get_job("job").state == "Pending"
        dlion.Client(root=folder.parent).delete_job("job")
        assert not folder.exists()
    wait_for(lambda: not command.is_alive(folder), "the command has ended")


@pytest.mark.parametrize("how", ["bound", "detach"])
def test_ctrl_c_during_a_start_leaves_no_process(
    tmp_path: Path, sleeping_command: Path, how: str
) -> None:
    (folder := tmp_path / "job").mkdir()
    code = INTERRUPTED.replace(
        "folder = Path", f"os.environ['PYTHONPATH'] = {str(sleeping_command)!r}\nfolder = Path", 1
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(folder), how],
        env=os.environ | {"DLION_TEST_SLEEPER": str(tmp_path)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert process.stdout == "interrupted\n", process.stderr
    assert "Traceback" not in process.stderr


def test_threads_that_start_commands_together_share_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second starter thread would end without a reference, and its process with it."""
    made = []

    class SlowExecutor(ThreadPoolExecutor):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            time.sleep(0.3)
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(run_processes, "_spawners", [])
    monkeypatch.setattr(run_processes, "ThreadPoolExecutor", SlowExecutor)

    def start(number: int) -> Path:
        (folder := tmp_path / str(number)).mkdir()
        start_command("local", ["--version"], folder, "", tmp_path, detach=False)
        return folder

    with ThreadPoolExecutor(3) as threads:
        folders = [*threads.map(start, range(3))]
    for folder in folders:
        wait_for(lambda folder=folder: exit_code(folder) is not None, "the command ends")
        assert exit_code(folder) == ExitCode.OK
    assert len(made) == 1
    made[0].shutdown()


def test_a_copy_of_a_running_folder_does_not_run(
    tmp_path: Path, sleeping_command: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLION_TEST_SLEEPER", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(sleeping_command))
    (folder := tmp_path / "runs" / "job").mkdir(parents=True)
    start_command("local", [], folder, "", tmp_path, detach=False)
    shutil.copytree(folder, folder.with_name("copy"))
    client = dlion.Client(root=folder.parent)
    assert {job.name: job.state for job in client.list_jobs()} == {
        "job": "Pending",
        "copy": "Failed",
    }
    client.delete_job("copy")
    assert client.get_job("job").state == "Pending"
    client.delete_job("job")
    assert not folder.exists()
