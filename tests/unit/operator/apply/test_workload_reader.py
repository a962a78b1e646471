"""Test how the operator uses Kueue, against an API server in memory.

- The Workload is created before any Job, and no Job without it.
- The Workload is watched, never read, and created again after a deletion.
- The status names the remedy for a cluster without Kueue, a site that may not queue, a refused or
  foreign Workload and a missing class. Each is retried.
- Flavors are read once per admission, a priority class once a minute for all jobs.
- A write that conflicts with one of Kueue is decided again.
- An outage of Kueue does not stop a served run. Jobs without a queue read nothing.

Left out: a real API server and Kueue (tests/cluster/test_queueing.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dlion_operator.kubernetes.client import (
    ConflictError,
    Document,
    Kind,
    RequestRefusedError,
    ServerError,
)
from operator_in_memory import READS, KeptObjects, Site
from operator_world import SETTINGS, dlion_job

QUEUEING = replace(SETTINGS, kueue=True)
NAME = "digits-116be6"
ADMITTED = [{"type": each, "status": "True"} for each in ("QuotaReserved", "Admitted")]


def queued(**labels: str) -> Document:
    document = dlion_job()
    document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "edge", **labels}
    return document


def ready(site: Site) -> tuple[str, str]:
    """Return reason and message."""
    found = next(each for each in site.status()["conditions"] if each["type"] == "Ready")
    return found["reason"], found["message"]


def keep(cluster: KeptObjects, kind: Kind, name: str, **parts: Any) -> None:
    cluster._keep(kind.document({"name": name}, **parts))


def later(site: Site, seconds: float = 5.0) -> None:
    site.time_s += seconds
    site.look()


def set_status(site: Site, **status: Any) -> None:
    """Write the Workload's status as Kueue does."""
    workload = site.cluster.objects[Kind.WORKLOAD, NAME]
    site.change({**workload, "status": {**workload.get("status", {}), **status}})


def admit(site: Site) -> None:
    flavors = [
        {"name": name, "count": count, "flavors": {"cpu": "arm"}}
        for name, count in (("worker-small", 2), ("keeper", 1))
    ]
    set_status(site, conditions=ADMITTED, admission={"podSetAssignments": flavors})


def test_the_workload_is_created_before_any_job() -> None:
    site = Site(queued(), settings=QUEUEING)
    site.look()
    made = [kind for verb, kind in site.cluster.writes() if verb == "create"]
    assert made == ["Workload", "ConfigMap", "Job"]
    assert ready(site)[0] == "Queued"
    later(site)
    assert site.cluster.writes() == []


def test_no_job_is_created_after_a_refused_workload() -> None:
    def refuse(verb: str, document: Document) -> None:
        if verb == "create" and document["kind"] == "Workload":
            raise RequestRefusedError("spec.podSets: Too many: 9: must have at most 8 items", 422)

    site = Site(queued(), settings=QUEUEING)
    site.cluster.refuse = refuse
    site.look()
    assert [kind for verb, kind in site.cluster.writes() if verb == "create"] == ["Workload"]
    reason, message = ready(site)
    assert reason == "InvalidSpec"
    assert "at most 8 items" in message
    site.cluster.refuse = lambda _verb, _document: None
    later(site, 11)
    assert (Kind.WORKLOAD, NAME) in site.cluster.objects


def test_a_cluster_without_kueue_is_named_and_retried() -> None:
    site = Site(queued(), settings=QUEUEING)
    site.store.unlisted[Kind.WORKLOAD] = RequestRefusedError("404 page not found", 404)
    site.look()
    reason, message = ready(site)
    assert reason == "QueueUnusable"
    assert "install Kueue 0.15 or newer" in message
    assert (Kind.WORKLOAD, NAME) not in site.cluster.objects
    del site.store.unlisted[Kind.WORKLOAD]
    later(site)
    assert (Kind.WORKLOAD, NAME) in site.cluster.objects
    assert ready(site)[0] == "Queued"


def test_a_site_that_may_not_queue_names_the_value_to_set() -> None:
    site = Site(queued())
    site.look()
    assert ready(site)[0] == "QueueUnusable"
    assert "set kueue.enabled" in ready(site)[1]
    (job,) = (d for (kind, _), d in site.cluster.objects.items() if kind is Kind.JOB)
    assert job["spec"]["suspend"] is True


def test_missing_rights_are_named() -> None:
    site = Site(queued(), settings=QUEUEING)
    site.store.unlisted[Kind.WORKLOAD] = RequestRefusedError("workloads is forbidden", 403)
    site.look()
    reason, message = ready(site)
    assert reason == "QueueUnusable"
    assert "workloads is forbidden" in message


@pytest.mark.parametrize(
    ("labels", "reason"),
    [({"dlion.dev/job-name": "other"}, "QueueUnusable"), ({}, "Forbidden")],
    ids=["watched", "found when it is made"],
)
def test_a_workload_of_another_owner_admits_nothing(labels: dict[str, str], reason: str) -> None:
    site = Site(queued(), settings=QUEUEING)
    metadata = {"name": NAME, "namespace": "default", "labels": labels}
    site.change(Kind.WORKLOAD.document(metadata, status={"conditions": ADMITTED}))
    site.look()
    assert ready(site)[0] == reason
    assert "has another owner: delete or rename it" in ready(site)[1]
    jobs = [d for (kind, _), d in site.cluster.objects.items() if kind is Kind.JOB]
    assert all(job["spec"]["suspend"] for job in jobs)


@pytest.mark.parametrize(
    ("labels", "kind", "name"),
    [
        ({"kueue.x-k8s.io/priority-class": "urgent"}, Kind.WORKLOAD_PRIORITY_CLASS, "urgent"),
        ({}, Kind.PRIORITY_CLASS, "high"),
    ],
)
def test_the_priority_is_that_of_the_named_class(
    labels: dict[str, str], kind: Kind, name: str
) -> None:
    document = queued(**labels)
    document["spec"]["podTemplate"] = {"spec": {"priorityClassName": "high"}}
    site = Site(document, settings=QUEUEING)
    site.look()
    reason, message = ready(site)
    assert reason == "QueueUnusable"
    assert f"{kind.value[1]} {name} does not exist: create it" in message
    keep(site.cluster, kind, name, value=700)
    later(site)
    spec = site.cluster.objects[Kind.WORKLOAD, NAME]["spec"]
    group = kind.value[0].partition("/")[0]
    assert spec["priority"] == 700
    assert spec["priorityClassRef"] == {"group": group, "kind": kind.value[1], "name": name}


def test_a_class_that_is_missing_hides_no_workload() -> None:
    document = queued()
    site = Site(document, settings=QUEUEING)
    site.look()
    document["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] = "urgent"
    site.change(document)
    later(site)
    assert ready(site)[0] == "QueueUnusable"
    document["spec"]["suspend"] = True
    site.change(document)
    later(site)
    assert (Kind.WORKLOAD, NAME) not in site.cluster.objects


def test_flavors_are_read_once_per_admission() -> None:
    site = Site(queued(), settings=QUEUEING)
    site.look()
    admit(site)
    later(site)
    assert "ResourceFlavor arm does not exist" in ready(site)[1]
    keep(site.cluster, Kind.RESOURCE_FLAVOR, "arm", spec={"nodeLabels": {"arch": "arm64"}})
    later(site)
    (job,) = (d for (kind, _), d in site.cluster.objects.items() if kind is Kind.JOB)
    assert job["spec"]["suspend"] is False
    assert job["spec"]["template"]["spec"]["nodeSelector"] == {"arch": "arm64"}
    for _ in range(5):
        later(site)
        assert site.cluster.requests == []


def test_a_job_that_waits_or_runs_reads_nothing() -> None:
    """Not even after the ten minutes after which unwatched objects are read again."""
    settings = replace(
        QUEUEING,
        keeper=replace(QUEUEING.keeper, size="1Gi"),
        network_policies=replace(QUEUEING.network_policies, enabled=True),
    )
    site = Site(queued(), settings=settings)
    site.look()
    made = {kind for kind, _ in site.cluster.objects}
    later(site)
    assert {Kind.WORKLOAD, Kind.NETWORK_POLICY} <= made
    for _ in range(3):
        later(site, 601)
        assert site.cluster.requests == []
    admit(site)
    keep(site.cluster, Kind.RESOURCE_FLAVOR, "arm", spec={})
    later(site)
    later(site)
    assert Kind.CLAIM in {kind for kind, _ in site.cluster.objects}
    for _ in range(3):
        later(site, 601)
        assert not {verb for verb, _ in site.cluster.requests} & set(READS)


def test_a_class_is_read_once_a_minute_for_all_jobs() -> None:
    site = Site(queued(**{"kueue.x-k8s.io/priority-class": "urgent"}), settings=QUEUEING)
    keep(site.cluster, Kind.WORKLOAD_PRIORITY_CLASS, "urgent", value=700)
    site.look()
    for _ in range(5):
        later(site, 10)
        assert site.cluster.requests == []
    site.reset()  # another job of the same class
    later(site, 0)
    assert ("get", "WORKLOAD_PRIORITY_CLASS") not in site.cluster.requests
    later(site, 11)
    assert ("get", "WORKLOAD_PRIORITY_CLASS") in site.cluster.requests


def test_an_outage_of_kueue_does_not_stop_a_served_run() -> None:
    site = Site(queued(), settings=QUEUEING)
    site.look()
    admit(site)
    keep(site.cluster, Kind.RESOURCE_FLAVOR, "arm", spec={})
    later(site)
    again = Site(cluster=site.cluster, settings=QUEUEING)
    (workload,) = again.store.all(Kind.WORKLOAD)
    again.store.remove(Kind.WORKLOAD, workload)
    outage = ServerError("conversion webhook for kueue.x-k8s.io/v1beta1 failed")
    again.store.unlisted[Kind.WORKLOAD] = outage
    with pytest.raises(ServerError):
        again.look()
    assert again.runs.open_runs == []
    later(again, 61)
    assert len(again.runs.open_runs) == 1
    assert "conversion webhook" in ready(again)[1]
    (job,) = (d for (kind, _), d in site.cluster.objects.items() if kind is Kind.JOB)
    assert job["spec"]["suspend"] is False, "its pods continue"
    del again.store.unlisted[Kind.WORKLOAD]
    set_status(again)
    later(again)
    assert "conversion webhook" not in ready(again)[1]


def test_a_refusal_ends_an_outage() -> None:
    site = Site(queued(), settings=QUEUEING)
    outage = ServerError("conversion webhook for kueue.x-k8s.io/v1beta1 failed")
    site.store.unlisted[Kind.WORKLOAD] = outage
    with pytest.raises(ServerError):
        site.look()
    site.store.unlisted[Kind.WORKLOAD] = RequestRefusedError("workloads is forbidden", 403)
    later(site, 61)
    site.store.unlisted[Kind.WORKLOAD] = outage
    with pytest.raises(ServerError):
        later(site)


def test_a_deleted_workload_is_created_again() -> None:
    site = Site(queued(), settings=QUEUEING)
    site.look()
    site.lose(Kind.WORKLOAD, NAME)
    later(site)
    assert (Kind.WORKLOAD, NAME) in site.cluster.objects


def test_a_deleted_workload_admits_no_resumed_run() -> None:
    """The watch has not reported the deletion yet."""
    document = queued()
    site = Site(document, settings=QUEUEING)
    keep(site.cluster, Kind.RESOURCE_FLAVOR, "arm", spec={})
    site.look()
    admit(site)
    document["spec"]["suspend"] = True
    site.change(document)
    for _ in range(3):
        later(site)
    assert (Kind.WORKLOAD, NAME) not in site.cluster.objects
    document["spec"]["suspend"] = False
    site.change(document)
    later(site)
    assert "status" not in site.cluster.objects[Kind.WORKLOAD, NAME], "it queues again"
    (job,) = (d for (kind, _), d in site.cluster.objects.items() if kind is Kind.JOB)
    assert job["spec"]["suspend"] is True


def test_a_write_that_conflicts_with_kueue_is_decided_again() -> None:
    site = Site(queued(), settings=QUEUEING)
    site.look()
    admit(site)
    keep(site.cluster, Kind.RESOURCE_FLAVOR, "arm", spec={})

    def evict(verb: str, document: Document) -> None:
        if (verb, document["kind"]) == ("patch", "status") and not done:
            done.append(True)
            conditions = [
                {"type": each, "status": "True", "reason": "Preempted"}
                for each in ("QuotaReserved", "Admitted", "Evicted")
            ]
            set_status(site, conditions=conditions)
            raise ConflictError("changed meanwhile")

    done: list[bool] = []
    site.cluster.refuse = evict
    with pytest.raises(ConflictError):
        later(site)
    later(site)
    conditions = site.cluster.objects[Kind.WORKLOAD, NAME]["status"]["conditions"]
    held = {each["type"]: each["status"] for each in conditions}
    assert held["Evicted"] == "True"
    (job,) = (d for (kind, _), d in site.cluster.objects.items() if kind is Kind.JOB)
    assert job["spec"]["suspend"] is True


def test_a_job_without_a_queue_reads_no_workload() -> None:
    site = Site(dlion_job(), settings=QUEUEING)
    site.look()
    later(site)
    later(site)
    assert ("get", "WORKLOAD") not in site.cluster.requests
    other = Site(dlion_job())
    other.look()
    assert not {"WORKLOAD", "APIResourceList"} & {kind for _, kind in other.cluster.requests}


PREBUILT = "kueue.x-k8s.io/prebuilt-workload-name"
OF_RUN = {"dlion.dev/job-name": "digits", "dlion.dev/run-id": "1"}


@pytest.mark.parametrize(
    ("labels", "owner", "why"),
    [
        ({}, "", "does not exist or is of no DLionJob"),
        ({**OF_RUN, "dlion.dev/job-name": "other"}, "", "is of another job"),
        ({**OF_RUN, "dlion.dev/run-id": "0"}, "", "is of another job"),
        (OF_RUN, "another's", "is of another job"),
    ],
)
def test_a_named_workload_of_another_job_or_run_admits_nothing(
    labels: dict[str, str], owner: str, why: str
) -> None:
    site = Site(queued(**{PREBUILT: "theirs"}), settings=QUEUEING)
    owners = [{"uid": owner}] if owner else []
    metadata = {
        "name": "theirs", "namespace": "default", "labels": labels, "ownerReferences": owners
    }  # fmt: skip
    site.change(Kind.WORKLOAD.document(metadata, status={"conditions": ADMITTED}))
    site.look()
    reason, message = ready(site)
    assert reason == "QueueUnusable"
    assert f"Workload theirs, which label {PREBUILT} names, {why}" in message
    kept = site.cluster.objects[Kind.WORKLOAD, "theirs"]
    assert kept["metadata"]["ownerReferences"] == owners
    (job,) = (d for (kind, _), d in site.cluster.objects.items() if kind is Kind.JOB)
    assert job["spec"]["suspend"] is True


def test_a_named_workload_of_the_run_is_owned_and_needs_no_class() -> None:
    classes = {"kueue.x-k8s.io/priority-class": "urgent"}  # the manager has read it
    site = Site(queued(**{PREBUILT: "digits-dispatch"}, **classes), settings=QUEUEING)
    metadata = {"name": "digits-dispatch", "namespace": "default", "labels": OF_RUN}
    site.change(Kind.WORKLOAD.document(metadata))
    site.look()
    (owner,) = site.cluster.objects[Kind.WORKLOAD, "digits-dispatch"]["metadata"]["ownerReferences"]
    assert owner["uid"] == "u-1"
    assert ready(site)[0] == "Queued"
    later(site)
    assert site.cluster.writes() == []


def test_the_manager_reads_no_flavors() -> None:
    document = queued()
    document["spec"]["managedBy"] = "kueue.x-k8s.io/multikueue"
    site = Site(document, settings=replace(QUEUEING, site="control"))
    site.look()
    assert [kind for verb, kind in site.cluster.writes() if verb == "create"] == ["Workload"]
    workload = site.cluster.objects[Kind.WORKLOAD, "digits-dispatch"]
    assigned = [{"name": "keeper", "count": 1, "flavors": {"cpu": "arm"}}]
    site.change(
        {
            **workload,
            "status": {"conditions": ADMITTED, "admission": {"podSetAssignments": assigned}},
        }
    )
    later(site)
    assert ("get", "RESOURCE_FLAVOR") not in site.cluster.requests
    site.lose(Kind.WORKLOAD, "digits-dispatch")
    later(site)
    assert (Kind.WORKLOAD, "digits-dispatch") in site.cluster.objects


def test_a_field_of_a_newer_definition_keeps_a_job_in_its_queue() -> None:
    document = queued()
    document["spec"]["ofALaterVersion"] = True
    site = Site(document, settings=QUEUEING)
    site.look()
    assert (Kind.WORKLOAD, NAME) in site.cluster.objects
    later(site)
    assert ready(site)[0] == "Queued"
    (job,) = (d for (kind, _), d in site.cluster.objects.items() if kind is Kind.JOB)
    assert job["spec"]["suspend"] is True


@pytest.mark.parametrize("owner", ["u-1", "another's"])
def test_the_workload_of_an_unreadable_dispatched_job_is_read(owner: str) -> None:
    document = queued()
    document["spec"] |= {"managedBy": "kueue.x-k8s.io/multikueue", "trainer": 7}
    site = Site(document, settings=QUEUEING)
    name = "digits-dispatch"
    metadata = {
        "name": name, "namespace": "default", "labels": OF_RUN, "ownerReferences": [{"uid": owner}]
    }  # fmt: skip
    quota = [{"type": "QuotaReserved", "status": "True"}]
    site.change(
        Kind.WORKLOAD.document(metadata, status={"conditions": quota, "clusterName": "edge-1"})
    )
    site.look()
    assert (Kind.WORKLOAD, name) in site.cluster.objects
    is_own = owner == "u-1"
    assert bool(site.status().get("conditions")) is not is_own, "a copy writes the status"


def test_the_workload_of_a_job_that_leaves_multikueue_is_deleted_with_one_request() -> None:
    document = queued()
    document["spec"]["managedBy"] = "kueue.x-k8s.io/multikueue"
    site = Site(document, settings=QUEUEING)
    site.look()
    assert (Kind.WORKLOAD, "digits-dispatch") in site.cluster.objects
    del document["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    site.change(document)
    site.look()
    assert (Kind.WORKLOAD, "digits-dispatch") not in site.cluster.objects
    later(site)
    later(site)
    assert site.cluster.requests == []
