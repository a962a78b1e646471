"""Tests of the number of threads and of their priority.

The number follows the quota. Existing pools are not resized silently. A lower priority applies to
threads that already run.

Left out: how TensorFlow distributes its work.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import tensorflow as tf

from dlion_api.errors import DLionError
from dlion_worker.training import threads


@pytest.mark.parametrize(("quota", "count"), [(0.05, 1), (1.0, 1), (1.2, 2), (64.0, 2)])
def test_threads_can_use_the_whole_quota(
    quota: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert threads.thread_count(quota) == count
    assert threads.environment(quota)["OMP_NUM_THREADS"] == str(count)
    assert threads.thread_count(None) == 2


def test_a_quota_of_zero_is_refused() -> None:
    with pytest.raises(DLionError, match=r"must be above 0 cores \(given: 0"):
        threads.thread_count(0)


def test_existing_pools_are_not_resized(monkeypatch: pytest.MonkeyPatch) -> None:
    tf.zeros(1)
    for name in threads.environment(3):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    with pytest.raises(DLionError, match=r"Call threads\.configure before"):
        threads.configure(3)


_LOWERED = """
import os, threading
from dlion_worker.training import threads
ended = threading.Event()
pool = [threading.Thread(target=ended.wait) for _ in range(3)]
pool[0].start(), pool[1].start()
lowered = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 2)
threads.lower_priority(2)
pool[2].start()
tasks = [0, *(thread.native_id for thread in pool)]
print([os.getpriority(os.PRIO_PROCESS, task) - lowered for task in tasks])
ended.set()
"""


def test_threads_that_are_there_get_a_lower_priority() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOWERED],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == f"{4 * [0]}\n"
