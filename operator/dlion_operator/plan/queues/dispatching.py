"""A job that Kueue's MultiKueue dispatches: what the operator of the manager cluster does. Pure.

Once a worker cluster admits the job's Workload, Kueue keeps a copy of the job there and writes the
copy's status to the job. The operator makes the Workload, gives its quota back after an eviction,
and writes the status while there is no copy. It starts nothing: the operator of the worker cluster
treats the copy as a queued job (`plan.queues.queueing`).

Source: Kueue 0.17, `pkg/controller/admissionchecks/multikueue` (`workload.go` and
`externalframeworks/adapter.go`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from dlion_api import cluster_names as names
from dlion_api.errors import SpecError
from dlion_api.spec import Job, load_job
from dlion_api.status import ConditionType, Reason
from dlion_operator.children.workload import rendered_site
from dlion_operator.kubernetes.client import Kind
from dlion_operator.model.job_view import (
    WorkerJobView,
    condition,
    is_true,
    job_key,
    parse_time,
)
from dlion_operator.model.settings import Settings
from dlion_operator.model.workload_view import EVICTED, WorkloadView
from dlion_operator.plan.decisions import Action, CloseRun, Create, Decision, Delete
from dlion_operator.plan.objects.garbage_collection import delete_other_runs
from dlion_operator.plan.objects.manifest_changes import invalid_manifest, start_refusal
from dlion_operator.plan.observed import Observed
from dlion_operator.plan.outcome.job_phases import Diagnosis, JobPhase
from dlion_operator.plan.outcome.job_status import TELEMETRY, status_without_run
from dlion_operator.plan.outcome.run_outcome import end_condition
from dlion_operator.plan.queues.queueing import diagnose_queue, digest_of, is_copy, wanted_workload
from dlion_operator.plan.queues.workload_conditions import finished, quota_conditions, status_patch
from dlion_operator.plan.runs import Run, status_of_run
from dlion_operator.plan.runtime_limits import runtime_blocker
from dlion_operator.plan.status_decision import REQUEUE_S, with_status

STOP_TIMEOUT: Final = timedelta(seconds=60)
"""Longest wait for the copy's workers after an eviction: its cluster may be out of reach."""
FINISH_AFTER: Final = timedelta(seconds=90)
"""Time after a run's end in which the copy reports it to Kueue. Longer than a copy waits for its
keeper (`after_end.MIN_RETENTION`), whose clock is another."""

_WITHOUT_CHECK: Final = (
    "the queue admits the job in this cluster, where nothing runs it: give its ClusterQueue an"
    " admission check of controller kueue.x-k8s.io/multikueue"
)


def is_dispatched(document: Mapping[str, Any]) -> bool:
    """Whether the job runs as a copy in another cluster, by its queue here."""
    metadata = document["metadata"]
    is_managed = (document.get("spec") or {}).get("managedBy") == names.MULTIKUEUE
    is_queued = bool((metadata.get("labels") or {}).get(names.QUEUE_LABEL))
    return is_managed and is_queued and not metadata.get("deletionTimestamp")


def sent_to_wrong_site(site: str) -> Diagnosis:
    """Diagnose the copy of a job in a cluster with another site's name than the job's."""
    message = (
        f"MultiKueue has dispatched the job to site {site}, which spec.sites does not name: set"
        " site.name in the charts of all worker clusters of this queue to the job's site"
    )
    return Diagnosis(JobPhase.STUCK, Reason.QUEUE_UNUSABLE, message)


def leave_dispatch(document: Mapping[str, Any], settings: Settings) -> Iterator[Action]:
    """Delete the Workload of a job that MultiKueue dispatches no longer. Kueue then deletes the
    copy."""
    if settings.kueue and not (is_dispatched(document) or is_copy(document)):
        name = names.dispatched_workload_name(job_key(document).name)
        yield Delete(Kind.WORKLOAD, name)


def decide_dispatch(observed: Observed, settings: Settings) -> Decision:
    """Return what to do in the manager cluster about a job that MultiKueue dispatches."""
    key = job_key(observed.document)
    # Those of the time before MultiKueue managed it.
    own_jobs = [WorkerJobView(document) for document in observed.jobs]
    cleaning = (CloseRun(), *delete_other_runs(own_jobs, key, observed, settings))
    view = observed.queue.view if observed.queue is not None else None
    if ended := end_condition(observed, key.run_id):
        return _decide_after_end(ended, observed, view, cleaning)
    if view is not None and _was_dispatched(view, observed):
        # From here on Kueue writes the status. An evicted copy has a time limit for its end.
        actions = (*cleaning, *_held_actions(observed, view))
        return Decision(actions, requeue_after_s=REQUEUE_S)
    try:
        job = load_job(observed.document, unknown=[])
    except SpecError as error:
        removed = (_delete(view),) if view is not None else ()
        diagnosis = invalid_manifest(error, observed, key.run_id)
        return _report(diagnosis, observed, (*cleaning, *removed))
    if len(job.spec.sites) > 1:
        return _report(_too_many_sites(job), observed, cleaning)
    here = replace(settings, site=rendered_site(job, settings.site))
    diagnosis, actions = _await_copy(Run.of(job, replace(observed, jobs=()), here), view)
    return _report(diagnosis, observed, (*cleaning, *actions))


def _decide_after_end(
    ended: tuple[str, str],
    observed: Observed,
    view: WorkloadView | None,
    cleaning: tuple[Action, ...],
) -> Decision:
    """Decide about a run that is over, whose Workload must be finished. Otherwise Kueue would
    dispatch it again without quota, and an evicted one would keep its quota."""
    key, (type_, time) = job_key(observed.document), ended
    if view is None or view.is_finished:
        return Decision(cleaning)
    if view.run_id != key.run_id:
        return Decision((*cleaning, _delete(view)))
    age = observed.now - (parse_time(time) or observed.now - FINISH_AFTER)
    if view.has_quota and age < FINISH_AFTER:
        return Decision(cleaning, requeue_after_s=(FINISH_AFTER - age).total_seconds())
    over = finished(view, key, succeeded=type_ == ConditionType.SUCCEEDED)
    return Decision((*cleaning, *status_patch(view, over, observed.now)))


def _report(diagnosis: Diagnosis, observed: Observed, actions: tuple[Action, ...]) -> Decision:
    status = status_without_run(diagnosis, observed)
    # An earlier copy's: the next one starts from the beginning.
    status = {name: value for name, value in status.items() if name not in TELEMETRY}
    return with_status(diagnosis, observed, status, actions)


def _too_many_sites(job: Job) -> Diagnosis:
    message = (
        f"spec.sites has {len(job.spec.sites)} sites: MultiKueue dispatches a job as a whole to one"
        " cluster; name one site, or apply the job at each site without managedBy"
    )
    return Diagnosis(JobPhase.STUCK, Reason.QUEUE_UNUSABLE, message)


def _was_dispatched(view: WorkloadView, observed: Observed) -> bool:
    """Whether the run has a copy in another cluster, or had one until its end or eviction.

    The spec is read unchecked: the copy is there as well while the manifest cannot be read.
    """
    has_copy = view.has_quota and bool(view.cluster or view.is_evicted)
    return (
        (has_copy or view.is_finished)
        and view.run_id == job_key(observed.document).run_id
        and (observed.document.get("spec") or {}).get("suspend") is not True
    )


def _held_actions(observed: Observed, view: WorkloadView) -> Iterator[Action]:
    # A finished one stays: a later one would run the job once more.
    if view.is_finished:
        return
    status = status_of_run(observed, view.run_id)
    changed = quota_conditions(
        view,
        is_stopped=_is_copy_stopped(status, view, observed.now),
        pods_are_ready=is_true({"status": status}, ConditionType.READY),
    )
    yield from status_patch(view, changed, observed.now)


def _is_copy_stopped(status: Mapping[str, Any], view: WorkloadView, now: datetime) -> bool:
    ready_workers = str(status.get("readyWorkers") or "0/")
    evicted = condition(view.document, EVICTED).get("lastTransitionTime")
    since = parse_time(evicted) or now
    return ready_workers.startswith("0/") or now - since >= STOP_TIMEOUT


def _await_copy(run: Run, view: WorkloadView | None) -> tuple[Diagnosis, tuple[Action, ...]]:
    """Why the run has no copy, and what to do for it."""
    if run.job.spec.suspend:
        suspended = Diagnosis(JobPhase.SUSPENDED, Reason.SUSPENDED, "spec.suspend is true")
        return suspended, () if view is None else (_delete(view),)
    if refusal := runtime_blocker(run) or start_refusal(run):
        return refusal, ()
    queued = diagnose_queue(run) or Diagnosis(JobPhase.STUCK, Reason.QUEUE_UNUSABLE, _WITHOUT_CHECK)
    if run.queue is None or run.queue.problem:
        return queued, ()
    made = wanted_workload(run)
    if view is None:
        return queued, (Create(made),)
    # One that fits the manifest no longer, or is of an earlier run with its copy.
    return queued, () if view.digest == digest_of(made) else (_delete(view),)


def _delete(view: WorkloadView) -> Delete:
    return Delete(Kind.WORKLOAD, view.name, view.uid)
