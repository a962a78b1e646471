"""`dlion validate`: report every problem of manifests and environments, without a cluster."""

import json
from dataclasses import asdict
from typing import Any

import click

from dlion_api.document import parse
from dlion_api.errors import DataError, Problem, SpecError
from dlion_api.exit_codes import ExitCode
from dlion_api.names import KIND
from dlion_cli.inputs.manifests import STDIN, load_manifest, read_documents, source_of
from dlion_environments.model import Environment
from dlion_environments.yaml_text import YamlDocument

ENVIRONMENT = "environment"


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE…")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text")
def validate(files: tuple[str, ...], output: str) -> int:
    """Validate manifests and environment files; `-` reads standard input.

    Checks every document of every file and reports all problems. A document with workers, but
    without apiVersion and kind, is an environment. The exit code is 65 if a document is invalid,
    and 66 if a file cannot be read.
    """
    results = [result for file in files for result in _check_file(file)]
    if output == "json":
        click.echo(json.dumps(results, indent=2, ensure_ascii=False))
    else:
        _print_results(results)
    codes = {result["exitCode"] for result in results}
    return next((c for c in (ExitCode.DATA, ExitCode.SPEC) if c in codes), ExitCode.OK)


def _check_file(file: str) -> list[dict[str, Any]]:
    source = source_of(file)
    try:
        documents = read_documents(file)
    except SpecError as error:
        return [_result(source, problems=error.problems)]
    except DataError as error:
        problem = Problem("(file)", str(error).removeprefix(f"{source}: "))
        return [_result(source, problems=(problem,), code=ExitCode.DATA)]
    if len(documents) == 1:
        return [_check_document(documents[0], source)]
    return [
        _check_document(document, f"{source}#{number}", is_alone=file == STDIN)
        for number, document in enumerate(documents, start=1)
    ]


def _check_document(
    document: YamlDocument, source: str, *, is_alone: bool = True
) -> dict[str, Any]:
    if _is_environment(document.value):
        return _check_environment(document, source, is_alone)
    try:
        job = load_manifest(document.value, source=source, lines=document.lines)
    except SpecError as error:
        return _result(source, problems=error.problems)
    return _result(source, name=str(job.key), spec_hash=job.hash())


def _is_environment(value: object) -> bool:
    keys = value.keys() if isinstance(value, dict) else set()
    return "workers" in keys and not keys & {"apiVersion", "kind", "metadata", "spec"}


def _check_environment(document: YamlDocument, source: str, is_alone: bool) -> dict[str, Any]:
    problems: tuple[Problem, ...] = () if is_alone else (_not_alone(document),)
    try:
        environment = parse(Environment, document.value, source=source, lines=document.lines)
    except SpecError as error:
        return _result(source, kind=ENVIRONMENT, problems=(*problems, *error.problems))
    note = f"only for {environment.run_lengths}" if environment.run_lengths else ""
    return _result(source, kind=ENVIRONMENT, name=environment.name, note=note, problems=problems)


def _not_alone(document: YamlDocument) -> Problem:
    return Problem(
        "(document)",
        "is an environment among other documents: --environment takes a file with one",
        advice="Move it to a file of its own, or split the file at its --- lines.",
        line=document.lines.get(""),
    )


def _result(
    source: str,
    *,
    kind: str = KIND,
    name: str = "",
    spec_hash: str = "",
    note: str = "",
    problems: tuple[Problem, ...] = (),
    code: ExitCode = ExitCode.SPEC,
) -> dict[str, Any]:
    return {
        "source": source,
        "valid": not problems,
        "kind": kind,
        "job": name,
        "specHash": spec_hash,
        "exitCode": int(code if problems else ExitCode.OK),
        "note": note,
        "problems": [asdict(problem) for problem in problems],
    }


def _print_results(results: list[dict[str, Any]]) -> None:
    for result in results:
        if result["valid"]:
            note = f", {result['note']}" if result["note"] else ""
            click.echo(f"{result['source']}: {result['kind']} {result['job']} is valid{note}")
            continue
        problems = [Problem(**problem) for problem in result["problems"]]
        click.echo(str(SpecError(problems, source=result["source"])), err=True)
