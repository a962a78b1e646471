"""Test the metrics of jobs that the operator exports.

It counts the workers of this site only, whatever other sites lack, and none once a run has ended.
Of revoked workers and sites it counts those that this site refuses, by cause.

Left out: that pages, alerts and dashboards name existing families
(tests/contract/test_chart_queries).
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry

from dlion_api.names import SiteName
from dlion_api.protocol.revocation import RevocationInEffect
from dlion_operator.controller.metrics import JobMetrics
from dlion_operator.coordinator import CoordinatorServer
from dlion_operator.kubernetes.client import Kind
from dlion_operator.kubernetes.store import ClusterStore
from dlion_operator.plan.observed import RunView
from operator_world import World, dlion_job

PLANT_A, PLANT_B = SiteName("plant-a"), SiteName("plant-b")
AT = {"namespace": "default", "job": "digits"}


def exported(document: dict[str, Any]) -> CollectorRegistry:
    """Return the metrics of that job at the site plant-a."""
    store = ClusterStore()
    store.put(Kind.DLION_JOB, document)
    registry = CollectorRegistry()
    registry.register(
        JobMetrics(
            store,
            CoordinatorServer("127.0.0.1:0", None),
            site=PLANT_A,
            leases_held=dict,
            watch_age_s=lambda: 0.0,
        )
    )
    return registry


def workers_of(document: dict[str, Any]) -> tuple[float | None, float | None]:
    """Return ready and expected workers, as the site plant-a reports them."""
    registry = exported(document)
    ready, expected = (
        registry.get_sample_value(f"dlion_job_{name}_workers", AT) for name in ("ready", "expected")
    )
    return ready, expected


def test_workers_of_other_sites_are_not_counted() -> None:
    sites = [
        {"name": name, "groups": [{"name": "small", "workers": count}]}
        for name, count in ((PLANT_A, 2), (PLANT_B, 3))
    ]
    world = World(dlion_job(sites=sites))
    world.look()
    assert workers_of(world.document) == (0, 2)
    world.make_jobs()
    world.run = RunView(open_s=99.0, ready={PLANT_A: 2, PLANT_B: 1}, training=True)
    world.look()
    assert world.document["status"]["readyWorkers"] == "3/5"
    assert workers_of(world.document) == (2, 2)
    world.run = RunView(open_s=99.0, ready={PLANT_A: 1, PLANT_B: 3}, training=True)
    world.look()
    assert workers_of(world.document) == (1, 2)
    world.end("small")
    world.look()
    assert workers_of(world.document) == (None, None)


def revocations_of(document: dict[str, Any]) -> tuple[float | None, float | None]:
    """Return the figures for `Revoked` and `Quarantined`."""
    registry = exported(document)
    revoked, quarantined = (
        registry.get_sample_value("dlion_job_revocations", {**AT, "cause": cause})
        for cause in ("Revoked", "Quarantined")
    )
    return revoked, quarantined


def test_revocations_that_this_site_applies_are_counted_by_cause() -> None:
    world = World(dlion_job())
    world.look()
    assert revocations_of(world.document) == (0, 0)
    effective = ((PLANT_A, False), (PLANT_A, True), (PLANT_B, True))
    revoked = [
        RevocationInEffect(f"{site}/small-{index}", by=site, is_automatic=automatic)
        for index, (site, automatic) in enumerate(effective)
    ]
    elsewhere = RevocationInEffect("plant-a/small-1", by=PLANT_B, is_effective=False)
    world.make_jobs()
    world.run = RunView(open_s=99.0, revocations=(*revoked, elsewhere))
    world.look()
    assert len(world.document["status"]["revoked"]) == 4
    assert revocations_of(world.document) == (1, 2)
