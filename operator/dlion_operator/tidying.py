"""What is to go: what dead nodes, other runs and the end of a run leave behind. Pure.

Called by `decide`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.names import JobKey
from dlion_operator.cluster import Document, Kind
from dlion_operator.decisions import Action, Delete, Patch
from dlion_operator.exposure import own_workers, service_name, worker_services
from dlion_operator.job_view import JobView
from dlion_operator.node_states import NodeState
from dlion_operator.observed import Observed, PodView
from dlion_operator.runs import Run

LOST_AFTER_S = 60.0
"""A pod that is still there so long after its grace, as this operator has seen it go, and of whose
end its node says nothing, may be on a node that does not answer: the node's state tells."""
TAKEN_AWAY_WITHIN_S = 600.0
"""The same where its node has said that its containers have ended: what is left is the node's to
take away, which may be slow. And where nobody says what has become of its node."""


def leaving(pods: Iterable[Document]) -> list[Document]:
    """Those of these pods that are to go and that an operator of ours had made, whether their Job
    or Deployment is still there or not."""
    return [pod for pod in pods if pod["metadata"].get("deletionTimestamp") and _is_ours(pod)]


def _is_ours(pod: Document) -> bool:
    metadata = pod["metadata"]
    labels = metadata.get("labels") or {}
    if labels.get(names.MANAGED_BY_LABEL) != names.MANAGER:
        return False
    run = (labels.get(each, "") for each in (names.JOB_LABEL, names.RUN_LABEL))
    key = JobKey(str(metadata["namespace"]), *run)
    job = names.group_job_name(key, labels.get(names.GROUP_LABEL, ""))
    replicas = f"{names.keeper_name(key)}-"
    owners = metadata.get("ownerReferences") or ()
    kinds = ((owner.get("kind"), str(owner.get("name"))) for owner in owners)
    return any(
        (kind == "Job" and name == job) or (kind == "ReplicaSet" and name.startswith(replicas))
        for kind, name in kinds
    )


def lost_pods(seen: Observed) -> Iterator[Action]:
    """Pods on nodes that do not answer are released."""
    return released(seen.leaving, seen.terminating_s, seen.now, seen.nodes)


def overdue(
    pods: Iterable[Mapping[str, Any]], terminating_s: Mapping[str, float]
) -> Iterator[PodView]:
    """Those of these pods that have waited to go for longer than their nodes should need."""
    for pod in map(PodView, pods):
        is_ending = pod.containers_ended and not pod.is_over
        patience_s = TAKEN_AWAY_WITHIN_S if is_ending else LOST_AFTER_S
        if terminating_s.get(pod.uid, 0.0) > pod.grace_s + patience_s:
            yield pod


def node_of(pod: PodView) -> str:
    """The node that it was bound to; empty: it never was."""
    return str((pod.document.get("spec") or {}).get("nodeName") or "")


def kept_by_nodes(
    pods: Iterable[Mapping[str, Any]],
    terminating_s: Mapping[str, float],
    nodes: Mapping[str, NodeState],
) -> list[PodView]:
    """Those that wait for nodes that work: they are never released, as they may run."""
    waiting = overdue(pods, terminating_s)
    return [pod for pod in waiting if nodes.get(node_of(pod)) is NodeState.READY]


def released(
    pods: Iterable[Mapping[str, Any]],
    terminating_s: Mapping[str, float],
    now: datetime,
    nodes: Mapping[str, NodeState],
) -> Iterator[Action]:
    """The same of these pods, seen to wait for their end for so long, on nodes in these states."""
    for pod in overdue(pods, terminating_s):
        if not _is_lost(pod, terminating_s[pod.uid], nodes):
            continue
        if not pod.is_over:
            # A Job waits for its pod's end, which nobody else will tell of.
            said = {"metadata": {"uid": pod.uid}, "status": pod.failed_by_its_node(now)}
            yield Patch(Kind.POD, pod.name, said, subresource="status")
        if pod.grace_s > 0:  # else it is asked for already, and somebody's finalizer holds it
            yield Delete(Kind.POD, pod.name, pod.uid, grace_s=0)


def _is_lost(pod: PodView, waited_s: float, nodes: Mapping[str, NodeState]) -> bool:
    """Whether nothing of it can run any more, as far as can be known.

    Where nodes may not be read, the cluster's own word counts: it takes pods off a node that it has
    given up (DeletionByTaintManager). Without that word the longer patience has to do.
    """
    node = node_of(pod)
    if not node:
        return True
    match nodes.get(node, NodeState.FORBIDDEN):
        case NodeState.ABSENT | NodeState.NOT_READY:
            return True
        case NodeState.READY | NodeState.UNANSWERED:
            return False
        case NodeState.FORBIDDEN:
            condition = pod.condition("DisruptionTarget")
            is_given_up = condition.get("reason") == "DeletionByTaintManager"
            is_so = is_given_up and condition.get("status") == "True"
            return is_so or waited_s > pod.grace_s + TAKEN_AWAY_WITHIN_S


def earlier_runs(run: Run, seen: Observed) -> Iterator[Action]:
    """Whatever is left of another run of this job goes."""
    yield from left_over(run.strays, run.job.key, seen)


def left_over(strays: Sequence[JobView], key: JobKey, seen: Observed) -> Iterator[Action]:
    """Jobs of other runs than `key`'s go, and what belonged to them."""
    for view in strays:
        yield Delete(Kind.JOB, view.name, view.uid)
    for service in worker_services(seen).values():
        if service.run_id != key.run_id:
            yield Delete(Kind.SERVICE, service.name, service.uid)
    status = seen.document.get("status") or {}
    before = str(status.get("runId") or "")
    if before and before != key.run_id:
        yield from without_objects(JobKey(key.namespace, key.name, before))


def superfluous_services(run: Run, seen: Observed) -> Iterator[Action]:
    """Of workers that are no longer wanted and have ended: ports and load balancers are dear."""
    wanted = {service_name(run, worker) for worker in own_workers(run)}
    used = {
        names.worker_service_name(run.job.key, group, int(index))
        for pod in run.pods
        if not pod.is_over
        and (group := pod.labels.get(names.GROUP_LABEL))
        and (index := pod.labels.get(names.INDEX_LABEL))
    }
    return _services_but(wanted | used, run, seen)


def unused_services(run: Run, seen: Observed) -> Iterator[Action]:
    """Of all workers, as none of them runs."""
    return _services_but(set(), run, seen)


def _services_but(kept: set[str], run: Run, seen: Observed) -> Iterator[Action]:
    for service in worker_services(seen).values():
        if service.run_id == run.job.key.run_id and service.name not in kept:
            yield Delete(Kind.SERVICE, service.name, service.uid)


def without_objects(key: JobKey) -> Iterator[Action]:
    """What a run has but for its Jobs, workers' Services and claim goes."""
    for kind, name in (
        (Kind.DEPLOYMENT, names.keeper_name(key)),
        (Kind.SERVICE, names.keeper_name(key)),
        (Kind.SERVICE, names.run_name(key)),
        (Kind.CONFIG_MAP, names.run_name(key)),
    ):
        yield Delete(kind, name)
