"""Tests of the stream of batches.

Each sample comes once per epoch, in an order that depends on seed, rank and epoch. A batch may span
the end of an epoch, and may be larger than the data. A restored stream gives the same next batch.
For any sequence of calls, new samples come within the current epoch, and removed ones do not
return. Samples that find no room in memory replace no others. A position that is read while samples
change is consistent.

Left out: watched files (test_watch).
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.errors import ContractError, DataError
from dlion_worker.training.datasets import BatchStream, DataSet
from example_counts import examples


def _part(first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples with their own number, as x [N, 2] and as label."""
    number = np.arange(first, first + count, dtype=np.int32)
    return np.stack([number, number], axis=1).astype(np.float32), number


def _stream(count: int = 10, *, seed: int = 1, rank: int = 0) -> BatchStream:
    x, y = _part(0, count)
    data = DataSet(
        parts={"start": (x, y)},
        held_out_x=np.zeros((1, 2), np.float32),
        held_out_y=np.zeros(1, np.int32),
        class_count=1000,
        training_set_samples=count,
    )
    return BatchStream(data, seed=seed, rank=rank)


def _numbers(stream: BatchStream, size: int) -> list[int]:
    x_B, y_B = stream.next(size)
    np.testing.assert_array_equal(x_B[:, 0], y_B)
    assert len(y_B) == size
    return y_B.tolist()


@settings(max_examples=examples(40), deadline=None)
@given(
    count=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 100), max_size=8),
    seed=st.integers(0, 9),
)
def test_every_sample_comes_once_per_epoch(count: int, sizes: list[int], seed: int) -> None:
    stream = _stream(count, seed=seed)
    drawn = [n for size in sizes for n in _numbers(stream, size)]
    for start in range(0, len(drawn) - count + 1, count):
        assert sorted(drawn[start : start + count]) == list(range(count))
    state = stream.state()
    assert int(state["epoch"]) * count + int(state["position"]) == len(drawn)


def test_order_follows_seed_rank_and_epoch() -> None:
    stream = _stream(50)
    first, second = _numbers(stream, 50), _numbers(stream, 50)
    assert first != second
    assert _numbers(_stream(50), 50) == first
    assert _numbers(_stream(50, rank=1), 50) != first
    assert _numbers(_stream(50, seed=2), 50) != first


@settings(max_examples=examples(40), deadline=None)
@given(count=st.integers(1, 30), before=st.lists(st.integers(1, 50), max_size=5))
def test_a_restored_stream_gives_the_same_next_batch(count: int, before: list[int]) -> None:
    stream, other = _stream(count), _stream(count)
    for size in before:
        stream.next(size)
    # As a checkpoint restores it: arrays without a dimension.
    other.restore({k: np.asarray(v) for k, v in stream.state().items()})
    assert [_numbers(other, 7) for _ in range(4)] == [_numbers(stream, 7) for _ in range(4)]


def test_a_position_in_other_data_restarts_the_epoch(caplog: pytest.LogCaptureFixture) -> None:
    stream = _stream(20)
    stream.next(25)
    other = _stream(21)
    other.restore(stream.state())
    assert other.state() == {"epoch": 1, "position": 0, "samples": 21}
    assert "the data has changed since the checkpoint" in caplog.text
    with pytest.raises(ContractError, match="allowed: epoch, position, samples"):
        other.restore({"epoch": 1})


def test_new_samples_come_within_the_current_epoch() -> None:
    stream = _stream(20)
    before_the_end = _numbers(stream, 15)
    stream.extend({"more": _part(100, 10)})
    assert stream.samples == 30
    rest = _numbers(stream, 15)
    assert sorted(before_the_end + rest) == [*range(20), *range(100, 110)]
    assert sorted(_numbers(stream, 30)) == [*range(20), *range(100, 110)]


def test_removed_samples_do_not_return() -> None:
    stream = _stream(20)
    stream.extend({"more": _part(100, 10)})
    stream.next(7)
    stream.remove({"start", "unknown"})
    assert stream.keys() == {"more"}
    assert all(n >= 100 for n in _numbers(stream, 50))
    with pytest.raises(DataError, match="all of this worker's samples are gone"):
        stream.remove({"more"})
    assert sorted(_numbers(stream, 10)) is not None


def test_samples_that_do_not_fit_into_memory_replace_none() -> None:
    stream, same = _stream(20), _stream(20)
    assert _numbers(stream, 7) == _numbers(same, 7)
    count = 10**14  # no machine has room for them
    endless = np.broadcast_to(np.float32(0), (count, 2)), np.broadcast_to(np.int32(0), (count,))
    with pytest.raises(MemoryError):
        stream.extend({"start": endless})
    assert stream.samples == 20
    assert _numbers(stream, 33) == _numbers(same, 33)


@settings(max_examples=examples(60), deadline=None)
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["next", "extend", "remove"]), st.integers(0, 4), st.integers(1, 9)
        ),
        max_size=25,
    )
)
def test_the_samples_are_right_after_any_sequence_of_calls(
    calls: list[tuple[str, int, int]],
) -> None:
    stream = _stream(6)
    held: dict[str, set[int]] = {"start": set(range(6))}
    fresh = 100
    for call, key_number, count in calls:
        key = f"part-{key_number}"
        if call == "next":
            assert set(_numbers(stream, count)) <= set().union(*held.values())
        elif call == "extend":
            stream.extend({key: _part(fresh, count)})
            held[key] = set(range(fresh, fresh + count))
            fresh += count
        elif len(held) > 1 and key in held:
            stream.remove({key})
            del held[key]
    everything = set().union(*held.values())
    assert stream.samples == len(everything)
    left = len(stream._order) - stream._position
    if left:
        stream.next(left)  # to the end of the epoch
    assert sorted(_numbers(stream, len(everything))) == sorted(everything)


def test_a_position_is_consistent_while_samples_change() -> None:
    stream, few = _stream(20), 5
    ended = threading.Event()

    def grow() -> None:
        number = 0
        while not ended.is_set():
            parts = {f"{number}-{part}": _part(20 + few * part, few) for part in range(40)}
            stream.extend(parts)
            stream.remove(set(parts))
            number += 1

    growing = threading.Thread(target=grow)
    growing.start()
    try:
        for _ in range(20_000):
            assert stream.samples in (20, 20 + 40 * few)
            state = stream.state()
            assert state["samples"] in (20, 20 + 40 * few)
            assert int(state["position"]) <= int(state["samples"])
    finally:
        ended.set()
        growing.join()


def test_a_stream_needs_a_sample() -> None:
    with pytest.raises(DataError, match="worker 3: no sample to train on"):
        _stream(0, rank=3)
