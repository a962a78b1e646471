"""`dlion submit`: validate manifests, apply them to a cluster, and optionally wait for the end."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click
import yaml

from dlion_api.errors import DLionError, Problem, SpecError
from dlion_api.exit_codes import ExitCode
from dlion_api.spec import Job, Metadata, load_job
from dlion_cli.cluster.cluster_jobs import Document, JobClient
from dlion_cli.cluster.cluster_options import connecting_options, wait_timeout
from dlion_cli.cluster.documents import without_managed_fields
from dlion_cli.inputs.manifests import apply_set, load_manifest, read_documents, source_of
from dlion_cli.inputs.program_files import PackedProgram, packed_program
from dlion_cli.inputs.required_files import find_program_root
from dlion_cli.terminal import options
from dlion_cli.terminal.failures import exit_code_of, message_of
from dlion_cli.views.job_status import JobStatus
from dlion_cli.views.job_watch import watch_to_end
from dlion_environments.yaml_text import YamlDocument

MAX_NAMED: Final = 4
_ABSENT: Final = object()


def changed_fields(before: Mapping[str, Any] | None, after: Mapping[str, Any], under: str) -> str:
    """`field: old → new` for each changed field at or below `under`, with defaults filled in.

    Empty if either document is invalid or nothing differs.
    """
    try:
        old, new = (load_job(each).to_document() for each in (before, after))
    except SpecError:
        return ""
    if under == "spec.runId":
        under = ""  # report no other changes
        old, new = ({"spec": {"runId": each["spec"]["runId"]}} for each in (old, new))
    changes = [
        f"{path}: {_format_value(was)} → {_format_value(now)}"
        for path, was, now in _differences("", old, new)
        if path == under or path.startswith(f"{under}.") or not under
    ]
    more = f" and {len(changes) - MAX_NAMED} more" if len(changes) > MAX_NAMED else ""
    return "; ".join(changes[:MAX_NAMED]) + more


def _differences(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if old == new:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            where = f"{path}.{key}" if path else str(key)
            yield from _differences(where, old.get(key, _ABSENT), new.get(key, _ABSENT))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (was, now) in enumerate(zip(old, new, strict=True)):
            yield from _differences(f"{path}[{index}]", was, now)
    else:
        yield path, old, new


def _format_value(value: Any) -> str:
    text = "nothing" if value is _ABSENT else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


@dataclass(frozen=True)
class Manifest:
    """A valid document of the file."""

    source: str
    document: Document
    lines: Mapping[str, int] | None
    job: Job
    namespace: str | None
    program: PackedProgram | None
    """To be sent before the job."""


@click.command()
@click.argument("file")
@options.assignments("every document, e.g. runId=2")
@click.option(
    "--wait", is_flag=True, help="Wait until the run ends; the exit code is that of the run."
)
@click.option("--dry-run", is_flag=True, help="Let the API server validate, without changes.")
@click.option("--force-conflicts", is_flag=True, help="Take ownership of conflicting fields.")
@click.option(
    "-o", "--output", type=click.Choice(["text", "name", "json", "yaml"]), default="text",
    help="Output format. With --wait, json prints a line after each change.",
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

    All documents are validated first, as by `dlion validate`; if one is invalid, nothing is sent.
    Then each is applied with server-side apply (field manager dlion-cli). Submit a job that trains
    across several sites at each of them. A program beside the manifest is sent in a ConfigMap,
    unless trainer.image is set.

    \b
    dlion submit job.yaml
    dlion submit job.yaml --set runId=2 --wait      # a new run, watched to its end
    dlion submit job.yaml --dry-run
    for site in plant-a plant-b; do dlion submit job.yaml --context $site; done
    """
    if wait and dry_run:
        raise click.UsageError("--dry-run and --wait exclude each other")
    given = click.get_current_context().params.get("namespace")
    manifests = _read_valid(file, assignments, given)
    if manifests is None:
        return ExitCode.SPEC
    jobs = connect()
    shown = "" if wait and output == "json" else output
    submitted, code = [], int(ExitCode.OK)
    for each in manifests:
        place = jobs.in_namespace(each.namespace or jobs.cluster.namespace)
        try:
            _submit(place, each, dry_run=dry_run, force=force_conflicts, output=shown)
            submitted.append((place, each.job.metadata.name))
        except DLionError as error:
            click.echo(f"dlion: {message_of(error)}", err=True)
            code = code or exit_code_of(error)
    for place, name in submitted if wait else ():
        ended = watch_to_end(
            place, name, output="json" if output == "json" else "text", timeout_s=timeout_s
        )
        if ended == ExitCode.INTERRUPTED:
            return ended
        code = code or ended
    return code


def _read_valid(
    file: str, assignments: tuple[str, ...], given: str | None
) -> list[Manifest] | None:
    """All documents, or None after printing the problems of invalid ones."""
    source, texts = source_of(file), read_documents(file)
    manifests, is_invalid = [], False
    for number, text in enumerate(texts, start=1):
        name = f"{source}#{number}" if len(texts) > 1 else source
        try:
            manifests.append(_manifest(text, name, Path(file), assignments, given))
        except SpecError as error:
            click.echo(f"dlion: {error}", err=True)
            is_invalid = True
    return None if is_invalid else manifests


def _manifest(
    text: YamlDocument, source: str, file: Path, assignments: tuple[str, ...], given: str | None
) -> Manifest:
    lines = None if assignments else text.lines
    document = apply_set(text.value, assignments) if assignments else text.value
    job = load_manifest(document, source=source, lines=lines)
    named = document["metadata"].get("namespace")
    if given and named and named != given:
        problem = Problem(
            "metadata.namespace",
            "differs from the namespace of -n",
            value=named,
            allowed=given,
            advice="Remove one of them",
            line=(lines or {}).get("metadata.namespace"),
        )
        raise SpecError([problem], source=source)
    program, problems = packed_program(job, find_program_root(job, file, None))
    if problems:
        located = [replace(one, line=(lines or {}).get(one.path)) for one in problems]
        raise SpecError(located, source=source)
    if program is not None:
        trainer = {**document["spec"]["trainer"], "program": program.field}
        document = {**document, "spec": {**document["spec"], "trainer": trainer}}
    return Manifest(source, document, lines, job, named, program)


def _submit(
    jobs: JobClient, manifest: Manifest, *, dry_run: bool, force: bool, output: str
) -> None:
    name = manifest.job.metadata.name
    before = jobs.find(name)
    document = _document_to_apply(manifest, jobs)
    try:
        if manifest.program is not None:
            jobs.apply(document, dry_run=True, force=force)  # a refused job leaves no ConfigMap
            jobs.apply_program(manifest.program, owner=before, dry_run=dry_run)
        after, is_new = jobs.apply(document, dry_run=dry_run, force=force)
    except SpecError as error:
        raise _with_lines(error, manifest, before) from error
    if manifest.program is not None and before is None and not dry_run:
        jobs.apply_program(manifest.program, owner=after, dry_run=False)
    _print_result(manifest, before, after, is_new=is_new, dry_run=dry_run, output=output)


def _document_to_apply(manifest: Manifest, jobs: JobClient) -> Document:
    """The document without an API server's fields, for input from `dlion get -o yaml`."""
    document = {k: v for k, v in manifest.document.items() if k != "status"}
    metadata = {k: v for k, v in document["metadata"].items() if k not in Metadata.ignored}
    return {**document, "metadata": {**metadata, "namespace": jobs.cluster.namespace}}


def _with_lines(error: SpecError, manifest: Manifest, before: Document | None) -> SpecError:
    """The API server's problems, with the manifest's lines and the changed values."""
    problems = [
        replace(
            problem,
            value=changed_fields(before, manifest.document, problem.path) if problem.advice else "",
            line=(manifest.lines or {}).get(problem.path),
        )
        for problem in error.problems
    ]
    return SpecError(problems, source=f"{manifest.source}: the API server rejects it")


def _print_result(
    manifest: Manifest,
    before: Document | None,
    after: Document,
    *,
    is_new: bool,
    dry_run: bool,
    output: str,
) -> None:
    name = manifest.job.metadata.name
    if output in ("json", "yaml"):
        shown = without_managed_fields(after)
        text = json.dumps(shown, indent=2) if output == "json" else yaml.safe_dump(shown)
        click.echo(text.rstrip("\n"))
    elif output == "name":
        click.echo(f"dlionjob.dlion.dev/{name}")
    elif output == "text":
        suffix = " (server dry run)" if dry_run else ""
        same = before is not None and _content(before) == _content(after)
        word = "created" if before is None or is_new else "unchanged" if same else "configured"
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
