"""`dlion delete`: delete jobs and all their objects at this site."""

import sys
import time

import click

from dlion_api.errors import AbsentError, DLionError
from dlion_api.exit_codes import ExitCode
from dlion_cli.cluster.cluster_jobs import JobClient
from dlion_cli.cluster.cluster_options import cluster_options, names_argument, wait_timeout
from dlion_cli.terminal.failures import message_of
from dlion_cli.views.job_status import JobStatus
from dlion_cli.views.job_updates import WaitTimeoutError, follow


@click.command()
@names_argument(required=True)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--no-wait", is_flag=True, help="Return without waiting for the deletion.")
@click.option("--ignore-not-found", is_flag=True, help="A missing job counts as deleted.")
@wait_timeout
@cluster_options
def delete(
    jobs: JobClient,
    names: tuple[str, ...],
    yes: bool,
    no_wait: bool,
    ignore_not_found: bool,
    timeout_s: float | None,
) -> int:
    """Delete jobs at this site with their workers, their keeper and the results it stores.

    `dlion fetch` saves results first. Without a terminal --yes is required. --timeout is for all
    jobs together.

    \b
    dlion delete cifar10 --yes --timeout 60
    """
    read = jobs.find if ignore_not_found else jobs.get
    documents = [found for name in dict.fromkeys(names) if (found := read(name)) is not None]
    if documents and not yes:
        _ask(jobs, [JobStatus(each).name for each in documents])
    going, errors = _delete_all(jobs, [JobStatus(each) for each in documents])
    if no_wait:
        for job in going:
            click.echo(f"dlionjob.dlion.dev/{job.name} is being deleted")
    code = ExitCode.OK if no_wait else _wait_for_all(jobs, going, timeout_s)
    for error in errors[1:]:
        click.echo(f"dlion: {message_of(error)}", err=True)
    if errors:
        raise errors[0]
    return code


def _delete_all(
    jobs: JobClient, found: list[JobStatus]
) -> tuple[list[JobStatus], list[DLionError]]:
    """Request all deletions; return the jobs that are being deleted, and the errors of others."""
    going: list[JobStatus] = []
    errors: list[DLionError] = []
    for job in found:
        try:
            jobs.delete(job.name, uid=job.uid)
            going.append(job)
        except AbsentError:
            click.echo(f"dlionjob.dlion.dev/{job.name} deleted")  # since it was read
        except DLionError as error:
            errors.append(error)
    return going, errors


def _ask(jobs: JobClient, names: list[str]) -> None:
    """Raises: UsageError if there is no terminal, Abort if the user declines."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise click.UsageError("no terminal for confirmation: give --yes")
    place = f"namespace {jobs.cluster.namespace}, context {jobs.cluster.context}"
    click.confirm(
        f"Delete {', '.join(names)} ({place}), with workers, keeper and stored results?", abort=True
    )


def _wait_for_all(jobs: JobClient, going: list[JobStatus], timeout_s: float | None) -> int:
    """Wait until these jobs are deleted; return the exit code."""
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    code = ExitCode.OK
    for job in going:
        left_s = None if deadline_s is None else max(0.001, deadline_s - time.monotonic())
        last = _wait_until_gone(jobs, job, left_s)
        if last is None:
            click.echo(f"dlionjob.dlion.dev/{job.name} deleted")
        else:
            click.echo(_still_exists_message(last, timeout_s), err=True)
            code = ExitCode.DEADLINE
    return code


def _wait_until_gone(jobs: JobClient, job: JobStatus, timeout_s: float | None) -> JobStatus | None:
    """None once the job is deleted, else its last state."""
    last = job
    try:
        for update in follow(jobs, job.name, timeout_s=timeout_s):
            if update.uid != job.uid:
                return None
            last = update
    except AbsentError:
        return None
    except WaitTimeoutError:
        return last
    return None


def _still_exists_message(job: JobStatus, timeout_s: float | None) -> str:
    waits = f"; it waits for {', '.join(job.finalizers)}" if job.finalizers else ""
    return f"dlion: {job.name} still exists after {timeout_s:g} s{waits}. The deletion continues"
