"""`dlion get`: jobs of a cluster as a table or as documents, or one of them with all it says."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
import yaml
from rich.console import Console

from dlion_api.names import API_VERSION, KIND
from dlion_cli.cluster_options import cluster_options, complete_names, contexts_option
from dlion_cli.job_status import JobStatus
from dlion_cli.job_tables import list_table, one_job

if TYPE_CHECKING:
    from dlion_cli.cluster_jobs import Document, Jobs
    from dlion_cli.contexts import Contexts

MOST_EVENTS = 10
_PIPE_COLUMNS = 500
"""Where the output is no terminal nothing is cut or folded."""


def joined_get(contexts: Contexts, names: tuple[str, ...], everywhere: bool, output: str) -> int:
    """`get` of several contexts: one table with a column for them, or a list with an item each."""
    _check_names(names, everywhere)
    found = contexts.ask(lambda jobs: _found(jobs, names, everywhere))
    if output == "name":
        for name, documents in found.items():
            for each in documents:
                click.echo(f"{name} dlionjob.dlion.dev/{each['metadata']['name']}")
    elif output in ("json", "yaml"):
        errors = contexts.errors
        listed: list[Document] = [
            {"context": name, "items": found.get(name, []),
             "error": str(errors[name]) if name in errors else None}
            for name in contexts.names
        ]  # fmt: skip
        click.echo(_text(listed, output))
    else:
        rows = [(name, JobStatus(each)) for name, all_ in found.items() for each in all_]
        if rows:
            whose, jobs = zip(*rows, strict=True)
            wide, now = output == "wide", datetime.now(UTC)
            table = list_table(jobs, now, wide=wide, everywhere=everywhere, contexts=whose)
            output_console().print(table)
        elif found:
            click.echo(f"dlion: there are no {KIND}s in {', '.join(found)}", err=True)
    return contexts.end()


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME…]", shell_complete=complete_names)
@click.option("-A", "--all-namespaces", "everywhere", is_flag=True, help="Of all namespaces.")
@click.option(
    "-o", "--output", type=click.Choice(["table", "wide", "json", "yaml", "name"]), default="table"
)
@contexts_option(joined_get)
@cluster_options
def get(jobs: Jobs, names: tuple[str, ...], everywhere: bool, output: str) -> int:
    """List the cluster's jobs, or show one with its sites, conditions and events.

    The columns are those of `kubectl get dlionjob`; `-o wide` adds run, ETA, loss, accuracy,
    links and why the state is what it is.

    \b
    dlion get                       # jobs of the context's namespace
    dlion get -A                    # of all namespaces
    dlion get cifar10               # everything about one job
    dlion get cifar10 --contexts plant-a,plant-b,plant-c
    dlion get cifar10 -o json | jq .status.trainerStatus
    """
    _check_names(names, everywhere)
    documents = _found(jobs, names, everywhere)
    if output == "name":
        for each in documents:
            click.echo(f"dlionjob.dlion.dev/{each['metadata']['name']}")
    elif output in ("json", "yaml"):
        click.echo(_text(documents[0] if len(names) == 1 else _list(documents), output))
    elif not documents:
        where = "any namespace" if everywhere else f"namespace {jobs.cluster.namespace}"
        click.echo(f"dlion: there are no {KIND}s in {where}", err=True)
    else:
        _show(jobs, documents, single=len(names) == 1, wide=output == "wide", everywhere=everywhere)
    return 0


def _check_names(names: tuple[str, ...], everywhere: bool) -> None:
    if everywhere and names:
        raise click.UsageError("a job is named within one namespace: leave -A or the name away")


def _found(jobs: Jobs, names: tuple[str, ...], everywhere: bool) -> list[Document]:
    if names:
        return [jobs.get(name) for name in dict.fromkeys(names)]
    found: list[Document] = jobs.listed(everywhere=everywhere)["items"]
    return found


def _list(documents: list[Document]) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": f"{KIND}List", "metadata": {}, "items": documents}


def _text(document: Document | list[Document], output: str) -> str:
    _without_managed_fields(document)
    if output == "json":
        return json.dumps(document, indent=2, ensure_ascii=False)
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True).rstrip("\n")


def _without_managed_fields(document: Document | list[Document]) -> None:
    """As kubectl, which leaves them out too: they are for machines."""
    for whole in document if isinstance(document, list) else [document]:
        for each in whole.get("items", [whole]):
            each.get("metadata", {}).pop("managedFields", None)


def _show(
    jobs: Jobs, documents: list[Document], *, single: bool, wide: bool, everywhere: bool
) -> None:
    console = output_console()
    now = datetime.now(UTC)
    found = [JobStatus(document) for document in documents]
    if not single or wide:
        console.print(list_table(found, now, wide=wide, everywhere=everywhere))
        return
    events = jobs.events(found[0].name)[-MOST_EVENTS:]
    for part in one_job(found[0], events, now):
        console.print(part)


def output_console() -> Console:
    """The terminal; or, for a pipe, one so wide that nothing is cut."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_COLUMNS)
