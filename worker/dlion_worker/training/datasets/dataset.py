"""A worker's samples, and validation of arrays from outside."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import DataError

Labels = NDArray[np.int32]
Samples = tuple[NDArray[Any], NDArray[Any]]
"""x [N, ...] and y [N, ...], of equal length. Several inputs or targets are an array of records."""

Augment = Callable[[NDArray[Any], NDArray[Any], Sequence[int]], Samples]
"""Changes a training batch, with random numbers of that seed."""

MAX_FIELDS = 256
"""Inputs or targets of a sample."""


Fingerprint = tuple[int, int]
"""Size in bytes and modification time in nanoseconds; a different value means changed content."""


@dataclass(frozen=True)
class DataSet:
    """This worker's share of the training samples, and all held-out samples.

    `parts` maps keys to samples: a single part, or one per file where the data grows.
    """

    parts: Mapping[str, Samples]
    held_out_x: NDArray[Any]
    held_out_y: NDArray[Any]
    class_count: int
    """0: `y` are targets, not labels."""
    training_set_samples: int
    """Samples of all workers, as far as the manifest determines it. Where each has its own data,
    assumes as many as this worker has."""
    near_duplicates_left_out: int = 0
    unread_samples: int = 0
    """Samples of the share that a trial has not read."""
    files: Mapping[str, Fingerprint] = field(default_factory=dict)
    """Watched files as of reading, whether or not they contain samples of this worker."""
    augment: Augment | None = None
    """Augmentation of training batches only."""
    scales_pixels: bool = True
    """Models get uint8 samples as floats in 0..1. False: as they are, as from Keras' `fit()`."""
    encoder: Any = None
    """The Keras model whose outputs these samples are; None: they are the original ones."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.held_out_x.shape[1:])

    @property
    def input_dtype(self) -> np.dtype[Any]:
        """Type of a sample's values."""
        return self.held_out_x.dtype

    @property
    def target_shape(self) -> tuple[int, ...] | None:
        """Shape of one sample's label or target; None: it has several."""
        y = self.held_out_y
        return tuple(y.shape[1:]) if y.dtype.names is None else None

    @property
    def samples(self) -> int:
        """Number of this worker's training samples."""
        return sum(len(y) for _, y in self.parts.values())


def checked(x: object, y: object, source: str) -> Samples:
    """Validate the arrays as samples (uint8, int32 or float32) and labels from 0.

    Raises: DataError, naming `source`.
    """
    if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray):
        raise DataError(
            f"{source}: samples must be NumPy arrays (given: x {type(x).__name__}, y "
            f"{type(y).__name__}). Convert them with numpy.asarray. Several inputs or targets are "
            "a dict of arrays by name"
        )
    _check_shapes(x, y, source, "y [N]")
    return _values(x, source), _labels(y, source)


def checked_targets(x: object, y: object, source: str) -> Samples:
    """Validate what a program's `load_data` returns: as `checked`, or targets in place of labels.

    A dict of arrays becomes an array of records. Raises: DataError, naming `source`.
    """
    x, y = _records(x, "x", source), _records(y, "y", source)
    if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray):
        return checked(x, y, source)
    has_targets = y.dtype.names is not None or y.dtype.kind == "f"
    if x.dtype.names is None and not has_targets:
        return checked(x, y, source)
    _check_shapes(x, y, source, "y [N, ...]")
    if x.dtype.names is None:
        x = _values(x, source)
    if y.dtype.names is None:
        y = _values(y, f"{source}: y") if has_targets else _labels(y, source)
    return x, y


def _check_shapes(x: NDArray[Any], y: NDArray[Any], source: str, allowed_y: str) -> None:
    has_fields = x.dtype.names is not None
    if not has_fields:
        _check_type(x, source)
    are_alike = (x.ndim > 1 or has_fields) and y.ndim > 0 and len(x) == len(y)
    if are_alike and x.size and y.size:
        return
    advice = ""
    if x.ndim == 1 and not has_fields:
        advice = ". A single value for each sample needs a dimension of its own: x[:, None]"
    raise DataError(
        f"{source}: wrong shapes (given: x {list(x.shape)}, y {list(y.shape)}; allowed: "
        f"x [N, ...], {allowed_y}, N at least 1){advice}"
    )


def _records(arrays: object, name: str, source: str) -> Any:
    """A dict of arrays as one array of records; anything else unchanged."""
    if isinstance(arrays, np.ndarray) and arrays.dtype.names is not None:
        arrays = {key: arrays[key] for key in arrays.dtype.names}
    if not isinstance(arrays, dict):
        return arrays
    if not 0 < len(arrays) <= MAX_FIELDS or not all(
        isinstance(key, str) and key and isinstance(each, np.ndarray) and each.ndim
        for key, each in arrays.items()
    ):
        raise DataError(
            f"{source}: {name} as a dict must have from 1 to {MAX_FIELDS} names, each with a NumPy "
            "array [N, ...]. Convert them with numpy.asarray"
        )
    values = {
        key: _values(arrays[key], f"{source}: {name}[{key!r}]")
        for key in sorted(arrays)  # so that train and test have one type
    }
    if name == "y":  # no pixels
        values = {k: v.astype(np.int32) if v.dtype == np.uint8 else v for k, v in values.items()}
    lengths = {len(each) for each in values.values()}
    if len(lengths) > 1:
        raise DataError(
            f"{source}: {name} has arrays of different lengths (given: "
            f"{', '.join(f'{key} {len(each)}' for key, each in values.items())})"
        )
    form = [(key, each.dtype, each.shape[1:]) for key, each in values.items()]
    records = np.empty(lengths.pop(), form)
    for key, each in values.items():
        records[key] = each
    return records


def class_labels(y: NDArray[Any]) -> Labels:
    """The class of each sample; 0 where `y` has no single class number for it."""
    return y if y.dtype == np.int32 and y.ndim == 1 else np.zeros(len(y), np.int32)


_TEXT_ADVICE = (
    ". Turn text into numbers, for example with keras.layers.TextVectorization or StringLookup"
)


def _check_type(x: NDArray[Any], source: str) -> None:
    if x.dtype.kind not in "fiub":
        is_text = x.dtype.kind in "STU" or isinstance(next(iter(x.flat), None), str | bytes)
        raise DataError(
            f"{source}: unsupported sample type (given: {x.dtype}; allowed: "
            f"uint8 for pixels, integers, floats){_TEXT_ADVICE if is_text else ''}"
        )


def _values(x: NDArray[Any], source: str) -> NDArray[Any]:
    _check_type(x, source)
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind == "f":
        with np.errstate(over="ignore"):
            values = x.astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            bad = int(np.argmin(np.isfinite(values.reshape(len(x), -1)).all(axis=1)))
            raise DataError(f"{source}: sample {bad} {_why_not_finite(x[bad])}")
        return values
    limits = np.iinfo(np.int32)
    if x.size and not limits.min <= x.min() <= x.max() <= limits.max:
        raise DataError(
            f"{source}: integer out of range (given: {x.min()} to {x.max()}; allowed: "
            f"{limits.min} to {limits.max}). Use floats, or smaller numbers"
        )
    return x.astype(np.int32, copy=False)


def _why_not_finite(x: NDArray[Any]) -> str:
    """What is wrong with a sample that is not finite as float32."""
    if not np.isfinite(x).all():
        return "holds NaN or infinity. Clean the data, or remove it"
    given, limit = x.flat[np.argmax(np.abs(x))], np.finfo(np.float32).max
    return (
        f"is out of the range of float32 (given: {given:.4g}; allowed: {-limit:.2g} to "
        f"{limit:.2g}). Scale the data"
    )


def _labels(y: NDArray[Any], source: str) -> Labels:
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]  # keras.datasets return [N, 1]
    if y.dtype.kind not in "iub":
        advice = "Turn one-hot rows into numbers with argmax"
        if y.dtype.kind != "f":
            advice = "Give each class a number, the same one at all sites"
        raise DataError(
            f"{source}: labels must be class numbers (given: {y.dtype}; allowed: integers from 0). "
            f"{advice}"
        )
    if y.min() < 0 or y.max() > np.iinfo(np.int32).max:
        raise DataError(
            f"{source}: label out of range (given: {y.min()} to {y.max()}; allowed: from 0)"
        )
    return y.astype(np.int32, copy=False)


def check_alike(x: NDArray[Any], input_shape: tuple[int, ...], source: str) -> None:
    """Raises: DataError where samples have another shape than the rest of the data set."""
    if tuple(x.shape[1:]) != input_shape:
        raise DataError(
            f"{source}: samples of another shape (given: {list(x.shape[1:])}; allowed: "
            f"{list(input_shape)}, as in the rest of the data set). Bring all to one size"
        )
