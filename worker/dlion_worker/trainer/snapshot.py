"""A worker's state as bytes: for peers that rejoin, and for its own checkpoints.

Owns both forms. Bytes from a peer are untrusted: a snapshot has exactly the length that the
layout says, and every value in it is finite. A checkpoint is this worker's own file, written
beside the old one and moved over it, so that a crash in the middle loses nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError, DataError
from dlion_worker.npz_faults import NPZ_FAULTS, as_array
from dlion_worker.policies.interface import Flat

CheckpointValues = Mapping[str, NDArray[np.generic] | int | float | str]


class DamagedCheckpointError(DataError):
    """A checkpoint's file cannot be read."""


@dataclass(frozen=True)
class WorkerState:
    """What a worker needs to go on where another one is."""

    weights_D: Flat
    model_state_S: Flat
    optimizer_M: Flat


def pack(state: WorkerState, *, weights_only: bool) -> bytes:
    """Little-endian float32: weights, model state, and (unless `weights_only`) optimizer state."""
    parts = [state.weights_D, state.model_state_S]
    if not weights_only:
        parts.append(state.optimizer_M)
    return b"".join(np.ascontiguousarray(part, dtype="<f4").tobytes() for part in parts)


def unpack(payload: bytes, like: WorkerState, *, weights_only: bool) -> WorkerState:
    """The state in `payload`, with the sizes of `like`.

    Raises `ContractError` where the length is another or a value is not finite.
    """
    sizes = [like.weights_D.size, like.model_state_S.size]
    sizes.append(0 if weights_only else like.optimizer_M.size)
    if len(payload) != 4 * sum(sizes):
        msg = (
            f"a peer's state has {len(payload)} bytes, this model's has {4 * sum(sizes)}: "
            "the two workers run different programs"
        )
        raise ContractError(msg)
    values = np.frombuffer(payload, dtype="<f4").astype(np.float32)
    if not np.isfinite(values).all():
        raise ContractError("a peer's state holds values that are not finite; it is not taken over")
    weights_D, model_state_S, optimizer_M = np.split(values, np.cumsum(sizes)[:2])
    return WorkerState(
        weights_D, model_state_S, like.optimizer_M.copy() if weights_only else optimizer_M
    )


def storage_words(error: OSError) -> str:
    """What a failure to write means, and what to do about it."""
    where = f"{error.filename}: " if error.filename else ""
    return (
        f"{where}{error.strerror or error}. Free some space or make the folder writable; "
        "`dlion run --resume DIR` goes on from the last checkpoint"
    )


def save_checkpoint(path: Path, values: CheckpointValues) -> None:
    """Writes named values. Raises `OSError` (a full disk, say); the old file then stands whole."""
    path.parent.mkdir(exist_ok=True)  # the folder above is the run's: it is not made again
    fresh = path.with_suffix(".writing")
    try:
        with fresh.open("wb") as file:
            np.savez(file, allow_pickle=False, **{k: np.asarray(v) for k, v in values.items()})
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def load_checkpoint(path: Path) -> dict[str, NDArray[np.generic]] | None:
    """The values saved there; None: nothing is. Raises `DamagedCheckpointError`."""
    if not path.exists():
        return None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: as_array(archive[name]) for name in archive.files}
    except NPZ_FAULTS as error:
        raise DamagedCheckpointError(f"checkpoint {path} cannot be read ({error})") from error


def set_aside(path: Path) -> Path:
    """Renames a damaged file to a name that is free; that name. Raises: OSError."""
    name = f"{path.name}.damaged"
    aside, number = path.with_name(name), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{name}-{number}")
    return path.rename(aside)
