"""Tests of the workers that a keeper serves.

A rank belongs to one worker and a worker has one rank. This holds across restarts of the keeper,
also if the manifest then has other counts. Workers of other sites are refused. A damaged file does
not stop a keeper. No worker is served before the revoked workers are known. After the end of a run
the last revoked workers stay, with their reasons.

Left out: certificates (tests/local/test_keeper).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dlion_api.errors import UnavailableError
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.spec import Job, load_job
from dlion_worker.artifact_client.paths import AccessDeniedError
from dlion_worker.artifact_server.workers import (
    REVOKED_FILE,
    WORKERS_FILE,
    RevokedWorkers,
    SiteWorkerRegistry,
)
from local_run import job_document

PLANT_A, PLANT_B = SiteName("plant-a"), SiteName("plant-b")


def job(workers_a: int = 2) -> Job:
    return load_job(job_document({PLANT_A: workers_a, PLANT_B: 2}))


def worker(rank: int, site: SiteName, index: int) -> WorkerIdentity:
    return WorkerIdentity(Rank(rank), site, "g", index)


@pytest.mark.parametrize(
    "claimed",
    [
        worker(2, PLANT_B, 1),  # the rank of another worker
        worker(3, PLANT_B, 0),  # the name of another worker
        worker(5, PLANT_B, 1),  # a second rank
        worker(0, PLANT_A, 0),  # a worker of another site
        worker(9, PLANT_A, 9),
    ],
)
def test_workers_that_do_not_belong_to_it_are_refused(
    tmp_path: Path, claimed: WorkerIdentity
) -> None:
    workers = SiteWorkerRegistry(tmp_path, job(), PLANT_B)
    with pytest.raises(AccessDeniedError):
        workers.check(claimed)
    with pytest.raises(AccessDeniedError):
        workers.register(claimed)


def test_ranks_stay_when_the_manifest_changes_its_counts(tmp_path: Path) -> None:
    """Plant A has grown: by the manifest, plant B's ranks would be 3 and 4."""
    late = worker(5, PLANT_B, 2)
    SiteWorkerRegistry(tmp_path, job(), PLANT_B).register(late)
    again = SiteWorkerRegistry(tmp_path, job(workers_a=3), PLANT_B)
    for known in (worker(2, PLANT_B, 0), worker(3, PLANT_B, 1), late):
        again.check(known)
    with pytest.raises(AccessDeniedError, match="plant-b/g-2 is rank 5"):
        again.check(replace(late, rank=Rank(6)))


@pytest.mark.parametrize("content", ["", "{", "7", "[[1]]", '[["a","g",0]]', "[" * 100_000])
def test_a_damaged_file_does_not_stop_it(tmp_path: Path, content: str) -> None:
    (tmp_path / WORKERS_FILE).write_text(content)
    SiteWorkerRegistry(tmp_path, job(), PLANT_B).check(worker(2, PLANT_B, 0))


def test_a_restarted_keeper_serves_no_worker_before_it_knows_the_revoked_ones(
    tmp_path: Path,
) -> None:
    trusted, bad = worker(0, PLANT_A, 0), worker(1, PLANT_A, 1)
    first = RevokedWorkers(tmp_path, is_over=False)
    with pytest.raises(UnavailableError, match="retry"):
        first.check(trusted)
    first.set([bad.name])
    first.check(trusted)
    again = RevokedWorkers(tmp_path, is_over=False)
    for each in (trusted, bad):
        with pytest.raises(UnavailableError):
            again.check(each)
    again.set([])
    again.check(bad)


def test_after_the_end_of_a_run_the_last_revoked_workers_stay(tmp_path: Path) -> None:
    trusted, bad = worker(0, PLANT_A, 0), worker(1, PLANT_A, 1)
    with pytest.raises(UnavailableError):  # an earlier keeper never knew them
        RevokedWorkers(tmp_path, is_over=True).check(trusted)
    first = RevokedWorkers(tmp_path, is_over=False)
    first.set([])
    RevokedWorkers(tmp_path, is_over=True).check(bad)
    first.set([bad.name])
    first.set([bad.name], {bad.name: "stolen"})
    over = RevokedWorkers(tmp_path, is_over=True)
    assert over.reasons == {bad.name: "stolen"}
    over.check(trusted)
    with pytest.raises(AccessDeniedError, match="is revoked"):
        over.check(bad)


@pytest.mark.parametrize(
    "content",
    ["", "7", "[1", "[" * 9999, '["plant-a/g-1"]', "{}", '{"names": 7, "reasons": {}}',
     '{"names": [], "reasons": []}'],
)  # fmt: skip
def test_with_a_damaged_file_of_revoked_workers_no_worker_is_served(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / REVOKED_FILE).write_text(content)
    revoked = RevokedWorkers(tmp_path, is_over=True)
    with pytest.raises(UnavailableError):
        revoked.check(worker(0, PLANT_A, 0))
    revoked.set([])
    RevokedWorkers(tmp_path, is_over=True).check(worker(0, PLANT_A, 0))
