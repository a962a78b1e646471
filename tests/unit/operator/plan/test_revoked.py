"""Test the decisions about a job with revoked workers.

- The job's annotation reaches the coordinator. The status names entries that cannot be read.
- A training job with a revoked worker is Degraded for that reason, at every site. The waiting pod
  of that worker is no further problem, and the run ends without it. A revoked site ends nothing.
- The status lists revoked workers, also while the run is suspended.

Left out: the coordinator (test_revocations.py of coordinator and served_runs).
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dlion_api.cluster_names import REVOKED_ANNOTATION
from dlion_api.names import SiteName
from dlion_api.protocol.revocation import Revocation, RevocationInEffect
from dlion_api.status import MAX_REVOKED
from dlion_operator.plan.decisions import Decision, OpenRun, Patch, StopRun
from operator_world import STAGED, World, condition_statuses, dlion_job, ready_reason

STOLEN = {"name": "plant-a/small-1", "reason": "stolen"}
A, B = SiteName("plant-a"), SiteName("plant-b")


def world(annotation: str | None = None, **groups: int) -> World:
    document = dlion_job(groups or {"small": 3})
    if annotation is not None:
        document["metadata"]["annotations"] = {REVOKED_ANNOTATION: annotation}
    made = World(document)
    made.look()
    made.make_jobs()
    return made


def revoke(made: World, *entries: dict[str, str]) -> None:
    made.document["metadata"]["annotations"] = {REVOKED_ANNOTATION: json.dumps(entries)}
    serve(made, *(RevocationInEffect(e["name"], e.get("reason", ""), by=A) for e in entries))


def serve(made: World, *revocations: RevocationInEffect) -> None:
    """Set the revocations that are in effect at the coordinator."""
    assert made.run is not None
    made.run = replace(made.run, revocations=revocations)


def opened(decision: Decision) -> OpenRun:
    return next(each for each in decision.actions if isinstance(each, OpenRun))


def test_the_annotation_reaches_the_coordinator() -> None:
    made = world(json.dumps([STOLEN]))
    assert opened(made.look()).revocations == (Revocation("plant-a/small-1", "stolen"),)


def test_an_unreadable_entry_is_in_the_status_and_the_others_count() -> None:
    made = world(json.dumps([STOLEN, {"name": "../x"}]))
    decision = made.look()
    assert len(opened(decision).revocations) == 1
    assert f"annotation {REVOKED_ANNOTATION}" in ready_reason(decision)[1]
    assert f"annotation {REVOKED_ANNOTATION}" in ready_reason(world("{").look())[1]


@pytest.mark.parametrize("unreadable", ["{", "{}", '[{"name": "../x"}]'])
def test_an_unreadable_annotation_lifts_no_revocation(unreadable: str) -> None:
    made = world(json.dumps([STOLEN]))
    made.train(ready=2)
    revoke(made, STOLEN)
    status = made.look().status
    assert status is not None
    made.document["status"] = dict(status)
    made.document["metadata"]["annotations"] = {REVOKED_ANNOTATION: unreadable}
    serve(made, RevocationInEffect("plant-a/small-1", "stolen", by=A))
    decision = made.look()
    assert opened(decision).revocations == (Revocation("plant-a/small-1", "stolen"),)
    assert f"annotation {REVOKED_ANNOTATION}" in ready_reason(decision)[1]
    made.document["metadata"]["annotations"] = {}
    assert opened(made.look()).revocations == ()


def test_a_job_that_lacks_a_revoked_worker_is_degraded_with_the_reason() -> None:
    made = world()
    made.train(ready=2)
    revoke(made, STOLEN)
    decision = made.look()
    assert (
        condition_statuses(decision)["Ready"] == condition_statuses(decision)["Degraded"] == "True"
    )
    reason, message = ready_reason(decision)
    assert reason == "WorkersRevoked"
    assert message.startswith("plant-a/small-1 is revoked at plant-a: stolen; 2 workers train")
    assert decision.status is not None
    assert decision.status["revoked"] == [
        {"name": "plant-a/small-1", "by": "plant-a", "effective": True, "automatic": False,
         "reason": "stolen"}
    ]  # fmt: skip
    assert [(event.reason, event.type) for event in decision.events] == [
        ("WorkersRevoked", "Warning")
    ]


def test_another_lost_worker_is_still_named() -> None:
    made = world()
    made.train(ready=1)
    revoke(made, STOLEN)
    reason, message = ready_reason(made.look())
    assert reason == "PeersLost"
    assert "1 of 2 workers train here" in message
    assert "small-1 is revoked" in message


def test_a_refusal_by_another_site_only_is_reported() -> None:
    made = world()
    made.train(ready=3)
    serve(made, RevocationInEffect("plant-a/small-1", "", by=B, is_effective=False))
    decision = made.look()
    assert ready_reason(decision)[0] == "WorkersRevoked"
    assert "plant-b refuses plant-a/small-1" in ready_reason(decision)[1]
    assert decision.status is not None
    assert decision.status["revoked"][0]["effective"] is False


def test_a_status_keeps_revocations_that_a_new_operator_does_not_know_yet() -> None:
    made = world()
    made.train(ready=3)
    serve(made, RevocationInEffect("plant-a/small-1", "", by=B, is_effective=False))
    decision = made.look()
    assert decision.status is not None
    made.document["status"] = dict(decision.status)
    (kept,) = opened(made.look()).kept_revocations
    assert (kept.name, kept.by, kept.is_effective) == ("plant-a/small-1", B, False)


def test_revocations_of_another_site_do_not_displace_those_of_this_site() -> None:
    made = world()
    made.train(ready=2)
    own = RevocationInEffect("plant-c/small-0", "named", by=A, is_automatic=True)
    theirs = [RevocationInEffect(f"plant-b/x-{at}", "", by=B) for at in range(MAX_REVOKED)]
    serve(made, *theirs, own)
    status = made.look().status
    assert status is not None
    assert len(status["revoked"]) == MAX_REVOKED
    assert own.name in [each["name"] for each in status["revoked"]]


def test_the_waiting_pod_of_a_revoked_worker_is_not_a_problem() -> None:
    made = world()
    made.train(ready=2)
    revoke(made, STOLEN)
    made.advance(3600)
    assert ready_reason(made.look())[0] == "WorkersRevoked"


def test_the_run_ends_without_the_revoked_worker() -> None:
    made = world()
    made.train(ready=2)
    made.look()
    revoke(made, STOLEN)
    made.end("small")
    job = made.jobs["small"]
    job["status"]["completedIndexes"] = "0"
    del job["status"]["conditions"]
    assert condition_statuses(made.look())["Succeeded"] == "Unknown"  # another one still trains
    job["status"]["completedIndexes"] = "0,2"
    decision = made.look()
    assert condition_statuses(decision)["Succeeded"] == "True"
    assert [each for each in made.look().actions if isinstance(each, Patch)]  # its pod is stopped


def test_a_revoked_site_ends_no_run_before_the_others_have_ended() -> None:
    made = world()
    made.train(ready=0)
    revoke(made, {"name": "plant-a"})
    decision = made.look()
    assert condition_statuses(decision)["Failed"] == "False"
    assert "plant-a is revoked" in ready_reason(decision)[1]
    assert made.run is not None
    made.run = replace(made.run, stop_reason="it is over at plant-b: 1 sites are left (minSites 2)")
    assert condition_statuses(made.look())["Failed"] == "True"


def test_sensors_end_if_the_only_training_worker_is_revoked() -> None:
    why = "plant-a/small-0 is revoked, and no other worker trains (topology staged)"
    for indexes, reasons in (([1], []), ([0], [why]), ([0, 1], [why])):
        document = dlion_job({"small": 3}, **STAGED)
        made = World(document)
        made.look()
        made.make_jobs()
        made.train()
        revoke(made, *({"name": f"plant-a/small-{index}"} for index in indexes))
        stops = [each.reason for each in made.look().actions if isinstance(each, StopRun)]
        assert stops == reasons
