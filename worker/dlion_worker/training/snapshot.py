"""A worker's state as bytes: for peers that rejoin, and for its own checkpoints.

Bytes from a peer are untrusted: a snapshot must have the exact length of the layout and only finite
values. A checkpoint is written to a new file that replaces the old one, so a crash loses nothing.
"""

import math
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError, DataError
from dlion_core.npz_errors import NPZ_ERRORS, as_array
from dlion_core.policies.interface import Flat, Value
from dlion_worker.checkpoint_mac import MacWriter, has_valid_mac

_HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
MAX_MEMBERS = 10_000
"""Arrays of a checkpoint: a policy keeps some per peer."""


class DamagedCheckpointError(DataError):
    """A checkpoint file cannot be read, or is not one that this worker saved."""


class UntrustedCheckpointError(DamagedCheckpointError):
    """A checkpoint file lacks this worker's MAC, and may be whole."""


@dataclass(frozen=True)
class TrainingState:
    """What a worker needs to continue from another worker's position."""

    weights_D: Flat
    model_state_S: Flat
    optimizer_M: Flat


class OtherProgramError(ContractError):
    """A peer's state has another length than this worker's."""


def pack(state: TrainingState, *, weights_only: bool) -> bytes:
    """Little-endian float32: weights, model state, and (unless `weights_only`) optimizer state."""
    parts = [state.weights_D, state.model_state_S]
    if not weights_only:
        parts.append(state.optimizer_M)
    return b"".join(np.ascontiguousarray(part, dtype="<f4").tobytes() for part in parts)


def unpack(payload: bytes, like: TrainingState, *, weights_only: bool) -> TrainingState:
    """Decode a state with the sizes of `like`.

    Raises: OtherProgramError where the length differs; ContractError where a value is not finite.
    """
    sizes = [like.weights_D.size, like.model_state_S.size]
    sizes.append(0 if weights_only else like.optimizer_M.size)
    if len(payload) != 4 * sum(sizes):
        msg = (
            f"a peer's state has {len(payload)} bytes, this model's has {4 * sum(sizes)}: "
            "the two workers run different programs"
        )
        raise OtherProgramError(msg)
    values = np.frombuffer(payload, dtype="<f4").astype(np.float32)
    if not np.isfinite(values).all():
        raise ContractError("a peer's state has values that are not finite; it is not adopted")
    weights_D, model_state_S, optimizer_M = np.split(values, np.cumsum(sizes)[:2])
    return TrainingState(
        weights_D, model_state_S, like.optimizer_M if weights_only else optimizer_M
    )


def storage_error_message(error: OSError) -> str:
    """What a failed write means, and what to do about it."""
    where = f"{error.filename}: " if error.filename else ""
    return (
        f"{where}{error.strerror or error}. Free some space or make the folder writable; "
        "`dlion run --resume DIR` continues from the last checkpoint"
    )


def save_checkpoint(path: Path, values: Mapping[str, Value], *, key: bytes = b"") -> None:
    """Write named values to the disk itself, with a MAC if there is a key. Raises: as
    `write_npz`."""
    path.parent.mkdir(exist_ok=True)  # the parent is the run's folder: never recreate it
    write_npz(path, values, is_synced=True, key=key)


def write_npz(
    path: Path, values: Mapping[str, Value], *, is_synced: bool, key: bytes = b""
) -> None:
    """Replace an archive; with a key, a MAC follows it. Raises `OSError` (a full disk, say); the
    old file then remains."""
    temporary = path.with_suffix(".writing")
    try:
        with temporary.open("wb") as file:
            target = MacWriter(file, key) if key else file
            np.savez(target, allow_pickle=False, **{k: np.asarray(v) for k, v in values.items()})
            if isinstance(target, MacWriter):
                target.finish()
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def load_checkpoint(
    path: Path, *, max_bytes: int, key: bytes = b""
) -> dict[str, NDArray[np.generic]] | None:
    """Load the saved values; None: there is no file.

    With a key, nothing is parsed before the MAC is verified. Without one a small archive can
    inflate to any size, so that no more than `max_bytes` are read. Raises: DamagedCheckpointError,
    UntrustedCheckpointError.
    """
    if not path.exists():
        return None
    try:
        with path.open("rb") as file:
            if key and not has_valid_mac(file, key):
                raise UntrustedCheckpointError(
                    f"checkpoint {path} is not trusted, as it lacks the MAC of this worker in this"
                    " run: an earlier release saved it, the site's authority has a new key, it"
                    " belongs to another worker or run, or it was changed; check who may write to"
                    " the keeper's claim"
                )
            _check_sizes(file, max_bytes)
            with np.load(file, allow_pickle=False) as archive:
                return {name: as_array(archive[name]) for name in archive.files}
    except NPZ_ERRORS as error:
        raise DamagedCheckpointError(f"checkpoint {path} cannot be read ({error})") from error


def _check_sizes(file: BinaryIO, max_bytes: int) -> None:
    """Raise ValueError if the archive's members are longer together, or an array is longer than its
    member.

    `zipfile` reads no more of a member than its directory has, so that a false length ends in a
    wrong checksum.
    """
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if len(members) > MAX_MEMBERS:
            raise ValueError(f"{len(members)} arrays; allowed: up to {MAX_MEMBERS}")
        total = sum(member.file_size for member in members)
        if total > max_bytes:
            raise ValueError(f"{total} bytes once inflated; allowed: up to {max_bytes}")
        for member in members:
            with archive.open(member) as stream:
                _check_length(member, stream)
    file.seek(0)


def _check_length(member: zipfile.ZipInfo, stream: IO[bytes]) -> None:
    """Raise ValueError if the array's header needs more memory than the member has: NumPy would
    allocate it first."""
    try:
        version = np.lib.format.read_magic(stream)
    except ValueError as error:
        raise ValueError("a member of the archive is not an array") from error
    if version not in _HEADER_READERS:
        raise ValueError(f"{member.filename}: an array of format {version}")
    shape, _, dtype = _HEADER_READERS[version](stream)
    if math.prod(shape) * dtype.itemsize > member.file_size:
        raise ValueError(f"{member.filename}: an array of {shape} in {member.file_size} bytes")


def set_aside(path: Path) -> Path:
    """Rename a damaged file to a free name, and return that name. Raises: OSError."""
    name = f"{path.name}.damaged"
    aside, number = path.with_name(name), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{name}-{number}")
    return path.rename(aside)
