"""Facts: a snapshot put down comes up whole, once, oldest iteration first; of one replica's waiting
snapshots the oldest give way; what is no snapshot is named. Left out: the process that evaluates
(tests/local)."""

from pathlib import Path

import numpy as np
import pytest

from dlion_api.errors import DataError
from dlion_api.names import Rank
from dlion_worker.evaluator.snapshot_files import (
    MAX_WAITING,
    ReplicaSnapshot,
    take_snapshots,
    write_snapshot,
)


def _replica(rank: int, iteration: int) -> ReplicaSnapshot:
    weights_D = np.full(5, rank + iteration / 1000, np.float32)
    return ReplicaSnapshot(
        Rank(rank), iteration, 64 * iteration, 0.5, weights_D, np.zeros(2, np.float32)
    )


def test_what_is_put_down_comes_up_once_oldest_first(tmp_path: Path) -> None:
    for rank, iteration in ((1, 20), (0, 30), (0, 10)):
        write_snapshot(tmp_path, _replica(rank, iteration))
    taken = list(take_snapshots(tmp_path))
    assert [(one.rank, one.iteration, one.samples) for one in taken] == [
        (0, 10, 640), (1, 20, 1280), (0, 30, 1920),
    ]  # fmt: skip
    np.testing.assert_array_equal(taken[1].weights_D, _replica(1, 20).weights_D)
    assert list(tmp_path.iterdir()) == []


def test_a_replicas_oldest_snapshots_give_way_and_the_others_stay(tmp_path: Path) -> None:
    write_snapshot(tmp_path, _replica(1, 1))
    for iteration in range(1, MAX_WAITING + 3):
        write_snapshot(tmp_path, _replica(0, iteration))
    taken = [(one.rank, one.iteration) for one in take_snapshots(tmp_path)]
    assert taken == [(1, 1), *((0, 2 + k) for k in range(1, MAX_WAITING + 1))]


def test_what_is_no_snapshot_is_named(tmp_path: Path) -> None:
    (tmp_path / "000000-000000000001.npz").write_bytes(b"half a file")
    with pytest.raises(DataError, match=r"000000-000000000001\.npz"):
        list(take_snapshots(tmp_path))
