"""`dlion submit`: validate manifests, apply them to a cluster, and optionally wait for the end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dlion_api.errors import DLionError, ProgramError, SpecError
from dlion_api.exit_codes import ExitCode
from dlion_api.names import API_VERSION, KIND
from dlion_cli.cluster.cluster_jobs import Document, JobClient
from dlion_cli.cluster.cluster_options import connecting_options, wait_timeout
from dlion_cli.cluster.documents import without_managed_fields
from dlion_cli.cluster.submission import Manifest, Submission, submit_manifest, valid_manifest
from dlion_cli.inputs.manifests import read_documents, source_of
from dlion_cli.terminal import options
from dlion_cli.terminal.failures import exit_code_of, message_of
from dlion_cli.terminal.formatting import printable_lines
from dlion_cli.views.job_status import JobStatus
from dlion_environments.yaml_text import to_yaml


@click.command()
@click.argument("file")
@options.assignments("every document, e.g. runId=2")
@click.option("--wait", is_flag=True, help="Wait for the run's end; the exit code is its own.")
@click.option("--dry-run", is_flag=True, help="Validate at the API server; submit nothing.")
@click.option("--force-conflicts", is_flag=True, help="Take ownership of conflicting fields.")
@click.option(
    "-o", "--output", type=click.Choice(["text", "name", "json", "yaml"]), default="text",
    help="With --wait, json prints a line after each change.",
)  # fmt: skip
@wait_timeout
@connecting_options
def submit(
    connect: Callable[[], JobClient],
    file: str,
    assignments: tuple[str, ...],
    wait: bool,
    dry_run: bool,
    force_conflicts: bool,
    output: str,
    timeout_s: float | None,
) -> int:
    """Submit the jobs of manifest FILE to the cluster; `-` reads standard input.

    If a document is invalid (exit code 65) or its program is (67), nothing is sent. Submit a job of
    several sites at each of them. Unless trainer.image is set, a program beside the manifest goes
    with the modules and weights of its folder into a ConfigMap.

    \b
    dlion submit job.yaml --set runId=2 --wait      # a new run, watched to its end
    for site in plant-a plant-b; do dlion submit job.yaml --context $site; done
    """
    if wait and dry_run:
        raise click.UsageError("--dry-run and --wait exclude each other")
    given = click.get_current_context().params.get("namespace")
    manifests, invalid = _read_valid(file, assignments, given)
    if invalid:
        return invalid
    jobs = connect()
    shown = "" if wait and output == "json" else output
    submitted, stored, code = [], [], int(ExitCode.OK)
    for each in manifests:
        place = jobs.in_namespace(each.namespace or jobs.cluster.namespace)
        try:
            submission = submit_manifest(place, each, dry_run=dry_run, force=force_conflicts)
            _print_result(each, submission, dry_run=dry_run, output=shown)
            stored.append(without_managed_fields(submission.after))
            submitted.append((place, each.job.metadata.name))
        except DLionError as error:
            click.echo(f"dlion: {printable_lines(message_of(error))}", err=True)
            code = code or exit_code_of(error)
    if shown in ("json", "yaml"):
        _print_documents(stored, shown, is_list=len(manifests) > 1)
    if not wait:
        return code
    from dlion_cli.views.job_watch import watch_to_end  # with rich, which takes long

    for place, name in submitted:
        ended = watch_to_end(
            place, name, output="json" if output == "json" else "text", timeout_s=timeout_s
        )
        if ended == ExitCode.INTERRUPTED:
            return ended
        code = code or ended
    return code


def _read_valid(
    file: str, assignments: tuple[str, ...], given: str | None
) -> tuple[list[Manifest], ExitCode]:
    """All valid documents, and the exit code after printing the problems of the others."""
    source, texts = source_of(file), read_documents(file)
    manifests, codes = [], {ExitCode.OK}
    for number, text in enumerate(texts, start=1):
        name = f"{source}#{number}" if len(texts) > 1 else source
        try:
            manifests.append(valid_manifest(text, name, Path(file), assignments, given))
        except (SpecError, ProgramError) as error:
            click.echo(f"dlion: {printable_lines(str(error))}", err=True)
            codes.add(error.exit_code)
    return manifests, ExitCode.SPEC if ExitCode.SPEC in codes else max(codes)


def _print_documents(stored: list[Document], output: str, *, is_list: bool) -> None:
    """Print the stored jobs as one document: those of several manifests as a list."""
    if not stored and not is_list:
        return
    listed = {"apiVersion": API_VERSION, "kind": f"{KIND}List", "metadata": {}, "items": stored}
    document = listed if is_list else stored[0]
    text = json.dumps(document, indent=2) if output == "json" else to_yaml(document)
    click.echo(text.rstrip("\n"))


def _print_result(
    manifest: Manifest, submission: Submission, *, dry_run: bool, output: str
) -> None:
    name = manifest.job.metadata.name
    before, after = submission.before, submission.after
    if output == "name":
        click.echo(f"dlionjob.dlion.dev/{name}")
    elif output == "text":
        suffix = " (server dry run)" if dry_run else ""
        same = before is not None and _content(before) == _content(after)
        word = (
            "created"
            if before is None or submission.is_new
            else "unchanged"
            if same
            else "configured"
        )
        click.echo(f"dlionjob.dlion.dev/{name} {word}{suffix}")
    outcome = None if before is None else JobStatus(after).outcome
    if outcome is not None and output == "text":
        run_id = JobStatus(after).run_id
        click.echo(
            f"dlion: run {run_id} of {name} has ended ({outcome.type}). For a new run, give "
            "another ID: --set runId=…",
            err=True,
        )


def _content(document: Document) -> Any:
    """The part that a user sets. A dry run has no new resource version to compare."""
    metadata = document.get("metadata", {})
    kept = {k: metadata.get(k) for k in ("labels", "annotations", "finalizers")}
    return document.get("spec"), kept
