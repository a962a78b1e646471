"""A queued job and the actions of Kueue, Kubernetes and its operator, for tests of queued runs."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from dlion_operator.kubernetes.client import Kind
from dlion_operator.model.settings import KeeperSettings
from dlion_operator.model.workload_view import QueueState
from dlion_operator.plan.decisions import Create, Decision, Delete, Patch
from operator_world import SETTINGS, World, dlion_job, stamp

QUEUE = "kueue.x-k8s.io/queue-name"
Document = dict[str, Any]


def queued(groups: dict[str, int] | None = None, *, claim: str = "", **spec: Any) -> World:
    """A job in queue `edge`, alone; `claim` is that of its keepers."""
    document = dlion_job(groups, **spec)
    document["metadata"]["labels"] = {QUEUE: "edge", "team": "vision"}
    keeper = KeeperSettings(claim_name=claim)
    world = World(document, replace(SETTINGS, kueue=True, keeper=keeper))
    world.queue = QueueState()
    return world


def created(decision: Decision, kind: str) -> list[Document]:
    return [
        action.document
        for action in decision.actions
        if isinstance(action, Create) and action.document["kind"] == kind
    ]


def patches(decision: Decision, kind: Kind) -> list[Patch]:
    return [a for a in decision.actions if isinstance(a, Patch) and a.kind is kind]


def job_patches(decision: Decision) -> list[Document]:
    """The changes in the patches of Jobs' specs, without guards."""
    return [a.patch["spec"] for a in patches(decision, Kind.JOB) if "spec" in a.patch]


def deleted(decision: Decision, kind: Kind) -> list[str]:
    return [a.name for a in decision.actions if isinstance(a, Delete) and a.kind is kind]


def submitted(world: World) -> Document:
    """Create the Workload and the suspended Jobs of the first decision."""
    decision = world.look()
    (made,) = created(decision, "Workload")
    for job in created(decision, "Job"):
        group = job["metadata"]["labels"]["dlion.dev/group"]
        there = copy.deepcopy(job)
        there["metadata"] |= {"uid": f"job-{group}", "creationTimestamp": stamp(world.now)}
        there["status"] = {}
        world.jobs[group] = there
    workload = copy.deepcopy(made)
    workload["metadata"] |= {"uid": "w-1", "resourceVersion": "7", "generation": 1}
    workload["spec"]["active"] = True
    workload["status"] = {}
    world.queue = QueueState(workload)
    return workload


def say(world: World, type_: str, status: str, reason: str = "ByKueue", message: str = "") -> None:
    """Set a condition of the Workload, as Kueue does."""
    assert world.queue is not None
    assert world.queue.workload is not None
    status_ = world.queue.workload["status"]
    others = [each for each in status_.get("conditions", ()) if each["type"] != type_]
    status_["conditions"] = [
        *others,
        {
            "type": type_,
            "status": status,
            "reason": reason,
            "message": message,
            "lastTransitionTime": stamp(world.now),
        },
    ]


def admit(world: World, flavor: Document | None = None, **counts: int) -> None:
    """Admit the Workload, whole or with these counts, all in one flavor."""
    assert world.queue is not None
    assert world.queue.workload is not None
    workload = world.queue.workload
    workload["status"]["admission"] = {
        "clusterQueue": "all",
        "podSetAssignments": [
            {
                "name": each["name"],
                "count": counts.get(each["name"].removeprefix("worker-"), each["count"]),
                "flavors": {"cpu": "arm", "memory": "arm"},
            }
            for each in workload["spec"]["podSets"]
        ],
    }
    say(world, "Evicted", "False")
    say(world, "QuotaReserved", "True")
    say(world, "Admitted", "True")
    world.queue = QueueState(workload, flavors={"arm": flavor or {"spec": {}}})


def running(world: World) -> None:
    """Apply the operator's next decision to its Jobs and keeper; the pods run and train."""
    decision = world.look()
    for action in patches(decision, Kind.JOB):
        for job in world.jobs.values():
            if job["metadata"]["name"] == action.name:
                apply_merge(job, action.patch)
    for deployment in created(decision, "Deployment"):
        world.keeper = copy.deepcopy(deployment)
        world.keeper["metadata"]["uid"] = "keeper"
    for group, job in world.jobs.items():
        job["status"] = {"startTime": stamp(world.now)}
        for index in range(job["spec"]["parallelism"]):
            pod = world._pod(job, index)
            pod["status"] = {
                "phase": "Running",
                "conditions": [{"type": "Ready", "status": "True"}],
            }
            world.pods[f"{group}-{index}"] = pod
    world.make_keeper()
    world.train()


def apply_merge(target: Document, patch: Document) -> None:
    """RFC 7396, in place."""
    for name, value in patch.items():
        if value is None:
            target.pop(name, None)
        elif isinstance(value, dict):
            apply_merge(target.setdefault(name, {}), value)
        else:
            target[name] = value


def stop_workers(world: World) -> None:
    """Suspend the Jobs and remove their pods."""
    for job in world.jobs.values():
        job["spec"]["suspend"] = True
    world.pods = {name: pod for name, pod in world.pods.items() if name == "keeper"}
    world.train(ready=0)


def workload_status(decision: Decision) -> Document:
    (patch,) = patches(decision, Kind.WORKLOAD)
    assert patch.subresource == "status"
    assert patch.patch["metadata"] == {"uid": "w-1", "resourceVersion": "7"}
    return dict(patch.patch["status"])


def by_type(status: Document) -> dict[str, tuple[str, str]]:
    return {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}
