"""Who has which sample: pure functions of labels, workers and seed.

Every worker computes the whole partition and takes its own part. Parts are disjoint, and together
complete but for classes that no site is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlion_api.names import WorkerIdentity
    from dlion_api.spec import Dataset
    from dlion_worker.training.datasets.dataset import Labels

Indices = NDArray[np.int64]

_DRAWS = 100


def partition(
    labels: Labels,
    workers: Sequence[WorkerIdentity],
    spec: Dataset,
    *,
    class_count: int,
    seed: Sequence[int],
    allow_empty: bool = False,
) -> list[Indices]:
    """Ascending places of each worker's samples, in the order of `workers`.

    `allow_empty` is for one file of many, which need not have something for everybody.
    Raises: DataError where a worker would go without a sample.
    """
    generator = np.random.default_rng([*seed, 1])
    if spec.partition == "dirichlet":
        parts = _dirichlet(labels, len(workers), spec.dirichlet_alpha, generator, allow_empty)
    elif spec.partition == "bySite":
        parts = _by_site(labels, workers, site_classes(spec, workers, class_count), generator)
    else:
        parts = _even(np.arange(len(labels)), len(workers), generator)
    if not allow_empty:
        _refuse_empty(parts, workers, spec, len(labels))
    return [np.sort(part) for part in parts]


def place_of(worker: WorkerIdentity, workers: Sequence[WorkerIdentity]) -> int:
    """Where in the parts of `partition` a worker's own samples are.

    Parts are made once for a run. Whoever comes to a group that grows shares those of one that
    was there: of its index modulo the count.
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
    """Which classes live at which site: as given, else contiguous ranges over the sites."""
    if spec.site_classes:
        return {entry.site: tuple(entry.classes) for entry in spec.site_classes}
    sites = list(dict.fromkeys(str(w.site) for w in workers))
    ranges = np.array_split(np.arange(class_count), len(sites))
    return {s: tuple(int(c) for c in r) for s, r in zip(sites, ranges, strict=True)}


def _even(index_N: Indices, count: int, generator: np.random.Generator) -> list[Indices]:
    """Shares of equal size but for one sample; chance says who has the larger ones."""
    parts = np.array_split(generator.permutation(index_N), count)
    shift = int(generator.integers(count))
    return [*parts[shift:], *parts[:shift]]


def _dirichlet(
    labels: Labels, count: int, alpha: float, generator: np.random.Generator, allow_empty: bool
) -> list[Indices]:
    """Each class is shared out in proportions drawn from a symmetric Dirichlet distribution.

    Drawn again until everybody has a sample. Source: Hsu, Qi, Brown 2019, by class.
    """
    parts: list[Indices] = []
    for _ in range(_DRAWS):
        chosen: list[list[Indices]] = [[] for _ in range(count)]
        for label in np.unique(labels):
            index = generator.permutation(np.flatnonzero(labels == label))
            share_P = generator.dirichlet([alpha] * count)
            if not np.isfinite(share_P).all():  # every draw underflowed: the limit is one worker
                share_P = np.eye(count)[generator.integers(count)]
            ends = np.round(np.cumsum(share_P)[:-1] * len(index)).astype(int)
            for worker, piece in enumerate(np.split(index, ends)):
                chosen[worker].append(piece)
        parts = [np.concatenate(pieces) for pieces in chosen]
        if allow_empty or all(len(part) for part in parts):
            break
    return parts


def _by_site(
    labels: Labels,
    workers: Sequence[WorkerIdentity],
    classes: Mapping[str, tuple[int, ...]],
    generator: np.random.Generator,
) -> list[Indices]:
    """Whole classes to each site; a class at several sites is shared by their workers' numbers."""
    sizes = {site: sum(w.site == site for w in workers) for site in classes}
    at_site: dict[str, list[Indices]] = {site: [] for site in classes}
    for label in np.unique(labels):
        owners = [site for site in classes if int(label) in classes[site] and sizes[site]]
        if not owners:
            continue
        index = generator.permutation(np.flatnonzero(labels == label))
        weights = np.cumsum([sizes[site] for site in owners])
        ends = np.round(weights[:-1] / weights[-1] * len(index)).astype(int)
        for site, piece in zip(owners, np.split(index, ends), strict=True):
            at_site[site].append(piece)
    shares = {
        site: iter(_even(np.concatenate([np.zeros(0, np.int64), *pieces]), sizes[site], generator))
        for site, pieces in at_site.items()
        if sizes[site]
    }
    return [next(shares[w.site]) if w.site in shares else np.zeros(0, np.int64) for w in workers]


def _refuse_empty(
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
