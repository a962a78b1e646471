"""Removal of a testbed: everything with its name, and nothing else.

It works from names alone, so after any crash, at any point of `up`: processes by the testbed's
control groups, namespaces and the interface by their prefix, files by the testbed's folder. Mounts
are in the machines' own mount namespaces and end with their processes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from dlion_api.errors import UnavailableError
from dlion_local.emulation.network.in_namespace import run_batch
from testbed.groups import groups_of, kill_all, processes_in, remove_all
from testbed.layout import host_interface, prefix

NETWORK_NAMESPACES = Path("/run/netns")
INTERFACES = Path("/sys/class/net")


def network_namespaces(name: str) -> list[str]:
    """Names of the testbed's network namespaces."""
    if not NETWORK_NAMESPACES.is_dir():
        return []
    return sorted(
        p.name for p in NETWORK_NAMESPACES.iterdir() if p.name.startswith(f"{prefix(name)}-")
    )


def mounts_below(folder: Path) -> list[str]:
    """Mount points at or below that folder, in this mount namespace."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return sorted(point for point in points if Path(point).is_relative_to(folder))


def traces(name: str, folder: Path) -> list[str]:
    """Everything of the testbed that is on this machine; empty after the removal."""
    groups = groups_of(name)
    found = [f"process {pid}" for pid in sorted(processes_in(groups))]
    found += [f"control group {path}" for path in groups]
    found += [f"network namespace {each}" for each in network_namespaces(name)]
    found += [f"interface {host_interface(name)}"] * (INTERFACES / host_interface(name)).exists()
    found += [f"mount {point}" for point in mounts_below(folder)]
    found += [f"folder {folder}"] * folder.exists()
    return found


def remove(name: str, folder: Path) -> None:
    """Remove the testbed; no effect if it does not exist.

    Raises: UnavailableError that names what remains; OSError if a control group stays busy.
    """
    groups = groups_of(name)
    kill_all(groups)
    if (INTERFACES / host_interface(name)).exists():
        # At once: the kernel would remove it a little later than its namespace.
        run_batch("ip", None, [f"link del {host_interface(name)}"], check=False)
    run_batch("ip", None, [f"netns del {each}" for each in network_namespaces(name)], check=False)
    remove_all(groups)
    if mounted := mounts_below(folder):  # never remove files through a mount
        raise UnavailableError(f"something is mounted below {folder}: {', '.join(mounted)}")
    shutil.rmtree(folder, ignore_errors=True)
    if left := traces(name, folder):
        raise UnavailableError(f"testbed {name} was not removed whole: {'; '.join(left)}")
