"""Test the state of a job whose workers download data.

- The job waits with `Initializing` for any duration. It names the downloading workers and earlier
  failures.
- The start-up time counts from the end of the last download.
- A download that fails permanently ends the run with `InitializerFailed` and the container's
  message, without a retry. One that failed for lack of a server may be retried.

Left out: that a kubelet reports such states (tests/cluster/test_initializers.py).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dlion_operator.model.download_progress import DownloadProgress
from dlion_operator.plan.decisions import Decision
from dlion_operator.plan.observed import RunView
from operator_world import World, condition_statuses, dlion_job, ready_reason, stamp

DOWNLOAD = {"url": "https://example.com/d.zip", "sha256": "0" * 64}
TRAINER = {
    "program": {"builtin": "digits"},
    "dataset": {"path": "d.npz", "format": "npz"},
    "startFrom": "m.keras",
    "initializer": {"dataset": DOWNLOAD, "model": DOWNLOAD},
    "stop": {"maxSteps": 100},
}
RUNNING: dict[str, Any] = {"running": {}}
WAITING = {"waiting": {"reason": "PodInitializing"}}
PLACED = {"type": "PodScheduled", "status": "True"}
MESSAGE = "https://example.com/d.zip: HTTP 404 Not Found. Correct the address"


def ended(code: int, message: str = "", at: str = "2026-01-31T12:00:00Z") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "message": message, "finishedAt": at}}


def world_of(**spec: Any) -> World:
    """Return a world with the pods of two workers."""
    world = World(dlion_job({"small": 2}, trainer=TRAINER, **spec))
    world.look()
    world.make_jobs()
    return world


def report(world: World, pod: str, dataset: Any, model: Any, phase: str = "Pending") -> None:
    """Set the states of the pod's initializers."""
    states = {"dataset-initializer": dataset, "model-initializer": model}
    world.pods[pod]["status"] = {
        "phase": phase,
        "conditions": [PLACED],
        "initContainerStatuses": [
            *({"name": name, "state": state} for name, state in states.items()),
            {"name": "sidecar", "state": WAITING},
        ],
    }


@pytest.mark.parametrize("seconds", [1, 3600])
def test_a_job_waits_for_a_download_of_any_duration(seconds: float) -> None:
    world = world_of()
    report(world, "small-0", RUNNING, WAITING)
    report(world, "small-1", ended(0), RUNNING)
    world.advance(seconds)
    decision = world.look()
    reason, message = ready_reason(decision)
    assert reason == "Initializing"
    assert "2 of 2 workers download" in message
    assert "small-0 (dataset-initializer), small-1 (model-initializer)" in message
    assert "-c dataset-initializer`" in message
    assert (
        condition_statuses(decision)["Reconciling"],
        condition_statuses(decision)["Stalled"],
    ) == ("True", "False")


def test_the_progress_is_that_of_the_current_download() -> None:
    world = world_of()
    report(world, "small-0", RUNNING, WAITING)
    report(world, "small-1", ended(0), RUNNING)
    downloads = {
        f"plant-a/{name}": DownloadProgress(
            "dataset-initializer", 1_400_000_000, 3_200_000_000, pod["metadata"]["uid"]
        )
        for name, pod in world.pods.items()
    }
    world.run = RunView(open_s=60.0, downloads=downloads)
    _, message = ready_reason(world.look())
    assert "small-0 (dataset-initializer, 44% of 3.2 GB), small-1 (model-initializer)" in message


@pytest.mark.parametrize("uid", ["", "of the pod before"])
def test_the_progress_of_an_earlier_pod_is_not_shown(uid: str) -> None:
    world = world_of()
    report(world, "small-0", RUNNING, WAITING)
    reported = DownloadProgress("dataset-initializer", 2_900_000_000, 3_200_000_000, uid)
    world.run = RunView(open_s=60.0, downloads={"plant-a/small-0": reported})
    _, message = ready_reason(world.look())
    assert "small-0 (dataset-initializer)" in message


def test_a_job_between_two_downloads_is_initializing() -> None:
    world = world_of()
    for pod in ("small-0", "small-1"):
        report(world, pod, ended(0), WAITING)
    world.advance(3600)
    assert ready_reason(world.look())[0] == "Initializing"


def test_a_pending_image_is_not_a_download() -> None:
    world = world_of()
    report(world, "small-0", {"waiting": {"reason": "ImagePullBackOff"}}, WAITING)
    world.advance(61)
    assert ready_reason(world.look())[0] == "ImageUnavailable"


def test_the_time_to_start_counts_from_the_last_download() -> None:
    world = world_of()
    world.advance(3600)
    for pod in ("small-0", "small-1"):
        report(world, pod, ended(0), ended(0, at=stamp(world.now)))
    assert ready_reason(world.look())[0] == "WorkersStarting"
    world.advance(601)
    reason, message = ready_reason(world.look())
    assert reason == "ContainerBroken"
    assert "its node has not started it in 10 minutes" in message


def test_an_earlier_failure_is_named_while_it_downloads_again() -> None:
    world = world_of()
    report(world, "small-0", ended(69, "d.zip: refused"), WAITING, "Failed")
    report(world, "small-1", RUNNING, WAITING)
    assert (
        "dataset-initializer ended with 69 (UNAVAILABLE): d.zip: refused"
        in ready_reason(world.look())[1]
    )


def failed(world: World, code: int, message: str) -> Decision:
    """End all workers' Jobs with this end of their initializers."""
    world.end("small", failed="0,1", exit_code=1)
    for pod in ("small-0", "small-1"):
        report(world, pod, ended(code, message), WAITING, "Failed")
    return world.look()


def test_an_unavailable_download_fails_the_job() -> None:
    decision = failed(world_of(maxRetries=3), 66, MESSAGE)
    assert condition_statuses(decision)["Failed"] == "True"
    reason, message = ready_reason(decision)
    assert reason == "InitializerFailed"
    assert f"small-0: dataset-initializer ended with 66 (DATA): {MESSAGE}" in message


def test_an_unreachable_server_may_be_retried() -> None:
    assert ready_reason(failed(world_of(), 69, "refused"))[0] == "InitializerFailed"
    assert ready_reason(failed(world_of(maxRetries=3), 69, "refused"))[0] == "Retrying"


def earlier_pod(world: World) -> dict[str, Any]:
    """Return a pod of the first worker from before its last one."""
    made: dict[str, Any] = copy.deepcopy(world.pods["small-0"])
    made["metadata"] |= {"name": "a", "uid": "a", "creationTimestamp": "2026-01-01T00:00:00Z"}
    world.pods["first"] = made
    return made


@pytest.mark.parametrize("exit_code", [1, 137])
def test_a_download_that_succeeded_at_last_is_not_the_reason(exit_code: int) -> None:
    world = world_of()
    earlier_pod(world)
    world.end("small", failed="0,1", exit_code=exit_code)
    report(world, "first", ended(69, "refused"), WAITING, "Failed")
    assert ready_reason(world.look())[0] == "RestartsExceeded"


def test_a_last_download_that_fails_outweighs_earlier_ends() -> None:
    world = world_of()
    first = earlier_pod(world)
    ended_trainer = {"name": "trainer", "state": {"terminated": {"exitCode": 69}}}
    first["status"] = {"phase": "Failed", "containerStatuses": [ended_trainer]}
    assert ready_reason(failed(world, 66, MESSAGE))[0] == "InitializerFailed"


def test_a_failed_program_outweighs_an_earlier_download() -> None:
    world = world_of()
    world.end("small", failed="0,1", exit_code=67)
    report(world, "small-0", ended(69, "refused"), WAITING, "Failed")
    assert ready_reason(world.look())[0] == "ProgramFailed"
