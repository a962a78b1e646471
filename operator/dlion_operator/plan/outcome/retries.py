"""Whether a failed run is tried again, and when (`spec.maxRetries`). Pure.

An attempt is the same run with new Jobs: its workers continue from the keeper's checkpoints. The
status has the number of the attempt and its start, and each Job the attempt that it is of. So an
operator that is killed anywhere continues correctly. Jobs that failed stay until the next attempt
begins, for their logs.
"""

from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

from dlion_api import cluster_names as names
from dlion_api.document import parse
from dlion_api.errors import SpecError
from dlion_api.exit_codes import ExitCode
from dlion_api.status import AttemptStatus, Reason
from dlion_operator.kubernetes.client import Kind
from dlion_operator.model.job_view import format_time
from dlion_operator.plan.decisions import Action, CloseRun, Delete
from dlion_operator.plan.initializer_state import failed_initializer
from dlion_operator.plan.missing_pods import FIRST_BACKOFF_S, MAX_BACKOFF_S
from dlion_operator.plan.objects.job_patches import halt_jobs
from dlion_operator.plan.outcome.job_phases import Diagnosis, JobPhase
from dlion_operator.plan.queues.queueing import scale_keeper, workload_actions
from dlion_operator.plan.runs import Run

RETRIED_REASONS = frozenset(
    {Reason.RESTARTS_EXCEEDED, Reason.WORKERS_FAILED, Reason.INITIALIZER_FAILED}
)
"""How runs end that another attempt may help: not by errors of manifest, data or program, at a
deadline, by a rule of the user, or when the training was over."""
_RETRIED_CODES = frozenset({ExitCode.STORAGE})
"""Fatal exit codes of workers that another attempt may help, as it may find another node."""
MAX_FAILURE_CHARACTERS = 1024


def next_attempt(run: Run, diagnosis: Diagnosis) -> AttemptStatus | None:
    """Return the attempt that follows that end of the run. None: it has ended for good."""
    if diagnosis.reason not in RETRIED_REASONS or run.attempt > run.job.spec.max_retries:
        return None
    codes = {pod.trainer_exit for pod in run.pods if pod.failure}
    initializers = filter(None, (failed_initializer(pod.document) for pod in run.pods))
    codes |= {each.exit_code for each in initializers}
    fatal = {ExitCode(code) for code in codes if code in set(ExitCode) and ExitCode(code).fatal}
    if fatal - _RETRIED_CODES - {ExitCode.RESTARTS, ExitCode.INTERRUPTED}:
        return None
    now = run.observed.now
    return AttemptStatus(
        number=run.attempt + 1,
        start_time=format_time(now + timedelta(seconds=_backoff_s(run.attempt))),
        run_start_time=format_time(now - timedelta(seconds=run.age_s)),
        last_failure=f"{diagnosis.reason}: {diagnosis.message}"[:MAX_FAILURE_CHARACTERS],
    )


def awaits_attempt(run: Run) -> bool:
    """Whether an attempt has failed and the next has not begun. Not if `maxRetries` was lowered in
    time: then the run has failed."""
    is_allowed = run.attempt <= 1 + run.job.spec.max_retries
    return bool(run.earlier_jobs) and (is_allowed or not run.has_ended)


def attempts_note(run: Run) -> str:
    """Note on the attempts of a run that failed for good. Empty: there was one."""
    made = max((view.attempt for view in run.jobs.values()), default=run.attempt)
    if made < run.attempt:
        return f"attempt {run.attempt} does not begin: maxRetries is {run.job.spec.max_retries}"
    return f"this was attempt {made}" if made > 1 else ""


def current_attempt(run: Run) -> AttemptStatus:
    """Return the current attempt by the status. If that was lost, it begins now."""
    with suppress(SpecError):
        return parse(AttemptStatus, run.status.get("attempt"), unknown=[])
    now = format_time(run.observed.now)
    return AttemptStatus(number=run.attempt, start_time=now, run_start_time=now)


def _backoff_s(failed_attempts: int) -> float:
    """Seconds from the end of the last of so many attempts to the next, as before pods of a Job."""
    return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failed_attempts - 1, 10))


def retrying(attempt: AttemptStatus, run: Run) -> Diagnosis:
    """Diagnose a run that waits for its next attempt."""
    of = 1 + max(run.job.spec.max_retries, attempt.number - 1)
    message = f"attempt {attempt.number} of {of} begins at {attempt.start_time}"
    before = f"attempt {attempt.number - 1} failed: {attempt.last_failure}"
    return Diagnosis(JobPhase.WAITING, Reason.RETRYING, f"{message}; {before}")


def obey_queue(run: Run) -> Iterator[Action]:
    """Do what Kueue wants of a run between two attempts. Its quota stays unless Kueue takes it
    back."""
    queue = run.queue
    if queue is None or queue.problem:
        return
    if queue.must_stop:
        # An attempt also fails while some of its pods still run.
        yield from halt_jobs(run.jobs.values())
    yield from scale_keeper(run)
    if queue.view is not None and queue.view.has_quota:
        yield from workload_actions(run)


def clear_attempt(run: Run) -> Iterator[Action]:
    """Delete what the next attempt makes again. The keeper stays, with the run's checkpoints."""
    yield CloseRun()  # the coordinator has asked these workers to end
    for view in run.earlier_jobs:
        yield Delete(Kind.JOB, view.name, view.uid)
    # What may change in mid-run acts on the next attempt, in workers and operator alike.
    yield Delete(Kind.CONFIG_MAP, names.run_name(run.job.key))
