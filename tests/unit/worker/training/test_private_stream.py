"""Tests of private streams.

No batch of a private stream has a sample twice. No sample is used more often than `passes`, and
some sample is used that often. Draws before a restored position do not count. A pass is on disk
before its first batch, and a later start knows of it.

Left out: shuffles and the rest of streams (test_batch_stream.py).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.errors import DataError
from dlion_worker.training.datasets import DataSet
from dlion_worker.training.private.stream import PASSES_FILE, PrivateStream
from example_counts import examples


def _stream(count: int, seed: int = 1, folder: Path | None = None) -> PrivateStream:
    number = np.arange(count, dtype=np.int32)
    samples = np.stack([number, number], axis=1).astype(np.float32), number
    held_out = np.zeros((1, 2), np.float32), np.zeros(1, np.int32)
    data = DataSet({"all": samples}, *held_out, class_count=count, training_set_samples=count)
    return PrivateStream(data, seed=seed, rank=0, state_dir=str(folder) if folder else None)


@settings(max_examples=examples(60), deadline=None)
@given(
    count=st.integers(1, 30),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=20),
    seed=st.integers(0, 9),
)
def test_a_sample_is_used_once_a_pass_and_once_a_batch(
    count: int, sizes: list[int], seed: int
) -> None:
    stream, uses = _stream(count, seed), Counter[int]()
    for size in sizes:
        batch = stream.next(size)[1].tolist()
        assert len(batch) == len(set(batch)) == min(size, count)
        uses.update(batch)
        assert max(uses.values()) == stream.passes
        assert min((uses[number] for number in range(count)), default=0) >= stream.passes - 1


def test_draws_before_a_restored_position_do_not_count() -> None:
    stream = _stream(10)
    begin = stream.state()
    assert stream.passes == 0
    for _ in range(5):
        stream.next(7)  # like a probe of the speed
    stream.restore(begin)
    assert stream.passes == 0
    stream.next(7)
    assert stream.passes == 1
    middle = stream.state()
    resumed = _stream(10)
    resumed.restore(middle)
    resumed.next(7)
    assert resumed.passes == 2


def test_passes_survive_a_start_that_reports_none(tmp_path: Path) -> None:
    killed = _stream(10, folder=tmp_path)
    begin = killed.state()
    for _ in range(5):
        killed.next(7)  # like a probe of the speed
    killed.restore(begin)
    for passes in (1, 2):
        killed.next(7)
        assert _stream(10, folder=tmp_path).earlier_passes == passes
    later = _stream(10, folder=tmp_path)
    later.restore(begin)
    later.next(7)
    assert (later.earlier_passes, later.passes) == (2, 1)
    assert _stream(10, folder=tmp_path).earlier_passes == 3
    assert _stream(10).earlier_passes is None


@pytest.mark.parametrize("content", [b"", b"-1\n", b"many", b"\xff", b"9" * 5000])
def test_a_damaged_count_of_passes_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / PASSES_FILE).write_bytes(content)
    with pytest.raises(DataError, match=r"passes is damaged: .*Restore it"):
        _stream(10, folder=tmp_path)


def test_a_pass_that_cannot_be_saved_is_not_trained(tmp_path: Path) -> None:
    stream = _stream(10, folder=tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        stream.next(7)
