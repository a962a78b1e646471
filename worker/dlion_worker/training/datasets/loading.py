"""From the manifest to one worker's data set.

Order: open, hold out, keep the named classes, share out, thin, read, leave near-duplicates out.
All but the last two follow from labels and seed alone, so every worker knows everybody's share.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dlion_api.errors import DataError, ProgramError
from dlion_worker.training.datasets import named, npz, opening, selection
from dlion_worker.training.datasets.dataset import DataSet, Labels, Samples, check_alike, checked
from dlion_worker.training.datasets.intake import load_watched
from dlion_worker.training.datasets.opened_once import OpenedOnce
from dlion_worker.training.datasets.partition import partition, place_of
from dlion_worker.training.datasets.sources import ArraySource, Source
from dlion_worker.training.programs.program import Program, user_code

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from dlion_api.names import WorkerIdentity
    from dlion_api.spec import Job

_LOG = logging.getLogger(__name__)

WHOLE = "all"
"""Key of the one part of a data set that is not watched."""


def load(
    job: Job,
    identity: WorkerIdentity,
    *,
    program: Program,
    data_root: Path,
    opened: OpenedOnce | None = None,
) -> DataSet:
    """This worker's share and the held-out samples, as the manifest says.

    Without a name or path in the manifest the program's `load_data` is asked. `opened`: what was
    opened for other workers of the same job in this process, and is not opened again.

    Raises: DataError (missing or corrupt data, a share without samples), ProgramError.
    """
    spec, opened = job.spec.trainer.dataset, opened or OpenedOnce()
    if spec.name is None and spec.path is None:
        return _from_program(job, identity, program)
    if spec.name is not None:
        named_source = opened.get(("name", spec.name), partial(_named, spec.name))
        return _shared(job, identity, *named_source, None, opened)
    assert spec.path is not None
    path = opening.resolved(spec.path, identity, data_root)
    evaluation = (
        opening.resolved(spec.evaluation_path, identity, data_root)
        if spec.evaluation_path
        else None
    )
    names = opening.class_names(path, spec, evaluation)
    held_out: Samples | None = None
    if evaluation:
        open_held_out = partial(opening.open_held_out, evaluation, spec, names)
        held_out = opened.get(("evaluation", str(evaluation)), open_held_out)
    if spec.watch:
        assert held_out is not None  # a rule of the manifest
        return load_watched(job, identity, path, held_out, names)
    open_path = partial(opening.open_path, path, spec, names)
    source = opened.source(path, open_path, reads_all=_reads_all(job))
    if held_out is None and spec.format == "npz" and path.is_file():
        held_out = opened.get(("held out", str(path)), partial(npz.read_held_out, path))
    return _shared(job, identity, source, held_out, names, opened)


def _named(name: str) -> tuple[Source, Samples | None]:
    if name == "digits":
        return ArraySource(name, *named.digits()), None
    train, held_out = named.keras_images(name.removeprefix("keras:"))
    return ArraySource(name, *train), held_out


def _reads_all(job: Job) -> bool:
    """Whether all workers together read (nearly) all samples of a source that they share."""
    spec = job.spec.trainer.dataset
    return not (opening.is_own(spec) or spec.keep_classes or spec.keep_fraction < 1)


def _shared(
    job: Job,
    identity: WorkerIdentity,
    source: Source,
    held_out: Samples | None,
    names: list[str] | None,
    opened: OpenedOnce,
) -> DataSet:
    """One worker's share of a source that every worker sees."""
    spec, seed = job.spec.trainer.dataset, job.spec.trainer.seed
    index_N = np.arange(len(source.labels))
    if held_out is None:
        held_N, index_N = _held_out_split(len(index_N), spec.evaluation_fraction, seed)
        read = partial(_read, source, held_N)
        held_out = opened.get(("split", source.name), read)
    class_count = opening.class_count_of(names, source.name, source.labels, held_out[1])
    index_N = index_N[selection.of_classes(source.labels[index_N], spec.keep_classes)]
    own_K, total = _own_share(job, identity, source, source.labels[index_N], class_count, opened)
    x, y = checked(source.read(index_N[own_K]), source.labels[index_N[own_K]], source.name)
    check_alike(held_out[0], tuple(x.shape[1:]), "held-out samples")
    count = len(y)
    if spec.drop_near_duplicates:
        filtering = selection.NearDuplicates(spec.near_duplicate_threshold)
        kept = filtering.fresh(x, y, [WHOLE] * len(y))
        x, y = x[kept], y[kept]
        _LOG.info("near-duplicates left out: %d of %d samples", count - len(y), count)
    return DataSet(
        parts={WHOLE: (x, y)},
        held_out_x=held_out[0],
        held_out_y=held_out[1],
        class_count=class_count,
        training_set_samples=total,
        near_duplicates_left_out=count - len(y),
    )


def _held_out_split(
    count: int, fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ascending places of the held-out samples and of the others; the same on every worker."""
    held = max(1, round(fraction * count))
    if held >= count:
        raise DataError(
            f"data: {count} samples are too few to hold {fraction:g} of them out. Use more data"
        )
    order = np.random.default_rng([seed, 3]).permutation(count)
    return np.sort(order[:held]), np.sort(order[held:])


def _read(source: Source, index_K: NDArray[np.int64]) -> Samples:
    return source.read(index_K), source.labels[index_K]


def _own_share(
    job: Job,
    identity: WorkerIdentity,
    source: Source,
    labels: Labels,
    class_count: int,
    opened: OpenedOnce,
) -> tuple[NDArray[np.int64], int]:
    """Ascending places of this worker's samples, and how many all workers have together."""
    spec, seed = job.spec.trainer.dataset, job.spec.trainer.seed
    if opening.is_own(spec):
        own = selection.thinned(labels, spec.keep_fraction, seed=[seed, identity.rank])
        return own, len(own) * len(job.workers())
    share_out = partial(_shared_out, job, labels, class_count)
    parts, total = opened.get(("shares", source.name), share_out)
    part = parts[place_of(identity, job.workers())]
    kept = selection.thinned(labels[part], spec.keep_fraction, seed=[seed, identity.rank])
    return part[kept], total


def _shared_out(job: Job, labels: Labels, class_count: int) -> tuple[list[NDArray[np.int64]], int]:
    """Everybody's places, and how many samples that makes after thinning."""
    spec = job.spec.trainer.dataset
    seed = [job.spec.trainer.seed]
    parts = partition(labels, job.workers(), spec, class_count=class_count, seed=seed)
    total = sum(
        selection.thinned_count(int(count), spec.keep_fraction)
        for part in parts
        for count in np.bincount(labels[part])
    )
    return parts, total


def _from_program(job: Job, identity: WorkerIdentity, program: Program) -> DataSet:
    """The user's own samples: what `load_data` gives is this worker's already."""
    if program.load_data is None:
        raise ProgramError(
            f"program {program.name}: no data. Give trainer.dataset.name or path in the manifest, "
            "or load_data(split, site, worker_index) in the program"
        )
    at_site = [worker for worker in job.workers() if worker.site == identity.site]
    number = place_of(identity, at_site)  # over the groups: no two workers get the same data
    pairs = [
        _user_samples(program, split, str(identity.site), number) for split in ("train", "test")
    ]
    (x, y), (held_x, held_y) = pairs
    check_alike(held_x, tuple(x.shape[1:]), f"program {program.name}: load_data('test', ...)")
    if x.dtype != held_x.dtype:
        raise ProgramError(
            f"program {program.name}: load_data gives samples of two types (train {x.dtype}, test "
            f"{held_x.dtype}). Use one"
        )
    spec = job.spec.trainer.dataset
    count = len(y)
    kept = selection.of_classes(y, spec.keep_classes)
    seed = [job.spec.trainer.seed, identity.rank]
    kept = kept[selection.thinned(y[kept], spec.keep_fraction, seed=seed)]
    thinned = len(kept)
    if spec.drop_near_duplicates:
        filtering = selection.NearDuplicates(spec.near_duplicate_threshold)
        kept = kept[filtering.fresh(x[kept], y[kept], [WHOLE] * len(kept))]
    if len(kept) < count:
        x, y = x[kept], y[kept]
    return DataSet(
        parts={WHOLE: (x, y)},
        held_out_x=held_x,
        held_out_y=held_y,
        class_count=opening.class_count_of(None, program.name, y, held_y),
        training_set_samples=thinned * len(job.workers()),
        near_duplicates_left_out=thinned - len(kept),
    )


def _user_samples(program: Program, split: str, site: str, number: int) -> Samples:
    assert program.load_data is not None
    call = f"load_data({split!r}, {site!r}, {number})"
    with user_code(program, call, "It must return (x, y) as NumPy arrays"):
        result = program.load_data(split, site, number)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ProgramError(
            f"program {program.name}: {call} must return (x, y) (given: {type(result).__name__})"
        )
    try:
        return checked(result[0], result[1], f"program {program.name}: {call}")
    except DataError as error:
        raise ProgramError(str(error)) from error
