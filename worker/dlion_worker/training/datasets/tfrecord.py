"""TFRecord files of `tf.train.Example` with `image/encoded` and `image/class/label`."""

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import DataError
from dlion_worker.training.datasets.dataset import Labels
from dlion_worker.training.datasets.decoding import (
    READ_FAULTS,
    decode_all,
    image_fault,
    reading_options,
    without_autograph,
)
from dlion_worker.training.datasets.sources import DatasetCache
from dlion_worker.training.framework import tf

SUFFIXES = (".tfrecord", ".tfrecords", ".record")

_LABEL = {"image/class/label": tf.io.FixedLenFeature([], tf.int64)}
_IMAGE = {"image/encoded": tf.io.FixedLenFeature([], tf.string)}
_HEADER_BYTES = 12  # length (8), its checksum (4); the data is followed by its checksum (4)
_FOOTER_BYTES = 4
_BATCH_BYTES = 2**20
_MAX_RECORDS = 1024


class TFRecordSource:
    """The records of one file. Raises: DataError naming file and record, counted from 0."""

    def __init__(self, path: Path, cache: DatasetCache | None = None) -> None:
        """`cache`: where other workers of the job may have put the labels of the same file."""
        self.name = str(path)
        self._path = path
        self._count = record_count(path)
        self._batch = _batch_size(path.stat().st_size / self._count)
        cache = cache or DatasetCache()
        (self.labels,) = cache.arrays(("labels", self.name), lambda: (self._read_labels(),))

    def read(self, index_K: NDArray[np.int64]) -> NDArray[Any]:
        chosen = np.zeros(self._count, bool)
        chosen[index_K] = True
        chosen_batches = tf.data.Dataset.from_tensor_slices(chosen).batch(self._batch)
        pairs = tf.data.Dataset.zip((self._batches(), chosen_batches))
        return decode_all(
            pairs.map(without_autograph(_chosen_images)),
            len(index_K),
            source=self.name,
            find_fault=lambda shape: self._first_fault(index_K, shape),
        )

    def _batches(self) -> Any:
        """All records in batches, as a `tf.data.Dataset`, which verifies checksums.

        Per-record operations there would cost more than the reading.
        """
        return tf.data.TFRecordDataset(self.name).batch(self._batch)

    def _read_labels(self) -> Labels:
        batches = self._batches().map(without_autograph(_labels_of)).with_options(reading_options())
        try:
            labels = np.concatenate(list(batches.as_numpy_iterator()))
        except READ_FAULTS as error:
            raise self._first_fault(np.arange(self._count), ()) from error
        if labels.min() < 0 or labels.max() > np.iinfo(np.int32).max:
            number = int(np.argmax((labels < 0) | (labels > np.iinfo(np.int32).max)))
            raise DataError(
                f"{self.name}: record {number}: label out of range (given: {labels[number]}; "
                "allowed: from 0)"
            )
        return labels.astype(np.int32)

    def _first_fault(self, index_K: NDArray[np.int64], shape: tuple[int, ...]) -> DataError:
        """Check the records one by one; return the first error."""
        wanted = set(index_K.tolist())
        iterator = iter(tf.data.TFRecordDataset(self.name))
        for number in range(self._count):
            try:
                record = next(iterator)
            except (tf.errors.DataLossError, StopIteration):
                return self._error(number, "its checksum is wrong: the file is corrupt")
            if number not in wanted:
                continue
            try:
                example = tf.io.parse_single_example(record, {**_LABEL, **_IMAGE})
            except READ_FAULTS:
                return self._error(
                    number,
                    "not a tf.train.Example with image/encoded (one string) and "
                    "image/class/label (one integer)",
                )
            if fault := image_fault(example["image/encoded"], shape):
                return self._error(number, fault)
        return DataError(f"{self.name}: cannot be read. Write the file again")

    def _error(self, number: int, fault: str) -> DataError:
        return DataError(
            f"{self.name}: record {number}: {fault}. Write the file again, or remove it"
        )


def _labels_of(record_B: Any) -> Any:
    return tf.io.parse_example(record_B, _LABEL)["image/class/label"]


def _chosen_images(record_B: Any, chosen_B: Any) -> Any:
    return tf.io.parse_example(tf.boolean_mask(record_B, chosen_B), _IMAGE)["image/encoded"]


def _batch_size(record_bytes: float) -> int:
    """Records to read together: many small ones or few large ones, to limit memory."""
    return max(1, min(_MAX_RECORDS, int(_BATCH_BYTES / record_bytes)))


def record_count(path: Path) -> int:
    """Number of records according to their length fields; ignores checksums.

    Raises: DataError where the file ends inside a record: it is truncated, or still being written.
    """
    size = path.stat().st_size
    if size == 0:
        raise DataError(f"{path}: the file is empty. Write the file again, or take it away")
    number = start = 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        while start < size:
            end = start + _HEADER_BYTES
            if end <= size:
                (length,) = struct.unpack_from("<Q", view, start)
                end += length + _FOOTER_BYTES
            if end > size:
                raise DataError(
                    f"{path}: record {number}: the file ends inside it. It is cut short, or not a "
                    "TFRecord file. Write the file again, or take it away"
                )
            start = end
            number += 1
    return number
