"""Opens the manifest's path and format: choice of reader, files, number of classes."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dlion_api.errors import DataError
from dlion_api.names import WorkerIdentity
from dlion_api.spec import Dataset, Job
from dlion_api.spec.dataset import PATH_PLACEHOLDERS
from dlion_worker.training.datasets import folder, npz, tfrecord
from dlion_worker.training.datasets.dataset import Labels, Samples, checked
from dlion_worker.training.datasets.sources import (
    ArraySource,
    DatasetCache,
    JoinedSource,
    SampleSource,
    data_files,
)


def resolve_path(path: str, identity: WorkerIdentity, data_root: Path) -> Path:
    """This worker's path: `{site}`, `{group}`, `{index}` and `{rank}` are filled in."""
    values = (str(identity.site), identity.group, str(identity.index), str(identity.rank))
    for name, value in zip(PATH_PLACEHOLDERS, values, strict=True):
        path = path.replace(name, value)
    return data_root / path


def locate(
    spec: Dataset, identity: WorkerIdentity, data_root: Path
) -> tuple[Path, Path | None, list[str] | None]:
    """This worker's path, that of the held-out samples, and the class names, if available."""
    assert spec.path is not None
    path, evaluation = resolve_path(spec.path, identity, data_root), None
    if spec.evaluation_path:
        evaluation = resolve_path(spec.evaluation_path, identity, data_root)
    return path, evaluation, class_names(path, spec, evaluation)


def is_per_worker(spec: Dataset) -> bool:
    """Whether the path gives each worker its own samples, so that nothing is partitioned."""
    return spec.path is not None and any(name in spec.path for name in PATH_PLACEHOLDERS)


def training_set_size_is_known(job: Job) -> bool:
    """Whether each worker knows the size of the whole training set by itself.

    True if a fixed, shared source is partitioned, or if there is only one worker.
    """
    spec = job.spec.trainer.dataset
    has_source = spec.name is not None or spec.path is not None
    is_partitioned = has_source and not (is_per_worker(spec) or spec.watch)
    return is_partitioned or len(job.workers()) == 1


def open_path(
    path: Path,
    spec: Dataset,
    class_names: Sequence[str] | None,
    read_npz: Callable[[Path], Samples] = npz.read_train,
    cache: DatasetCache | None = None,
) -> SampleSource:
    """All samples at a path. `cache`: of records' labels. Raises: DataError."""
    if spec.format == "images":
        return folder.open_folder(path, class_names)
    if spec.format == "npz":
        sources: list[SampleSource] = [
            ArraySource(str(p), *read_npz(p)) for p in data_files(path, npz.SUFFIXES)
        ]
    else:
        sources = [tfrecord.TFRecordSource(p, cache) for p in data_files(path, tfrecord.SUFFIXES)]
    return sources[0] if len(sources) == 1 else JoinedSource(str(path), sources)


def open_held_out(
    path: Path, spec: Dataset, class_names: Sequence[str] | None, max_samples: int | None = None
) -> Samples:
    """All samples of the evaluation path, or the first `max_samples`. Raises: DataError."""
    source = open_path(path, spec, class_names, npz.read_evaluation)
    labels = source.labels[:max_samples]
    return checked(source.read(np.arange(len(labels))), labels, source.name)


def class_names(path: Path, spec: Dataset, evaluation_path: Path | None) -> list[str] | None:
    """Class names in label order, if available.

    `classes.txt` with the data or the held-out data comes first. For folders of images, the
    held-out data's subfolders come next, because they have every class.
    """
    for location in (path, evaluation_path):
        if location is not None and (names := folder.read_class_list(location)):
            return names
    if spec.format == "images":
        return folder.subfolders(evaluation_path or path)
    return None


def class_count_of(names: Sequence[str] | None, source: str, *labels: Labels) -> int:
    """Number of classes: the number of names, else from the highest label.

    Raises: DataError where a label exceeds the names.
    """
    highest = max((int(part.max()) for part in labels if len(part)), default=-1)
    if names is None:
        return highest + 1
    if highest >= len(names):
        raise DataError(
            f"{source}: label {highest}, but classes.txt names {len(names)} classes "
            f"(allowed: 0 to {len(names) - 1}). Complete classes.txt, or correct the labels"
        )
    return len(names)
