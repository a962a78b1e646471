"""What a run that is over still needs: its quota is given back, its keeper is served for a while,
and its objects are deleted after their TTL. Pure."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from dlion_api.status import ConditionType
from dlion_operator.model.job_view import WorkerJobView, condition, job_key, parse_time
from dlion_operator.model.settings import Settings
from dlion_operator.plan.decisions import Action, CloseRun, Decision, FinishRun
from dlion_operator.plan.objects.garbage_collection import (
    delete_other_runs,
    delete_run_objects,
    delete_worker_services,
    delete_workers,
    release_lost_pods,
    retention_s,
)
from dlion_operator.plan.objects.job_patches import halt_jobs
from dlion_operator.plan.observed import Observed
from dlion_operator.plan.open_run import open_run
from dlion_operator.plan.queues.queueing import finish_workload, is_copy, release_quota
from dlion_operator.plan.runs import Run
from dlion_operator.plan.status_decision import REQUEUE_S

MIN_RETENTION = timedelta(seconds=60)
"""The keeper records how the run ended before anything is deleted."""
SERVE_AFTER_END = timedelta(minutes=10)
"""Time in which the keeper can learn that a run is over."""


def decide_after_end(run: Run, type_: str, time: str) -> Decision:
    """Decide about a run that is over. `type_` and `time` are those of the condition that ended
    it."""
    age = _age(run.observed, time)
    actions: list[Action] = [
        *delete_other_runs(run.other_runs, run.job.key, run.observed, run.settings),
        *halt_jobs(run.jobs.values()),
        *delete_worker_services(run),
    ]
    waits_s: list[float] = []
    if age < MIN_RETENTION and run.queue is not None and run.queue.is_prebuilt:
        # MultiKueue deletes the job and its keeper once the Workload has finished.
        waits_s.append((MIN_RETENTION - age).total_seconds())
    else:
        actions += finish_workload(run, succeeded=type_ == ConditionType.SUCCEEDED)
    if age < SERVE_AFTER_END and run.observed.run is None:
        message = condition(run.observed.document, ConditionType.READY).get("message") or "over"
        finish = FinishRun(str(message), type_ == ConditionType.SUCCEEDED)
        actions += [open_run(run), finish]
    decision = _retain(run.observed, run.settings, actions, age)
    return _soonest(decision, waits_s)


def _soonest(decision: Decision, waits_s: list[float]) -> Decision:
    """The decision, looked at again no later than after the shortest of these times."""
    if decision.requeue_after_s is not None:
        waits_s = [*waits_s, decision.requeue_after_s]
    return replace(decision, requeue_after_s=min(waits_s, default=None))


def decide_unreadable_end(
    observed: Observed, settings: Settings, type_: str, time: str
) -> Decision:
    """Decide about a run that is over and whose manifest cannot be read: it keeps no quota, and its
    TTL holds."""
    key, age = job_key(observed.document), _age(observed, time)
    jobs = (view for view in map(WorkerJobView, observed.jobs) if view.run_id == key.run_id)
    actions = list(halt_jobs(jobs))
    if is_copy(observed.document) and age < MIN_RETENTION:
        wait_s = (MIN_RETENTION - age).total_seconds()
        return _soonest(_retain(observed, settings, actions, age), [wait_s])
    succeeded = type_ == ConditionType.SUCCEEDED
    actions += release_quota(key, observed, settings, "the run is over", succeeded=succeeded)
    return _retain(observed, settings, actions, age)


def _retain(
    observed: Observed, settings: Settings, actions: Iterable[Action], age: timedelta
) -> Decision:
    """These actions, and what a run needs that has been over for `age`: its keeper is served for a
    while, and its objects are deleted after their TTL."""
    key, waits = job_key(observed.document), [SERVE_AFTER_END]
    actions = [*actions, *release_lost_pods(observed.terminating, observed.now)]
    if age >= SERVE_AFTER_END:
        actions.append(CloseRun())
    if (kept_s := retention_s(observed.document)) is not None:
        retention = max(timedelta(seconds=kept_s), MIN_RETENTION)
        waits.append(retention)
        if age >= retention:
            actions += delete_workers(key, observed)
            actions += delete_run_objects(key, observed, settings)
    due = [(wait - age).total_seconds() for wait in waits if wait > age]
    due += [REQUEUE_S] if observed.terminating.documents else []
    return Decision(
        tuple(actions), _refreshed_status(observed), requeue_after_s=min(due, default=None)
    )


def _age(observed: Observed, ended_at: str) -> timedelta:
    return observed.now - (parse_time(ended_at) or observed.now)


def _refreshed_status(observed: Observed) -> dict[str, Any]:
    """The current status, marked as observed for the current manifest."""
    generation = observed.document["metadata"].get("generation")
    return {**(observed.document.get("status") or {}), "observedGeneration": generation}
