"""Reads manifest files with line numbers, and applies `--set path=value`.

`dlion_api.document.parse` validates the content.
"""

import itertools
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from dlion_api.document import parse
from dlion_api.errors import DataError, Problem, SpecError
from dlion_api.spec import Exchange, Job, load_job
from dlion_core.policies.catalogue import find, parameters_of
from dlion_environments.yaml_text import (
    MAX_BYTES,
    YamlDocument,
    parse_any_documents,
    parse_documents,
    single_document,
)

STDIN: Final = "-"
_ROOTS: Final = ("apiVersion", "kind", "metadata", "spec")
_RUN_ID: Final = ["spec", "runId"]
"""Always text, even if it looks like a number: `--set runId=2`."""
_STEP = re.compile(r"\.?([A-Za-z_][A-Za-z0-9_]*)|\[([0-9]{1,6})\]")


def source_of(path: str | Path) -> str:
    """The file as messages name it."""
    return "standard input" if str(path) == STDIN else str(path)


def read_documents(path: str | Path) -> list[YamlDocument]:
    """All documents of a file, at least one; `-` is standard input.

    Raises: DataError if the file cannot be read; SpecError if it is not YAML or empty.
    """
    source = source_of(path)
    try:
        if str(path) == STDIN:
            if sys.stdin is None:
                raise DataError(f"{source}: cannot be read: it is closed. Name a file instead.")
            content = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(path).open("rb") as file:
                content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise DataError(f"{source}: cannot be read: {error.strerror}. Check the path.") from None
    return parse_documents(content, source=source)


def read_document(path: str | Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The file's single document, and the line of each path in it (`spec.sites[0].name`).

    Raises: as `read_documents`; SpecError if there are several documents.
    """
    document = single_document(read_documents(path), source=str(path))
    return document.value, document.lines


def apply_set(document: dict[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """A copy of the document with each `path=value` applied in order.

    A path may omit `spec.`. Lists are indexed (`sites[0].groups[1].workers=2`); one past the end
    appends. Values are YAML; an empty value removes the field or item, which a list must have.

    >>> apply_set({"spec": {"sites": [{"name": "a"}]}}, ["sites[0].name=b", "trainer.seed=7"])
    {'spec': {'sites': [{'name': 'b'}], 'trainer': {'seed': 7}}}

    Raises: SpecError with every invalid assignment.
    """
    changed: dict[str, Any] = _unshared(document)
    problems = []
    for assignment in assignments:
        try:
            _assign(changed, assignment)
        except _CannotSetError as error:
            problems.append(Problem(assignment or "''", str(error), advice=error.advice))
    if problems:
        raise SpecError(problems, source="--set")
    return changed


def _unshared(value: Any) -> Any:
    """A copy in which nothing stands at two places, as a YAML alias and its anchor do."""
    if isinstance(value, dict):
        return {name: _unshared(each) for name, each in value.items()}
    return [_unshared(each) for each in value] if isinstance(value, list) else value


class _CannotSetError(Exception):
    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.advice = advice


def _assign(document: dict[str, Any], assignment: str) -> None:
    path, equals, text = assignment.partition("=")
    if not equals:
        raise _CannotSetError("has no =", "Write it as path=value.")
    steps, value = _steps(path.strip()), _value(text)
    place: Any = document
    for step, following in itertools.pairwise(steps):
        if value is None and isinstance(place, dict) and place.get(step) is None:
            return  # an empty section could request what the manifest does not
        if value is None and isinstance(step, int):
            _check_index(place, step, path, may_append=False)
        place = _enter(place, step, [] if isinstance(following, int) else {}, path)
    if steps == _RUN_ID and value is not None and not isinstance(value, str):
        value = text.strip()
    _store(place, steps[-1], value, path)


def _steps(path: str) -> list[str | int]:
    steps: list[str | int] = []
    at = 0
    while at < len(path):
        match = _STEP.match(path, at)
        if match is None or (at == 0 and path[0] in ".["):
            raise _CannotSetError(
                f"is not a valid path at {path[at:]!r}", "Example: sites[0].groups[0].workers=2."
            )
        steps.append(match[1] if match[1] is not None else int(match[2]))
        at = match.end()
    if not steps:
        raise _CannotSetError("has no path", "Write it as path=value.")
    return steps if steps[0] in _ROOTS else ["spec", *steps]


def _value(text: str) -> Any:
    """The value after `=`; None: there is none, or null. Raises: _CannotSetError."""
    try:
        documents = parse_any_documents(text, source="--set")
    except SpecError as error:
        raise _CannotSetError(
            f"has a value that is not YAML: {error.problems[0].message}"
        ) from None
    if len(documents) > 1:
        raise _CannotSetError("has several YAML documents as its value", "Give one value.")
    return _unshared(documents[0].value) if documents else None


def _enter(place: Any, step: str | int, empty: Any, path: str) -> Any:
    if isinstance(step, int):
        _check_index(place, step, path)
        if step == len(place):
            place.append(empty)
        return place[step]
    _check_mapping(place, step, path)
    if place.get(step) is None:
        place[step] = empty
    return place[step]


def _store(place: Any, step: str | int, value: Any, path: str) -> None:
    if isinstance(step, int):
        _check_index(place, step, path, may_append=value is not None)
        place[step : step + 1] = [] if value is None else [value]
        return
    _check_mapping(place, step, path)
    if value is None:
        place.pop(step, None)
    else:
        place[step] = value


def _check_index(place: Any, index: int, path: str, *, may_append: bool = True) -> None:
    if not isinstance(place, list):
        raise _CannotSetError(f"the value before [{index}] in {path} is not a list")
    if index > len(place) or (index == len(place) and not may_append):
        raise _CannotSetError(f"index {index} is out of range: the list has {len(place)} items")


def _check_mapping(place: Any, name: str, path: str) -> None:
    if not isinstance(place, dict):
        kind = "a list" if isinstance(place, list) else "a single value"
        advice = f"Write [0].{name} for its first item." if kind == "a list" else ""
        raise _CannotSetError(f"the value before {name!r} in {path} is {kind}", advice)


def reject_suspended(job: Job, source: str) -> None:
    """Raises: SpecError if the manifest is suspended."""
    if job.spec.suspend:
        problem = Problem(
            "spec.suspend",
            "the job is suspended: there is nothing to run",
            value="true",
            allowed="false",
            advice="Change it in the manifest, or give --set suspend=false",
        )
        raise SpecError([problem], source=source)


def reject_cluster_authority(job: Job, source: str) -> None:
    """Raises: SpecError if the manifest's certificate authority exists only in a cluster."""
    tls = job.spec.tls
    if tls.mode in ("Secret", "CertManager"):
        names = "secretName" if tls.mode == "Secret" else "issuerName"
        problem = Problem(
            "spec.tls.mode",
            "needs a cluster for the authority: a local run creates its own",
            value=tls.mode,
            allowed="Managed or Disabled",
            advice=f"Give --set tls.mode=Managed --set tls.{names}= to try it on this machine",
        )
        raise SpecError([problem], source=source)


def load_manifest(document: object, *, source: str, lines: Mapping[str, int] | None) -> Job:
    """Parse and validate the job, with its exchange policy and the policy's parameters.

    Ranks are numbered consecutively, even if the document comes from a run in a cluster. Raises:
    SpecError with every problem of the document and the policy's parameters; else of the policy in
    this job.
    """
    try:
        job = load_job(document, source=source, lines=lines).with_counted_ranks()
    except SpecError as error:
        known = {problem.path for problem in error.problems}
        more = [one for one in _policy_problems(document, lines) if one.path not in known]
        raise SpecError([*error.problems, *more], source=source) from None
    parameters_of(job.spec, source=source, lines=lines)
    return job


def read_job(path: str | Path, assignments: Iterable[str] = (), *, source: str = "") -> Job:
    """The job of the file's single document, with `--set` applied.

    Raises: as `read_document`, `apply_set` and `load_manifest`.
    """
    document, lines = read_document(path)
    changed = [*assignments]
    return load_manifest(
        apply_set(document, changed), source=source or str(path), lines=None if changed else lines
    )


def _policy_problems(document: object, lines: Mapping[str, int] | None) -> tuple[Problem, ...]:
    """Problems of the policy's name and parameters, independent of the rest of the document."""
    place = document
    for step in ("spec", "exchange"):
        place = place.get(step) if isinstance(place, dict) else None
    if not isinstance(place, dict):
        return ()
    name, parameters = place.get("policy", Exchange().policy), place.get("parameters", {})
    if not isinstance(name, str):
        return ()
    try:
        policy = find(name, line=(lines or {}).get("spec.exchange.policy"))
        parse(policy.parameters, parameters, lines=lines, root="spec.exchange.parameters")
    except SpecError as error:
        return error.problems
    return ()
