"""A run that Kueue admits as a whole: its Workload, and what follows from Kueue's answer. Pure.

Kueue only manages the jobs of kinds that it knows. For other Workloads its scheduler reserves
quota and its controller marks them Admitted or Evicted; what it does for its own jobs beyond that
is up to the operator: it starts and stops the pods, clears the reservation of an evicted Workload
after the last pod has ended, and reports PodsReady and Finished.

Source: Kueue 0.17, `pkg/controller/jobframework/reconciler.go` (ReconcileGenericJob).
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from dlion_api import cluster_names as names
from dlion_api.names import JobKey
from dlion_api.status import Reason
from dlion_operator.children.keeper import keeper_objects
from dlion_operator.children.workload import KEEPER_POD_SET, group_pod_set, workload
from dlion_operator.kubernetes.client import Document, Kind
from dlion_operator.kubernetes.quantities import pod_requests
from dlion_operator.kubernetes.store import owner_uids
from dlion_operator.model.job_view import WorkerJobView
from dlion_operator.model.manifest_digest import manifest_digest
from dlion_operator.model.placement import (
    Placement,
    placed,
    placement_patch,
    unplaced_template,
)
from dlion_operator.model.settings import Settings
from dlion_operator.model.workload_view import WorkloadView
from dlion_operator.plan.decisions import Action, Create, Delete, Patch
from dlion_operator.plan.observed import Observed, PodView, first_of
from dlion_operator.plan.outcome.job_phases import Diagnosis, JobPhase
from dlion_operator.plan.queues.workload_conditions import (
    finished,
    given_back,
    quota_conditions,
    status_patch,
)
from dlion_operator.plan.runs import Run

QUEUED_MESSAGE = "waiting for a place in the queue"
_MAX_LISTED: Final = 3


def is_copy(document: Mapping[str, Any]) -> bool:
    """Whether MultiKueue has made that job, by its label."""
    spec, labels = document.get("spec") or {}, document["metadata"].get("labels") or {}
    return names.QUEUE_PREBUILT_LABEL in labels and spec.get("managedBy") != names.MULTIKUEUE


def diagnose_queue(run: Run) -> Diagnosis | None:
    """Why the run's queue keeps it from running. None: it does not."""
    queue = run.queue
    if queue is None:
        waits = run.jobs and all(job.suspended and job.queued for job in run.jobs.values())
        return Diagnosis(JobPhase.WAITING, Reason.QUEUED, QUEUED_MESSAGE) if waits else None
    if queue.problem:
        return Diagnosis(JobPhase.STUCK, Reason.QUEUE_UNUSABLE, queue.problem)
    if queue.may_run:
        problem = placement_problem(run)
        return Diagnosis(JobPhase.STUCK, Reason.QUEUE_UNUSABLE, problem) if problem else None
    view = queue.view
    if view is None and queue.is_prebuilt:
        return Diagnosis(JobPhase.STUCK, Reason.QUEUE_UNUSABLE, _missing_prebuilt(run))
    if view is not None and not view.is_active:
        message = f"Workload {view.name} is deactivated (spec.active is false)"
        message = "; ".join(filter(None, [message, view.reason]))
        return Diagnosis(JobPhase.STUCK, Reason.QUEUE_INACTIVE, message)
    why = view.reason if view is not None else ""
    message = f"{QUEUED_MESSAGE}: {why}" if why else QUEUED_MESSAGE
    return Diagnosis(JobPhase.WAITING, Reason.QUEUED, message)


def _missing_prebuilt(run: Run) -> str:
    name = run.job.metadata.labels.get(names.QUEUE_PREBUILT_LABEL)
    return (
        f"Workload {name}, which label {names.QUEUE_PREBUILT_LABEL} names, does not exist or is of"
        " no DLionJob: delete the job, which MultiKueue makes again where it still dispatches it;"
        " of a job of your own remove the label"
    )


def placement_problem(run: Run) -> str:
    """Why the admitted pods cannot get what the admission adds to them. Empty: they can."""
    if run.queue is None or not run.queue.may_run:
        return ""
    try:
        for group, job in run.jobs.items():
            placement_patch(job.document, run.queue.placement(group_pod_set(group)))
        _placed_keeper(run)
    except ValueError as error:
        return f"Kueue's flavors or admission checks contradict the pods: {error}"
    return ""


# ---- Jobs and keeper -------------------------------------------------------------------------


def start_job(run: Run, view: WorkerJobView, spec: Document) -> Iterator[Action]:
    """Start a suspended Job with that change of its spec and what its admission adds to its pods.

    Raises: ValueError, see `placement_problem`.
    """
    queue = run.queue
    placement = Placement() if queue is None else queue.placement(group_pod_set(view.group))
    added = placement_patch(view.document, placement)
    if not run.settings.kueue:
        added = {}  # of a queue that the site no longer has; the right to change it is gone, too
    if added and view.has_start_time:
        # Only without it may the template change, as Kueue does with its own Jobs.
        yield Patch(
            Kind.JOB, view.name, _own(view.uid, status={"startTime": None}), subresource="status"
        )
    metadata = {"uid": view.uid, **added.get("metadata", {})}
    spec = {**spec, "suspend": False, **added.get("spec", {})}
    yield Patch(Kind.JOB, view.name, {"metadata": metadata, "spec": spec})


def keeper_deployment(run: Run, rendered: Document) -> Document | None:
    """The keeper's Deployment to create. None: it must wait for the admission."""
    if run.queue is None or run.observed.keeper is not None:
        return rendered
    if not run.may_start or placement_problem(run):
        return None
    return placed(rendered, run.queue.placement(KEEPER_POD_SET))


def scale_keeper(run: Run) -> Iterator[Action]:
    """Start the keeper of an admitted run, and stop it after the workers of one that must not run.

    A keeper without a claim continues: its data would be lost.
    """
    keeper, queue = run.observed.keeper, run.queue
    if keeper is None or queue is None:
        return
    replicas = (keeper.get("spec") or {}).get("replicas")
    name, uid = str(keeper["metadata"]["name"]), str(keeper["metadata"].get("uid", ""))
    wanted = queue.may_run and not run.job.spec.suspend
    if wanted and replicas == 0 and not placement_problem(run):
        added = placement_patch(keeper, queue.placement(KEEPER_POD_SET))
        metadata = {"uid": uid, **added.get("metadata", {})}
        spec = {"replicas": 1, **added.get("spec", {})}
        yield Patch(Kind.DEPLOYMENT, name, {"metadata": metadata, "spec": spec})
    must_stop = queue.must_stop or run.job.spec.suspend
    if must_stop and replicas and _has_claim(keeper) and _workers_are_gone(run):
        yield Patch(Kind.DEPLOYMENT, name, _own(uid, spec={"replicas": 0}))


def _placed_keeper(run: Run) -> None:
    """Raises: ValueError if the keeper's pod contradicts its placement."""
    assert run.queue is not None
    placement, keeper = run.queue.placement(KEEPER_POD_SET), run.observed.keeper
    if keeper is not None:
        placement_patch(keeper, placement)
        return
    for each in keeper_objects(run.job, run.settings, run.owner):
        if Kind.of(each) is Kind.DEPLOYMENT:
            placed(each, placement)


def _has_claim(keeper: Mapping[str, Any]) -> bool:
    spec = (keeper.get("spec") or {}).get("template", {}).get("spec") or {}
    return any(each.get("persistentVolumeClaim") for each in spec.get("volumes") or ())


def _workers_are_gone(run: Run) -> bool:
    return all(pod.is_finished for pod in run.pods)


def _is_stopped(run: Run) -> bool:
    """Whether no pod of the run needs its quota any more."""
    keeper = run.observed.keeper
    stays = keeper is not None and not _has_claim(keeper)
    jobs_are_halted = all(view.suspended or view.ended_at for view in run.jobs.values())
    keepers_are_gone = stays or all(pod.is_finished for pod in run.keepers)
    return jobs_are_halted and _workers_are_gone(run) and keepers_are_gone


# ---- the Workload ----------------------------------------------------------------------------


def workload_actions(run: Run) -> Iterator[Action]:
    """Keep the Workload of a run in progress."""
    queue = run.queue
    if queue is None:
        yield from _without_queue(run)
        return
    view = queue.view
    if queue.problem:
        return
    if queue.is_prebuilt:
        yield from _prebuilt_actions(run, view)
    elif view is None:
        yield Create(wanted_workload(run))
    elif view.is_finished:
        # Others have ended it, though the run continues: it is queued again.
        if _is_stopped(run):
            yield Delete(Kind.WORKLOAD, view.name, view.uid)
    elif not (view.has_quota and run.jobs) and view.digest != digest_of(wanted_workload(run)):
        # Before the Jobs also one with quota: a later attempt may request more than is admitted.
        yield Delete(Kind.WORKLOAD, view.name, view.uid)
    elif view.has_quota:
        yield from _quota_report(run, view)


def _prebuilt_actions(run: Run, view: WorkloadView | None) -> Iterator[Action]:
    """Own a Workload that MultiKueue has made, and report to it. MultiKueue also deletes it."""
    if view is None:
        return
    if not owner_uids(view.document):
        # By its owner MultiKueue finds the copy that it has to delete after an outage.
        owned = _own(view.uid)
        owned["metadata"] |= {
            "resourceVersion": view.version, "ownerReferences": [dict(run.owner)]
        }  # fmt: skip
        yield Patch(Kind.WORKLOAD, view.name, owned)
    elif view.has_quota and not view.is_finished:
        yield from _quota_report(run, view)


def uncounted_requests(run: Run) -> str:
    """Note on what a copy's pods request beyond its Workload. Empty: nothing known.

    The manager cluster's operator makes that Workload from its own DLionRuntime and settings.
    """
    if run.queue is None or not run.queue.is_prebuilt or (view := run.queue.view) is None:
        return ""
    made = {group_pod_set(group): each.document for group, each in run.jobs.items()}
    made |= {KEEPER_POD_SET: run.observed.keeper} if run.observed.keeper else {}
    found = []
    for name, document in made.items():
        with suppress(ValueError, TypeError, AttributeError, KeyError):
            counted = pod_requests(view.pod_spec(name) or {})
            requested = pod_requests(document["spec"]["template"]["spec"])
            beyond = (each for each, amount in requested.items() if amount > counted.get(each, 0))
            found += [f"{each} of {name}" for each in beyond]
    if not found:
        return ""
    return (
        f"the pods request more than Kueue counts: {first_of(sorted(found), _MAX_LISTED)}; set"
        " resources in the job, or the same DLionRuntime and chart values in the manager cluster"
    )


def leave_queue(run: Run) -> Iterator[Action]:
    """Delete the Workload of a suspended run after its pods: that frees the quota at once."""
    if run.queue is None:
        yield from _without_queue(run)
    elif not run.queue.is_prebuilt and (view := run.queue.view) is not None and _is_stopped(run):
        yield Delete(Kind.WORKLOAD, view.name, view.uid)


def finish_workload(run: Run, *, succeeded: bool) -> Iterator[Action]:
    """Report the end of a run to Kueue after its workers' pods have ended, which frees its quota.

    The keeper stays, so that the model can be fetched.
    """
    view = run.queue.view if run.queue is not None else None
    if view is None or not _workers_are_gone(run):
        return
    over = finished(view, run.job.key, succeeded=succeeded)
    yield from status_patch(view, over, run.observed.now)


def release_quota(
    key: JobKey,
    observed: Observed,
    settings: Settings,
    why: str,
    *,
    succeeded: bool | None = None,
) -> Iterator[Action]:
    """Give the quota of a run back that cannot be read, or does not name this site, once no worker
    runs. `why`: in words. `succeeded`: how it ended, if it did.

    A Workload of its own is deleted: the run queues again when the manifest is right. One that
    MultiKueue made is ended.
    """
    jobs = (view for view in map(WorkerJobView, observed.jobs) if view.run_id == key.run_id)
    pods = (pod for pod in map(PodView, observed.pods) if pod.run_id == key.run_id)
    needs_quota = any(not view.suspended and not view.ended_at for view in jobs) or any(
        pod.component == names.WORKER and not pod.is_finished for pod in pods
    )
    if needs_quota or not settings.kueue:
        return
    view = observed.queue.view if observed.queue is not None else None
    if not is_copy(observed.document):
        yield Delete(Kind.WORKLOAD, names.run_name(key))
    elif view is not None and succeeded is not None:
        yield from status_patch(view, finished(view, key, succeeded=succeeded), observed.now)
    elif view is not None:
        yield from status_patch(view, given_back(view, why), observed.now)


def _without_queue(run: Run) -> Iterator[Action]:
    """Delete the Workload of a job that has lost its label, or whose Jobs Kueue admits alone."""
    if run.settings.kueue:
        yield Delete(Kind.WORKLOAD, names.run_name(run.job.key))


def wanted_workload(run: Run) -> Document:
    groups = [replace(group, workers=run.wanted_size_of(group)) for group in run.groups]
    queue = run.queue
    priority = queue.priority if queue is not None else None
    if queue is not None and queue.view is not None and queue.view.has_quota:
        priority = queue.view.priority  # it is not looked up then
    kept: Mapping[str, Document] = {}
    if run.manifest_digest not in ("", manifest_digest(run.job)):
        # A change of the manifest that takes effect in the next run alone, as of podTemplate.
        kept = {group: unplaced_template(view.document) for group, view in run.jobs.items()}
    return workload(run.job, groups, run.settings, run.owner, priority, kept)


def digest_of(made: Document) -> str:
    return str(made["metadata"]["annotations"][names.WORKLOAD_ANNOTATION])


def _quota_report(run: Run, view: WorkloadView) -> Iterator[Action]:
    changed = quota_conditions(
        view, is_stopped=_is_stopped(run), pods_are_ready=_pods_are_ready(run)
    )
    yield from status_patch(view, changed, run.observed.now)


def _pods_are_ready(run: Run) -> bool:
    ready = [
        pod
        for pod in (*run.pods, *run.keepers)
        if pod.deleted_at is None
        and (pod.phase == "Succeeded" or pod.condition("Ready").get("status") == "True")
    ]
    keepers = [pod for pod in ready if pod.component == names.KEEPER]
    here = {(pod.group, pod.index) for pod in ready if pod.component == names.WORKER}
    wanted = {(group.name, i) for group in run.groups for i in range(run.size_of(group))}
    # A worker that failed for good gets no pod again: a run that continues without it is whole.
    ended = {(view.group, i) for view in run.jobs.values() for i in view.finished_indexes}
    return bool(keepers) and wanted - ended <= here


def _own(uid: str, **parts: Any) -> Document:
    """A patch that another object of the same name rejects."""
    return {"metadata": {"uid": uid}, **parts}
