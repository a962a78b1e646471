"""Tests of snapshot files.

A snapshot is read back completely and once, the oldest iteration first. Of one replica's waiting
snapshots the oldest are dropped. Those of one iteration are taken together, and the next evaluator
has the rest of them. A file that is not a snapshot is named.

Left out: the process that evaluates (tests/local).
"""

from pathlib import Path

import numpy as np
import pytest

from dlion_api.errors import DataError
from dlion_api.names import Rank
from dlion_worker.evaluator.snapshot_files import (
    ReplicaSnapshot,
    take_snapshots,
    write_snapshot,
)


def _replica(rank: int, iteration: int) -> ReplicaSnapshot:
    weights_D = np.full(5, rank + iteration / 1000, np.float32)
    return ReplicaSnapshot(
        Rank(rank), iteration, 64 * iteration, 0.5, weights_D, np.zeros(2, np.float32)
    )


def test_snapshots_are_read_once_oldest_first(tmp_path: Path) -> None:
    for rank, iteration in ((1, 20), (2, 30), (0, 10)):
        write_snapshot(tmp_path, _replica(rank, iteration))
    taken = list(take_snapshots(tmp_path))
    assert [(one.rank, one.iteration, one.samples) for one in taken] == [
        (0, 10, 640), (1, 20, 1280), (2, 30, 1920),
    ]  # fmt: skip
    np.testing.assert_array_equal(taken[1].weights_D, _replica(1, 20).weights_D)
    assert list(tmp_path.iterdir()) == []


def test_older_snapshots_of_a_replica_are_dropped_and_others_stay(tmp_path: Path) -> None:
    write_snapshot(tmp_path, _replica(1, 1))
    for iteration in (1, 2, 3):
        write_snapshot(tmp_path, _replica(0, iteration))
    assert [(one.rank, one.iteration) for one in take_snapshots(tmp_path)] == [(1, 1), (0, 3)]


def test_a_replica_with_a_snapshot_replaced_meanwhile_is_not_skipped(tmp_path: Path) -> None:
    for rank, iteration in ((0, 1), (1, 2)):
        write_snapshot(tmp_path, _replica(rank, iteration))
    taken = take_snapshots(tmp_path)
    assert next(taken).rank == 0
    for rank in (0, 1):
        write_snapshot(tmp_path, _replica(rank, 3))
    assert [(one.rank, one.iteration) for one in taken] == [(1, 3)]
    assert [(one.rank, one.iteration) for one in take_snapshots(tmp_path)] == [(0, 3)]


def test_snapshots_of_an_iteration_are_kept_while_one_is_evaluated(tmp_path: Path) -> None:
    for rank in (0, 1, 2):
        write_snapshot(tmp_path, _replica(rank, 1))
    taken = take_snapshots(tmp_path)
    assert next(taken).rank == 0
    for rank in (0, 1, 2):
        write_snapshot(tmp_path, _replica(rank, 2))
    assert [(one.rank, one.iteration) for one in taken] == [(1, 1), (2, 1)]


def test_the_next_evaluator_has_the_rest_of_a_killed_ones_iteration(tmp_path: Path) -> None:
    for rank in (0, 1, 2):
        write_snapshot(tmp_path, _replica(rank, 1))
    killed = take_snapshots(tmp_path)
    assert next(killed).rank == 0
    for rank in (0, 1, 2):
        write_snapshot(tmp_path, _replica(rank, 2))
    assert [(one.rank, one.iteration) for one in take_snapshots(tmp_path)] == [
        (1, 1), (2, 1), (0, 2),
    ]  # fmt: skip
    assert [(one.rank, one.iteration) for one in take_snapshots(tmp_path)] == [(1, 2), (2, 2)]
    assert list(tmp_path.iterdir()) == []


def test_a_bad_file_costs_no_other_of_its_iteration(tmp_path: Path) -> None:
    for rank in (0, 1, 2):
        write_snapshot(tmp_path, _replica(rank, 1))
    (tmp_path / "000001-000000000001.npz").write_bytes(b"half a file")
    taken = take_snapshots(tmp_path)
    assert next(taken).rank == 0
    with pytest.raises(DataError, match=r"000001-000000000001\.npz"):
        next(taken)
    assert [one.rank for one in take_snapshots(tmp_path)] == [2]


def test_a_file_that_is_not_a_snapshot_is_named(tmp_path: Path) -> None:
    (tmp_path / "000000-000000000001.npz").write_bytes(b"half a file")
    with pytest.raises(DataError, match=r"000000-000000000001\.npz"):
        list(take_snapshots(tmp_path))


def test_a_foreign_file_is_named_and_delays_nothing(tmp_path: Path) -> None:
    (tmp_path / "foreign.npz").write_bytes(b"anything")
    with pytest.raises(DataError, match=r"foreign\.npz"):
        next(take_snapshots(tmp_path))
