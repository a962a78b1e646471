"""Snapshots of replicas as files, written by trainers and taken by the evaluator.

A file is written under another name and moved into place. If the evaluator is too slow, a newer
snapshot of a replica replaces the waiting one: the runner should notice soon that the target is
reached.
"""

from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import DataError
from dlion_api.names import Rank
from dlion_core.npz_errors import NPZ_ERRORS, as_array
from dlion_core.policies.interface import Value
from dlion_worker.training.snapshot import write_npz

_TAKEN = ".taken"
"""Follows the name of a file that no newer snapshot replaces."""


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
    there, which are evaluated once. Taken files are renamed, and loaded one by one. What a killed
    evaluator has taken is still there for the next one.

    Raises: DataError where a file is not a snapshot: a bug of its writer.
    """
    ranks: set[str] = set()
    while together := _lowest_iteration(folder, ranks):
        taken = [path for path in map(_taken, together) if path is not None]
        ranks.update(_rank_and_iteration(path)[0] for path in taken)
        yield from map(_loaded, taken)


def _lowest_iteration(folder: Path, ranks: AbstractSet[str]) -> list[Path]:
    """The files of that iteration, by rank; those of `ranks` are left out."""
    paths = (path for suffix in (".npz", _TAKEN) for path in folder.glob(f"*{suffix}"))
    waiting: defaultdict[str, dict[str, Path]] = defaultdict(dict)
    for path in sorted(paths):  # of two files of an iteration the taken one
        rank, iteration = _rank_and_iteration(path)
        if rank not in ranks:
            waiting[iteration][rank] = path
    return [*waiting[min(waiting)].values()] if waiting else []


def _rank_and_iteration(path: Path) -> tuple[str, str]:
    rank, _, iteration = path.name.partition(".")[0].partition("-")
    return rank, iteration


def _taken(path: Path) -> Path | None:
    """The file under a name at which no newer one replaces it; None if that has happened."""
    if path.suffix == _TAKEN:
        return path
    try:
        return path.rename(path.with_name(path.name + _TAKEN))
    except FileNotFoundError:
        return None


def _loaded(path: Path) -> ReplicaSnapshot:
    """The snapshot in this file, which is deleted."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            *numbers, time_s = archive["about"].tolist()
            return ReplicaSnapshot(
                Rank(int(numbers[0])),
                int(numbers[1]),
                int(numbers[2]),
                float(time_s),
                as_array(archive["weights_D"]),
                as_array(archive["model_state_S"]),
            )
    except NPZ_ERRORS as error:
        raise DataError(f"{path.name}: not a snapshot of a replica ({error})") from error
    finally:
        path.unlink(missing_ok=True)
