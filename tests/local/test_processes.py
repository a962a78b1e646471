"""Test the children of a ProcessGroup.

They run with their environment and log. They end within the bound, even if they ignore SIGTERM.
Signals of the terminal do not reach them, and they die with a killed runner.

Left out: what the children of a run do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import shell_children
from child_states import alive
from dlion_local.runner.processes import ProcessGroup
from shell_children import SHELL, shell_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LONG_S = 20.0
SUPPORT = Path(shell_children.__file__).parent


def wait_until(true: Callable[[], object], what: str) -> None:
    """Return as soon as the condition holds; fail if it never does."""
    began_s = time.monotonic()
    while not true():
        assert time.monotonic() - began_s < LONG_S, f"never: {what}"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessGroup]:
    folder = tmp_path_factory.mktemp("processes")
    with closing(shell_group(folder)) as group:
        group.preload()
        yield group


def start(group: ProcessGroup, name: str, script: str) -> int:
    return group.fork(name, SHELL, [script])


def test_a_child_has_its_environment_and_log(group: ProcessGroup) -> None:
    start(group, "one", 'echo "$A"; echo wrong >&2; exit 7')
    wait_until(lambda: group.poll()["one"] == 7, "ended")
    assert group.log_path("one").read_text() == "a\nwrong\n"


def test_children_are_polled_while_more_are_started(group: ProcessGroup) -> None:
    """As when Ctrl-C ends a run during its start."""
    names = [f"child-{number}" for number in range(20)]
    with ThreadPoolExecutor(1) as starter:
        started = [starter.submit(start, group, name, "true") for name in names]
        while not all(each.done() for each in started):
            group.poll()
    wait_until(lambda: {group.poll()[name] for name in names} == {0}, "all have ended")


def test_a_name_is_reusable_only_after_the_end_of_its_child(group: ProcessGroup) -> None:
    start(group, "again", "echo first")
    wait_until(lambda: not group.running(), "ended")
    start(group, "again", "echo second; exec sleep 60")
    wait_until(lambda: "second" in group.log_path("again").read_text(), "started")
    assert group.log_path("again").read_text() == "first\nsecond\n"
    with pytest.raises(ValueError, match="still runs"):
        start(group, "again", "true")
    with pytest.raises(ValueError, match="allowed"):
        start(group, "../again", "true")
    group.kill("again")
    wait_until(lambda: group.poll()["again"] == -signal.SIGKILL, "killed")


def test_all_children_end_within_the_bound_and_stubborn_ones_are_reported(
    group: ProcessGroup,
) -> None:
    mild = start(group, "mild", "echo on; exec sleep 60")
    stubborn = start(group, "stubborn", "trap '' TERM; echo on; while :; do sleep 0.05; done")
    for name in ("mild", "stubborn"):
        wait_until(lambda name=name: group.log_path(name).read_text(), f"{name} runs")  # type: ignore[misc]
    assert group.terminate(grace_s=2.0) == ("stubborn",)
    assert not alive(mild)
    assert not alive(stubborn)
    codes = group.poll()
    assert (codes["mild"], codes["stubborn"]) == (-signal.SIGTERM, -signal.SIGKILL)


def test_signals_of_the_terminal_do_not_reach_the_children(group: ProcessGroup) -> None:
    pid = start(group, "apart", "echo on; exec sleep 60")
    wait_until(lambda: group.log_path("apart").read_text(), "it runs")
    assert os.getsid(pid) == pid != os.getsid(0)


RUNNER = """
import sys, threading
from pathlib import Path
from shell_children import SHELL, shell_group

group = shell_group(Path(sys.argv[1]))
group.preload()
script = "trap '' HUP INT; echo on; while :; do sleep 0.05; done"
pids = []
# From a thread that ends at once: the children must not end with it.
thread = threading.Thread(target=lambda: pids.append(group.fork("one", SHELL, [script])))
thread.start()
thread.join()
supervisor = ("-m dlion_worker.supervisor --config none --max-restarts 3 "
              "--command sh -c 'echo $$; exec sleep 60'")
pids.append(group.fork("two", SHELL, [f"exec {sys.executable} {supervisor}"]))
print(*pids, flush=True)
threading.Event().wait()
"""


def test_a_killed_runner_leaves_nothing_behind(tmp_path: Path) -> None:
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", RUNNER, str(tmp_path)]
    variables = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdout is not None
        pids = [int(pid) for pid in runner.stdout.readline().split()]
        logs = tmp_path / "logs"
        wait_until(lambda: (logs / "one.log").read_text() == "on\n", "first child runs")

        def trainer() -> int:
            lines = (logs / "two.log").read_text().splitlines()
            return next((int(line) for line in lines if line.isdigit()), 0)

        wait_until(trainer, "supervised child runs")
        pids.append(trainer())
        time.sleep(0.2)
        assert all(map(alive, pids))
        runner.kill()
    wait_until(lambda: not any(map(alive, pids)), "all gone")
