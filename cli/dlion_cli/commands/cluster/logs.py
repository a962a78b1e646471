"""`dlion logs`: print the logs of a job's workers, each line with its worker's name.

The workers are a cluster's, or those of a run on this machine (`local_runs.run_logs`).
"""

from __future__ import annotations

import heapq
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import click

from dlion_api.cluster_names import TRAINER_CONTAINER
from dlion_api.errors import AbsentError, DeniedError, DLionError, SpecError, UnavailableError
from dlion_cli.cluster.cluster_jobs import Document, JobClient
from dlion_cli.cluster.cluster_options import connecting_options, contexts_option, name_argument
from dlion_cli.cluster.connection_flags import selects_cluster
from dlion_cli.cluster.contexts import Contexts
from dlion_cli.inputs.named_folder import local_folder
from dlion_cli.local_runs.kept_logs import kept_logs
from dlion_cli.local_runs.run_logs import WorkerLogs, print_logs
from dlion_cli.pod_streams.log_lines import LogLine, LogPrinter, LogSource, follow_lines, read_lines
from dlion_cli.pod_streams.log_sources import (
    LogSelector,
    log_source,
    log_sources,
    no_pods_error,
    workers_without_pods,
)
from dlion_cli.terminal.failures import message_of
from dlion_cli.views.job_status import JobStatus

_POLL_INTERVAL_S: Final = 2.0
MAX_NAMED: Final = 8
"""Maximum workers that a message names."""
_DRAIN_S: Final = 3.0
"""After the run's end, logs that bring no line for this long are abandoned."""
_JOIN_S: Final = 0.1


def logs_from_contexts(
    contexts: Contexts,
    name: str,
    follow: bool,
    tail: int | None,
    run_id: str | None,
    timestamps: bool,
    **selected: Any,
) -> int:
    """`logs` for several contexts; each context's name precedes the worker's."""
    if run_id is not None:
        raise click.UsageError("--run reads the keeper of one site: use --context")
    selector = LogSelector(**selected)
    printer = LogPrinter(timestamps=timestamps)
    if follow:
        contexts.query(
            lambda jobs: _follow(jobs, name, selector, tail, printer, prefix=_prefix(jobs))
        )
    else:
        streams_by_context = contexts.query(
            lambda jobs: [
                _record_denied(contexts, jobs, _lines(jobs, source, tail))
                for source in log_sources(jobs, JobStatus(jobs.get(name)), selector, _prefix(jobs))
            ]
        )
        _show(printer, (lines for streams in streams_by_context.values() for lines in streams))
    return contexts.report_errors()


def _record_denied(
    contexts: Contexts, jobs: JobClient, lines: Iterable[tuple[LogSource, LogLine]]
) -> Iterator[tuple[LogSource, LogLine]]:
    """The lines, with a denied permission recorded so that other contexts continue."""
    try:
        yield from lines
    except DeniedError as error:
        contexts.errors[jobs.cluster.context] = error


def _prefix(jobs: JobClient) -> str:
    return f"{jobs.cluster.context}/"


@click.command()
@name_argument()
@click.option("--group", metavar="NAME", help="Only workers of this group.")
@click.option(
    "--worker", type=click.IntRange(min=0), metavar="I", help="Only workers with index I."
)
@click.option(
    "-c", "--container", type=click.Choice(["trainer", "sidecar", "keeper"]), default="trainer",
    help="Container, or process of a local run; keeper: that of the site.",
)  # fmt: skip
@click.option("-f", "--follow", is_flag=True, help="Follow until the run ends, with new workers.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Last N lines of each log.")
@click.option(
    "--run", "run_id", metavar="RUN",
    help="Print the keeper's logs of this run, such as an earlier one.",
)  # fmt: skip
@click.option("--timestamps", is_flag=True, help="Print the time of each line.")
@contexts_option(logs_from_contexts)
@connecting_options
def logs(
    connect: Callable[[], JobClient],
    name: str,
    follow: bool,
    tail: int | None,
    run_id: str | None,
    timestamps: bool,
    **selected: Any,
) -> None:
    """Print the logs of job NAME's workers at this site, each line with its worker's name.

    Of trainers whose pods are gone it prints what the site's keeper has (docs/keeper.md); with
    --contexts it reads pods only. NAME may be the result folder of `dlion run`: a path with a
    slash, or an existing one where no option selects a cluster.

    \b
    dlion logs cifar10 --group small --worker 0 --container sidecar --tail 100
    dlion logs runs/digits-20260101-120000 --worker 0 --tail 20 -f
    """
    selector = LogSelector(**selected)
    printer = LogPrinter(timestamps=timestamps)
    if (folder := local_folder(name, is_of_cluster=selects_cluster())) is not None:
        if timestamps:
            raise click.UsageError("logs of local runs have no times: remove --timestamps")
        if selector.is_keeper:
            raise click.UsageError("a local run has no keeper: remove --container")
        if run_id is not None:
            raise click.UsageError("a result folder has one run: remove --run")
        logs = WorkerLogs(folder, selector.container, selector.group, selector.worker)
        print_logs(logs, printer, tail=tail, follow=follow)
        return
    jobs = connect()
    job = JobStatus(jobs.get(name))
    if run_id is not None:
        if selector.container != TRAINER_CONTAINER or follow or timestamps:
            raise click.UsageError(
                "--run reads trainers' logs of the past, without times: remove --container, "
                "--follow and --timestamps"
            )
        with kept_logs(jobs, job, run_id, selector) as kept:
            print_logs(kept, printer, tail=tail, follow=False)
        return
    pods = jobs.pods(name, selector.labels(job.run_id))
    if follow and (pods or job.outcome is None):
        _follow(jobs, name, selector, tail, printer)
        return
    if pods:
        sources = [log_source(pod, selector.container) for pod in pods]
        _show(printer, (_lines(jobs, source, tail) for source in sources))
    if selector.container == TRAINER_CONTAINER:
        _show_kept(jobs, job, selector, pods, printer, tail)
    elif not pods:
        raise no_pods_error(job, selector)


def _show_kept(
    jobs: JobClient,
    job: JobStatus,
    selector: LogSelector,
    pods: list[Document],
    printer: LogPrinter,
    tail: int | None,
) -> None:
    """Print what the keeper has of workers without a pod.

    Raises: UnavailableError if there is no pod, and nothing there.
    """
    missing = workers_without_pods(job, pods, selector)
    if pods and not missing:
        return
    whose = f"of {', '.join(missing[:MAX_NAMED])} " if pods and len(missing) <= MAX_NAMED else ""
    present = {log_source(pod, selector.container).label for pod in pods}
    try:
        with kept_logs(jobs, job, job.run_id, selector, present) as kept:
            click.echo(
                f"dlion: pods {whose}are gone: the keeper has the ends of their logs", err=True
            )
            print_logs(kept, printer, tail=tail, follow=False)
    except (DeniedError, UnavailableError) as error:
        if not pods:
            raise no_pods_error(job, selector, f". Of what is kept: {message_of(error)}") from error
        click.echo(f"dlion: pods {whose}are gone, and their logs: {message_of(error)}", err=True)


def _show(printer: LogPrinter, streams: Iterable[Iterable[tuple[LogSource, LogLine]]]) -> None:
    """Print all lines ordered by time; across sites the order depends on their clocks."""
    for source, line in heapq.merge(*streams, key=lambda item: item[1].instant):
        printer.show(source, line)


def _lines(
    jobs: JobClient, source: LogSource, tail: int | None
) -> Iterator[tuple[LogSource, LogLine]]:
    """One container's lines. An error is printed, so that other containers' lines still appear."""
    try:
        for line in read_lines(jobs.cluster, source, tail=tail):
            yield source, line
    except (SpecError, UnavailableError) as error:
        _print_error(source, error)


def _print_error(source: LogSource, error: SpecError | UnavailableError) -> None:
    """The container has not started, its node is unreachable, or its pod was deleted."""
    message = error.problems[0].message if isinstance(error, SpecError) else error
    click.echo(f"dlion: {source.label}: {message}", err=True)


def _follow(
    jobs: JobClient,
    name: str,
    selector: LogSelector,
    tail: int | None,
    printer: LogPrinter,
    prefix: str = "",
) -> None:
    """Follow until the run ends or the job is deleted. Raises: errors of the first request."""
    stop, broken = threading.Event(), queue.SimpleQueue[BaseException]()
    threads: dict[str, threading.Thread] = {}

    def read(source: LogSource, last: int | None) -> None:
        try:
            for line in follow_lines(jobs.cluster, source, tail=last, stop=stop, to_end=True):
                printer.show(source, line)
        except (SpecError, UnavailableError) as error:  # at the end: others' lines still appear
            _print_error(source, error)
        except (DLionError, OSError) as error:  # missing permission, or closed pipe
            broken.put(error)

    job = JobStatus(jobs.get(name))
    pods = _first_pods(jobs, job, selector)
    try:
        while True:
            for pod in pods:
                source = log_source(pod, selector.container, prefix)
                if source.pod not in threads:
                    threads[source.pod] = threading.Thread(
                        target=read, args=(source, tail), daemon=True, name=f"log {source.pod}"
                    )
                    threads[source.pod].start()
            if not broken.empty():
                raise broken.get()
            if job.outcome is not None:
                stop.set()
                _drain(threads, printer)
                if not broken.empty():
                    raise broken.get()
                return
            stop.wait(_POLL_INTERVAL_S)
            job, pods = _refreshed(jobs, selector, job, pods)
    except AbsentError:
        click.echo(f"dlion: {name} was deleted", err=True)
    finally:
        stop.set()


def _first_pods(jobs: JobClient, job: JobStatus, selector: LogSelector) -> list[Document]:
    """The selected pods; prints that they are awaited if there are none.

    Raises: UnavailableError if there are none and the run has ended.
    """
    pods = jobs.pods(job.name, selector.labels(job.run_id))
    if not pods:
        error = no_pods_error(job, selector)
        if job.outcome is not None:
            raise error
        click.echo(f"dlion: {error}. Waiting for them", err=True)
    return pods


def _refreshed(
    jobs: JobClient, selector: LogSelector, job: JobStatus, pods: list[Document]
) -> tuple[JobStatus, list[Document]]:
    """The job and its selected pods; the earlier ones while the API server does not answer."""
    try:
        now = JobStatus(jobs.get(job.name))
        return now, jobs.pods(now.name, selector.labels(now.run_id))
    except AbsentError:
        raise
    except UnavailableError:  # the log streams retry too
        return job, pods


def _drain(threads: dict[str, threading.Thread], printer: LogPrinter) -> None:
    """Wait for the rest of all logs; abandon threads that wait for a silent worker."""
    ended_s = time.monotonic()
    while any(thread.is_alive() for thread in threads.values()):
        if min(printer.idle_s(), time.monotonic() - ended_s) > _DRAIN_S:
            break
        for thread in threads.values():
            thread.join(_JOIN_S / len(threads))
    sys.stdout.flush()
