"""Test the runs that a site serves, with a real coordinator without a port.

A run is opened once. A changed count of workers takes effect during the run and counts for the
target; a worker that failed permanently does not. A run of the same job with another id closes the
previous one. Pods learn to trust a renewed authority. The keeper gets each event of the operator
once. Downloads of workers are reported.

Left out: calls over gRPC (tests/local/test_coordinator_runs.py), figures (test_progress).
"""

from __future__ import annotations

from typing import Any

from dlion_api.names import Rank, SiteName
from dlion_api.protocol.progress import EvaluationRecord, EventRecord
from dlion_api.protocol.records import record_from_json
from dlion_api.spec import Job, load_job
from dlion_operator.coordinator import CoordinatorServer
from dlion_operator.coordinator.events import DownloadReported
from dlion_operator.model.download_progress import DownloadProgress
from dlion_operator.pki.authority import CertificateAuthority, Tokens
from dlion_operator.pki.token_bindings import Bearer
from dlion_operator.plan.decisions import JobEvent, OpenRun
from dlion_operator.served_runs.site_runs import SiteRuns

SITE = SiteName("plant-a")


def job(workers: int = 2, run_id: str = "1") -> Job:
    spec = {
        "runId": run_id,
        "sites": [{"name": SITE, "groups": [{"name": "g", "workers": workers}]}],
        "trainer": {
            "program": {"builtin": "digits"},
            "dataset": {"name": "digits"},
            "stop": {"targetAccuracy": 0.5},
        },
    }
    return load_job(
        {
            "apiVersion": "dlion.dev/v1alpha1",
            "kind": "DLionJob",
            "metadata": {"name": "digits"},
            "spec": spec,
        }
    )


def site() -> tuple[SiteRuns, CoordinatorServer, CertificateAuthority]:
    authority = CertificateAuthority(SITE)
    server = CoordinatorServer("127.0.0.1:0", authority)
    runs = SiteRuns(server, authority=authority, tokens=Tokens(), trigger=lambda _: None)
    return runs, server, authority


def evaluation(rank: int, accuracy: float) -> Any:
    return EvaluationRecord(1.0, Rank(rank), 1, 10, accuracy, 1.0, 10)


def test_a_changed_count_of_workers_takes_effect_during_the_run() -> None:
    runs, server, _ = site()
    opened = job(3)
    runs.open(OpenRun(opened, opened.workers()[:2], spec_hash="", age_s=0.0))
    assert server.membership(job().key).expected_count == 2
    version = server.membership(job().key).version
    runs.open(OpenRun(opened, opened.workers(), spec_hash="", age_s=0.0))
    membership = server.membership(job().key)
    assert membership.expected_count == 3
    assert membership.version == version + 1
    runs.open(OpenRun(opened, opened.workers(), spec_hash="", age_s=0.0))
    assert server.membership(job().key) == membership


def test_the_target_is_evaluated_over_the_existing_workers() -> None:
    runs, server, _ = site()
    runs.open(OpenRun(job(2), job(2).workers(), spec_hash="", age_s=0.0))
    server.runs[job().key].take(evaluation(0, 0.9))
    view = runs.view(job().key)
    assert view is not None
    assert view.stop_reason == ""
    runs.open(OpenRun(job(2), job(2).workers()[:1], spec_hash="", age_s=0.0))
    view = runs.view(job().key)
    assert view is not None
    assert view.stop_reason == "targetAccuracy 0.5 reached: mean over 1 replicas 0.9000"


def test_a_permanently_failed_worker_does_not_count_for_the_target() -> None:
    runs, server, _ = site()
    runs.open(OpenRun(job(2), job(2).workers(), spec_hash="", age_s=0.0))
    server.runs[job().key].take(evaluation(0, 0.9))
    runs.open(
        OpenRun(job(2), job(2).workers(), spec_hash="", age_s=0.0, failed=frozenset({Rank(1)}))
    )
    view = runs.view(job().key)
    assert view is not None
    assert view.stop_reason == "targetAccuracy 0.5 reached: mean over 1 replicas 0.9000"
    assert runs.reports()[job().key].workers.left == {1}


def test_the_run_does_not_wait_for_a_permanently_failed_worker() -> None:
    """Otherwise a degraded run that is resumed after a suspension never trains again."""
    runs, server, _ = site()
    runs.open(OpenRun(job(2), job(2).workers(), spec_hash="", age_s=0.0))
    assert server.membership(job().key).expected_count == 2
    runs.open(
        OpenRun(job(2), job(2).workers(), spec_hash="", age_s=0.0, failed=frozenset({Rank(1)}))
    )
    assert server.membership(job().key).expected_count == 1
    another, server, _ = site()  # a restarted operator does the same
    another.open(
        OpenRun(job(2), job(2).workers(), spec_hash="", age_s=0.0, failed=frozenset({Rank(1)}))
    )
    assert server.membership(job().key).expected_count == 1


def test_a_run_that_ended_here_reports_that_no_worker_returns() -> None:
    runs, _, _ = site()
    runs.open(OpenRun(job(2), job(2).workers(), spec_hash="", age_s=0.0))
    assert runs.reports()[job().key].workers.left == frozenset()
    runs.finish(job().key, "it took too long", succeeded=False)
    assert runs.reports()[job().key].workers.left == {0, 1}


def test_the_keeper_gets_each_event_of_the_operator_once_and_before_the_end() -> None:
    runs, server, _ = site()
    began = JobEvent("Training", "all train")
    runs.note(job().key, [began])  # a run that is not served has no stream of a keeper
    runs.open(OpenRun(job(2), job(2).workers(), spec_hash="", age_s=100.0))
    lost = JobEvent("PeersLost", "1 of 2 workers \ud800 train\n", "Warning")
    for events in ([began, lost], [began, lost], [lost], [], [lost], [began]):
        runs.note(job().key, events)
    ended = JobEvent("ProgramFailed", "x" * 10_000, "Warning")
    runs.note(job().key, [ended])
    runs.finish(job().key, "it took too long", succeeded=False)
    runs.note(job().key, [ended, began])
    batch = server.runs[job().key]._feed.batch(1)
    assert batch is not None
    assert batch.end is not None
    records = [record_from_json(text) for text in batch.texts]
    assert all(isinstance(each, EventRecord) and each.time_s >= 100 for each in records)
    assert [(each.reason, each.warning) for each in records if isinstance(each, EventRecord)] == [
        ("Training", False), ("PeersLost", True), ("Training", False), ("ProgramFailed", True)
    ]  # fmt: skip


def test_a_new_run_of_a_job_closes_the_previous_one() -> None:
    runs, server, _ = site()
    for each in (job(), job(run_id="2")):
        runs.open(OpenRun(each, each.workers(), spec_hash="", age_s=0.0))
    assert list(server.runs) == [job(run_id="2").key]
    assert runs.view(job().key) is None


def test_downloads_are_reported() -> None:
    runs, server, _ = site()
    runs.open(OpenRun(job(), job().workers(), spec_hash="", age_s=0.0))
    progress = DownloadProgress("model-initializer", 1, 0)
    reported = DownloadReported(job().workers()[1], Bearer(), progress)
    server.runs[job().key].state.download(reported)
    view = runs.view(job().key)
    assert view is not None
    assert view.downloads == {"plant-a/g-1": progress}


def test_pods_trust_a_renewed_authority() -> None:
    runs, _, authority = site()
    runs.open(OpenRun(job(), job().workers(), spec_hash="", age_s=0.0))
    successor = authority.renewed()
    runs.replace_authority(successor)
    assert runs.authority_pem() == successor.bundle_pem.decode()
    assert runs.authority_pem().count("BEGIN CERTIFICATE") == 2
