"""From the manifest's path and format to samples: which reader, which files, how many classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dlion_api.errors import DataError
from dlion_api.spec.dataset import PATH_PLACEHOLDERS
from dlion_worker.training.datasets import folder, npz, tfrecord
from dlion_worker.training.datasets.dataset import Labels, Samples, checked
from dlion_worker.training.datasets.sources import (
    ArraySource,
    JoinedSource,
    Source,
    data_files,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dlion_api.names import WorkerIdentity
    from dlion_api.spec import Dataset, Job


def resolved(path: str, identity: WorkerIdentity, data_root: Path) -> Path:
    """The path for this worker: `{site}`, `{group}`, `{index}` and `{rank}` are filled in."""
    values = (str(identity.site), identity.group, str(identity.index), str(identity.rank))
    for name, value in zip(PATH_PLACEHOLDERS, values, strict=True):
        path = path.replace(name, value)
    return data_root / path


def is_own(spec: Dataset) -> bool:
    """Whether the path leads each worker to samples of its own, so that none are shared out."""
    return spec.path is not None and any(name in spec.path for name in PATH_PLACEHOLDERS)


def whole_is_known(job: Job) -> bool:
    """Whether each worker knows by itself how many samples all have: they are shared out of what
    every worker sees and what does not grow, or there is but one worker."""
    spec = job.spec.trainer.dataset
    has_source = spec.name is not None or spec.path is not None
    is_shared_out = has_source and not (is_own(spec) or spec.watch)
    return is_shared_out or len(job.workers()) == 1


def open_path(path: Path, spec: Dataset, class_names: Sequence[str] | None) -> Source:
    """All samples at a path. Raises: DataError."""
    if spec.format == "images":
        return folder.open_folder(path, class_names)
    if spec.format == "npz":
        sources: list[Source] = [
            ArraySource(str(p), *npz.read_train(p)) for p in data_files(path, npz.SUFFIXES)
        ]
    else:
        sources = [tfrecord.TFRecordSource(p) for p in data_files(path, tfrecord.SUFFIXES)]
    return sources[0] if len(sources) == 1 else JoinedSource(str(path), sources)


def open_held_out(path: Path, spec: Dataset, class_names: Sequence[str] | None) -> Samples:
    """All samples of the evaluation path. Raises: DataError."""
    if spec.format == "npz":
        pairs = [npz.read_evaluation(p) for p in data_files(path, npz.SUFFIXES)]
        source: Source = JoinedSource(str(path), [ArraySource(str(path), *p) for p in pairs])
    else:
        source = open_path(path, spec, class_names)
    return checked(source.read(np.arange(len(source.labels))), source.labels, source.name)


def class_names(path: Path, spec: Dataset, evaluation_path: Path | None) -> list[str] | None:
    """Names of the classes in label order where something says them.

    `classes.txt` by the data or by the held-out data counts first; for folders of images the
    subfolders of the held-out data, which have every class, come next.
    """
    for place in (path, evaluation_path):
        if place is not None and (names := folder.listed_classes(place)):
            return names
    if spec.format == "images":
        return folder.subfolders(evaluation_path or path)
    return None


def class_count_of(names: Sequence[str] | None, source: str, *labels: Labels) -> int:
    """Number of classes: as many as are named, else up to the highest label.

    Raises: DataError where a label is higher than the names go.
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
