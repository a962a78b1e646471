"""A queued run between its attempts, and other places where queue and failures meet.

Proves: between attempts a run keeps its Workload and its quota, and gives them back if Kueue evicts
it, also where pods of the failed attempt still run; an attempt that requests something else is
admitted anew, an equal one is not, whatever gave it its priority; a worker that failed for good
does not make Kueue wait for its pod; no group grows while the admission cannot be read; a
podTemplate that becomes malformed while a run waits again is reported; the Workload of an earlier
run goes also where the manifest names no queue any more, is invalid or leaves the site.
Leaves out: Kueue itself (tests/cluster/test_queueing.py), retries without a queue (test_run_ends).
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from dlion_operator.kubernetes.client import Kind
from dlion_operator.model.workload_view import QueueState
from queued_world import (
    QUEUE,
    admit,
    deleted,
    job_patches,
    queued,
    running,
    submitted,
)

SIGKILL = 137


def test_no_group_grows_while_its_admission_cannot_be_read() -> None:
    world = queued({"small": 4})
    submitted(world)
    admit(world, small=3)
    running(world)
    assert world.jobs["small"]["spec"]["parallelism"] == 3
    world.queue = QueueState(problem="forbidden")
    assert job_patches(world.look()) == []


@pytest.mark.parametrize("change", ["no label", "invalid", "not selected"])
def test_the_workload_of_an_earlier_run_goes_also_without_a_queue(change: str) -> None:
    """It would hold its quota for as long as the job exists."""
    world = queued()
    name = submitted(world)["metadata"]["name"]
    admit(world)
    running(world)
    world.look()
    world.document = copy.deepcopy(world.document)
    spec = world.document["spec"]
    spec["runId"] = "2"
    if change == "no label":
        del world.document["metadata"]["labels"][QUEUE]
    elif change == "invalid":
        spec["trainer"]["stop"] = {}
    else:
        spec["sites"][0]["name"] = "plant-b"
    world.queue = None
    assert name in deleted(world.look(), Kind.WORKLOAD)


def test_a_site_that_may_not_queue_never_deletes_workloads() -> None:
    world = queued()
    submitted(world)
    world.look()
    world.document["spec"]["runId"] = "2"
    world.settings = replace(world.settings, kueue=False)
    world.queue = QueueState(problem="this site's operator may not queue jobs")
    assert deleted(world.look(), Kind.WORKLOAD) == []
    world.queue = None
    assert deleted(world.look(), Kind.WORKLOAD) == []
