"""Control groups of a testbed: they identify all its processes, however these started or ended.

Below `dlion-testbed-NAME` in every hierarchy each machine has a folder. In it, `system` holds the
machine's own programs, beside the groups that the kubelet makes for pods. Version 1 has one
hierarchy per controller, version 2 one for all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from dlion_api.errors import UnavailableError
from dlion_local.emulation.compute.quotas import SYS_CGROUP
from testbed.layout import control_group

_TRACKED = ("freezer", "pids")
"""Version 1: the hierarchies that a machine's own programs enter. They distribute no resource."""
_CPU_SHARES = {"cpu.shares": "8192", "cpu.weight": "800"}
"""CPU shares of all pods of a testbed together, for version 1 and 2: as much as eight other
processes of this machine. With the usual share of one process, all pods starve beside other
tests."""
_KILL_TIMEOUT_S = 20.0
_POLL_S = 0.05


def hierarchies(sys_cgroup: Path = SYS_CGROUP) -> list[Path]:
    """Roots of all hierarchies: one for version 2. Beside version 1 there may be an unused version
    2, in which runc makes groups too."""
    if (sys_cgroup / "cgroup.controllers").exists():
        return [sys_cgroup]
    found = {path.resolve() for path in sys_cgroup.iterdir() if (path / "cgroup.procs").exists()}
    return sorted(found)


@dataclass(frozen=True)
class Groups:
    """The control groups of one machine."""

    testbed: str
    machine: str

    @property
    def kubelet_root(self) -> str:
        """The group below which the kubelet puts pods."""
        return f"/{control_group(self.testbed)}/{self.machine}"

    @property
    def system(self) -> list[Path]:
        """The groups that the machine's own programs enter."""
        roots = hierarchies()
        if len(roots) > 1:
            roots = [root for root in roots if root.name in _TRACKED]
        return [root / self.kubelet_root.lstrip("/") / "system" for root in roots]

    def make(self) -> None:
        """Create them in every hierarchy. Raises: OSError if that is not allowed."""
        for root in hierarchies():
            folder = root
            for name in (control_group(self.testbed), self.machine):
                folder /= name
                folder.mkdir(exist_ok=True)
                _prepare(folder)
            for name, shares in _CPU_SHARES.items():
                if (path := root / control_group(self.testbed) / name).exists():
                    path.write_text(shares)
        for folder in self.system:
            folder.mkdir(exist_ok=True)

    def kill(self) -> None:
        """Kill all processes in them, pods too. Raises: UnavailableError if one stays."""
        kill_all([root / self.kubelet_root.lstrip("/") for root in hierarchies()])


def groups_of(name: str) -> list[Path]:
    """The top group of that testbed in every hierarchy that has one."""
    tops = [root / control_group(name) for root in hierarchies()]
    return [top for top in tops if top.is_dir()]


def processes_in(folders: list[Path]) -> set[int]:
    """Every process in these groups and in their subgroups."""
    found: set[int] = set()
    for group in _with_those_below(folders):
        with contextlib.suppress(OSError):  # a group may end meanwhile
            found |= {int(line) for line in (group / "cgroup.procs").read_text().split()}
    return found - {0}


def kill_all(folders: list[Path]) -> None:
    """Send SIGKILL until none is left. Raises: UnavailableError that names the remaining ones."""
    deadline_s = time.monotonic() + _KILL_TIMEOUT_S
    while pids := processes_in(folders):
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"processes remain after SIGKILL: {sorted(pids)}")
        _thaw(folders)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def remove_all(folders: list[Path]) -> None:
    """Remove empty groups, the innermost first. Raises: OSError if one stays busy."""
    for path in sorted(_with_those_below(folders), key=lambda p: -len(p.parts)):
        _remove(path)


def _with_those_below(folders: list[Path]) -> list[Path]:
    """These groups and all subgroups.

    A group may disappear meanwhile when its last process ends. `os.walk`, unlike `Path.rglob`
    before Python 3.13, continues then.
    """
    return [Path(name) for folder in folders for name, _, _ in os.walk(folder)]


def _remove(path: Path) -> None:
    deadline_s = time.monotonic() + _KILL_TIMEOUT_S
    while True:
        try:
            path.rmdir()
        except FileNotFoundError:
            return
        except OSError:  # an ended process leaves its group a little later
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_POLL_S)
        else:
            return


def _prepare(folder: Path) -> None:
    """Prepare the group for processes.

    Version 1: set its processors and memory before a process enters it. Version 2: set the
    controllers of its children.
    """
    for name in ("cpuset.cpus", "cpuset.mems"):
        here, above = folder / name, folder.parent / name
        if here.exists() and above.exists() and not here.read_text().strip():
            here.write_text(above.read_text())
    control = folder / "cgroup.subtree_control"
    if control.exists():
        for controller in (folder / "cgroup.controllers").read_text().split():
            control.write_text(f"+{controller}")


def _thaw(folders: list[Path]) -> None:
    for group in _with_those_below(folders):
        for name, running in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
            with contextlib.suppress(OSError):
                (group / name).write_text(running)
