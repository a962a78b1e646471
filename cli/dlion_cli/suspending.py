"""`dlion suspend` and `dlion resume`: a job's workers stopped and kept, and started again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dlion_api.errors import AbsentError
from dlion_api.exit_codes import ExitCode
from dlion_api.status import ConditionType
from dlion_cli.cluster_options import cluster_options, complete_names, wait_timeout
from dlion_cli.following import Gone, TimeUpError, follow
from dlion_cli.job_status import JobStatus

if TYPE_CHECKING:
    from dlion_cli.cluster_jobs import Jobs

_names = click.argument(
    "names", nargs=-1, required=True, metavar="NAME…", shell_complete=complete_names
)
_wait = click.option("--wait", is_flag=True, help="Wait until the operator has done it.")


@click.command()
@_names
@_wait
@wait_timeout
@cluster_options
def suspend(jobs: Jobs, names: tuple[str, ...], wait: bool, timeout_s: float | None) -> int:
    """Stop the workers of the jobs and keep the jobs, with what they have trained.

    Workers save a checkpoint and end; `dlion resume` goes on from it. Of this site only: the others
    train on while they are enough (minSites). Suspending twice changes nothing.

    \b
    dlion suspend cifar10 --wait
    """
    return _change(jobs, names, True, wait=wait, timeout_s=timeout_s)


@click.command()
@_names
@_wait
@wait_timeout
@cluster_options
def resume(jobs: Jobs, names: tuple[str, ...], wait: bool, timeout_s: float | None) -> int:
    """Start the workers of suspended jobs again, from their checkpoint.

    \b
    dlion resume cifar10 --wait     # until they train
    """
    return _change(jobs, names, False, wait=wait, timeout_s=timeout_s)


def _change(
    jobs: Jobs, names: tuple[str, ...], suspended: bool, *, wait: bool, timeout_s: float | None
) -> int:
    for name in names:
        job = JobStatus(jobs.get(name))
        done = "suspended" if suspended else "resumed"
        if job.outcome is not None:
            click.echo(f"{name}: its run has ended ({job.outcome.type}); nothing is {done}")
            continue
        if job.is_suspended == suspended:
            click.echo(f"{name}: {'already' if suspended else 'not'} suspended; nothing changed")
        else:
            jobs.suspend(name, suspended)
            click.echo(f"{name}: {done}")
        if wait and not _wait_for(jobs, name, suspended, timeout_s):
            click.echo(f"dlion: {name} is not {done} within {timeout_s:g} s yet", err=True)
            return ExitCode.DEADLINE
    return ExitCode.OK


def _wait_for(jobs: Jobs, name: str, suspended: bool, timeout_s: float | None) -> bool:
    """Whether it came about in time. Raises: AbsentError where the job was deleted."""
    try:
        for found in follow(jobs, name, timeout_s=timeout_s):
            if isinstance(found, Gone):
                break
            job = JobStatus(found)
            if job.is_seen and (_is_done(job, suspended) or job.outcome is not None):
                return True
    except TimeUpError:
        return False
    raise AbsentError(f"DLionJob {name!r} was deleted meanwhile")


def _is_done(job: JobStatus, suspended: bool) -> bool:
    said = job.condition(ConditionType.SUSPENDED)
    is_suspended = said is not None and said.holds
    if suspended:
        return is_suspended
    ready = job.condition(ConditionType.READY)
    return not is_suspended and ready is not None and ready.holds
