"""Tests of the partition of data.

For any labels, workers and seed, the parts are disjoint and complete, and the same at every call.
Each worker gets a sample, or the error names those without. `bySite` separates classes. `dirichlet`
is skewed for a small alpha and even for a large one. Over the files of a data set, the shares of a
class are those requested, however small the files are.

Left out: reading samples.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.errors import DataError
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.spec import Dataset, SiteClasses
from dlion_worker.training.datasets.partition import (
    part_index,
    partition,
    partition_of_file,
    shares_of_classes,
    site_classes,
)
from example_counts import examples


def _workers(*sizes: int) -> list[WorkerIdentity]:
    places = [(f"site-{s}", i) for s, size in enumerate(sizes) for i in range(size)]
    return [WorkerIdentity(Rank(r), SiteName(s), "g", i) for r, (s, i) in enumerate(places)]


def _spec(partition: str, **fields: object) -> Dataset:
    return Dataset(name="digits", partition=partition, **fields)


def _labels(count: int, classes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, count).astype(np.int32)


@settings(max_examples=examples(60), deadline=None)
@given(
    rule=st.sampled_from(["iid", "dirichlet", "bySite"]),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    count=st.integers(0, 300),
    classes=st.integers(1, 12),
    alpha=st.sampled_from([1e-3, 0.5, 100.0]),
    seed=st.integers(0, 50),
    is_one_file_of_many=st.booleans(),
)
def test_parts_are_disjoint_complete_and_repeatable(
    rule: str,
    sizes: list[int],
    count: int,
    classes: int,
    alpha: float,
    seed: int,
    is_one_file_of_many: bool,
) -> None:
    labels, workers = _labels(count, classes, seed), _workers(*sizes)
    spec = _spec(rule, dirichlet_alpha=alpha)

    def share() -> list[np.ndarray]:
        if is_one_file_of_many:
            share_CP = shares_of_classes(workers, spec, class_count=classes, seed=[seed])
            return partition_of_file(labels, len(workers), share_CP, seed=[seed, 7])
        return partition(labels, workers, spec, class_count=classes, seed=[seed])

    try:
        parts = share()
    except DataError as error:
        if is_one_file_of_many or "no sample for site-" not in str(error):
            raise
        return
    assert len(parts) == len(workers)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(count))
    assert all((np.diff(part) > 0).all() for part in parts)
    assert is_one_file_of_many or all(len(part) for part in parts)
    for part, again in zip(parts, share(), strict=True):
        np.testing.assert_array_equal(part, again)


@pytest.mark.parametrize("rule", ["iid", "dirichlet", "bySite"])
def test_data_without_a_sample_are_an_error_that_names_the_workers(rule: str) -> None:
    """`keepClasses` may leave none."""
    with pytest.raises(DataError, match=r"no sample for site-0/g-0, site-0/g-1 \(0 samples"):
        partition(_labels(0, 1, 0), _workers(2), _spec(rule), class_count=3, seed=[1])


@pytest.mark.parametrize("kept", [(2, 12), (12,)])
def test_classes_that_the_data_do_not_have_keep_the_others_shares(kept: tuple[int, ...]) -> None:
    spec = _spec("dirichlet", keep_classes=kept, dirichlet_alpha=0.5)
    share_CP = shares_of_classes(_workers(3), spec, class_count=10, seed=[1])
    assert share_CP is not None
    np.testing.assert_allclose(share_CP.sum(axis=1), np.ones(10))


def test_another_seed_gives_another_partition() -> None:
    labels = _labels(100, 3, 0)
    one, two = (
        partition(labels, _workers(2), _spec("iid"), class_count=3, seed=[s])[0] for s in (1, 2)
    )
    assert not np.array_equal(one, two)


def test_iid_shares_are_equal_in_size() -> None:
    parts = partition(_labels(103, 4, 0), _workers(3, 2), _spec("iid"), class_count=4, seed=[1])
    assert sorted(len(p) for p in parts) == [20, 20, 21, 21, 21]


def test_by_site_gives_each_site_a_range_of_classes() -> None:
    labels = _labels(500, 10, 0)
    workers = _workers(3, 1)
    parts = partition(labels, workers, _spec("bySite"), class_count=10, seed=[1])
    for worker, part in zip(workers, parts, strict=True):
        expected = range(5) if worker.site == "site-0" else range(5, 10)
        assert set(labels[part]) == set(expected)


def test_named_classes_go_to_their_sites_and_others_to_none() -> None:
    labels = _labels(900, 4, 0)
    spec = _spec(
        "bySite",
        site_classes=(
            SiteClasses(site="site-0", classes=(0, 1)),
            SiteClasses(site="site-1", classes=(1, 2)),
        ),
    )
    first, second, third = partition(labels, _workers(2, 1), spec, class_count=4, seed=[1])
    assert set(labels[first]) == set(labels[second]) == {0, 1}
    assert set(labels[third]) == {1, 2}
    # A class at both sites is split by the number of workers: two to one.
    at_third = (labels[third] == 1).sum() / (labels == 1).sum()
    assert at_third == pytest.approx(1 / 3, abs=0.01)


def test_a_small_alpha_is_skewed_and_a_large_one_even() -> None:
    labels = _labels(2000, 5, 0)

    def largest_class_share(alpha: float) -> float:
        spec = _spec("dirichlet", dirichlet_alpha=alpha)
        parts = partition(labels, _workers(4), spec, class_count=5, seed=[1])
        return float(np.mean([np.bincount(labels[p]).max() / len(p) for p in parts]))

    assert largest_class_share(0.1) > 0.5
    assert largest_class_share(1e5) < 0.25


def test_a_worker_without_samples_is_named_with_a_remedy() -> None:
    labels = np.zeros(3, np.int32)
    with pytest.raises(DataError, match=r"no sample for site-1/g-0 .*Give every site a class"):
        partition(labels, _workers(1, 1), _spec("bySite"), class_count=2, seed=[1])
    with pytest.raises(DataError, match=r"3 samples, 4 workers\)\. Use fewer workers"):
        partition(labels, _workers(4), _spec("iid"), class_count=1, seed=[1])


def test_a_file_of_one_sample_goes_to_a_random_worker() -> None:
    owners = set()
    for seed in range(30):
        parts = partition_of_file(np.zeros(1, np.int32), 3, None, seed=[seed])
        owners.add([len(p) for p in parts].index(1))
    assert owners == {0, 1, 2}


@pytest.mark.parametrize("sizes", [1, 2, 5])
def test_shares_of_a_class_hold_over_files_of_any_size(sizes: int) -> None:
    share_CP = np.array([[0.7, 0.25, 0.05, 0.0]])
    counts = np.zeros(4)
    for seed in range(2000 // sizes):
        parts = partition_of_file(np.zeros(sizes, np.int32), 4, share_CP, seed=[seed])
        counts += [len(part) for part in parts]
    assert counts / counts.sum() == pytest.approx(share_CP[0], abs=0.04)
    assert counts[3] == 0


@pytest.mark.parametrize("alpha", [0.01, 0.5])
def test_no_worker_gets_almost_no_samples_if_that_is_possible(alpha: float) -> None:
    spec = _spec("dirichlet", dirichlet_alpha=alpha)
    for seed in range(20):
        share_CP = shares_of_classes(_workers(4), spec, class_count=10, seed=[seed])
        assert share_CP is not None
        assert share_CP.sum(axis=1) == pytest.approx(np.ones(10))
        assert share_CP.mean(axis=0).min() >= 0.1 / 4


def test_default_ranges_cover_all_classes() -> None:
    ranges = site_classes(_spec("bySite"), _workers(1, 1, 1), 10)
    assert [c for classes in ranges.values() for c in classes] == list(range(10))


def test_a_worker_added_to_a_group_shares_the_samples_of_an_earlier_one() -> None:
    began_with = _workers(2, 3)
    assert [part_index(worker, began_with) for worker in began_with] == [0, 1, 2, 3, 4]
    later = [WorkerIdentity(Rank(20 + i), SiteName("site-1"), "g", i) for i in range(3, 7)]
    assert [part_index(worker, began_with) for worker in later] == [2, 3, 4, 2]
