"""`dlion suspend` and `dlion resume`: stop a job's workers and keep the job; start them again."""

import time

import click

from dlion_api.errors import AbsentError
from dlion_api.exit_codes import ExitCode
from dlion_api.status_names import ConditionType
from dlion_cli.cluster.cluster_jobs import JobClient
from dlion_cli.cluster.cluster_options import cluster_options, names_argument, wait_timeout
from dlion_cli.views.job_status import JobStatus
from dlion_cli.views.job_updates import WaitTimeoutError, follow

wait_option = click.option("--wait", is_flag=True, help="Wait until the operator has completed it.")


@click.command()
@names_argument(required=True)
@wait_option
@wait_timeout
@cluster_options
def suspend(jobs: JobClient, names: tuple[str, ...], wait: bool, timeout_s: float | None) -> int:
    """Stop the workers of jobs, which save a checkpoint, and keep the jobs with their results.

    Other sites continue while minSites of them remain. If a run ends during --wait, the exit code
    is that of `dlion watch`. --timeout is for all jobs together.

    \b
    dlion suspend cifar10 --wait
    """
    return _change(jobs, names, True, wait=wait, timeout_s=timeout_s)


@click.command()
@names_argument(required=True)
@wait_option
@wait_timeout
@cluster_options
def resume(jobs: JobClient, names: tuple[str, ...], wait: bool, timeout_s: float | None) -> int:
    """Restart the workers of suspended jobs from their checkpoint.

    If a run ends during --wait, the exit code is that of `dlion watch`. --timeout is for all jobs
    together.

    \b
    dlion resume cifar10 --wait     # until they train
    """
    return _change(jobs, names, False, wait=wait, timeout_s=timeout_s)


def _change(
    jobs: JobClient, names: tuple[str, ...], suspended: bool, *, wait: bool, timeout_s: float | None
) -> int:
    done = "suspended" if suspended else "resumed"
    changed = []
    for job in [JobStatus(jobs.get(name)) for name in dict.fromkeys(names)]:
        name = job.name
        if job.outcome is not None:
            click.echo(f"{name}: its run has ended ({job.outcome.type}); nothing is {done}")
            continue
        if job.is_suspended == suspended:
            click.echo(f"{name}: {'already' if suspended else 'not'} suspended; nothing changed")
        else:
            jobs.suspend(name, suspended)
            click.echo(f"{name}: {done}")
        changed.append(name)
    if not wait:
        return ExitCode.OK
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    first_code = int(ExitCode.OK)
    for name in changed:  # once all are changed
        left_s = None if deadline_s is None else max(0.001, deadline_s - time.monotonic())
        code = _wait_until(jobs, name, suspended, left_s)
        if code is None:
            click.echo(f"dlion: {name} was not {done} within {timeout_s:g} s", err=True)
            code = ExitCode.DEADLINE
        first_code = first_code or code
    return first_code


def _wait_until(jobs: JobClient, name: str, suspended: bool, timeout_s: float | None) -> int | None:
    """Wait until it is done, or the run has ended. Return the exit code; None: the time is over.
    Raises: AbsentError if the job was deleted."""
    try:
        for job in follow(jobs, name, timeout_s=timeout_s):
            if job.is_observed and job.outcome is not None:
                from dlion_cli.views.job_watch import print_outcome  # it takes rich's import

                return print_outcome(name, job.outcome)
            if job.is_observed and _is_done(job, suspended):
                return ExitCode.OK
    except WaitTimeoutError:
        return None
    raise AbsentError(f"DLionJob {name!r} was deleted while waiting")


def _is_done(job: JobStatus, suspended: bool) -> bool:
    condition = job.condition(ConditionType.SUSPENDED)
    is_suspended = condition is not None and condition.is_true
    if suspended:
        return is_suspended
    ready = job.condition(ConditionType.READY)
    return not is_suspended and ready is not None and ready.is_true
