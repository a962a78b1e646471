"""Partitions samples among workers: pure functions of labels, workers and seed.

Every worker computes the whole partition and takes its part. Parts are disjoint and complete,
except for classes that no site is given.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import DataError
from dlion_api.names import WorkerIdentity
from dlion_api.spec import Dataset
from dlion_worker.training.datasets.dataset import Labels

Indices = NDArray[np.int64]
Shares = NDArray[np.float64]
"""[C, P]: each worker's share of each class."""

_MAX_DRAWS = 100
_MIN_FRACTION_OF_EVEN = 0.1


def partition(
    labels: Labels,
    workers: Sequence[WorkerIdentity],
    spec: Dataset,
    *,
    class_count: int,
    seed: Sequence[int],
) -> list[Indices]:
    """Ascending indices of each worker's samples, in the order of `workers`.

    Raises: DataError where a worker would get no sample.
    """
    rng = np.random.default_rng([*seed, 1])
    if spec.partition == "dirichlet":
        parts = _dirichlet(labels, len(workers), spec.dirichlet_alpha, rng)
    elif spec.partition == "bySite":
        parts = _by_site(labels, workers, site_classes(spec, workers, class_count), rng)
    else:
        parts = _even(np.arange(len(labels)), len(workers), rng)
    _reject_empty(parts, workers, spec, len(labels))
    return [np.sort(part) for part in parts]


def shares_of_classes(
    workers: Sequence[WorkerIdentity], spec: Dataset, *, class_count: int, seed: Sequence[int]
) -> Shares | None:
    """Shares for `partition_of_file`, equal for all files; None: even for all classes.

    Drawn again while a worker would get less than a tenth of an even share of all samples.
    """
    if spec.partition == "iid":
        return None
    if spec.partition == "bySite":
        classes = site_classes(spec, workers, class_count)
        has_PC = [np.isin(np.arange(class_count), classes.get(w.site, ())) for w in workers]
        has_CP = np.stack(has_PC, axis=1)
        share_CP: Shares = has_CP / np.maximum(has_CP.sum(axis=1, keepdims=True), 1)
        return share_CP
    rng = np.random.default_rng([*seed, 1])
    # keepClasses may name classes that the data do not have yet.
    used_classes = [each for each in spec.keep_classes if each < class_count]
    used_classes, count = used_classes or list(range(class_count)), len(workers)
    for _ in range(_MAX_DRAWS):
        draws = [_draw_shares(count, spec.dirichlet_alpha, rng) for _ in range(class_count)]
        share_CP = np.stack(draws)
        if share_CP[used_classes].mean(axis=0).min() >= _MIN_FRACTION_OF_EVEN / count:
            break
    return share_CP


def partition_of_file(
    labels: Labels, worker_count: int, share_CP: Shares | None, *, seed: Sequence[int]
) -> list[Indices]:
    """As `partition`, for one of many files; a worker may get nothing.

    A worker's part of a class is rounded at random: its mean over files is the worker's share, even
    for files of one sample.
    """
    rng = np.random.default_rng([*seed, 1])
    if share_CP is None:
        parts = _even(np.arange(len(labels)), worker_count, rng)
        return [np.sort(part) for part in parts]
    chosen: list[list[Indices]] = [[np.zeros(0, np.int64)] for _ in range(worker_count)]
    for label in np.unique(labels):
        share_P = share_CP[label]
        if not share_P.any():  # a class without a site
            continue
        index = rng.permutation(np.flatnonzero(labels == label))
        ends = (np.cumsum(share_P)[:-1] * len(index) + rng.random()).astype(int)
        for worker, piece in enumerate(np.split(index, ends)):
            chosen[worker].append(piece)
    return [np.sort(np.concatenate(pieces)) for pieces in chosen]


def part_index(worker: WorkerIdentity, workers: Sequence[WorkerIdentity]) -> int:
    """Index of a worker's part in the result of `partition`.

    A run is partitioned once. A worker added to a group later reuses the part of index modulo the
    original count.
    """
    group = [
        at
        for at, other in enumerate(workers)
        if (other.site, other.group) == (worker.site, worker.group)
    ]
    return group[worker.index % len(group)]


def site_classes(
    spec: Dataset, workers: Sequence[WorkerIdentity], class_count: int
) -> Mapping[str, tuple[int, ...]]:
    """Classes of each site: as given, else contiguous ranges."""
    if spec.site_classes:
        return {entry.site: tuple(entry.classes) for entry in spec.site_classes}
    sites = list(dict.fromkeys(str(w.site) for w in workers))
    ranges = np.array_split(np.arange(class_count), len(sites))
    return {s: tuple(int(c) for c in r) for s, r in zip(sites, ranges, strict=True)}


def _even(index_N: Indices, count: int, rng: np.random.Generator) -> list[Indices]:
    """Parts of equal size, plus or minus one; which are larger is random."""
    parts = np.array_split(rng.permutation(index_N), count)
    shift = int(rng.integers(count))
    return [*parts[shift:], *parts[:shift]]


def _dirichlet(labels: Labels, count: int, alpha: float, rng: np.random.Generator) -> list[Indices]:
    """Partition each class in proportions drawn from a symmetric Dirichlet distribution.

    Drawn again until every worker has a sample. Source: Hsu, Qi, Brown 2019, by class.
    """
    parts: list[Indices] = []
    for _ in range(_MAX_DRAWS):
        chosen: list[list[Indices]] = [[np.zeros(0, np.int64)] for _ in range(count)]
        for label in np.unique(labels):
            index = rng.permutation(np.flatnonzero(labels == label))
            share_P = _draw_shares(count, alpha, rng)
            ends = np.round(np.cumsum(share_P)[:-1] * len(index)).astype(int)
            for worker, piece in enumerate(np.split(index, ends)):
                chosen[worker].append(piece)
        parts = [np.concatenate(pieces) for pieces in chosen]
        if all(len(part) for part in parts):
            break
    return parts


def _draw_shares(count: int, alpha: float, rng: np.random.Generator) -> Shares:
    share_P = rng.dirichlet([alpha] * count)
    if not np.isfinite(share_P).all():  # every draw underflowed: the limit is one worker
        share_P = np.eye(count)[rng.integers(count)]
    return share_P


def _by_site(
    labels: Labels,
    workers: Sequence[WorkerIdentity],
    classes: Mapping[str, tuple[int, ...]],
    rng: np.random.Generator,
) -> list[Indices]:
    """Give whole classes to sites; sites that share a class split it by their worker counts."""
    sizes = {site: sum(w.site == site for w in workers) for site in classes}
    at_site: dict[str, list[Indices]] = {site: [] for site in classes}
    for label in np.unique(labels):
        owners = [site for site in classes if int(label) in classes[site] and sizes[site]]
        if not owners:
            continue
        index = rng.permutation(np.flatnonzero(labels == label))
        weights = np.cumsum([sizes[site] for site in owners])
        ends = np.round(weights[:-1] / weights[-1] * len(index)).astype(int)
        for site, piece in zip(owners, np.split(index, ends), strict=True):
            at_site[site].append(piece)
    shares = {
        site: iter(_even(np.concatenate([np.zeros(0, np.int64), *pieces]), sizes[site], rng))
        for site, pieces in at_site.items()
        if sizes[site]
    }
    return [next(shares[w.site]) if w.site in shares else np.zeros(0, np.int64) for w in workers]


def _reject_empty(
    parts: Sequence[Indices], workers: Sequence[WorkerIdentity], spec: Dataset, sample_count: int
) -> None:
    empty = [w.name for w, part in zip(workers, parts, strict=True) if not len(part)]
    if not empty:
        return
    advice = {
        "iid": "Use fewer workers or more data",
        "dirichlet": f"Raise dirichletAlpha (given: {spec.dirichlet_alpha}), or use fewer workers",
        "bySite": "Give every site a class that the data has (siteClasses), or use fewer workers",
    }[spec.partition]
    raise DataError(
        f"partition {spec.partition}: no sample for {', '.join(empty)} ({sample_count} samples, "
        f"{len(workers)} workers). {advice}"
    )
