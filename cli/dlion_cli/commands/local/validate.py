"""`dlion validate`: report every problem of manifests and environments, without a cluster."""

import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from dlion_api.document import parse
from dlion_api.errors import DataError, Problem, SpecError
from dlion_api.exit_codes import ExitCode
from dlion_api.names import KIND
from dlion_api.spec import Job
from dlion_api.spec.trainer import Trainer
from dlion_cli.inputs.chart_values import DEFAULTS, settings_of
from dlion_cli.inputs.manifests import STDIN, load_manifest, read_documents, source_of
from dlion_cli.inputs.program_files import program_problems
from dlion_cli.inputs.required_files import find_program_root, require_data
from dlion_cli.inputs.unreached import warn_unreached
from dlion_cli.terminal import options
from dlion_cli.terminal.awaited_child import run_child
from dlion_cli.terminal.completion import complete_environments
from dlion_cli.terminal.formatting import printable_lines
from dlion_environments.loading import load_environment
from dlion_environments.model import Environment
from dlion_environments.yaml_text import YamlDocument
from dlion_operator.children.worker_jobs import refused_by_site, worker_job
from dlion_worker.supervisor.parent_death import bound_to_parent

ENVIRONMENT = "environment"
MAX_REFUSED_SHOWN = 3


@dataclass(frozen=True)
class DocumentChecks:
    """What is checked beyond the documents themselves."""

    data_root: Path | None
    """For programs' data; None: programs are not run."""
    environment: Environment | None
    """What jobs must fit; None: any environment."""
    shows_progress: bool


@dataclass(frozen=True)
class ProgramOutcome:
    """What running a program on one batch has shown."""

    note: str = ""
    problems: tuple[Problem, ...] = ()
    code: ExitCode = ExitCode.OK
    parameters: int | None = None
    """Trained entries of its model; None: it was not run, or failed."""


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE…")
@click.option(
    "--environment", "-e", metavar="NAME|FILE", shell_complete=complete_environments,
    help="Check that the jobs fit this environment, and without --no-run that an "
    "exchange over its slowest link ends within the run.",
)  # fmt: skip
@click.option(
    "--run/--no-run",
    "runs_programs",
    default=True,
    show_default=True,
    help="Run a program of your own (needs TensorFlow), or only parse it.",
)
@options.data_root
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text")
def validate(
    files: tuple[str, ...],
    environment: str | None,
    runs_programs: bool,
    data_root: Path,
    output: str,
) -> int:
    """Validate manifests and environment files; `-` reads standard input.

    A program of your own is run on one batch of the first worker's data. Missing data are a
    warning; the batch is then made up, as the model takes it. The exit code is 65 if a document is
    invalid, 66 if a file or the data cannot be read, and 67 if the program is missing, has no
    build_model(), or fails.
    """
    checks = DocumentChecks(
        data_root=data_root if runs_programs else None,
        environment=None if environment is None else load_environment(environment),
        shows_progress=output != "json",
    )
    results = []
    for file in files:
        checked = _check_file(file, checks)
        results += checked
        if output != "json":
            _print_results(checked)  # at once: running programs takes long
    if output == "json":
        click.echo(json.dumps(results, indent=2, ensure_ascii=False))
    codes = {result["exitCode"] for result in results}
    first = (ExitCode.DATA, ExitCode.SPEC)
    return next((code for code in first if code in codes), max(codes))


def _check_file(file: str, checks: DocumentChecks) -> list[dict[str, Any]]:
    source = source_of(file)
    root = None if file == STDIN else Path(file)
    try:
        documents = read_documents(file)
    except SpecError as error:
        return [_result(source, problems=error.problems)]
    except DataError as error:
        problem = Problem("(file)", str(error).removeprefix(f"{source}: "))
        return [_result(source, problems=(problem,), code=ExitCode.DATA)]
    if len(documents) == 1:
        return [_check_document(documents[0], source, root, checks)]
    return [
        _check_document(document, f"{source}#{number}", root, checks, is_alone=file == STDIN)
        for number, document in enumerate(documents, start=1)
    ]


def _check_document(
    document: YamlDocument,
    source: str,
    path: Path | None,
    checks: DocumentChecks,
    *,
    is_alone: bool = True,
) -> dict[str, Any]:
    """`path`: of the file; its program is in the same folder. None: its place is unknown."""
    if _is_environment(document.value):
        return _check_environment(document, source, is_alone)
    try:
        job = load_manifest(document.value, source=source, lines=document.lines)
    except SpecError as error:
        return _result(source, problems=error.problems)
    misfits, link = _slowest_link(job, checks.environment)
    if misfits:
        return _result(source, name=str(job.key), problems=misfits)
    root = None if path is None else find_program_root(job, path, None)
    problems = [] if root is None else program_problems(job, root)
    tried = ProgramOutcome(problems=tuple(problems), code=ExitCode.PROGRAM)
    # `dlion run` reports problems first.
    warning = "" if problems else _missing_data(job, checks.data_root)
    if root is None and job.spec.trainer.program.file:
        tried = ProgramOutcome("its program not looked at: its folder is unknown")
    if root is not None and not problems:
        tried = _try_program(job, root, checks, has_data=not warning, needs_size=bool(link))
    if tried.parameters is not None and link:
        warning = _slow_exchange(job, tried.parameters, link)
    note = ", ".join(filter(None, (tried.note, refused_by_default(job))))
    lines = document.lines
    located = tuple(replace(one, line=lines.get(one.path)) for one in tried.problems)
    return _result(
        source,
        name=str(job.key),
        spec_hash=job.hash(),
        note=note,
        warning=warning,
        problems=located,
        code=tried.code,
    )


def _slowest_link(
    job: Job, environment: Environment | None
) -> tuple[tuple[Problem, ...], Mapping[str, float]]:
    """Why the job does not fit the environment; if it does, its slowest link, if that counts."""
    if environment is None:
        return (), {}
    from dlion_environments.slow_exchange import slowest_link  # with NumPy, which takes long

    seconds = job.spec.trainer.stop.max_seconds
    try:
        plan = environment.plan(job.workers(), machine_cores=None, duration_s=seconds)
        environment.check(job)
    except SpecError as error:
        place = f"environment {environment.name}"
        misfits = (
            replace(each, path=f"{place}: {each.path}", line=None) for each in error.problems
        )
        return tuple(misfits), {}
    warn_unreached(environment, seconds)
    return (), slowest_link(job, plan)


def _slow_exchange(job: Job, parameters: int, link: Mapping[str, float]) -> str:
    from dlion_environments.slow_exchange import slow_exchange

    return slow_exchange(job.spec, parameters, link)


def _missing_data(job: Job, data_root: Path | None) -> str:
    """What `dlion run` would lack on this machine; empty: nothing, or programs are not run.

    Sites may have these data, so that the manifest is valid.
    """
    if data_root is None:
        return ""
    try:
        require_data([job], data_root)
    except DataError as error:
        return f"{error}. On this machine `dlion run` would end with {int(ExitCode.DATA)}"
    return ""


def _try_program(
    job: Job, root: Path, checks: DocumentChecks, *, has_data: bool, needs_size: bool
) -> ProgramOutcome:
    """Run a user's program on one batch, in a separate process, unless `checks` excludes it.

    `needs_size`: a built-in program, too, of which nothing but the size is in doubt.
    """
    program = job.spec.trainer.program
    given = program.file or program.module or (program.builtin if needs_size else "")
    if checks.data_root is None or not given or job.spec.trainer.image:
        return ProgramOutcome()
    if importlib.util.find_spec("tensorflow") is None:
        return ProgramOutcome("its program not run: TensorFlow is not installed here")
    own, dataset = not program.builtin, job.spec.trainer.dataset
    if not has_data and not (own and dataset.path and not job.spec.trainer.encoder):
        return ProgramOutcome("its program not run: its data are not here")
    from rich.console import Console  # only programs need it
    from rich.markup import escape

    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        request = {
            "job": job.to_document(),
            "dataRoot": str(checks.data_root.resolve()),
            "programRoot": str(root),
            "hasData": has_data,
            "answer": str(answer),
        }
        # A file: a pipe would be open for as long as processes that the program started.
        with (Path(folder) / "output").open("w+b") as printed:
            ended = run_child(
                bound_to_parent([sys.executable, "-P", "-m", "dlion_worker.training.trial"]),
                given=json.dumps(request).encode(),
                output=printed,
                waits_for=f"{escape(given)}: importing TensorFlow, loading data and training one "
                "batch (--no-run skips this)",
                console=Console(stderr=True) if checks.shows_progress else None,
            )
            printed.seek(0)
            if text := printed.read().decode(errors="replace").rstrip():
                click.echo(text, err=True)
        if answer.is_file():
            found = json.loads(answer.read_text(encoding="utf-8"))
        else:
            text = f"program {given}: it ended its process with exit code {ended}"
            found = {"exitCode": ExitCode.PROGRAM, "text": text}
    return _outcome_of(found, job.spec.trainer, has_data=has_data)


def _outcome_of(found: Mapping[str, Any], trainer: Trainer, *, has_data: bool) -> ProgramOutcome:
    text, code = found["text"], ExitCode(found["exitCode"])
    if code is ExitCode.OK:
        tried = "its program trains: " if found["parameters"] is not None else ""
        return ProgramOutcome(f"{tried}{text}", parameters=found["parameters"])
    is_of_data = not has_data or re.search(r"load_data\(.*failed", text)
    advice = "If its data are at the sites only, use --no-run" if is_of_data else ""
    field = next(each for each in ("file", "module", "builtin") if getattr(trainer.program, each))
    field = f"program.{field}"
    is_of_program = text.startswith("program ")  # such as a batch that its loss rejects
    if code is ExitCode.DATA and trainer.dataset.path and not is_of_program:
        field = "dataset.path"
    problem = Problem(f"spec.trainer.{field}", text, advice=advice)
    return ProgramOutcome(problems=(problem,), code=code)


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
        advice="Move it to a separate file, or split the file at its --- lines.",
        line=document.lines.get(""),
    )


def _result(
    source: str,
    *,
    kind: str = KIND,
    name: str = "",
    spec_hash: str = "",
    note: str = "",
    warning: str = "",
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
        "warning": warning,
        "problems": [asdict(problem) for problem in problems],
    }


def _print_results(results: list[dict[str, Any]]) -> None:
    for result in results:
        if result["warning"]:
            click.echo(f"{result['source']}: warning: {result['warning']}", err=True)
        if result["valid"]:
            note = f", {result['note']}" if result["note"] else ""
            click.echo(f"{result['source']}: {result['kind']} {result['job']} is valid{note}")
            continue
        problems = [Problem(**problem) for problem in result["problems"]]
        text = str(SpecError(problems, source=result["source"]))
        click.echo(printable_lines(text), err=True)


def refused_by_default(job: Job) -> str:
    """Return a note on what the sites of that job refuse by default. Empty: nothing.

    `dlion validate` knows no site, so it takes the chart's defaults. `dlion render` takes a site's
    values, and the user's rights allow more.
    """
    found: set[str] = set()
    for site in job.spec.sites:
        settings = settings_of(DEFAULTS, site.name, source="the chart's values")
        for group in site.groups:
            try:
                made = worker_job(job, group, settings, {"uid": ""})
                refused = refused_by_site(job, group, made, settings, by_rights=False)
            except (AttributeError, TypeError, ValueError, KeyError) as error:
                return f"podTemplate is not a valid pod template, for group {group.name}: {error}"
            found |= {f"{each.path}: {each.what}" for each in refused}
    if not found:
        return ""
    shown = sorted(found)
    more = f" and {len(shown) - MAX_REFUSED_SHOWN} more" if len(shown) > MAX_REFUSED_SHOWN else ""
    return (
        f"its sites refuse by default {'; '.join(shown[:MAX_REFUSED_SHOWN])}{more}"
        " (chart value tenancy.podTemplate; `dlion render --values` knows a site's)"
    )
