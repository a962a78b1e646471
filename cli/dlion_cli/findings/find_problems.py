"""All problems of one job, from its document, its pods and their events. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from dlion_cli.cluster.cluster_jobs import event_time
from dlion_cli.cluster.documents import mapping_of
from dlion_cli.findings.condition_advice import EXPLAINED_BY_PODS
from dlion_cli.findings.event_problems import job_event_problems, owner_event_problems
from dlion_cli.findings.job_problem import JobProblem, JobScope, Severity, sorted_problems
from dlion_cli.findings.job_problems import JobFinder
from dlion_cli.findings.load_problems import load_problems
from dlion_cli.findings.pod_problems import pod_problems
from dlion_cli.views.job_status import JobStatus
from dlion_cli.views.pod_status import PodStatus, pods_of_run
from dlion_cli.views.worker_load import JobLoad

Documents = Sequence[Mapping[str, Any]]


def find_problems(
    job: Mapping[str, Any],
    pods: Documents | None,
    events: Documents | None,
    now: datetime,
    load: JobLoad | None = None,
    cluster: str = "",
) -> list[JobProblem]:
    """The problems of a job, worst first. Pods and events are None if they may not be read.
    `cluster`: where MultiKueue runs the job's copy."""
    status = JobStatus(job)
    scope = JobScope(status.name, status.namespace, now)
    ordered = sorted(events or (), key=lambda event: event_time(dict(event)))
    found = list(JobFinder(status, scope, cluster).problems())
    run_pods = None if pods is None else pods_of_run(pods, status.run_id)
    below: list[JobProblem] = []
    if not _is_over_well(status):
        for pod, problems in _by_pod(run_pods or (), ordered, scope):
            is_stale = status.outcome is not None and pod.phase != "Failed"
            below += [] if is_stale else problems
    if status.outcome is None:
        below += owner_event_problems(ordered, run_pods, scope)
        below += job_event_problems(ordered, status.name, scope)
        if load is not None:
            below += load_problems(load, scope)
    if any(each.severity is Severity.ERROR for each in below):
        # Their message repeats what the pods' problems explain.
        found = [each for each in found if each.reason not in EXPLAINED_BY_PODS]
    return sorted_problems([*found, *below])


def why_not_running(
    pods: Sequence[PodStatus], events: Documents | None, scope: JobScope
) -> dict[str, str]:
    """The first problem of each pod that does not run, by the pod's name."""
    ordered = sorted(events or (), key=lambda event: event_time(dict(event)))
    return {
        pod.name: problems[0].message
        for pod, problems in _by_pod(pods, ordered, scope)
        if problems and pod.state != "Running"
    }  # fmt: skip


def _by_pod(
    pods: Sequence[PodStatus], events: Documents, scope: JobScope
) -> Iterator[tuple[PodStatus, list[JobProblem]]]:
    about: dict[str, list[Mapping[str, Any]]] = {}
    for event in events:
        thing = mapping_of(event.get("involvedObject"))
        if thing.get("kind") == "Pod":
            about.setdefault(str(thing.get("name")), []).append(event)
    newest = {(pod.is_keeper, pod.group, pod.index): pod.name for pod in pods}
    for pod in pods:  # of one place the newest comes last
        is_replaced = newest[pod.is_keeper, pod.group, pod.index] != pod.name
        own = about.get(pod.name, [])
        yield pod, pod_problems(pod, own, scope, is_replaced=is_replaced)


def _is_over_well(status: JobStatus) -> bool:
    return status.outcome is not None and status.outcome.type == "Succeeded"
