"""Test the state of a pod in one word, as in the column STATUS of kubectl.

Left out: the tables of pods (test_describe.py) and what is wrong with a pod (test_pod_findings.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from dlion_cli.views.pod_status import PodStatus


@pytest.mark.parametrize(
    ("terminated", "state"),
    [
        ({"exitCode": 67, "reason": "Error"}, "Error"),
        ({"exitCode": 67}, "ExitCode:67"),
        ({"exitCode": 67, "reason": ""}, "ExitCode:67"),
        ({"exitCode": 137, "signal": 9}, "Signal:9"),
        ({"exitCode": 137, "signal": 0}, "ExitCode:137"),
        ({}, "Failed"),
    ],
)
def test_a_container_that_failed_gives_its_reason_or_exit_code(
    terminated: dict[str, Any], state: str
) -> None:
    containers = [{"name": "trainer", "state": {"terminated": terminated}}]
    status = {"phase": "Failed", "containerStatuses": containers}
    assert PodStatus({"metadata": {"name": "w-0"}, "status": status}).state == state


WAITS = {"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}
RUNS: dict[str, Any] = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
DONE = {"terminated": {"exitCode": 0, "reason": "Completed"}}
FAILED = {"terminated": {"exitCode": 1, "reason": "Error"}}
READY = [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": "True"}]


def pod(
    phase: str, init: list[dict[str, Any]], trainer: dict[str, Any], **status: Any
) -> PodStatus:
    """A worker's pod, with an initializer and a sidecar."""
    names = ("dataset-initializer", "sidecar")
    return PodStatus(
        {
            "spec": {
                "initContainers": [
                    {"name": "dataset-initializer"}, {"name": "sidecar", "restartPolicy": "Always"}
                ]
            },
            "status": {
                "phase": phase,
                "initContainerStatuses": [
                    {"name": name, **each} for name, each in zip(names, init, strict=False)
                ],
                "containerStatuses": [trainer],
                **status,
            },
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shown", "state"),
    [
        (pod("Pending", [{"state": RUNS}, {}], WAITS), "Init:0/2"),
        (pod("Pending", [{"state": DONE}, {"state": RUNS, "started": False}], WAITS), "Init:1/2"),
        (
            pod("Pending", [{"state": DONE}, {"state": RUNS, "started": True}], WAITS),
            "PodInitializing",
        ),
        (
            pod("Pending", [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}], WAITS),
            "Init:ImagePullBackOff",
        ),
        (pod("Failed", [{"state": FAILED}], WAITS), "Init:Error"),
        (pod("Failed", [{"state": {"terminated": {"exitCode": 3}}}], WAITS), "Init:ExitCode:3"),
        (
            pod(
                "Running", [{"state": DONE}, {"state": RUNS, "started": True}],
                {"state": RUNS, "ready": True}, conditions=READY,
            ),
            "Running",
        ),
        (
            pod(
                "Running", [{"state": DONE}, {"state": RUNS, "started": True}],
                {"state": FAILED}, conditions=READY,
            ),
            "Error",
        ),
        (
            pod(
                "Succeeded", [{"state": DONE}, {"state": FAILED}], {"state": DONE},
                conditions=READY[:1],
            ),
            "Completed",
        ),
    ],
)  # fmt: skip
def test_an_initializer_is_named_as_in_kubectl(shown: PodStatus, state: str) -> None:
    """A sidecar that has started counts no longer, and nor does its end at a signal."""
    assert shown.state == state


def test_a_running_pod_whose_containers_have_ended_is_not_called_running() -> None:
    """As in kubectl. Its sidecar may still run, as an init container or beside the trainer."""
    init = [{"state": DONE}, {"state": RUNS, "started": True}]
    ended = {"name": "trainer", "state": DONE}
    assert pod("Running", init, ended, conditions=READY[:1]).state == "Completed"
    beside = PodStatus(
        {"status": {"phase": "Running", "containerStatuses": [ended, {"name": "b", "state": RUNS}]}}
    )
    assert beside.state == "NotReady"


def test_a_gated_pod_is_called_gated() -> None:
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    assert PodStatus({"status": {"conditions": [gated]}}).state == "SchedulingGated"
