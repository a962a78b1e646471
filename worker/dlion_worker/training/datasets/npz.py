"""`.npz` files with arrays `x` and `y`, or `x_train`, `y_train` and optionally `x_test`, `y_test`.

Never loads pickled objects, and validates each array's header before reading it.
"""

import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import DataError
from dlion_core.npz_errors import NPZ_ERRORS, as_array
from dlion_worker.training.datasets.dataset import Samples, checked
from dlion_worker.training.datasets.sources import MAX_BYTES

SUFFIXES = (".npz",)


def read_train(path: Path) -> Samples:
    """The file's training samples."""
    names = _names(path)
    prefix = "" if "x" in names else "_train"
    return _pair(path, names, f"x{prefix}", f"y{prefix}")


def read_held_out(path: Path) -> Samples | None:
    """The file's held-out samples; None if it has none."""
    names = _names(path)
    if "x_test" not in names:
        return None
    return _pair(path, names, "x_test", "y_test")


def read_evaluation(path: Path) -> Samples:
    """The samples of a file that has only held-out ones, under any of the names."""
    return read_held_out(path) or read_train(path)


def _pair(path: Path, names: frozenset[str], x: str, y: str) -> Samples:
    missing = [n for n in (x, y) if n not in names]
    if missing:
        raise DataError(
            f"{path}: array missing (given: {', '.join(sorted(names)) or 'none'}; allowed: x and "
            "y, or x_train and y_train). Write it with numpy.savez(path, x=..., y=...)"
        )
    samples = checked(_array(path, x), _array(path, y), str(path))
    if samples[1].ndim > 1:  # the samples of a class could not be found
        raise DataError(
            f"{path}: {y} must have one class number for each sample (given: "
            f"{list(samples[1].shape)}; allowed: [N]). Turn one-hot rows into numbers with argmax; "
            "return labels of several numbers from load_data in a program"
        )
    return samples


def _names(path: Path) -> frozenset[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return frozenset(n.removesuffix(".npy") for n in archive.namelist())
    except NPZ_ERRORS as error:
        raise _corrupt(path, error) from error


def _array(path: Path, name: str) -> NDArray[Any]:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as file:
            _check_header(path, name, file, archive.getinfo(f"{name}.npy").file_size)
        with path.open("rb") as whole, np.load(whole, allow_pickle=False) as arrays:
            return as_array(arrays[name])
    except NPZ_ERRORS as error:
        raise _corrupt(path, error) from error


def _check_header(path: Path, name: str, file: IO[bytes], size_bytes: int) -> None:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    else:
        shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    if dtype.hasobject:
        raise DataError(
            f"{path}: array {name} holds Python objects, which are never loaded. Save numbers"
        )
    wanted = dtype.itemsize
    for side in shape:
        wanted *= side
    if wanted > min(size_bytes, MAX_BYTES):
        raise DataError(
            f"{path}: array {name} claims {wanted} bytes (shape {list(shape)}, {dtype}; the file "
            f"holds {size_bytes}, allowed: {MAX_BYTES}). Write the file again"
        )


def _corrupt(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path}: not a readable .npz file ({type(error).__name__}: {error}). "
        "Write the file again, or remove it"
    )
