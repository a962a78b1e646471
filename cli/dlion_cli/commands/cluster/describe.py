"""`dlion describe`: everything about one job, with what is wrong and what to do."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

import click
from rich.console import RenderableType
from rich.text import Text

from dlion_api.errors import DataError, DeniedError, UnavailableError
from dlion_cli.cluster.cluster_jobs import Document, JobClient
from dlion_cli.cluster.cluster_options import connecting_options, contexts_option, name_argument
from dlion_cli.cluster.connection_flags import selects_cluster
from dlion_cli.cluster.contexts import Contexts
from dlion_cli.cluster.documents import mapping_of, without_managed_fields
from dlion_cli.commands.cluster.get import output_console
from dlion_cli.commands.cluster.top import INTERVAL_S, LoadReader
from dlion_cli.findings.find_problems import find_problems, why_not_running
from dlion_cli.findings.job_problem import JobProblem, JobScope
from dlion_cli.findings.problem_table import problem_parts
from dlion_cli.findings.time_use import culprit_of, time_parts
from dlion_cli.inputs.named_folder import local_folder
from dlion_cli.terminal import options
from dlion_cli.terminal.failures import message_of
from dlion_cli.terminal.sent_bytes import kinds_text
from dlion_cli.terminal.table import summary_parts
from dlion_cli.views.event_table import events_table
from dlion_cli.views.job_status import JobStatus, text
from dlion_cli.views.job_tables import one_job
from dlion_cli.views.load_tables import load_tables
from dlion_cli.views.pod_status import pods_of_run, pods_table
from dlion_cli.views.worker_load import JobLoad
from dlion_results.summary.link_use import KINDS

MAX_EVENTS: Final = 20
MAX_LOADS: Final = 32
"""Workers whose load is read: if none answered, it would take 20 s."""


@dataclass(frozen=True)
class JobFacts:
    """What a cluster has about one job. Pods and events are None if they may not be read."""

    job: Document
    pods: list[Document] | None
    events: list[Document] | None
    notes: list[str]
    """Why something is missing."""
    now: datetime
    load: JobLoad | None = None
    """None if no worker trains, or it may not be read."""
    summary: dict[str, Any] | None = None
    """The keeper's figures of a run that has ended, if they can be read."""
    without_summary: str = ""
    """Why not, if it has ended."""
    cluster: str = ""
    """The cluster where MultiKueue runs the job's copy. Empty: none, or unknown."""

    @property
    def problems(self) -> list[JobProblem]:
        """What is wrong, worst first."""
        return find_problems(self.job, self.pods, self.events, self.now, self.load, self.cluster)

    def as_json(self) -> dict[str, Any]:
        """For `-o json`."""
        culprit, notes = culprit_of(JobStatus(self.job)), [*self.notes]
        if self.without_summary:
            notes.append(f"without figures of the run: {self.without_summary}")
        return {
            "job": self.job,
            "pods": self.pods,
            "events": self.events,
            "load": None if self.load is None else self.load.as_json(),
            "problems": [each.as_json() for each in self.problems],
            "culprit": None if culprit is None else culprit.as_json(),
            "notes": notes,
            "summary": self.summary,
        }


def describe_from_contexts(contexts: Contexts, name: str, output: str) -> int:
    """`describe` in several contexts: one section, or one item of a list, for each."""
    results = contexts.query(lambda jobs: read_facts(jobs, name))
    if output == "json":
        items = [
            {"context": context, "error": str(contexts.errors.get(context) or "") or None}
            | (results[context].as_json() if context in results else {})
            for context in contexts.names
        ]
        click.echo(json.dumps(items, indent=2, ensure_ascii=False))
        return contexts.report_errors()
    wide = output == "wide"
    console = output_console(wide=wide)
    for place, (context, facts) in enumerate(results.items()):
        if place:
            console.print()
        console.print(Text(f"CONTEXT {context}", style="bold reverse"))
        for part in describe_parts(facts, wide=wide):
            console.print(part)
    return contexts.report_errors()


@click.command()
@name_argument()
@options.wide_output
@contexts_option(describe_from_contexts)
@connecting_options
def describe(connect: Callable[[], JobClient], name: str, output: str) -> None:
    """Describe job NAME: problems and what to do, sites, conditions, load, pods and events.

    NAME may be a result folder: a path with a slash, or an existing one where no option selects a
    cluster. Then it shows how the run ended or how far it is, and the command that continues it.

    \b
    dlion describe runs/digits-20260101-120000
    dlion describe cifar10 -o json | jq -r '.problems[] | .message, .command'
    """
    if (folder := local_folder(name, is_of_cluster=selects_cluster())) is not None:
        from dlion_cli.findings.folder_description import describe_folder

        describe_folder(folder, output_console(wide=output == "wide"), output)
        return
    facts = read_facts(connect(), name)
    if output == "json":
        click.echo(json.dumps(facts.as_json(), indent=2, ensure_ascii=False))
        return
    wide = output == "wide"
    console = output_console(wide=wide)
    for part in describe_parts(facts, wide=wide):
        console.print(part)


def read_facts(jobs: JobClient, name: str) -> JobFacts:
    """The job, its run's pods and their events. Raises: as `JobClient.get`."""
    job = without_managed_fields(jobs.get(name))
    run_id = JobStatus(job).run_id
    notes: list[str] = []
    pods = _optional("pods", lambda: jobs.pods(name), notes)
    events = _optional("events", lambda: jobs.related_events(job, run_id).items, notes)
    if pods is not None:
        pods = [dict(pod.document) for pod in pods_of_run(pods, run_id)]
    status = JobStatus(job)
    load = None if pods is None else _load(jobs, status, pods, notes)
    cluster = _cluster_of_copy(jobs, status, notes)
    now = datetime.now(UTC)
    facts = JobFacts(job, _clean(pods), _clean(events), notes, now, load, cluster=cluster)
    if status.outcome is None or status.is_dispatched:
        return facts
    from dlion_cli.pod_streams.kept_records import kept_summary  # only ended runs need it

    try:
        return replace(facts, summary=kept_summary(jobs, status))
    except (DeniedError, UnavailableError) as error:
        return replace(facts, without_summary=message_of(error))


def _cluster_of_copy(jobs: JobClient, job: JobStatus, notes: list[str]) -> str:
    if not job.is_dispatched:
        return ""
    try:
        workload = jobs.dispatch_workload(job.name)
    except (DeniedError, UnavailableError) as error:
        notes.append(f"without the Workload: {message_of(error)}")
        return ""
    return text(mapping_of(workload.get("status")).get("clusterName"), "")


def _load(
    jobs: JobClient, job: JobStatus, pods: list[Document], notes: list[str]
) -> JobLoad | None:
    """The load of the run's running workers; None if there are none, or none is readable."""
    running = [
        pod
        for pod in pods_of_run(pods, job.run_id)
        if pod.phase == "Running" and pod.index is not None and not pod.deleted
    ]
    if not running or job.outcome is not None:
        return None
    if len(running) > MAX_LOADS:
        notes.append(f"load: of {MAX_LOADS} of {len(running)} workers; `dlion top` reads all")
    reader, chosen = LoadReader(job.name), running[:MAX_LOADS]
    try:
        reader.read_pods(jobs, job, chosen)
        time.sleep(INTERVAL_S)
        return reader.read_pods(jobs, job, chosen)
    except DeniedError as error:
        notes.append(f"without load: {message_of(error)}")
    except UnavailableError:
        pass  # no sidecar answers yet, which other problems explain
    return None


def _optional(
    what: str, query: Callable[[], list[Document]], notes: list[str]
) -> list[Document] | None:
    """The documents; None and a note if they cannot be read."""
    try:
        return query()
    except (DataError, DeniedError, UnavailableError) as error:
        notes.append(f"without {what}: {message_of(error)}")
        return None


def _clean(documents: list[Document] | None) -> list[Document] | None:
    return None if documents is None else [without_managed_fields(each) for each in documents]


def describe_parts(facts: JobFacts, *, wide: bool = False) -> list[RenderableType]:
    """The sections, from problems to events; `wide` adds columns, and the load of each worker."""
    job = JobStatus(facts.job)
    parts = problem_parts(facts.problems, facts.notes)
    parts += one_job(job, [], facts.now, wide=wide)
    if facts.summary is None:  # it has the same figures, of the whole run
        parts += time_parts(job)
    if facts.pods:
        pods = pods_of_run(facts.pods, job.run_id)
        scope = JobScope(job.name, job.namespace, facts.now)
        why = why_not_running(pods, facts.events, scope)
        parts += [pods_table(job, pods, why, facts.now), Text("")]
    elif facts.pods is not None:
        parts += [Text(f"Run {job.run_id} has no pods at this site."), Text("")]
    if wide and facts.load is not None:
        load, *_ = load_tables({"": facts.load}, wide=True)
        parts += [Text("LOAD", style="bold"), load, Text("")]
    parts += [*_links(facts.load), *_figures(facts)]
    if facts.events:
        hidden = len(facts.events) - MAX_EVENTS
        more = f" (`dlion events {job.name}` shows {hidden} more)" if hidden > 0 else ""
        parts.append(Text(f"EVENTS{more}", style="bold"))
        parts.append(events_table(facts.events[-MAX_EVENTS:], facts.now))
    return parts


def _links(load: JobLoad | None) -> list[RenderableType]:
    """Links of a running job: what this site's workers have sent, and where to."""
    if load is None or not load.sites:
        return []
    by_kind = {kind: sum(site.sent_bytes.get(kind, 0.0) for site in load.sites) for kind in KINDS}
    parts: list[RenderableType] = [Text("LINKS", style="bold"), *load_tables({"": load})[1:]]
    if any(site.sent_bytes for site in load.sites):
        parts.append(Text(f"Bytes on links since the sidecars started: {kinds_text(by_kind)}"))
    return [*parts, Text("")]


def _figures(facts: JobFacts) -> list[RenderableType]:
    """Figures of an ended run, or why there are none, and whether they last."""
    parts: list[RenderableType] = []
    if facts.without_summary:
        parts.append(Text(f"Without figures of the run: {facts.without_summary}", style="yellow"))
    elif facts.summary is not None:
        parts += summary_parts(facts.summary, output_console().width)
    if not parts:
        return []
    from dlion_cli.pod_streams.keeper_files import is_lost_with_pod

    if any(is_lost_with_pod(pod) for pod in facts.pods or ()):
        name = JobStatus(facts.job).name
        text = (
            "Figures, logs and model are lost with the keeper's pod: this site's operator has no "
            f"keeper.size. `dlion fetch {name} --all` saves them"
        )
        parts.append(Text(text, style="yellow"))
    return [*parts, Text("")]
