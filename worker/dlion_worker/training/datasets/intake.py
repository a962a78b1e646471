"""Files of a growing data set, one at a time: this worker's samples of each.

Used at the start (`load_watched`) and by `FolderWatch` later. Who has which sample of a file
follows from the file's name and labels, so that no worker needs to know what others have read; what
share of a class each has is the same in all files.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dlion_api.errors import DataError
from dlion_worker.training.datasets import folder, npz, opening, selection, tfrecord
from dlion_worker.training.datasets.dataset import (
    DataSet,
    Fingerprint,
    Labels,
    Samples,
    check_alike,
    checked,
)
from dlion_worker.training.datasets.decoding import fault_of
from dlion_worker.training.datasets.partition import (
    Indices,
    partition_of_file,
    place_of,
    shares_of_classes,
)
from dlion_worker.training.datasets.sources import ArraySource, Source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlion_api.names import WorkerIdentity
    from dlion_api.spec import Job


class Intake:
    """How files below one folder become this worker's samples."""

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
        self._dtype: np.dtype[Any] | None = None
        """Of all samples: that of the first ones."""
        seed = [job.spec.trainer.seed]
        self._share_CP = shares_of_classes(
            job.workers(), self._spec, class_count=class_count, seed=seed
        )
        self._duplicates = (
            selection.NearDuplicates(self._spec.near_duplicate_threshold)
            if self._spec.drop_near_duplicates
            else None
        )
        self.near_duplicates_left_out = 0

    def present(self) -> dict[str, Fingerprint]:
        """The data files that are there now, by their path below the folder."""
        suffixes = {
            "images": folder.SUFFIXES,
            "npz": npz.SUFFIXES,
            "tfrecord": tfrecord.SUFFIXES,
        }[self._spec.format or "tfrecord"]
        pattern = "*/*" if self._spec.format == "images" else "*"
        found: dict[str, Fingerprint] = {}
        for file in sorted(self._path.glob(pattern)):
            if file.suffix.lower() not in suffixes or file.name.startswith("."):
                continue
            try:
                status = file.stat()
            except OSError:  # gone between the listing and the look at it
                continue
            found[str(file.relative_to(self._path))] = (status.st_size, status.st_mtime_ns)
        return found

    def take(self, keys: Sequence[str]) -> tuple[dict[str, Samples], dict[str, str]]:
        """This worker's samples of each file (perhaps none), and why some cannot be read."""
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
        """Files that are gone no longer count as what later ones are compared with."""
        if self._duplicates is not None:
            self._duplicates.forget(frozenset(keys))

    def remember(self, parts: dict[str, Samples]) -> None:
        """Samples that were taken by an earlier intake say of what type all are, and count for
        near-duplicates too."""
        for x, _ in parts.values():
            self._hold_to(x.dtype)
        if parts and self._duplicates is not None:
            self._without_duplicates(parts)

    def _open(self, key: str) -> Source:
        file = self._path / key
        if not file.is_file():
            raise DataError(f"{file}: gone")
        if self._spec.format == "npz":
            return ArraySource(str(file), *npz.read_train(file))
        return tfrecord.TFRecordSource(file)

    def _own(self, key: str, source: Source) -> Samples:
        """Raises DataError where the file does not fit the rest of the data set."""
        index = self._own_places(key, source.labels)
        if not len(index):
            return np.zeros((0, *self._input_shape), np.uint8), np.zeros(0, np.int32)
        x, y = checked(source.read(index), source.labels[index], source.name)
        check_alike(x, self._input_shape, source.name)
        if x.dtype != (held := self._hold_to(x.dtype)):
            raise DataError(
                f"{source.name}: samples of another type (given: {x.dtype}; allowed: {held}, as in "
                "the rest of the data set). Save all as one type"
            )
        return x, y

    def _hold_to(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The type of all samples; from now on this one, where it was not known yet."""
        if self._dtype is None:
            self._dtype = dtype
        return self._dtype

    def _own_places(self, key: str, labels: Labels) -> Indices:
        spec, seed = self._spec, [self._job.spec.trainer.seed, zlib.crc32(key.encode())]
        opening.class_count_of(
            self._class_names or [""] * self._class_count, str(self._path / key), labels
        )
        index = selection.of_classes(labels, spec.keep_classes)
        if not opening.is_own(spec):
            workers = self._job.workers()
            parts = partition_of_file(labels[index], len(workers), self._share_CP, seed=seed)
            index = index[parts[place_of(self._identity, workers)]]
        own_seed = [*seed, self._identity.rank]
        return index[selection.drawn(labels[index], spec.keep_fraction, seed=own_seed)]

    def _take_images(self, keys: Sequence[str]) -> tuple[dict[str, Samples], dict[str, str]]:
        """Image files hold one sample each: those that are this worker's are decoded together."""
        taken: dict[str, Samples] = {}
        faults: dict[str, str] = {}
        own: list[tuple[str, int]] = []
        for key in keys:
            name = Path(key).parent.name
            if name not in (self._class_names or ()):
                faults[key] = (
                    f"{self._path / key}: no such class (given: {name}; allowed: "
                    f"{', '.join(self._class_names or ())})"
                )
                continue
            label = list(self._class_names or ()).index(name)
            if len(self._own_places(key, np.array([label], np.int32))):
                if fault := self._image_fault(self._path / key):
                    faults[key] = fault
                else:
                    own.append((key, label))
            else:
                taken[key] = (np.zeros((0, *self._input_shape), np.uint8), np.zeros(0, np.int32))
        if own:
            files = [(self._path / key, label) for key, label in own]
            source = folder.ImageSource(str(self._path), files)
            images = source.read(np.arange(len(own)))
            for row, (key, _) in enumerate(own):
                taken[key] = (images[row : row + 1], source.labels[row : row + 1])
        return taken, faults

    def _image_fault(self, path: Path) -> str | None:
        try:
            fault = fault_of(path.read_bytes(), self._input_shape)
        except OSError as error:
            fault = f"cannot be read: {error.strerror}"
        return f"{path}: {fault}. Correct the file, or take it away" if fault else None

    def _without_duplicates(self, taken: dict[str, Samples]) -> dict[str, Samples]:
        filled = {key: pair for key, pair in taken.items() if len(pair[1])}
        if self._duplicates is None or not filled:
            return taken
        x = np.concatenate([x for x, _ in filled.values()])
        y = np.concatenate([y for _, y in filled.values()])
        row_key = [key for key, (_, labels) in filled.items() for _ in labels]
        kept = self._duplicates.fresh(x, y, row_key)
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
    """The data set as it is at the start, one part per file.

    Files that cannot be read yet are left to `FolderWatch`: they may be half written.
    Raises: DataError.
    """
    if not path.is_dir():
        raise DataError(f"trainer.dataset.watch: not a directory: {path}. Only one can be watched")
    class_count = opening.class_count_of(names, str(path), held_out[1])
    intake = Intake(
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
