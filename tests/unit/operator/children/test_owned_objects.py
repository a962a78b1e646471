"""Test which objects the operator treats as children of a job.

Every deletion names the UID of an owned object, also if the operator knows only its name. An object
of the same name with another owner stays. A child with lost or changed labels gets them back before
any decision, and the run continues.

Left out: how a real API server checks a deletion against its UID (tests/cluster).
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from dlion_api.cluster_names import JOB_LABEL, RUN_LABEL
from dlion_operator.kubernetes.client import ConflictError, Document, Kind, RequestRefusedError
from operator_in_memory import Site
from operator_world import SETTINGS, dlion_job

BY_NAME = (Kind.DEPLOYMENT, Kind.SERVICE, Kind.CONFIG_MAP)


def begin_another_run(site: Site) -> None:
    """Request run 2."""
    changed = copy.deepcopy(site.cluster.objects[Kind.DLION_JOB, "digits"])
    changed["spec"]["runId"] = "2"
    site.change(changed)


def test_every_delete_names_the_uid_of_the_object() -> None:
    site = Site(dlion_job())
    site.look()
    uids = {
        (kind, name): kept["metadata"]["uid"]
        for (kind, name), kept in site.cluster.objects.items()
        if kind is not Kind.DLION_JOB
    }
    begin_another_run(site)
    site.look()
    deleted = {(kind, name): uid for kind, name, uid in site.cluster.deleted}
    assert {kind for kind, _ in deleted} == {Kind.JOB, *BY_NAME}
    assert deleted == {key: uids[key] for key in deleted}


@pytest.mark.parametrize("kind", BY_NAME)
def test_an_object_with_another_owner_is_never_deleted(kind: Kind) -> None:
    site = Site(dlion_job())
    site.look()
    name, theirs = next((n, d) for (k, n), d in site.cluster.objects.items() if k is kind)
    theirs["metadata"]["ownerReferences"][0]["uid"] = "another-owner"
    begin_another_run(site)
    site.look()
    site.look()
    assert site.cluster.objects[kind, name] is theirs
    assert (kind, name) not in {(k, n) for k, n, _ in site.cluster.deleted}


def test_an_object_in_deletion_is_not_deleted_again() -> None:
    site = Site(dlion_job())
    site.look()
    for (kind, _), kept in site.cluster.objects.items():
        if kind in BY_NAME:
            kept["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"
    begin_another_run(site)
    site.look()
    assert {kind for kind, _, _ in site.cluster.deleted} == {Kind.JOB}


def job_of(site: Site) -> tuple[str, Document]:
    """Return the only Job, as the API server keeps it."""
    ((name, kept),) = ((n, d) for (k, n), d in site.cluster.objects.items() if k is Kind.JOB)
    return name, kept


@pytest.mark.parametrize("kind", [Kind.JOB, Kind.SERVICE])
@pytest.mark.parametrize("change", [{JOB_LABEL: None}, {RUN_LABEL: "9"}, {JOB_LABEL: "another"}])
def test_a_child_that_loses_a_label_gets_it_back(kind: Kind, change: dict[str, str | None]) -> None:
    site = Site(dlion_job())
    site.look()
    site.look()
    name = next(n for k, n in site.cluster.objects if k is kind)
    before = dict(site.cluster.objects[kind, name]["metadata"]["labels"])
    uid = site.cluster.objects[kind, name]["metadata"]["uid"]
    site.relabel(kind, name, change)
    site.look()
    assert site.cluster.writes() == [("patch", kind.name)]
    kept = site.cluster.objects[kind, name]["metadata"]
    assert (kept["labels"], kept["uid"]) == (before, uid)
    site.look()
    assert (site.cluster.writes(), site.cluster.deleted) == ([], [])


def test_a_label_that_is_removed_and_restored_changes_nothing() -> None:
    site = Site(dlion_job())
    site.look()
    site.look()
    name, _ = job_of(site)
    site.relabel(Kind.JOB, name, {JOB_LABEL: None})
    site.relabel(Kind.JOB, name, {JOB_LABEL: "digits"})
    site.look()
    assert site.cluster.requests == []
    assert len(site.store.of_job(Kind.JOB, site.name)) == 1


def test_a_child_that_lost_its_labels_while_the_operator_was_away_is_found() -> None:
    first = Site(dlion_job())
    first.look()
    name, _ = job_of(first)
    first.relabel(Kind.JOB, name, {JOB_LABEL: None})
    again = Site(cluster=first.cluster)
    again.store.remove(Kind.JOB, job_of(first)[1])
    with pytest.raises(ConflictError, match="had lost its labels"):
        again.look()
    assert job_of(again)[1]["metadata"]["labels"][JOB_LABEL] == "digits"
    again.look()
    assert len(again.store.of_job(Kind.JOB, again.name)) == 1
    assert again.cluster.deleted == []


def test_refused_labels_do_not_stop_a_job() -> None:
    site = Site(dlion_job())
    site.look()
    site.look()
    name = next(n for k, n in site.cluster.objects if k is Kind.SERVICE)

    def refuse(verb: str, document: Document) -> None:
        if verb == "patch" and document.get("kind") == "SERVICE":
            raise RequestRefusedError("403 a policy", 403)

    site.cluster.refuse = refuse
    site.relabel(Kind.SERVICE, name, {RUN_LABEL: "9"})
    assert site.look() is not None


def test_objects_that_a_restored_cluster_lacks_are_created_again() -> None:
    settings = replace(SETTINGS, keeper=replace(SETTINGS.keeper, size="1Gi"))
    site = Site(dlion_job(), settings=settings)
    site.look()
    for key in [each for each in site.cluster.objects if each[0] is not Kind.DLION_JOB]:
        del site.cluster.objects[key]
    job = site.cluster.objects[Kind.DLION_JOB, "digits"]
    job["metadata"]["resourceVersion"] = "1"
    site.store.replace_all({Kind.DLION_JOB: [copy.deepcopy(job)]})
    site.reset()
    site.look()
    made = [kind for verb, kind in site.cluster.writes() if verb in ("create", "apply")]
    assert sorted(made) == [
        "ConfigMap", "Deployment", "Job", "PersistentVolumeClaim", "Service", "Service"
    ]  # fmt: skip
