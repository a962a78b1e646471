"""Test pods that do not start and report no error.

- A pod is stalled after its time limit, and not before, if it is not scheduled, lacks its volumes
  or network, or is not started by its node. The message names the command for details. A pod that a
  user holds back is not stalled.
- A running worker that does not join is named, also while others train. It is not named while it
  may still be importing, nor just after a start of the operator.
- The same holds for a keeper that is not ready, for the time that this operator has observed.
- Workers that do not join without any such cause are reported, as are joined workers that do not
  begin. Exhausted restarts are reported with the last output of the trainer.

Left out: pods that report why they cannot start (test_decide), and that a kubelet writes such
conditions (tests/cluster).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from dlion_api.names import SiteName
from dlion_api.status import LinkStatus
from dlion_operator.plan.observed import RunView
from operator_world import World, condition_statuses, dlion_job, ready_reason, stamp

PLACED = {"type": "PodScheduled", "status": "True"}
NO_SANDBOX = {"type": "PodReadyToStartContainers", "status": "False"}
POD = "digits-small-"


def world_of(**spec: Any) -> World:
    """Return a world with the pods of two workers."""
    world = World(dlion_job({"small": 2}, **spec))
    world.look()
    world.make_jobs()
    return world


@pytest.mark.parametrize(
    ("conditions", "after_s", "reason", "words"),
    [
        ([], 60, "Unschedulable", "no scheduler has placed it"),
        ([PLACED, NO_SANDBOX], 60, "ContainerBroken", "its volumes or its network are not there"),
        ([PLACED], 600, "ContainerBroken", "its node has not started it in 10 minutes"),
    ],
)
def test_no_pod_stays_starting_without_end(
    conditions: list[dict[str, str]], after_s: float, reason: str, words: str
) -> None:
    world = world_of()
    world.pods["small-1"]["status"] = {
        "phase": "Pending",
        "conditions": conditions,
        "containerStatuses": [
            {"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}}
        ],
    }
    world.advance(after_s - 1)
    early = world.look()
    assert (ready_reason(early)[0], condition_statuses(early)["Stalled"]) == (
        "WorkersStarting",
        "False",
    )
    world.advance(1)
    late = world.look()
    found_reason, message = ready_reason(late)
    assert (
        found_reason,
        condition_statuses(late)["Stalled"],
        condition_statuses(late)["Failed"],
    ) == (
        reason,
        "True",
        "False",
    )
    assert message.startswith(f"small-1: {words}; see `kubectl describe pod {POD}")


def test_a_pod_that_a_user_holds_back_is_not_stalled() -> None:
    world = world_of()
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    world.pods["small-1"]["status"] = {"phase": "Pending", "conditions": [gated]}
    world.advance(3600)
    assert condition_statuses(world.look())["Stalled"] == "False"


def test_workers_that_do_not_join_are_reported_whatever_the_cause() -> None:
    world = world_of()  # the pods are Running, without container states
    world.run = RunView(open_s=3600.0)
    world.advance(899)
    early = world.look()
    assert (ready_reason(early)[0], condition_statuses(early)["Stalled"]) == (
        "WorkersStarting",
        "False",
    )
    world.advance(1)
    late = world.look()
    reason, message = ready_reason(late)
    assert (reason, condition_statuses(late)["Stalled"]) == ("NotJoining", "True")
    assert message == (
        "0 of 2 workers have joined, 2 pods run, 15 minutes after they were made;"
        " see `kubectl describe jobs,pods -l dlion.dev/job-name=digits` and the logs"
    )
    world.run = joined("small-0", open_s=3600.0)
    world.run.report_age_s["plant-a/small-1"] = 20.0  # type: ignore[index]  # its trainer restarts
    assert ready_reason(world.look())[0] == "WorkersStarting"
    world.run = RunView(open_s=899.0)  # the operator has restarted
    assert ready_reason(world.look())[0] == "WorkersStarting"


def test_joined_workers_that_do_not_begin_are_reported() -> None:
    world = world_of()
    both, up = ("small-0", "small-1"), LinkStatus(connected=1, expected=2)
    world.run = joined(*both, all_joined_s=299.0, links=up)
    early = world.look()
    assert (ready_reason(early)[0], condition_statuses(early)["Stalled"]) == (
        "WorkersStarting",
        "False",
    )
    world.run = joined(*both, all_joined_s=300.0, links=up)
    late = world.look()
    assert (ready_reason(late)[0], condition_statuses(late)["Stalled"]) == ("NotLinked", "True")
    assert ready_reason(late)[1] == (
        "all 2 workers have joined, and none has begun to train in 5 minutes; 1 of 2 links between"
        " them are up; see events PeersUnreached, or `kubectl logs -l dlion.dev/job-name=digits,"
        "app.kubernetes.io/component=worker -c trainer`, for the blocked direction"
    )
    world.run = joined(*both, training=True)
    assert ready_reason(world.look())[0] == "Training"


def run_in_containers(world: World) -> None:
    for pod in world.pods.values():
        running = {"running": {"startedAt": stamp(world.now)}}
        pod["status"] = {
            "phase": "Running", "containerStatuses": [{"name": "trainer", "state": running}]
        }  # fmt: skip


def joined(*names: str, open_s: float = 3600.0, **more: Any) -> RunView:
    ready = {SiteName("plant-a"): len(names)} if names else {}
    report_age_s = {f"plant-a/{name}": 0.0 for name in names}
    return RunView(open_s=open_s, ready=ready, report_age_s=report_age_s, **more)


def test_a_worker_that_runs_and_never_joins_is_named() -> None:
    world = world_of()
    run_in_containers(world)
    world.run = joined("small-0")
    world.advance(299)
    assert condition_statuses(world.look())["Stalled"] == "False"
    world.advance(1)
    stuck = world.look()
    reason, message = ready_reason(stuck)
    assert (reason, condition_statuses(stuck)["Stalled"]) == ("NotJoining", "True")
    assert message.startswith(f"small-1: runs and does not join; see `kubectl logs {POD}")
    world.run = joined("small-0", open_s=299.0)  # the operator has just started
    assert condition_statuses(world.look())["Stalled"] == "False"


def test_a_worker_that_does_not_join_is_named_while_others_train() -> None:
    world = world_of()
    run_in_containers(world)
    world.advance(600)
    world.run = joined("small-0", training=True)
    reason, message = ready_reason(world.look())
    assert reason == "PeersLost"
    assert "small-1: runs and does not join" in message
    world.run.report_age_s["plant-a/small-1"] = 20.0  # type: ignore[index]  # its trainer restarts
    assert "does not join" not in ready_reason(world.look())[1]


def test_a_keeper_that_waited_for_this_operator_is_not_broken() -> None:
    """It serves once the operator has signed its certificate, and the operator was absent."""
    world = world_of()
    unready = {"type": "Ready", "status": "False", "lastTransitionTime": stamp(world.now)}
    running = {"running": {"startedAt": stamp(world.now)}}
    world.pods["keeper"]["status"] = {
        "phase": "Running",
        "conditions": [unready],
        "containerStatuses": [{"name": "keeper", "state": running}],
    }
    world.advance(600)  # and no operator looks
    world.run = joined("small-0", open_s=0.0)
    first = world.look()
    assert (ready_reason(first)[0], condition_statuses(first)["Stalled"]) == (
        "WorkersStarting",
        "False",
    )
    world.advance(59)
    assert condition_statuses(world.look())["Stalled"] == "False"
    world.train()
    assert ready_reason(world.look())[0] == "Training"
    world.advance(1)
    reason, message = ready_reason(world.look())
    assert reason == "KeeperUnavailable"
    assert "runs and does not become ready; see `kubectl logs" in message
    world.run = joined("small-0")
    late = world.look()
    assert (ready_reason(late)[0], condition_statuses(late)["Stalled"]) == (
        "ContainerBroken",
        "True",
    )
    unready["lastTransitionTime"] = stamp(world.now)  # it was ready for a moment
    assert condition_statuses(world.look())["Stalled"] == "False"


def test_exhausted_restarts_are_reported_with_the_trainers_last_output() -> None:
    world = world_of()
    world.train()
    world.end("small", failed="0,1", exit_code=76)
    words = (
        "Killed\n"
        '{"time": "now", "supervisor": "exited", "signal": "SIGKILL"}\n'
        '{"time": "now", "supervisor": "giving up", "restarts": 10, "code": 137}\n'
    )
    world.fail("small", 0, 76, words)
    world.now += timedelta(seconds=5)
    reason, message = ready_reason(world.look())
    assert reason == "RestartsExceeded"
    assert (
        "small-0: trainer ended with 137 (SIGKILL) after 10 restarts (maxRestarts), most often for"
        " want of memory (resources.limits.memory);" in message
    )
