"""Test CPU quotas with processes that burn CPU.

A quota holds within a tenth, by control group and by duty cycle. It changes at run time and applies
to a restarted child, too. At any end it leaves no group and no stopped process behind.

Left out: cgroup v2 (recorded trees, tests/unit/environments): the machine has v1.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from attempts import first_that_holds
from dlion_api.names import Rank
from dlion_local.emulation.compute.quotas import (
    ControlGroupCpu,
    DutyCycledCpu,
    control_groups_unavailable,
    process_cpu_s,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlion_local.emulation.emulation import CpuLimiter

RANK = Rank(0)
BURN = "while True: sum(range(10000))"
SUPERVISE = (
    "import subprocess, sys\n"
    "while True:\n"
    f"    child = subprocess.Popen([sys.executable, '-c', {BURN!r}])\n"
    "    print(child.pid, flush=True); child.wait()\n"
)


@pytest.fixture(params=["controlGroup", "dutyCycle"])
def cpu(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CpuLimiter]:
    made: CpuLimiter
    if request.param == "controlGroup":
        if control_groups_unavailable():
            pytest.skip(control_groups_unavailable())
        made = ControlGroupCpu([RANK])
    else:
        made = DutyCycledCpu([RANK], tmp_path)
    made.start()
    folder = made.group(RANK) if isinstance(made, ControlGroupCpu) else None
    yield made
    made.close()
    made.close()
    assert folder is None or not folder.exists()


class Supervisor:
    """A process that restarts a burning child whenever it ends."""

    def __init__(self, cpu: CpuLimiter) -> None:
        enter = [
            sys.executable,
            "-m",
            "dlion_local.emulation.network.enter",
            *cpu.enter_arguments(RANK),
            "--",
        ]
        self._process = subprocess.Popen(
            [*enter, sys.executable, "-c", SUPERVISE],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        # A quota is a maximum, and a busy machine may give less: first to the session, where the
        # kernel schedules sessions, then to the process.
        sessions = Path(f"/proc/{self._process.pid}/autogroup")
        if os.geteuid() == 0 and sessions.exists():
            sessions.write_text("-15")
        self.child = self.next_child()

    def next_child(self) -> int:
        assert self._process.stdout is not None
        self.child = int(self._process.stdout.readline())
        if os.geteuid() == 0:
            os.setpriority(os.PRIO_PROCESS, self.child, -15)
        return self.child

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.kill(self.child, signal.SIGKILL)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def supervisor(cpu: CpuLimiter) -> Iterator[Supervisor]:
    made = Supervisor(cpu)
    yield made
    made.close()


def cores_used(pid: int, seconds: float) -> float:
    started_s, before_s = time.monotonic(), process_cpu_s(pid) or 0.0
    time.sleep(seconds)
    return ((process_cpu_s(pid) or 0.0) - before_s) / (time.monotonic() - started_s)


def usage(pid: int) -> tuple[float, float]:
    """Return the time and the CPU seconds that the process has used until then."""
    return time.monotonic(), process_cpu_s(pid) or 0.0


def held_to(cores: float, pid: int, since: tuple[float, float]) -> None:
    """Check that the average usage since then is the quota, within a tenth.

    A duty cycle without a processor for a moment stops its processes late, and compensates for it
    later: the average covers up to 20 seconds, from before the quota applied.
    """
    started_s, before_s = since

    def used() -> float:
        time.sleep(1)
        return ((process_cpu_s(pid) or 0.0) - before_s) / (time.monotonic() - started_s)

    first_that_holds(used, lambda found: 0.9 * cores <= found <= 1.1 * cores, attempts=20)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_quota_of_half_a_core_holds_and_changes_at_run_time(
    cpu: CpuLimiter, supervisor: Supervisor
) -> None:
    began = usage(supervisor.child)
    cpu.set_quota(RANK, 0.5)
    used_before_s = cpu.usage_s(RANK)[0]
    held_to(0.5, supervisor.child, began)
    assert cpu.usage_s(RANK)[0] - used_before_s >= 0.4
    assert cpu.usage_s(RANK)[1] > 0
    began = usage(supervisor.child)
    cpu.set_quota(RANK, 0.2)
    held_to(0.2, supervisor.child, began)


def test_a_quota_applies_to_a_restarted_child(cpu: CpuLimiter, supervisor: Supervisor) -> None:
    cpu.set_quota(RANK, 0.3)
    os.kill(supervisor.child, signal.SIGKILL)
    killed_s = time.monotonic()
    held_to(0.3, supervisor.next_child(), (killed_s, 0.0))


def test_a_worker_is_unlimited_before_and_after_its_quota(
    cpu: CpuLimiter, supervisor: Supervisor
) -> None:
    assert cpu.usage_s(RANK)[1] == 0
    cpu.set_quota(RANK, 0.1)
    time.sleep(0.3)
    cpu.set_quota(RANK, None)
    time.sleep(0.2)
    throttled_s = cpu.usage_s(RANK)[1]
    first_that_holds(lambda: cores_used(supervisor.child, 0.5), lambda cores: cores > 0.2)
    assert cpu.usage_s(RANK)[1] == throttled_s


def test_closing_removes_the_quota(cpu: CpuLimiter, supervisor: Supervisor) -> None:
    cpu.set_quota(RANK, 0.05)
    time.sleep(0.3)
    cpu.close()
    assert state_of(supervisor.child) != "T"
    first_that_holds(lambda: cores_used(supervisor.child, 0.5), lambda cores: cores > 0.2)


def test_an_ending_duty_cycle_continues_the_stopped_processes(tmp_path: Path) -> None:
    cpu = DutyCycledCpu([RANK], tmp_path)
    cpu.start()
    supervisor = Supervisor(cpu)
    try:
        cpu.set_quota(RANK, 0.02)
        end_s = time.monotonic() + 30
        while state_of(supervisor.child) != "T":
            assert time.monotonic() < end_s
            time.sleep(0.005)
        os.kill(cpu.process.pid, signal.SIGTERM)
        while not cpu.failure():
            assert time.monotonic() < end_s
            time.sleep(0.01)
        assert state_of(supervisor.child) != "T"
    finally:
        supervisor.close()
        cpu.close()


def test_a_duty_cycle_uses_little_cpu(tmp_path: Path) -> None:
    cpu = DutyCycledCpu([RANK], tmp_path)
    cpu.start()
    supervisor = Supervisor(cpu)
    try:
        cpu.set_quota(RANK, 0.2)
        assert cores_used(cpu.process.pid, 2.0) < 0.05
    finally:
        supervisor.close()
        cpu.close()
