"""`dlion explain`: describe fields of the manifest, their allowed values and defaults."""

import json
from dataclasses import replace

import click

from dlion_api import document
from dlion_api.document import Explanation
from dlion_api.errors import DLionError, SpecError
from dlion_api.names import API_VERSION, KIND, RUNTIME_KIND
from dlion_api.spec import Job, Runtime
from dlion_api.status import Status
from dlion_cli.terminal.completion import complete_fields, complete_policies
from dlion_core.policies import catalogue

ROOTS = ("apiVersion", "kind", "metadata", "spec")
STATUS = "status"
POLICY, PARAMETERS = "spec.exchange.policy", "spec.exchange.parameters"


@click.command()
@click.argument("field", default="", metavar="[FIELD]", shell_complete=complete_fields)
@click.option("--recursive", is_flag=True, help="Show all fields below FIELD, as a tree.")
@click.option(
    "--policy", metavar="NAME", help="Describe this policy's parameters.",
    shell_complete=complete_policies,
)  # fmt: skip
@click.option(
    "--kind", type=click.Choice([KIND, RUNTIME_KIND], case_sensitive=False), default=KIND,
    help="Kind of manifest.", show_default=True,
)  # fmt: skip
def explain(field: str, recursive: bool, policy: str | None, kind: str) -> None:
    """Describe FIELD of the manifest, or all of it; `status` is what a cluster reports.

    \b
    dlion explain spec.trainer.stop
    dlion explain exchange.parameters --policy ako
    dlion explain limits --kind DLionRuntime
    """
    explanation = _find(field, policy) if kind == KIND else _find_in_runtime(field)
    if (
        policy is not None
        and explanation.path != PARAMETERS
        and not _is_parameter_path(explanation.path)
    ):
        raise click.UsageError("--policy is only for exchange.parameters")
    click.echo(f"KIND:    {kind} ({API_VERSION})")
    if explanation.path:
        click.echo(f"FIELD:   {explanation.path} <{explanation.type}>{_facts(explanation)}")
    click.echo(f"\n{_paragraph(explanation.doc)}")
    for rule in explanation.rules:
        click.echo(_paragraph(f"Rule: {rule}."))
    if explanation.path == POLICY:
        _print_policies()
    if explanation.path == PARAMETERS:
        _print_parameters(policy)
    if explanation.children:
        click.echo("\nFIELDS:")
        _print_fields(explanation.children, depth=1, recursive=recursive)


def _print_policies() -> None:
    click.echo("\nPOLICIES:")
    for name in catalogue.names():
        try:
            summary = catalogue.find(name).summary
        except DLionError as error:
            summary = _unreadable_policy(error)
        click.echo(f"  {name}\n{_paragraph(summary, '    ')}\n")


def _print_parameters(policy: str | None) -> None:
    if policy is not None:
        children = _parameters_of(policy).children
        click.echo(f"\nPARAMETERS OF {policy}:" + ("" if children else " none"))
        _print_fields(children, depth=1, recursive=False)
        return
    click.echo("\nPARAMETERS (--policy NAME describes them):")
    for name in catalogue.names():
        try:
            text = ", ".join(child.name for child in _parameters_of(name).children) or "none"
        except DLionError as error:
            text = _unreadable_policy(error)
        click.echo(f"  {name}: {text}")


def _parameters_of(policy: str, below: str = "") -> Explanation:
    parameters = catalogue.find(policy).parameters
    with catalogue.plugin_errors(policy, "declaring its parameters"):
        return document.explain(parameters, below, parent=PARAMETERS)


def _unreadable_policy(error: DLionError) -> str:
    """Text for a policy whose package cannot be loaded, so that the others are still explained."""
    return f"cannot be read: {' '.join(str(error).split())}"


def _is_parameter_path(path: str) -> bool:
    return path.startswith(f"{PARAMETERS}.")


def _find(field: str, policy: str | None) -> Explanation:
    first = field.split(".", 1)[0].split("[", 1)[0]
    path = field if first in ROOTS else f"spec.{field}"
    if policy is not None and (path == PARAMETERS or _is_parameter_path(path)):
        catalogue.find(policy)  # raises before other checks if there is no such policy
    if _is_parameter_path(path):
        return _find_parameter(path.removeprefix(f"{PARAMETERS}."), policy)
    try:
        if first == STATUS:
            status = document.explain(Status, field.partition(".")[2], parent=STATUS)
            return replace(status, required=False)
        return document.explain(Job, path if field else "")
    except SpecError as error:
        raise SpecError(error.problems, source="explain") from None


def _find_in_runtime(field: str) -> Explanation:
    first = field.split(".", 1)[0]
    path = field if first in ROOTS or not field else f"spec.{field}"
    try:
        return document.explain(Runtime, path)
    except SpecError as error:
        raise SpecError(error.problems, source="explain") from None


def _find_parameter(name: str, policy: str | None) -> Explanation:
    """One parameter of the policy."""
    if policy is None:
        raise click.UsageError(f"{PARAMETERS}.{name} depends on the policy: give --policy NAME")
    try:
        return _parameters_of(policy, name)
    except SpecError as error:
        raise SpecError(error.problems, source=f"explain --policy {policy}") from None


def _print_fields(children: tuple[Explanation, ...], *, depth: int, recursive: bool) -> None:
    indent = "  " * depth
    for child in children:
        click.echo(f"{indent}{child.name} <{child.type}>{_facts(child)}")
        if not recursive:
            click.echo(_paragraph(child.doc, indent + "  ") + "\n")
        else:
            _print_fields(child.children, depth=depth + 1, recursive=True)


def _facts(field: Explanation) -> str:
    facts = ["required"] if field.required else []
    if field.default is not None and not isinstance(field.default, dict):
        default = field.default
        facts.append(
            f"default {default if isinstance(default, str) and default else json.dumps(default)}"
        )
    if field.allowed:
        facts.append(field.allowed)
    return f" ({'; '.join(facts)})" if facts else ""


def _paragraph(text: str, indent: str = "") -> str:
    return click.wrap_text(
        text, width=88, initial_indent=indent, subsequent_indent=indent, preserve_paragraphs=True
    )
