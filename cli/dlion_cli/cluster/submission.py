"""Validates a job's manifest and submits it to a cluster, with the program beside it.

Used by `dlion submit` and by the Python client. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from dlion_api.errors import Problem, SpecError
from dlion_api.spec import Job, Metadata, load_job
from dlion_cli.inputs.manifests import apply_set, load_manifest
from dlion_cli.inputs.program_files import (
    PackedProgram,
    packed_program,
    program_error,
    program_problems,
)
from dlion_cli.inputs.required_files import find_program_root

if TYPE_CHECKING:  # `dlion render` needs no connection
    from pathlib import Path

    from dlion_cli.cluster.cluster_jobs import Document, JobClient
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
    """The program to send before the job."""


@dataclass(frozen=True)
class Submission:
    """What the API server did with a manifest."""

    before: Document | None
    """The job as it was; None if there was none."""
    after: Document
    is_new: bool


def valid_manifest(
    text: YamlDocument, source: str, file: Path, assignments: Sequence[str], given: str | None
) -> Manifest:
    """The manifest of a document, with `--set` applied and its program read.

    `source` names the document in messages, `file` is the path that its program is relative to, `-`
    the working directory. `given` is the namespace that the user chose. Raises: SpecError with the
    problems of the document or its namespace, or why a cluster cannot take its program;
    ProgramError with the problems of the program, as `dlion run`.
    """
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
    root = find_program_root(job, file, None)
    if wrong := program_problems(job, root):
        raise program_error(_located(wrong, lines), source)
    program, problems = packed_program(job, root)
    if problems:
        raise SpecError(_located(problems, lines), source=source)
    if program is not None:
        trainer = {**document["spec"]["trainer"], "program": program.field}
        document = {**document, "spec": {**document["spec"], "trainer": trainer}}
    return Manifest(source, document, lines, job, named, program)


def _located(problems: Sequence[Problem], lines: Mapping[str, int] | None) -> list[Problem]:
    return [replace(one, line=(lines or {}).get(one.path)) for one in problems]


def submit_manifest(
    jobs: JobClient, manifest: Manifest, *, dry_run: bool = False, force: bool = False
) -> Submission:
    """Apply a manifest and its program.

    `force` takes over fields of other managers. Raises: SpecError with the manifest's lines if the
    API server rejects it; and as `JobClient.apply`.
    """
    before = jobs.find(manifest.job.metadata.name)
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
    return Submission(before, after, is_new)


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
