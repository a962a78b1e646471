"""Test the object that applies an environment by either backend and removes it again.

Quotas hold from `apply_quota` to `remove_quota`. Changes are applied at their times, and one that
cannot be applied is a failure. The result has each requested value beside the achieved one. That
includes each change of a quota, latency that could not be applied, and one measurement of links.
Calls after the end do nothing.

Left out: how exact each backend is (test_network_namespaces, test_network_relay, test_quota).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from attempts import first_that_holds
from dlion_api.document import parse
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_environments.model import Environment
from dlion_environments.plan import Plan, unlimited_plan
from dlion_local.emulation.compute.quotas import control_groups_unavailable
from dlion_local.emulation.emulation import (
    LINKS_MEASURED_ONCE_NOTE,
    CpuBackend,
    EmulatedEnvironment,
    LinkBackend,
    enter_command,
)
from dlion_local.emulation.network.namespaces import namespaces_unavailable
from dlion_results.run_folder.environment import LATENCY, QUOTA

ROOT_MISSING = namespaces_unavailable() or control_groups_unavailable()
PRIVILEGED = [
    pytest.param(False, id="unprivileged"),
    pytest.param(
        True,
        id="root",
        marks=[pytest.mark.root, pytest.mark.skipif(bool(ROOT_MISSING), reason=ROOT_MISSING)],
    ),
]
WORKERS = tuple(
    WorkerIdentity(Rank(rank), SiteName(site), "g", rank) for rank, site in enumerate("aab")
)
BURN = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"


def plan(latency_ms: float = 0) -> Plan:
    document = {
        "name": "test",
        "workers": [{"count": 3, "cores": 1}],
        "coreScale": 0.2,
        "sites": [{"name": "a", "workers": 2}, {"name": "b", "workers": 1}],
        "insideSites": {"mbitPerS": 40},
        "betweenSites": {"mbitPerS": 10, "latencyMs": latency_ms},
        "changes": [{"at": {"seconds": 0.2}, "betweenSitesMbitPerS": 5, "cores": [2, 1, 1]}],
    }
    return parse(Environment, document).plan(WORKERS, 2)


def children(word: str) -> list[int]:
    """Return the child processes whose command line has that word."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread may end meanwhile
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return [pid for pid in found if word in command_line(pid)]


def command_line(pid: int) -> str:
    with suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


@pytest.mark.parametrize("privileged", PRIVILEGED)
def test_a_plan_is_applied_changed_measured_and_removed(privileged: bool, tmp_path: Path) -> None:
    environment = EmulatedEnvironment(plan(), work_dir=tmp_path, privileged=privileged)
    with closing(environment):
        environment.start()
        expected = {
            False: (LinkBackend.RELAY, CpuBackend.DUTY_CYCLE),
            True: (LinkBackend.NAMESPACES, CpuBackend.CONTROL_GROUP),
        }
        assert (environment.link_backend, environment.cpu_backend) == expected[privileged]
        addresses = environment.network.link_addresses(Rank(0))
        assert bool(addresses) is not privileged
        if addresses:
            assert addresses.keys() == {
                *("1/exchange", "1/measuring", "2/exchange", "2/measuring"),
            }

        def rates() -> list[float]:
            compared = environment.measure_links(1.0)
            assert [(c.rank, c.peer) for c in compared] == [(0, 1), (1, 2), (2, 0)]
            assert [c.requested for c in compared] == [40, 10, 10]
            return [(c.measured or 0.0) / (c.requested or 1.0) for c in compared]

        first_that_holds(rates, lambda them: min(them) >= 0.85 and max(them) <= 1.1)
        worker = subprocess.Popen(
            [*enter_command(environment.enter_arguments(Rank(0))), sys.executable, "-c", BURN],
            start_new_session=True,
        )
        try:
            time.sleep(0.5)
            environment.apply_quota(Rank(0))
            changed: list[float] = []
            started_s = time.monotonic()
            environment.start_changes(
                lambda: time.monotonic() - started_s, lambda change: changed.append(change.time_s)
            )
            time.sleep(5)  # a late turn of the duty cycle is compensated after a short window
            environment.remove_quota(Rank(0))
            compared = environment.requested_and_measured()
        finally:
            os.killpg(worker.pid, 9)
            worker.wait()
        assert changed == [0.2]
        before, after = [c for c in compared if c.quantity == QUOTA]
        assert (before.begins_s, before.requested) == (0.0, 0.2)
        assert (after.begins_s, after.requested) == (0.2, 0.4)
        assert after.measured is not None
        assert after.measured <= 1.15 * 0.4
        assert environment.notes[2:] == (LINKS_MEASURED_ONCE_NOTE,)
        assert environment.failure() == ""
    environment.close()
    environment.apply_quota(Rank(0))  # a worker that was ready too late
    environment.remove_quota(Rank(0))


@pytest.mark.root
@pytest.mark.skipif(bool(ROOT_MISSING), reason=ROOT_MISSING)
def test_a_change_that_cannot_be_applied_is_a_failure(tmp_path: Path) -> None:
    environment = EmulatedEnvironment(plan(), work_dir=tmp_path, privileged=True)
    with closing(environment):
        environment.start()
        assert environment.failure() == ""
        marks = f"dlion-{os.getpid()}-"
        for name in (entry.name for entry in Path("/run/netns").iterdir() if marks in entry.name):
            subprocess.run(["ip", "netns", "delete", name], check=True)
        environment.start_changes(lambda: 1.0)
        deadline_s = time.monotonic() + 10
        while not environment.failure() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert "the change at 0.2 s" in environment.failure()


def test_a_quota_after_the_end_of_the_duty_cycle_is_a_failure(tmp_path: Path) -> None:
    environment = EmulatedEnvironment(plan(), work_dir=tmp_path, privileged=False)
    with closing(environment):
        environment.start()
        (duty_cycle,) = children("duty_cycle")
        os.kill(duty_cycle, signal.SIGKILL)
        environment.remove_quota(Rank(0))  # at once, before a check for failures
        environment.apply_quota(Rank(1))
        assert "the duty cycle process has ended" in environment.failure()


def test_latency_uses_the_relay_by_default(tmp_path: Path) -> None:
    environment = EmulatedEnvironment(plan(latency_ms=10), work_dir=tmp_path)
    assert environment.link_backend is LinkBackend.RELAY


@pytest.mark.root
@pytest.mark.skipif(bool(ROOT_MISSING), reason=ROOT_MISSING)
def test_latency_that_cannot_be_applied_is_recorded(tmp_path: Path) -> None:
    environment = EmulatedEnvironment(plan(latency_ms=10), work_dir=tmp_path, privileged=True)
    with closing(environment):
        environment.start()
        figures = environment.requested_and_measured()
    latencies = [figure for figure in figures if figure.quantity == LATENCY]
    assert {(figure.rank, figure.peer) for figure in latencies} == {
        *((0, 2), (1, 2), (2, 0), (2, 1)),
    }
    assert all(figure.measured is None for figure in latencies)
    assert all("not imposed" in figure.note for figure in latencies)


def test_without_an_environment_nothing_is_started(tmp_path: Path) -> None:
    environment = EmulatedEnvironment(unlimited_plan(WORKERS), work_dir=tmp_path)
    with closing(environment):
        environment.start()
        assert environment.enter_arguments(Rank(0)) == []
        assert environment.sidecar_arguments(Rank(0)) == []
        assert environment.network.link_addresses(Rank(0)) == {}
        assert environment.network.port(Rank(0), "exchange") == 0
        environment.apply_quota(Rank(0))
        assert environment.requested_and_measured() == []
    assert list(tmp_path.iterdir()) == []
