"""Tests of the number of threads.

It follows the quota. Existing pools are not resized silently.

Left out: how TensorFlow distributes its work.
"""

from __future__ import annotations

import os

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
