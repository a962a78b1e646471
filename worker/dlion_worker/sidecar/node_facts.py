"""Facts about the machine: CPU limits, pressure, frequency, temperature, memory, lost segments.

Read from /proc, /sys and control groups of both versions. A missing fact is None: a virtual machine
has no thermometer, for example.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dlion_core.heat.heat_controller import MAX_CELSIUS, MIN_CELSIUS

_UNLIMITED_BYTES = 1 << 60
"""Version 1 represents "no limit" by a number near 2**63."""


@dataclass(frozen=True)
class NodeFacts:
    """One reading. Pressure is the fraction of the last ten seconds that some task waited."""

    quota_cores: float | None = None
    cpu_weight: float | None = None
    """CPU weight in units of version 2, where 100 is the default (version 1: 1024 shares)."""
    cpu_pressure_ratio: float | None = None
    memory_pressure_ratio: float | None = None
    frequency_hertz: float | None = None
    temperature_celsius: float | None = None
    memory_total_bytes: float | None = None
    memory_available_bytes: float | None = None
    memory_limit_bytes: float | None = None
    io_pressure_ratio: float | None = None
    tcp_sent_segments: float | None = None
    """Segments sent from this network namespace since its creation. All containers of a pod share
    it."""
    tcp_retransmitted_segments: float | None = None
    clock_limit_ratio: float | None = None
    """The clock that the kernel allows over the greatest one, of the most limited processors."""


def read_node_facts(root: Path = Path("/")) -> NodeFacts:
    """Read all facts. `root` replaces `/` in tests."""
    groups = _groups(root)
    memory = _memory(root)
    tcp = _tcp_counters(root)
    return NodeFacts(
        quota_cores=_quota_cores(groups),
        cpu_weight=_cpu_weight(groups),
        cpu_pressure_ratio=_pressure(root, "cpu"),
        memory_pressure_ratio=_pressure(root, "memory"),
        frequency_hertz=read_frequency(root),
        temperature_celsius=read_temperature(root),
        memory_total_bytes=memory.get("MemTotal"),
        memory_available_bytes=memory.get("MemAvailable"),
        memory_limit_bytes=_memory_limit(groups),
        io_pressure_ratio=_pressure(root, "io"),
        tcp_sent_segments=tcp.get("OutSegs"),
        tcp_retransmitted_segments=tcp.get("RetransSegs"),
        clock_limit_ratio=_clock_limit(root),
    )


class ProcessCpuLimits:
    """This process's CPU limits from its control groups; the paths are looked up once."""

    def __init__(self, root: Path = Path("/")) -> None:
        groups = _groups(root)
        self._quotas = {
            controller: [group for group in groups.get(controller, []) if (group / name).exists()]
            for controller, name in (("cpu", "cpu.cfs_quota_us"), ("", "cpu.max"))
        }
        above = [group for kind in ("cpu", "") for group in groups.get(kind, [])]
        self._stats = [group / "cpu.stat" for group in above if (group / "cpu.stat").exists()]

    def quota_cores(self) -> float | None:
        """The hard quota in cores, if there is one."""
        return _quota_cores(self._quotas)

    def throttled_s(self) -> float:
        """Seconds that quotas have throttled the process's control group, over all processors."""
        throttled = []
        for path in self._stats:
            stat = _text(path) or ""
            if match := re.search(r"^throttled_time (\d+)$", stat, re.MULTILINE):
                throttled.append(int(match[1]) / 1e9)
            if match := re.search(r"^throttled_usec (\d+)$", stat, re.MULTILINE):
                throttled.append(int(match[1]) / 1e6)
        return max(throttled, default=0.0)


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _number(path: Path) -> float | None:
    text = _text(path)
    return float(text) if text is not None and re.fullmatch(r"-?\d+", text) else None


def _groups(root: Path) -> dict[str, list[Path]]:
    """For each controller ("" is version 2), this process's group and its ancestors.

    The tightest limit among them applies. Inside a container the path may not exist; then the top
    does.
    """
    groups: dict[str, list[Path]] = {}
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            mounts = [controller] if controller else ["", "unified"]
            tops = [root / "sys/fs/cgroup" / mount for mount in mounts]
            top = next((t for t in reversed(tops) if t.is_dir()), tops[0])
            group = top / path.strip("/")
            above = [parent for parent in group.parents if parent.is_relative_to(top)]
            groups[controller] = [group, *above]
    return groups


def _quota_cores(groups: dict[str, list[Path]]) -> float | None:
    quotas = []
    for group in groups.get("cpu", []):
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if quota is not None and period and quota > 0:
            quotas.append(quota / period)
    for group in groups.get("", []):
        match = re.fullmatch(r"(\d+) (\d+)", _text(group / "cpu.max") or "")
        if match and int(match[2]):
            quotas.append(int(match[1]) / int(match[2]))
    return min(quotas, default=None)


def _cpu_weight(groups: dict[str, list[Path]]) -> float | None:
    for group in groups.get("", []):
        if (weight := _number(group / "cpu.weight")) is not None:
            return weight
    for group in groups.get("cpu", []):
        if (shares := _number(group / "cpu.shares")) is not None:
            return shares * 100 / 1024
    return None


def _memory_limit(groups: dict[str, list[Path]]) -> float | None:
    limits = [_number(group / "memory.max") for group in groups.get("", [])]
    limits += [_number(group / "memory.limit_in_bytes") for group in groups.get("memory", [])]
    return min((x for x in limits if x is not None and x < _UNLIMITED_BYTES), default=None)


def _pressure(root: Path, resource: str) -> float | None:
    match = re.search(r"some avg10=([\d.]+)", _text(root / "proc/pressure" / resource) or "")
    return float(match[1]) / 100 if match else None


def read_frequency(root: Path) -> float | None:
    """Hertz: the mean over all processors."""
    files = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq")
    values = [kilohertz for file in files if (kilohertz := _number(file)) is not None]
    if values:
        return 1e3 * sum(values) / len(values)
    megahertz = re.findall(r"cpu MHz\s*:\s*([\d.]+)", _text(root / "proc/cpuinfo") or "")
    return 1e6 * sum(map(float, megahertz)) / len(megahertz) if megahertz else None


def _clock_limit(root: Path) -> float | None:
    """The least over all cpufreq policies, each of the processors that share a clock.

    A board with fast and slow cores has a policy of each, and may slow down one of them. Unlike the
    current clock, which falls on idle processors, the allowed one falls only if it is limited.
    """
    ratios = []
    for policy in (root / "sys/devices/system/cpu/cpufreq").glob("policy[0-9]*"):
        allowed, greatest = (
            _number(policy / name) for name in ("scaling_max_freq", "cpuinfo_max_freq")
        )
        if allowed is not None and greatest is not None and 0 < allowed <= greatest:
            ratios.append(allowed / greatest)
    return min(ratios, default=None)


def read_temperature(root: Path) -> float | None:
    """Degrees Celsius of the hottest thermal zone: it causes throttling.

    Machines without zones may have hardware monitors. Values that no processor has are those of
    zones without a sensor.
    """
    for pattern in ("thermal/thermal_zone[0-9]*/temp", "hwmon/hwmon[0-9]*/temp[0-9]*_input"):
        values: list[float | None] = []
        with suppress(OSError):  # a device may vanish meanwhile
            values += [_number(file) for file in (root / "sys/class").glob(pattern)]
        celsius = [value / 1e3 for value in values if value is not None]
        if plausible := [each for each in celsius if MIN_CELSIUS <= each <= MAX_CELSIUS]:
            return max(plausible)
    return None


def _memory(root: Path) -> dict[str, float]:
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", _text(root / "proc/meminfo") or "", re.MULTILINE)
    return {name: float(kibibytes) * 1024 for name, kibibytes in lines}


def _tcp_counters(root: Path) -> dict[str, float]:
    """The counters of TCP by their names in RFC 4022; OutSegs has no retransmitted segment."""
    lines = re.findall(r"^Tcp: (.*)$", _text(root / "proc/self/net/snmp") or "", re.MULTILINE)
    if len(lines) != 2:
        return {}
    pairs = zip(lines[0].split(), lines[1].split(), strict=False)
    return {name: float(value) for name, value in pairs if re.fullmatch(r"\d+", value)}
