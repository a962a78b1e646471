"""Snapshots of replicas as files: put down whole by trainers, taken up by the evaluator.

A file is written under another name and moved into place. When the evaluator does not keep up, a
replica's oldest snapshot gives way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import DataError
from dlion_api.names import Rank
from dlion_worker.npz_faults import NPZ_FAULTS, as_array

MOST_WAITING = 3
"""Snapshots of one replica that may wait; at 4.5 MB each they are not to fill a disk."""


@dataclass(frozen=True)
class Replica:
    """One replica at one moment: what an evaluation needs and what its record says."""

    rank: Rank
    iteration: int
    samples: int
    time_s: float
    weights_D: NDArray[np.float32]
    model_state_S: NDArray[np.float32]


def put_down(folder: Path, replica: Replica) -> None:
    """Hands a snapshot over. Raises `OSError` where the disk is full; nothing is left then."""
    name = f"{replica.rank:06d}-{replica.iteration:012d}"
    fresh = folder / f"{name}.writing"
    try:
        with fresh.open("wb") as file:
            np.savez(
                file,
                allow_pickle=False,
                about=np.asarray(
                    [replica.rank, replica.iteration, replica.samples, replica.time_s], np.float64
                ),
                weights_D=replica.weights_D,
                model_state_S=replica.model_state_S,
            )
        fresh.replace(folder / f"{name}.npz")
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    waiting = sorted(folder.glob(f"{replica.rank:06d}-*.npz"))
    for old in waiting[:-MOST_WAITING]:
        old.unlink(missing_ok=True)


def take_up(folder: Path) -> Iterator[Replica]:
    """Every snapshot that waits, least iteration first; each is removed as it is taken.

    Raises: DataError where a file is no snapshot: a defect of whoever wrote it.
    """
    for path in sorted(folder.glob("*.npz"), key=lambda path: path.stem.partition("-")[2]):
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                rank, iteration, samples, time_s = archive["about"].tolist()
                replica = Replica(
                    Rank(int(rank)),
                    int(iteration),
                    int(samples),
                    float(time_s),
                    as_array(archive["weights_D"]),
                    as_array(archive["model_state_S"]),
                )
        except FileNotFoundError:  # it gave way to a newer one
            continue
        except NPZ_FAULTS as error:
            raise DataError(f"{path.name}: not a snapshot of a replica ({error})") from error
        path.unlink(missing_ok=True)
        yield replica
