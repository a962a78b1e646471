"""`dlion delete`: a job and all that belongs to it at this site, gone when the command returns."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from dlion_api.errors import AbsentError
from dlion_api.exit_codes import ExitCode
from dlion_cli.cluster_options import cluster_options, complete_names, wait_timeout
from dlion_cli.following import Gone, TimeUpError, follow
from dlion_cli.job_status import JobStatus

if TYPE_CHECKING:
    from dlion_cli.cluster_jobs import Document, Jobs


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME…", shell_complete=complete_names)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--no-wait", is_flag=True, help="Return as soon as the API server has agreed.")
@click.option("--ignore-not-found", is_flag=True, help="A job that is not there is none to delete.")
@wait_timeout
@cluster_options
def delete(
    jobs: Jobs,
    names: tuple[str, ...],
    yes: bool,
    no_wait: bool,
    ignore_not_found: bool,
    timeout_s: float | None,
) -> int:
    """Delete jobs: their workers, their keeper and the results that it keeps go with them.

    At this site only; `dlion fetch` first what is to stay. Asks at a terminal, and elsewhere wants
    --yes. Ctrl-C while waiting does not take it back.

    \b
    dlion delete cifar10
    dlion delete cifar10 --yes --timeout 60
    """
    found = _found(jobs, names, ignore_not_found=ignore_not_found)
    if found and not yes:
        _ask(jobs, [JobStatus(each).name for each in found])
    for each in found:
        job = JobStatus(each)
        jobs.delete(job.name, uid=job.uid)
        if no_wait:
            click.echo(f"dlionjob.dlion.dev/{job.name} is being deleted")
            continue
        left = _wait_until_gone(jobs, job, timeout_s)
        if left is not None:
            click.echo(_still_there(job.name, left, timeout_s), err=True)
            return ExitCode.DEADLINE
        click.echo(f"dlionjob.dlion.dev/{job.name} deleted")
    return ExitCode.OK


def _found(jobs: Jobs, names: tuple[str, ...], *, ignore_not_found: bool) -> list[Document]:
    found = []
    for name in dict.fromkeys(names):
        document = jobs.find(name) if ignore_not_found else jobs.get(name)
        if document is not None:
            found.append(document)
    return found


def _ask(jobs: Jobs, names: list[str]) -> None:
    """Raises: UsageError where nobody can be asked; Abort where the answer is no."""
    if not sys.stdin.isatty():
        raise click.UsageError("nobody can be asked here: give --yes to delete without a question")
    place = f"namespace {jobs.cluster.namespace}, context {jobs.cluster.context}"
    click.confirm(
        f"Delete {', '.join(names)} ({place}), with workers, keeper and kept results?", abort=True
    )


def _wait_until_gone(jobs: Jobs, job: JobStatus, timeout_s: float | None) -> Document | None:
    """None when it is gone; else the job as it still is."""
    last: Document = {}
    try:
        for found in follow(jobs, job.name, timeout_s=timeout_s):
            if isinstance(found, Gone) or JobStatus(found).uid != job.uid:
                return None
            last = found
    except AbsentError:
        return None
    except TimeUpError:
        return last
    return None


def _still_there(name: str, document: Document, timeout_s: float | None) -> str:
    finalizers = document.get("metadata", {}).get("finalizers") or []
    waits = f"; it waits for {', '.join(map(str, finalizers))}" if finalizers else ""
    return f"dlion: {name} is still there after {timeout_s:g} s{waits}. It goes on being deleted"
