"""Test control groups on recorded trees.

The tests cover the parent group of quotas under cgroup v1, v2, in a container and without rights.
They cover the files written and read there, and the owner of a leftover.

Left out: the effect of a quota (tests/local/test_quota), which needs a kernel.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from dlion_api.errors import UnavailableError
from dlion_local.emulation.compute.quotas import CpuController, find_controller, remove_stale
from dlion_local.emulation.compute.resource_owner import ResourceOwner

if TYPE_CHECKING:
    from pathlib import Path

V2_STAT = """usage_usec 2500000
user_usec 2000000
system_usec 500000
nr_periods 40
nr_throttled 21
throttled_usec 1250000
"""
V1_STAT = "nr_periods 40\nnr_throttled 21\nthrottled_time 1250000000\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "cgroup"


def proc(root: Path, text: str) -> Path:
    path = root / "self-cgroup"
    path.write_text(text)
    return path


def test_version_2_uses_the_nearest_group_with_a_cpu_controller(
    tmp_path: Path,
) -> None:
    sys_cgroup = tree(
        tmp_path,
        {
            "cgroup.controllers": "cpuset cpu io memory pids\n",
            "cgroup.subtree_control": "cpu io memory pids\n",
            "user.slice/cgroup.controllers": "cpu memory pids\n",
            "user.slice/cgroup.subtree_control": "cpu memory pids\n",
            "user.slice/user-0.slice/cgroup.controllers": "cpu memory pids\n",
            "user.slice/user-0.slice/cgroup.subtree_control": "memory pids\n",
            "user.slice/user-0.slice/session-1.scope/cgroup.controllers": "memory pids\n",
            "user.slice/user-0.slice/session-1.scope/cgroup.subtree_control": "\n",
        },
    )
    found = find_controller(
        sys_cgroup, proc(tmp_path, "0::/user.slice/user-0.slice/session-1.scope\n")
    )
    assert (found.version, found.parent) == (2, sys_cgroup / "user.slice/user-0.slice")
    # The group did not delegate it before, so that the program enabled it.
    assert (found.parent / "cgroup.subtree_control").read_text() == "+cpu"


def test_version_1_uses_the_group_of_this_process(tmp_path: Path) -> None:
    sys_cgroup = tree(tmp_path, {"cpu,cpuacct/batch/cpu.cfs_quota_us": "-1\n"})
    found = find_controller(sys_cgroup, proc(tmp_path, "4:cpu,cpuacct:/batch\n0::/\n"))
    assert (found.version, found.parent) == (1, sys_cgroup / "cpu,cpuacct/batch")


def test_version_1_in_a_container_uses_the_mount_itself(tmp_path: Path) -> None:
    sys_cgroup = tree(tmp_path, {"cpu/cpu.cfs_quota_us": "-1\n"})
    found = find_controller(sys_cgroup, proc(tmp_path, "4:cpu:/docker/0123abcd\n"))
    assert found.parent == sys_cgroup / "cpu"


def test_a_missing_cpu_controller_is_reported_with_the_reason(tmp_path: Path) -> None:
    sys_cgroup = tree(
        tmp_path, {"cgroup.controllers": "memory\n", "cgroup.subtree_control": "memory\n"}
    )
    with pytest.raises(UnavailableError, match="Delegate=yes"):
        find_controller(sys_cgroup, proc(tmp_path, "0::/\n"))


@pytest.mark.parametrize(
    ("version", "cores", "files"),
    [
        (2, 0.5, {"cpu.max": "25000 50000"}),
        (2, None, {"cpu.max": "max 50000"}),
        (2, 0.001, {"cpu.max": "1000 50000"}),
        (1, 1.5, {"cpu.cfs_quota_us": "75000", "cpu.cfs_period_us": "50000"}),
        (1, None, {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "50000"}),
    ],
)
def test_a_quota_is_written_in_the_form_of_the_version(
    tmp_path: Path, version: int, cores: float | None, files: dict[str, str]
) -> None:
    controller = CpuController(version, tmp_path)
    controller.write_quota(tmp_path, cores)
    assert {name: (tmp_path / name).read_text() for name in files} == files


def test_trainers_have_more_weight_than_other_processes(tmp_path: Path) -> None:
    CpuController(2, tmp_path).write_weight(tmp_path, 6)
    CpuController(1, tmp_path).write_weight(tmp_path, 100)
    assert (tmp_path / "cpu.weight").read_text() == "6000"
    assert (tmp_path / "cpu.shares").read_text() == "262144"


def test_throttling_and_use_are_read_in_seconds(tmp_path: Path) -> None:
    (tmp_path / "cpu.stat").write_text(V2_STAT)
    assert CpuController(2, tmp_path).throttled_s(tmp_path) == 1.25
    assert CpuController(2, tmp_path).used_s(tmp_path) == 2.5
    (tmp_path / "cpu.stat").write_text(V1_STAT)
    assert CpuController(1, tmp_path).throttled_s(tmp_path) == 1.25
    assert CpuController(1, tmp_path).used_s(tmp_path) is None


def test_an_owner_is_identified_by_its_process_and_its_start() -> None:
    mine = ResourceOwner.of_this_process()
    assert mine.alive()
    assert ResourceOwner.parse(f"{mine.next_prefix()}-w3") == mine
    assert not ResourceOwner(os.getpid(), mine.start_ticks + 1).alive()  # the process id was reused
    assert ResourceOwner.parse("dlionish-1-2-3") is None


def test_only_groups_without_a_living_owner_are_leftovers(tmp_path: Path) -> None:
    mine = ResourceOwner.of_this_process()
    gone = ResourceOwner(mine.pid, mine.start_ticks + 1).next_prefix()
    alive = mine.next_prefix()
    for name in (alive, "system.slice", "dlion"):
        (tmp_path / name).mkdir()
    (tmp_path / gone).mkdir()
    (tmp_path / gone / "w0").mkdir()
    assert remove_stale(tmp_path) == [gone]
    assert {path.name for path in tmp_path.iterdir()} == {alive, "system.slice", "dlion"}
