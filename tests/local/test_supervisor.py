"""Test a real supervisor of a child process.

It restarts a killed child, ends with a fatal code, forwards SIGTERM, and kills a child that does
not react. It reaps adopted processes and leaves nothing behind. When it is killed, its child ends,
too. It copies the output of both to a file of bounded size in the same order. A full disk does not
stop the child.

Left out: back-off and counting over many restarts (tests/unit/worker/supervisor), a real trainer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from child_states import alive
from dlion_worker.rotated_log import MAX_LOG_BYTES, read_end

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LONG_S = 20.0


def wait_until(true: Callable[[], object], what: str) -> None:
    """Return as soon as the condition holds; fail if it never does."""
    began_s = time.monotonic()
    while not true():
        assert time.monotonic() - began_s < LONG_S, f"never: {what}"
        time.sleep(0.005)


class Supervised:
    """One supervisor over a shell script that appends its pids to a file."""

    def __init__(self, folder: Path, script: str, *flags: str) -> None:
        self.pid_file = folder / "pids"
        self.log = folder / "log"
        command = [
            sys.executable, "-m", "dlion_worker.supervisor", "--config", "none",
            "--max-restarts", "3", *flags, "--command", "sh", "-c", script,
        ]  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stderr=log, env={**os.environ, "PIDS": str(self.pid_file)}
            )

    def pids(self) -> list[int]:
        text = self.pid_file.read_text() if self.pid_file.exists() else ""
        return [int(line) for line in text.split("\n")[:-1]]

    def events(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def event_names(self) -> list[object]:
        return [event["supervisor"] for event in self.events()]


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., Supervised]]:
    made: list[Supervised] = []

    def start(script: str, *flags: str) -> Supervised:
        made.append(Supervised(tmp_path, script, *flags))
        return made[-1]

    yield start
    for each in made:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()
        wait_until(lambda each=each: not any(map(alive, each.pids())), "all gone")


NOTE = "echo $$ >> $PIDS; "


def test_a_killed_child_is_restarted(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise(NOTE + "exec sleep 60")
    wait_until(lambda: len(supervised.pids()) == 1, "started")
    killed_s = time.monotonic()
    os.kill(supervised.pids()[0], signal.SIGKILL)
    wait_until(lambda: len(supervised.pids()) == 2, "restarted")
    assert time.monotonic() - killed_s > 0.9
    # The child may run before the supervisor reports it.
    wait_until(lambda: supervised.event_names().count("started") == 2, "reported")
    assert supervised.event_names() == ["started", "exited", "restarting", "started"]
    assert supervised.events()[1]["signal"] == "SIGKILL"
    assert not alive(supervised.pids()[0])


@pytest.mark.parametrize("code", [0, 65, 75, 130])
def test_a_fatal_code_ends_the_supervisor_with_that_code(
    supervise: Callable[..., Supervised], code: int
) -> None:
    supervised = supervise(NOTE + f"exit {code}")
    assert supervised.process.wait(LONG_S) == code
    assert supervised.event_names() == ["started", "exited"]


def test_the_supervisor_gives_up_with_the_last_code(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise(NOTE + "exit 69", "--max-restarts", "1")
    assert supervised.process.wait(LONG_S) == 69
    assert len(supervised.pids()) == 2
    assert supervised.event_names()[-1] == "giving up"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_is_forwarded_and_the_childs_code_returned(
    supervise: Callable[..., Supervised], number: int
) -> None:
    name = signal.Signals(number).name.removeprefix("SIG")
    script = f"trap 'sleep 0.3; exit 130' {name}; {NOTE} while :; do sleep 0.05; done"
    supervised = supervise(script)
    wait_until(supervised.pids, "started")
    supervised.process.send_signal(number)
    assert supervised.process.wait(LONG_S) == 130
    assert supervised.event_names() == ["started", "stopping", "exited"]


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace_period(
    supervise: Callable[..., Supervised],
) -> None:
    script = f"trap '' TERM; {NOTE} while :; do sleep 0.05; done"
    supervised = supervise(script, "--grace-s", "0.5")
    wait_until(supervised.pids, "started")
    began_s = time.monotonic()
    supervised.process.terminate()
    assert supervised.process.wait(LONG_S) == 128 + signal.SIGKILL
    assert time.monotonic() - began_s > 0.4


def test_a_signal_before_a_restart_ends_the_supervisor(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise(NOTE + "exit 69")
    wait_until(lambda: "restarting" in supervised.event_names(), "waiting")
    supervised.process.terminate()
    assert supervised.process.wait(LONG_S) == 130


def test_processes_that_a_child_leaves_are_ended_and_reaped(
    supervise: Callable[..., Supervised],
) -> None:
    # One stays in the child's group, one creates its own session; both outlive the child.
    script = (
        "sleep 60 & echo $! >> $PIDS; setsid sh -c 'echo $$ >> $PIDS; exec sleep 60' & "
        "while [ $(wc -l < $PIDS) -lt 2 ]; do sleep 0.01; done; exit 66"
    )
    supervised = supervise(script)
    assert supervised.process.wait(LONG_S) == 66
    assert len(supervised.pids()) == 2
    wait_until(lambda: not any(map(alive, supervised.pids())), "gone")


def test_adopted_orphans_do_not_stay_as_zombies(supervise: Callable[..., Supervised]) -> None:
    # The middle process ends at once; its child is then the supervisor's, and ends later.
    script = "(sh -c 'echo $$ >> $PIDS; sleep 0.2' &) ; " + "exec sleep 60"
    supervised = supervise(script)
    wait_until(supervised.pids, "started")
    orphan = supervised.pids()[0]
    wait_until(lambda: not Path(f"/proc/{orphan}").exists(), "reaped")


def test_a_killed_supervisor_takes_its_child_with_it(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise(f"trap '' TERM INT HUP; {NOTE} while :; do sleep 0.05; done")
    wait_until(supervised.pids, "started")
    child = supervised.pids()[0]
    assert alive(child)
    supervised.process.kill()
    wait_until(lambda: not alive(child), "child gone")


def test_a_missing_command_is_reported() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "dlion_worker.supervisor", "--config", "none",
         "--max-restarts", "3", "--command", "no-such-command-anywhere"],
        capture_output=True, text=True, timeout=LONG_S, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert "no-such-command-anywhere" in result.stderr


def test_a_missing_configuration_is_a_clear_error(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "dlion_worker.supervisor", "--config", str(tmp_path / "none")],
        capture_output=True, text=True, timeout=LONG_S, check=False,
    )  # fmt: skip
    assert result.returncode == 65
    assert "none" in result.stderr


# ---- the copy of the output --------------------------------------------------------------------


def supervised_output(path: Path, script: str, stdout: int = subprocess.PIPE) -> tuple[int, bytes]:
    """Return the exit code and the output of a supervisor that keeps a copy at `path`."""
    done = subprocess.run(
        [sys.executable, "-m", "dlion_worker.supervisor", "--config", "none", "--max-restarts", "0",
         "--keep-output", str(path), "--command", "sh", "-c", script],
        stdout=stdout, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout or b""


def test_output_of_child_and_supervisor_is_kept_in_order(tmp_path: Path) -> None:
    path = tmp_path / "output" / "trainer.log"
    reported = f"until grep -qs started {path}; do sleep 0.01; done; "  # it may run before that
    script = "echo out; echo err >&2; echo out again; printf 'last words \033[2J\n' >&2; exit 67"
    script = reported + script
    code, printed = supervised_output(path, script)
    assert code == 67
    started, *others, exited = path.read_bytes().splitlines()
    assert others == [b"out", b"err", b"out again", b"last words \033[2J"]
    assert json.loads(started)["supervisor"] == "started"
    assert json.loads(exited)["code"] == 67
    assert printed == path.read_bytes()


def test_endless_output_uses_little_disk(tmp_path: Path) -> None:
    path = tmp_path / "output" / "trainer.log"
    script = "yes 'a worker that logs without end' | head -c 1000000000; echo; echo the end"
    assert supervised_output(path, script, subprocess.DEVNULL)[0] == 0
    assert sum(each.stat().st_size for each in path.parent.iterdir()) <= 2 * MAX_LOG_BYTES
    assert b"\nthe end\n" in read_end(path)


@pytest.mark.parametrize("where", ["/dev/full", "/proc/nowhere/trainer.log"])
def test_output_that_cannot_be_kept_does_not_stop_the_child(where: str) -> None:
    code, printed = supervised_output(Path(where), "echo one; sleep 0.1; echo two; exit 66")
    assert code == 66
    assert b"one\ntwo\n" in printed


def test_output_without_a_reader_does_not_stop_the_child(tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    with Path("/dev/full").open("wb") as full:
        code, _ = supervised_output(path, "seq 100000; exit 66", full.fileno())
    assert code == 66
    assert b"\n100000\n" in read_end(path)


def test_a_surviving_process_delays_the_end_by_seconds_only(tmp_path: Path) -> None:
    """The process has its own session, and the supervisor may not see it."""
    began_s = time.monotonic()
    code, _ = supervised_output(tmp_path / "log", "setsid sleep 30 & echo $!; exit 66")
    assert code == 66
    assert time.monotonic() - began_s < 15
