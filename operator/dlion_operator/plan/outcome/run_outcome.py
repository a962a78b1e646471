"""Whether a run is over, and how it ended: from its Jobs, pods and status. Pure.

A run succeeds when its stop rule was met and the saved model holds every wanted replica. No result
may depend on facts that an operator loses in a restart: such facts are stored on objects.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from dlion_api.endings import EndReport, is_stop_rule, own_reason
from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank
from dlion_api.spec.failures import WorkerEnd, fail_run_cause
from dlion_api.status import ConditionType, Reason
from dlion_operator.model.job_view import condition, is_true
from dlion_operator.plan.initializer_state import failed_initializer
from dlion_operator.plan.observed import Observed, PodView, first_of
from dlion_operator.plan.outcome.diagnosis import MAX_LISTED, join_messages
from dlion_operator.plan.outcome.job_phases import Diagnosis, JobPhase
from dlion_operator.plan.outcome.training_history import has_trained, may_miss_workers
from dlion_operator.plan.runs import Run, status_of_run

A_WORKER_FINISHED = "a worker has finished"
"""Reason for asking the other workers to end. It does not say why the first one ended."""

_LONG_AGO = datetime.min.replace(tzinfo=UTC)

_EXIT_REASONS = {
    ExitCode.PROGRAM: Reason.PROGRAM_FAILED,
    ExitCode.SPEC: Reason.INVALID_SPEC,
    ExitCode.RESTARTS: Reason.RESTARTS_EXCEEDED,
    ExitCode.MODEL_LOST: Reason.MODEL_LOST,
}


def cannot_continue_reason(run: Run) -> str:
    """Why a run cannot continue without its failed workers. Empty: it can."""
    if not run.failed:
        return ""
    if rule := failing_rule(run):
        return rule
    spec = run.job.spec
    if lacking := spec.exchange.lacks_trainer(run.failed_ranks):
        return lacking
    if not has_trained(run) and spec.start_deadline_seconds is None:
        # Others may train that have not reported to this operator yet.
        why = "the others would wait for it (no startDeadlineSeconds)"
        return "" if may_miss_workers(run) else why
    if spec.failure_policy == "Fail":
        return "failurePolicy is Fail"
    if len(run.failed) >= run.size and len(spec.sites) - 1 < spec.min_sites:
        return "no worker is left"
    return ""


def failing_rule(run: Run) -> str:
    """Which of the manifest's failure rules fails the run, after a worker failed for good. Empty:
    none."""
    causes = (
        fail_run_cause(run.job.spec.failure_rules, _end_for_good(pod), pod.group)
        for pod in _last_pods(run)
    )
    return next(filter(None, causes), "")


def _last_pods(run: Run) -> list[PodView]:
    """The last pod of each worker that failed for good."""
    failed = {(v.group, index) for v in run.jobs.values() for index in v.failed_indexes}
    pods = [pod for pod in run.pods if pod.phase == "Failed" and (pod.group, pod.index) in failed]
    latest = {pod.worker: pod for pod in sorted(pods, key=lambda pod: pod.created_at or _LONG_AGO)}
    return [pod for name, pod in latest.items() if name in run.failed]


def _end_for_good(pod: PodView) -> WorkerEnd | None:
    """The end of a worker's last pod. Pods that nodes refuse use restarts up, too."""
    return "RestartsExceeded" if pod.end is None and pod.trainer_exit is None else pod.end


def is_deadline_exceeded(run: Run, now: datetime) -> bool:
    limit = run.job.spec.active_deadline_seconds
    if limit is None or run.started_at is None:
        return False
    return now - run.started_at > timedelta(seconds=limit)


def end_condition(observed: Observed, run_id: str) -> tuple[str, str] | None:
    """Type and time of the condition that ended that run, or None."""
    status = {"status": status_of_run(observed, run_id)}
    for type_ in (ConditionType.SUCCEEDED, ConditionType.FAILED):
        if is_true(status, type_):
            return type_, str(condition(status, type_).get("lastTransitionTime") or "")
    return None


# ---- how it ended ------------------------------------------------------------------------------


def diagnose_outcome(run: Run) -> Diagnosis:
    """Diagnose how a run ended whose Jobs have all ended, or that is abandoned."""
    lost = [pod.failure for pod in run.pods if pod.trainer_exit == ExitCode.MODEL_LOST]
    if lost:
        lost_model = "the run is over and the site's model is lost: the keeper did not get it"
        return Diagnosis(JobPhase.FAILED, Reason.MODEL_LOST, join_messages([lost_model, *lost]))
    if is_deadline_exceeded(run, run.ended_at or run.observed.now):
        limit = run.job.spec.active_deadline_seconds
        message = f"the run took longer than activeDeadlineSeconds ({limit} s); its state is saved"
        return Diagnosis(JobPhase.FAILED, Reason.DEADLINE_EXCEEDED, message)
    is_fatal = run.job.spec.failure_policy == "Fail" or failing_rule(run)
    if run.succeeded == 0 or (run.failed and is_fatal):
        return diagnose_failure(run)
    why = stop_reason(run)
    missing = _missing_replicas(run)
    if why and not is_stop_rule(why):
        early = f"ended {_progress_text(run)}, before its stop rule was met: {why}"
        return Diagnosis(JobPhase.FAILED, Reason.ENDED_EARLY, join_messages([early, *missing]))
    done = why or f"{run.succeeded} workers ended well"
    if missing:
        return Diagnosis(JobPhase.FAILED, Reason.PARTIAL, join_messages([*missing, done]))
    return Diagnosis(JobPhase.SUCCEEDED, Reason.COMPLETED, done)


def stop_reason(run: Run) -> str:
    """Why the run ended, as its workers report it. Empty: not known.

    A stop rule outweighs the report of a worker that rejoined at the end.
    """
    reasons = [report.stop_reason for report in _reports(run)]
    reasons.append(own_reason(run.view.stop_reason))
    reasons = [reason for reason in reasons if reason != A_WORKER_FINISHED]
    return next(filter(is_stop_rule, reasons), next(filter(None, reasons), ""))


def model_ranks(run: Run) -> tuple[Rank, ...]:
    """The replicas that this site's model holds. Empty: not known."""
    return max((report.ranks for report in _reports(run)), key=len, default=())


def _reports(run: Run) -> Iterator[EndReport]:
    return (report for pod in run.pods if (report := pod.end_report) is not None)


def _missing_replicas(run: Run) -> list[str]:
    """Messages on wanted replicas that the model lacks, as far as is known."""
    messages = []
    if run.failed:
        messages.append(f"the model lacks {first_of(run.failed, MAX_LISTED)}: failed for good")
    saved = max(_reports(run), key=lambda report: len(report.ranks), default=None)
    if saved is None or not saved.ranks:
        return messages
    wanted = {worker.rank: worker for worker in run.workers}
    here = {f"{run.site}/{name}" for name in run.failed}
    absent = [wanted[rank].name for rank in saved.missing if rank in wanted]
    if others := [name for name in absent if name not in here]:
        messages.append(f"the model lacks {first_of(others, MAX_LISTED)}: not reached at the end")
    return messages


def _progress_text(run: Run) -> str:
    """The progress that was reached, as text. Sensors make steps of their own."""
    trains = run.job.spec.exchange.trains
    here = [each for each in run.workers if each.site == run.site]
    sensors = {(each.group, each.index) for each in here if not trains(each.rank)}
    reports = [pod.end_report for pod in run.pods if (pod.group, pod.index) not in sensors]
    iteration = max((report.iteration for report in reports if report is not None), default=0)
    iteration = iteration or run.view.iteration
    trainer = run.view.trainer_status
    percent = trainer.progress_percentage if trainer else None
    if percent is None:
        before = run.status.get("trainerStatus") or {}
        percent = before.get("progressPercentage")
    share = "" if percent is None else f" ({percent} %)"
    return f"at iteration {iteration}{share}" if iteration else f"early{share}"


def diagnose_failure(run: Run) -> Diagnosis:
    """Diagnose why a run failed, from its failed pods."""
    failures = [pod for pod in run.pods if pod.failure]
    codes = [ExitCode(pod.trainer_exit) for pod in failures if pod.trainer_exit in set(ExitCode)]
    is_fatal = any(code.fatal for code in codes)
    other = Reason.WORKERS_FAILED if is_fatal else Reason.RESTARTS_EXCEEDED
    reason = next((_EXIT_REASONS[code] for code in codes if code in _EXIT_REASONS), other)
    last = _last_pods(run)
    if last and all(failed_initializer(pod.document) for pod in last):
        reason = Reason.INITIALIZER_FAILED
    messages = [pod.failure for pod in failures]
    messages = messages or [job.failure for job in run.jobs.values() if job.failure]
    if run.failed:
        messages.insert(0, f"{first_of(run.failed, MAX_LISTED)} failed for good")
    messages = messages or ["no worker trained to the end"]
    if rule := failing_rule(run):
        reason, messages = Reason.FAILED_BY_RULE, [rule, *messages]
    return Diagnosis(JobPhase.FAILED, reason, join_messages(messages))
