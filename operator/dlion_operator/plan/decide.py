"""Decide what to do about one job, from what the operator observes. Pure and level-based.

It looks at the current state only, never at earlier actions. So it may run at any time and any
number of times, also in an operator that has just started.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.errors import Problem, SpecError
from dlion_api.spec import load_job
from dlion_api.status import AttemptStatus, ConditionType, Reason
from dlion_operator.children.run_objects import authority_certificate, shared_objects
from dlion_operator.children.worker_jobs import worker_job
from dlion_operator.kubernetes.client import Kind
from dlion_operator.model.job_view import WorkerJobView, condition, is_true, job_key, parse_time
from dlion_operator.model.manifest_digest import manifest_digest
from dlion_operator.model.settings import Settings
from dlion_operator.plan.after_end import decide_after_end, decide_unreadable_end
from dlion_operator.plan.decisions import (
    Action,
    Apply,
    CloseRun,
    Create,
    Decision,
    FinishRun,
    StopRun,
)
from dlion_operator.plan.objects.exposure import exposing_objects
from dlion_operator.plan.objects.garbage_collection import (
    delete_other_runs,
    delete_unneeded_services,
    delete_worker_services,
    release_lost_pods,
)
from dlion_operator.plan.objects.job_patches import halt_jobs, store_bundles, update_jobs
from dlion_operator.plan.objects.manifest_changes import (
    RECREATING,
    ignored_parts_note,
    invalid_manifest,
    is_manifest_changed,
    recreate_objects,
    start_refusal,
)
from dlion_operator.plan.observed import Observed, first_of
from dlion_operator.plan.open_run import open_run
from dlion_operator.plan.outcome.diagnosis import (
    MAX_LISTED,
    diagnose,
    join_messages,
    missing_authority,
    with_last_error,
    with_note,
    with_signing_problem,
)
from dlion_operator.plan.outcome.job_phases import Diagnosis, JobPhase
from dlion_operator.plan.outcome.job_status import run_status, status_without_run
from dlion_operator.plan.outcome.retries import (
    attempts_note,
    awaits_attempt,
    clear_attempt,
    current_attempt,
    next_attempt,
    obey_queue,
    retrying,
)
from dlion_operator.plan.outcome.run_outcome import (
    A_WORKER_FINISHED,
    cannot_continue_reason,
    diagnose_failure,
    diagnose_outcome,
    end_condition,
    is_deadline_exceeded,
)
from dlion_operator.plan.outcome.training_history import has_trained, may_miss_workers
from dlion_operator.plan.queues.dispatching import (
    decide_dispatch,
    is_dispatched,
    leave_dispatch,
    sent_to_wrong_site,
)
from dlion_operator.plan.queues.queueing import (
    is_copy,
    keeper_deployment,
    leave_queue,
    release_quota,
    scale_keeper,
    uncounted_requests,
    workload_actions,
)
from dlion_operator.plan.runs import Run, groups_of
from dlion_operator.plan.runtime_limits import BLOCKING, runtime_blocker
from dlion_operator.plan.status_decision import REQUEUE_S, with_status

MANAGED_BY = "dlion.dev/operator"
CREATE_ONLY = frozenset({Kind.CLAIM, Kind.CONFIG_MAP, Kind.DEPLOYMENT})
"""Kinds that a newer operator does not update: workers keep their initial values. `object_applier`
updates what new pods need from the current operator. A recreated keeper without a claim loses its
data; the claim belongs to the user."""
STOP_TIMEOUT = timedelta(seconds=60)
"""Time that workers have to save their training state when a run is abandoned."""
_COPY_NOTE = "after the change suspend and resume the job in the manager cluster"


def decide(observed: Observed, settings: Settings) -> Decision:
    """Return what to do about the observed job now."""
    document = observed.document
    if is_dispatched(document):
        return decide_dispatch(observed, settings)
    if is_unmanaged(document):
        return _decide_unmanaged(observed, settings)
    unknown: list[Problem] = []
    try:
        job = load_job(document, unknown=unknown)
    except SpecError as error:
        run_id = job_key(document).run_id
        if ended := end_condition(observed, run_id):
            return decide_unreadable_end(observed, settings, *ended)
        return _decide_without_run(invalid_manifest(error, observed, run_id), observed, settings)
    if not groups_of(job, settings.site):
        if is_copy(document):
            return _decide_without_run(sent_to_wrong_site(settings.site), observed, settings)
        message = f"spec.sites does not name this site, {settings.site}"
        return _decide_without_run(
            Diagnosis(JobPhase.NOT_SELECTED, Reason.NOT_SELECTED, message), observed, settings
        )
    run = Run.of(job, observed, settings)
    if ended := end_condition(observed, job.key.run_id):
        return decide_after_end(run, *ended)
    notes = filter(None, [ignored_parts_note(unknown, run), uncounted_requests(run)])
    return _decide_run(run, join_messages(list(notes)))


def _decide_unmanaged(observed: Observed, settings: Settings) -> Decision:
    """Leave a job alone that is being deleted, or that another controller manages."""
    is_ours = is_managed_here(observed.document)
    released = release_lost_pods(observed.terminating, observed.now) if is_ours else ()
    requeue_s = REQUEUE_S if is_ours and observed.terminating.documents else None
    is_going = bool(observed.document["metadata"].get("deletionTimestamp"))
    # What a job that is being deleted owns goes with it.
    leaving = () if is_going else leave_dispatch(observed.document, settings)
    return Decision((CloseRun(), *released, *leaving), requeue_after_s=requeue_s)


def _decide_without_run(diagnosis: Diagnosis, observed: Observed, settings: Settings) -> Decision:
    """Only delete the remains of earlier runs."""
    key = job_key(observed.document)
    if is_copy(observed.document):
        diagnosis = with_note(diagnosis, _COPY_NOTE)
    views = [WorkerJobView(document) for document in observed.jobs]
    other_runs = [view for view in views if view.run_id != key.run_id]
    before = condition(observed.document, ConditionType.READY).get("reason")
    # MultiKueue copies no status to the manager cluster once the copy's Workload is given back.
    is_reported = not is_copy(observed.document) or before == diagnosis.reason
    # Workers may train under a manifest that this operator cannot read: serve them further.
    closing = () if len(other_runs) < len(views) else (CloseRun(),)
    actions = (
        *closing,
        *delete_other_runs(other_runs, key, observed, settings),
        *release_lost_pods(observed.terminating, observed.now),
        *(leave_dispatch(observed.document, settings) if not views else ()),
        *(release_quota(key, observed, settings, diagnosis.message) if is_reported else ()),
    )
    return with_status(diagnosis, observed, status_without_run(diagnosis, observed), actions)


def is_unmanaged(document: Mapping[str, Any]) -> bool:
    """Whether the job is being deleted, or another controller manages it."""
    is_going = bool(document["metadata"].get("deletionTimestamp"))
    return is_going or not is_managed_here(document)


def is_managed_here(document: Mapping[str, Any]) -> bool:
    return str((document.get("spec") or {}).get("managedBy", MANAGED_BY)) == MANAGED_BY


# ---- a run in progress -------------------------------------------------------------------------


def _decide_run(run: Run, note: str) -> Decision:
    """Decide about a run in progress. `note`: a remark on its manifest for the status."""
    earlier = delete_other_runs(run.other_runs, run.job.key, run.observed, run.settings)
    cleaning = (*earlier, *release_lost_pods(run.observed.terminating, run.observed.now))
    if not run.jobs and run.attempt == 1:  # MultiKueue may have dispatched it until now
        cleaning = (*leave_dispatch(run.observed.document, run.settings), *cleaning)
    if run.job.spec.suspend:
        return _suspend(run, cleaning)
    if awaits_attempt(run):
        return _await_attempt(run, cleaning)
    if run.has_ended:
        return _finish(diagnose_outcome(run), run, cleaning)
    if is_manifest_changed(run):
        return _with_run_status(RECREATING, run, (*cleaning, *recreate_objects(run)))
    if abandoned := _abandoned(run):
        return _finish(abandoned, run, cleaning)
    refusal = None if run.is_complete else start_refusal(run)
    if run.jobs and not run.is_complete:  # groups that were added to a run which has begun
        refusal = refusal or runtime_blocker(run)
    if not run.jobs and (diagnosis := _start_blocker(run, refusal)):
        actions = (*cleaning, *_initial_actions(run, diagnosis, refusal))
        return _with_run_status(with_note(diagnosis, note), run, actions)
    actions = (
        *cleaning,
        *delete_unneeded_services(run),
        open_run(run),
        *_objects(run, with_jobs=not refusal),
        *update_jobs(run),
        *scale_keeper(run),
        *store_bundles(run),
    )
    if why := _stop_reason(run):
        actions = (*actions, StopRun(why))
    rejection = run.observed.rejected.message if run.observed.rejected else ""
    diagnosis = with_signing_problem(diagnose(run), run.authority)
    diagnosis = with_last_error(diagnosis, refusal.message if refusal else rejection)
    diagnosis = with_note(with_last_error(diagnosis, run.observed.last_error), note)
    if _is_status_ahead(diagnosis, run):
        return Decision(actions, requeue_after_s=2.0)
    return _with_run_status(diagnosis, run, actions)


def _initial_actions(
    run: Run, diagnosis: Diagnosis, refusal: Diagnosis | None
) -> tuple[Action, ...]:
    if _is_without_objects(diagnosis, refusal):
        return ()
    opened = open_run(run)
    if diagnosis.reason is Reason.NO_AUTHORITY:
        return (opened, *_requested_certificate(run))
    return (opened, *_objects(run))


def _suspend(run: Run, cleaning: tuple[Action, ...]) -> Decision:
    diagnosis = Diagnosis(JobPhase.SUSPENDED, Reason.SUSPENDED, "spec.suspend is true")
    stopping = tuple(halt_jobs(run.jobs.values()))
    # Pods that shut down still report, and the keeper needs those reports.
    if not all(pod.is_finished for pod in run.pods):
        actions = (*cleaning, *stopping, open_run(run))
    else:
        actions = (*cleaning, *stopping, *delete_worker_services(run), CloseRun())
        actions = (*actions, *scale_keeper(run), *leave_queue(run))
    return _with_run_status(diagnosis, run, actions)


def _requested_certificate(run: Run) -> Iterator[Action]:
    """The request to cert-manager, where it issues the job's authority."""
    if run.job.spec.tls.mode == "CertManager":
        yield Apply(authority_certificate(run.job, run.settings, run.owner))


def _objects(run: Run, *, with_jobs: bool = True) -> Iterator[Action]:
    """All objects of the run in their desired form. `with_jobs`: include its Jobs."""
    job, settings, owner = run.job, run.settings, run.owner
    if with_jobs:
        yield from workload_actions(run)
    yield from _requested_certificate(run)
    for made in shared_objects(job, settings, owner, authority_pem=run.observed.authority_pem):
        is_keeper = Kind.of(made) is Kind.DEPLOYMENT
        if (document := keeper_deployment(run, made) if is_keeper else made) is None:
            continue
        yield Create(document) if Kind.of(document) in CREATE_ONLY else Apply(document)
    for group in run.groups if with_jobs else ():
        if group.name not in run.jobs:
            made = worker_job(job, group, settings, owner)
            digest = run.manifest_digest or manifest_digest(job)
            made["metadata"]["annotations"][names.MANIFEST_ANNOTATION] = digest
            if run.attempt > 1:
                made["metadata"]["annotations"][names.ATTEMPT_ANNOTATION] = str(run.attempt)
            yield Create(made)
    for service, document in exposing_objects(run):
        yield Apply(document, exposes=service)


def _stop_reason(run: Run) -> str:
    """Return why workers should finish now and end the run. Empty: they should not."""
    if is_deadline_exceeded(run, run.observed.now):
        limit = run.job.spec.active_deadline_seconds
        return f"the run took longer than activeDeadlineSeconds ({limit} s)"
    if run.succeeded:
        # A worker that rejoins now would wait for peers that are gone.
        return A_WORKER_FINISHED
    if why := cannot_continue_reason(run):
        return f"{first_of(run.failed, MAX_LISTED)} failed for good, and {why}"
    for worker in run.revoked_workers:
        if why := run.job.spec.exchange.lacks_trainer([worker.rank]):
            return f"{worker.name} is revoked, and {why}"
    return ""


def _abandoned(run: Run) -> Diagnosis | None:
    """Return the outcome of a run that was asked to end and did not."""
    # A deadline may pass without an operator, which only then asks the workers.
    is_asked = run.view.open_s >= STOP_TIMEOUT.total_seconds() or not run.pods
    if is_asked and is_deadline_exceeded(run, run.observed.now - STOP_TIMEOUT):
        return diagnose_outcome(run)
    if not has_trained(run) and cannot_continue_reason(run):
        return diagnose_failure(run)
    return None


def _is_status_ahead(diagnosis: Diagnosis, run: Run) -> bool:
    """Whether the status reports more than an operator that has just started can know."""
    before = {"status": run.status}
    is_suspended = is_true(before, ConditionType.SUSPENDED)
    was_training = is_true(before, ConditionType.READY) and not is_suspended
    lesser_phases = (JobPhase.WAITING, JobPhase.STUCK, JobPhase.DEGRADED)
    return was_training and diagnosis.phase in lesser_phases and may_miss_workers(run)


def _finish(diagnosis: Diagnosis, run: Run, cleaning: tuple[Action, ...]) -> Decision:
    """The run is over: inform the keeper, and write the outcome to the status. Or the attempt is:
    write when the next begins."""
    if (attempt := next_attempt(run, diagnosis)) is not None:
        return _with_attempt(attempt, run, (*cleaning, open_run(run)))
    if diagnosis.phase is JobPhase.FAILED:
        diagnosis = with_note(diagnosis, attempts_note(run))
    succeeded = diagnosis.phase is JobPhase.SUCCEEDED
    # Running pods are halted only after the status is written (`after_end`). Otherwise an
    # operator that is killed in between would take the halted run for a running one.
    actions = (*cleaning, FinishRun(diagnosis.message, succeeded))
    return _with_run_status(diagnosis, run, actions)


def _await_attempt(run: Run, cleaning: tuple[Action, ...]) -> Decision:
    """An attempt has failed: wait for the start of the next one, and then make room for it."""
    attempt = current_attempt(run)
    start = parse_time(attempt.start_time) or run.observed.now
    wait_s = (start - run.observed.now).total_seconds()
    acting = (open_run(run), *obey_queue(run)) if wait_s > 0 else tuple(clear_attempt(run))
    decision = _with_attempt(attempt, run, (*cleaning, *acting))
    return replace(decision, requeue_after_s=min(REQUEUE_S, max(wait_s, 1.0)))


def _with_attempt(attempt: AttemptStatus, run: Run, actions: tuple[Action, ...]) -> Decision:
    """A decision with the status of a run that waits for this attempt."""
    diagnosis = retrying(attempt, run)
    return with_status(diagnosis, run.observed, run_status(diagnosis, run, attempt), actions)


def _with_run_status(diagnosis: Diagnosis, run: Run, actions: tuple[Action, ...]) -> Decision:
    return with_status(diagnosis, run.observed, run_status(diagnosis, run), actions)


def _start_blocker(run: Run, refusal: Diagnosis | None) -> Diagnosis | None:
    """Return why a run without Jobs gets none for now, or None. No such reason is final. `refusal`:
    why no pod of its manifest can be made here."""
    if diagnosis := runtime_blocker(run):
        return diagnosis
    if refusal:
        return refusal
    if diagnosis := missing_authority(run):
        return diagnosis
    if (rejected := run.observed.rejected) is not None:
        return Diagnosis(JobPhase.STUCK, rejected.reason, rejected.message)
    return None


def _is_without_objects(diagnosis: Diagnosis, refusal: Diagnosis | None) -> bool:
    """Whether not even the other objects of that run can be made: its keeper needs the same
    image."""
    return refusal is not None or diagnosis.reason in BLOCKING
