"""Facts: a change of the quota is seen once, within a tenth of a second; the group is not read more
often than that; an allowance is due twice a second, and at once when it is asked for.
"""

from __future__ import annotations

from pathlib import Path

from dlion_worker.sidecar.node_facts import OwnCpu
from dlion_worker.trainer.quota_watch import LOOK_S, TELL_S, QuotaWatch


def test_a_change_is_seen_once_and_reported(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("20000 100000\n")
    (group / "cpu.stat").write_text("throttled_usec 1500000\n")
    now_s = 100.0
    watch = QuotaWatch(OwnCpu(tmp_path), clock=lambda: now_s)
    assert watch.cores == 0.2
    first = watch.allowance(now=False)
    assert first is not None
    assert (first.quota_cores, first.throttled_s) == (0.2, 1.5)
    assert watch.allowance(now=False) is None

    (group / "cpu.max").write_text("80000 100000\n")
    assert not watch.changed(), "just looked at"
    now_s += LOOK_S
    assert watch.changed()
    told = watch.allowance(now=True)
    assert told is not None
    assert told.quota_cores == 0.8
    now_s += LOOK_S
    assert not watch.changed()
    assert watch.allowance(now=False) is None
    now_s += TELL_S
    assert watch.allowance(now=False) is not None

    (group / "cpu.max").write_text("max 100000\n")
    assert watch.changed()
    assert watch.cores is None
