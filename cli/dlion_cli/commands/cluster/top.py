"""`dlion top`: the load of a job's workers and links, from their sidecars' metrics."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Final, NoReturn

import click
from rich.console import Console, Group, RenderableType
from rich.text import Text

from dlion_api import cluster_names
from dlion_api.errors import DataError, DeniedError, DLionError, UnavailableError
from dlion_api.exit_codes import ExitCode
from dlion_cli.cluster.cluster_jobs import JobClient
from dlion_cli.cluster.cluster_options import cluster_options, contexts_option, name_argument
from dlion_cli.cluster.contexts import Contexts
from dlion_cli.cluster.worker_metrics import WorkerMetrics, read_metrics
from dlion_cli.commands.cluster.get import output_console
from dlion_cli.terminal import options
from dlion_cli.terminal.formatting import printable
from dlion_cli.terminal.interruption import take_interrupt
from dlion_cli.terminal.plain_table import FoldedLines
from dlion_cli.views.job_status import JobStatus
from dlion_cli.views.load_tables import load_tables
from dlion_cli.views.pod_status import PodStatus, pods_of_run, worker_ranks
from dlion_cli.views.terminal_view import TerminalView
from dlion_cli.views.worker_load import JobLoad, WorkerLoad, site_loads, worker_load

INTERVAL_S: Final = 2.0
"""Between two readings, of which rates are the difference."""
READ_WITHIN_S: Final = 5.0
_THREADS: Final = 16

Reading = tuple[dict[str, JobLoad], str]
"""The load by context (empty name: the only one), and what failed."""


class LoadReader:
    """Reads the metrics of a job's workers again and again, in one cluster."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._before: dict[str, WorkerMetrics] = {}
        """The last reading of each pod."""

    def read(self, jobs: JobClient) -> JobLoad:
        """The load now; rates are since the last call.

        Raises: DeniedError without the right to `pods` or `pods/proxy`; UnavailableError if the
        run has no workers here, or none answers.
        """
        job = JobStatus(jobs.get(self._name))
        labels = {cluster_names.COMPONENT_LABEL: cluster_names.WORKER}
        pods = [
            pod
            for pod in pods_of_run(jobs.pods(job.name, labels), job.run_id)
            if not pod.is_finished and pod.index is not None
        ]
        if not pods:
            raise UnavailableError(
                f"run {job.run_id} of {job.name} has no workers at this site; its state: "
                f"{job.state}. `dlion describe {job.name}` shows why"
            )
        return self.read_pods(jobs, job, pods)

    def read_pods(self, jobs: JobClient, job: JobStatus, pods: Sequence[PodStatus]) -> JobLoad:
        """The load of these workers of the job. Raises: as `read`."""
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="top") as pool:
            readings = list(pool.map(lambda pod: _read(jobs, pod), pods))
        now = {
            pod.name: reading
            for pod, reading in zip(pods, readings, strict=True)
            if isinstance(reading, WorkerMetrics)
        }
        failures = [each for each in readings if isinstance(each, DLionError)]
        if failures and not now:
            raise UnavailableError(f"no worker's sidecar answers: {failures[0]}")
        ranks = worker_ranks(job.document)
        rows = [
            self._row(pod, reading, ranks.get((pod.site, pod.group, pod.index or 0)))
            for pod, reading in zip(pods, readings, strict=True)
        ]
        before, self._before = self._before, now
        return JobLoad(rows, site_loads(before, now))

    def _row(self, pod: PodStatus, reading: WorkerMetrics | DLionError, rank: int | None
             ) -> WorkerLoad:  # fmt: skip
        if isinstance(reading, DLionError):
            problem = printable(f"{pod.state}: {reading}")
            return WorkerLoad(pod.name, pod.worker, rank, problem=problem)
        return worker_load(pod.name, pod.worker, rank, self._before.get(pod.name), reading)


def _read(jobs: JobClient, pod: PodStatus) -> WorkerMetrics | DLionError:
    """One pod's metrics, or why there are none. Raises: DeniedError."""
    if pod.phase != "Running":
        return UnavailableError("the pod does not run")
    try:
        return read_metrics(jobs.cluster, pod.name, READ_WITHIN_S)
    except DeniedError:
        raise
    except (UnavailableError, DataError) as error:
        return error
    except DLionError as error:  # what listens there refuses the request
        return UnavailableError(str(error))


class LoadView(TerminalView):
    """The tables, redrawn in place on a terminal."""

    def __init__(self, console: Console, name: str, *, wide: bool) -> None:
        self._name, self._wide = name, wide
        self._loads: Mapping[str, JobLoad] = {}
        self._trouble = ""
        self._at = ""
        super().__init__(console)

    def update(self, loads: Mapping[str, JobLoad], trouble: str) -> None:
        """Show these loads; `trouble` replaces the last message."""
        self._loads, self._trouble = loads or self._loads, trouble
        self._at = datetime.now(UTC).strftime("%H:%M:%SZ")
        if not self._console.is_terminal:
            self._console.print(self.render())

    def render(self) -> RenderableType:
        """The view now."""
        if not self._loads and not self._trouble:
            return Text(f"{self._name}: reading metrics")
        parts: list[RenderableType] = [Text(f"{self._name}  {self._at}", style="bold")]
        for table in load_tables(self._loads, wide=self._wide) if self._loads else ():
            parts += [FoldedLines(table) if self._wide else table, Text("")]
        if self._trouble:
            parts.append(Text(self._trouble, style="bold yellow"))
        return Group(*parts)


def top_of_contexts(contexts: Contexts, name: str, watch: bool, output: str) -> int:
    """`top` in several contexts: tables with a CONTEXT column, or a list with an item each."""
    readers = {context: LoadReader(name) for context in contexts.names}
    unusable = dict(contexts.errors)

    def read() -> Reading:
        contexts.errors = dict(unusable)
        loads = contexts.query(lambda jobs: readers[jobs.cluster.context].read(jobs))
        problems = (f"{context}: {error}" for context, error in contexts.errors.items())
        return loads, "\n".join(problems)

    code = _show(name, read, watch=watch, output=output)
    return code or contexts.report_errors()


@click.command()
@name_argument()
@click.option("-w", "--watch", is_flag=True, help="Refresh every 2 seconds until Ctrl-C.")
@options.wide_output
@contexts_option(top_of_contexts)
@cluster_options
def top(jobs: JobClient, name: str, watch: bool, output: str) -> int:
    """Show the load of job NAME's workers at this site and of their links.

    Reads each sidecar's metrics (docs/metrics.md) twice within 2 seconds, which needs the right
    `get` on `pods/proxy`. docs/cluster-commands.md has the columns; `-o wide` shows all.

    \b
    dlion top cifar10 -o json | jq '.workers[] | {worker, samplesPerSecond}'
    """
    reader = LoadReader(name)

    def read() -> Reading:
        return {"": reader.read(jobs)}, ""

    return _show(name, read, watch=watch, output=output)


def _show(name: str, read: Callable[[], Reading], *, watch: bool, output: str) -> int:
    """Read twice and show the result; with `watch`, again and again until Ctrl-C.

    Raises: as `LoadReader.read`; with `watch` only at the first reading.
    """
    loads, _ = read()
    if not loads:
        return ExitCode.OK  # the caller reports each context's error
    try:
        if watch:
            _watch(LoadView(output_console(), name, wide=output == "wide"), read, output)
        time.sleep(INTERVAL_S)
        loads, _ = read()
    except KeyboardInterrupt as interrupt:
        return take_interrupt(interrupt)
    if output == "json":
        click.echo(json.dumps(_document(loads), indent=2, ensure_ascii=False))
        return ExitCode.OK
    console = output_console(wide=output == "wide")
    for place, table in enumerate(load_tables(loads, wide=output == "wide")):
        if place:
            console.print()
        console.print(table)
    return ExitCode.OK


def _watch(view: LoadView, read: Callable[[], Reading], output: str) -> NoReturn:
    """Show each reading. Raises: KeyboardInterrupt; DeniedError."""
    with view if output != "json" else nullcontext():
        while True:
            time.sleep(INTERVAL_S)
            try:
                loads, trouble = read()
            except UnavailableError as error:
                loads, trouble = {}, f"retrying: {error}"
            if output != "json":
                view.update(loads, trouble)
                continue
            if trouble:
                click.echo(f"dlion: {trouble}", err=True)
            if loads:
                click.echo(json.dumps(_document(loads), ensure_ascii=False))
                sys.stdout.flush()


def _document(loads: Mapping[str, JobLoad]) -> object:
    """One load, or a list with each context's."""
    if list(loads) == [""]:
        return loads[""].as_json()
    return [{"context": context, **load.as_json()} for context, load in loads.items()]
