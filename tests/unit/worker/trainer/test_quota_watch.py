"""Facts: a change of the quota is seen once, within a tenth of a second; the group is not read more
often than that; an allowance is due twice a second, and at once when it is asked for; a change is
told while a step goes on, and still counts as one when that step ends.
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
    """The folder of a group of 0.2 cores, throttled for 1.5 s so far."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/\n")
    group = root / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("20000 100000\n")
    (group / "cpu.stat").write_text("throttled_usec 1500000\n")
    return group


def test_a_change_is_seen_once_and_reported(tmp_path: Path) -> None:
    group = control_group(tmp_path)
    now_s = 100.0
    watch = QuotaWatch(ProcessCpuLimits(tmp_path), clock=lambda: now_s)
    assert watch.cores == 0.2
    first = watch.allowance(now=False)
    assert first is not None
    assert (first.quota_cores, first.throttled_s) == (0.2, 1.5)
    assert watch.allowance(now=False) is None

    (group / "cpu.max").write_text("80000 100000\n")
    assert not watch.changed(), "just looked at"
    now_s += READ_INTERVAL_S
    assert watch.changed()
    told = watch.allowance(now=True)
    assert told is not None
    assert told.quota_cores == 0.8
    now_s += READ_INTERVAL_S
    assert not watch.changed()
    assert watch.allowance(now=False) is None
    now_s += REPORT_INTERVAL_S
    assert watch.allowance(now=False) is not None

    (group / "cpu.max").write_text("max 100000\n")
    assert watch.changed()
    assert watch.cores is None


def test_a_change_is_told_while_a_step_goes_on(tmp_path: Path) -> None:
    group = control_group(tmp_path)
    watch = QuotaWatch(ProcessCpuLimits(tmp_path))
    told: list[CpuAllowance] = []
    came = threading.Event()

    def tell(allowance: CpuAllowance) -> None:
        told.append(allowance)
        came.set()

    with watch.reporting_changes(tell):
        (group / "cpu.max").write_text("80000 100000\n")
        assert came.wait(10)
    assert [one.quota_cores for one in told] == [0.8]
    assert watch.changed(), "the step under way is a measure of neither quota"
    assert not watch.changed()
    assert "quota-watch" not in {thread.name for thread in threading.enumerate()}
