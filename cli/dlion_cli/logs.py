"""`dlion logs`: what the workers of a job say, all together, each line with its worker's name."""

from __future__ import annotations

import heapq
import queue
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import click

from dlion_api import cluster_names
from dlion_api.errors import AbsentError, DeniedError, DLionError, SpecError, UnavailableError
from dlion_cli.cluster_options import cluster_options, contexts_option, name_argument
from dlion_cli.figures import printable
from dlion_cli.job_status import JobStatus
from dlion_cli.log_lines import Line, Source, lines_for_ever, lines_now

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dlion_cli.cluster_jobs import Document, Jobs
    from dlion_cli.contexts import Contexts

_LOOK_EVERY_S: Final = 2.0
_LAST_LINES_S: Final = 3.0
"""After the run's end, for what is on its way."""
_COLOURS: Final = ("cyan", "green", "yellow", "magenta", "blue", "bright_red")


@dataclass(frozen=True)
class Wanted:
    """Whose log, as the options name it."""

    container: str
    group: str | None
    worker: int | None

    def check(self) -> None:
        """Raises: UsageError where there can be no such thing."""
        is_keeper = self.container == cluster_names.KEEPER_CONTAINER
        if is_keeper and (self.group or self.worker is not None):
            raise click.UsageError("a site has one keeper: leave --group and --worker away")

    def labels(self, run_id: str) -> dict[str, str]:
        """What those pods bear."""
        is_keeper = self.container == cluster_names.KEEPER_CONTAINER
        component = cluster_names.KEEPER if is_keeper else cluster_names.WORKER
        found = {
            cluster_names.RUN_LABEL: run_id,
            cluster_names.COMPONENT_LABEL: component,
        }
        if self.group is not None:
            found[cluster_names.GROUP_LABEL] = self.group
        if self.worker is not None:
            found[cluster_names.INDEX_LABEL] = str(self.worker)
        return found


def joined_logs(
    contexts: Contexts,
    name: str,
    group: str | None,
    worker: int | None,
    container: str,
    follow: bool,
    tail: int | None,
    timestamps: bool,
) -> int:
    """`logs` of several contexts, whose names stand before the workers'."""
    wanted = Wanted(container, group, worker)
    wanted.check()
    printer = Printer(timestamps=timestamps)
    if follow:
        contexts.ask(lambda jobs: _follow(jobs, name, wanted, tail, printer, prefix=_prefix(jobs)))
    else:
        found = contexts.ask(
            lambda jobs: [
                _noted(contexts, jobs, _lines(jobs, source, tail))
                for source in _sources(jobs, JobStatus(jobs.get(name)), wanted, _prefix(jobs))
            ]
        )
        _show(printer, (lines for streams in found.values() for lines in streams))
    return contexts.end()


def _noted(
    contexts: Contexts, jobs: Jobs, lines: Iterable[tuple[Source, Line]]
) -> Iterator[tuple[Source, Line]]:
    """Those lines; a right that is missing for them is noted, and ends no other context's."""
    try:
        yield from lines
    except DeniedError as error:
        contexts.errors[jobs.cluster.context] = error


def _prefix(jobs: Jobs) -> str:
    return f"{jobs.cluster.context}/"


@click.command()
@name_argument()
@click.option("--group", metavar="NAME", help="Of this group's workers only.")
@click.option(
    "--worker", type=click.IntRange(min=0), metavar="I", help="Of the workers numbered I."
)
@click.option(
    "-c", "--container", type=click.Choice(["trainer", "sidecar", "keeper"]), default="trainer",
    help="keeper: the site's keeper, instead of workers.",
)  # fmt: skip
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines until the run has ended.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="The last N lines of each.")
@click.option("--timestamps", is_flag=True, help="Begin each line with its time.")
@contexts_option(joined_logs)
@cluster_options
def logs(
    jobs: Jobs,
    name: str,
    group: str | None,
    worker: int | None,
    container: str,
    follow: bool,
    tail: int | None,
    timestamps: bool,
) -> int:
    """Show what the workers of job NAME at this site say, each line with its worker before it.

    Of the run that the manifest names. -f takes up workers that come later or are started again,
    and ends with the run; Ctrl-C ends it at any time and leaves the job running.

    \b
    dlion logs cifar10 -f
    dlion logs cifar10 --group small --worker 0 --container sidecar --tail 100
    dlion logs cifar10 -c keeper
    dlion logs cifar10 -f --contexts plant-a,plant-b
    """
    wanted = Wanted(container, group, worker)
    wanted.check()
    printer = Printer(timestamps=timestamps)
    if follow:
        _follow(jobs, name, wanted, tail, printer)
        return 0
    sources = _sources(jobs, JobStatus(jobs.get(name)), wanted)
    _show(printer, (_lines(jobs, source, tail) for source in sources))
    return 0


def _sources(jobs: Jobs, job: JobStatus, wanted: Wanted, prefix: str = "") -> list[Source]:
    """Raises: UnavailableError where there are none."""
    return [_source(jobs, pod, wanted.container, prefix) for pod in _pods(jobs, job, wanted)]


def _show(printer: Printer, streams: Iterable[Iterable[tuple[Source, Line]]]) -> None:
    """All lines in the order of their times; across sites that is as good as their clocks."""
    for source, line in heapq.merge(*streams, key=lambda found: found[1].moment):
        printer.show(source, line)


def _lines(jobs: Jobs, source: Source, tail: int | None) -> Iterator[tuple[Source, Line]]:
    """One container's lines; what keeps them away is told, and keeps away no other's."""
    try:
        for line in lines_now(jobs.cluster, source, tail=tail):
            yield source, line
    except SpecError as error:  # the container has not started
        click.echo(f"dlion: {source.label}: {error.problems[0].message}", err=True)
    except UnavailableError as error:  # its node is away, or the pod has just gone
        click.echo(f"dlion: {source.label}: {error}", err=True)


def _pods(jobs: Jobs, job: JobStatus, wanted: Wanted) -> list[Document]:
    """Raises: UnavailableError where there are none."""
    found = jobs.pods(job.name, wanted.labels(job.run_id))
    if not found:
        what = "keeper" if wanted.container == cluster_names.KEEPER_CONTAINER else "workers"
        which = "" if wanted.group is None else f" of group {wanted.group}"
        which += "" if wanted.worker is None else f" with number {wanted.worker}"
        raise UnavailableError(
            f"run {job.run_id} of {job.name} has no pods of {what}{which} at this site; its state: "
            f"{job.state}. `dlion get {job.name}` says more"
        )
    return found


def _source(jobs: Jobs, pod: Document, container: str, prefix: str = "") -> Source:
    labels = pod["metadata"].get("labels") or {}
    group, index = labels.get(cluster_names.GROUP_LABEL), labels.get(cluster_names.INDEX_LABEL)
    label = f"{group}-{index}" if group and index else str(pod["metadata"]["name"])
    if container == cluster_names.KEEPER_CONTAINER:
        label = cluster_names.KEEPER
    name = str(pod["metadata"]["name"])
    return Source(jobs.cluster.namespace, name, container, printable(prefix + label))


class Printer:
    """Writes lines of many threads whole, each with its source's name in a colour of its own."""

    def __init__(self, *, timestamps: bool) -> None:
        self._timestamps = timestamps
        self._lock = threading.Lock()
        self._colours: dict[str, str] = {}
        self._width = 0

    def show(self, source: Source, line: Line) -> None:
        """One line. Terminal commands in it are shown, not obeyed."""
        with self._lock:
            colour = self._colours.setdefault(
                source.label, _COLOURS[len(self._colours) % len(_COLOURS)]
            )
            self._width = max(self._width, len(source.label))
            before = click.style(f"{source.label:<{self._width}} | ", fg=colour)
            time = f"{line.time} " if self._timestamps else ""
            text = printable(line.text.replace("\t", "    "))
            click.echo(f"{before}{time}{text}")


def _follow(
    jobs: Jobs, name: str, wanted: Wanted, tail: int | None, printer: Printer, prefix: str = ""
) -> None:
    """Until the run has ended, the job is gone, or Ctrl-C. Raises: what the first look raises."""
    stop, broken = threading.Event(), queue.SimpleQueue[BaseException]()
    threads: dict[str, threading.Thread] = {}

    def read(source: Source, last: int | None) -> None:
        try:
            for line in lines_for_ever(jobs.cluster, source, tail=last, stop=stop):
                printer.show(source, line)
        except (DLionError, OSError) as error:  # a right that is missing; a closed pipe
            broken.put(error)

    job = JobStatus(jobs.get(name))
    _pods_or_wait(jobs, job, wanted)
    try:
        while True:
            for pod in jobs.pods(name, wanted.labels(job.run_id)):
                source = _source(jobs, pod, wanted.container, prefix)
                if source.pod not in threads:
                    threads[source.pod] = threading.Thread(
                        target=read, args=(source, tail), daemon=True, name=f"log {source.pod}"
                    )
                    threads[source.pod].start()
            if not broken.empty():
                raise broken.get()
            if job.outcome is not None:
                _let_arrive(threads)
                return
            stop.wait(_LOOK_EVERY_S)
            job = _looked_again(jobs, name, job)
    except AbsentError:
        click.echo(f"dlion: {name} was deleted", err=True)
    finally:
        stop.set()


def _pods_or_wait(jobs: Jobs, job: JobStatus, wanted: Wanted) -> None:
    """Says that workers are waited for where there are none yet; refuses where none will come."""
    try:
        _pods(jobs, job, wanted)
    except UnavailableError as error:
        if job.outcome is not None:
            raise
        click.echo(f"dlion: {error}. Waiting for them", err=True)


def _looked_again(jobs: Jobs, name: str, before: JobStatus) -> JobStatus:
    try:
        return JobStatus(jobs.get(name))
    except AbsentError:
        raise
    except UnavailableError:  # the cluster is away: the streams try again, too
        return before


def _let_arrive(threads: dict[str, threading.Thread]) -> None:
    """Lets what is on its way arrive; a thread that waits for a silent worker is left behind."""
    for thread in threads.values():
        thread.join(_LAST_LINES_S / max(1, len(threads)))
    sys.stdout.flush()
