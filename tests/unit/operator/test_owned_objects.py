"""What of a cluster's objects the operator takes for a job's, and what it does to no other.

Proves: every delete names the UID of an object that the job owns, also where the object is known by
name alone; an object of the same name with another owner stays.
Leaves out: how a real API server holds a delete against its UID (tests/cluster).
"""

from __future__ import annotations

import copy

import pytest

from dlion_operator.cluster import Kind
from operator_in_memory import Site
from operator_world import dlion_job

BY_NAME = (Kind.DEPLOYMENT, Kind.SERVICE, Kind.CONFIG_MAP)


def begin_another_run(site: Site) -> None:
    """The user asks for run 2."""
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
    theirs["metadata"]["ownerReferences"][0]["uid"] = "somebody-else"
    begin_another_run(site)
    site.look()
    site.look()
    assert site.cluster.objects[kind, name] is theirs
    assert (kind, name) not in {(k, n) for k, n, _ in site.cluster.deleted}


def test_an_object_on_its_way_out_is_not_deleted_again() -> None:
    site = Site(dlion_job())
    site.look()
    for (kind, _), kept in site.cluster.objects.items():
        if kind in BY_NAME:
            kept["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"
    begin_another_run(site)
    site.look()
    assert {kind for kind, _, _ in site.cluster.deleted} == {Kind.JOB}
