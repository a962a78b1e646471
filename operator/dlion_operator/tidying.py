"""What is to go: what dead nodes, other runs and the end of a run leave behind. Pure.

Called by `decide`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

from dlion_api import cluster_names as names
from dlion_api.names import JobKey
from dlion_operator.cluster import Kind
from dlion_operator.decisions import Action, Delete, Patch
from dlion_operator.exposure import own_workers, service_name, worker_services
from dlion_operator.observed import JobView, Observed, PodView
from dlion_operator.runs import Run

LOST_POD_AFTER = timedelta(seconds=60)
"""A pod that is still there so long after its grace is on a node that does not answer. Room for
clocks that differ, too: the time is the API server's."""


def lost_pods(run: Run, now: datetime) -> Iterator[Action]:
    """Pods on nodes that do not answer are released."""
    for pod in (*run.pods, *run.keepers):
        if _is_lost(pod, now):
            if pod.phase not in ("Succeeded", "Failed"):
                # A Job waits for its pod's end, which nobody else will tell of.
                said = {"metadata": {"uid": pod.uid}, "status": pod.failed_by_its_node(now)}
                yield Patch(Kind.POD, pod.name, said, subresource="status")
            yield Delete(Kind.POD, pod.name, pod.uid, grace_s=0)


def _is_lost(pod: PodView, now: datetime) -> bool:
    return pod.deleted_at is not None and now - pod.deleted_at > LOST_POD_AFTER


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
        if pod.phase not in ("Succeeded", "Failed")
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
