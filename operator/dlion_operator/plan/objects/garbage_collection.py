"""What to delete: the remains of lost nodes, of other runs, and of ended runs. Pure."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime

from dlion_api import cluster_names as names
from dlion_api.bounds import INT32_MAX
from dlion_api.names import JobKey
from dlion_operator.kubernetes.client import Kind
from dlion_operator.model.job_view import Document, WorkerJobView
from dlion_operator.model.settings import Settings
from dlion_operator.plan.decisions import Action, Delete, Patch
from dlion_operator.plan.node_states import NodeState
from dlion_operator.plan.objects.exposure import local_workers, service_name, worker_services
from dlion_operator.plan.observed import NODE_LOST, Observed, PodView, TerminatingPods
from dlion_operator.plan.runs import Run

LOST_AFTER_S = 60.0
"""A pod may be on a lost node if it outlives its grace period by this time and its node does not
report its end. Then the state of the node decides. Counted by this operator."""
CLEANUP_TIMEOUT_S = 600.0
"""The same where the node has reported the end of the containers: the rest of its cleanup may be
slow. Also used where the state of the node is unknown."""


def terminating_pods(pods: Iterable[Document]) -> list[Document]:
    """Terminating pods that a DLion operator created, with or without their Job or Deployment."""
    return [pod for pod in pods if pod["metadata"].get("deletionTimestamp") and _is_ours(pod)]


def disrupted_pods(pods: Iterable[Document]) -> list[PodView]:
    """DLion's pods that Kubernetes ends or has ended: by an eviction, a preemption or a taint."""
    return [view for pod in pods if _is_ours(pod) and (view := PodView(pod)).disruption]


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


def overdue_pods(terminating: TerminatingPods) -> Iterator[PodView]:
    """Pods that have been terminating for longer than their nodes should need."""
    for pod in map(PodView, terminating.documents):
        is_ending = pod.containers_ended and not pod.is_finished
        patience_s = CLEANUP_TIMEOUT_S if is_ending else LOST_AFTER_S
        if terminating.durations_s.get(pod.uid, 0.0) > pod.grace_s + patience_s:
            yield pod


def pods_on_ready_nodes(terminating: TerminatingPods) -> list[PodView]:
    """Overdue pods on working nodes. They may still run, so they are never released."""
    waiting, nodes = overdue_pods(terminating), terminating.nodes
    return [pod for pod in waiting if nodes.get(pod.node) is NodeState.READY]


def release_lost_pods(terminating: TerminatingPods, now: datetime) -> Iterator[Action]:
    """Release pods on lost nodes."""
    for pod in overdue_pods(terminating):
        if not _is_lost(pod, terminating.durations_s[pod.uid], terminating.nodes):
            continue
        if not pod.is_finished:
            # The Job waits for the end of its pod, which a lost node cannot report.
            status_patch = {"metadata": {"uid": pod.uid}, "status": pod.node_lost_status(now)}
            yield Patch(Kind.POD, pod.name, status_patch, subresource="status")
        if pod.grace_s > 0:  # else it was requested already, and a finalizer holds the pod
            yield Delete(Kind.POD, pod.name, pod.uid, grace_s=0)


def _is_lost(pod: PodView, waited_s: float, nodes: Mapping[str, NodeState]) -> bool:
    """Whether nothing of the pod can still run, as far as can be known.

    Where nodes may not be read, the cluster's eviction from a lost node counts
    (DeletionByTaintManager). So does an operator's own mark, which replaces that condition: the one
    that wrote it may have ended before it deleted the pod. Else the longer timeout applies.
    """
    if not pod.node:
        return True
    match nodes.get(pod.node, NodeState.FORBIDDEN):
        case NodeState.ABSENT | NodeState.NOT_READY:
            return True
        case NodeState.READY | NodeState.UNANSWERED:
            return False
        case NodeState.FORBIDDEN:
            condition = pod.condition("DisruptionTarget")
            is_given_up = condition.get("reason") in ("DeletionByTaintManager", NODE_LOST)
            is_so = is_given_up and condition.get("status") == "True"
            return is_so or waited_s > pod.grace_s + CLEANUP_TIMEOUT_S


def delete_other_runs(
    other_runs: Sequence[WorkerJobView], key: JobKey, observed: Observed, settings: Settings
) -> Iterator[Action]:
    """Delete the Jobs of other runs than `key`'s, and their objects."""
    for view in other_runs:
        yield Delete(Kind.JOB, view.name, view.uid)
    for service in worker_services(observed).values():
        if service.run_id != key.run_id:
            yield Delete(Kind.SERVICE, service.name, service.uid)
    status = observed.document.get("status") or {}
    before = str(status.get("runId") or "")
    if before and before != key.run_id:
        yield from delete_run_objects(JobKey(key.namespace, key.name, before), observed, settings)


def delete_unneeded_services(run: Run) -> Iterator[Action]:
    """Delete Services of removed, finished workers: ports and load balancers are expensive."""
    wanted = {service_name(run, worker) for worker in local_workers(run)}
    used = {
        names.worker_service_name(run.job.key, pod.group, int(index))
        for pod in run.pods
        if not pod.is_finished and pod.group and (index := pod.labels.get(names.INDEX_LABEL))
    }
    return delete_worker_services(run, kept=wanted | used)


def delete_worker_services(run: Run, *, kept: Collection[str] = ()) -> Iterator[Action]:
    for service in worker_services(run.observed).values():
        if service.run_id == run.job.key.run_id and service.name not in kept:
            yield Delete(Kind.SERVICE, service.name, service.uid)


def retention_s(document: Document) -> int | None:
    """`ttlSecondsAfterFinished` of a manifest that may be invalid otherwise. None: it has none."""
    found = (document.get("spec") or {}).get("ttlSecondsAfterFinished")
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        return None
    return min(found, INT32_MAX)


def delete_workers(key: JobKey, observed: Observed) -> Iterator[Action]:
    """Delete a run's Jobs, with their pods, and its worker Services."""
    for view in map(WorkerJobView, observed.jobs):
        if view.run_id == key.run_id:
            yield Delete(Kind.JOB, view.name, view.uid)
    for service in worker_services(observed).values():
        if service.run_id == key.run_id:
            yield Delete(Kind.SERVICE, service.name, service.uid)


def delete_run_objects(key: JobKey, observed: Observed, settings: Settings) -> Iterator[Action]:
    """Delete a run's objects except its Jobs, worker Services and claim."""
    # Also if the manifest names no queue now, or is invalid: the run may have been queued.
    if settings.kueue and not (observed.queue and observed.queue.problem):
        yield Delete(Kind.WORKLOAD, names.run_name(key))
    for kind, name in (
        (Kind.DEPLOYMENT, names.keeper_name(key)),
        (Kind.SERVICE, names.keeper_name(key)),
        (Kind.SERVICE, names.run_name(key)),
        (Kind.CONFIG_MAP, names.run_name(key)),
        (Kind.NETWORK_POLICY, names.keeper_name(key)),
        (Kind.NETWORK_POLICY, names.run_name(key)),
    ):
        yield Delete(kind, name)
