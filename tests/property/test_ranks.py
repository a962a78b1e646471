"""Ranks by group: one for each worker, unchanged for any counts of groups, here or in another
site's manifest.

Rank and worker map to each other, also for later workers. Counted ranks have no gap, and both are
the same for a job of one group.

Left out: the users of ranks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlion_api.bounds import MAX_WORKERS_PER_GROUP
from dlion_api.names import Rank, SiteName
from dlion_api.spec import Job, load_job

COUNTS = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=1, max_size=4)


def job_of(counts: list[list[int]], **exchange: str) -> Job:
    """A job with these numbers of workers in the groups of its sites."""
    sites = [
        {
            "name": f"site-{at}",
            "groups": [{"name": f"g{g}", "workers": n} for g, n in enumerate(groups)],
        }
        for at, groups in enumerate(counts)
    ]
    trainer = {
        "program": {"builtin": "digits"},
        "dataset": {"name": "digits"},
        "stop": {"maxSteps": 1},
    }
    return load_job(
        {
            "apiVersion": "dlion.dev/v1alpha1",
            "kind": "DLionJob",
            "metadata": {"name": "test"},
            "spec": {"sites": sites, "trainer": trainer, "exchange": exchange},
        }
    )


def scaled(job: Job, counts: list[list[int]]) -> Job:
    sites = tuple(
        replace(
            site, groups=tuple(replace(g, workers=n) for g, n in zip(site.groups, its, strict=True))
        )
        for site, its in zip(job.spec.sites, counts, strict=True)
    )
    return replace(job, spec=replace(job.spec, sites=sites))


@given(COUNTS, st.data())
def test_ranks_by_group_do_not_depend_on_the_counts(
    counts: list[list[int]], data: st.DataObject
) -> None:
    job = job_of(counts).with_group_ranks()
    others = data.draw(st.tuples(*(st.tuples(*[st.integers(1, 12)] * len(its)) for its in counts)))
    other = scaled(job, [list(its) for its in others])
    here = {worker.name: worker for worker in job.workers()}
    there = {worker.name: worker for worker in other.workers()}
    assert len(here) == sum(map(sum, counts))
    assert [w.rank for w in job.workers()] == sorted({w.rank for w in job.workers()})
    assert all(there[name] == worker for name, worker in here.items() if name in there)
    for worker in there.values():  # the manifest here need not have it
        assert job.worker(worker.rank) == worker
        assert job.worker_at(worker.site, worker.group, worker.index) == worker


@given(COUNTS)
def test_counted_ranks_have_no_gap(counts: list[list[int]]) -> None:
    job = job_of(counts)
    workers = job.workers()
    assert [worker.rank for worker in workers] == list(range(sum(map(sum, counts))))
    assert [job.worker(worker.rank) for worker in workers] == list(workers)
    assert [job.worker_at(w.site, w.group, w.index) for w in workers] == list(workers)
    with pytest.raises(LookupError, match=f"allowed: 0 to {len(workers) - 1}"):
        job.worker(Rank(len(workers)))


@given(st.integers(1, 12))
def test_in_a_job_of_one_group_both_are_the_same(count: int) -> None:
    job = job_of([[count]])
    assert job.workers() == job.with_group_ranks().workers()


def test_no_rank_is_beyond_the_largest_groups() -> None:
    job = job_of([[1, 1], [1]]).with_group_ranks()
    last = job.worker(Rank(3 * MAX_WORKERS_PER_GROUP - 1))
    assert (last.site, last.group, last.index) == ("site-1", "g0", MAX_WORKERS_PER_GROUP - 1)
    for rank in (-1, 3 * MAX_WORKERS_PER_GROUP):
        with pytest.raises(LookupError, match="allowed: 0 to"):
            job.worker(Rank(rank))


def test_a_job_that_cannot_grow_has_the_workers_that_it_counts() -> None:
    job = job_of([[2]], policy="dlion", topology="ring")
    assert job.with_group_ranks() == job
    site = job.workers()[0].site
    with pytest.raises(
        LookupError, match="has 2 workers in group g0 of site site-0; allowed: 0 to 1"
    ):
        job.worker_at(site, "g0", 2)
    with pytest.raises(LookupError, match=r"no such group; allowed: of site-0: g0$"):
        job.worker_at(site, "g1", 0)
    with pytest.raises(LookupError, match=r"no such site; allowed: site-0$"):
        job.worker_at(SiteName("site-1"), "g0", 0)


def test_ranks_in_a_manifest_are_ignored() -> None:
    """It may come from a cluster's run, and now belong to another."""
    grown = job_of([[2, 1], [2]]).with_group_ranks()
    assert grown.may_grow
    ring = replace(grown.spec, exchange=replace(grown.spec.exchange, topology="ring"))
    assert not replace(grown, spec=ring).with_group_ranks().may_grow
    assert grown.with_counted_ranks().workers() == job_of([[2, 1], [2]]).workers()
