"""Test how the operator reads the admission policy of a site, against an API server in memory.

A job that asks for more than the defaults starts only if policy and binding deny and are older than
the job. It does not start if one of them is missing, only warns, ignores errors, binds another
policy or is younger. It starts once both exist; their later removal does not end it. Jobs without a
template or a Secret, and sites without a policy, read nothing. Reads are rare. A refused read
counts as a missing policy.

Left out: what the policy itself allows (tests/cluster/test_tenancy.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dlion_operator.apply.admission_policy import READ_INTERVAL_S
from dlion_operator.kubernetes.client import Document, Kind, RequestRefusedError
from dlion_operator.model.tenancy import Tenancy
from operator_in_memory import KeptObjects, Site
from operator_world import SETTINGS, dlion_job

NAME = "dlion-tenancy"
WATCHED_SITE = replace(SETTINGS, tenancy=Tenancy(admission_policy=NAME))
SECRET = {"spec": {"volumes": [{"name": "key", "secret": {"secretName": "db"}}]}}
EARLY, LATER, LATEST = (f"2026-01-31T{hour}:00:00Z" for hour in ("08", "09", "10"))
POLICY: Document = {"spec": {"failurePolicy": "Fail"}}
BINDING: Document = {"spec": {"policyName": NAME, "validationActions": ["Deny"]}}


def job(template: Any = SECRET, created: str = LATER) -> Document:
    document = dlion_job(podTemplate=template)
    document["metadata"]["creationTimestamp"] = created
    return document


def keep(cluster: KeptObjects, kind: Kind, parts: Document, created: str = EARLY) -> None:
    cluster._keep(kind.document({"name": NAME, "creationTimestamp": created}, **parts))


def cluster_with(
    policy: Document | None = POLICY, binding: Document | None = BINDING, created: str = EARLY
) -> KeptObjects:
    cluster = KeptObjects()
    if policy is not None:
        keep(cluster, Kind.ADMISSION_POLICY, policy)
    if binding is not None:
        keep(cluster, Kind.ADMISSION_POLICY_BINDING, binding, created)
    return cluster


def reason(site: Site) -> str:
    site.look()
    found = next(each for each in site.status()["conditions"] if each["type"] == "Ready")
    return str(found["reason"])


def reads(site: Site) -> int:
    return sum(kind.startswith("ADMISSION") for _, kind in site.cluster.requests)


def test_a_job_starts_if_the_policy_checked_its_writer() -> None:
    site = Site(job(), cluster_with(), WATCHED_SITE)
    assert reason(site) == "WorkersStarting"
    assert [kind for kind, _ in site.cluster.objects].count(Kind.JOB) == 1


@pytest.mark.parametrize(
    "cluster",
    [
        cluster_with(policy=None),
        cluster_with(binding=None),
        cluster_with(policy={"spec": {"failurePolicy": "Ignore"}}),
        cluster_with(binding={"spec": {"policyName": NAME, "validationActions": ["Warn"]}}),
        cluster_with(binding={"spec": {"policyName": "other", "validationActions": ["Deny"]}}),
        cluster_with(binding={"spec": {}}),
        cluster_with(created=LATEST),
    ],
)
def test_a_job_does_not_start_if_the_policy_may_not_have_checked_it(cluster: KeptObjects) -> None:
    site = Site(job(), cluster, WATCHED_SITE)
    assert reason(site) == "TemplateNotAllowed"
    assert Kind.JOB not in [kind for kind, _ in site.cluster.objects]


def test_a_job_starts_once_the_policy_exists_and_continues_without_it() -> None:
    site = Site(job(), cluster_with(binding=None), WATCHED_SITE)
    assert reason(site) == "TemplateNotAllowed"
    keep(site.cluster, Kind.ADMISSION_POLICY_BINDING, BINDING)
    site.time_s += READ_INTERVAL_S
    assert reason(site) == "WorkersStarting"
    del site.cluster.objects[Kind.ADMISSION_POLICY, NAME]
    site.time_s += READ_INTERVAL_S
    assert reason(site) == "WorkersStarting"


@pytest.mark.parametrize(
    ("document", "settings"), [(job(None), WATCHED_SITE), (job(), SETTINGS), (job({}), SETTINGS)]
)
def test_a_job_that_needs_no_policy_reads_none(document: Document, settings: Any) -> None:
    site = Site(document, cluster_with(), settings)
    site.look()
    assert reads(site) == 0


def test_a_groups_template_counts_and_reads_are_rare() -> None:
    document = job(None)
    document["spec"]["sites"][0]["groups"][0]["podTemplate"] = SECRET
    site = Site(document, cluster_with(), WATCHED_SITE)
    read = 0
    for _ in range(5):
        assert reason(site) == "WorkersStarting"
        read += reads(site)
        site.cluster.requests.clear()
    assert read == 2


@pytest.mark.parametrize(
    ("part", "use"),
    [("dataset", {"dataset": {"path": "a", "format": "npz"}}), ("model", {"startFrom": "a.keras"})],
)
def test_the_secret_of_a_download_counts_without_a_template(part: str, use: Document) -> None:
    """The policy compares it, too."""
    download = {"url": "https://example.com/a.npz", "sha256": "0" * 64, "secretName": "hub"}
    document = job(None)
    document["spec"]["trainer"] |= {"initializer": {part: download}, **use}
    assert reason(Site(document, cluster_with(), WATCHED_SITE)) == "WorkersStarting"
    assert reason(Site(document, cluster_with(binding=None), WATCHED_SITE)) == "TemplateNotAllowed"
    del download["secretName"]
    site = Site(document, cluster_with(), WATCHED_SITE)
    assert reason(site) == "WorkersStarting"
    assert reads(site) == 0


def test_a_policy_that_may_not_be_read_counts_as_missing() -> None:
    cluster = cluster_with()

    def refuse(verb: str, document: Document) -> None:
        if str(document.get("kind")).startswith("ADMISSION"):
            raise RequestRefusedError(f"{verb}: forbidden", 403)

    cluster.refuse = refuse
    site = Site(job(), cluster, WATCHED_SITE)
    assert reason(site) == "TemplateNotAllowed"
    assert reads(site) == 1


@pytest.mark.parametrize("sites", [None, 3, [3], [{"groups": 3}], [{"groups": ["x", None]}]])
def test_a_manifest_of_any_form_causes_no_crash(sites: Any) -> None:
    document = job(None)
    document["spec"]["sites"] = sites
    assert reason(Site(document, cluster_with(), WATCHED_SITE)) == "InvalidSpec"
