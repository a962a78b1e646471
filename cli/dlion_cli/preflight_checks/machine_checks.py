"""Checks of this machine for `dlion doctor`: CPU, memory, disks, loopback, emulation."""

import os
import platform
import re
import shutil
import socket
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Final

from dlion_cli.preflight_checks.checks import Check, CheckOutcome
from dlion_cli.preflight_checks.software_checks import MACHINE
from dlion_cli.preflight_checks.timed_checks import TimedCheck
from dlion_cli.terminal.formatting import format_bytes

WORKER_BYTES: Final = 1.5e9
"""Memory of one worker: TensorFlow, a small model, the sidecar."""
MIN_BYTES: Final = 0.5e9
"""Less memory does not hold TensorFlow."""
LOW_DISK_BYTES: Final = 1e9
MIN_DISK_BYTES: Final = 50e6
SLOW_DISK_BYTES_PER_S: Final = 4e6
"""Less than a slow memory card. At this rate a checkpoint of 100 MB takes half a minute."""
_BLOCK_BYTES: Final = 512 * 1024
_BLOCKS: Final = 16
_WRITES_FOR_S: Final = 2.0
_LOOPBACK_TIMEOUT_S: Final = 2.0
_CPU_FEATURES: Final = ("avx", "avx2", "fma")
"""TensorFlow's wheels need the first and are much faster with the others."""


def machine_checks() -> list[TimedCheck]:
    """The checks, which have not run yet."""
    # `tempfile` silently takes another folder than an unusable TMPDIR.
    temporary = Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
    disks = {"disk": Path(), "temporary files": temporary}
    return [
        TimedCheck(MACHINE, "cpu", cpu_check),
        TimedCheck(MACHINE, "memory", memory_check),
        *(
            TimedCheck(
                MACHINE,
                name,
                partial(disk_check, name, path),
                late_advice="The disk does not answer: check it, or use another",
            )
            for name, path in disks.items()
        ),
        TimedCheck(MACHINE, "loopback", loopback_check),
        TimedCheck(MACHINE, "emulation", emulation_check),
    ]


def cpu_check(root: Path = Path("/"), machine: str = "") -> Check:
    """Cores, quota and instructions. `root` replaces `/` in tests."""
    from dlion_worker.sidecar.node_facts import read_node_facts

    cores = len(os.sched_getaffinity(0))
    quota = read_node_facts(root).quota_cores
    usable = min(cores, quota or cores)
    observed = f"{cores} cores" + ("" if quota is None else f", of which a quota leaves {quota:g}")
    figures = {"cores": float(cores), "usable_cores": float(usable)}
    missing = _missing_features(root) if (machine or platform.machine()) == "x86_64" else []
    if missing:
        observed += f"; without {', '.join(missing)}"
    if "avx" in missing:
        advice = "TensorFlow's wheels need AVX: use another machine, or set the VM's CPU model"
        return Check(MACHINE, "cpu", CheckOutcome.FAIL, observed, advice, figures)
    if usable < 1:
        advice = "Raise the quota of the container (limits.cpu, docker run --cpus)"
        return Check(MACHINE, "cpu", CheckOutcome.WARN, observed, advice, figures)
    if missing:
        advice = "Steps take longer: set the VM's CPU model to that of its host"
        return Check(MACHINE, "cpu", CheckOutcome.WARN, observed, advice, figures)
    return Check(MACHINE, "cpu", CheckOutcome.OK, observed, figures=figures)


def _missing_features(root: Path) -> list[str]:
    try:
        text = (root / "proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return []
    match = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return [each for each in _CPU_FEATURES if each not in match[1].split()] if match else []


def memory_check(root: Path = Path("/")) -> Check:
    """Whether there is memory for a worker. `root` replaces `/` in tests."""
    from dlion_worker.sidecar.node_facts import read_node_facts

    facts = read_node_facts(root)
    known = [each for each in (facts.memory_available_bytes, facts.memory_limit_bytes) if each]
    if not known:
        return Check(MACHINE, "memory", CheckOutcome.UNKNOWN, "/proc/meminfo cannot be read")
    free = min(known)
    observed = f"{format_bytes(facts.memory_available_bytes)} available"
    if facts.memory_limit_bytes is not None:
        observed += f", limit of the control group {format_bytes(facts.memory_limit_bytes)}"
    figures = {"memory_bytes": free}
    if free >= WORKER_BYTES:
        return Check(MACHINE, "memory", CheckOutcome.OK, observed, figures=figures)
    outcome = CheckOutcome.WARN if free >= MIN_BYTES else CheckOutcome.FAIL
    advice = f"Free some, or raise the limit: a worker takes about {format_bytes(WORKER_BYTES)}"
    return Check(MACHINE, "memory", outcome, observed, advice, figures)


def disk_check(name: str, folder: Path) -> Check:
    """Whether files can be written to that folder, how fast, and how much room it has."""
    where = folder.resolve()
    try:
        rate = _write_rate(where)
        free = float(shutil.disk_usage(where).free)
    except OSError as error:
        observed = f"{where}: {error.strerror}"
        advice = "Make it writable or free some space (df -h); for temporary files, set TMPDIR"
        return Check(MACHINE, name, CheckOutcome.FAIL, observed, advice)
    observed = f"{where}: {format_bytes(free)} free, writes {format_bytes(rate)}/s to the disk"
    figures = {"free_bytes": free, "written_bytes_per_s": rate}
    needed = [] if free >= LOW_DISK_BYTES else ["Free some space (df -h)"]
    if rate < SLOW_DISK_BYTES_PER_S:
        observed += ", which is slow"
        needed += ["Checkpoints and logs wait for it: see what else uses it, or take another disk"]
    outcome = CheckOutcome.WARN if needed else CheckOutcome.OK
    outcome = outcome if free >= MIN_DISK_BYTES else CheckOutcome.FAIL
    return Check(MACHINE, name, outcome, observed, ". ".join(needed), figures)


def _write_rate(folder: Path) -> float:
    """Bytes per second that reach the disk of that folder; writes 8 MiB at most, for about two
    seconds. Raises: OSError."""
    block, began_s, written = os.urandom(_BLOCK_BYTES), time.monotonic(), 0
    with tempfile.TemporaryFile(dir=folder) as file:  # without a name: a late check leaves no file
        while True:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            written += _BLOCK_BYTES
            took_s = time.monotonic() - began_s
            if took_s > _WRITES_FOR_S or written >= _BLOCKS * _BLOCK_BYTES:
                return written / max(took_s, 1e-6)


def loopback_check(host: str = "127.0.0.1") -> Check:
    """Whether processes of this machine can connect to each other, as workers do."""
    try:
        with socket.create_server((host, 0)) as server:
            server.settimeout(_LOOPBACK_TIMEOUT_S)
            address = server.getsockname()
            with socket.create_connection(address, timeout=_LOOPBACK_TIMEOUT_S) as client:
                accepted, _ = server.accept()
                with accepted:
                    accepted.settimeout(_LOOPBACK_TIMEOUT_S)
                    client.sendall(b"dlion")
                    received = accepted.recv(5)
    except OSError as error:
        advice = "Check the loopback interface (ip link set lo up) and firewall rules for it"
        observed = f"{host}: {error.strerror or error}"
        return Check(MACHINE, "loopback", CheckOutcome.FAIL, observed, advice)
    if received != b"dlion":
        return Check(MACHINE, "loopback", CheckOutcome.FAIL, f"{host}: bytes are lost")
    return Check(MACHINE, "loopback", CheckOutcome.OK, f"connected to a port of {host}")


def emulation_check() -> Check:
    """Whether `--environment` can use network namespaces and control groups."""
    from dlion_local.emulation.compute.quotas import control_groups_unavailable
    from dlion_local.emulation.network.namespaces import namespaces_unavailable

    network, quotas = namespaces_unavailable(), control_groups_unavailable()
    parts = [f"network: {network}"] * bool(network) + [f"CPU: {quotas}"] * bool(quotas)
    if not parts:
        observed = "environments are imposed by namespaces and control groups"
        return Check(MACHINE, "emulation", CheckOutcome.OK, observed)
    advice = "`dlion run --environment` imposes these by relays and duty cycles, less exactly"
    return Check(MACHINE, "emulation", CheckOutcome.WARN, "; ".join(parts), advice)
