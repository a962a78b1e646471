"""Test how `dlion preflight -f` checks the DLionRuntime of a job at a site.

- A refusal by a runtime fails, with the operator's message and a remedy. An allowed job passes. A
  missing or invalid runtime fails.
- An unreadable runtime, or impossible settings, are unknown. A job without a runtime has no such
  check; a default of the site counts.
- The runtime's image replaces the chart's in the report. Its podTemplate determines where workers
  have room, and which Secrets fetch images.

Left out: the limits in detail (tests/unit/operator/plan/test_runtime_limits.py), requests to an API
server (test_preflight_clusters.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from dlion_api.errors import AbsentError, DeniedError, DLionError
from dlion_cli.inputs.manifests import load_manifest
from dlion_cli.preflight_checks.checks import Check, CheckOutcome
from dlion_cli.preflight_checks.job_runtime import runtime_checks
from dlion_cli.preflight_checks.site_capacity import capacity_checks
from dlion_cli.preflight_checks.site_cluster import OperatorSnapshot, SiteCluster
from manifest_table import changed, smallest

SETTINGS: dict[str, Any] = {
    "site": "plant-a",
    "images": {"worker": "w:1", "sidecar": "s:1"},
    "coordinator": {"address": "dlion-operator.dlion-system.svc:7443"},
    "ofALaterRelease": True,
}
GROUP = {"name": "small", "workers": 2}


def site_cluster(
    runtime: dict[str, Any] | DLionError | None, settings: dict[str, Any], nodes: Any = ()
) -> SiteCluster:
    operator = OperatorSnapshot(
        deployment={}, settings=settings, trust={}, service=None, streams={}
    )
    return SiteCluster(
        context="a", namespace="dlion-system", version="", clock=None, schema={},
        operator=operator, nodes=[*nodes], runtime=runtime,
    )  # fmt: skip


def checks(
    found: dict[str, Any] | DLionError | None,
    group: dict[str, Any] | None = None,
    settings: dict[str, Any] = SETTINGS,
    **spec: Any,
) -> list[Check]:
    sites = [{"name": "plant-a", "groups": [GROUP | (group or {})]}]
    given = {"spec.sites": sites, **{f"spec.{name}": value for name, value in spec.items()}}
    job = load_manifest(changed(smallest(), given), source="job", lines=None)
    return runtime_checks(site_cluster(found, settings), job.spec.sites[0], job)


def limits(**given: Any) -> dict[str, Any]:
    return {"metadata": {"name": "edge"}, "spec": {"limits": given}}


LIMITS = {"limits": {"cpu": "4", "memory": "1Gi"}}


@pytest.mark.parametrize(
    ("runtime", "group", "words"),
    [
        (limits(mayOverride=[]), {"image": "x:1"}, "the job sets image of group small: remove it"),
        (limits(mayOverride=[]), {"nodeSelector": {"a": "b"}}, "nodeSelector of group small"),
        (limits(mayOverride=[]), {"podTemplate": {"spec": {}}}, "podTemplate of group small"),
        (limits(maxWorkers=1), {}, "2 workers wanted, DLionRuntime edge allows 1"),
        (limits(maxResources={"cpu": "2"}), {}, "has no limit of cpu: set resources.limits"),
        (limits(maxResources={"cpu": "2"}), {"resources": LIMITS}, "lower its resources.limits"),
        ({"spec": {"namespaces": ["lab"]}}, {}, "the job is in namespace default, allowed: lab"),
    ],
)
def test_a_refusal_by_a_runtime_is_named(
    runtime: dict[str, Any], group: dict[str, Any], words: str
) -> None:
    (check,) = checks(runtime, group, runtime="edge")
    assert check.outcome is CheckOutcome.FAIL
    assert "DLionRuntime edge of this site does not allow it" in check.observed
    assert words in check.observed
    assert "kubectl -n dlion-system get dlionruntimes" in check.advice


def test_a_job_that_a_runtime_allows_passes() -> None:
    allowed = limits(maxWorkers=2, maxResources={"cpu": "4"}, mayOverride=["image"])
    (check,) = checks(allowed, {"resources": LIMITS, "image": "x:1"}, runtime="edge")
    assert (check.outcome, check.advice) == (CheckOutcome.OK, "")


def test_a_job_uses_its_named_runtime_or_the_sites_default() -> None:
    assert checks(None) == []
    (check,) = checks(limits(maxWorkers=1), settings={**SETTINGS, "defaultRuntime": "standard"})
    assert "DLionRuntime standard allows 1" in check.observed


@pytest.mark.parametrize(
    ("runtime", "settings", "outcome", "words"),
    [
        (
            AbsentError("404"),
            SETTINGS,
            CheckOutcome.FAIL,
            "no DLionRuntime edge in namespace dlion",
        ),
        (DeniedError("may not get"), SETTINGS, CheckOutcome.UNKNOWN, "may not get"),
        (limits(maxWorkers="many"), SETTINGS, CheckOutcome.FAIL, "spec.limits.maxWorkers"),
        ({"spec": 7}, SETTINGS, CheckOutcome.FAIL, "cannot be used"),
        (limits(), {"site": "plant-a"}, CheckOutcome.UNKNOWN, "the operator's settings"),
    ],
)
def test_a_runtime_that_cannot_be_compared_is_unknown(
    runtime: dict[str, Any] | DLionError,
    settings: dict[str, Any],
    outcome: CheckOutcome,
    words: str,
) -> None:
    (check,) = checks(runtime, settings=settings, runtime="edge")
    assert (check.outcome, words in check.observed) == (outcome, True), check
    assert bool(check.advice) == (outcome is CheckOutcome.FAIL)


@pytest.mark.parametrize("own", ["", "mine:1"])
def test_the_runtimes_image_applies_unless_the_job_has_its_own(own: str) -> None:
    document = changed(smallest(), {"spec.trainer.image": own})
    job = load_manifest(document, source="job", lines=None)
    cluster = site_cluster({"spec": {"image": "edge:2"}}, SETTINGS)
    found = capacity_checks(cluster, job.spec.sites[0], job)
    (images,) = (check for check in found if check.name == "images")
    assert ("edge:2" in images.observed, "mine:1" in images.observed) == (not own, bool(own))
    assert "w:1" not in images.observed


POD = {
    "nodeSelector": {"pool": "edge"},
    "containers": [{"name": "trainer", "resources": {"requests": {"cpu": "3"}}}],
    "imagePullSecrets": [{"name": "registry"}],
}
NODE = {
    "metadata": {"labels": {"pool": "edge"}},
    "status": {
        "allocatable": {"cpu": "8", "memory": "8Gi"},
        "conditions": [{"type": "Ready", "status": "True"}],
    },
}


def with_template(pod: object, node: Any = NODE, **group: Any) -> dict[str, Check]:
    """Return the checks for a runtime with this podTemplate spec, and a site with this node."""
    sites = [{"name": "plant-a", "groups": [GROUP | group]}]
    job = load_manifest(changed(smallest(), {"spec.sites": sites}), source="job", lines=None)
    cluster = site_cluster({"spec": {"podTemplate": {"spec": pod}}}, SETTINGS, [node])
    return {check.name: check for check in capacity_checks(cluster, job.spec.sites[0], job)}


@pytest.mark.parametrize(
    ("pod", "group", "outcome", "words"),
    [
        (POD, {}, CheckOutcome.OK, "2 of 2 workers"),
        (POD, {"workers": 3}, CheckOutcome.WARN, "2 of 3 workers"),
        (POD, {"resources": {"requests": {"cpu": "1"}}, "workers": 8}, CheckOutcome.OK, "8 of 8"),
        (POD, {"resources": {"requests": {"memory": "5Gi"}}}, CheckOutcome.WARN, "1 of 2 workers"),
        (POD | {"nodeSelector": {"pool": "gpu"}}, {}, CheckOutcome.FAIL, "no node is ready"),
        (
            POD | {"nodeSelector": {"pool": "gpu"}},
            {"nodeSelector": {"pool": "edge"}},
            CheckOutcome.OK,
            "2 of 2 workers",
        ),
        ({"containers": 7, "nodeSelector": 7, "tolerations": 7}, {}, CheckOutcome.OK, "2 of 2"),
        (7, {}, CheckOutcome.OK, "2 of 2"),
    ],
)
def test_a_runtimes_template_determines_where_workers_have_room(
    pod: object, group: dict[str, Any], outcome: CheckOutcome, words: str
) -> None:
    room = with_template(pod, **group)["capacity"]
    assert (room.outcome, words in room.observed) == (outcome, True), room


def test_a_runtimes_pull_secrets_are_named() -> None:
    images = with_template(POD)["images"]
    assert images.observed.endswith("Secrets of registries: registry")
    assert "with these Secrets" in images.advice
