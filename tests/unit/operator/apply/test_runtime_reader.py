"""Test how the operator reads the DLionRuntime of a job, against an API server in memory.

The operator reads it by name in its own namespace while a run waits, and never afterwards. The
status names the remedy for a missing, invalid, oversized, refused or unreachable runtime, and for a
cluster without the definition. The run starts once the runtime is correct, also if the API server
refused the objects of an earlier one. Jobs without a runtime read nothing.

Left out: a real API server (tests/cluster/test_runtimes).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from dlion_operator.kubernetes.client import Document, Kind, RequestRefusedError, ServerError
from operator_in_memory import KeptObjects, Site
from operator_world import SETTINGS, dlion_job

if TYPE_CHECKING:
    from collections.abc import Callable

READ = ("get", "DLION_RUNTIME")


def ready(site: Site) -> tuple[str, str]:
    """Return reason and message."""
    found = next(each for each in site.status()["conditions"] if each["type"] == "Ready")
    return found["reason"], found["message"]


def keep(site: Site, name: str = "edge", **spec: Any) -> None:
    site.cluster._keep(Kind.DLION_RUNTIME.document({"name": name}, spec=spec))


def later(site: Site, seconds: float = 5.0) -> None:
    site.time_s += seconds
    site.look()


def jobs(site: Site) -> list[Document]:
    return [d for (kind, _), d in site.cluster.objects.items() if kind is Kind.JOB]


def image(site: Site) -> str:
    (job,) = jobs(site)
    return str(job["spec"]["template"]["spec"]["containers"][0]["image"])


def test_a_run_starts_once_its_runtime_exists() -> None:
    site = Site(dlion_job(runtime="edge"))
    site.look()
    assert ready(site)[0] == "RuntimeUnavailable"
    assert "DLionRuntime dlion-system/edge does not exist" in ready(site)[1]
    assert "kubectl -n dlion-system get dlionruntimes" in ready(site)[1]
    assert site.cluster.writes() == [("patch", "status")]
    later(site, 61)
    held = {each["type"]: each["status"] for each in site.status()["conditions"]}
    assert held["Stalled"] == "True"
    keep(site, image="site/worker:2")
    later(site)
    assert image(site) == "site/worker:2"
    assert ready(site)[0] == "WorkersStarting"
    events = [e["reason"] for (k, _), e in site.cluster.objects.items() if k is Kind.EVENT]
    assert "RuntimeUnavailable" in events


def test_a_started_run_reads_nothing() -> None:
    site = Site(dlion_job(runtime="edge"))
    keep(site, image="site/worker:2")
    site.look()
    keep(site, image="site/worker:9", limits={"maxWorkers": 1})
    for _ in range(5):
        later(site)
        assert READ not in site.cluster.requests
    assert image(site) == "site/worker:2"
    del site.cluster.objects[Kind.DLION_RUNTIME, "edge"]
    again = Site(cluster=site.cluster)
    again.look()
    assert READ not in again.cluster.requests
    assert ready(again)[0] == "WorkersStarting"


def test_the_next_run_reads_it_again() -> None:
    site = Site(dlion_job(runtime="edge"))
    keep(site, image="site/worker:1")
    site.look()
    assert image(site) == "site/worker:1"
    later(site, 0.1)
    keep(site, image="site/worker:2")
    site.change(dlion_job(runtime="edge", runId="2"))
    for _ in range(4):  # the earlier run's Jobs are deleted first
        later(site, 0.1)
    assert image(site) == "site/worker:2"


def test_jobs_without_a_runtime_read_nothing() -> None:
    site = Site(dlion_job())
    site.look()
    assert READ not in site.cluster.requests
    assert jobs(site)


def test_a_burst_of_passes_reads_it_once() -> None:
    site = Site(dlion_job(runtime="edge"))
    site.look()
    for _ in range(9):
        site.look()
        assert READ not in site.cluster.requests


def test_jobs_that_name_no_runtime_use_the_sites_default() -> None:
    site = Site(dlion_job(), settings=replace(SETTINGS, default_runtime="edge"))
    site.look()
    assert "runtimes.default" in ready(site)[1]
    keep(site, image="site/worker:2")
    later(site)
    assert image(site) == "site/worker:2"
    named = Site(dlion_job(runtime="own"), settings=replace(SETTINGS, default_runtime="edge"))
    keep(named, "own", image="own/worker:1")
    named.look()
    assert image(named) == "own/worker:1"


def refuse_reads(error: Exception) -> Callable[[str, Document], None]:
    def refuse(_verb: str, document: Document) -> None:
        if document["kind"] == "DLION_RUNTIME":
            raise error

    return refuse


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RequestRefusedError("dlionruntimes is forbidden", 403), "grant it get on dlionruntimes"),
        (ServerError("503"), "cannot be read yet: 503; retrying"),
    ],
)
def test_a_failed_read_is_retried(error: Exception, words: str) -> None:
    site = Site(dlion_job(runtime="edge"))
    keep(site)
    site.cluster.refuse = refuse_reads(error)
    site.look()
    assert words in ready(site)[1]
    site.cluster.refuse = lambda _verb, _document: None
    later(site)
    assert jobs(site)


def test_a_cluster_without_the_definition_is_named() -> None:
    site = Site(dlion_job(runtime="edge"))
    site.cluster.unserved = {Kind.DLION_RUNTIME}
    site.look()
    assert "apply crds/dlionruntime.yaml" in ready(site)[1]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"image": 7}, "spec.image"),
        ({"limits": {"maxWorkers": 0}}, "spec.limits.maxWorkers"),
        ({"limits": {"mayOverride": ["podTemplate"]}}, "who may set podTemplate"),
        ({"podTemplate": {"spec": {"x": "y" * 70_000}}}, "allowed: at most 65536"),
        ([], "must be a mapping"),
    ],
)
def test_a_runtime_that_cannot_be_used_is_named(spec: Any, words: str) -> None:
    site = Site(dlion_job(runtime="edge"))
    site.cluster._keep(Kind.DLION_RUNTIME.document({"name": "edge"}, spec=spec))
    site.look()
    reason, message = ready(site)
    if spec:
        assert reason == "RuntimeUnavailable"
        assert "cannot be used" in message
        assert words in message
        assert not jobs(site)
    else:
        assert jobs(site), "an empty spec has all defaults"


def test_fields_of_a_newer_definition_are_ignored() -> None:
    site = Site(dlion_job(runtime="edge"))
    keep(site, image="site/worker:2", laterField=1)
    site.look()
    assert image(site) == "site/worker:2"


def test_a_corrected_runtime_is_tried_immediately_after_a_refusal() -> None:
    def refuse(verb: str, document: Document) -> None:
        if document["kind"] == "Job" and "bad" in str(document["spec"]["template"]):
            raise RequestRefusedError("spec.template: Invalid value", 422)

    site = Site(dlion_job(runtime="edge"))
    site.cluster.refuse = refuse
    keep(site, image="bad")
    site.look()
    assert ready(site)[0] == "InvalidSpec"
    for _ in range(5):
        later(site, 100)  # back-off grows
    keep(site, image="good")
    later(site)
    assert image(site) == "good"


def test_a_job_that_does_not_run_here_reads_nothing() -> None:
    document = dlion_job(runtime="edge")
    document["spec"]["sites"][0]["name"] = "plant-z"
    site = Site(document)
    site.look()
    assert READ not in site.cluster.requests
    assert ready(site)[0] == "NotSelected"


def test_a_queued_job_has_the_priority_of_its_runtimes_pods() -> None:
    document = dlion_job(runtime="edge")
    document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "edge"}
    cluster = KeptObjects()
    site = Site(document, cluster=cluster, settings=replace(SETTINGS, kueue=True))
    keep(site, podTemplate={"spec": {"priorityClassName": "training"}})
    cluster._keep(Kind.PRIORITY_CLASS.document({"name": "training"}, value=7))
    site.look()
    (workload,) = (d for (kind, _), d in cluster.objects.items() if kind is Kind.WORKLOAD)
    assert workload["spec"]["priority"] == 7
