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

from dlion_operator.model.workload_view import QueueState
from queued_world import (
    admit,
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
