"""Facts: no batch of a private stream has a sample twice; a sample is used as often as `passes`
says, at most, and some sample that often; what was drawn before a restored position does not count.

Left out: shuffles, and all that other streams do (test_batch_stream.py).
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_worker.training.datasets import DataSet
from dlion_worker.training.private.stream import PrivateStream
from example_counts import examples


def _stream(count: int, seed: int = 1) -> PrivateStream:
    number = np.arange(count, dtype=np.int32)
    samples = np.stack([number, number], axis=1).astype(np.float32), number
    held_out = np.zeros((1, 2), np.float32), np.zeros(1, np.int32)
    data = DataSet({"all": samples}, *held_out, class_count=count, training_set_samples=count)
    return PrivateStream(data, seed=seed, rank=0)


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


def test_what_was_drawn_before_a_restored_position_does_not_count() -> None:
    stream = _stream(10)
    begin = stream.state()
    assert stream.passes == 0
    for _ in range(5):
        stream.next(7)  # as a probe of the speed does
    stream.restore(begin)
    assert stream.passes == 0
    stream.next(7)
    assert stream.passes == 1
    middle = stream.state()
    resumed = _stream(10)
    resumed.restore(middle)
    resumed.next(7)
    assert resumed.passes == 2
