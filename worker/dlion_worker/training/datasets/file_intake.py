"""Reads this worker's samples from single files of a growing data set.

Used at the start (`load_watched`) and later by `FolderWatch`. Each file is partitioned by its name
and labels, so workers need not know what others have read. A worker's share of a class is the same
in all files.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dlion_api.errors import DataError
from dlion_api.names import WorkerIdentity
from dlion_api.spec import Job
from dlion_worker.training.datasets import folder, npz, open_sources, selection, tfrecord
from dlion_worker.training.datasets.dataset import (
    DataSet,
    Fingerprint,
    Labels,
    Samples,
    check_alike,
    checked,
)
from dlion_worker.training.datasets.partition import (
    Indices,
    part_index,
    partition_of_file,
    shares_of_classes,
)
from dlion_worker.training.datasets.sources import ArraySource, SampleSource


class FileIntake:
    """Turns the files of one folder into this worker's samples."""

    def __init__(
        self,
        job: Job,
        identity: WorkerIdentity,
        path: Path,
        *,
        class_names: Sequence[str] | None,
        class_count: int,
        input_shape: tuple[int, ...],
    ) -> None:
        self._job, self._identity, self._path = job, identity, path
        self._spec = job.spec.trainer.dataset
        self._class_names = class_names
        self._class_count = class_count
        self._input_shape = input_shape
        self._no_samples = np.zeros((0, *input_shape), np.uint8), np.zeros(0, np.int32)
        self._dtype: np.dtype[Any] | None = None
        """Type of all samples: that of the first ones."""
        self._share_CP = shares_of_classes(
            job.workers(), self._spec, class_count=class_count, seed=[job.spec.trainer.seed]
        )
        self._duplicates = (
            selection.NearDuplicates(self._spec.near_duplicate_threshold)
            if self._spec.drop_near_duplicates
            else None
        )
        self.near_duplicates_left_out = 0

    def present(self) -> dict[str, Fingerprint]:
        """Return the current data files, by path below the folder."""
        suffixes = {
            "images": folder.SUFFIXES,
            "npz": npz.SUFFIXES,
            "tfrecord": tfrecord.SUFFIXES,
        }[self._spec.format or "tfrecord"]
        pattern = "*/*" if self._spec.format == "images" else "*"
        files: dict[str, Fingerprint] = {}
        for file in sorted(self._path.glob(pattern)):
            if file.suffix.lower() not in suffixes or file.name.startswith("."):
                continue
            try:
                status = file.stat()
            except OSError:  # deleted after the listing
                continue
            files[str(file.relative_to(self._path))] = (status.st_size, status.st_mtime_ns)
        return files

    def take(self, keys: Sequence[str]) -> tuple[dict[str, Samples], dict[str, str]]:
        """Return this worker's samples by file (perhaps none), and the faults of bad files."""
        if self._spec.format == "images":
            taken, faults = self._take_images(keys)
        else:
            taken, faults = {}, {}
            for key in keys:
                try:
                    taken[key] = self._own(key, self._open(key))
                except DataError as error:
                    faults[key] = str(error)
        return self._without_duplicates(taken), faults

    def forget(self, keys: Sequence[str]) -> None:
        """Drop deleted files from the near-duplicate comparison."""
        if self._duplicates is not None:
            self._duplicates.forget(frozenset(keys))

    def remember(self, parts: dict[str, Samples]) -> None:
        """Take the type and the near-duplicates from samples of an earlier intake."""
        for x, _ in parts.values():
            self._require_dtype(x.dtype)
        if parts and self._duplicates is not None:
            self._without_duplicates(parts)

    def _open(self, key: str) -> SampleSource:
        file = self._path / key
        if not file.is_file():
            raise DataError(f"{file}: deleted")
        if self._spec.format == "npz":
            return ArraySource(str(file), *npz.read_train(file))
        return tfrecord.TFRecordSource(file)

    def _own(self, key: str, source: SampleSource) -> Samples:
        """Raises: DataError where the file does not fit the rest of the data set."""
        index = self._own_indices(key, source.labels)
        if not len(index):
            return self._no_samples
        x, y = checked(source.read(index), source.labels[index], source.name)
        check_alike(x, self._input_shape, source.name)
        if x.dtype != (expected := self._require_dtype(x.dtype)):
            raise DataError(
                f"{source.name}: samples of another type (given: {x.dtype}; allowed: {expected}, "
                "as in the rest of the data set). Save all as one type"
            )
        return x, y

    def _require_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the type of all samples, which is this one if not known yet."""
        if self._dtype is None:
            self._dtype = dtype
        return self._dtype

    def _own_indices(self, key: str, labels: Labels) -> Indices:
        spec, seed = self._spec, [self._job.spec.trainer.seed, zlib.crc32(key.encode())]
        open_sources.class_count_of(
            self._class_names or [""] * self._class_count, str(self._path / key), labels
        )
        index = selection.of_classes(labels, spec.keep_classes)
        if not open_sources.is_per_worker(spec):
            workers = self._job.workers()
            parts = partition_of_file(labels[index], len(workers), self._share_CP, seed=seed)
            index = index[parts[part_index(self._identity, workers)]]
        own_seed = [*seed, self._identity.rank]
        fraction = spec.keep_fraction
        return index[selection.subsampled(labels[index], fraction, seed=own_seed, of_file=True)]

    def _take_images(self, keys: Sequence[str]) -> tuple[dict[str, Samples], dict[str, str]]:
        """Read image files, of one sample each; this worker's are decoded together."""
        taken: dict[str, Samples] = {}
        faults: dict[str, str] = {}
        own: list[tuple[str, int]] = []
        names = list(self._class_names or ())
        for key in keys:
            path, name = self._path / key, Path(key).parent.name
            if name not in names:
                allowed = ", ".join(names)
                faults[key] = f"{path}: no such class (given: {name}; allowed: {allowed})"
            elif not len(self._own_indices(key, np.array([names.index(name)], np.int32))):
                taken[key] = self._no_samples
            elif fault := folder.file_fault(path, self._input_shape):
                faults[key] = fault
            else:
                own.append((key, names.index(name)))
        if own:
            files = [(self._path / key, label) for key, label in own]
            source = folder.ImageSource(str(self._path), files)
            images = source.read(np.arange(len(own)))
            for row, (key, _) in enumerate(own):
                taken[key] = (images[row : row + 1], source.labels[row : row + 1])
        return taken, faults

    def _without_duplicates(self, taken: dict[str, Samples]) -> dict[str, Samples]:
        filled = {key: pair for key, pair in taken.items() if len(pair[1])}
        if self._duplicates is None or not filled:
            return taken
        x = np.concatenate([x for x, _ in filled.values()])
        y = np.concatenate([y for _, y in filled.values()])
        row_key = [key for key, (_, labels) in filled.items() for _ in labels]
        kept = self._duplicates.select_new(x, y, row_key)
        self.near_duplicates_left_out += len(y) - len(kept)
        result = dict.fromkeys(taken, (x[:0], y[:0]))
        for key in filled:
            rows = np.array([row for row in kept if row_key[row] == key], np.int64)
            result[key] = (x[rows], y[rows])
        return result


def load_watched(
    job: Job,
    identity: WorkerIdentity,
    path: Path,
    held_out: Samples,
    names: list[str] | None,
) -> DataSet:
    """The data set at the start, one part per file.

    Unreadable files are left to `FolderWatch`, because they may be incomplete. Raises: DataError.
    """
    if not path.is_dir():
        raise DataError(
            f"trainer.dataset.watch: not a directory: {path}. Only a directory can be watched"
        )
    class_count = open_sources.class_count_of(names, str(path), held_out[1])
    intake = FileIntake(
        job,
        identity,
        path,
        class_names=names,
        class_count=class_count,
        input_shape=tuple(held_out[0].shape[1:]),
    )
    files = intake.present()
    taken, faults = intake.take(list(files))
    parts = {key: pair for key, pair in taken.items() if len(pair[1])}
    own = sum(len(y) for _, y in parts.values())
    return DataSet(
        parts=parts,
        held_out_x=held_out[0],
        held_out_y=held_out[1],
        class_count=class_count,
        training_set_samples=own * len(job.workers()),
        near_duplicates_left_out=intake.near_duplicates_left_out,
        files={key: mark for key, mark in files.items() if key not in faults},
    )
