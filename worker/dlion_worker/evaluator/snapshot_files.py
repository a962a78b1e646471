"""Snapshots of replicas as files, written by trainers and taken by the evaluator.

A file is written under another name and moved into place. If the evaluator is too slow, a newer
snapshot of a replica replaces the waiting one: the runner should notice soon that the target is
reached.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import DataError
from dlion_api.names import Rank
from dlion_core.npz_errors import NPZ_ERRORS, as_array
from dlion_core.policies.interface import Value
from dlion_worker.training.snapshot import write_npz


@dataclass(frozen=True)
class ReplicaSnapshot:
    """One replica at one moment: what an evaluation and its record need."""

    rank: Rank
    iteration: int
    samples: int
    time_s: float
    weights_D: NDArray[np.float32]
    model_state_S: NDArray[np.float32]


def write_snapshot(folder: Path, replica: ReplicaSnapshot) -> None:
    """Write a snapshot. Raises `OSError` where the disk is full; no partial file remains."""
    name = f"{replica.rank:06d}-{replica.iteration:012d}"
    about = [replica.rank, replica.iteration, replica.samples, replica.time_s]
    values: dict[str, Value] = {
        "about": np.asarray(about, np.float64),
        "weights_D": replica.weights_D,
        "model_state_S": replica.model_state_S,
    }
    write_npz(folder / f"{name}.npz", values, is_synced=False)
    for old in folder.glob(f"{replica.rank:06d}-*.npz"):
        if old.stem != name:
            old.unlink(missing_ok=True)


def take_snapshots(folder: Path) -> Iterator[ReplicaSnapshot]:
    """Yield one waiting snapshot of each replica, lowest iteration first, and delete its file.

    The folder is read again after each iteration: while one is evaluated, newer ones replace the
    others. Those of the same iteration are taken together: replicas in lock step have equal weights
    there, which are evaluated once.

    Raises: DataError where a file is not a snapshot: a bug of its writer.
    """
    taken: set[str] = set()
    while True:
        names = ((path, *path.stem.partition("-")) for path in folder.glob("*.npz"))
        waiting = sorted(
            (iteration, rank, path) for path, rank, _, iteration in names if rank not in taken
        )
        if not waiting:
            return
        together = [(rank, path) for iteration, rank, path in waiting if iteration == waiting[0][0]]
        replicas = [(rank, _taken(path)) for rank, path in together]
        taken.update(rank for rank, replica in replicas if replica is not None)
        yield from (replica for _, replica in replicas if replica is not None)


def _taken(path: Path) -> ReplicaSnapshot | None:
    """The snapshot in this file, which is deleted; None if it gave way to a newer one."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            *numbers, time_s = archive["about"].tolist()
            replica = ReplicaSnapshot(
                Rank(int(numbers[0])),
                int(numbers[1]),
                int(numbers[2]),
                float(time_s),
                as_array(archive["weights_D"]),
                as_array(archive["model_state_S"]),
            )
    except FileNotFoundError:
        return None
    except NPZ_ERRORS as error:
        raise DataError(f"{path.name}: not a snapshot of a replica ({error})") from error
    path.unlink(missing_ok=True)
    return replica
