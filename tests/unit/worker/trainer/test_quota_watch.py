"""Tests of the quota watch.

A change of the quota is reported once, within a tenth of a second. The control group is not read
more often than that. An allowance is due twice a second, and at once on request. A change during a
step is reported at once, and still counts as one when the step ends.
"""

from __future__ import annotations

import threading
from pathlib import Path

from dlion_api.protocol.measurements import CpuAllowance
from dlion_worker.sidecar.node_facts import ProcessCpuLimits
from dlion_worker.trainer.background.quota_watch import (
    READ_INTERVAL_S,
    REPORT_INTERVAL_S,
    QuotaWatch,
)


def control_group(root: Path) -> Path:
    """The folder of a control group with 0.2 cores, throttled for 1.5 s so far."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/\n")
    group = root / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("20000 100000\n")
    (group / "cpu.stat").write_text("throttled_usec 1500000\n")
    return group


def test_a_change_is_reported_once(tmp_path: Path) -> None:
    group = control_group(tmp_path)
    now_s = 100.0
    watch = QuotaWatch(ProcessCpuLimits(tmp_path), clock=lambda: now_s)
    assert watch.cores == 0.2
    first = watch.allowance(now=False)
    assert first is not None
    assert (first.quota_cores, first.throttled_s) == (0.2, 1.5)
    assert watch.allowance(now=False) is None

    (group / "cpu.max").write_text("80000 100000\n")
    assert not watch.changed(), "just read"
    now_s += READ_INTERVAL_S
    assert watch.changed()
    allowance = watch.allowance(now=True)
    assert allowance is not None
    assert allowance.quota_cores == 0.8
    now_s += READ_INTERVAL_S
    assert not watch.changed()
    assert watch.allowance(now=False) is None
    now_s += REPORT_INTERVAL_S
    assert watch.allowance(now=False) is not None

    (group / "cpu.max").write_text("max 100000\n")
    assert watch.changed()
    assert watch.cores is None


def test_a_change_during_a_step_is_reported_at_once(tmp_path: Path) -> None:
    group = control_group(tmp_path)
    watch = QuotaWatch(ProcessCpuLimits(tmp_path))
    allowances: list[CpuAllowance] = []
    changed = threading.Event()

    def record(allowance: CpuAllowance) -> None:
        allowances.append(allowance)
        changed.set()

    with watch.reporting_changes(record):
        (group / "cpu.max").write_text("80000 100000\n")
        assert changed.wait(10)
    assert [one.quota_cores for one in allowances] == [0.8]
    assert watch.changed(), "the current step gives no estimate for either quota"
    assert not watch.changed()
    assert "quota-watch" not in {thread.name for thread in threading.enumerate()}
