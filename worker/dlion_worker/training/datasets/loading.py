"""Loads one worker's data set as the manifest describes.

Order: open, hold out, keep the named classes, partition, subsample, read, drop near-duplicates. All
but the last two depend only on labels and seed, so every worker knows all shares.
"""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import DataError, ProgramError
from dlion_api.names import WorkerIdentity
from dlion_api.spec import Dataset, Job
from dlion_core.policies.staged.feature_batch import max_sensor_values
from dlion_worker.initializers.folders import dataset_root, model_root
from dlion_worker.training.datasets import named_datasets, npz, open_sources, pipelines, selection
from dlion_worker.training.datasets.dataset import (
    DataSet,
    Labels,
    Samples,
    check_alike,
    checked,
    checked_targets,
    class_labels,
)
from dlion_worker.training.datasets.file_intake import load_watched
from dlion_worker.training.datasets.partition import part_index, partition
from dlion_worker.training.datasets.sources import ArraySource, DatasetCache, SampleSource
from dlion_worker.training.programs.augmentation import augmentation_of
from dlion_worker.training.programs.program import TrainingProgram, user_code
from dlion_worker.training.staged.encoding import encoded

_LOG = logging.getLogger(__name__)

SINGLE_PART = "all"
"""Key of the only part of an unwatched data set."""


def load(
    job: Job,
    identity: WorkerIdentity,
    *,
    program: TrainingProgram,
    data_root: Path,
    cache: DatasetCache | None = None,
    held_out_only: bool = False,
    max_samples: int | None = None,
) -> DataSet:
    """Return this worker's share and the held-out samples.

    Without a name or path in the manifest, the program's `load_data` is called. `cache`: sources
    already opened for other workers of the same job. `held_out_only`: leave out the share of a name
    or path, for a process that only evaluates. `max_samples`: of a name or path, read no more
    of the share and of the held-out samples than so many each; None: all.

    With `trainer.encoder`, the samples are its outputs.

    Raises: DataError (missing or corrupt data, a share without samples), ProgramError.
    """
    cache = cache or DatasetCache()
    data = _load(job, identity, program, data_root, cache, held_out_only, max_samples)
    data = replace(data, augment=augmentation_of(program))
    trainer, exchange = job.spec.trainer, job.spec.exchange
    if not trainer.encoder:
        return data
    sensors = len(job.workers()) - 1
    max_values = None if exchange.trains(identity.rank) else max_sensor_values(sensors)
    return encoded(data, model_root(trainer, data_root) / trainer.encoder, max_values=max_values)


def _load(
    job: Job,
    identity: WorkerIdentity,
    program: TrainingProgram,
    data_root: Path,
    cache: DatasetCache,
    held_out_only: bool,
    max_samples: int | None,
) -> DataSet:
    spec = job.spec.trainer.dataset
    if spec.name is None and spec.path is None:
        return _from_program(job, identity, program)
    if spec.name is not None:
        named_source = cache.get(("name", spec.name), partial(_named, spec.name))
        return _shared(job, identity, *named_source, None, cache, held_out_only, max_samples)
    root = dataset_root(job.spec.trainer, data_root)
    path, evaluation, names = open_sources.locate(spec, identity, root)
    held_out: Samples | None = None
    if evaluation:
        open_held_out = partial(open_sources.open_held_out, evaluation, spec, names, max_samples)
        held_out = cache.arrays(("evaluation", str(evaluation)), open_held_out)
    if spec.watch:
        assert held_out is not None  # required by the manifest's validation
        if held_out_only:
            class_count = open_sources.class_count_of(names, str(path), held_out[1])
            return _without_share(held_out, class_count)
        return load_watched(job, identity, path, held_out, names)
    open_path = partial(open_sources.open_path, path, spec, names, cache=cache)
    source = cache.source(path, open_path, reads_all=_reads_all(job))
    if held_out is None and spec.format == "npz" and path.is_file():
        held_out = cache.get(("held out", str(path)), partial(npz.read_held_out, path))
    return _shared(job, identity, source, held_out, names, cache, held_out_only, max_samples)


def _named(name: str) -> tuple[SampleSource, Samples | None]:
    if name == "digits":
        return ArraySource(name, *named_datasets.digits()), None
    train, held_out = named_datasets.keras_images(name.removeprefix("keras:"))
    return ArraySource(name, *train), held_out


def _reads_all(job: Job) -> bool:
    """Whether all workers together read (nearly) all samples of a shared source."""
    spec = job.spec.trainer.dataset
    return not (open_sources.is_per_worker(spec) or spec.keep_classes or spec.keep_fraction < 1)


def _shared(
    job: Job,
    identity: WorkerIdentity,
    source: SampleSource,
    held_out: Samples | None,
    names: list[str] | None,
    cache: DatasetCache,
    held_out_only: bool,
    max_samples: int | None,
) -> DataSet:
    """One worker's share of a source that every worker reads."""
    spec, seed = job.spec.trainer.dataset, job.spec.trainer.seed
    index_N = np.arange(len(source.labels))
    if held_out is None:
        held_out_N, index_N = held_out_split(len(index_N), spec.evaluation_fraction, seed)
        held_out_N = held_out_N[:max_samples]
        held_out = cache.get(
            ("split", source.name),
            lambda: (source.read(held_out_N), source.labels[held_out_N]),
        )
    class_count = open_sources.class_count_of(names, source.name, source.labels, held_out[1])
    if held_out_only:
        return _without_share(held_out, class_count)
    index_N = index_N[selection.of_classes(source.labels[index_N], spec.keep_classes)]
    own_K, total = _own_share(job, identity, source, source.labels[index_N], class_count, cache)
    read_K = index_N[own_K[:max_samples]]
    x, y = checked(source.read(read_K), source.labels[read_K], source.name)
    check_alike(held_out[0], tuple(x.shape[1:]), "held-out samples")
    data = _of_one_part(spec, (x, y), held_out, class_count=class_count, total=total)
    return replace(data, unread_samples=len(own_K) - len(read_K))


def _without_share(held_out: Samples, class_count: int) -> DataSet:
    x, y = held_out
    return DataSet({}, x, y, class_count=class_count, training_set_samples=0)


def _of_one_part(
    spec: Dataset, own: Samples, held_out: Samples, *, class_count: int, total: int
) -> DataSet:
    """A data set whose parts do not change, without near-duplicates if the manifest asks for it."""
    x, y = own
    count = len(y)
    if spec.drop_near_duplicates:
        filtering = selection.NearDuplicates(spec.near_duplicate_threshold)
        kept = filtering.select_new(x, class_labels(y), [SINGLE_PART] * count)
        x, y = x[kept], y[kept]
        _LOG.info("near-duplicates left out: %d of %d samples", count - len(y), count)
    return DataSet(
        parts={SINGLE_PART: (x, y)},
        held_out_x=held_out[0],
        held_out_y=held_out[1],
        class_count=class_count,
        training_set_samples=total,
        near_duplicates_left_out=count - len(y),
    )


def held_out_split(
    count: int, fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ascending indices of the held-out and the other samples; equal on every worker."""
    held_out_count = max(1, round(fraction * count))
    if held_out_count >= count:
        raise DataError(
            f"data: {count} samples are too few to hold out {fraction:g} of them. Use more data"
        )
    order = np.random.default_rng([seed, 3]).permutation(count)
    return np.sort(order[:held_out_count]), np.sort(order[held_out_count:])


def _own_share(
    job: Job,
    identity: WorkerIdentity,
    source: SampleSource,
    labels: Labels,
    class_count: int,
    cache: DatasetCache,
) -> tuple[NDArray[np.int64], int]:
    """Ascending indices of this worker's samples, and the number of samples of all workers."""
    spec, seed = job.spec.trainer.dataset, job.spec.trainer.seed
    if open_sources.is_per_worker(spec):
        own = selection.subsampled(labels, spec.keep_fraction, seed=[seed, identity.rank])
        return own, len(own) * len(job.workers())
    make_partition = partial(_partition_all, job, labels, class_count)
    parts, total = cache.get(("shares", source.name), make_partition)
    part = parts[part_index(identity, job.workers())]
    kept = selection.subsampled(labels[part], spec.keep_fraction, seed=[seed, identity.rank])
    return part[kept], total


def _partition_all(
    job: Job, labels: Labels, class_count: int
) -> tuple[list[NDArray[np.int64]], int]:
    """All workers' indices, and their total number after subsampling."""
    spec = job.spec.trainer.dataset
    seed = [job.spec.trainer.seed]
    parts = partition(labels, job.workers(), spec, class_count=class_count, seed=seed)
    total = sum(
        selection.subsampled_count(int(count), spec.keep_fraction)
        for part in parts
        for count in np.bincount(labels[part])
    )
    return parts, total


def _from_program(job: Job, identity: WorkerIdentity, program: TrainingProgram) -> DataSet:
    """The user's own samples: `load_data` returns only this worker's."""
    if program.load_data is None:
        raise ProgramError(
            f"program {program.name}: no data. Give trainer.dataset.name or path in the manifest, "
            "or load_data(split, site, worker_index) in the program"
        )
    # counts over groups, so no two workers get the same data
    at_site = [worker for worker in job.workers() if worker.site == identity.site]
    number = part_index(identity, at_site)
    pipelines.seed_shuffles([job.spec.trainer.seed, identity.rank])
    x, y = _user_samples(program, "train", str(identity.site), number)
    held_x, held_y = _user_samples(program, "test", str(identity.site), number)
    check_alike(held_x, tuple(x.shape[1:]), f"program {program.name}: load_data('test', ...)")
    for train, test, what in ((x, held_x, "samples"), (y, held_y, "labels or targets")):
        if train.dtype != test.dtype:
            raise ProgramError(
                f"program {program.name}: load_data gives {what} of two types (train "
                f"{train.dtype}, test {test.dtype}). Use one"
            )
    if y.shape[1:] != held_y.shape[1:]:
        raise ProgramError(
            f"program {program.name}: load_data gives labels or targets of two shapes (train "
            f"{list(y.shape)}, test {list(held_y.shape)}). Use one"
        )
    spec = job.spec.trainer.dataset
    _check_selection(spec, x, y, program.name)
    labels = class_labels(y)
    kept = selection.of_classes(labels, spec.keep_classes)
    seed = [job.spec.trainer.seed, identity.rank]
    kept = kept[selection.subsampled(labels[kept], spec.keep_fraction, seed=seed)]
    if len(kept) < len(y):
        x, y = x[kept], y[kept]
    has_labels = y.dtype == np.int32
    data = _of_one_part(
        spec,
        (x, y),
        (held_x, held_y),
        class_count=open_sources.class_count_of(None, program.name, y, held_y) if has_labels else 0,
        total=len(y) * len(job.workers()),
    )
    return replace(data, scales_pixels=False)


def _check_selection(spec: Dataset, x: NDArray[Any], y: NDArray[Any], name: str) -> None:
    """Raises: ProgramError where the manifest selects by what these samples do not have."""
    if spec.keep_classes and (y.dtype != np.int32 or y.ndim != 1):
        raise ProgramError(
            f"program {name}: trainer.dataset.keepClasses needs one class number for each sample "
            f"(given: y {y.dtype} {list(y.shape)}). Remove it"
        )
    if spec.drop_near_duplicates and x.dtype.names is not None:
        raise ProgramError(
            f"program {name}: trainer.dataset.dropNearDuplicates compares samples that are single "
            f"arrays (given: {', '.join(x.dtype.names)}). Remove it"
        )


def _user_samples(program: TrainingProgram, split: str, site: str, number: int) -> Samples:
    assert program.load_data is not None
    call = f"load_data({split!r}, {site!r}, {number})"
    with user_code(program, call, "It must return (x, y) as NumPy arrays or dicts of them"):
        result = program.load_data(split, site, number)
    if pipelines.is_pipeline(result):
        result = pipelines.read_pipeline(result, program, call)
    if not isinstance(result, tuple) or len(result) != 2:
        has_three = isinstance(result, tuple) and len(result) == 3
        given = "three parts" if has_three else type(result).__name__
        raise ProgramError(
            f"program {program.name}: {call} must return (x, y), or a tf.data.Dataset of both "
            f"(given: {given}){f'. {pipelines.WEIGHTS_ADVICE}' if has_three else ''}"
        )
    try:
        return checked_targets(result[0], result[1], f"program {program.name}: {call}")
    except DataError as error:
        raise ProgramError(str(error)) from None  # the traceback has no line of the user's
