"""Test the training of two sites, each with its own coordinator, authority and keeper.

Workers train in lock step over links with certificates of each site's own authority, though one of
them starts before it knows the other site's bundle. They continue to train while both operators are
away, and with the operators after their restart. A stop that one site's coordinator decides ends
the run at both.

A site may join a run that another site trains, and leave before it ends. The first site does each
of its iterations once. It begins alone after its wait, and its weights are bit-identical to the
other's while that is present.

Workers run as in pods, with real federation, on loopback. Left out: Kubernetes (tests/cluster),
membership (test_federated_runs), other faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from federated_pods import NAMES, SitePods, two_sites
from local_run import blobs, hashes, job_document


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[tuple[SitePods, SitePods]]:
    """Start two sites with a worker each; neither has the bundle of the other."""
    document = job_document(
        dict.fromkeys(NAMES, 1),
        trainer={"program": blobs(tmp_path, nap_s=0.05), "stop": {"maxSteps": 10**6}},
        runId="r1",
    )
    with two_sites(tmp_path, document, subnet=21) as made:
        yield made


@pytest.mark.timeout(300)
def test_two_sites_train_together(sites: tuple[SitePods, SitePods], tmp_path: Path) -> None:
    a, b = sites
    a.start_keeper()
    a.start_worker(0)
    a.wait_until(lambda: a.operator.view(a.job).ready.get(a.site), "its worker has joined")
    for site in sites:
        (tmp_path / f"{site.site}.pem").write_bytes(site.bundle_pem())
    b.start_keeper()
    b.start_worker(1)
    for site, rank in ((b, 1), (a, 0)):  # show the logs of the one that failed
        site.wait_until(lambda site=site, rank=rank: len(site.steps(rank)) > 5, "it trains")

    for site in sites:
        site.operator.close()
    for site in sites:
        site.start_coordinator()
    before = len(a.steps(0)), len(b.steps(1))
    a.wait_until(
        lambda: len(a.steps(0)) > before[0] + 5 and len(b.steps(1)) > before[1] + 5, "they continue"
    )
    a.wait_until(
        lambda: all(s.operator.view(s.job).ready == dict.fromkeys(NAMES, 1) for s in sites),
        "both operators see both sites",
    )
    a.operator.stop(a.job, "enough")
    assert a.wait("trainer-0") == b.wait("trainer-1") == 0, a.story() + b.story()
    steps = a.steps(0) + b.steps(1)
    made = [(step.rank, step.iteration) for step in steps]
    assert len(made) == len(set(made))
    for rank in (0, 1):
        iterations = [iteration for each, iteration in made if each == rank]
        assert iterations == list(range(1, len(iterations) + 1))
    both = [set(by_rank.values()) for by_rank in hashes(steps).values() if len(by_rank) == 2]
    assert len(both) > 10
    assert {len(different) for different in both} == {1}  # equal weights at both sites


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_site_joins_late_and_leaves_early(tmp_path: Path) -> None:
    document = job_document(
        dict.fromkeys(NAMES, 1),
        trainer={"program": blobs(tmp_path, nap_s=0.05), "stop": {"maxSteps": 10**6}},
        runId="r1",
        minSites=1,
        startDeadlineSeconds=8,
    )
    with two_sites(tmp_path, document, subnet=47) as (a, b):
        b.operator.close()
        for site in (a, b):
            (tmp_path / f"{site.site}.pem").write_bytes(site.bundle_pem())
        a.start_keeper()
        a.start_worker(0)
        a.wait_until(lambda: len(a.steps(0)) > 20, "one site trains alone")

        b.start_coordinator()
        # On a busy machine the sites may connect later than the eight seconds for which a worker
        # waits for other sites. The worker then begins alone, at iteration 1.
        b.wait_until(lambda: b.operator.view(b.job).ready.get(a.site), "it sees the other's worker")
        b.start_keeper()
        b.start_worker(1)
        a.wait_until(lambda: len(b.steps(1)) > 10, "the other one, too")
        ready = dict.fromkeys(NAMES, 1)
        a.wait_until(lambda: a.operator.view(a.job).ready == ready, "both are counted")

        ended = b.end("trainer-1", "sidecar-1")
        b.operator.withdraw(b.job)
        left_at = a.steps(0)[-1].iteration
        a.wait_until(lambda: a.steps(0)[-1].iteration > left_at + 20, "one site continues")
        a.wait_until(lambda: not a.operator.view(a.job).ready.get(b.site), "the other is gone")
        a.operator.stop(a.job, "enough")
        assert a.wait("trainer-0") == 0, a.story()
        print(f"left: exit codes {ended}; stayed: {len(a.steps(0))} iterations")
        own, guest = a.steps(0), b.steps(1)
    assert [step.iteration for step in own] == list(range(1, len(own) + 1))
    assert guest[0].iteration > 20  # it took the state of the other one
    both = [set(by_rank.values()) for by_rank in hashes(own + guest).values() if len(by_rank) == 2]
    assert len(both) > 5
    assert {len(different) for different in both} == {1}
