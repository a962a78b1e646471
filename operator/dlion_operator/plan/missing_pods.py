"""Pods that should exist and do not: a quota, pod security, a missing service account. Pure."""

from collections.abc import Iterable, Iterator

from dlion_api import cluster_names as names
from dlion_api.names import JobKey
from dlion_api.status import Reason
from dlion_operator.model.job_view import Document, WorkerJobView, condition
from dlion_operator.plan.observed import MissingPod, PodProblem, PodView, first_of
from dlion_operator.plan.runs import Run
from dlion_operator.plan.startup_delays import (
    STUCK_AFTER,
    is_start_overdue,
    keeper_not_ready,
    start_delay,
)

FIRST_BACKOFF_S = 10.0
MAX_BACKOFF_S = 600.0
"""Kubernetes waits this long before it replaces a failed pod of a Job, doubling from the first to
the longest.

Source: its Job controller (DefaultJobPodFailureBackOff).
"""
MAX_LISTED_PODS = 5

_STUCK_AFTER_S = STUCK_AFTER.total_seconds()


def missing_pods(
    key: JobKey, jobs: Iterable[Document], pods: Iterable[Document]
) -> list[MissingPod]:
    """Return the pods of that run that Kubernetes was asked for and that do not exist."""
    views = [v for v in map(WorkerJobView, jobs) if v.run_id == key.run_id]
    views = [v for v in views if not v.suspended and v.ended_at is None]
    there = [pod for pod in map(PodView, pods) if pod.run_id == key.run_id]
    pods_missing = [
        (view.name, index)
        for view in views
        for index in sorted(
            set(range(view.workers)) - view.finished_indexes - _present_indexes(view, there)
        )
    ]
    keepers = (pod for pod in there if pod.component == names.KEEPER)
    if views and not any(_is_alive(pod) for pod in keepers):
        pods_missing.append((names.keeper_name(key), 0))
    return pods_missing


def _is_alive(keeper: PodView) -> bool:
    return not keeper.is_finished and keeper.deleted_at is None


def _present_indexes(view: WorkerJobView, pods: Iterable[PodView]) -> set[int]:
    return {
        pod.index
        for pod in pods
        if pod.index is not None and pod.phase != "Failed" and pod.group == view.group
    }


def pod_creation_problems(run: Run) -> list[PodProblem]:
    """Problems of Jobs whose pods are not created, and of the keeper's Deployment."""
    problems = []
    for group, view in run.jobs.items():
        late = [
            f"{group}-{index}"
            for (name, index), since_s in run.observed.missing_s.items()
            if name == view.name and since_s >= _STUCK_AFTER_S + _backoff_s(run, group, index)
        ]
        if late:
            pods = f"pods for {first_of(late, MAX_LISTED_PODS)}"
            message = f"Job {view.name} creates no {pods}: see `kubectl describe job {view.name}`"
            problems.append(PodProblem(Reason.PODS_REFUSED, message))
    return [*problems, *_keeper_creation_problems(run)]


def _backoff_s(run: Run, group: str, index: int) -> float:
    """Seconds that Kubernetes waits after the newest pod of that worker."""
    pods = [pod for pod in run.pods if (pod.group, pod.index) == (group, index)]
    if not pods:
        return 0.0
    failures = max(pod.failures for pod in pods)
    return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures, 10))


def _keeper_creation_problems(run: Run) -> Iterator[PodProblem]:
    name = names.keeper_name(run.job.key)
    if run.observed.missing_s.get((name, 0), 0.0) < _STUCK_AFTER_S:
        return
    refusal = condition(run.observed.keeper or {}, "ReplicaFailure")
    why = [str(refusal.get("message"))] if refusal.get("status") == "True" else []
    look = f"see `kubectl describe deployment {name}`"
    message = f"Deployment {name} creates no pod for the keeper: {'; '.join([*why, look])}"
    yield PodProblem(Reason.PODS_REFUSED, message)


def keeper_problems(run: Run) -> list[PodProblem]:
    """Why the run's keeper has not served for a minute or more. Empty: no problem known."""
    pods = [
        pod for pod in run.keepers if _is_alive(pod) and is_start_overdue(pod, run.observed.now)
    ]
    pod_problems = (
        pod.problem()
        or start_delay(pod, run.observed.now)
        or keeper_not_ready(pod, run.observed.unready_s)
        for pod in pods
    )
    return [*_keeper_creation_problems(run), *filter(None, pod_problems)]
