"""`dlion get`: list a cluster's jobs, or show one in detail."""

import json
from datetime import UTC, datetime

import click
from rich.console import Console

from dlion_api.names import API_VERSION, KIND
from dlion_cli.cluster.cluster_jobs import Document, JobClient
from dlion_cli.cluster.cluster_options import cluster_options, contexts_option, names_argument
from dlion_cli.cluster.contexts import Contexts
from dlion_cli.cluster.documents import without_managed_fields
from dlion_cli.views.job_status import JobStatus
from dlion_cli.views.job_tables import list_table, one_job

MAX_EVENTS = 10
_PIPE_COLUMNS = 500
"""Width of output that is not a terminal, so that nothing is cut or folded."""


def get_from_contexts(
    contexts: Contexts, names: tuple[str, ...], everywhere: bool, output: str
) -> int:
    """`get` for several contexts: one table with a CONTEXT column, or a list with an item each."""
    _check_names(names, everywhere)
    results = contexts.query(lambda jobs: _find_jobs(jobs, names, everywhere))
    if output == "name":
        for name, documents in results.items():
            for each in documents:
                click.echo(f"{name} dlionjob.dlion.dev/{each['metadata']['name']}")
    elif output in ("json", "yaml"):
        errors = contexts.errors
        listed: list[Document] = [
            {"context": name, "items": results.get(name, []),
             "error": str(errors[name]) if name in errors else None}
            for name in contexts.names
        ]  # fmt: skip
        click.echo(_text(listed, output))
    else:
        rows = [(name, JobStatus(each)) for name, all_ in results.items() for each in all_]
        if rows:
            context_names, jobs = zip(*rows, strict=True)
            wide, now = output == "wide", datetime.now(UTC)
            table = list_table(jobs, now, wide=wide, everywhere=everywhere, contexts=context_names)
            output_console(wide=wide).print(table)
        elif results:
            click.echo(f"dlion: there are no {KIND}s in {', '.join(results)}", err=True)
    return contexts.report_errors()


@click.command()
@names_argument(required=False)
@click.option(
    "-A", "--all-namespaces", "everywhere", is_flag=True, help="List jobs in all namespaces."
)
@click.option(
    "-o", "--output", type=click.Choice(["table", "wide", "json", "yaml", "name"]), default="table"
)
@contexts_option(get_from_contexts)
@cluster_options
def get(jobs: JobClient, names: tuple[str, ...], everywhere: bool, output: str) -> None:
    """List the cluster's jobs, or show one with its sites, conditions and events.

    \b
    dlion get -o wide               # with run, ETA, loss, accuracy, links and reason
    dlion get cifar10 -o json | jq .status.trainerStatus
    """
    _check_names(names, everywhere)
    documents = _find_jobs(jobs, names, everywhere)
    if output == "name":
        for each in documents:
            click.echo(f"dlionjob.dlion.dev/{each['metadata']['name']}")
    elif output in ("json", "yaml"):
        listed = {"apiVersion": API_VERSION, "kind": f"{KIND}List", "metadata": {}}
        single = documents[0] if len(names) == 1 else {**listed, "items": documents}
        click.echo(_text(single, output))
    elif not documents:
        where = "any namespace" if everywhere else f"namespace {jobs.cluster.namespace}"
        click.echo(f"dlion: there are no {KIND}s in {where}", err=True)
    else:
        _show(jobs, documents, single=len(names) == 1, wide=output == "wide", everywhere=everywhere)


def _check_names(names: tuple[str, ...], everywhere: bool) -> None:
    if everywhere and names:
        raise click.UsageError("a name needs one namespace: remove -A or the name")


def _find_jobs(jobs: JobClient, names: tuple[str, ...], everywhere: bool) -> list[Document]:
    if names:
        documents = [jobs.get(name) for name in dict.fromkeys(names)]
    else:
        documents = jobs.list_jobs(everywhere=everywhere)["items"]
    return [without_managed_fields(each) for each in documents]


def _text(document: Document | list[Document], output: str) -> str:
    if output == "json":
        return json.dumps(document, indent=2, ensure_ascii=False)
    from dlion_environments.yaml_text import to_yaml  # few commands for clusters need it

    return to_yaml(document).rstrip("\n")


def _show(
    jobs: JobClient, documents: list[Document], *, single: bool, wide: bool, everywhere: bool
) -> None:
    console = output_console(wide=wide)
    now = datetime.now(UTC)
    statuses = [JobStatus(document) for document in documents]
    if not single or wide:
        console.print(list_table(statuses, now, wide=wide, everywhere=everywhere))
        return
    events = jobs.events(statuses[0].name, statuses[0].uid)[-MAX_EVENTS:]
    for part in one_job(statuses[0], events, now):
        console.print(part)


def output_console(*, wide: bool = False) -> Console:
    """A console as wide as the terminal, or wide enough for any line if output is a pipe.

    `wide`: as for a pipe, so that the terminal folds long lines, as those of `kubectl -o wide`.
    """
    console = Console(highlight=False)
    fits = console.is_terminal and not wide
    return console if fits else Console(highlight=False, width=_PIPE_COLUMNS)
