"""CPU quotas: hard ones by cgroup v1 (`cpu.cfs_quota_us`) or v2 (`cpu.max`), or by duty cycle.

A worker's group is created without a quota, below this process's control group.
`emulation.network.enter` moves its processes into it; the quota is set and changed while they run.
Shares and weights would not do: they let a worker use what others leave.
"""

import errno
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlion_api.errors import UnavailableError
from dlion_api.names import Rank
from dlion_local.emulation.compute.resource_owner import ResourceOwner
from dlion_local.emulation.line_process import LineProcess

log = logging.getLogger(__name__)

PERIOD_S = 0.05
"""Half the kernel's default, for shorter pauses. 0.02 core stays the kernel's minimum (1 ms in each
period)."""
MIN_QUOTA_CORES = 0.001 / PERIOD_S
SYS_CGROUP = Path("/sys/fs/cgroup")
PROC_CGROUP = Path("/proc/self/cgroup")
_REMOVE_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class CpuController:
    """A folder in which groups with CPU quotas can be created, and its cgroup version."""

    version: int
    parent: Path

    def write_quota(self, group: Path, cores: float | None) -> None:
        """Set the group's quota; None removes it."""
        period_us = round(PERIOD_S * 1e6)
        quota_us = None if cores is None else max(1000, round(cores * period_us))
        if self.version == 2:
            text = f"{'max' if quota_us is None else quota_us} {period_us}"
            (group / "cpu.max").write_text(text)
            return
        (group / "cpu.cfs_period_us").write_text(str(period_us))
        (group / "cpu.cfs_quota_us").write_text(str(-1 if quota_us is None else quota_us))

    def write_weight(self, group: Path, count: int) -> None:
        """Give the group the weight of ten processes per worker.

        With the default weight all trainers together would count as one process. They would not
        reach their quotas on a busy machine.
        """
        if self.version == 2:
            (group / "cpu.weight").write_text(str(min(10_000, 1000 * count)))
        else:
            (group / "cpu.shares").write_text(str(min(262_144, 10_240 * count)))

    def throttled_s(self, group: Path) -> float:
        """Seconds for which the group was throttled, over all processors."""
        stat = _cpu_stat(group)
        if self.version == 2:
            return int(stat["throttled_usec"]) / 1e6
        return int(stat["throttled_time"]) / 1e9

    def used_s(self, group: Path) -> float | None:
        """CPU seconds of the group; None for version 1, which counts them in another controller."""
        return None if self.version == 1 else int(_cpu_stat(group)["usage_usec"]) / 1e6


def _cpu_stat(group: Path) -> dict[str, str]:
    return dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())


def process_cpu_s(pid: int) -> float | None:
    """CPU seconds of a process with all its threads; None if it has ended.

    Reads the process's CPU clock (`clock_getcpuclockid` in C): one call, in nanoseconds.
    /proc/<pid>/stat counts in hundredths of a second.
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return None


def find_controller(
    sys_cgroup: Path = SYS_CGROUP, proc_cgroup: Path = PROC_CGROUP
) -> CpuController:
    """Find where quotas can be set on this machine.

    Raises UnavailableError with the reason and what to do.
    """
    memberships = {}
    for line in proc_cgroup.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        memberships[controllers] = path
    for controllers, path in memberships.items():
        if "cpu" in controllers.split(","):
            return _version_1(sys_cgroup, controllers, path)
    if "" in memberships and (sys_cgroup / "cgroup.controllers").exists():
        return _version_2(sys_cgroup, memberships[""])
    raise UnavailableError(
        f"no cpu controller under {sys_cgroup}: control groups cannot set quotas here"
    )


def _version_1(sys_cgroup: Path, controllers: str, path: str) -> CpuController:
    mounts = [sys_cgroup / controllers, sys_cgroup / "cpu", sys_cgroup / "cpu,cpuacct"]
    for mount in mounts:
        # In a container the path is the host's, and the mount is already that folder.
        for parent in (mount / path.lstrip("/"), mount):
            if (parent / "cpu.cfs_quota_us").exists() or (parent / "cgroup.procs").exists():
                if os.access(parent, os.W_OK):
                    return CpuController(1, parent)
                raise UnavailableError(f"{parent} is not writable: run as root to set quotas")
    raise UnavailableError(f"the cpu controller (cgroup v1) is not mounted under {sys_cgroup}")


def _version_2(sys_cgroup: Path, path: str) -> CpuController:
    """The nearest group at or above this process's that may delegate the cpu controller.

    A group that holds processes may not, except the root, so it is rarely this process's own.
    """
    own = sys_cgroup / path.lstrip("/")
    for parent in (own, *own.parents):
        if not parent.is_relative_to(sys_cgroup):
            break
        control = parent / "cgroup.subtree_control"
        if not control.exists() or not os.access(control, os.W_OK):
            continue
        if "cpu" in control.read_text().split():
            return CpuController(2, parent)
        if "cpu" not in (parent / "cgroup.controllers").read_text().split():
            continue
        try:
            control.write_text("+cpu")
        except OSError:  # the group holds processes
            continue
        return CpuController(2, parent)
    raise UnavailableError(
        f"no group from {own} upwards may delegate the cpu controller (cgroup v2): run as root, or "
        "under `systemd-run --user --scope -p Delegate=yes`"
    )


def control_groups_unavailable() -> str:
    """Why control groups cannot set quotas, and what to do; empty if they can."""
    try:
        find_controller()
    except (UnavailableError, OSError) as error:
        return str(error)
    return ""


class ControlGroupCpu:
    """One control group per worker, without a quota until `set_quota`."""

    _controller: CpuController
    _folder: Path | None = None

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks
        self._process_cpu_s: dict[Rank, tuple[dict[str, float], float]] = {}

    def start(self) -> None:
        """Create the groups, after removing what crashed runs left.

        Raises UnavailableError if there is no writable cpu controller.
        """
        self._controller = controller = find_controller()
        remove_stale(controller.parent)
        self._folder = controller.parent / ResourceOwner.of_this_process().next_prefix()
        self._folder.mkdir()
        if controller.version == 2:
            (self._folder / "cgroup.subtree_control").write_text("+cpu")
        controller.write_weight(self._folder, len(self._ranks))
        for rank in self._ranks:
            self.group(rank).mkdir()

    def group(self, rank: Rank) -> Path:
        assert self._folder is not None, "start() made it"
        return self._folder / f"w{rank}"

    def enter_arguments(self, rank: Rank) -> list[str]:
        """Flags for `dlion_local.emulation.network.enter`."""
        return ["--cgroup", str(self.group(rank))]

    def set_quota(self, rank: Rank, cores: float | None) -> None:
        """Set the worker's quota in cores; None removes it."""
        self._controller.write_quota(self.group(rank), cores)

    def usage_s(self, rank: Rank) -> tuple[float, float]:
        """CPU seconds of the worker's processes, and seconds for which it was throttled.

        Ended processes are included (version 1: up to their last reading).
        """
        group, controller = self.group(rank), self._controller
        used_s = controller.used_s(group)
        if used_s is None:
            known, gone_s = self._process_cpu_s.get(rank, ({}, 0.0))
            now = {pid: process_cpu_s(int(pid)) or 0.0 for pid in _pids(group)}
            gone_s += sum(seconds for pid, seconds in known.items() if pid not in now)
            self._process_cpu_s[rank] = (now, gone_s)
            used_s = gone_s + sum(now.values())
        return used_s, controller.throttled_s(group)

    def failure(self) -> str:
        """Empty: the kernel does not fail."""
        return ""

    def close(self) -> None:
        """Remove the groups; remaining processes go to the parent. May be called twice."""
        if self._folder is not None:
            remove_groups(self._folder, self._controller.parent)
            self._folder = None


class DutyCycledCpu:
    """Quotas without root, with the interface of `ControlGroupCpu`: by the duty-cycle process."""

    def __init__(self, ranks: Sequence[Rank], work_dir: Path) -> None:
        self._pid_files = {rank: work_dir / f"w{rank}.pid" for rank in ranks}
        self.process = LineProcess("dlion_local.emulation.compute.duty_cycle", work_dir)
        self.failure, self.close = self.process.failure, self.process.close

    def start(self) -> None:
        """Start the duty-cycle process; no worker has a quota yet."""
        for path in self._pid_files.values():
            path.unlink(missing_ok=True)  # left by an earlier run
        self.process.start()
        self.process.call({"pid_files": {r: str(path) for r, path in self._pid_files.items()}})

    def enter_arguments(self, rank: Rank) -> list[str]:
        return ["--pid-file", str(self._pid_files[rank])]

    def set_quota(self, rank: Rank, cores: float | None) -> None:
        """Set the quota of the processes under the worker's supervisor; None removes it."""
        self.process.call({"rank": rank, "quota_cores": cores})

    def usage_s(self, rank: Rank) -> tuple[float, float]:
        """CPU seconds of the throttled processes, and how long they have been stopped."""
        answer = self.process.call({})
        return float(answer["used_s"][str(rank)]), float(answer["stopped_s"][str(rank)])


def remove_stale(parent: Path) -> list[str]:
    """Remove the groups of runs whose owner has ended. Return their names."""
    removed = []
    for folder in parent.iterdir():
        owner = ResourceOwner.parse(folder.name) if folder.is_dir() else None
        if owner is not None and not owner.alive():
            log.warning("removing control groups of a run that has ended: %s", folder)
            remove_groups(folder, parent)
            removed.append(folder.name)
    return removed


def remove_groups(folder: Path, parent: Path) -> None:
    """Remove a run's groups; remaining processes are moved out and lose their quota.

    Raises OSError if a group stays busy for seconds.
    """
    if not folder.exists():
        return
    give_up_s = time.monotonic() + _REMOVE_TIMEOUT_S
    for group in (*(child for child in folder.iterdir() if child.is_dir()), folder):
        while True:
            for pid in _pids(group):
                _move(pid, parent)
            try:
                group.rmdir()
                break
            except FileNotFoundError:  # removed by another process
                break
            except OSError:
                if time.monotonic() > give_up_s:
                    raise
                time.sleep(0.02)  # an ended process leaves its group with a delay


def _pids(group: Path) -> list[str]:
    try:
        return (group / "cgroup.procs").read_text().split()
    except OSError as error:  # it may vanish between opening and reading
        if error.errno not in (errno.ENOENT, errno.ENODEV):
            raise
        return []


def _move(pid: str, parent: Path) -> None:
    try:
        (parent / "cgroup.procs").write_text(pid)
    except OSError as error:  # it has ended, or (v2) the parent may not hold processes
        log.debug("process %s stays: %s", pid, error)
