"""Manifests as callers give them: a path, a mapping or YAML text, with fields to set."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final, TypeAlias

from dlion.arguments import check_assignments, path_argument, wrong_argument
from dlion_api.bounds import JOB_NAME_LENGTH, MAX_SITES
from dlion_api.errors import Problem, SpecError
from dlion_api.names import API_VERSION, KIND
from dlion_api.spec.trainer import BUILTINS, Trainer
from dlion_cli.cluster.documents import mapping_of, mappings_in
from dlion_cli.inputs.manifests import STDIN, read_documents
from dlion_environments.yaml_text import YamlDocument, parse_documents, single_document

ManifestLike: TypeAlias = str | Path | Mapping[str, Any]
Assignments: TypeAlias = Mapping[str, Any] | Sequence[str]
Sites: TypeAlias = int | Sequence[str] | Mapping[str, int]
_GIVEN: Final = "manifest"
"""Names a manifest that is not a file in messages."""
_MANIFEST_SUFFIXES: Final = (".yaml", ".yml", ".json")
_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that YAML refuses, folds or drops unless they are escaped. JSON escapes those below
U+0020; escapes of all others would be pairs of surrogates, which YAML does not join."""
_NO_NAME = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True)
class ManifestInput:
    """One document, and what messages and its program's path refer to."""

    document: YamlDocument
    source: str
    file: Path
    """`-`, which stands for the working directory, if the manifest is not a file."""


def read_manifest(manifest: ManifestLike) -> ManifestInput:
    """Read the manifest: a mapping, YAML text (with a line break), or the path of a file.

    Raises: DataError if the file cannot be read; SpecError if it is not a single document.
    """
    if isinstance(manifest, Mapping):
        try:
            text = yaml_text(plain_values(manifest))
        except (TypeError, ValueError, RecursionError) as error:
            problem = Problem("(document)", f"cannot be a manifest: {error}")
            raise SpecError([problem], source=_GIVEN) from None
        given = _of_text(text)  # its lines are of no use
        return replace(given, document=YamlDocument(given.document.value, {}))
    if isinstance(manifest, str) and "\n" in manifest:
        return _of_text(manifest)
    if str(manifest) == STDIN:
        problem = Problem("(file)", "is standard input", value=STDIN, allowed="the path of a file")
        raise SpecError([problem], source=_GIVEN)
    file = path_argument("(file)", manifest, source=_GIVEN)
    documents = read_documents(manifest)
    return ManifestInput(single_document(documents, source=str(file)), str(file), file)


def yaml_text(value: Any) -> str:
    """JSON that YAML reads as the same value: YAML alone takes `1e3` without quotes for a number.

    >>> yaml_text({"a": "é\x7f\u2028"})
    '{"a": "é\\\\u007f\\\\u2028"}'

    Raises: TypeError, ValueError or RecursionError for what JSON cannot hold.
    """
    text = json.dumps(value, ensure_ascii=False)
    return _NOT_IN_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def plain_values(value: Any, field: str = "") -> Any:
    """The value with numbers and truth values of NumPy as those of Python.

    Raises: SpecError for what no manifest holds, with its field.
    """
    try:
        return _plain(value, field)
    except RecursionError:
        message = "cannot be in a manifest: it contains itself or is nested too deeply"
        problem = Problem(field or "(document)", message)
        raise SpecError([problem], source=_GIVEN) from None


def _plain(value: Any, field: str) -> Any:
    match value:
        case None | bool() | str():
            return value
        case Integral():
            return int(value)
        case Real():
            return float(value)
        case object(shape=(), dtype=dtype) if str(dtype) == "bool":  # of NumPy
            return bool(value)
        case Mapping():
            return {
                key: _plain(each, f"{field}.{key}" if field else str(key))
                for key, each in value.items()
            }
        case list() | tuple():
            return [_plain(each, f"{field}[{place}]") for place, each in enumerate(value)]
    problem = Problem(field, "cannot be in a manifest", f"a {type(value).__name__}")
    raise SpecError([problem], source=_GIVEN)


def _of_text(text: str) -> ManifestInput:
    # Lone surrogates cannot be encoded; the parser names the replacement as any wrong value.
    content = text.encode("utf-8", "replace")
    document = single_document(parse_documents(content, source=_GIVEN), source=_GIVEN)
    return ManifestInput(document, _GIVEN, Path(STDIN))


def assignments_of(given: Assignments | None) -> list[str]:
    """The fields to set as `path=value`; a value of None removes the field.

    >>> assignments_of({"trainer.stop.maxSeconds": 20, "runId": "2", "trainer.dataset": None})
    ['trainer.stop.maxSeconds=20', 'runId="2"', 'trainer.dataset=']

    Raises: SpecError for a value that no manifest can hold.
    """
    if given is None:
        return []
    if isinstance(given, str):
        return [given]
    check_assignments(given)
    if not isinstance(given, Mapping):
        if wrong := [each for each in given if not isinstance(each, str)]:
            raise SpecError([Problem("set", "must be path=value", repr(wrong[0]))])
        return [*given]
    assignments = []
    for path, value in given.items():
        try:
            text = "" if value is None else yaml_text(plain_values(value, path))
        except (TypeError, ValueError, RecursionError) as error:
            raise SpecError([Problem(path, f"cannot be set: {error}")], source="set") from None
        assignments.append(f"{path}={text}")
    return assignments


def is_program(given: ManifestLike) -> bool:
    """Whether this names a program, and no manifest.

    >>> [is_program(each) for each in ("digits", "a.py", "my.module", "job.yaml", "JOB.YML", "a/b")]
    [True, True, True, False, False, False]
    """
    if isinstance(given, Mapping) or "\n" in (text := str(given)):
        return False
    return text.endswith(".py") or not (text.lower().endswith(_MANIFEST_SUFFIXES) or "/" in text)


def program_manifest(program: str, sites: Sites | None, workers: int | None) -> dict[str, Any]:
    """The manifest of a program: a built-in one, a file, or an importable module.

    >>> program_manifest("digits", ["plant-a"], 2)["spec"]["sites"]
    [{'name': 'plant-a', 'groups': [{'name': 'workers', 'workers': 2}]}]
    """
    trainer: dict[str, Any] = {"program": {"module": program}}
    stem = program
    if program in BUILTINS:
        trainer = {"program": {"builtin": program}}
        if program == "digits":
            trainer["dataset"] = {"name": "digits"}
    elif program.endswith(".py"):
        file = path_argument("program", program, source="train")
        trainer = {"program": {"file": str(file.resolve())}}
        stem = file.stem
    return job_document(stem, trainer, sites, workers)


def job_document(
    name: str, trainer: Mapping[str, Any], sites: Sites | None, workers: int | None
) -> dict[str, Any]:
    """The manifest of a trainer's fields, with a name made of this one; by default one site.

    >>> job_document("My_Model", {}, 1, None)["metadata"]
    {'name': 'my-model'}
    >>> job_document("3d_unet", {}, 1, None)["metadata"]
    {'name': 'job-3d-unet'}
    """
    name = _NO_NAME.sub("-", name.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"job-{name}"
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name[:JOB_NAME_LENGTH].rstrip("-")},
        "spec": {
            "sites": site_list(1 if sites is None else sites, workers),
            "trainer": dict(trainer),
        },
    }


def site_list(sites: Sites, workers: int | None) -> list[dict[str, Any]]:
    """`spec.sites`: so many sites, those of these names, or with these numbers of workers each.

    Raises: SpecError for another type, or more sites than a job has.
    """
    given: Any = sites
    if is_number := not isinstance(given, bool) and isinstance(given, Integral):
        sites = int(given)  # of NumPy, too
    if not (is_number or isinstance(sites, str | Mapping | Sequence)) or (
        isinstance(sites, int) and sites > MAX_SITES
    ):
        allowed = f"their number up to {MAX_SITES}, a list of names, or numbers of workers by name"
        raise wrong_argument("sites", "are not sites", sites, allowed, source="train")
    if isinstance(sites, int):
        sites = [f"site-{number}" for number in range(1, sites + 1)]
    if isinstance(sites, Mapping):
        counts = [*sites.items()]
    else:
        count = 1 if workers is None else workers
        counts = [(name, count) for name in ([sites] if isinstance(sites, str) else sites)]
    return [
        {"name": name, "groups": [{"name": "workers", "workers": count}]} for name, count in counts
    ]


def changed(
    manifest: ManifestInput, given: Mapping[str, Any], *, workers: int | None
) -> ManifestInput:
    """The manifest with these fields (`with_fields`), and so many workers in each group."""
    value = manifest.document.value
    if not isinstance(value, Mapping) or not (given or workers is not None):
        return manifest
    value = plain_values(with_fields(value, given))
    spec = mapping_of(value.get("spec"))
    for site in mappings_in(spec.get("sites")) if workers is not None else ():
        for group in mappings_in(site.get("groups")):
            group["workers"] = plain_values(workers, "workers")
    return replace(manifest, document=YamlDocument(value, {}))


def with_fields(document: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the manifest with these fields of `spec` or of `spec.trainer`, merged into it.

    Names may be those of Python.

    >>> with_fields({"spec": {"trainer": {"seed": 1}}}, {"stop": {"maxSteps": 5}, "min_sites": 1})
    {'spec': {'trainer': {'seed': 1, 'stop': {'maxSteps': 5}}, 'minSites': 1}}
    """
    of_trainer = {_camel_case(each.name) for each in fields(Trainer)}
    spec: dict[str, Any] = {}
    for name, value in given.items():
        field = _camel_case(name)
        change = {"trainer": {field: value}} if field in of_trainer else {field: value}
        spec = _merged(spec, change)
    return _merged(document, {"spec": spec})


def _camel_case(name: str) -> str:
    return re.sub("_([a-z])", lambda match: match[1].upper(), name)


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for name, value in new.items():
        before = merged.get(name)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(before, value) if both else value  # type: ignore[arg-type]
    return merged
