"""Tests of node facts from recorded /proc and /sys trees of control groups version 1 and 2.

Quotas (the tightest among the parents), weights, limits, pressure, frequency, temperature and
memory are read in either version. A missing fact is None.

Left out: hybrid mounts of systemd.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from dlion_worker.sidecar.node_facts import (
    NodeFacts,
    ProcessCpuLimits,
    read_node_facts,
    read_temperature,
)

VERSION_1 = {
    "proc/self/cgroup": "3:cpuset:/\n2:cpu,cpuacct:/kubepods/burstable/pod7/c1\n4:memory:/kubepods"
    "\n0::/\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu/kubepods/burstable/pod7/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu/kubepods/burstable/pod7/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu/kubepods/burstable/pod7/c1/cpu.cfs_quota_us": "200000\n",
    "sys/fs/cgroup/cpu/kubepods/burstable/pod7/c1/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu/kubepods/burstable/pod7/c1/cpu.shares": "512\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/kubepods/memory.limit_in_bytes": "536870912\n",
    "sys/fs/cgroup/unified/cgroup.controllers": "",
    "proc/cpuinfo": "cpu MHz\t\t: 2445.426\ncpu MHz\t\t: 2445.426\n",
    "proc/meminfo": "MemTotal:       24684096 kB\nMemFree: 100 kB\nMemAvailable:   24174796 kB\n",
}

VERSION_2 = {
    "proc/self/cgroup": "0::/\n",  # the view of a container: its own group is the root
    "sys/fs/cgroup/cpu.max": "20000 100000\n",
    "sys/fs/cgroup/cpu.weight": "39\n",
    "sys/fs/cgroup/memory.max": "max\n",
    "proc/pressure/cpu": "some avg10=32.49 avg60=7.76 avg300=1.92 total=13122039\n"
    "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    "proc/pressure/memory": "some avg10=0.50 avg60=0.00 avg300=0.00 total=0\n",
    "proc/pressure/io": "some avg10=91.50 avg60=0.00 avg300=0.00 total=0\n",
    "proc/self/net/snmp": "Ip: Forwarding DefaultTTL\nIp: 1 64\n"
    "Tcp: RtoMin MaxConn OutSegs RetransSegs InErrs\nTcp: 200 -1 52301 1046 0\nUdp: InDatagrams\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "1500000\n",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq": "1700000\n",
    "sys/class/thermal/thermal_zone0/temp": "48312\n",
    "sys/class/thermal/thermal_zone1/temp": "61250\n",
}


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def test_version_1_gives_the_tightest_quota_of_all_parents(tmp_path: Path) -> None:
    facts = read_node_facts(tree(tmp_path, VERSION_1))
    assert facts == NodeFacts(
        quota_cores=1.5,
        cpu_weight=50.0,
        frequency_hertz=pytest.approx(2.445426e9),
        memory_total_bytes=24684096 * 1024,
        memory_available_bytes=24174796 * 1024,
        memory_limit_bytes=536870912,
    )


def test_version_2_gives_quota_weight_pressure_frequency_and_temperature(tmp_path: Path) -> None:
    facts = read_node_facts(tree(tmp_path, VERSION_2))
    assert facts == NodeFacts(
        quota_cores=0.2,
        cpu_weight=39.0,
        cpu_pressure_ratio=0.3249,
        memory_pressure_ratio=0.005,
        frequency_hertz=1.6e9,
        temperature_celsius=61.25,
        io_pressure_ratio=0.915,
        tcp_sent_segments=52301,
        tcp_retransmitted_segments=1046,
    )


def test_a_machine_without_facts_gives_none(tmp_path: Path) -> None:
    assert read_node_facts(tmp_path) == NodeFacts()


CPUFREQ = "sys/devices/system/cpu/cpufreq/policy"


@pytest.mark.parametrize(
    ("clocks", "ratio"),
    [
        # current, allowed and greatest kHz of each policy
        ({0: (408000, 1800000, 1800000), 4: (408000, 2208000, 2208000)}, 1.0),  # idle
        ({0: (1800000, 1800000, 1800000), 4: (1104000, 1104000, 2208000)}, 0.5),  # fast cores
        ({0: (600000, 600000, 1800000), 4: (2208000, 2208000, 2208000)}, 1 / 3),  # slow cores
        ({0: (1, 2, 0), 4: (1, -5, 10), 8: (1, 20, 10), 12: (1, 0, 10)}, None),
    ],
)
def test_the_clock_limit_is_that_of_the_most_limited_cores(
    tmp_path: Path, clocks: dict[int, tuple[int, int, int]], ratio: float | None
) -> None:
    files = {"sys/devices/system/cpu/cpufreq/policy12/cpuinfo_max_freq": "<unsupported>\n"}
    for first, values in clocks.items():
        names = "scaling_cur_freq", "scaling_max_freq", "cpuinfo_max_freq"
        for name, kilohertz in zip(names, values, strict=True):
            files[f"{CPUFREQ}{first}/{name}"] = f"{kilohertz}\n"
    limit = read_node_facts(tree(tmp_path, files)).clock_limit_ratio
    assert limit == (None if ratio is None else pytest.approx(ratio))


@pytest.mark.parametrize("garbage", ["", "max", "lots of cores", "-1 100000", "100 0"])
def test_a_limit_that_is_not_a_number_is_ignored(tmp_path: Path, garbage: str) -> None:
    tree(tmp_path, VERSION_2 | {"sys/fs/cgroup/cpu.max": garbage})
    assert read_node_facts(tmp_path).quota_cores is None


@pytest.mark.parametrize(
    "garbage", ["", "Tcp: OutSegs", "Tcp: OutSegs\nTcp: many", "Tcp: \nTcp: 1"]
)
def test_invalid_tcp_counters_are_left_out(tmp_path: Path, garbage: str) -> None:
    tree(tmp_path, VERSION_2 | {"proc/self/net/snmp": garbage})
    assert read_node_facts(tmp_path).tcp_sent_segments is None


def test_throttled_time_is_read_in_either_version(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/cpu/kubepods/burstable/pod7/cpu.stat"
    older = tree(tmp_path / "1", VERSION_1 | {group: "nr_periods 9\nthrottled_time 2500000000\n"})
    assert ProcessCpuLimits(older).throttled_s() == 2.5
    stat = {"sys/fs/cgroup/cpu.stat": "usage_usec 7\nthrottled_usec 1500000\n"}
    assert ProcessCpuLimits(tree(tmp_path / "2", VERSION_2 | stat)).throttled_s() == 1.5
    assert ProcessCpuLimits(tmp_path / "3").throttled_s() == 0.0


def test_a_device_that_vanishes_while_it_is_read_has_no_temperature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error would end the heat budget: only the next reading is without a temperature."""
    monitor, scandir = tmp_path / "sys/class/hwmon/hwmon0", os.scandir
    monitor.mkdir(parents=True)
    (monitor / "temp1_input").write_text("50000\n")
    assert read_temperature(tmp_path) == 50.0

    def vanishing(path: Path) -> Any:
        if monitor.exists() and str(path) == str(monitor):
            shutil.rmtree(monitor)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert read_temperature(tmp_path) is None
